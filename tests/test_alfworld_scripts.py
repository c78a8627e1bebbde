"""The scripts with --env alfworld, from games to an evaluated policy, each once and small."""
from __future__ import annotations

import json

import pytest

from conftest import run_main
from dreamgym.envs.alfworld.engine import require
from dreamgym.envs.alfworld.games import generate
from dreamgym.episode import read_episodes, read_tasks

try:
    require()
except ValueError as error:
    pytest.skip(f"ALFWorld is not installed: {error}", allow_module_level=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, games) after collect.py and train_expmodel.py on 18 generated games."""
    base = tmp_path_factory.mktemp("alfworld")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ALFWORLD_DATA", raising=False)
        patch.chdir(base)
        generate(base / "games", 1, {"train": 6, "valid_seen": 6, "valid_unseen": 6}, check=False)
        run_main("collect", "--env", "alfworld", "--out", base / "data", "--data-dir", base / "games", "--transitions", 200,
                 "--heldout", 80, "--relabelled", 40, "--relabelled-heldout", 15)
        run_main("train_expmodel", "--data", base / "data", "--out", base / "expmodel", "--steps", 4, "--max-steps", 4, "--rows", 4, "--no-report-variants", "--probe-rows", 4)
    return base


def test_collected_data(made):
    # Stops data of another environment, tasks without their first page, splits that share a game, and results that do not say what they were made on.
    train, tasks, held_out = read_episodes(made / "data/train.jsonl"), read_tasks(made / "data/tasks_train.jsonl"), read_tasks(made / "data/tasks_test.jsonl")
    assert {e.task.env for e in train} == {"alfworld"} and {e.source for e in train} >= {"imperfect", "relabelled"}
    assert all(task.start.startswith("room: ") for task in tasks + held_out) and len(tasks) == 6 and len(held_out) == 12
    assert not {task.goal["game"] for task in tasks} & {task.goal["game"] for task in held_out}
    assert json.loads((made / "data/meta.json").read_text())["environment"]["games"] == "generated games"
    report = json.loads((made / "expmodel/report.json").read_text())
    assert report["full"]["transitions"] >= 80 and set(report["full"]["reward_confusion"]) == {"TP", "FP", "FN", "TN"}


def test_policy_and_evaluation(made, monkeypatch, capsys):
    # Stops a script that knows only WebShop, and an evaluation that hides the split or the task types.
    monkeypatch.chdir(made)
    run_main("train_policy", "--env", "alfworld", "--data", made / "data", "--expmodel", made / "expmodel", "--out", made / "run", "--iterations", 1, "--tasks", 2, "--rollouts", 2,
             "--updates", 1, "--eval-tasks", 2, "--eval-every", 1, "--imitation-episodes", 2, "--real-transitions", 60)
    result = json.loads((made / "run/result.json").read_text())
    last = result["evaluations"][-1]
    assert last["dream_transitions"] > 0 and last["real_transitions"] >= 60 and result["environment"]["env"] == "alfworld"
    assert any(name.startswith("type ") for name in last["real_sampled"]["groups"]) and any(name.startswith("split valid_") for name in last["real_sampled"]["groups"])
    capsys.readouterr()
    run_main("evaluate", "--env", "alfworld", "--policy", made / "run/policy", "--data", made / "data", "--split", "valid_seen", "--tasks", 2, "--play", 1)
    shown = capsys.readouterr().out
    assert "generated games, real world" in shown and "tasks of valid_seen" in shown and "room: " in shown and "split valid_seen" in shown
    with pytest.raises(ValueError, match="split 'valid'"):
        run_main("evaluate", "--env", "alfworld", "--policy", made / "run/policy", "--data", made / "data", "--split", "valid")
