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

import numpy as np
import torch
import tyro
from transformers import DynamicCache, StoppingCriteria

from benchmarks.timing import cpu_s, tiny_llama
from dreamgym.sampler import Sampler


TASKS, ROLLOUTS = 2, 8                 # distinct prompts, rows of each
ROWS = TASKS * ROLLOUTS
TURNS = 6                              # answers of a row
PROMPT, OBSERVATION, NEW = 400, 200, 60    # most tokens; the least are half of them, of an answer 5
REPS = 3                               # workloads; the median counts


@dataclass
class Args:
    hidden: int = 64       # of the model ...
    layers: int = 3        # ...
    vocab: int = 2000      # ...


class ForcedLength(StoppingCriteria):
    """Ends row b of `generate` at end_B[b] tokens."""

    def __init__(self, end_B: torch.Tensor):
        self.end_B = end_B

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.end_B


class Generate:
    """model.generate on left-padded contexts with the forced lengths. In the next turn it gets its own cache
    back, with what is new: the mask has holes where rows ended early."""

    def __init__(self, model):
        self.model, self.cache, self.seen = model, DynamicCache(), [0] * ROWS
        self.ids_BT = self.mask_BT = torch.zeros(ROWS, 0, dtype=torch.long)

    def __call__(self, prompts, length_B):
        new = [p[n:] for p, n in zip(prompts, self.seen)]
        longest, length_B1 = max(map(len, new)), torch.from_numpy(length_B)[:, None]
        padded = lambda rows: torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        ids_BT = torch.cat([self.ids_BT, padded(new)], 1)
        mask_BT = torch.cat([self.mask_BT, padded([[1] * len(row) for row in new])], 1)
        start = ids_BT.shape[1]
        self.ids_BT = self.model.generate(
            input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=int(length_B.max()), do_sample=True,
            past_key_values=self.cache, stopping_criteria=[ForcedLength(start + length_B1[:, 0])],
            temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0)
        step_T = torch.arange(self.ids_BT.shape[1] - start)
        self.mask_BT = torch.cat([mask_BT, (step_T < length_B1).long()], 1)
        self.seen = [len(p) + n for p, n in zip(prompts, length_B)]
        return [row[:n] for row, n in zip(self.ids_BT[:, start:].tolist(), length_B)]


class ForcedSampler(Sampler):
    """Generates length_B[b] tokens in row b."""

    def __call__(self, prompts, length_B):
        return [sample.ids for sample in self.sample(prompts, list(range(ROWS)), length_B, 1.0)]

    def _begin(self, prompts, keys, length_B, temperature):
        jobs = super()._begin(prompts, keys, int(length_B.max()), temperature)
        for job, length in zip(jobs, length_B.tolist()):
            job.limit = length
        return jobs


def play(answer, work) -> float:
    """Seconds spent answering in all turns of one workload."""
    (prompts, turns), spent = work, 0.0
    for length_B, observations in turns:
        seconds, new = cpu_s(answer, prompts, length_B)
        spent += seconds
        assert [len(n) for n in new] == length_B.tolist(), "a variant did not generate the forced lengths"
        prompts = [p + n + o for p, n, o in zip(prompts, new, observations)]
    return spent


def make_work(vocab: int, seed: int):
    """(prompts, one (answer lengths, observations) a turn)."""
    rng = np.random.default_rng(seed)
    texts = lambda count, most: [rng.integers(1, vocab, rng.integers(most // 2, most + 1)).tolist()
                                 for _ in range(count)]
    prompts = [task for task in texts(TASKS, PROMPT) for _ in range(ROLLOUTS)]
    return prompts, [(rng.integers(5, NEW + 1, ROWS), texts(ROWS, OBSERVATION)) for _ in range(TURNS)]


def main(args: Args) -> None:
    torch.set_num_threads(1)
    model = tiny_llama(args.vocab, args.hidden, args.layers)
    sampler = ForcedSampler(model, ROWS, PROMPT + TURNS * (NEW + OBSERVATION) + 64, [], 0)
    seconds = defaultdict(list)
    play(sampler, make_work(args.vocab, 99))      # warms up
    for rep in range(REPS):
        work = make_work(args.vocab, rep)
        sampler.clear_caches()
        for name, variant in {
                "model.generate anew each turn": lambda *turn: Generate(model)(*turn),
                "model.generate, its cache kept": Generate(model),
                "Sampler": sampler}.items():
            seconds[name].append(play(variant, work))
    own = np.array(seconds["Sampler"])
    print(f"{args}\n{sum(p.numel() for p in model.parameters()):,} parameters\n")
    print(f"| variant | s (median of {REPS}) | its time over the Sampler's (min-max) |\n|---|---|---|")
    for name, spent in seconds.items():
        least, middle, most = np.quantile(np.array(spent) / own, [0, 0.5, 1])
        print(f"| {name} | {np.median(spent):.2f} | {middle:.2f} ({least:.2f}-{most:.2f}) |")


if __name__ == "__main__":
    main(tyro.cli(Args))
