"""Models: loaded, sharded, saved, and the log-probs of training samples.

    model, tokenizer = load_model("Qwen/Qwen2.5-0.5B-Instruct", lora_rank=16)      # or tiny.create(...)
    reference = make_reference(model)                                              # before shard
    model, reference = shard(model), shard(reference)
    for indices in micro_batches(samples, micro_batch_tok=8192):
        logp_N, entropy_N, _ = token_logprobs(model, [samples[i] for i in indices])

B rows, T tokens, N trained tokens of all samples one after another, V vocabulary, H hidden.
Dropout is always off: a log-prob must be the same twice.
Left out on purpose: tensor and pipeline parallelism, sharded 4-bit models, and mixed precision on one device
(wrap the calls in `torch.autocast`).
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType

import torch
from peft import (LoraConfig, PeftModel, get_peft_model, load_peft_weights, prepare_model_for_kbit_training,
                  set_peft_model_state_dict)
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig,
                          PreTrainedModel, PreTrainedTokenizerBase)
from transformers.utils import logging as transformers_logging


MAX_KEPT_LOGITS = 2**24  # numbers (64 MiB); a larger chunk of logits is computed again in the backward
ATTENTION_TOK = 512      # attending to so many tokens costs as much as the rest of a token (in theory 6 H)

transformers_logging.disable_progress_bar()  # for files that are read in a second


# ---- load and save -----------------------------------------------------------------------------------------

def load_model(name_or_path: str, dtype: str = "auto", quantize: str = "none", lora_rank: int = 0,
               gradient_checkpointing: bool = False, device: str = "cpu", seed: int = 0,
               ) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Any Hugging Face causal LM with its tokenizer, from a folder (also one of `save_model`) or the hub.

    `dtype` is "auto" or a torch name. `quantize` "nf4" stores linear weights in 4 bits (double quantization).
    `lora_rank` > 0 freezes the model and adds adapters (alpha = 2 rank), drawn from `seed`, to all linear
    layers; a folder with adapters continues those. Raises ValueError for a missing folder or hub name, no
    network, or an architecture whose logits are not its head's plain output.
    """
    if quantize not in ("none", "nf4"):
        raise ValueError(f"quantize is {quantize!r}: choose 'none' or 'nf4'")
    base, saved_rank = _base_of(Path(name_or_path))
    if saved_rank and lora_rank not in (0, saved_rank):
        raise ValueError(f"lora_rank is {lora_rank}, but the adapters in {name_or_path!r} have rank "
                         f"{saved_rank}: leave it at 0 to continue them")
    try:
        model = _from_pretrained(base, dtype, quantize, device)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except OSError as error:
        of = f" (the base of the adapters in {name_or_path!r})" if saved_rank else ""
        raise ValueError(f"no model at {base!r}{of}: it is neither a model folder nor a hub name that can be "
                         "reached or is cached. Check the spelling, or download it where there is a network "
                         f"and give the folder. ({error})") from error
    if gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if quantize == "nf4" and (lora_rank or saved_rank):
        model = _trainable_nf4(model)
    if saved_rank:
        model = PeftModel.from_pretrained(model, name_or_path, is_trainable=True)
    elif lora_rank:
        config = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear",
                            task_type="CAUSAL_LM")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = get_peft_model(model, config)
    model.train(gradient_checkpointing)  # transformers recomputes activations in training mode only
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    _check_head(model)
    return model, tokenizer


def _base_of(path: Path) -> tuple[str, int]:
    """(where the base weights are, rank of the adapters in this folder or 0)."""
    if (path / "adapter_config.json").is_file():
        adapters = json.loads((path / "adapter_config.json").read_text())
        return adapters["base_model_name_or_path"], adapters["r"]
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"the folder '{path}' holds neither config.json nor adapter_config.json: "
                         "give the model folder itself")
    return str(path), 0


def _from_pretrained(base: str, dtype: str, quantize: str, device: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(base)
    for key, value in config.to_dict().items():
        if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    placed = {}
    if quantize == "nf4":
        compute = torch.float32 if device == "cpu" else torch.bfloat16
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                 bnb_4bit_compute_dtype=compute)
        placed = {"quantization_config": nf4, "device_map": {"": device}}
    dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=dtype,
                                                     attn_implementation="sdpa", **placed)
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        name = config.architectures[0]
        raise ValueError(f"{name} is not supported: it has no scaled-dot-product attention") from None
    return model if placed else model.to(device)


def _trainable_nf4(model: PreTrainedModel) -> PreTrainedModel:
    from bitsandbytes.nn import Linear4bit  # here, so that a machine without bitsandbytes can do all else

    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            # On a CPU, bitsandbytes repacks weights at the first eval forward: gradients are then wrong.
            module.support_avx512bf16_for_cpu = False
    return model


