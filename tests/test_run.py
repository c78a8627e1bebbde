"""run.py and checkpoint.py: ranks, named randomness, logs, saves that survive a kill, Ctrl-C."""
import contextlib
import io
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dreamgym.model
from benchmarks import timing
from dreamgym import checkpoint, run
from dreamgym.logprobs import TrainSample
from dreamgym.model import load_model, save_model, shard
from dreamgym.sft import make_optimizers, sft_step
from dreamgym.word_tokenizer import build_tokenizer
from tests.conftest import on_two_ranks

ALONE = run.Dist()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- seeds and ranks ----

def test_names_are_fixed_for_ever():
    """A changed derivation, which would make published runs irreproducible, and names that collide."""
    assert run.fingerprint({"a": 1, "b": [2]}) == run.fingerprint({"b": [2], "a": 1}) == "0855bfc20eb6cfaa"
    assert run.derive_seed(0) == 1999793380834467432      # first 8 bytes of sha256('[0]'), little end, halved
    assert run.rng(7, "pick", 3).integers(0, 1000, 4).tolist() == [835, 878, 815, 203]
    keys = [("ab", "c"), ("a", "bc"), ("abc",), (1,), ("1",), (1, 1), (11,)]
    assert len({run.derive_seed(0, *key) for key in keys}) == len(keys)
    assert run.derive_seed(0, "x", np.int64(3)) == run.derive_seed(0, "x", 3)
    torch.Generator().manual_seed(run.derive_seed(123, "a"))      # fits the signed 64 bits that torch takes


def test_one_process_has_no_group(monkeypatch):
    """A process group where there is one process, and sums that change what they are given."""
    monkeypatch.delenv("RANK", raising=False)
    dist = run.init_dist(3)
    first = torch.rand(1)
    run.init_dist(3)
    assert torch.equal(first, torch.rand(1)) and torch.get_num_threads() == 1
    assert not torch.distributed.is_initialized() and dist == ALONE
    assert (dist.all_reduce_sum(2.5), dist.all_reduce_sum([1.0, 2.0])) == (2.5, [1.0, 2.0])
    assert (dist.gather([{"a": 1}]), dist.broadcast("x")) == ([{"a": 1}], "x")


@pytest.mark.parametrize("local, loopback", [("2", True), ("1", False)])
def test_several_nodes_meet_over_their_network(monkeypatch, local, loopback):
    """Ranks of two machines that look for each other on the loopback device, or that are refused."""
    joined = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: joined.append(args))
    for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(key, "")  # so that monkeypatch takes back what init_dist sets
        monkeypatch.delenv(key)
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(key, value)
    dist = run.init_dist(0)
    assert (dist.rank, dist.world_size, len(joined)) == (1, 2, 1)
    assert ("GLOO_SOCKET_IFNAME" in os.environ) == ("NCCL_SOCKET_IFNAME" in os.environ) == loopback


def agree(me, out):
    """What a rank finds, in found{me}.json."""
    dist = run.init_dist(5)
    run.check_ranks(SimpleNamespace(lr=0.1, seed=0), out, dist)
    with pytest.raises(ValueError) as refused:
        run.check_ranks(SimpleNamespace(lr=0.1 * me, seed=0), out, dist)
    log = run.Log(out / f"log{me}", dist, -1)
    log.step("train", 0, {"loss": 1.0}, [])
    with run.graceful(log) as stop:
        if me == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        alone, agreed = stop.requested, stop.agreed(dist)
    for step in range(2):
        checkpoint.save(out, "policy", lambda folder: (folder / f"part{me}").write_text(str(me)), {"step": step}, dist)
    run.write_json(out / f"found{me}.json", {
        "sum": dist.all_reduce_sum(me + 0.5), "sums": dist.all_reduce_sum([float(me), 1.0]),
        "gather": dist.gather([{"from": me, "text": "é" * i} for i in range(3 * me)]),
        "broadcast": dist.broadcast({"secret": [me, None, "x" * 50]} if me == 0 else "other"),
        "alone": alone, "agreed": agreed, "refused": str(refused.value),
        "found": str(checkpoint.latest(out, "policy", dist))})
    dist.close()


