"""Speed of dreamgym.sampler.Sampler over the turns of rollouts, as a table of ratios: against
`model.generate` called anew each turn, and against `generate` with its cache kept.

    python -m benchmarks.sampler_speed          # 0.28M parameters, 2 tasks x 8 rollouts, 6 turns, one thread
    python -m benchmarks.sampler_speed --hidden 256 --layers 6 --vocab 8192          # 6.8M

Random weights. Every variant generates the same number of tokens in every row and turn (forced lengths,
temperature 1) on the same prompts and observations. Variants are interleaved within one process: quote the
ratios.
"""
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import tyro
from transformers import DynamicCache, StoppingCriteria

from benchmarks.timing import cpu_s, tiny_llama
from dreamgym.sampler import Sampler


@dataclass
class Args:
    tasks: int = 2         # distinct prompts
    rollouts: int = 8      # rows of each
    turns: int = 6         # answers of a row
    prompt: int = 400      # most tokens of a prompt; the least is half of it
    observation: int = 200  # ... of an observation, the same
    new: int = 60          # most tokens of an answer; the least is 5
    hidden: int = 64       # of the model ...
    layers: int = 3        # ...
    vocab: int = 2000      # ...
    reps: int = 3          # workloads; the median counts
    threads: int = 1       # of torch
    device: str = "cpu"    # or cuda


class ForcedLength(StoppingCriteria):
    """Ends row b of `generate` at end_B[b] tokens."""

    def __init__(self, end_B: torch.Tensor):
        self.end_B = end_B

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.end_B


class Generate:
    """model.generate on left-padded contexts with the forced lengths. In the next turn it gets its own cache
    back, with what is new: the mask has holes where rows ended early."""

    def __init__(self, model, rows: int):
        self.model, self.cache, self.seen = model, DynamicCache(), [0] * rows
        self.ids_BT = self.mask_BT = torch.zeros(rows, 0, dtype=torch.long, device=model.device)

    def __call__(self, prompts, length_B):
        new = [p[n:] for p, n in zip(prompts, self.seen)]
        longest, length_B1 = max(map(len, new)), torch.from_numpy(length_B)[:, None].to(self.model.device)
        padded = lambda rows: torch.tensor([[0] * (longest - len(row)) + row for row in rows]).to(self.ids_BT)
        ids_BT = torch.cat([self.ids_BT, padded(new)], 1)
        mask_BT = torch.cat([self.mask_BT, padded([[1] * len(row) for row in new])], 1)
        start = ids_BT.shape[1]
        self.ids_BT = self.model.generate(
            input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=int(length_B.max()), do_sample=True,
            past_key_values=self.cache, stopping_criteria=[ForcedLength(start + length_B1[:, 0])],
            temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0)
        step_T = torch.arange(self.ids_BT.shape[1] - start, device=self.model.device)
        self.mask_BT = torch.cat([mask_BT, (step_T < length_B1).to(mask_BT)], 1)
        self.seen = [len(p) + n for p, n in zip(prompts, length_B)]
        return [row[:n] for row, n in zip(self.ids_BT[:, start:].tolist(), length_B)]


def sample_with(sampler, prompts, length_B):
    """Sampler.sample with a length forced per row."""
    begin = sampler._begin

    def forced(*args):
        jobs = begin(*args)
        for job, length in zip(jobs, length_B.tolist()):
            job.limit = length
        return jobs

    sampler._begin = forced
    out = sampler.sample(prompts, list(range(len(prompts))), int(length_B.max()), 1.0)
    del sampler._begin
    return [s.ids for s in out]


def play(answer, work, device: str) -> float:
    """Runs all turns of one workload; returns seconds spent answering."""
    prompts, turns = work
    spent = 0.0
    for length_B, observations in turns:
        seconds, new = cpu_s(answer, prompts, length_B, device=device)
        spent += seconds
        assert [len(n) for n in new] == length_B.tolist(), "a variant did not generate the forced lengths"
        prompts = [p + n + o for p, n, o in zip(prompts, new, observations)]
    return spent


def make_work(args: Args, rng: np.random.Generator):
    """(prompts, one (answer lengths, observations) a turn)."""
    def texts(count, least, most):
        return [rng.integers(1, args.vocab, rng.integers(least, most)).tolist() for _ in range(count)]

    rows = args.tasks * args.rollouts
    first = texts(args.tasks, args.prompt // 2, args.prompt + 1)
    return [task for task in first for _ in range(args.rollouts)], [
        (rng.integers(5, args.new + 1, rows), texts(rows, args.observation // 2, args.observation + 1))
        for _ in range(args.turns)]


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    model = tiny_llama(args.vocab, args.hidden, args.layers).to(args.device)
    context = args.prompt + args.turns * (args.new + args.observation) + 64
    rows = args.tasks * args.rollouts
    sampler = Sampler(model, rows, context, [], 0)
    answer, seconds = partial(sample_with, sampler), defaultdict(list)
    play(answer, make_work(args, np.random.default_rng(99)), args.device)      # warms up
    for rep in range(args.reps):
        work = make_work(args, np.random.default_rng(rep))
        sampler.clear_caches()
        for name, variant in {
                "model.generate anew each turn": lambda p, n: Generate(model, rows)(p, n),
                "model.generate, its cache kept": Generate(model, rows),
                "Sampler": answer}.items():
            seconds[name].append(play(variant, work, args.device))
    own = np.array(seconds["Sampler"])
    print(f"{args}\n{sum(p.numel() for p in model.parameters()):,} parameters\n")
    print(f"| variant | s (median of {args.reps}) | its time over the Sampler's (min-max) |\n|---|---|---|")
    for name, spent in seconds.items():
        least, middle, most = np.quantile(np.array(spent) / own, [0, 0.5, 1])
        print(f"| {name} | {np.median(spent):.2f} | {middle:.2f} ({least:.2f}-{most:.2f}) |")


if __name__ == "__main__":
    main(tyro.cli(Args))