def _causal_lm(model: torch.nn.Module) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


@torch.no_grad()
def _check_head(model: PreTrainedModel | PeftModel) -> None:
    """Refuses an architecture that changes the logits after its head (soft cap, scale): sampler and trainer
    call the body and the head themselves."""
    causal_lm = _causal_lm(model)
    ids_BT = torch.arange(4, device=causal_lm.device)[None]
    hidden_BTH = causal_lm.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    own_BTV = causal_lm.get_output_embeddings()(hidden_BTH)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    if not torch.allclose(logits_BTV.float(), own_BTV.float(), rtol=1e-2, atol=1e-2):
        raise ValueError(f"{type(causal_lm).__name__} is not supported: its logits are not its head's plain "
                         "output. Use a model of the Llama, Qwen or Mistral kind.")


def save_model(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Writes the weights (safetensors; only the adapters of a LoRA model) and the tokenizer. All ranks call
    it; rank 0 writes the gathered state."""
    state, lora = None, isinstance(model, PeftModel)
    if isinstance(model, FSDPModule):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=lora)
        state = get_model_state_dict(model, options=options)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        # peft would else ask the hub whether the vocabulary of the base was changed
        extra = {"selected_adapters": ["default"], "save_embedding_layers": False} if lora else {}
        model.save_pretrained(folder, state_dict=state, **extra)
        tokenizer.save_pretrained(folder)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def load_weights(model: torch.nn.Module, folder: str | Path) -> None:
    """The weights of a checkpoint into a model of the same form that is not sharded yet; of LoRA only the
    adapters."""
    if isinstance(model, PeftModel):
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    else:
        model.load_state_dict(load_model(str(folder))[0].state_dict())


def trainable_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters to give to the optimizer.

    Raises ValueError if they are 16-bit: bfloat16 keeps 8 bits of a weight, so that the updates of a small
    learning rate (1e-6) round to nothing.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    half = {p.dtype for p in parameters} & {torch.bfloat16, torch.float16}
    if half:
        raise ValueError(f"trainable weights are {half}: small updates would be lost. "
                         "Load with dtype='float32', or use lora_rank.")
    return parameters


# ---- distributed -------------------------------------------------------------------------------------------

def shard(model: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    """FSDP2 over all ranks, one unit per decoder layer; untouched with one process. Ranks hold equal weights
    before.

    With `compute_dtype` (bfloat16) layers compute in it; sharded weights and gradient sums stay in fp32.
    """
    alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    if alone or isinstance(model, FSDPModule):
        return model
    causal_lm = _causal_lm(model)
    if causal_lm.config.to_dict().get("quantization_config"):
        raise ValueError("4-bit models are not sharded: run one process, or load with quantize='none' "
                         "(LoRA works sharded)")
    reduce_dtype = torch.float32 if compute_dtype else None
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    # The root is resharded, too: else a no_grad pass may leave a stale full copy beside an updated shard.
    for module in causal_lm.modules():
        if type(module).__name__ in causal_lm._no_split_modules:
            fully_shard(module, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    # A forward of our own, which FSDP must know to gather the root's weights.
    model.flat_logprobs = MethodType(_flat_logprobs, model)
    register_fsdp_forward_method(model, "flat_logprobs")
    # FSDP sets itself up at the root's first forward: make it before a rollout calls inner modules.
    model.wake = MethodType(lambda self: None, model)
    register_fsdp_forward_method(model, "wake")
    model.wake()
    return model


@contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Full parameters on every rank inside the block, so that ranks may run different numbers of forwards
    (rollouts); no-op for a model that is not sharded."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield model
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scales the gradients to a joint norm of at most `max_norm` and returns the norm before; sharded and
    plain parameters may be mixed. Raises FloatingPointError on nan or inf, with the gradients untouched."""
    grads = [p.grad for p in parameters if p.grad is not None]
    sharded = [isinstance(g, DTensor) for g in grads]
    squares = 0.0
    for kind in (True, False):
        group = [g for g, is_sharded in zip(grads, sharded) if is_sharded == kind]
        if group:
            norm = torch.nn.utils.get_total_norm(group)
            squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm).item() ** 2
    total = squares**0.5
    if not torch.isfinite(torch.tensor(total)):
        raise FloatingPointError(f"the gradient norm is {total}: look at this step's loss, its learning rate "
                                 "and its longest sample")
    if total > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (total + 1e-6))
    return total


# ---- samples and micro-batches -----------------------------------------------------------------------------

