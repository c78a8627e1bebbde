"""The scripts with --env webarena, from the own sites to a policy evaluated with and without a browser, each once and small."""
from __future__ import annotations

import json
import shutil

import pytest

from conftest import run_main
from dreamgym.episode import read_episodes, read_tasks


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder after collect.py, train_expmodel.py and train_policy.py."""
    base = tmp_path_factory.mktemp("webarena")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WEBARENA_DATA", raising=False)
        patch.chdir(base)
        run_main("collect", "--env", "webarena", "--out", base / "data", "--transitions", 200, "--heldout", 80, "--relabelled", 40, "--relabelled-heldout", 15)
        run_main("train_expmodel", "--data", base / "data", "--out", base / "expmodel", "--steps", 4, "--max-steps", 4, "--rows", 4, "--no-report-variants", "--probe-rows", 4)
        run_main("train_policy", "--env", "webarena", "--data", base / "data", "--expmodel", base / "expmodel", "--out", base / "run", "--iterations", 1, "--tasks", 2,
                 "--rollouts", 2, "--updates", 1, "--eval-tasks", 2, "--eval-every", 1, "--imitation-episodes", 2, "--real-transitions", 20)
    return base


def test_collected_data(made):
    # Stops data of another environment, tasks without their first page, held-out sentences in training, and results that do not say what they were made on.
    train, tasks, held_out = read_episodes(made / "data/train.jsonl"), read_tasks(made / "data/tasks_train.jsonl"), read_tasks(made / "data/tasks_test.jsonl")
    assert {e.task.env for e in train} == {"webarena"} and {e.source for e in train} >= {"imperfect", "relabelled"}
    assert all("\nurl: " in task.start for task in tasks + held_out) and (len(tasks), len(held_out)) == (300, 100)
    assert not {e.task.text for e in train} & {task.text for task in held_out}
    assert json.loads((made / "data/meta.json").read_text())["environment"]["sites"] == "own sites"
    report = json.loads((made / "expmodel/report.json").read_text())
    assert report["full"]["transitions"] >= 80 and report["full"]["contradictions"].keys() == {"n", "share", "low", "high"}


def test_policy_and_evaluation(made, monkeypatch, capsys):
    # Stops a script that knows only other environments, and an evaluation that hides on which sites it played, or what kind of held-out task it was.
    monkeypatch.chdir(made)
    last = json.loads((made / "run/result.json").read_text())["evaluations"][-1]
    assert last["dream_transitions"] > 0 and last["real_transitions"] >= 20
    assert any(name.startswith("split new ") for name in last["real_sampled"]["groups"])
    run_main("evaluate", "--env", "webarena", "--policy", made / "run/policy", "--data", made / "data", "--tasks", 2, "--play", 1)
    shown = capsys.readouterr().out
    assert "own sites, real world" in shown and "tasks of test" in shown and "page: " in shown


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium (Debian: apt-get install chromium)")
def test_evaluation_in_a_browser(made, monkeypatch, capsys):
    # Stops --backend chromium from playing without one, and a browser from staying behind.
    pytest.importorskip("playwright")
    monkeypatch.chdir(made)
    run_main("evaluate", "--env", "webarena", "--policy", made / "run/policy", "--data", made / "data", "--tasks", 1, "--backend", "chromium", "--out", made / "seen")
    assert json.loads((made / "seen/report.json").read_text())["environment"]["backend"] == "chromium"
    assert "it is evaluated in" in capsys.readouterr().out


def test_imported_traces(made, monkeypatch, capsys):
    # Stops traces of WebArena from reaching training with element numbers of another page, or with tasks that are a test.
    monkeypatch.chdir(made)
    page = "Tab 0 (current): Shop\n\n[5] RootWebArea 'Shop' focused: True\n\t[8] link 'Cart'\n\t[9] StaticText 'Hello'"
    cart = "Tab 0 (current): Cart\n\n[1] RootWebArea 'Cart' focused: True\n\t[4] heading 'Cart'"
    rows = [{"task_id": 99, "objective": "open the cart", "step_idx": i, "observation": text, "action": action, "url": f"http://h:7770/{i}"}
            for i, (text, action) in enumerate([(page, "click [8]"), (cart, "stop [done]")])]
    (made / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        run_main("collect", "--env", "webarena", "--out", made / "imported", "--import-file", made / "traces.jsonl", "--import-format", "acctree",
                 "--heldout", 40, "--relabelled", 0, "--relabelled-heldout", 0)
    except SystemExit as error:
        pytest.fail(str(error))
    (episode,) = [e for e in read_episodes(made / "imported/train.jsonl") if e.source == "imported"]
    assert episode.steps[0].action == "click [1]" and episode.steps[0].grounded == "click link 'Cart'" and episode.task.env == "webarena"
    with pytest.raises(SystemExit):
        run_main("collect", "--env", "webshop", "--out", made / "no", "--import-file", "x", "--import-format", "render")
    assert "only WebArena has traces" in capsys.readouterr().err
