"""collect.py as a user meets it: files, splits, kept or collected again, recorded episodes, refused input,
and a language model that plays or explains."""
import json
import shutil

import numpy as np
import pytest
from msgspec.structs import replace

import collect
from dreamgym import offline, run, teacher
from dreamgym.envs.base import Environment, Player, Session, StepResult, make_env
from dreamgym.episode import Episode, Step, StopReason, Task, read_episodes, read_tasks, to_json
from tests.conftest import COLLECT, EXAMPLE

SPLITS = offline.SPLITS


@pytest.fixture
def again(workspace, tmp_path, script, capsys):
    """A function that runs collect.py on a copy of the data, and returns (what it printed, that copy)."""
    out = tmp_path / "data"
    shutil.copytree(workspace.data, out)

    def go(*flags) -> tuple:
        capsys.readouterr()
        script("collect", "--out", out, *COLLECT, *flags)
        return capsys.readouterr().out, out
    return go


def contents(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in collect.FILES}


def write_log(path, episodes) -> str:
    """Episodes as somebody's own log: without what only we write."""
    records = [to_json(replace(e, source="", steps=[replace(s, grounded="", reasoning="", reward_reasoning="")
                                                    for s in e.steps])) for e in episodes]
    run.write_jsonl(path, records, append=False)
    return str(path)


# ---- what is written -----------------------------------------------------------------------------

def test_files(workspace):
    """A missing file, a wrong count, an episode that the reader refuses, a result that does not name its
    data."""
    assert sorted(path.name for path in workspace.data.iterdir()) == sorted(collect.FILES)
    for split, transitions in zip(SPLITS, (300, 50, 50)):
        episodes = read_episodes(workspace.data / f"{split}.jsonl")
        tasks = read_tasks(workspace.data / f"tasks_{split}.jsonl")
        assert transitions <= sum(len(e.steps) for e in episodes) < transitions + 15
        assert {e.source for e in episodes} == {"solver", "random"} and all(e.world == "real" and e.stop
                                                                            for e in episodes)
        assert all(step.reasoning and step.reward_reasoning and step.grounded for e in episodes
                   for step in e.steps)
        assert {e.task.text for e in episodes} <= {task.text for task in tasks}
        assert all(task.env == EXAMPLE and task.start for task in tasks)
    meta = json.loads((workspace.data / "meta.json").read_text())
    assert meta["settings"]["transitions"] == 300 and meta["max_steps"] == 15
    assert meta["environment"] == {"env": EXAMPLE}
    assert sum(row["episodes"]
               for row in meta["sources"]) == len(read_episodes(workspace.data / "train.jsonl"))


# ---- kept, or collected again --------------------------------------------------------------------

def test_data_that_fits_is_kept(again, workspace, monkeypatch):
    """An hour of work done twice."""
    monkeypatch.setattr(collect, "gather", None)
    printed, out = again()
    assert "kept" in printed and contents(out) == contents(workspace.data)


def test_fresh_gives_the_same_bytes(again, workspace):
    """Data that depends on more than its flags; also that --fresh does collect."""
    printed, out = again("--fresh")
    assert "kept" not in printed and contents(out) == contents(workspace.data)


def test_other_flags_or_missing_files_collect_again(again, workspace):
    """Stale data behind new flags, and half a data set that passes for a whole one."""
    _, out = again("--seed", 1)
    assert (out / "train.jsonl").read_bytes() != (workspace.data / "train.jsonl").read_bytes()
    assert run.read_json(out / "meta.json")["settings"]["seed"] == 1
    again()
    assert contents(out) == contents(workspace.data)
    (out / "tasks_test.jsonl").unlink()
    assert "kept" not in again()[0] and contents(out) == contents(workspace.data)


def test_an_edited_environment_collects_again(script, tmp_path, capsys):
    """Data of an environment that the user has changed since."""
    path = tmp_path / "files.py"
    for change, kept in (("", False), ("", True), ("# changed\n", False)):
        text = path.read_text() if path.exists() else open(EXAMPLE).read()
        path.write_text(text + change)
        script("collect", "--env", path, "--out", tmp_path / "d", "--transitions", 20, "--heldout", 5)
        assert ("kept" in capsys.readouterr().out) == kept