@dataclass
class TrainSample:
    """Token ids to train on; mask 1 = trained token, predicted from the tokens before it; mask[0] is 0."""
    ids: list[int]
    mask: list[int]


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def prefix_packs(samples: list[TrainSample], max_tok: float = float("inf")) -> list[tuple[list[int], int]]:
    """Groups of samples to compute as one tree of prefixes: (sample indices, number of tree nodes).

    Samples in lexicographic order are the tree's depth-first order; what a sample adds to it is what follows
    its common prefix with the sample before. A sample joins the pack before it where the layers' work saved
    on the prefix is more than the attention added by the longer row: a pack attends to all its tokens, a row
    of its own to half.
    """
    packs: list[tuple[list[int], int]] = []
    before: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: samples[i].ids):
        ids = samples[index].ids
        shared = _common_prefix(before, ids)
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
    prefix count once. A single longer sample is a batch of its own."""
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
    by all ranks together or not at all. `dist` is a run.Dist."""
    mine = micro_batches(samples, micro_batch_tok)
    return mine + [[]] * (max(dist.gather([len(mine)])) - len(mine))


@dataclass
class _Batch:
    ids_BT: torch.Tensor
    position_BT: torch.Tensor
    attention_B1TT: torch.Tensor | None  # additive; None = causal, for which right padding needs no mask
    before_N: torch.Tensor               # index into B*T of the position before each trained token
    target_N: torch.Tensor


def _make_batch(samples: list[TrainSample], packs: list[tuple[list[int], int]], causal_lm) -> _Batch:
    """Each pack as one row of tree nodes in depth-first order: node i is seen by the nodes i <= j < end[i],
    those of its own subtree. Where nothing is shared this is a plain padded batch."""
    width, device = max(nodes for _, nodes in packs), causal_lm.device
    ids_BT, position_BT = torch.zeros(2, len(packs), width, dtype=torch.long)
    end_BT = torch.arange(1, width + 1).repeat(len(packs), 1)  # padding sees itself: no mask row is empty
    paths: list[list[int]] = [[]] * len(samples)
    for b, (indices, _) in enumerate(packs):
        path, ids, nodes = [], [], 0
        for index in indices:
            shared, ids = _common_prefix(ids, samples[index].ids), samples[index].ids
            end = nodes + len(ids) - shared
            ids_BT[b, nodes:end] = torch.tensor(ids[shared:], dtype=torch.long)
            position_BT[b, nodes:end] = torch.arange(shared, len(ids))
            path = path[:shared] + list(range(nodes, end))
            end_BT[b, torch.tensor(path, dtype=torch.long)] = nodes = end  # its last sample ends a subtree
            paths[index] = [b * width + node for node in path]
    before = [paths[i][t - 1] for i, s in enumerate(samples) for t, trained in enumerate(s.mask) if trained]
    target = [token for s in samples for token, trained in zip(s.ids, s.mask) if trained]
    attention_B1TT = None
    if len(packs) < len(samples):  # else causal attention is right, and faster without a mask of its own
        column_T, end_BT = torch.arange(width, device=device), end_BT.to(device)
        seen_BTT = (column_T <= column_T[:, None]) & (column_T[:, None] < end_BT[:, None, :])
        hidden_BTT = torch.zeros(seen_BTT.shape, dtype=causal_lm.dtype, device=device)
        attention_B1TT = hidden_BTT.masked_fill_(~seen_BTT, float("-inf"))[:, None]
    before_N, target_N = (torch.tensor(x, device=device, dtype=torch.long) for x in (before, target))
    return _Batch(ids_BT.to(device), position_BT.to(device), attention_B1TT, before_N, target_N)


# ---- log-probs ---------------------------------------------------------------------------------------------

def _chunk_logprobs(head, hidden_NH, target_N, temperature: float, with_entropy: bool):
    logits_NV = head(hidden_NH).float()
    logits_NV = logits_NV if temperature == 1 else logits_NV / temperature
    if not with_entropy:
        return -torch.nn.functional.cross_entropy(logits_NV, target_N, reduction="none"), None
    log_z_N = logits_NV.logsumexp(-1)
    logp_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - log_z_N
    return logp_N, log_z_N - ((logits_NV - log_z_N[:, None]).exp() * logits_NV).sum(-1)