def test_two_gloo_ranks(tmp_path):
    """Ranks that disagree on flags, sums, stopping or checkpoints; a second rank that logs."""
    on_two_ranks(agree, tmp_path)
    for rank in range(2):
        assert run.read_json(tmp_path / f"found{rank}.json") == {
            "sum": 2.0, "sums": [1.0, 2.0], "gather": [{"from": 1, "text": "é" * i} for i in range(3)],
            "broadcast": {"secret": [0, None, "x" * 50]}, "alone": rank == 1, "agreed": True,
            "refused": "rank 1 has lr 0.1, rank 0 0.0: start all machines with the same command",
            "found": str(tmp_path / "policy")}
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["meta.json", "part0", "part1"]
    assert (tmp_path / "log0" / "metrics.jsonl").exists() and not (tmp_path / "log1").exists()


def train_some(resume, save, dist):
    """Two steps on a sharded model, from the start or from the checkpoint `resume`; the rows depend on the
    step alone. Saves to `save`; returns this rank's saved number, None where it is new."""
    torch.manual_seed(0)
    model = load_model(str(resume))[0] if resume else shard(timing.tiny_llama(vocab=50, hidden=32, layers=2))
    optimizers, start, number = make_optimizers(model, 1e-2), 0, 10 + dist.rank
    if resume:
        shared, own = checkpoint.load_state(resume, optimizers, dist)
        start, number = shared["step"], own.get("number")
    for step in (start, start + 1):
        rows = [TrainSample(torch.randint(50, (6,), generator=torch.Generator().manual_seed(10 * step + i)).tolist(),
                            [0, 1, 1, 1, 1, 1]) for i in range(4)]
        sft_step(model, rows[dist.rank::dist.world_size], optimizers, 1000, dist)

    def write(path):
        save_model(model, build_tokenizer(["a"]), path)
        checkpoint.save_state(path, optimizers, {"step": start + 2}, {"number": 10 + dist.rank}, dist)
    checkpoint.save(save.parent, save.name, write, {}, dist)
    return number


def train_on_two(rank, out):
    dreamgym.model.REPLICATED_BELOW = 0
    dist = run.init_dist(0)
    for resume, name in ((None, "two"), (out / "two", "two-two"), (out / "one", "one-two")):
        numbers = dist.gather([train_some(resume, out / name, dist)])
        if dist.is_main:
            run.write_json(out / f"{name}.json", numbers)
    dist.close()


def test_a_checkpoint_of_n_ranks_is_read_by_m(tmp_path, capsys):
    """A sharded optimizer that only as many ranks can read, or that comes back mixed up."""
    train_some(None, tmp_path / "one", ALONE)
    train_some(tmp_path / "one", tmp_path / "whole", ALONE)
    on_two_ranks(train_on_two, tmp_path)
    assert train_some(tmp_path / "two", tmp_path / "two-one", ALONE) == 10
    assert "saved by 2 ranks, continued by 1" in capsys.readouterr().out
    assert run.read_json(tmp_path / "two-two.json") == [10, 11]
    assert run.read_json(tmp_path / "one-two.json") == [10, None]
    whole, whole_state = load_file(tmp_path / "whole/model.safetensors"), torch.load(tmp_path / "whole/training.pt")
    start = load_file(tmp_path / "one/model.safetensors")
    for name in ("two-one", "two-two", "one-two"):
        weights, state = load_file(tmp_path / name / "model.safetensors"), torch.load(tmp_path / name / "training.pt")
        for key, want in whole.items():
            assert (weights[key] - want).norm() < 0.01 * (want - start[key]).norm(), (name, key)
        for i, values in whole_state["shared"]["optimizers"][0]["state"].items():
            for key, want in values.items():
                found = state["shared"]["optimizers"][0]["state"][i][key]
                assert found.shape == want.shape and (found - want).norm() <= 0.01 * want.norm(), (name, i, key)
        assert state["shared"]["step"] == 4


# ---- files and log ----

def log_steps(folder, steps, value, resume_step):
    log = run.Log(folder, ALONE, resume_step)
    for step in steps:
        log.step("train", step, {"loss": step + value, "note": "text"}, show=[])
    log.close()


def test_resume_cuts_metrics_and_time_goes_on(tmp_path):
    """A resumed curve that repeats steps; a resume that chokes on the half line of a kill."""
    path = tmp_path / "metrics.jsonl"
    log_steps(tmp_path, range(5), 0.0, -1)
    records = [json.dumps(record | {"time_s": 100.0 + record["step"]}) + "\n" for record in lines(path)]
    path.write_text("".join(records) + '{"schema": 1, "st')
    begun = int(time.time())
    while int(time.time()) == begun:             # TensorBoard orders files by the second in their names
        time.sleep(0.02)
    log_steps(tmp_path, [3], 0.5, 2)
    after = lines(path)
    assert [(r["step"], r["loss"]) for r in after] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.5)]
    assert 102.0 <= after[-1]["time_s"] < 130.0 and after[-1]["schema"] == run.SCHEMA
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.5)]
    log_steps(tmp_path, [], 0.0, -1)
    assert path.read_text() == ""


