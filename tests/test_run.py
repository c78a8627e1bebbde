"""dreamgym/run.py: ranks, named randomness, logs, checkpoints that survive a kill, flags and presets, Ctrl-C."""

import contextlib
import dataclasses
import io
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from dreamgym import run

ALONE = run.Ranks()


@dataclasses.dataclass
class Args:
    """Train something."""

    env: Literal["webshop", "alfworld"] = "webshop"  # which environment to act in
    learning_rate: float = 1e-6  # step size of AdamW (paper: 1e-6)
    steps: int = 10  # training steps
    fresh: bool = False  # start over, even where a checkpoint is
    seed_tasks: str | None = None  # file of seed tasks
    layers: list[int] = dataclasses.field(default_factory=list)  # layers to train

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"--steps: found {self.steps}, expected 0 or more")


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def exits(argv, capfd):
    with pytest.raises(SystemExit) as exit_:
        run.parse(Args, argv)
    return exit_.value.code, "".join(capfd.readouterr())


# ---- seeds ----


def test_named_streams_are_fixed_for_ever():
    """Stops a change of the derivation that would make every published run irreproducible."""
    assert run.derive_seed(0) == 1999793380834467432  # sha256 of '[0]': its first 8 bytes, little end first, halved
    assert run.derive_seed(7, "pick", 3) == 7680863793813855366
    assert run.rng(7, "pick", 3).integers(0, 1000, 4).tolist() == [835, 878, 815, 203]


def test_names_do_not_collide():
    """Stops joining names without a separator, and unlike types that look alike."""
    keys = [("ab", "c"), ("a", "bc"), ("abc",), (1,), ("1",), (1, 1), (11,)]
    assert len({run.derive_seed(0, *key) for key in keys}) == len(keys)
    assert run.derive_seed(0, "x", np.int64(3)) == run.derive_seed(0, "x", 3)
    torch.Generator().manual_seed(run.derive_seed(123, "a"))  # fits the signed 64 bits that torch takes


def test_random_state_round_trip(tmp_path):
    """Stops a resume whose draws differ, and a state that needs pickle to load."""
    torch.manual_seed(1)
    random.seed(1)
    random.gauss(0, 1)  # leaves half a pair behind, which is part of the state
    torch.save(run.get_random_state(), tmp_path / "random.pt")
    want = torch.rand(3), random.gauss(0, 1), random.random()
    run.set_random_state(torch.load(tmp_path / "random.pt", weights_only=True))
    got = torch.rand(3), random.gauss(0, 1), random.random()
    assert torch.equal(want[0], got[0]) and want[1:] == got[1:]


def test_start_alone_has_no_process_group(monkeypatch):
    """Stops a process group where there is one process, and helpers that change what they are given."""
    monkeypatch.delenv("RANK", raising=False)
    ranks = run.start(3)
    first = torch.rand(1)
    run.start(3)
    assert torch.equal(first, torch.rand(1)) and torch.get_num_threads() == 1
    assert not torch.distributed.is_initialized() and ranks.is_main and ranks.world == 1
    assert ranks.all_reduce_sum(2.5) == 2.5 and ranks.gather([{"a": 1}]) == [{"a": 1}] and ranks.broadcast_json("x") == "x"
    ranks.barrier()
    ranks.close()


WORKER = """
import os, signal, sys
from pathlib import Path
from dreamgym import run
ranks = run.start(5)
me, out = ranks.rank, Path(sys.argv[1])
log = run.Log(out / f"log{me}", ranks, tensorboard=False)
log.step("train", 0, {"loss": 1.0})
with run.graceful(log) as stop:
    if me == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    alone, agreed = stop.requested, stop.agreed(ranks)
def write(folder):
    (folder / f"part{me}").write_text(str(me))
run.save_checkpoint(out, "policy", write, {"step": 0}, ranks)
run.save_checkpoint(out, "policy", write, {"step": 1}, ranks)
found = {
    "sum": ranks.all_reduce_sum(me + 0.5), "sums": ranks.all_reduce_sum([float(me), 1.0]),
    "gather": ranks.gather([{"from": me, "text": "\\u00e9" * i} for i in range(3 * me)]),
    "broadcast": ranks.broadcast_json({"secret": [me, None, "x" * 50]} if me == 0 else "other"),
    "alone": alone, "agreed": agreed, "found": str(run.latest_checkpoint(out, "policy", ranks)),
}
run.write_json(out / f"found{me}.json", found)
ranks.close()
"""


