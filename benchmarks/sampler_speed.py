"""Speed of dreamgym.sampler.Sampler against `model.generate` called anew each turn, as a table of ratios.

    python -m benchmarks.sampler_speed          # tiny model, 16 tasks x 8 rollouts, 4 turns, one CPU thread
    python -m benchmarks.sampler_speed --tasks 2 --hidden 256 --layers 6 --vocab 8192

Random weights. Every variant generates the same number of tokens in every row and turn (forced lengths,
temperature 1) on the same prompts and observations. Variants are interleaved within one process: quote the
ratios.
"""
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from transformers import StoppingCriteria

from benchmarks.timing import cpu_s, tiny_llama
from dreamgym.sampler import Sampler


@dataclass
class Args:
    tasks: int = 16        # distinct prompts
    rollouts: int = 8      # rows of each
    turns: int = 4         # answers of a row
    new: int = 80          # most tokens of an answer
    hidden: int = 64       # of the model ...
    layers: int = 3        # ...
    vocab: int = 700       # ...
    reps: int = 3          # workloads; the median counts
    threads: int = 1       # of torch
    device: str = "cpu"    # or cuda


class ForcedLength(StoppingCriteria):
    """Ends row b of `generate` at end_B[b] tokens."""

    def __init__(self, end_B: torch.Tensor):
        self.end_B = end_B

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.end_B


def generate_anew(model, prompts, length_B):
    """The obvious way: left-pad the whole contexts and call generate."""
    longest, device = max(map(len, prompts)), model.device
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    stop = ForcedLength(longest + torch.from_numpy(length_B).to(device))
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=int(length_B.max()),
                         stopping_criteria=[stop], do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                         eos_token_id=None, pad_token_id=0)
    return [row[:n] for row, n in zip(out[:, longest:].tolist(), length_B)]


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
    prompts = [task for task in texts(args.tasks, 50, 101) for _ in range(args.rollouts)]
    return prompts, [(rng.integers(5, args.new + 1, rows), texts(rows, 10, 41)) for _ in range(args.turns)]


def decode_step_ms(model, rows: int, context: int, length: int, device: str) -> float:
    """Milliseconds per decode step with all rows alive."""
    sampler, keys = Sampler(model, rows, context, [], 0), list(range(rows))
    prompts = np.random.default_rng(0).integers(1, model.config.vocab_size, (rows, length)).tolist()
    _, once, many = (cpu_s(sampler.sample, prompts, keys, new, 1.0, device=device)[0] for new in (1, 1, 21))
    return (many - once) / 20 * 1e3


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    model = tiny_llama(args.vocab, args.hidden, args.layers).to(args.device)
    rows, context = args.tasks * args.rollouts, 100 + args.turns * (args.new + 40) + 64
    kept, forgetful, narrow = (Sampler(model, s, context, [], 0) for s in (rows, rows, max(1, rows // 4)))

    def forget(prompts, length_B):
        forgetful.clear_caches()
        return sample_with(forgetful, prompts, length_B)

    variants = {
        "model.generate anew each turn": lambda p, n: generate_anew(model, p, n),
        "Sampler, caches cleared each turn": forget,
        "Sampler, a quarter of the slots": lambda p, n: sample_with(narrow, p, n),
        "Sampler": lambda p, n: sample_with(kept, p, n),
    }
    seconds = {name: [] for name in variants}
    for rep in range(args.reps):
        work = make_work(args, np.random.default_rng(rep))
        for name, answer in variants.items():
            kept.clear_caches()
            narrow.clear_caches()
            seconds[name].append(play(answer, work, args.device))
    base = np.array(seconds["model.generate anew each turn"])
    print(f"{args}\n\n| variant | s (median of {args.reps}) | times faster (min-max) |\n|---|---|---|")
    for name, spent in seconds.items():
        least, middle, most = np.quantile(base / np.array(spent), [0, 0.5, 1])
        print(f"| {name} | {np.median(spent):.2f} | {middle:.2f} ({least:.2f}-{most:.2f}) |")
    for length in (64, 192, 320):
        step_ms = decode_step_ms(model, rows, context, length, args.device)
        print(f"{step_ms:.1f} ms per decode step of {rows} rows at {length} tokens")


if __name__ == "__main__":
    main(tyro.cli(Args))