def test_nan_is_null_and_tensors_are_numbers(tmp_path, capsys):
    """Lines that no JSON reader takes, and NaN that goes by unseen."""
    log = run.Log(tmp_path, ALONE, -1)
    values = {"loss": math.nan, "norms": [1.0, math.inf], "kl": torch.tensor(0.25), "n": np.int64(3)}
    log.step("train", 4, values, show=["kl", "absent"])
    log.close()
    record, = lines(tmp_path / "metrics.jsonl")
    assert [record[key] for key in values] == [None, [1.0, None], 0.25, 3]
    out = capsys.readouterr().out
    assert "train step 4: loss has NaN" in out and "norms has Infinity" in out and "train 4  kl 0.25" in out
    assert out.count("warning") == 2


@pytest.mark.parametrize("before, kept", [
    (None, []), ("", []), ('{"a": 1}\n{"a": 2', [1]), ('{"a": 1}\n{"a": 2}', [1]), ('{"a": 1}\n{"b": "\udcc3', [1])])
def test_appending_after_a_kill(tmp_path, before, kept):
    path = tmp_path / "x.jsonl"
    if before is not None:
        path.write_bytes(before.encode(errors="surrogateescape"))
    run.cut_jsonl(path)
    run.write_jsonl(path, [{"a": 3}], append=True)
    assert lines(path) == [{"a": a} for a in [*kept, 3]]


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2: not JSON"):
        run.cut_jsonl(path, 1)
    with pytest.raises(ValueError, match="metrics.jsonl is not JSON"):
        run.read_json(path)
    for write in (lambda: run.write_json(path, {"a": math.inf}),
                  lambda: run.write_jsonl(path, [{"a": 4}, {"a": math.nan}], append=False)):
        with pytest.raises(ValueError):
            write()
    assert len(path.read_text().splitlines()) == 3       # a failed replacement leaves the old file


def test_progress_without_a_terminal(monkeypatch):
    """Thousands of redrawn bars in log files, silence in long phases, and one bar for each rank."""
    def shown(every_s: float) -> str:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        monkeypatch.setattr(run, "PROGRESS_EVERY_S", every_s)
        with run.progress(4, "rollout", done=1) as bar:
            bar.update(1)
            assert bar.disable or bar.initial == 1   # not counted in the speed
        return sys.stderr.getvalue()
    assert shown(15.0) == "" and "rollout: 2 of 4" in shown(1e-9)
    monkeypatch.setenv("RANK", "1")
    assert shown(1e-9) == ""


def test_summary_table_and_timer():
    """Columns that do not line up, a crash where a row lacks a value."""
    timer = run.Timer()
    for _ in range(2):
        once = timer.found["rollout_s"]
        with timer("rollout"):
            pass
    assert timer.take()["rollout_s"] > once > 0 and timer.take() == {}
    rows = [{"task": "all", "success": 0.123456, "n": 10}, {"task": "hard", "n": 2, "note": "few"}]
    assert run.summary_table(rows) == """\
task  success   n  note
----  -------  --  ----
all    0.1235  10
hard            2  few"""


# ---- checkpoints ----

class Killed(BaseException):
    pass


def save(folder, step):
    def write(path):
        for part in ("a", "b"):
            (path / part).write_text(str(step))
            checkpoint._sync(path / part)  # a point at which the kill test can strike, halfway through the writer
    checkpoint.save(folder, "policy", write, {"step": step}, ALONE)


def whole_step(folder):
    found = checkpoint.latest(folder, "policy", ALONE)
    if found is None:
        return None
    step = run.load_meta(found)["step"]
    assert {(found / part).read_text() for part in ("a", "b")} == {str(step)}, "files of two saves in one"
    assert [path.name for path in folder.iterdir()] == ["policy"], "rests of a save are left"
    return step


