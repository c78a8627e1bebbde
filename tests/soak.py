"""What resumes must end as the uninterrupted run did, to the bit: SIGKILL and Ctrl-C at random moments, saves
included.

    python -m tests.soak --kills 100               # supervised, GRPO in the dream, GRPO in the world
    python -m tests.soak --kills 0 --interrupts 30          # Ctrl-C: exit code 130, and the same end

The environment is examples/files.py. Its experience model is trained far enough that most dreams can be read
and some are paid, so that policies are updated, the replay buffer is enriched and tasks are generated.
Compared are weights, optimizers, random states, replay buffer, curriculum, episodes, evaluations, and metrics
without times. A run is a forked process, for imports take longer than its work. A signal comes after a
uniform draw between 0 and a third of an uninterrupted run's length; every second one waits for the next save.
"""
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from dreamgym import run
from tests.conftest import EXAMPLE, run_main
from tests.test_scripts import NUMBERS as SMALL, assert_same_checkpoint, of, settled

NUMBERS = SMALL | of("collect", transitions=3000) | of(
    "train_expmodel", context=512, max_next_tok=30, max_reward_tok=12, max_resamples=1, rows=16, warmup=20,
    prompt_loss=0.3, reward_prompt_loss=0.3, reward_share=0.3) | of(
    "train_policy", imitation_episodes=60, imitation_epochs=4, imitation_muon_lr=0.02, rollouts=3)
JOBS = {"supervised": ("train_expmodel", ["--steps", 90, "--max-steps", 90, "--rows", 8, "--save-every", 5]),
        "dream": ("train_policy", ["--iterations", 5]),
        "real": ("train_policy", ["--world", "real", "--real-transitions", 250])}
EXPMODEL_STEPS = 600          # of the experience model that is dreamt with
REPLAY = {"capacity": 3100, "exact_below": 3000}     # of its buffer: it soon fills, and has an index


@dataclass
class Args:
    kills: int = 30                   # SIGKILLs, shared by the three jobs
    interrupts: int = 0               # SIGINTs (Ctrl-C), shared by them
    seed: int = 0                     # of the moments


def work(script: str, flags: list, log: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell's background job ignores it
    sys.stdout = sys.stderr = log.open("a", buffering=1)
    run.main(lambda: run_main(script, *flags))


def start(script: str, flags: list, log: Path, method: str = "fork") -> multiprocessing.Process:
    """The script in a process of its own, its console in the file `log`."""
    process = multiprocessing.get_context(method).Process(target=work, args=(script, flags, log))
    process.start()
    return process


def ended(process: multiprocessing.Process, log: Path, expected: int = 0) -> bool:
    """Whether the signal ended it, and not the script's end. Raises RuntimeError where its exit code is neither 0 nor
    `expected`."""
    process.join()
    if process.exitcode not in (0, expected):
        raise RuntimeError(f"exit code {process.exitcode}\n{log.read_text()[-2000:]}")
    return process.exitcode != 0


def finish(script: str, flags: list, log: Path, method: str = "fork") -> float:
    """Runs the script to its end: its seconds."""
    begun = time.perf_counter()
    ended(start(script, flags, log, method), log)
    return time.perf_counter() - begun


def saving(out: Path) -> bool:
    """Whether a save is under way there, or a kill has left one."""
    return any(path for pattern in (".*.new", ".*.old", "*/.*.new", "*/.*.old") for path in out.glob(pattern))


def stop(process: multiprocessing.Process, number: int, out: Path, length_s: float, in_a_save: bool,
         rng: np.random.Generator) -> None:
    """Sends the signal after at most a third of a run's length, and then in a random part of the next save, if
    asked."""
    process.join(rng.uniform(0, length_s / 3))
    while in_a_save and process.is_alive() and not saving(out):
        process.join(0.005)
    process.join(rng.uniform(0, 0.1) * in_a_save)
    if process.is_alive():
        os.kill(process.pid, number)


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


def soak(name: str, flags: list, base: Path, number: int, stops: int, rng: np.random.Generator) -> dict:
    """Stops one job so often, over as many runs as that takes; compares each with the uninterrupted one."""
    script, own = JOBS[name]
    whole, out, log = base / f"{name}-whole", base / f"{name}-parts", base / f"{name}.log"
    # spawned: Python hashes texts otherwise in it than in the forked ones, so that an order by hash shows
    length_s = finish(script, [*flags, *own, "--out", whole], log, "spawn")
    row = {"job": name, "signal": signal.Signals(number).name, "length_s": length_s, "stops": 0,
           "in_a_save": 0, "runs": 0, "differences": []}
    while row["stops"] < stops:
        process = start(script, [*flags, *own, "--out", out], log)
        stop(process, number, out, length_s, row["stops"] % 2 == 1, rng)
        if ended(process, log, 130 if number == signal.SIGINT else -number):
            row["stops"] += 1
            row["in_a_save"] += saving(out)
            if row["stops"] < stops:
                continue
        finish(script, [*flags, *own, "--out", out], log)      # where it is finished: does it all fit?
        row["differences"] += differences(whole, out)
        row["runs"] += 1
        shutil.rmtree(out)
        print(row, flush=True)
    shutil.rmtree(whole)
    return row


def make_base(base: Path) -> dict[str, list]:
    """Data, and an experience model to dream with. Returns the flags of both scripts."""
    run.write_json(base / "preset.json", NUMBERS)
    common = ["--env", EXAMPLE, "--config", base / "preset.json"]
    supervised = [*common, "--data", base / "data", "--no-report-variants"]
    finish("collect", [*common, "--out", base / "data"], base / "log")
    finish("train_expmodel", [*supervised, "--steps", EXPMODEL_STEPS, "--max-steps", EXPMODEL_STEPS,
                              "--out", base / "expmodel"], base / "log")
    return {"train_expmodel": supervised,
            "train_policy": [*common, "--data", base / "data", "--expmodel", base / "expmodel"]}


def main() -> None:
    args = tyro.cli(Args)
    rng, rows = np.random.default_rng(args.seed), []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        flags = make_base(base)
        for number, stops in ((signal.SIGINT, args.interrupts), (signal.SIGKILL, args.kills)):
            if number == signal.SIGKILL:
                settings = base / "expmodel/model/replay/meta.json"
                meta = run.read_json(settings)
                run.write_json(settings, meta | {"settings": meta["settings"] | REPLAY})
            for name, (script, _) in JOBS.items() if stops else ():
                rows.append(soak(name, flags[script], base, number, -(-stops // len(JOBS)), rng))
        if rows:
            print(run.summary_table([row | {"differences": len(row["differences"])} for row in rows]))
        print(*(f"{row['job']}: {text}" for row in rows for text in row["differences"]), sep="\n")


if __name__ == "__main__":
    main()
