"""Largest memory of a training step (forward + backward of the log-probs): `token_logprobs` against the
obvious way, all logits of the padded batch with an attention mask. Each runs in a fresh process.

    python -m benchmarks.train_step --vocab 131072

Quote the ratio.
"""
import multiprocessing
import random
import resource
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmarks.timing import memory_mb, tiny_llama
from dreamgym.logprobs import TrainSample, micro_batches, token_logprobs

HIDDEN, LAYERS, MICRO_BATCH_TOK = 256, 2, 4096


@dataclass
class Args:
    vocab: int = 2000                 # words of the model


def naive(model, rows: list[TrainSample]) -> None:
    """Every logit of the padded batch, then log_softmax, gather and the mask."""
    width = max(len(row.ids) for row in rows)
    ids_BT, mask_BT, real_BT = (
        torch.tensor([x + [0] * (width - len(x)) for x in lists], device=model.device)
        for lists in ([r.ids for r in rows], [r.mask for r in rows], [[1] * len(r.ids) for r in rows]))
    logits_BTV = model(input_ids=ids_BT, attention_mask=real_BT, use_cache=False).logits[:, :-1]
    logp_BT = logits_BTV.float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    (-(logp_BT * mask_BT[:, 1:]).sum()).backward()


def ours(model, rows: list[TrainSample]) -> None:
    for indices in micro_batches(rows, MICRO_BATCH_TOK):
        (-token_logprobs(model, [rows[i] for i in indices], with_entropy=False)[0].sum()).backward()


def growth_mb(run, vocab: int) -> float:
    """Of one step on four rows of 256 tokens, a fifth trained."""
    rng = random.Random(0)
    rows = [TrainSample(rng.choices(range(1000), k=256), [0] + [int(rng.random() < 0.2) for _ in range(255)])
            for _ in range(4)]
    run(tiny_llama(2000, 64, 3), rows)                                       # warms up
    model, before_mb = tiny_llama(vocab, HIDDEN, LAYERS), memory_mb()
    Path("/proc/self/clear_refs").write_text("5")                            # the peak begins anew
    run(model, rows)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6 - before_mb


def main(args: Args) -> None:
    used = []
    for run in (naive, ours):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            used.append(pool.apply(growth_mb, (run, args.vocab)))
    print(f"all logits {used[0]:.0f} MB, ours {used[1]:.0f} MB: {used[0] / used[1]:.2f} times less")


if __name__ == "__main__":
    main(tyro.cli(Args))
