"""Replay search: the hnswlib index against the exact matrix product through the same `ReplayBuffer.search`, with recall@k and the cost of a build.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m benchmarks.replay_search

CPU seconds, the two interleaved in one process; only the ratio is worth quoting. "embedding" is clustered, low-dimensional data around a large common
offset, as hidden states are; "gaussian" has no structure and is the worst case of a graph index. Exclusions and duplicates are on, as in a dream.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tyro

from dreamgym.replay import ReplayBuffer, Transition


@dataclass
class Args:
    sizes: str = "1000,5000,10000,30000"  # live transitions, comma-separated
    dim: int = 384  # length of the vectors
    k: int = 4  # demonstrations per query
    batch: int = 64  # queries per search: the episodes of one dream step
    reps: int = 5  # searches per variant, the median counts
    ef: int = 64  # breadth of the index search


def vectors(kind: str, n: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "gaussian":
        return rng.standard_normal((n, dim)).astype(np.float32)
    fixed = np.random.default_rng(5)
    centres, spread = fixed.standard_normal((256, 32)), fixed.standard_normal((32, dim))
    latent = centres[rng.integers(256, size=n)] + 0.5 * rng.standard_normal((n, 32))
    return (30 + latent @ spread + 0.3 * rng.standard_normal((n, dim))).astype(np.float32)


def cpu_s(call: Callable, *args) -> tuple[float, list]:
    start = time.process_time()
    result = call(*args)
    return time.process_time() - start, result


def measure(kind: str, n: int, args: Args) -> str:
    rng = np.random.default_rng(n)
    texts = rng.integers(n, size=n)  # about a third of the transitions are duplicates in text, with their own vectors
    transitions = [Transition(f"s{t}", "a", "", "n", 0.0, False, f"e{i // 10}", "t", True, i) for i, t in enumerate(texts)]
    data = vectors(kind, n, args.dim, rng)
    exact, index = (ReplayBuffer(args.dim, n, exact_below=below, ef=args.ef) for below in (10**9, 1))
    for buffer in (exact, index):
        buffer.add(transitions, data)
    build_s, _ = cpu_s(index.search, data[:1], 1, [None])
    spent, hits, total = {"exact": [], "index": []}, 0, 0
    for _ in range(args.reps):
        near = rng.integers(n, size=args.batch)
        queries, own = data[near] + 0.1 * vectors("gaussian", args.batch, args.dim, rng), [f"e{i // 10}" for i in near]
        exact_s, want = cpu_s(exact.search, queries, args.k, own)
        index_s, got = cpu_s(index.search, queries, args.k, own)
        spent["exact"].append(exact_s)
        spent["index"].append(index_s)
        hits += sum(len({t.step for t, _ in a} & {t.step for t, _ in b}) for a, b in zip(want, got))
        total += sum(map(len, want))
    exact_ms, index_ms = (1000 * float(np.median(spent[name])) / args.batch for name in ("exact", "index"))
    pays = f"{1000 * build_s / (exact_ms - index_ms):.0f}" if exact_ms > index_ms else "never"
    return f"| {kind} | {n} | {exact_ms:.3f} | {index_ms:.3f} | {exact_ms / index_ms:.2f} | {hits / total:.4f} | {build_s:.2f} | {pays} |"


def main(args: Args) -> None:
    print(f"dim {args.dim}, k {args.k}, {args.batch} queries per search, ef {args.ef}, median of {args.reps}")
    print(f"| data | transitions | exact ms/query | index ms/query | exact / index | recall@{args.k} | build s | a build pays after so many queries |")
    print("|---|---|---|---|---|---|---|---|")
    for size in map(int, args.sizes.split(",")):
        for kind in ("embedding", "gaussian"):
            if kind == "embedding" or size <= 10_000:  # building the worst case takes minutes above
                print(measure(kind, size, args), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
