"""collect.py as a user meets it: files, splits, kept or collected again, imported logs, refused input, and a language model as the teacher."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import collect
from dreamgym import run, teacher
from dreamgym.envs.webshop import text as text
from dreamgym.envs.webshop.env import WebShop
from dreamgym.envs.webshop.offline import MIX
from dreamgym.episode import read_episodes, read_tasks, to_json

ROOT = Path(__file__).parents[1]
NAMES = ("train.jsonl", "heldout.jsonl", "tasks_train.jsonl", "tasks_test.jsonl", "meta.json")
SMALL = ("--transitions", "150", "--heldout", "60", "--relabelled", "40", "--relabelled-heldout", "15")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder of data, folder of the generated shop, what the program printed): collected once, by the command."""
    base = tmp_path_factory.mktemp("collect")
    environment = {k: v for k, v in os.environ.items() if k != "WEBSHOP_DATA"}
    command = [sys.executable, "collect.py", "--out", str(base / "data"), "--cache", str(base / "shop"), *SMALL]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return base / "data", base / "shop", done.stdout


@pytest.fixture
def again(made, tmp_path, monkeypatch, capsys):
    """A function that runs collect.py in this process on a copy of the data, and returns (what it printed, that copy)."""
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    out = tmp_path / "data"
    shutil.copytree(made[0], out)

    def go(*flags: str) -> tuple[str, Path]:
        monkeypatch.setattr(sys, "argv", ["collect.py", "--out", str(out), "--cache", str(made[1]), *SMALL, *flags])
        capsys.readouterr()
        collect.main()
        return capsys.readouterr().out, out
    return go


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES}


def log(path: Path, episodes) -> str:
    """Episodes as an own log: without what only we write."""
    records = [to_json(episode) for episode in episodes]
    for record in records:
        record.pop("source")
        for step in record["steps"]:
            for name in ("grounded", "reasoning", "info"):
                del step[name]
    run.write_jsonl(path, records, append=False)
    return str(path)


# ---- what is written ---------------------------------------------------------------------------------------------------------------------------

def test_files(made):
    # Stops a missing file, a wrong count, an episode that the reader refuses, results that do not name their catalogue.
    data, _, printed = made
    assert sorted(path.name for path in data.iterdir()) == sorted(NAMES)
    train, heldout, meta = read_episodes(data / "train.jsonl"), read_episodes(data / "heldout.jsonl"), json.loads((data / "meta.json").read_text())
    for episodes, transitions, relabelled in ((train, 150, 40), (heldout, 60, 15)):
        played = sum(len(e.steps) for e in episodes if e.source != "relabelled")
        assert transitions <= played < transitions + 15 and sum(e.source == "relabelled" for e in episodes) == relabelled
        assert {e.source for e in episodes} <= {*MIX, "relabelled"} and all(e.world == "real" and e.stop for e in episodes)
        assert all(step.reasoning and step.grounded == text.ground(step.state, step.action) for e in episodes for step in e.steps)
    assert meta["environment"]["catalogue"] == "generated catalogue" and meta["settings"]["transitions"] == 150 and meta["schema"] == 1
    assert "generated catalogue" in printed and "demonstrator" in printed
    assert {row["source"]: row["episodes"] for row in meta["sources"]}["relabelled"] == 40


def test_nothing_leaks_between_the_splits(made):
    # Stops training on the tasks, the target products or the relabelled pages that errors and success are measured on.
    data, shop, _ = made
    train, heldout = read_episodes(data / "train.jsonl"), read_episodes(data / "heldout.jsonl")
    tasks, test_tasks = read_tasks(data / "tasks_train.jsonl"), read_tasks(data / "tasks_test.jsonl")
    assert not {t.id for t in tasks} & {t.id for t in test_tasks} and len(test_tasks) >= 500
    assert {e.task.id for e in train if e.source != "relabelled"} <= {t.id for t in tasks}
    assert {e.task.id for e in heldout if e.source != "relabelled"} <= {t.id for t in test_tasks}
    goals = WebShop(data_dir=str(next(shop.iterdir()))).engine.goals
    targets, held_out = ({goals[t.goal["goal_index"]].asin for t in part} for part in (tasks, test_tasks))
    assert not targets & held_out
    pages, held_out = ({e.steps[0].state for e in part if e.source == "relabelled"} for part in (train, heldout))
    assert pages and held_out and not pages & held_out


# ---- kept, or collected again ------------------------------------------------------------------------------------------------------------------

def test_data_that_fits_is_kept(again, made, tmp_path):
    # Stops an hour of work done twice, and a cache folder or a fresh flag that counts as another data set.
    before = contents(made[0])
    printed, out = again("--cache", str(tmp_path / "elsewhere"))
    assert "kept" in printed and contents(out) == before and not (tmp_path / "elsewhere").exists()


def test_fresh_gives_the_same_bytes(again, made):
    # Stops data that depends on more than its flags; also that --fresh does collect.
    before = contents(made[0])
    printed, out = again("--fresh")
    assert "kept" not in printed and contents(out) == before


