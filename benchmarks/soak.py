"""SIGKILL at random moments, saves included: what resumes must end as the uninterrupted run did, to the bit;
and resident memory over iterations.

    python -m benchmarks.soak --kills 100               # supervised, GRPO in the dream, GRPO in the world
    python -m benchmarks.soak --kills 0 --iterations 1000      # memory of the loop

The environment is examples/files.py; numbers and comparisons are those of tests/test_scripts.py: weights,
optimizers, random states, replay buffer, curriculum, episodes, evaluations, metrics without times.
A run is a forked process, for imports take longer than its work. A kill comes after a uniform draw between 0
and the length of the uninterrupted run. The replay buffer grows to its capacity by design, so memory is
measured without adding to it.
"""
from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import train_policy
from benchmarks.timing import memory_mb
from dreamgym import run
from tests.conftest import EXAMPLE, run_main
from tests.test_scripts import NUMBERS, assert_same_checkpoint, settled


@dataclass
class Args:
    kills: int = 30                   # SIGKILLs, shared by the three jobs
    iterations: int = 0               # RL iterations whose memory is measured
    seed: int = 0                     # of the moments


JOBS = {"supervised": ("train_expmodel", ["--save-every", 5]),
        "dream": ("train_policy", ["--iterations", 6]),
        "real": ("train_policy", ["--world", "real", "--real-transitions", 150])}


def start(script: str, flags: list, log: Path) -> multiprocessing.Process:
    """The script in a forked process, its console in the file `log`."""
    def work() -> None:
        os.setpgrp()
        sys.stdout = sys.stderr = log.open("a", buffering=1)
        run_main(script, *flags)
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def finish(process: multiprocessing.Process, log: Path, seconds: float | None = None) -> bool:
    """Waits so long, or to the end: whether the process ended well. Raises RuntimeError where it failed."""
    process.join(seconds)
    if process.exitcode:
        raise RuntimeError(f"exit code {process.exitcode}\n{log.read_text()[-2000:]}")
    return process.exitcode == 0


def differences(whole: Path, parts: Path) -> list[str]:
    """What differs between two folders of finished runs; [] where nothing does."""
    found = []
    for checkpoint in whole.rglob("training.pt"):
        name = checkpoint.parent.relative_to(whole)
        try:
            assert_same_checkpoint(checkpoint.parent, parts / name)
        except AssertionError as error:
            found.append(f"{name}: {error}")
    found += ["metrics.jsonl"] * (settled(whole) != settled(parts))
    files = [path.name for path in whole.iterdir() if path.name in
             ("episodes.jsonl", "evaluations.jsonl", "test-before.jsonl", "test-after.jsonl", "report.json")]
    return found + [name for name in files if (whole / name).read_bytes() != (parts / name).read_bytes()]


def soak(name: str, flags: list, base: Path, kills: int, rng: np.random.Generator) -> dict:
    """Kills one job so often, over as many runs as that takes; compares each with the uninterrupted one."""
    script, own = JOBS[name]
    whole, log, begun = base / f"{name}-whole", base / f"{name}.log", time.perf_counter()
    finish(start(script, [*flags, *own, "--out", whole], log), log)
    row = {"job": name, "length_s": time.perf_counter() - begun, "kills": 0, "in_a_save": 0, "runs": 0,
           "differences": []}
    while row["kills"] < kills:
        out = base / f"{name}-parts"
        while True:
            process = start(script, [*flags, *own, "--out", out], log)
            wait = rng.uniform(0, row["length_s"]) if row["kills"] < kills else None
            if finish(process, log, wait):
                break
            process.kill()
            process.join()
            row["kills"] += 1
            row["in_a_save"] += any(out.rglob(".*.new")) or any(out.rglob(".*.old"))
        row["differences"] += differences(whole, out)
        row["runs"] += 1
        shutil.rmtree(out)
        print(row, flush=True)
    return row


def memory(flags: list, base: Path, iterations: int) -> list[dict]:
    """Resident memory of GRPO in the dream, after iteration 10 and later ones."""
    path, log, real = base / "memory.jsonl", base / "memory.log", train_policy.log_iteration

    def measured(job, state, values, episodes) -> None:
        real(job, state, values, episodes)
        run.write_jsonl(path, [{"iteration": state.step, "resident_mb": round(memory_mb(), 1)}], append=True)
    train_policy.log_iteration = measured
    own = ["--iterations", iterations, "--no-enrich", "--save-every", 50, "--eval-every", 50]
    finish(start("train_policy", [*flags, *own, "--out", base / "memory"], log), log)
    train_policy.log_iteration = real
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    shown = {10, *range(iterations // 10, iterations + 1, max(1, iterations // 10))}
    return [row for row in rows if row["iteration"] in shown]


def main() -> None:
    args = tyro.cli(Args)
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        run.write_json(base / "preset.json", NUMBERS | {"train_policy.eval_every": 3})
        common = ["--env", EXAMPLE, "--config", base / "preset.json"]
        flags = [*common, "--data", base / "data"]
        for script, own in (("collect", [*common, "--out", base / "data"]),
                            ("train_expmodel", [*flags, "--out", base / "expmodel", "--no-report-variants"])):
            finish(start(script, own, base / "log"), base / "log")
        policy = [*flags, "--expmodel", base / "expmodel"]
        flags_of = {"train_expmodel": [*flags, "--no-report-variants"], "train_policy": policy}
        names = list(JOBS) if args.kills else []
        rows = [soak(name, flags_of[JOBS[name][0]], base, -(-args.kills // len(JOBS)), rng) for name in names]
        if rows:
            print(run.summary_table([row | {"differences": len(row["differences"])} for row in rows]))
        print(*(f"{row['job']}: {text}" for row in rows for text in row["differences"]), sep="\n")
        if args.iterations:
            print(run.summary_table(memory(policy, base, args.iterations)))


if __name__ == "__main__":
    main()
