"""Time of a training step (forward + backward of the log-probs) of `token_logprobs` against the obvious
alternatives, as a table of ratios.

    python benchmarks/train_step.py                     # one to two CPU minutes on one core
    python benchmarks/train_step.py --device cuda

CPU seconds on a CPU (`time.process_time`, one thread), else wall seconds after a synchronise; variants
alternate within one process and the median of the repetitions counts, so only ratios should be quoted.
Baseline of each workload: all logits of the padded batch with an attention mask. """

import argparse
import random
import time
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dreamgym.model import TrainSample, micro_batches, prefix_packs, token_logprobs

SIZES = {
    "h64": (64, 224, 3),
    "h128": (128, 448, 3),
    "h384": (384, 1024, 4),
}  # hidden, intermediate, layers; 4 heads


def ragged(rng: random.Random, vocab: int) -> list[TrainSample]:
    """16 unrelated rows of 60-400 tokens, a fifth of them trained, as in an episode of pages and short
    actions."""
    rows = [TrainSample([rng.randrange(vocab) for _ in range(rng.randrange(60, 400))], []) for _ in range(16)]
    for row in rows:
        row.mask = [0] + [int(rng.random() < 0.2) for _ in row.ids[1:]]
    return rows


def group(rng: random.Random, vocab: int, groups: int = 4) -> list[TrainSample]:
    """Rollouts: 4 groups of 8 rows that share a prompt of 100 tokens and have tails of 60."""
    rows = []
    for _ in range(groups):
        prompt = [rng.randrange(vocab) for _ in range(100)]
        rows += [
            TrainSample(prompt + [rng.randrange(vocab) for _ in range(60)], [0] * 100 + [1] * 60)
            for _ in range(8)
        ]
    return rows


def steps(rng: random.Random, vocab: int, episodes: int = 4) -> list[TrainSample]:
    """Experience-model rows: 4 episodes of 6 steps, each the trunk of 150 tokens so far and a branch of 70,
    of which 30 are the trained answer."""
    rows = []
    for _ in range(episodes):
        trunk = [rng.randrange(vocab) for _ in range(150)]
        rows += [
            TrainSample(
                trunk[: 25 * t] + [rng.randrange(vocab) for _ in range(70)], [0] * (25 * t + 40) + [1] * 30
            )
            for t in range(1, 7)
        ]
    return rows


def naive_loss(model: LlamaForCausalLM, rows: list[TrainSample]) -> torch.Tensor:
    """Every logit of the padded batch, then log_softmax, gather and the mask."""
    width = max(len(row.ids) for row in rows)
    ids_BT, mask_BT, real_BT = (
        torch.tensor([x + [0] * (width - len(x)) for x in lists], device=model.device)
        for lists in ([r.ids for r in rows], [r.mask for r in rows], [[1] * len(r.ids) for r in rows])
    )
    logp_BTV = (
        model(input_ids=ids_BT, attention_mask=real_BT, use_cache=False)
        .logits[:, :-1]
        .float()
        .log_softmax(-1)
    )
    logp_BT = logp_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
    return -(logp_BT * mask_BT[:, 1:]).sum()


def naive(model: LlamaForCausalLM, rows: list[TrainSample], micro_batch_tok: int) -> None:
    naive_loss(model, rows).backward()


def ours(model: LlamaForCausalLM, rows: list[TrainSample], micro_batch_tok: int) -> None:
    for indices in micro_batches(rows, micro_batch_tok):
        (-token_logprobs(model, [rows[i] for i in indices], with_entropy=False)[0].sum()).backward()


def seconds(run, model: LlamaForCausalLM, rows: list[TrainSample], micro_batch_tok: int) -> float:
    model.zero_grad()
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    start = clock()
    run(model, rows, micro_batch_tok)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", default="h64,h128", help="comma-separated: " + ", ".join(SIZES))
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--micro-batch-tok", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    variants = {"naive": naive, "ours": ours}
    heads = "".join(f"{name:>14}" for name in variants)
    print(
        f"{'size':6}{'workload':10}{'tokens':>8}{'nodes':>8}  {heads}   "
        "(naive: seconds; others: ratio to naive)"
    )
    for size in args.sizes.split(","):
        hidden, intermediate, layers = SIZES[size]
        config = LlamaConfig(vocab_size=args.vocab, hidden_size=hidden, intermediate_size=intermediate,
                             num_hidden_layers=layers,
                             num_attention_heads=4, tie_word_embeddings=True)  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(args.device).eval()
        for workload in (ragged, group, steps):
            rows = workload(random.Random(0), args.vocab)
            times = {name: [] for name in variants}
            for repetition in range(args.repetitions + 1):
                for name, run in variants.items():
                    spent = seconds(run, model, rows, args.micro_batch_tok)
                    times[name] += [spent] if repetition else []  # the first warms up
            base = median(times["naive"])
            cells = [f"{base:14.3f}"] + [
                f"{base / median(times[name]):13.2f}x" for name in variants if name != "naive"
            ]
            tokens, nodes = sum(len(row.ids) for row in rows), sum(nodes for _, nodes in prefix_packs(rows))
            print(f"{size:6}{workload.__name__:10}{tokens:8}{nodes:8}  " + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
