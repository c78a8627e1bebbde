"""evaluate.py from its command line: tables, readable episodes, files, the defaults of its folders."""
import json
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import pytest

from conftest import EXAMPLE, run_main
from dreamgym import run, tiny
from dreamgym.encoder import WordEncoder
from dreamgym.envs.alfworld import games
from dreamgym.episode import Episode, Step, Task, read_episodes, read_tasks
from dreamgym.experience_model import ExperienceSettings, fill_buffer, save_settings
from dreamgym.model import save_model
from dreamgym.replay import ReplayBuffer
from dreamgym.rollout import PolicySettings
from dreamgym.word_tokenizer import build_tokenizer
import evaluate
from evaluate import Args, folders, load_policy, readable
from test_viewer import held


@pytest.fixture(scope="module")
def made(workspace, tmp_path_factory):
    """A run's folder with a policy and an experience model that can say nothing sensible, and say it fast."""
    tokenizer, encoder = build_tokenizer(["state: next"]), WordEncoder()
    buffer, base = ReplayBuffer(encoder.dim), tmp_path_factory.mktemp("made")
    (base / "data").symlink_to(workspace.data)
    fill_buffer(buffer, encoder, read_episodes(workspace.data / "train.jsonl")[:3])
    limits = ExperienceSettings(context=900, max_next_tok=3, max_reward_tok=3, max_resamples=0)
    for name, settings in (("policy", PolicySettings(900, 4, "action")), ("expmodel/model", limits)):
        save_model(tiny.create("scratch:8x1", tokenizer), tokenizer, base / name)
        meta = {"settings": {"quantize": "none"}, "policy": asdict(settings)}
        run.write_json(base / name / "meta.json", meta)
    buffer.save(base / "expmodel/model/replay")
    save_settings(base / "expmodel/model", limits, "words", encoder)
    return SimpleNamespace(policy=base / "policy", expmodel=base / "expmodel", data=base / "data")


def go(*flags) -> None:
    run_main("evaluate", "--env", EXAMPLE, *flags)


@pytest.mark.parametrize("world", ["real", "dream"])
def test_policy(made, tmp_path, capsys, world):
    """A table without a row for each temperature, lost repeats, episodes that cannot be read again."""
    run_main("evaluate", "--policy", made.policy, "--world", world, "--tasks", 2,      # --env: the data's
             "--temperatures", 0.0, 1.0, "--repeats", 2, "--play", 1, "--out", tmp_path, "--html",
             tmp_path / "page.html")
    said, report = capsys.readouterr().out, run.read_json(tmp_path / "report.json")["report"]
    episodes = read_episodes(tmp_path / "episodes.jsonl")
    assert [(t, r["n"], list(r["pass_at_k"])) for t, r in report.items()] == [("0", 2, ["1"]),
                                                                              ("1", 4, ["1", "2"])]
    assert [(e.id, e.world) for e in episodes] == [(f"{world}-{t}-{i}", world)
                                                   for t, n in (("0", 2), ("1", 4)) for i in range(n)]
    assert {task: len(row) for task, row in report["1"]["outcomes"].items()} == {
        e.task.id: 2 for e in episodes}
    assert all(readable(episodes[i]) in said for i in (0, 2)) and f"{world} world, test tasks" in said
    assert len({e.task.id for e in episodes}) == 2 and "tasks that were never won" in said
    rows = held(tmp_path / "page.html")["rows"]                  # the other world was played, the dream asked
    assert len(rows) == 2 and all(row["real"] and row["dream"] for row in rows)
    assert all(len(row["asked"]["steps"]) == len(row["real"]["steps"]) for row in rows)
    go("--policy", made.policy, "--world", world, "--tasks", 2, "--temperatures", 0.0, "--others",
       tmp_path / "episodes.jsonl", "--out", tmp_path / "again")
    found = run.read_json(tmp_path / "again/report.json")["never_won"]
    assert (found["tasks"]["n"], found["episodes_each"]) == (2, 4)      # one here, three of the other policy


def test_the_bound(made, tmp_path, capsys):
    """A gap of other tasks than its bound, or of the wrong sign."""
    go("--policy", made.policy, "--bound", "--tasks", 3, "--repeats", 2, "--temperatures", 1.0, "--out", tmp_path)
    found = run.read_json(tmp_path / "report.json")["report"]["1"]
    assert (found["real"]["n"], found["dream"]["n"], found["bound"]["n"], found["gap"]["tasks"]) == (6, 6, 6, 3)
    assert found["bound"]["share"] == found["bound_page"]["share"] == 1.0     # it can say nothing sensible
    assert found["gap"]["mean"] == pytest.approx(found["dream"]["share"] - found["real"]["share"])
    steps = [step for episode in read_episodes(tmp_path / "episodes.jsonl") for step in episode.steps]
    assert found["granted"]["n"] == sum(not step.valid for step in steps)
    assert "bound_reward" in capsys.readouterr().out


