"""Log-probs of training samples: rows packed by their shared prefixes, the head chunk by chunk.

    for indices in micro_batches(samples, micro_batch_tok=8192):
        logp_N, entropy_N, _ = token_logprobs(model, [samples[i] for i in indices])

B rows, T tokens, N trained tokens of all samples one after another, V vocabulary, H hidden.
"""
from dataclasses import dataclass
from functools import partial

import torch
from rapidfuzz.distance import Prefix
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dreamgym.model import (adapter, attends_fully, autocast, checkpointing_enabled, compute_dtype,
                            in_forward, without_adapters)

CHUNK = 1024             # trained tokens per application of the head
MAX_KEPT_LOGITS = 2**24  # numbers (64 MiB); a larger chunk of logits is computed again in the backward
ATTENTION_TOK = 512      # attending to so many tokens costs as much as the rest of a token (in theory 6 H)


# ---- samples and micro-batches ----

@dataclass
class TrainSample:
    """Token ids to train on; mask 1 = trained token, predicted from the tokens before it; mask[0] is 0. A
    TokenSegment is one, too."""
    ids: list[int]
    mask: list[int]


def prefix_packs(samples: list[TrainSample], max_tok: float = float("inf")) -> list[tuple[list[int], int]]:
    """Groups of samples to compute as one tree of prefixes: (sample indices, number of tree nodes).

    Lexicographic order is the tree's depth-first order. A sample joins the pack before it where the layers'
    work saved on the common prefix is more than the attention added by the longer row: a pack attends to all
    its tokens, a row of its own to half.
    """
    packs: list[tuple[list[int], int]] = []
    before: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: samples[i].ids):
        ids = samples[index].ids
        shared = Prefix.similarity(before, ids)
        added, nodes = len(ids) - shared, packs[-1][1] if packs else 0
        more_attention = added * (2 * nodes + added) - len(ids) ** 2 / 2
        if shared and more_attention < ATTENTION_TOK * shared and nodes + added <= max_tok:
            packs[-1] = (packs[-1][0] + [index], nodes + added)
        else:
            packs.append(([index], len(ids)))
        before = ids
    return packs


def micro_batches(samples: list[TrainSample], micro_batch_tok: int) -> list[list[int]]:
    """Sample indices in batches of at most `micro_batch_tok` padded tokens, longest first; tokens of a shared
    prefix count once."""
    batches: list[list[int]] = []
    count = width = 0
    for indices, length in sorted(prefix_packs(samples, micro_batch_tok), key=lambda pack: -pack[1]):
        # much shorter ones would be mostly padding
        if not batches or (count + 1) * width > micro_batch_tok or 2 * length < width:
            batches.append([])
            count, width = 0, length
        batches[-1] += indices
        count += 1
    return batches


def even_micro_batches(samples: list[TrainSample], micro_batch_tok: int, dist) -> list[list[int]]:
    """`micro_batches`, with empty ones at the end until every rank has as many: sharded weights are gathered
    by all ranks together or not at all."""
    mine = micro_batches(samples, micro_batch_tok)
    return mine + [[]] * (max(dist.gather([len(mine)])) - len(mine))


# ---- log-probs ----