def test_two_gloo_ranks(tmp_path):
    """Stops ranks that disagree on sums, gathered records, stopping or checkpoints, and a second rank that writes logs."""
    (tmp_path / "worker.py").write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    environ = os.environ | {"PYTHONPATH": str(Path(run.__file__).parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "worker.py", str(tmp_path)], check=False, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = run.read_json(tmp_path / f"found{rank}.json")
        assert found["sum"] == 2.0 and found["sums"] == [1.0, 2.0]
        assert found["gather"] == [{"from": 1, "text": "é" * i} for i in range(3)]
        assert found["broadcast"] == {"secret": [0, None, "x" * 50]}
        assert found["alone"] == (rank == 1) and found["agreed"] is True
        assert found["found"] == str(tmp_path / "policy")
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["meta.json", "part0", "part1"]
    assert (tmp_path / "log0" / "metrics.jsonl").exists() and not (tmp_path / "log1").exists()


# ---- files and log ----


def test_resume_cuts_metrics_and_time_goes_on(tmp_path):
    """Stops a resumed curve that repeats steps, clings to half a line of the killed run, or restarts the clock."""
    log = run.Log(tmp_path, ALONE, tensorboard=False)
    for step in range(5):
        log.step("train", step, {"loss": float(step)}, show=[])
    log.close()
    path = tmp_path / "metrics.jsonl"
    records = lines(path)
    path.write_text("".join(json.dumps(record | {"time_s": 100.0 + record["step"]}) + "\n" for record in records) + '{"schema": 1, "st')
    log = run.Log(tmp_path, ALONE, tensorboard=False, resume_step=2)
    log.step("train", 3, {"loss": 30.0}, show=[])
    log.close()
    after = lines(path)
    assert [(r["step"], r["loss"]) for r in after] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert 102.0 <= after[-1]["time_s"] < 130.0 and after[-1]["schema"] == run.SCHEMA
    run.Log(tmp_path, ALONE, tensorboard=False, resume_step=-1).close()
    assert path.read_text() == ""


def test_log_without_resume_appends(tmp_path):
    """Stops losing an earlier curve without being told to."""
    for step in range(2):
        log = run.Log(tmp_path, ALONE, tensorboard=False)
        log.step("eval", step, {"success": 0.5}, show=[])
        log.close()
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == [0, 1]


def test_nan_is_null_and_tensors_are_numbers(tmp_path, capsys):
    """Stops lines that no JSON reader takes, and NaN that goes by unseen."""
    log = run.Log(tmp_path, ALONE, tensorboard=False)
    values = {"loss": math.nan, "norms": [1.0, math.inf], "kl": torch.tensor(0.25), "n": np.int64(3), "stop": {"done": 2}}
    log.step("train", 4, values, show=["kl", "absent"])
    log.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert record["loss"] is None and record["norms"] == [1.0, None] and record["kl"] == 0.25 and record["n"] == 3
    out = capsys.readouterr().out
    assert "train step 4: loss has NaN" in out and "norms has Infinity" in out and "train 4  kl 0.25" in out
    assert out.count("warning") == 2


def test_tensorboard_mirrors_and_purges(tmp_path):
    """Stops TensorBoard showing steps that a resume has undone."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume_step, steps in ((None, range(4)), (1, range(2, 3))):
        log = run.Log(tmp_path, ALONE, resume_step=resume_step)
        for step in steps:
            log.step("train", step, {"loss": step + (0.5 if resume_step else 0.0), "note": "text"}, show=[])
        log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 0.0), (1, 1.0), (2, 2.5)]


def test_write_jsonl_append_and_replace(tmp_path):
    """Stops a new record glued to half an old one, the loss of a whole last line, and NaN in a record file."""
    path = tmp_path / "x.jsonl"
    run.write_jsonl(path, [{"a": 1}], append=True)
    path.write_text(path.read_text() + '{"a": 2')
    run.write_jsonl(path, [{"a": 3}], append=True)
    assert lines(path) == [{"a": 1}, {"a": 3}]
    path.write_text('{"a": 1}\n{"a": 2}')  # whole, only its newline is missing
    run.write_jsonl(path, [{"a": 3}], append=True)
    assert lines(path) == [{"a": 1}, {"a": 2}, {"a": 3}]
    with pytest.raises(ValueError):
        run.write_jsonl(path, [{"a": 4}, {"a": math.nan}], append=False)
    assert len(lines(path)) == 3  # a failed replacement leaves the old file
    run.write_jsonl(path, ({"a": i} for i in range(2)), append=False)
    assert lines(path) == [{"a": 0}, {"a": 1}]


def test_broken_files_are_named(tmp_path):
    """Stops 'Expecting value: line 1' without a file name."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl line 2.*rubbish"):
        run.cut_jsonl(path, 1)
    with pytest.raises(ValueError, match="metrics.jsonl is not JSON"):
        run.read_json(path)