def test_a_killed_collection_is_not_kept(again, workspace, tmp_path, monkeypatch):
    """New episodes beside the old meta.json, which would pass for the old data later."""
    def killed(*args, **flags):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_jsonl", killed)
        with pytest.raises(KeyboardInterrupt):
            again("--seed", 2)
    assert not (tmp_path / "data" / "meta.json").exists()
    assert "kept" not in again()[0] and contents(tmp_path / "data") == contents(workspace.data)


# ---- recorded episodes ---------------------------------------------------------------------------

def test_import(again, workspace, tmp_path):
    """Logs whose optional fields stay empty, ids that collide with ours, and held-out tasks in training."""
    own = read_episodes(workspace.data / "train.jsonl")[:8]
    held_out = read_episodes(workspace.data / "test.jsonl")[:1]
    path = write_log(tmp_path / "log.jsonl", own + held_out)
    printed, out = again("--import-file", path)
    train = read_episodes(out / "train.jsonl")
    assert "8 of 9 recorded episodes are for training" in printed and {e.source
                                                                       for e in train} == {"imported"}
    assert [e.id for e in train] == [f"imported-{e.id}" for e in own]
    assert [e.steps for e in train] == [e.steps
                                        for e in own]  # reasoning and grounded actions are filled in
    assert (out / "test.jsonl").read_bytes() == (workspace.data / "test.jsonl").read_bytes()
    assert "kept" in again("--import-file", path)[0]
    write_log(tmp_path / "log.jsonl", own[:4])
    assert "kept" not in again("--import-file", path)[0]                  # the same name, another content


def test_logs_alone(script, workspace, tmp_path):
    """Recorded episodes without an environment: a task in two splits, or a split without episodes."""
    path = write_log(tmp_path / "log.jsonl", read_episodes(workspace.data / "train.jsonl"))
    script("collect", "--env", "logs", "--import-file", path, "--out", tmp_path / "data")
    parts = [read_episodes(tmp_path / "data" / f"{split}.jsonl") for split in SPLITS]
    texts = [{e.task.text for e in part} for part in parts]
    assert sum(map(len, parts)) == len(read_episodes(path)) and len(set().union(*texts)) == sum(map(len,
                                                                                                    texts))
    assert texts == [{task.text for task in read_tasks(tmp_path / "data" / f"tasks_{split}.jsonl")}
                     for split in SPLITS]
    assert run.read_json(tmp_path / "data" / "meta.json")["environment"]["env"] == "logs"


@pytest.mark.parametrize("change, message", [
    ({"world": "dream"}, "fields `world` and `task.env` are 'dream'"),
    ({"task": Task(id="t", text="x", env="webshop")}, "'webshop', expected 'real' and "),
    ({"steps": []}, r"log.jsonl:2: field `steps` is empty"),
])
def test_bad_logs_are_named(again, workspace, tmp_path, change, message):
    """Logs that are taken half, or refused without saying why; data that is lost although nothing was
    collected."""
    good = read_episodes(workspace.data / "train.jsonl")[0]
    path = write_log(tmp_path / "log.jsonl", [good, replace(good, id="b", **change)])
    with pytest.raises(ValueError, match=message):
        again("--import-file", path)
    assert contents(tmp_path / "data") == contents(workspace.data)


def test_imports_without_training_episodes(again, workspace, tmp_path):
    """Scripted episodes collected in silence because the log held nothing to train on."""
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="empty.jsonl: holds no episode"):
        again("--import-file", tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="nowhere.jsonl: no such file"):
        again("--import-file", tmp_path / "nowhere.jsonl")
    path = write_log(tmp_path / "test.jsonl", read_episodes(workspace.data / "test.jsonl")[:1])
    with pytest.raises(ValueError, match="all 1 recorded episodes are of validation and test tasks"):
        again("--import-file", path)
    with pytest.raises(ValueError, match="reads no traces of other formats"):
        again("--import-file", path, "--import-format", "render")


# ---- refused input -------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, message", [
    (("--transitions", 0), "at least 1 transition"), (("--counterfactuals", -1), "nothing below 0"),
    (("--teacher", "http://127.0.0.1:1/v1"), "expected --teacher-model"), (("--player", "NAME"),
                                                                           "--player: expected"),
    (("--player-share", 0), "--player-share 0.0"), (("--import-format", "render"),
                                                    "expected --import-file, too"),
])
def test_bad_flags(again, capsys, flags, message):
    """A traceback, or a run of minutes, before a mistyped flag is noticed."""
    with pytest.raises(SystemExit) as refused:
        again(*flags)
    assert refused.value.code == 2 and message in capsys.readouterr().err


