"""Speed of dreamgym.sampler.Sampler against `model.generate` called anew each turn, as a table of ratios.

    python -m benchmarks.sampler_speed          # tiny model, 16 tasks x 8 rollouts, 4 turns, one CPU thread
    python -m benchmarks.sampler_speed --tasks 2 --hidden 256 --layers 6 --vocab 8192

Random weights. Every variant generates the same number of tokens in every row and turn (forced lengths,
temperature 1, no top-k or top-p) on the same prompts and observations. Variants are interleaved within one
process and timed in CPU seconds, or wall seconds on a GPU: quote the ratios, not the seconds. """

import argparse
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria

from dreamgym.sampler import Sampler


class ForcedLength(StoppingCriteria):
    """Ends row b of `generate` after length_B[b] new tokens."""

    def __init__(self, start: int, length_B: np.ndarray, device):
        self.end_B = torch.from_numpy(start + length_B).to(device)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.end_B


def generate_anew(model, prompts, length_B):
    """The obvious way: left-pad the whole contexts and call generate."""
    longest = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, p in enumerate(prompts):
        ids[b, longest - len(p) :], mask[b, longest - len(p) :] = torch.tensor(p), 1
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=int(length_B.max()),
        stopping_criteria=[ForcedLength(longest, length_B, model.device)],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=False,
    )
    new = out.sequences[:, longest:].tolist()
    return [row[:n] for row, n in zip(new, length_B)]


def sample_with(sampler, prompts, length_B):
    """Sampler.sample with a length forced per row."""
    begin = sampler._begin

    def forced(*args):
        jobs = begin(*args)
        for job, length in zip(jobs, length_B):
            job.limit = int(length)
        return jobs

    sampler._begin = forced
    out = sampler.sample(prompts, list(range(len(prompts))), int(length_B.max()), 1.0)
    del sampler._begin
    return [s.ids for s in out]


def play(answer, work, clock):
    """Runs all turns of one workload; returns seconds spent answering."""
    prompts = [list(p) for p in work["prompts"]]
    spent = 0.0
    for length_B, observations in zip(work["lengths"], work["observations"]):
        start = clock()
        new = answer(prompts, length_B)
        spent += clock() - start
        assert [len(n) for n in new] == length_B.tolist(), "a variant did not generate the forced lengths"
        prompts = [p + n + o for p, n, o in zip(prompts, new, observations)]
    return spent


def make_work(args, rng):
    B = args.tasks * args.rollouts
    tasks = [rng.integers(1, args.vocab, rng.integers(50, 101)).tolist() for _ in range(args.tasks)]
    return {
        "prompts": [t for t in tasks for _ in range(args.rollouts)],
        "lengths": [rng.integers(5, args.new + 1, B) for _ in range(args.turns)],
        "observations": [
            [rng.integers(1, args.vocab, rng.integers(10, 41)).tolist() for _ in range(B)]
            for _ in range(args.turns)
        ],
    }


def decode_step_ms(model, rows, context, clock):
    """Milliseconds per decode step with all rows alive, at three context lengths."""
    result = []
    for length in (64, 192, 320):
        sampler = Sampler(model, rows, context, [], 0)
        prompts = [
            np.random.default_rng(b).integers(1, model.config.vocab_size, length).tolist()
            for b in range(rows)
        ]
        sampler.sample(prompts, list(range(rows)), 1, 1.0)
        start = clock()
        sampler.sample(prompts, list(range(rows)), 1, 1.0)
        once = clock() - start
        start = clock()
        sampler.sample(prompts, list(range(rows)), 21, 1.0)
        result.append((length, (clock() - start - once) / 20 * 1e3))
    return result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "tasks": 16,
        "rollouts": 8,
        "turns": 4,
        "new": 80,
        "hidden": 64,
        "layers": 3,
        "heads": 4,
        "vocab": 700,
        "reps": 3,
        "threads": 1,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval().to(args.device)
    on_gpu = model.device.type != "cpu"

    def clock():
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() if on_gpu else time.process_time()

    rows = args.tasks * args.rollouts
    context = 100 + args.turns * (args.new + 40) + 64
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
            seconds[name].append(play(answer, work, clock))
    base = np.array(seconds["model.generate anew each turn"])
    shape = f"hidden {args.hidden}, {args.layers} layers, V {args.vocab}"
    print(
        f"{rows} rows ({args.tasks} tasks x {args.rollouts}), {args.turns} turns, "
        f"5-{args.new} new tokens, {shape}"
    )
    print(
        f"\n| variant | {'wall' if on_gpu else 'CPU'} s (median of {args.reps}) "
        "| times faster (min-max) |\n|---|---|---|"
    )
    for name, s in seconds.items():
        ratio = base / np.array(s)
        print(
            f"| {name} | {np.median(s):.2f} | {np.median(ratio):.2f} ({ratio.min():.2f}-{ratio.max():.2f}) |"
        )
    steps = ", ".join(
        f"{ms:.1f} at {length} tokens" for length, ms in decode_step_ms(model, rows, context, clock)
    )
    print(f"\nms per decode step, {rows} rows: {steps}")


if __name__ == "__main__":
    main()