def test_fingerprint():
    """Stops a hash that depends on key order, or that changes between versions and so orphans saved artifacts."""
    assert run.fingerprint({"a": 1, "b": [2]}) == run.fingerprint({"b": [2], "a": 1}) == "0855bfc20eb6cfaa"
    assert run.fingerprint({"a": 1}) != run.fingerprint({"a": 2})


def test_progress_without_a_terminal(monkeypatch):
    """Stops control characters and thousands of redrawn bars in log files, and silence in long phases."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with run.progress(3, "short") as bar:
        bar.update(3)
    assert sys.stderr.getvalue() == ""
    monkeypatch.setattr(run, "PROGRESS_EVERY_S", 0.0)
    assert list(run.progress(range(4), "rollout")) == [0, 1, 2, 3]
    text = sys.stderr.getvalue()
    assert "rollout: 50% (2/4), 00:00 so far, about 00:00 left\n" in text and "█" not in text and "\x1b" not in text
    monkeypatch.setenv("RANK", "1")
    sys.stderr.truncate(0)
    assert list(run.progress(range(4), "rollout")) == [0, 1, 2, 3] and sys.stderr.getvalue() == ""


def test_progress_closes_on_an_exception(monkeypatch):
    """Stops a dead bar that is drawn over later output."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    bar = run.progress(range(4), "rollout")
    with pytest.raises(RuntimeError):
        for _ in bar:
            raise RuntimeError
    assert bar not in bar._instances
    with pytest.raises(RuntimeError), run.progress(4, "by hand") as bar:
        raise RuntimeError
    assert bar not in bar._instances


def test_timer_adds_up_and_resets():
    """Stops phases that overwrite each other, and time lost to an exception."""
    timer = run.Timer()
    for _ in range(2):
        with timer("rollout"):
            sum(range(20000))
    with pytest.raises(RuntimeError), timer("update"):
        raise RuntimeError
    seconds = timer.take()
    assert set(seconds) == {"rollout_s", "rollout_cpu_s", "update_s", "update_cpu_s"} and seconds["rollout_s"] > 0
    assert timer.take() == {}


def test_summary_table():
    """Stops columns that do not line up, and a crash where a row lacks a value."""
    table = run.summary_table([{"task": "all", "success": 0.123456, "n": 10}, {"task": "hard", "n": 2, "note": "few"}])
    assert table.splitlines() == [
        "task  success   n  note",
        "----  -------  --  ----",
        "all    0.1235  10",
        "hard            2  few",
    ]


# ---- checkpoints ----


class Killed(BaseException):
    pass


def save(folder, step):
    def write(path):
        for part in ("a", "b"):
            (path / part).write_text(str(step))
            run._sync(path / part)  # a point at which the kill test can strike, halfway through the writer

    run.save_checkpoint(folder, "policy", write, {"step": step}, ALONE)


