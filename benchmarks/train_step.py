"""Time of a training step (forward + backward of the log-probs) of `token_logprobs` against the obvious way:
all logits of the padded batch with an attention mask.

    python -m benchmarks.train_step                     # one to two CPU minutes on one core
    python -m benchmarks.train_step --device cuda
    python -m benchmarks.train_step --memory --sizes h256 --vocab 131072     # largest memory, of a CPU

Variants alternate within one process and the median of the repetitions counts: quote the ratios.
"""
import multiprocessing
import random
import resource
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro

from benchmarks.timing import cpu_s, memory_mb, tiny_llama
from dreamgym.logprobs import TrainSample, micro_batches, prefix_packs, token_logprobs

SIZES = {"h64": (64, 3), "h128": (128, 3), "h256": (256, 2), "h384": (384, 4)}     # hidden, layers


@dataclass
class Args:
    device: str = "cpu"               # or cuda
    sizes: str = "h64,h128"           # comma-separated: h64, h128, h256, h384
    vocab: int = 2000                 # words of the model
    repetitions: int = 5              # steps per variant; the median counts
    micro_batch_tok: int = 4096       # of ours
    memory: bool = False              # by how much a step raises the largest memory of a fresh process


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(count)]


def ragged(rng: random.Random) -> list[TrainSample]:
    """Unrelated rows, a fifth of their tokens trained, as in an episode of pages and short actions."""
    lengths = [rng.randrange(60, 400) for _ in range(16)]
    return [TrainSample(tokens(rng, n), [0] + [int(rng.random() < 0.2) for _ in range(n - 1)])
            for n in lengths]


def group(rng: random.Random) -> list[TrainSample]:
    """Rollouts: groups of 8 rows that share a prompt."""
    prompts = [tokens(rng, 100) for _ in range(4)]
    return [TrainSample(prompt + tokens(rng, 60), [0] * 100 + [1] * 60)
            for prompt in prompts for _ in range(8)]


def steps(rng: random.Random) -> list[TrainSample]:
    """Experience-model rows of 6 steps: the trunk so far and a branch of 70, of which 30 are the trained
    answer."""
    trunks = [tokens(rng, 150) for _ in range(4)]
    return [TrainSample(trunk[:25 * t] + tokens(rng, 70), [0] * (25 * t + 40) + [1] * 30)
            for trunk in trunks for t in range(1, 7)]


def naive(model, rows: list[TrainSample], micro_batch_tok: int) -> None:
    """Every logit of the padded batch, then log_softmax, gather and the mask."""
    width = max(len(row.ids) for row in rows)
    ids_BT, mask_BT, real_BT = (
        torch.tensor([x + [0] * (width - len(x)) for x in lists], device=model.device)
        for lists in ([r.ids for r in rows], [r.mask for r in rows], [[1] * len(r.ids) for r in rows]))
    logits_BTV = model(input_ids=ids_BT, attention_mask=real_BT, use_cache=False).logits[:, :-1]
    logp_BT = logits_BTV.float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    (-(logp_BT * mask_BT[:, 1:]).sum()).backward()


def ours(model, rows: list[TrainSample], micro_batch_tok: int) -> None:
    for indices in micro_batches(rows, micro_batch_tok):
        (-token_logprobs(model, [rows[i] for i in indices], with_entropy=False)[0].sum()).backward()


def growth_mb(run, size: str, args: Args) -> float:
    """Of one step on four rows of 256 tokens, a fifth trained."""
    rng = random.Random(0)
    rows = [TrainSample(tokens(rng, 256), [0] + [int(rng.random() < 0.2) for _ in range(255)])
            for _ in range(4)]
    run(tiny_llama(2000, *SIZES["h64"]), rows, args.micro_batch_tok)         # warms up
    model, before_mb = tiny_llama(args.vocab, *SIZES[size]), memory_mb()
    Path("/proc/self/clear_refs").write_text("5")                            # the peak begins anew
    run(model, rows, args.micro_batch_tok)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6 - before_mb


def print_memory(args: Args) -> None:
    print("| size | naive MB | ours MB | times less |\n|---|---|---|---|")
    for size in args.sizes.split(","):
        used = []
        for run in (naive, ours):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                used.append(pool.apply(growth_mb, (run, size, args)))
        print(f"| {size} | {used[0]:.0f} | {used[1]:.0f} | {used[0] / used[1]:.2f} |", flush=True)


def main(args: Args) -> None:
    if args.memory:
        return print_memory(args)
    print("| size | workload | tokens | nodes | naive s | ours, times faster |\n|---|---|---|---|---|---|")
    for size in args.sizes.split(","):
        model = tiny_llama(args.vocab, *SIZES[size]).to(args.device)
        for workload in (ragged, group, steps):
            rows, times = workload(random.Random(0)), {naive: [], ours: []}
            for repetition in range(args.repetitions + 1):
                for run, spent in times.items():
                    model.zero_grad()
                    seconds, _ = cpu_s(run, model, rows, args.micro_batch_tok, device=args.device)
                    spent += [seconds] if repetition else []             # the first warms up
            base, own = map(median, times.values())
            nodes = sum(nodes for _, nodes in prefix_packs(rows))
            n_tok = sum(len(row.ids) for row in rows)
            print(f"| {size} | {workload.__name__} | {n_tok} | {nodes} | {base:.3f} | {base / own:.2f} |",
                  flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