def token_logprobs(model: torch.nn.Module, samples: list[TrainSample], with_entropy: bool = True,
                   ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(logp_N, entropy_N, hidden_NH) of all trained tokens, flat in the order of the samples.

    Entropies are in nats. hidden_NH is the last hidden state at the position before each trained token, for a
    value head. Example: ids [5, 6, 7] with mask [0, 0, 1] give one entry, log p(7 | 5, 6), and the hidden
    state at token 6.
    """
    samples = samples or [TrainSample([0], [0])]  # a rank without samples still joins the others' forward
    assert all(len(s.ids) == len(s.mask) and s.mask[0] == 0 for s in samples), "masks do not fit the ids"
    causal_lm = without_adapters(model)
    packs = [([i], len(sample.ids)) for i, sample in enumerate(samples)]
    # a mask of our own would widen a window shorter than a sample
    if attends_fully(causal_lm.config, max(length for _, length in packs)):
        packs = prefix_packs(samples)
    batch = _make_batch(samples, packs, causal_lm)
    with autocast(causal_lm), checkpointing_enabled(causal_lm):
        return in_forward(causal_lm, _flat_logprobs, *batch, with_entropy)


def _make_batch(samples: list[TrainSample], packs: list[tuple[list[int], int]], causal_lm: PreTrainedModel):
    """(inputs of the body, index into B*T of the position before each trained token [N], that token [N]).

    Each pack is one row of tree nodes in depth-first order: node i is seen by the nodes i <= j < end[i],
    those of its own subtree. Where nothing is shared this is a plain padded batch.
    """
    width, device = max(nodes for _, nodes in packs), causal_lm.device
    ids_BT = torch.zeros(len(packs), width, dtype=torch.long)
    # padding goes on counting: a position that falls would look like packed rows to transformers, which
    # would then mask them
    position_BT = torch.arange(width).repeat(len(packs), 1)
    end_BT = torch.arange(1, width + 1).repeat(len(packs), 1)  # padding sees itself: no mask row is empty
    paths: list[list[int]] = [[]] * len(samples)
    for b, (indices, _) in enumerate(packs):
        path, ids, end = [], [], 0
        for index in indices:
            shared, ids = Prefix.similarity(ids, samples[index].ids), samples[index].ids
            path = path[:shared] + list(range(end, end + len(ids) - shared))
            end += len(ids) - shared
            ids_BT[b, path], position_BT[b, path] = torch.tensor(ids), torch.arange(len(ids))
            end_BT[b, path] = end  # the last sample through a node ends its subtree
            paths[index] = [b * width + node for node in path]
    before = [paths[i][t - 1] for i, s in enumerate(samples) for t, trained in enumerate(s.mask) if trained]
    target = [token for s in samples for token, trained in zip(s.ids, s.mask) if trained]
    attention_B1TT = None
    if len(packs) < len(samples):  # else causal attention is right, and faster without a mask of its own
        node_T1 = torch.arange(width, device=device)[:, None]
        hidden_BTT = (node_T1.T > node_T1) | (node_T1 >= end_BT.to(device)[:, None])
        attention_B1TT = torch.where(hidden_BTT, float("-inf"), 0.0)[:, None].to(compute_dtype(causal_lm))
    # With a cache, transformers ignores custom positions and masks in parts: use_cache must be off.
    inputs = {"input_ids": ids_BT.to(device), "position_ids": position_BT.to(device),
              "attention_mask": attention_B1TT, "use_cache": False}
    return inputs, *torch.tensor([before, target], dtype=torch.long, device=device)


def _flat_logprobs(causal_lm: PreTrainedModel, inputs: dict, before_N: torch.Tensor, target_N: torch.Tensor,
                   with_entropy: bool):
    """The body once, then the head at trained positions only, chunk by chunk."""
    head = causal_lm.get_output_embeddings()
    hidden_NH = causal_lm.base_model(**inputs).last_hidden_state.flatten(0, 1)[before_N]
    chunk = lambda part_NH, part_N: _chunk_logprobs(head(part_NH).float(), part_N, with_entropy)
    # by CHUNK, not by this chunk's own size: sharded ranks must agree
    if CHUNK * causal_lm.config.vocab_size > MAX_KEPT_LOGITS:
        chunk = partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=False)
    # split: at least one chunk, if empty, so that ranks without trained tokens join the backward
    logp, entropy = zip(*map(chunk, hidden_NH.split(CHUNK), target_N.split(CHUNK)))
    return torch.cat(logp), torch.cat(entropy) if with_entropy else None, hidden_NH


def _chunk_logprobs(logits_NV, target_N, with_entropy: bool):
    if not with_entropy:
        return -F.cross_entropy(logits_NV, target_N, reduction="none"), None
    log_z_N = logits_NV.logsumexp(-1)
    logp_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - log_z_N
    return logp_N, log_z_N - ((logits_NV - log_z_N[:, None]).exp() * logits_NV).sum(-1)


# ---- reference policy ----

@torch.no_grad()
def reference_logprobs(reference: torch.nn.Module, samples: list[TrainSample]) -> torch.Tensor:
    """logp_N of the trained tokens under load_frozen(..., "reference")."""
    with adapter(reference, "reference"):
        return token_logprobs(reference, samples, with_entropy=False)[0]