def whole_step(folder):
    found = run.latest_checkpoint(folder, "policy", ALONE)
    if found is None:
        return None
    step = run.load_meta(found)["step"]
    assert {(found / part).read_text() for part in ("a", "b")} == {str(step)}, "files of two saves in one checkpoint"
    assert [path.name for path in Path(folder).iterdir()] == ["policy"], "rests of a save are left"
    return step


def kill_at(monkeypatch, strike, after):
    """Make the strike-th file operation of the save raise, before it or (after=True) once it is done; deletion stops halfway."""
    calls = []

    def wrap(owner, name, half=None):
        real = getattr(owner, name)

        def wrapped(*args, **kwargs):
            calls.append(name)
            struck = len(calls) == strike
            if struck and not after:
                if half:
                    half(*args)
                raise Killed
            result = real(*args, **kwargs)
            if struck:
                raise Killed
            return result

        monkeypatch.setattr(owner, name, wrapped)

    wrap(run, "_sync")
    wrap(run, "write_json")
    wrap(os, "rename")
    wrap(os, "replace")
    wrap(shutil, "rmtree", half=lambda path: os.unlink(Path(path) / "meta.json") if (Path(path) / "meta.json").exists() else None)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_kill_at_any_point_leaves_a_whole_checkpoint(tmp_path, monkeypatch, first, after):
    """Stops a save that has deleted the old checkpoint before the new one is whole, at every file operation in turn."""
    seen = set()
    for strike in range(1, 40):
        folder = tmp_path / f"{strike}"
        folder.mkdir()
        if not first:
            save(folder, 1)
        with monkeypatch.context() as patch:
            kill_at(patch, strike, after)
            try:
                save(folder, 2)
            except Killed:
                pass
            else:
                break
        shutil.copytree(folder, tmp_path / f"{strike}again")
        step = whole_step(folder)
        assert step in ({None, 2} if first else {1, 2})
        seen.add(step)
        save(tmp_path / f"{strike}again", 3)  # a save right after the kill needs no look at the folder before it
        assert whole_step(tmp_path / f"{strike}again") == 3
    assert strike > 8 and seen == ({None, 2} if first else {1, 2})
    assert whole_step(folder) == 2


def test_kill_during_the_repair(tmp_path, monkeypatch):
    """Stops the repair itself from losing the only whole checkpoint when it is killed too."""
    for strike in range(1, 9):
        for again in range(1, 6):
            folder = tmp_path / f"{strike}-{again}"
            folder.mkdir()
            save(folder, 1)
            for step, at in ((2, strike + 4), (3, again)):
                with monkeypatch.context() as patch, contextlib.suppress(Killed):
                    kill_at(patch, at, False)
                    save(folder, step)
            assert whole_step(folder) in {1, 2, 3}


def test_the_newest_whole_checkpoint_wins(tmp_path):
    """Stops a repair that takes the older of two whole ones, and one that throws the older away when the newer is half written."""
    for newer_is_whole in (True, False):
        save(tmp_path / "one", 1)
        save(tmp_path / "two", 2)
        folder = tmp_path / f"{newer_is_whole}"
        folder.mkdir()
        (tmp_path / "one" / "policy").rename(folder / ".policy.old")
        (tmp_path / "two" / "policy").rename(folder / ".policy.new")
        if not newer_is_whole:
            (folder / ".policy.new" / "meta.json").unlink()
        assert whole_step(folder) == (2 if newer_is_whole else 1)


