"""evaluate.py from its command line: tables, readable episodes, files, the defaults of its folders."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from conftest import EXAMPLE
from dreamgym import run
from dreamgym.episode import Step, read_episodes
from dreamgym.model import load_model, save_model
from dreamgym.rollout import PolicySettings
from evaluate import Args, folders, readable

SMALL = ["--tasks", 2, "--temperatures", 0.0, 1.0]


@pytest.fixture(scope="module")
def policy(trained):
    """A policy that can say nothing sensible, in the folder where train_policy.py would leave it."""
    folder = trained.base / "out" / "policy"
    save_model(*load_model(str(trained.expmodel / "model")), folder)
    settings = PolicySettings(context=300, max_action_tok=4, policy_format="action")
    run.write_json(folder / "meta.json", {"settings": {"quantize": "none"}, "policy": asdict(settings)})
    return folder


@pytest.mark.parametrize("world", ["real", "dream"])
def test_policy(policy, script, tmp_path, capsys, world):
    """Stops a table without a row for each temperature, lost repeats, and episodes that cannot be read
    again."""
    script(
        "evaluate",
        "--env",
        EXAMPLE,
        "--policy",
        policy,
        "--world",
        world,
        *SMALL,
        "--repeats",
        2,
        "--play",
        1,
        "--out",
        tmp_path,
    )
    said, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())["report"]
    episodes = read_episodes(tmp_path / "episodes.jsonl")
    assert list(report) == ["0", "1"] and all(
        r["n"] == 4 and list(r["pass_at_k"]) == ["1", "2"] for r in report.values()
    )
    assert [e.id for e in episodes] == [f"{world}-{t}-{i}" for t in "01" for i in range(4)] and {
        e.world for e in episodes
    } == {world}
    assert all(readable(episodes[i]) in said for i in (0, 4)) and f"{world} world, test tasks" in said
    assert len({e.task.id for e in episodes}) == 2


def test_experience_model(trained, script, tmp_path, capsys):
    """Stops a report without its null, its probes or its bound."""
    few = tmp_path / "data"
    few.mkdir()
    (few / "meta.json").write_text((trained.data / "meta.json").read_text())
    (few / "tasks_valid.jsonl").write_text((trained.data / "tasks_valid.jsonl").read_text())
    (few / "valid.jsonl").write_text("\n".join((trained.data / "valid.jsonl").read_text().split("\n")[:2]))
    script(
        "evaluate",
        "--env",
        EXAMPLE,
        "--expmodel",
        trained.expmodel,
        "--data",
        few,
        "--split",
        "valid",
        "--out",
        tmp_path / "out",
    )
    said = capsys.readouterr().out
    assert all(
        words in said
        for words in ("null: the nearest recorded step", "refused action accepted", "Theorem 1", "PROBES")
    )
    report = json.loads((tmp_path / "out/report.json").read_text())["report"]
    assert report["transitions"] == sum(len(e.steps) for e in read_episodes(few / "valid.jsonl"))


def test_recorded_episodes_alone_are_no_world(trained, policy, script, tmp_path):
    """Stops a success rate of a world that does not exist."""
    meta = json.loads((trained.data / "meta.json").read_text())
    meta["settings"]["import_file"] = str(trained.data / "train.jsonl")
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="--world real: logs is no world to play in"):
        script("evaluate", "--env", "logs", "--policy", policy, "--data", tmp_path)


@pytest.mark.parametrize(
    "flags", [{"repeats": 0}, {"tasks": 0}, {"temperatures": []}, {"gamma": 1.0}, {"judge": "http://x/v1"}]
)
def test_flags_that_cannot_be(flags):
    """Stops a run that fails after it has played."""
    with pytest.raises(ValueError, match="expected"):
        Args(**flags)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, ("out/webshop/policy", "out/webshop/expmodel", "out/webshop/data")),
        ({"env": "my/world.py"}, ("out/world/policy", "out/world/expmodel", "out/world/data")),
        ({"policy": "a/policy"}, ("a/policy", "a/expmodel", "a/data")),
        ({"policy": "a/imitation/model", "data": "d"}, ("a/imitation/model", "a/expmodel", "d")),
        ({"expmodel": "a/expmodel"}, ("None", "a/expmodel", "a/data")),
    ],
)
def test_folders(flags, expected):
    """Stops an evaluation on another run's data or experience model."""
    assert tuple(map(str, folders(Args(**flags)))) == expected


def test_readable(trained):
    """Stops an episode to read that leaves out why the reward followed, or what could not be read."""
    episode = read_episodes(Path(trained.data) / "train.jsonl")[0]
    episode.steps = [
        Step(state="a", action="go", next_state="b", reasoning="it moves", reward_reasoning="no gain")
    ]
    episode.output = "nons\x1bense"
    text = readable(episode)
    assert all(
        words in text
        for words in (episode.task.text, "1 > go", "think: it moves", "reward: no gain", "nons\\x1bense")
    )