def test_other_flags_or_missing_files_collect_again(again, made):
    # Stops stale data behind new flags, and half a data set that passes for a whole one.
    _, out = again("--seed", "1")
    assert (out / "train.jsonl").read_bytes() != (made[0] / "train.jsonl").read_bytes() and run.read_json(out / "meta.json")["settings"]["seed"] == 1
    again()
    assert contents(out) == contents(made[0])
    (out / "tasks_test.jsonl").unlink()
    assert "kept" not in again()[0] and contents(out) == contents(made[0])


def test_a_killed_collection_is_not_kept(again, made, tmp_path, monkeypatch):
    # Stops new episodes beside the old meta.json, which would pass for the old data later.
    def killed(*args, **flags):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_jsonl", killed)
        with pytest.raises(KeyboardInterrupt):
            again("--seed", "2")
    assert not (tmp_path / "data" / "meta.json").exists()
    printed, out = again()
    assert "kept" not in printed and contents(out) == contents(made[0])


# ---- own logs ----------------------------------------------------------------------------------------------------------------------------------

def test_import(again, made, tmp_path):
    # Stops logs whose optional fields stay empty (the experience model reads `grounded`), ids that collide with ours, and held-out tasks in training.
    own = [e for e in read_episodes(made[0] / "train.jsonl") if e.source != "relabelled"][:8]
    texts = {task.text for task in read_tasks(made[0] / "tasks_train.jsonl")}
    held_out = next(e for e in read_episodes(made[0] / "heldout.jsonl") if e.source != "relabelled" and e.task.text not in texts)
    path = log(tmp_path / "log.jsonl", [*own, held_out])
    printed, out = again("--import-file", path)
    train = read_episodes(out / "train.jsonl")
    imported = [e for e in train if e.source == "imported"]
    assert [e.id for e in imported] == [f"imported-{e.id}" for e in own] and "1 of 9 imported episodes left out" in printed
    for before, after in zip(own, imported):
        for old, new in zip(before.steps, after.steps, strict=True):
            assert (old.state, old.action, old.next_state, old.reward, old.done, old.grounded) == (new.state, new.action, new.next_state, new.reward, new.done, new.grounded)
            assert old.reasoning == new.reasoning or " to $" in old.state
    assert {e.source for e in train} == {"imported", "relabelled"} and sum(e.source == "relabelled" for e in train) == 40
    assert "kept" in again("--import-file", path)[0]
    log(tmp_path / "log.jsonl", own[:4])
    assert "kept" not in again("--import-file", path)[0]                  # the same name, another content


def test_our_own_data_can_be_imported(again, made):
    # Stops two episodes with one id in train.jsonl, which every reader refuses.
    _, out = again("--import-file", str(made[0] / "train.jsonl"))
    train = read_episodes(out / "train.jsonl")
    assert 75 <= sum(e.source == "relabelled" for e in train) <= 80      # a made-up instruction may happen to be a held-out one
    assert {e.source for e in train} <= {*MIX, "relabelled"}


BAD = {
    "not JSON": (lambda r: "{", r":2: not JSON"),
    "field missing": (lambda r: {k: v for k, v in r.items() if k != "steps"}, r":2: field `steps` is missing"),
    "no reward but 0 and 1": (lambda r: r | {"steps": [r["steps"][0] | {"reward": 0.5}]}, r":2, steps\[0\]: field `reward` is 0.5"),
    "an official page": (lambda r: r | {"steps": [r["steps"][0] | {"state": "WebShop [SEP] Instruction:"}]}, r":2, steps\[0\]: field `state` begins with 'WebShop \[SEP\]"),
    "another environment": (lambda r: r | {"task": r["task"] | {"env": "alfworld"}}, r":2: fields `task.env` and `world` are 'alfworld'"),
    "dreamt": (lambda r: r | {"world": "dream"}, r":2: fields .* 'dream', expected 'webshop' and 'real'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_named(again, made, tmp_path, case):
    # Stops logs that are taken half, or refused without saying where.
    change, message = BAD[case]
    good = to_json(read_episodes(made[0] / "train.jsonl")[0])
    bad = change(good | {"id": "b"})
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(good)}\n{bad if isinstance(bad, str) else json.dumps(bad)}\n")
    before = contents(made[0])
    with pytest.raises(SystemExit, match=f"collect.py: .*log.jsonl{message}"):
        again("--import-file", str(path))
    assert contents(tmp_path / "data") == before


def test_an_empty_import_is_refused(again, made, tmp_path):
    # Stops collecting by our own players because the log held nothing.
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SystemExit, match="empty.jsonl: holds no episode"):
        again("--import-file", str(tmp_path / "empty.jsonl"))
    with pytest.raises(SystemExit, match="nowhere.jsonl: no such file"):
        again("--import-file", str(tmp_path / "nowhere.jsonl"))
    path = log(tmp_path / "test.jsonl", [e for e in read_episodes(made[0] / "heldout.jsonl") if e.source != "relabelled"][:1])
    with pytest.raises(SystemExit, match="all 1 imported episodes are of tasks held out"):
        again("--import-file", path)