class Counter(Environment):
    """The smallest world: one task a split; its state counts to two. All that the contract makes optional is
    left out."""
    name = "counter"

    def __init__(self, **changes):
        self.ended = []
        vars(self).update({"end": self.ended.extend} | changes)

    def tasks(self, split):
        return [Task(id=split, text=f"count in {split}")]

    def reset(self, tasks):
        return [Session(task.id, task, "0") for task in tasks]

    def step(self, sessions, actions):
        for session in sessions:
            session.state = str(int(session.state) + 1)
        return [StepResult(s.state, np.float64(s.state == "2"), s.state == "2") for s in sessions]


GO = {"go": Player(lambda session, rng: lambda state: "go")}


def test_a_minimal_environment():
    """An environment of three methods that cannot be collected from: no start, no reasons, numpy's
    numbers."""
    env = Counter()
    task = offline.read_tasks(env, "train")[0]
    assert (task.start, task.env) == ("0", "counter")
    episodes = offline.play_many(env, GO, [task], 3, np.random.default_rng(0), "train")
    assert [e.id for e in episodes] == ["train-0", "train-1"] and episodes[0].source == "go"
    assert to_json(episodes[0])["stop"] == "success" and len(env.ended) == 3


def test_the_step_limit_ends_an_episode():
    """An episode that never ends, or that ends without a reason."""
    episode = offline.play(Counter(max_steps=1), Task(id="t", text="x"), GO["go"], None, "e")
    assert len(episode.steps) == 1 and episode.stop == StopReason.STEP_LIMIT and not episode.success


def test_what_an_environment_may_not_do():
    """A bad answer of an environment that shows up weeks later; a session that is not given back after an
    error."""
    for result, message in ((StepResult("1", reward=1.0), "reward 1 with done false"),
                            (StepResult("1", reward=0.5, done=True), "field `reward` is 0.5")):
        env = Counter(step=lambda sessions, actions, result=result: [result], max_steps=1)
        with pytest.raises(ValueError, match=f"counter, e, .*{message}"):
            offline.play(env, Task(id="t", text="x"), GO["go"], None, "e")
        assert len(env.ended) == 1
    with pytest.raises(ZeroDivisionError):
        env = Counter(step=lambda sessions, actions: 1 / 0)
        offline.play(env, Task(id="t", text="x"), GO["go"], None, "e")
    assert len(env.ended) == 1


@pytest.mark.parametrize("changes, message", [({"players": dict}, "has no players: give recorded episodes"),
                                              ({"tasks": lambda split: []}, "has no train tasks")])
def test_an_environment_without_players_or_tasks(tmp_path, changes, message):
    """A traceback deep in the random generator."""
    with pytest.raises(ValueError, match=message):
        collect.gather(Counter(**changes), collect.Args(), tmp_path / "d", {})
    assert not (tmp_path / "d").exists()


def test_counterfactuals_do_not_leak():
    """A reward probe whose task, or whose step, training has judged."""
    def episode(text: str, state: str, source: str = "") -> Episode:
        return Episode(id="x", task=Task(id="x", text=text),
                       steps=[Step(state=state, action="buy", next_state="end")], source=source)
    found = [episode("count in train", "a"), episode("count in test", "b"), episode("new", "c"),
             episode("new", "d")]
    env = Counter(counterfactuals=lambda episodes, count, rng: found[:count])
    tasks = {split: offline.read_tasks(env, split) for split in SPLITS}
    parts = {split: [] for split in SPLITS}
    parts["train"] = offline.counterfactuals(env, parts, tasks, "train", 3, None)
    assert [e.steps[0].state for e in parts["train"]] == ["a", "c"]
    assert [e.id for e in parts["train"]] == ["counterfactual-train-0", "counterfactual-train-1"]
    held_out = offline.counterfactuals(env, parts, tasks, "test", 4, None)
    assert [e.steps[0].state for e in held_out] == ["b", "d"] and held_out[0].task.start == "b"
    assert {e.source for e in held_out} == {"counterfactual"} and offline.counterfactuals(env, parts, tasks,
                                                                                          "test", 0,
                                                                                          None) == []


# ---- a language model plays or explains ----------------------------------------------------------

