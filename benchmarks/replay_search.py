"""Replay search: where the hnswlib index of `ReplayBuffer` begins to pay against exact search.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m benchmarks.replay_search

A query of a dream costs its search and one insertion. The data are clustered and of low dimension, as hidden
states are; a third are copies in text, and each query excludes its own task. docs/scaling.md has the times
that the default of `exact_below` comes from.
"""
from dataclasses import dataclass

import numpy as np
import tyro

from benchmarks.timing import cpu_s
from dreamgym.replay import ReplayBuffer, Transition


DIM = 256      # length of the vectors
K = 4          # demonstrations per query
BATCH = 128    # queries per search: the episodes of one dream step
REPS = 5       # searches per variant; the median counts


@dataclass
class Args:
    sizes: str = "5000,20000,50000"   # transitions, comma-separated


def unit_vectors(n: int, rng: np.random.Generator) -> np.ndarray:
    fixed = np.random.default_rng(5)
    centres, spread = fixed.standard_normal((256, 32)), fixed.standard_normal((32, DIM))
    vectors = (centres[rng.integers(256, size=n)] + 0.5 * rng.standard_normal((n, 32))) @ spread
    vectors += 0.3 * rng.standard_normal((n, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def transitions(n: int, rng: np.random.Generator) -> list[Transition]:
    return [Transition(state=f"s{text}", action="a", next_state="n", reasoning=str(i), task=f"t{i // 40}",
                       synthetic=True)
            for i, text in enumerate(rng.integers(n, size=n))]


def measure(n: int) -> str:
    rng = np.random.default_rng(n)
    records, data = transitions(n, rng), unit_vectors(n, rng)
    exact, index = ReplayBuffer(DIM, n, exact_below=n + 1), ReplayBuffer(DIM, n, exact_below=1)
    plain_s, _ = cpu_s(exact.add, records, data)
    insert_s, _ = cpu_s(index.add, records, data)
    times, hits, total = {exact: [], index: []}, 0, 0
    for _ in range(REPS):
        near = rng.integers(n, size=BATCH)
        queries = data[near] + 0.02 * rng.standard_normal((BATCH, DIM)).astype(np.float32)
        found = {}
        for buffer, spent in times.items():
            seconds, found[buffer] = cpu_s(buffer.search, queries, K, [f"t{i // 40}" for i in near])
            spent.append(seconds)
        for want, got in zip(found[exact], found[index]):
            hits += len({id(t) for t, _ in want} & {id(t) for t, _ in got})
            total += len(want)
    exact_ms, index_ms = (1000 * float(np.median(spent)) / BATCH for spent in times.values())
    insert_ms = 1000 * (insert_s - plain_s) / n
    ratios = exact_ms / index_ms, exact_ms / (index_ms + insert_ms)
    cells = [f"{x:.3f}" for x in (exact_ms, index_ms, insert_ms, *ratios, hits / total)]
    return f"| {n} | {' | '.join(cells)} |"


def main(args: Args) -> None:
    print(f"dim {DIM}, k {K}, {BATCH} queries per search, median of {REPS} searches")
    print("| transitions | exact ms | index ms | insert ms | exact/index | exact/(index+insert) | recall |")
    print("|---|---|---|---|---|---|---|")
    for size in map(int, args.sizes.split(",")):
        print(measure(size), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