def kill_at(monkeypatch, strike, after):
    """Makes the strike-th file operation raise, before it or (after) once it is done; deletion stops halfway."""
    calls = []

    def wrap(owner, name, half=lambda *args: None):
        real = getattr(owner, name)

        def wrapped(*args, **kwargs):
            calls.append(name)
            struck = len(calls) == strike
            if struck and not after:
                half(*args)
                raise Killed
            result = real(*args, **kwargs)
            if struck:
                raise Killed
            return result
        monkeypatch.setattr(owner, name, wrapped)

    for owner, name in ((checkpoint, "_sync"), (checkpoint, "write_json"), (os, "rename"), (os, "replace")):
        wrap(owner, name)
    wrap(shutil, "rmtree", half=lambda path: (Path(path) / "meta.json").unlink(missing_ok=True))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_kill_at_any_point_leaves_a_whole_checkpoint(tmp_path, monkeypatch, first, after):
    """Also a kill of the repair, which a save right after a kill needs no look at the folder for."""
    seen, allowed = set(), {None, 2} if first else {1, 2}
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
        for at in range(1, 7):
            again = shutil.copytree(folder, tmp_path / f"{strike}-{at}")
            with monkeypatch.context() as patch, contextlib.suppress(Killed):
                kill_at(patch, at, after)
                save(again, 3)
            assert whole_step(again) in allowed | {3}
            save(again, 3)
            assert whole_step(again) == 3
        seen.add(whole_step(folder))
    assert strike > 8 and seen == allowed and whole_step(folder) == 2


@pytest.mark.parametrize("write", [
    lambda path: torch.save(torch.zeros(10_000), path / "training.pt"),
    lambda path: save_file({"w": torch.zeros(10_000)}, path / "model.safetensors"),
    lambda path: run.write_json(path / "run.json", list(range(10_000)))])
def test_a_full_disk(tmp_path, write):
    """Stops a traceback, a lost checkpoint, and half a folder that keeps the disk full."""
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))      # a file that does not fit, as a full disk has
    try:
        with pytest.raises(ValueError, match="could not save .*policy: .* MB free there") as error:
            checkpoint.save(tmp_path, "policy", write, {}, ALONE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value) and [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert whole_step(tmp_path) == 1


def test_a_kill_between_two_renames(tmp_path):
    """An older checkpoint in place of the newest whole one; --fresh, and the old model comes back."""
    for name, step in ((".policy.old", 1), (".policy.new", 2)):
        save(tmp_path / "made", step)
        (tmp_path / "made/policy").rename(tmp_path / name)
    (tmp_path / "made").rmdir()
    assert whole_step(tmp_path) == 2
    (tmp_path / "policy").rename(tmp_path / ".policy.old")         # the only one: the second rename failed
    assert whole_step(tmp_path) == 2
    (tmp_path / "policy").rename(tmp_path / ".policy.old")
    checkpoint.remove(tmp_path, "policy", ALONE)
    assert checkpoint.latest(tmp_path, "policy", ALONE) is None


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "thesis.tex").write_text("x")
    for change in (lambda: save(tmp_path, 1), lambda: checkpoint.remove(tmp_path, "policy", ALONE)):
        with pytest.raises(ValueError, match="without meta.json"):
            change()
    assert (tmp_path / "policy" / "thesis.tex").exists()
    with pytest.raises(ValueError, match="policy/meta.json; expected a folder"):
        run.load_meta(tmp_path / "policy")


def test_find_checkpoint_names_every_difference(tmp_path):
    meta = {"settings": {"lr": 1, "layers": (1, 2)}, "environment": {"env": "shop"}}
    assert checkpoint.find(tmp_path, "policy", meta, ALONE) is None
    checkpoint.save(tmp_path, "policy", lambda path: None, meta | {"step": 3}, ALONE)
    assert checkpoint.find(tmp_path, "policy", meta, ALONE) == tmp_path / "policy"
    other = {"settings": {"lr": 2, "layers": [1, 2], "lora": 8}, "environment": {}}
    with pytest.raises(ValueError, match="policy does not fit this run: lr: found 1, expected 2; lora: found nothing, "
                       'expected 8; environment: found {"env": "shop"}, expected {}; use --fresh'):
        checkpoint.find(tmp_path, "policy", other, ALONE)


# ---- Ctrl-C ----

def test_ctrl_c_twice(tmp_path, capfd):
    """A lost step at the first Ctrl-C, a run that cannot be stopped at the second."""
    before, calm = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)), False
    with pytest.raises(KeyboardInterrupt), run.graceful(run.Log(tmp_path, ALONE, -1)) as stop:
        assert not stop.requested and not stop.agreed(ALONE)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested and stop.agreed(ALONE)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler repeating itself is no second Ctrl-C
        calm = stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second Ctrl-C went unheard")
    assert calm and before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert capfd.readouterr().err.count("stopping after this step; run the same command to continue") == 1