def test_experience_model(made, tmp_path, capsys):
    """A report without its null, its probes or its bound."""
    for name in ("meta.json", "tasks_valid.jsonl", "valid.jsonl"):
        lines = (made.data / name).read_text().splitlines(keepends=True)
        (tmp_path / name).write_text("".join(lines[:2] if name == "valid.jsonl" else lines))
    go("--expmodel", made.expmodel, "--data", tmp_path, "--split", "valid", "--out", tmp_path / "out", "--html",
       tmp_path / "page.html")
    said = capsys.readouterr().out
    assert all(words in said for words in ("null: the nearest recorded step", "refused action accepted",
                                           "Theorem 1", "PROBES"))
    report = run.read_json(tmp_path / "out/report.json")["report"]
    assert all(row["asked"] and not row["dream"] for row in held(tmp_path / "page.html")["rows"])
    assert report["transitions"] == sum(len(e.steps) for e in read_episodes(tmp_path / "valid.jsonl"))


def test_recorded_episodes_alone_are_no_world(made, tmp_path):
    meta = json.loads((made.data / "meta.json").read_text())
    meta["settings"]["import_file"] = str(made.data / "train.jsonl")
    run.write_json(tmp_path / "meta.json", meta)
    with pytest.raises(ValueError, match="--world real: logs is no world to play in"):
        run_main("evaluate", "--env", "logs", "--policy", made.policy, "--data", tmp_path)


@pytest.mark.parametrize("flags, expected", [
    ({}, ("out/webshop/policy", "out/webshop/expmodel", "out/webshop/data")),
    ({"env": "my/world.py"}, ("out/world/policy", "out/world/expmodel", "out/world/data")),
    ({"policy": "a/policy"}, ("a/policy", "a/expmodel", "a/data")),
    ({"policy": "a/imitation/model", "data": "d"}, ("a/imitation/model", "a/expmodel", "d")),
    ({"expmodel": "a/expmodel"}, ("None", "a/expmodel", "a/data"))])
def test_folders(flags, expected):
    """An evaluation on another run's data or experience model."""
    assert tuple(map(str, folders(Args(**flags)))) == expected


def test_readable():
    """An episode to read that leaves out why the reward followed, or what could not be read."""
    step = Step(state="a", action="go", next_state="b", reasoning="it moves", reward_reasoning="no gain")
    text = readable(Episode(id="e", task=Task(id="t", text="find it"), steps=[step], output="nons\x1bense"))
    assert all(words in text for words in ("find it", "1 > go", "think: it moves", "reward: no gain",
                                           "nons\\x1bense"))


@pytest.mark.parametrize("env, needs", [("webshop", ""), ("webarena", ""), ("alfworld", "textworld")])
@pytest.mark.parametrize("player, wins", [("null", 0), ("oracle", 3)])
def test_players_check_an_installation(tmp_path, monkeypatch, env, needs, player, wins):
    """An agent without a model that needs data first, an oracle that fails, a null that is paid."""
    if needs:
        pytest.importorskip(needs, reason="needs requirements-alfworld.txt")
        monkeypatch.chdir(tmp_path)              # where games are generated, here few
        few = partial(games.generate, counts={"train": 1, "valid": 1, "test": 3})
        monkeypatch.setattr("dreamgym.envs.alfworld.env.generate", few)
    run_main("evaluate", "--env", env, "--policy", player, "--tasks", 3, "--out", tmp_path)
    played = read_episodes(tmp_path / "episodes.jsonl")
    assert [sum(e.success for e in played), len(played)] == [wins, 3]


def test_a_player_plays_the_tasks_of_the_data(made, tmp_path, monkeypatch):
    """A player and a policy that are compared on different tasks; options of another world that are not used."""
    kept = {task.id for task in read_tasks(made.data / "tasks_test.jsonl")}
    played = lambda *flags: (go("--policy", "null", "--out", tmp_path, *flags),
                             {e.task.id for e in read_episodes(tmp_path / "episodes.jsonl")})[1]
    assert played("--data", made.data) == kept
    monkeypatch.chdir(tmp_path)                  # no out/files/data here
    assert played("--env-options", "count=60") != kept == played("--data", made.data, "--tasks", len(kept))
    more = played("--data", made.data, "--env-options", "count=2000")
    assert len(more) > len(kept)


@pytest.mark.parametrize("player, flags, said", [
    *(("oracle", flags, f"{flags[0]}.*oracle is a player of the real environment") for flags in (
        ("--world", "dream"), ("--bound",), ("--html", "a.html"), ("--others", "a"))),
    ("orakel", (), "--policy orakel: webshop has no such player; it has null, oracle")])
def test_what_a_player_cannot_do(player, flags, said):
    """A table of "the dream" whose episodes were real, and flags that did nothing."""
    with pytest.raises(ValueError, match=said):
        run_main("evaluate", "--env", "webshop", "--policy", player, *flags)


def test_a_model_of_the_hub_whose_name_is_a_word(made, tmp_path, monkeypatch):
    """`--policy gpt2` taken for a player."""
    load = evaluate.load_model
    monkeypatch.setattr(evaluate, "load_model", lambda name, **more: load(made.expmodel / "model" if name == "gpt2"
                                                                          else name, **more))
    go("--policy", "gpt2", "--data", made.data, "--tasks", 1, "--temperatures", 0.0, "--out", tmp_path)
    assert len(read_episodes(tmp_path / "episodes.jsonl")) == 1


def test_a_checkpoint_that_is_no_policy(made, tmp_path):
    """A policy that is asked with other prompts than it was trained on, and scores badly in silence."""
    run.write_json(tmp_path / "meta.json", {"schema": 1})
    with pytest.raises(ValueError, match="holds no policy; expected OUT/policy"):
        load_policy(Args(), tmp_path, None, "cpu")