# ---- refused input -----------------------------------------------------------------------------------------------------------------------------

def test_bad_flags(again, capsys):
    # Stops a traceback, or a run of minutes, before a mistyped flag is noticed.
    for flags, message in ((("--env", "webshopp"), "--env webshopp: unknown environment; this version has webshop"), (("--transitions", "0"), "expected at least 1 transition"),
                           (("--relabelled", "-1"), "nothing below 0"), (("--teacher", "http://127.0.0.1:1/v1"), "expected --teacher-model")):
        with pytest.raises(SystemExit) as refused:
            again(*flags)
        assert refused.value.code == 2 and message in capsys.readouterr().err


def test_bad_catalogue_names_file_product_and_field(made, tmp_path):
    # Stops an unreadable catalogue that ends in a traceback without its place.
    folder = tmp_path / "shop"
    shutil.copytree(next(made[1].iterdir()), folder)
    items = json.loads((folder / "items_shuffle_1000.json").read_text())
    items[7]["pricing"] = "ten dollars"
    (folder / "items_shuffle_1000.json").write_text(json.dumps(items))
    done = subprocess.run([sys.executable, "collect.py", "--out", str(tmp_path / "data"), "--data-dir", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert f"items_shuffle_1000.json, product 7 (asin {items[7]['asin']}), field 'pricing'" in done.stderr and "'ten dollars'" in done.stderr
    assert not (tmp_path / "data").exists()


def test_too_few_tasks(again, made, tmp_path):
    # Stops a crash on a split without tasks: human goals of a small catalogue all belong to the test split.
    with pytest.raises(SystemExit, match="split 'train' has 0 tasks"):
        again("--data-dir", str(next(made[1].iterdir())), "--human-goals")


# ---- a language model as the teacher -----------------------------------------------------------------------------------------------------------

def answer(messages: list[dict], word: str) -> str:
    steps = json.loads(messages[1]["content"].split("\n")[0])["steps"]
    plans = [{"step_id": i, "transition_plan": f"{word} {step['action']}"} for i, step in enumerate(steps)]
    return json.dumps({"task_tutorial": dict.fromkeys(("overall_plan", "success_mode", "failure_mode"), "x"), "state_transitions": plans})


def test_traces_by_an_endpoint(again, made, monkeypatch):
    # Stops traces on the wrong steps, lost or reordered episodes, rules' traces thrown away on failure, and paying twice for the same episode.
    asked = []

    def openai_ask(base_url, model, key_env):
        def ask(messages):
            asked.append(messages)
            return "no JSON" if "click[next >]" in messages[1]["content"] else answer(messages, f"{model} says")
        return ask
    monkeypatch.setattr(teacher, "openai_ask", openai_ask)
    flags = ("--teacher", "http://127.0.0.1:1/v1", "--teacher-model", "m", "--relabelled", "0", "--relabelled-heldout", "0")
    printed, out = again(*flags)
    failed = 0
    for name in ("train.jsonl", "heldout.jsonl"):
        before = [e for e in read_episodes(made[0] / name) if e.source != "relabelled"]
        after = read_episodes(out / name)
        assert [e.id for e in after] == [e.id for e in before]
        for old, new in zip(before, after):
            kept = any("click[next >]" in step.action for step in old.steps)
            failed += kept
            assert [s.reasoning for s in new.steps] == [s.reasoning if kept else f"m says {s.grounded}" for s in old.steps]
    assert failed and "keep their old traces (the first: 4 unusable answers" in printed
    requests = len(asked)
    assert "kept" in again(*flags)[0] and len(asked) == requests
    (out / "meta.json").unlink()                                           # as after a kill: only what failed is asked again
    again(*flags)
    assert len(asked) == requests + 4 * failed
    again(*flags, "--fresh")
    assert len(asked) == 2 * requests + 4 * failed


def test_an_endpoint_that_is_down(again, monkeypatch):
    # Stops a traceback, and data without traces that passes for finished.
    def down(messages):
        raise teacher.EndpointError("http://127.0.0.1:1/v1: 6 tries failed")
    monkeypatch.setattr(teacher, "openai_ask", lambda *args: down)
    with pytest.raises(SystemExit, match="collect.py: .*the same command continues"):
        again("--teacher", "http://127.0.0.1:1/v1", "--teacher-model", "m")


def test_a_local_model_as_teacher(tmp_path, monkeypatch):
    # Stops a local teacher that cannot be loaded or asked; a random model's answer is of course unusable, and counted as such.
    from dreamgym.model import create_tiny, save_model
    from dreamgym.tokenizer import build_tokenizer
    tokenizer = build_tokenizer(["find me a red vest"])
    save_model(create_tiny(tokenizer, "tiny"), tokenizer, tmp_path / "model")
    monkeypatch.setattr(collect, "TRACE_TOK", 4)
    assert isinstance(collect.local_ask(str(tmp_path / "model"))([{"role": "system", "content": "explain"}, {"role": "user", "content": "red vest"}]), str)
    with pytest.raises(ValueError):
        collect.local_ask(str(tmp_path / "nowhere"))