def _flat_logprobs(model: torch.nn.Module, batch: _Batch, temperature: float, chunk: int, with_entropy: bool):
    """(logp_N, entropy_N or None, hidden_NH): the body once, then the head at trained positions only, chunk
    by chunk; large logits are recomputed in the backward."""
    causal_lm = _causal_lm(model)
    head = causal_lm.get_output_embeddings()
    # With a cache, transformers ignores custom positions and masks in parts: use_cache must be off.
    body = causal_lm.base_model(input_ids=batch.ids_BT, attention_mask=batch.attention_B1TT,
                                position_ids=batch.position_BT, use_cache=False)
    hidden_NH = body.last_hidden_state.flatten(0, 1)[batch.before_N]
    # not by this chunk's own size: sharded ranks must agree
    recompute = torch.is_grad_enabled() and chunk * causal_lm.config.vocab_size > MAX_KEPT_LOGITS
    parts = []
    # at least one chunk, if empty: ranks without trained tokens still join the backward
    for start in range(0, max(len(hidden_NH), 1), chunk):
        part = slice(start, start + chunk)
        args = head, hidden_NH[part], batch.target_N[part], temperature, with_entropy
        parts.append(checkpoint(_chunk_logprobs, *args, use_reentrant=False) if recompute
                     else _chunk_logprobs(*args))
    logp, entropy = zip(*parts)
    return torch.cat(logp), torch.cat(entropy) if with_entropy else None, hidden_NH


def _attends_fully(config, tokens: int) -> bool:
    """Whether every layer attends to all of `tokens` tokens: a mask of our own would widen a shorter
    window."""
    types, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if types == {"full_attention"}:
        return True
    return types <= {"full_attention", "sliding_attention"} and (window is None or window >= tokens)


def token_logprobs(model: torch.nn.Module, samples: list[TrainSample], temperature: float = 1.0,
                   chunk: int = 1024, with_entropy: bool = True, with_hidden: bool = False,
                   ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(logp_N, entropy_N, hidden_NH) of all trained tokens, flat in the order of the samples.

    Entropies are in nats, of logits / temperature. hidden_NH is the last hidden state at the position before
    each trained token, for a value head. What was not asked for is None. Gradients flow unless under no_grad.
    Prefixes that samples share are computed once where that saves work: the same numbers and gradients.
    Example: ids [5, 6, 7] with mask [0, 0, 1] give one entry, log p(7 | 5, 6), and the hidden state at token
    6.
    """
    samples = samples or [TrainSample([0], [0])]  # a rank without samples still joins the others' forward
    for index, sample in enumerate(samples):
        if len(sample.ids) != len(sample.mask) or not sample.ids or sample.mask[0]:
            found = f"{len(sample.ids)} ids, {len(sample.mask)} mask entries, first mask {sample.mask[:1]}"
            raise ValueError(f"sample {index} has {found}: expected as many ids as mask entries, at least "
                             "one, and first mask 0")
    causal_lm = _causal_lm(model)
    packs = [([i], len(sample.ids)) for i, sample in enumerate(samples)]
    if _attends_fully(causal_lm.config, max(length for _, length in packs)):
        packs = prefix_packs(samples)
    forward = model.flat_logprobs if isinstance(model, FSDPModule) else partial(_flat_logprobs, model)
    batch = _make_batch(samples, packs, causal_lm)
    logp_N, entropy_N, hidden_NH = forward(batch, temperature, chunk, with_entropy)
    return logp_N, entropy_N, hidden_NH if with_hidden else None


# ---- reference policy --------------------------------------------------------------------------------------

def make_reference(model: torch.nn.Module) -> torch.nn.Module:
    """The frozen policy of a KL term: a copy, or for LoRA the model itself with a second adapter "reference".
    Call it before `shard`."""
    if isinstance(model, FSDPModule):
        raise TypeError("sharded modules cannot be copied: make the reference before shard")
    if not isinstance(model, PeftModel):
        return deepcopy(model).requires_grad_(False).eval()
    model.add_adapter("reference", model.peft_config["default"])
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if ".reference." in name:
            parameter.data.copy_(parameters[name.replace(".reference.", ".default.")].data)
            parameter.requires_grad_(False)
    return model


@contextmanager
def _adapter(model: PeftModel, name: str) -> Iterator[None]:
    # Not peft's set_adapter: it also switches requires_grad, which FSDP reads only once per parameter.
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    before = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [name]
    try:
        yield
    finally:
        for layer, active in zip(layers, before):
            layer._active_adapter = active


@torch.no_grad()
def reference_logprobs(model: torch.nn.Module, reference: torch.nn.Module, samples: list[TrainSample],
                       temperature: float = 1.0, chunk: int = 1024) -> torch.Tensor:
    """logp_N of the trained tokens under the reference of `make_reference`, without gradient."""
    if reference is not model:
        return token_logprobs(reference, samples, temperature, chunk, with_entropy=False)[0]
    with _adapter(model, "reference"):
        return token_logprobs(model, samples, temperature, chunk, with_entropy=False)[0]