def test_save_refuses_a_folder_that_is_no_checkpoint(tmp_path):
    """Stops a save that deletes somebody's files."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="without meta.json"):
        save(tmp_path, 1)
    assert (tmp_path / "policy" / "thesis.tex").exists()
    with pytest.raises(ValueError, match="expected a checkpoint folder"):
        run.load_meta(tmp_path / "policy")


def test_check_meta_names_every_difference():
    """Stops a resume under other settings, and an error that leaves the user guessing which."""
    meta = {"model": "tiny", "layers": [1, 2], "step": 3}
    run.check_meta(meta, {"model": "tiny", "layers": (1, 2)}, "out/policy")
    with pytest.raises(ValueError) as error:
        run.check_meta(meta, {"model": "big", "lora": 8, "layers": [1, 2]}, "out/policy")
    text = str(error.value)
    assert 'out/policy does not fit this run: model: found "tiny", expected "big"; lora: found nothing, expected 8; use --fresh' in text
    assert "layers" not in text


# ---- Ctrl-C ----


def test_ctrl_c_twice(tmp_path, capfd):
    """Stops a lost step at the first Ctrl-C, a run that cannot be stopped at the second, and handlers left behind."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    log = run.Log(tmp_path, ALONE, tensorboard=False)
    calm = False
    with pytest.raises(KeyboardInterrupt), run.graceful(log) as stop:
        assert not stop.requested and not stop.agreed(ALONE)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested and stop.agreed(ALONE)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler repeating itself is no second Ctrl-C
        calm = stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second Ctrl-C went unheard")
    assert calm
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert capfd.readouterr().err.count("stopping after this step; run the same command to continue") == 1


# ---- flags ----


def test_help_has_one_line_per_flag(capfd):
    """Stops a flag without help, and a --config nobody can find."""
    code, text = exits(["--help"], capfd)
    assert code == 0 and "Train something." not in text
    for flag, words in {"--learning-rate": "step size of AdamW", "--fresh, --no-fresh": "start over", "--config": "JSON file of flags"}.items():
        assert sum(flag in line and words in line for line in text.splitlines()) == 1, text


def test_preset_then_flags(tmp_path, capfd):
    """Stops a preset that overrides the command line, JSON types that leak into the settings, and help that shows other defaults."""
    preset = tmp_path / "x.json"
    values = {"learning_rate": 1, "fresh": True, "seed-tasks": None, "layers": [3, 4], "env": "alfworld"}
    preset.write_text(json.dumps(values))
    args = run.parse(Args, ["--steps", "5", "--config", str(preset), "--no-fresh"])
    assert args == Args("alfworld", 1.0, 5, False, None, [3, 4]) and isinstance(args.learning_rate, float)
    assert run.parse(Args, [f"--config={preset}"]).fresh is True
    assert run.parse(Args, []) == Args()
    assert "default: alfworld" in exits(["--config", str(preset), "--help"], capfd)[1]


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ('{"learning_rat": 1}', "'learning_rat' is no flag of this command; the nearest is 'learning_rate'"),
        ('{"learning_rate": "fast"}', "fast"),
        ('{"learning_rate": true}', "--learning-rate"),
        ('{"fresh": "yes"}', "yes"),
        ('{"env": "web"}', "'web'"),
        ('{"env": {"name": "webshop"}}', "nested"),
        ('{"steps": -1}', "found -1"),
        ("[1]", "found a JSON list"),
        ("{steps: 1}", "is not JSON"),
    ],
)
def test_bad_presets(tmp_path, capfd, preset, expected):
    """Stops a preset key that is silently ignored, and a value of the wrong type that is found hours later."""
    (tmp_path / "x.json").write_text(preset)
    code, text = exits(["--config", str(tmp_path / "x.json")], capfd)
    assert code == 2 and expected in text and "x.json" in text.replace("\n", ""), text


def test_bad_flags(capfd, monkeypatch):
    """Stops a traceback for a typing mistake, an exit code that scripts cannot see, and one copy of it from each rank."""
    cases = {"--learning-rate=x": "--learning-rate", "--env=web": "'web'", "--stepz=3": "--stepz", "--config=no.json": "no.json", "--steps=-1": "found -1"}
    for flag, expected in cases.items():
        code, text = exits([flag], capfd)
        assert code == 2 and expected in text and "Traceback" not in text, text
    monkeypatch.setenv("RANK", "1")
    assert exits(["--learning-rate=x"], capfd) == (2, "")
    assert exits(["--steps=-1"], capfd) == (2, "")