class FakeEndpoint:
    """An endpoint that solves nothing: it says the same action to every page, in a chat model's wrapping."""
    def __init__(self, url, model, key_env):
        self.asked = []

    def complete(self, messages, max_tokens=None, temperature=None):
        self.asked.append([dict(message) for message in messages])
        return "<think>hm</think><action>cd docs</action>"


def test_a_language_model_plays(again, monkeypatch):
    """A model whose answers are not parsed, or whose episodes count as scripted ones."""
    monkeypatch.setattr(teacher, "Endpoint", FakeEndpoint)
    flags = ("--transitions", 20, "--heldout", 1, "--player", "http://127.0.0.1:1/v1", "--player-model", "m")
    train = read_episodes(again(*flags)[1] / "train.jsonl")
    assert {e.source for e in train} == {"player"} and {s.action for e in train
                                                        for s in e.steps} == {"cd docs"}
    train = read_episodes(again(*flags, "--transitions", 200, "--player-share", 0.5)[1] / "train.jsonl")
    assert {e.source for e in train} == {"player", "solver", "random"}


def test_a_player_sees_a_growing_conversation():
    """A model that does not see the task, or sees each state twice."""
    env, endpoint = make_env(EXAMPLE), FakeEndpoint("", "", "")
    player = offline.language_model_player(env, endpoint, 1.0, 1.0)
    episode = offline.play(env, env.tasks("train")[0], player, None, "e")
    first, second = endpoint.asked[:2]
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"] and second[:2] == first
    assert first[1]["content"].startswith(f"task: {episode.task.text}\nstate:\n")
    assert second[3]["content"] == f"state:\n{episode.steps[1].state}\n"


def test_a_language_model_explains(again, workspace, monkeypatch):
    """Reasoning that lands at other episodes, or requests that are paid for twice."""
    asked = []

    def complete(self, messages, *_):
        asked.append(messages)
        count = len(json.loads(messages[1]["content"].split("\nThe episode")[0])["steps"])
        steps = [{"step_id": i, "transition_plan": f"plan {i}", "reward_plan": f"reward {i}"}
                 for i in range(count)]
        tutorial = {"overall_plan": "a", "success_mode": "b", "failure_mode": "c"}
        return json.dumps({"task_tutorial": tutorial, "state_transitions": steps})
    monkeypatch.setattr(FakeEndpoint, "complete", complete)
    monkeypatch.setattr(teacher, "Endpoint", FakeEndpoint)
    flags = ("--teacher", "http://127.0.0.1:1/v1", "--teacher-model", "m")
    printed, out = again(*flags)
    for name in SPLITS:
        before, after = read_episodes(workspace.data / f"{name}.jsonl"), read_episodes(out / f"{name}.jsonl")
        assert [e.id for e in after] == [e.id for e in before]
        assert all(s.reasoning == f"plan {i}" and s.reward_reasoning == f"reward {i}"
                   for e in after for i, s in enumerate(e.steps))
    requests = len(asked)
    (out / "meta.json").unlink()  # as after a kill: nothing is asked again
    again(*flags)
    assert len(asked) == requests
    again(*flags, "--fresh")
    assert len(asked) == 2 * requests


def test_an_endpoint_that_is_down(again, monkeypatch):
    """A traceback, and data without reasoning that passes for finished."""
    def down(self, messages, *_):
        raise teacher.EndpointError("http://127.0.0.1:1/v1: refused")
    monkeypatch.setattr(FakeEndpoint, "complete", down)
    monkeypatch.setattr(teacher, "Endpoint", FakeEndpoint)
    for who in ("teacher", "player"):
        with pytest.raises(ValueError, match="127.0.0.1:1/v1: refused"):
            again(f"--{who}", "http://127.0.0.1:1/v1", f"--{who}-model", "m")


def test_a_local_model_as_teacher(tmp_path, monkeypatch):
    """A local teacher that cannot be loaded or asked; a random model's answer is of course unusable."""
    from dreamgym.model import save_model
    from dreamgym.tiny import build_tokenizer, create
    tokenizer = build_tokenizer(["find me a red vest"])
    save_model(create("scratch:16x1", tokenizer), tokenizer, tmp_path / "model")
    monkeypatch.setattr(offline, "TEACHER_ANSWER_TOK", 4)
    chat = [{"role": "system", "content": "explain"}, {"role": "user", "content": "red vest"}]
    assert isinstance(offline.local_teacher(str(tmp_path / "model"))(chat), str)
    with pytest.raises(ValueError):
        offline.local_teacher(str(tmp_path / "nowhere"))
