"""collect.py as a user meets it: files, splits, recorded episodes, refused input, language models."""
import json
import re
import shutil
import threading
from collections import Counter as Tally
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import collect
from dreamgym import hindsight, offline, reasoning, run, teacher
from dreamgym.envs.base import Environment, Player, Session, StepResult
from dreamgym.episode import Episode, StopReason, read_episodes, read_tasks, recorded, to_json
from dreamgym.names import Names
from tests.conftest import COLLECT, EXAMPLE, a_step, a_task, run_main

SPLITS = offline.SPLITS
URL = "http://127.0.0.1:1/v1"
FEW = ("--transitions", 20, "--heldout", 1)
PLAYER = (*FEW, "--player", URL, "--player-model", "m", "--probe-share", 0, "--fresh")


@pytest.fixture
def again(workspace, tmp_path, capsys):
    """A function that runs collect.py on a copy of the data, and returns (what it printed, that copy)."""
    out = shutil.copytree(workspace.data, tmp_path / "data")

    def go(*flags) -> tuple:
        capsys.readouterr()
        run_main("collect", "--out", out, *COLLECT, *flags)
        return capsys.readouterr().out, out
    return go


def contents(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in collect.FILES}


def write_log(path, episodes) -> str:
    """Episodes as somebody's own log: without what only we write, but for probers."""
    bare = {"grounded": "", "reasoning": "", "reward_reasoning": ""}
    episodes = [replace(e, source="prober" if e.source == "prober" else "", steps=[replace(s, **bare) for s in e.steps])
                for e in episodes]
    run.write_jsonl(path, map(to_json, episodes), append=False)
    return str(path)


# ---- what is written, kept, or collected again ----

def test_files(workspace):
    """A missing file, a wrong count, and an episode that the reader refuses."""
    assert sorted(path.name for path in workspace.data.iterdir()) == sorted(collect.FILES)
    for split, transitions in zip(SPLITS, (300, 50, 50)):
        everything = read_episodes(workspace.data / f"{split}.jsonl")
        episodes = recorded(everything)
        judged = {e.label for e in everything if e.source == "counterfactual"}
        assert judged == {"none", "another task", "unpaid step"} or split != "train"
        tasks = read_tasks(workspace.data / f"tasks_{split}.jsonl")
        assert transitions <= sum(len(e.steps) for e in episodes) < transitions + 15
        sources = {e.source for e in episodes}
        assert sources <= {"solver", "random", "prober"} and len(sources) > (2 if split == "train" else 1)
        assert all(e.world == "real" and e.stop for e in episodes)
        assert all(s.reasoning and s.reward_reasoning and s.grounded for e in episodes for s in e.steps)
        assert {e.task.text for e in episodes} <= {task.text for task in tasks}
        assert all(task.env == EXAMPLE and task.start for task in tasks)
    meta = run.load_meta(workspace.data)
    assert (meta["settings"]["transitions"], meta["max_steps"]) == (300, 15)
    assert meta["environment"] == {"env": EXAMPLE}
    count = len(read_episodes(workspace.data / "train.jsonl"))
    assert sum(row["episodes"] for row in meta["sources"]) == count


def test_collected_once_or_again(again, workspace):
    printed, out = again()
    assert "kept" in printed and contents(out) == contents(workspace.data)
    with pytest.raises(ValueError, match="data does not fit this run: seed: found 0, expected 1; use --fresh to replace"):
        again("--seed", 1)
    assert contents(out) == contents(workspace.data)
    again("--seed", 1, "--fresh")
    assert (out / "train.jsonl").read_bytes() != (workspace.data / "train.jsonl").read_bytes()
    assert run.load_meta(out)["settings"]["seed"] == 1
    for flags in (("--fresh",), ("--fresh",), ()):
        assert "kept" not in again(*flags)[0] and contents(out) == contents(workspace.data)
        (out / "tasks_test.jsonl").unlink()


def test_an_edited_environment_is_another_one(tmp_path):
    args = collect.Args(env=shutil.copy(EXAMPLE, tmp_path))
    before = collect.settings_of(args)
    Path(args.env).write_text("# changed")
    assert collect.settings_of(args)["env_fingerprint"] != before["env_fingerprint"]


def test_a_killed_collection_is_none(again, tmp_path, monkeypatch):
    """New episodes beside the old meta.json, which would pass for the old data later."""
    monkeypatch.setattr(run, "write_jsonl", lambda *_, **flags: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        again("--seed", 2, "--fresh")
    assert not (tmp_path / "data" / "meta.json").exists()


# ---- recorded episodes ----

def test_what_episodes_cannot_teach_is_said(capsys):
    """Found out after training: no success, actions that a policy cannot say, a judge that compares two
    copies of the task, dreams that begin elsewhere, logs in which nothing ends badly. A sound log that is
    warned of."""
    def said(action="wear 'hat'", state="a hat", start=None, from_log=False, text="find hat", **more):
        episodes, tasks = [judged("find hat", state, action, **more)], [a_task(text, start=start or state)]
        offline.warn_of_episodes(episodes, from_log, tasks)
        return capsys.readouterr().out

    assert said() == said(start="elsewhere", text="another") == ""
    for found, message in (
            (said(start="elsewhere"), "1 of 1 training episodes do not begin"),
            (said(from_log=True), "no recorded failure ended an episode"),
            (said(reward=0.0), "none of 1 training episodes succeeded"),
            (said("edit 3   x"), "a policy cannot say 1 actions, such as ['edit 3   x']"),
            (said(" "), "1 of 1 actions are empty"),
            (said(state="Goal: Find  Hat"), "1 of 1 states say the task")):
        assert message in found


def test_import(again, workspace, tmp_path):
    """Logs whose optional fields stay empty, ids that collide with ours, held-out tasks in training, and
    probes of a log of our own that a policy would imitate."""
    own = read_episodes(workspace.data / "train.jsonl")[:40]
    held_out = read_episodes(workspace.data / "test.jsonl")[:1]
    path = write_log(tmp_path / "log.jsonl", own + held_out)
    printed, out = again("--import-file", path, "--fresh")
    train = recorded(read_episodes(out / "train.jsonl"))
    inferred = [e for e in train if e.source == "inferred"]
    assert inferred and not any(step.imitate for e in inferred for step in e.steps)
    train = [e for e in train if e.source != "inferred"]
    assert "40 of 41 recorded episodes are for training" in printed
    sources = ["prober" if e.source == "prober" else "imported" for e in own]
    assert [(e.id, e.source) for e in train] == [(f"imported-{e.id}", source) for e, source in zip(own, sources)]
    assert len(set(sources)) == 2
    assert [e.steps for e in train] == [e.steps for e in own]   # reasoning, grounded actions are filled in
    assert (out / "test.jsonl").read_bytes() == (workspace.data / "test.jsonl").read_bytes()
    assert "kept" in again("--import-file", path)[0]
    (out / "played-train-x.jsonl").touch()
    unknown = write_log(tmp_path / "other.jsonl", [replace(own[0], task=replace(own[0].task, text="Other"))])
    printed, _ = again("--import-file", unknown, "--fresh")
    assert "the text of 1 of 1 recorded episodes, such as 'Other'" in printed and "not used: " in printed
    assert "training episodes succeeded" in printed or "no recorded failure ended an episode" in printed
    write_log(tmp_path / "log.jsonl", own[:4])
    with pytest.raises(ValueError, match="import_file_fingerprint"):      # the same name, another content
        again("--import-file", path)


def test_logs_that_cannot_be_used_are_named(again, workspace, tmp_path):
    """Scripted episodes collected in silence because the log held nothing to train on."""
    good, held_out = (read_episodes(workspace.data / f"{split}.jsonl")[0] for split in ("train", "test"))
    for log, more, message in (
            (None, (), "log.jsonl: no such file"), ([], (), "log.jsonl: holds no episode"),
            ([good, replace(good, id="b", world="dream")], (), "fields `world` and `task.env` are 'dream'"),
            ([replace(good, task=a_task("x", env="webshop"))], (), "'webshop', expected 'real' and "),
            ([held_out], (), "all 1 recorded episodes are of validation and test tasks"),
            ([held_out], ("--import-format", "render"), "reads no traces of other formats")):
        if log is not None:
            write_log(tmp_path / "log.jsonl", log)
        with pytest.raises(ValueError, match=message):
            again("--import-file", tmp_path / "log.jsonl", "--fresh", *more)
    assert contents(tmp_path / "data") == contents(workspace.data)


# ---- environments ----

class Counter(Environment):
    """The smallest world: one task a split; its state counts to two; nothing optional."""
    name = "counter"

    def __init__(self, **changes):
        self.ended = []
        vars(self).update({"end": self.ended.extend} | changes)

    def tasks(self, split):
        return [a_task(f"count in {split}", id=split)]

    def reset(self, tasks):
        return [Session(task, "0") for task in tasks]

    def step(self, sessions, actions):
        for session in sessions:
            session.state = str(int(session.state) + 1)
        return [StepResult(s.state, np.float64(s.state == "2"), s.state == "2") for s in sessions]


GO = {"go": Player(lambda session, rng: lambda state: "go")}


@pytest.mark.parametrize("changes, message", [
    *(({"step": lambda *_, answers=answers: answers, "max_steps": 1}, message) for answers, message in (
        ([], "Counter.step returned a list of 0 for 1 episodes"),
        (StepResult("1"), "Counter.step returned a StepResult for 1 episodes; expected a list"),
        ([("1", 0.0, True, {})], "step returned a tuple; expected a StepResult whose `state` is text"),
        ([StepResult(None)], "Counter.step returned the state None; expected"),
        ([StepResult("1", 0.0, True, "lost")], "stop 'lost': expected one of '', 'success'"),
        ([StepResult("so far\ntask: x")], "a line of a state is 'task: x', expected '> task: x'"),
        ([StepResult("1", reward=1.0)], "counter, e, .*reward 1 with done false"),
        ([StepResult("1", reward=0.5, done=True)], "counter, e, .*field `reward` is 0.5"))),
    ({"step": lambda *_: [StepResult("1")]},
     "counter.step returned the state '1', but left session.state at '0'"),
    ({"explain": lambda *_: ("a", None)},
     "counter.explain returned .* for the action 'go'; expected two texts")])
def test_what_an_environment_may_not_do(changes, message):
    """An endless loop over an environment that answers nothing; a bad answer that shows up weeks later; a
    message that cuts off what is wrong, or is about a field of a file."""
    env = Counter(**changes)
    with pytest.raises(ValueError, match=message):
        offline.play(env, a_task("x"), GO["go"], np.random.default_rng(0), "e")
    assert len(env.ended) == 1


@pytest.mark.parametrize("make, error, message", [
    (lambda session, rng: lambda state: None, ValueError, "player '' acts with None in the state '0'"),
    (lambda session: str, TypeError, r"in `make\(session, rng\)` of player ''")])
def test_the_mistakes_of_a_player_are_named(make, error, message):
    """A beginner who looks for the mistake in `step`, or in our code."""
    env = Counter()
    with pytest.raises(error) as raised:
        offline.play(env, a_task("x"), Player(make), np.random.default_rng(0), "e")
    assert re.search(message, "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])]))
    assert len(env.ended) == 1


@pytest.mark.parametrize("changes, message", [
    ({"reset": lambda tasks: [Session(tasks[0], "0 ")]},
     "--env counter, task .*a line of a state is '0 ', expected '0'"),
    ({"reset": lambda tasks: ["0"]}, "Counter.reset returned a str; expected a Session"),
    ({"max_steps": np.int64(3)}, "its `max_steps` cannot be saved .*expected JSON values"),
    ({"players": dict}, "has no players: give recorded episodes"),
    ({"players": lambda: {"go": str}}, "players: 'go' is a type; expected Player"),
    *(({"tasks": lambda split, tasks=tasks: tasks}, message) for tasks, message in (
        ([], "has no train tasks"),
        ([a_task("a", id="t"), a_task("b", id="t")], "2 of 2 train tasks have the id 't'; expected no id twice"),
        ([a_task("a", id=7)], "--env counter, task 7: Expected `str`, got `int`"),
        ([a_task("a", groups="easy")], "Expected `array`, got `str`")))])
def test_bad_environments_are_refused_at_once(tmp_path, changes, message):
    """Dreams that begin in states that no model can answer; a collection that is lost at its end, or that no
    script can read; results of two tasks that are merged."""
    env = Counter(**{"players": lambda: GO} | changes)
    with pytest.raises(ValueError, match=message):
        collect.gather(env, collect.Args(), tmp_path / "d", {})
    assert not (tmp_path / "d").exists()


def test_an_exception_says_in_which_episode():
    """A traceback of a user's player or environment that ends with "invalid literal for int()" and no
    task."""
    def lost(state):
        raise ValueError("invalid literal")
    with pytest.raises(ValueError) as raised:
        offline.play(Counter(), a_task("count"), Player(lambda *_: lost), None, "e")
    note, = raised.value.__notes__
    assert re.fullmatch(r"in player '', task 'count', state '0' \(test_collect.py, line \d+\)", note)
    env = Counter(step=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        offline.play(env, a_task("count"), GO["go"], None, "e")
    assert raised.value.__notes__[0].startswith("in Counter.step for ['count: go'] (") and len(env.ended) == 1


def test_a_minimal_environment(tmp_path):
    """An environment of three methods that cannot be collected from: no start, and no reasons."""
    env = Counter()
    task = offline.tasks_with_start(env, "train")[0]
    assert (task.start, task.env) == ("0", "counter")
    args = collect.Args(probe_share=0.0)
    episodes = offline.play_many(env, GO, [task], 3, args, "train", tmp_path / "played")
    assert [e.id for e in episodes] == ["train-0", "train-1"] and episodes[0].source == "go"
    assert to_json(episodes[0])["stop"] == "success" and len(env.ended) == 3
    cut = offline.play(Counter(max_steps=1), task, GO["go"], None, "e")
    assert len(cut.steps) == 1 and cut.stop == StopReason.STEP_LIMIT and not cut.success


def test_the_environment_hears_of_its_tasks(tmp_path):
    """Tasks that are made ready too late, or that are not played."""
    heard, played = [], []
    tasks = [a_task(f"count {i}", id=str(i), start="0") for i in range(50)]
    env = Counter(prepare=lambda some: heard.extend([task.id for task in some][::-1]),
                  reset=lambda some: [played.append((some[0].id, len(heard))) or Session(some[0], "0")])
    args = collect.Args(probe_share=0.5)
    episodes = offline.play_many(env, GO, tasks, 300, args, "train", tmp_path / "played")
    own = [told for told, episode in zip(played, episodes) if episode.source != "prober"][1:]    # the first one is at hand
    assert [name for name, _ in own] == heard[:len(own)] and len(heard) - len(own) < 64
    assert all(i < known for i, (_, known) in enumerate(own)) and 50 < len(own) < len(episodes)


def test_interrupted_playing_goes_on(tmp_path):
    """Hours of a language model's episodes that a kill takes, or other episodes after one."""
    task, args = offline.tasks_with_start(Counter(), "train")[0], collect.Args(seed=3, probe_share=0.5)
    names = lambda session, rng: lambda state: f"go {rng.integers(1000)}"
    def play(path, player):
        return offline.play_many(Counter(), {"go": Player(player)}, [task], 40, args, "train", tmp_path / path)
    whole, lives = play("whole", names), [None] * 8
    with pytest.raises(IndexError):
        play("parts", lambda session, rng: lives.pop() or names(session, rng))
    with (tmp_path / "parts").open("a") as file:
        file.write('{"half": ')
    assert 3 < len((tmp_path / "parts").read_text().splitlines()) < 10
    assert play("parts", names) == whole and {e.source for e in whole} == {"go", "prober"}


def judged(text, state, action="buy", after="end", reward=1.0, **more) -> Episode:
    """An episode of one step, which ends it."""
    step = a_step(state, action, after, reward, done=True, reward_reasoning="x")
    stop = StopReason.SUCCESS if reward else StopReason.FAILURE
    return Episode(**{"id": text, "task": a_task(text), "steps": [step], "stop": stop} | more)


def episode_of(name: str, *actions: str) -> Episode:
    return Episode(id=name, task=a_task("find blue mug", id=name),
                   steps=[a_step("s", action, "n") for action in actions])


def test_a_prober_does_what_does_not_fit():
    """Probes that repeat nothing, are never about another thing, never at another time, or always of one
    kind."""
    rng, said = np.random.default_rng(0), ["search[red mug]", "click[3]", "click[buy now]"]
    saying = cycle(said)
    player = Player(lambda session, rng: lambda state: next(saying))
    before, other = episode_of("a", "click[blue]", "click[size 9]"), episode_of("b", "click[green]")
    names = Names([f"find {name} {number}" for name in ("red", "green", "blue", "black") for number in range(90)]
                  + [f"open page {number}" for number in range(900)])
    act = offline.probing(player, before, [other], names, ["search[\0 \0]", "view[\0]"]).make(None, rng)
    actions = [act(f"page of 7 lamps, {'green' if i % 2 else 'red'}") for i in range(900)]
    is_probe = lambda action: not getattr(action, "imitate", True)
    assert sum(map(is_probe, actions)) == pytest.approx(500, abs=60)
    last, repeats = "", 0
    for action in actions:
        repeats += action == last and is_probe(action)
        last = last if is_probe(action) else action
    assert repeats == pytest.approx(110, abs=40)
    probes = {action for action in actions if action not in said}
    at_another_time = {"click[blue]", "click[size 9]", "click[green]"}
    about_another_thing = {"search[green mug]", "search[blue mug]", "search[black mug]", "click[7]", "click[lamps now]"}
    assert at_another_time | about_another_thing <= probes and len(probes) > 30
    assert "search[lamps mug]" not in probes                     # not of one kind
    assert "view[3]" in probes                                   # in another form
    assert {"aa bb", "aa dd", "aacc dd"} <= {offline.mutated("aa bb", "cc dd", "", names, rng) for _ in range(99)}
    assert offline.mutated("", "", "", names, rng) == ""


def prober(player: Player, before: Episode, names: Names, forms=()):
    return offline.probing(player, before, [before], names, forms).make(None, np.random.default_rng(0))


def test_a_prober_tries_likely_mistakes_first():
    """No data say that a thing does not do what another does at its place: dreams let the fridge heat."""
    names = Names([f"find a {thing} please" for thing in ("mug", "egg", "oven", "fridge", "sink")])
    forms = ["go to \0 \0", "put \0 \0 in \0 \0", *(f"{verb} \0 \0 with \0 \0" for verb in ("heat", "cool", "wash"))]
    mistakes = ["cool mug 1 with oven 2", "wash mug 1 with oven 2"]
    assert offline.in_other_forms("heat mug 1 with oven 2", forms, names) == (mistakes, ["put mug 1 in oven 2"])
    assert offline.in_other_forms("go to oven 2", forms, names) == ([], [])
    heat, before = Player(lambda *_: lambda state: "heat mug 1 with oven 2"), episode_of("a", "go to fridge 3")
    act = prober(heat, before, names, forms)
    firsts = []
    for i in range(200):
        said = [act(f"state {i}")]
        while not getattr(said[-1], "imitate", True):
            said.append(act(f"state {i}"))
        firsts.append(tuple(sorted(said[:-1][:2])))
    counts = Tally(firsts)
    assert {*counts} == {(), *((mistake,) for mistake in mistakes), tuple(mistakes)}
    assert counts[()] == pytest.approx(80, abs=20) and counts[tuple(mistakes)] == pytest.approx(72, abs=20)


def test_a_prober_still_does_what_the_player_wants():
    """A player with a memory that takes a refused probe for its own action; probes of what everybody does."""
    asked = []
    player = Player(lambda session, rng: lambda state: asked.append(state) or f"open door {len(asked)}")
    names, before = Names(["find mug"]), episode_of("a", "go to 1")
    act = prober(player, before, names)
    done = [act("the same") for _ in range(300)]
    wanted = [f"open door {i + 1}" for i in range(len(asked))]
    assert list(dict.fromkeys(action for action in done if action in wanted)) in (wanted, wanted[:-1])
    assert 60 < len(asked) < 200
    act = prober(player, episode_of("b", "open door 1"), names)
    assert all(act("the same").startswith("open door") for _ in range(99))


COLORS, THINGS = ("red", "blue", "green", "gray", "pink"), ("mug", "bowl", "jar", "pan", "kettle")
ASKED = Names(f"find a {color} {thing} below 9.50 dollars , size {n}" for n in range(3) for color in COLORS for thing in THINGS)


@pytest.mark.parametrize("state, action, next_state, why, verdict", [
    ("shop\nred mug 2 $8", "buy", "bought", "new : bought", "red : red yes , mug : mug yes , 2 : 2 yes , 9.50 : 8 less"),
    ("shop\nred blue jar 2 $8", "buy the jar", "shop\nred blue jar 2 $8", "red blue jar 2 $8 ; jar : jar yes ; same",
     "red : red yes , mug : jar no , 2 : 2 yes , 9.50 : 8 less 8 less"),
    ("a red mug $12", "next", "the shop\nblue red mug\nsize 1 2 3", "known : the shop",
     "red : blue no red yes , mug : mug yes , 2 : 1 no 2 yes , 9.50 : 12 more"),
    ("shelf 7\nred mug\ngreen jar", "take the blue jar", "shelf 7\nred mug\ngreen jar",
     "green jar ; blue : green no ; jar : jar yes ; page : none no ; line : blue red mug yes ; same", "red : green no , mug : jar no , 2 : 7 no"),
    ("mug 1\n" + "pan 2\n" * 9 + "mug 2, red_mug", "take mug 2 from pan 4", "empty shelf",
     "mug 2, red_mug ; mug 2 : mug 2 yes ; pan 4 : mug 2 no mug no ; page : none no ; line : none no ; new : empty shelf", "red : red yes , mug : mug yes , 2 : 2 yes"),
    ("red pan 1\nblue mug", "take mug from red pan 1", "empty shelf", "red pan 1 ; mug : pan no mug yes ; last : mug yes ; red : red yes ; last : blue no ; "
     "pan 1 : pan 1 yes ; last : mug no ; new : empty shelf", "red : red yes , mug : mug yes , 2 : 1 no"),
    ("color: red blue\nmug\nchosen: red", "click red", "color: red blue\nmug\nchosen: red", "color: red blue ; red : red yes ; last : red yes ; same",
     "red : red yes , mug : mug yes , 2 : none no"),
    ("mug 2\nchosen: red", "click red", "mug 2\nchosen: red", "chosen: red ; red : red yes ; same", "red : red yes , mug : mug yes , 2 : 2 yes , same"),
    ("mug 1.50\npan 2", "take mug 1", "empty shelf", "mug 1.50 ; mug 1 : mug no ; last : pan 2 no ; page : none no ; line : blue red mug no ; new : empty shelf",
     "red : none no , mug : mug yes , 2 : 1 no")])
def test_reasoning_without_rules(state, action, next_state, why, verdict):
    """Names that are compared with another kind's or with a price, or with a line further up; a choice that
    was made before; a page that is called new the second time; an action on what is not there; a refused step
    that shows all of the task, and would be paid; rules that are replaced."""
    history = [a_step("the shop\nblue red mug\nsize 1 2 3", "open", state)]
    step = a_step(state, action, next_state)
    task = a_task("find a red mug below 9.50 dollars , size 2")
    reason = reasoning.CompareWords(ASKED)
    reason.sides = {"$": False}
    assert reason(task, history, step) == (why, verdict)
    played = Episode(id="e", task=task, steps=[*history, step])
    found = offline.explained(Environment(), played, reason).steps[-1]
    assert (found.reasoning, found.reward_reasoning) == (why, verdict)
    assert offline.explained(Environment(), played).steps[-1].reasoning == ""
    ruled = Environment()
    ruled.explain = lambda *_: ("by rule", "")
    assert offline.explained(ruled, played, reason).steps[-1].reward_reasoning == ""


def test_a_known_page_is_looked_up_by_its_first_line():
    """A page that is called new because an older list names it, too, or known because it is listed."""
    room, jar, pan = "room\njar 1\njar 2\npan 1", "at jar 1:\nnothing", "at pan 1:\nnothing"
    history = [a_step(room, "go to jar 1", jar), a_step(jar, "go to pan 1", pan)]
    reason = reasoning.CompareWords(ASKED)
    why = lambda action, after: reason(a_task(""), history, a_step(pan, action, after))[0]
    assert why("go to jar 1", jar) == "at pan 1: ; jar 1 : pan 1 no ; page : at jar 1: yes ; known : at jar 1:"
    assert why("go to jar 2", "at jar 2:") == "at pan 1: ; jar 2 : pan 1 no ; page : at jar 1: no ; line : jar 2 yes ; new : at jar 2:"
    assert reason(a_task(""), history[:1], a_step(pan, "go to jar 1", jar))[0].endswith("known : at jar 1:")    # seen last
    assert why("go to jar 3", pan) == "at pan 1: ; jar 3 : pan 1 no ; page : at jar 1: no ; line : jar 1 no ; same"


def test_what_an_action_needs():
    """A small model never learns which tool heats, and grants or refuses all of them."""
    names = Names(f"find a {thing} please" for thing in (*THINGS, "oven", "sink"))
    played = [Episode(id="e", task=a_task("x"), steps=[a_step("s", f"{verb} {thing} with {tool}", "n")])
              for verb, tool in (("heat", "oven"), ("wash", "sink")) for thing in THINGS]
    reason = reasoning.CompareWords(names, played)
    why = lambda action: reason(a_task("x"), [], a_step("oven\nmug", action, "oven\nmug"))[0]
    assert why("heat mug with oven").endswith(" ; oven : oven yes ; same") and why("wash mug with oven").endswith(" ; sink : oven no ; same")
    assert "sink" not in why("go to oven") and "oven yes" not in reasoning.CompareWords(names, played[:4])(
        a_task("x"), [], a_step("mug", "heat mug with oven", "n"))[0]


def test_words_that_mean_what_pages_show():
    """A cold mug that is paid, because many other tasks ask for "a hot mug". A lamp that nobody lit: two forms of
    the task mean it, and both say "lamp"."""
    def won(text, page, action):
        return [judged(text.format(thing), "shelf", f"{action} {thing}", page.format(thing), 1.0) for thing in THINGS]

    episodes = [*won("heat some {}", "hot {}", "put"), *won("put a hot {}", "hot {}", "put"), *won("find the {} now", "{}", "take"),
                *won("look at {} under lamp", "lit lamp\n{}", "use"), *won("examine {} by lamp", "lit lamp\n{}", "use")]
    meaning = reasoning.CompareWords(Names(episode.task.text for episode in episodes), episodes).meaning
    assert [meaning[word] for word in ("heat", "look", "examine", "lamp")] == ["hot", "lit", "lit", "lamp"]


def test_words_that_count():
    """The first of two things, which looks like the last; other words, which count nothing."""
    def put(many, thing, there, reward):
        more = {} if reward else {"label": "unpaid step", "source": "counterfactual", "stop": ""}
        page = "\n".join(["shelf", *there])
        return judged(f"put {many} {thing} down", "shelf", f"put {thing} down", page, reward, **more)

    episodes = [put("a", thing, [thing], 1.0) for thing in THINGS] + [put("two", thing, [thing, thing], 1.0) for thing in THINGS]
    names = Names([*(e.task.text for e in episodes), *(f"put it {thing} down" for thing in THINGS)])
    lost = [put("two", thing, ["tray", thing], 0.0) for thing in THINGS]
    unjudged = [replace(episode, source="log", stop=StopReason.NOT_JUDGED) for episode in lost]
    assert reasoning.CompareWords(names, episodes + unjudged).counts == {}         # no failure tells
    episodes += lost
    reason = reasoning.CompareWords(names, episodes)
    assert reason.counts == {"two": (2, names.kind("mug"))}
    failed = [put("two", thing, [thing, thing], 0.0) for thing in THINGS]
    assert reasoning.CompareWords(names, episodes + failed).counts == {}           # two are not enough
    said = lambda *there: reason(episodes[5].task, [], put("two", "mug", there, 0.0).steps[0])[1].split(" , ")[-1]
    assert said("mug", "jar", "mug", "mug") == "two : mug yes jar no mug yes" and said("jar", "mug") == "two : jar no mug yes none no"
    assert said("jar") == "two : jar no none no" and said("mug", *["jar"] * 50, "mug") == "two : " + "jar no " * 23 + "mug yes"
    assert reasoning._counted(["jar 1", "mug 1", "mug 2"], "mug", 2) == "jar 1 no mug 1 yes mug 2 yes"
    assert "two" not in reason(episodes[0].task, [], episodes[0].steps[0])[1]


def test_answers_are_looked_for():
    """An answer that is paid although the page says it of another thing, or an action that only sometimes
    ends."""
    page = "jar\nprice 8.50\nweight 8.50\nstock 3"
    ask = lambda answer, reward: judged("what is the weight of the jar", page, f"stop [{answer}]", reward=reward)
    right, wrong = ask("8.50", 1.0), ask("3", 0.0)
    changed = lambda action: replace(right, steps=[replace(right.steps[0], action=action, done=False)])
    buys, refused = [ask("", 1.0), changed("buy 3")], replace(changed("stop [9]"), source="inferred")
    buys[0].steps[0].action = "buy"
    reason = reasoning.CompareWords(ASKED, [right, refused, *buys])
    said = lambda episode: reason(episode.task, [], episode.steps[0])[1].split(" , ")[:2]
    assert said(right) == ["said : weight 8.50", "asked : weight"] and said(wrong) == ["said : stock 3", "asked : none"]
    assert said(ask("green", 0.0)) == ["said : none", "asked : none"]
    assert not said(ask("", 0.0))[0].startswith("said") and not said(buys[0])[0].startswith("said")


def test_long_lists_are_cut():
    """A name that is called missing because it stands behind many others."""
    found = [f"mug {i}" for i in range(20)]
    assert reasoning._compared(found, "mug 15").endswith(" mug 14 no mug 15 yes")
    assert reasoning._compared(found, "pan 1") == " ".join(f"{thing} no" for thing in found[:8])


def test_outcomes_tell_where_a_name_is_looked_for():
    """The line of another thing, and a word that no page shows."""
    names = Names([*(f"{verb} the {color} {thing} now" for verb in ("find", "bring") for color in COLORS for thing in THINGS)])
    made = [judged(f"bring the {color} {thing} now", f"page {other}\nalso pink\n{thing} pan",
                   reward=float(color == other))
            for color in COLORS[:4] for thing in THINGS[:3] for other in COLORS[:4]]
    reason = reasoning.CompareWords(names, made)
    assert reason.place == {names.kind("red"): "first", names.kind("jar"): "last"}
    assert reason(made[1].task, [], made[1].steps[0])[1] == "red : blue no , mug : mug yes"


def test_outcomes_tell_the_first_word_of_the_lines_that_count():
    """A color that was offered and never chosen, which the last line with a color shows."""
    names = Names([f"find {color} {thing}" for color in COLORS for thing in THINGS])
    made = [judged(f"find {color} {thing}", f"{thing}\ncolor: {' '.join(COLORS)}\nchosen: {chosen}", reward=float(color == chosen))
            for color in COLORS[:4] for thing in THINGS[:3] for chosen in (*COLORS[:4], "none")]
    reason = reasoning.CompareWords(names, made)
    assert reason.place[names.kind("red")] == "chosen:"
    said = {e.steps[0].state[-4:]: reason(e.task, [], e.steps[0])[1] for e in made if e.task.text == made[0].task.text}
    assert said["none"].startswith(f"{COLORS[0]} : none no") and f"{COLORS[0]} : {COLORS[1]} no" in said[COLORS[1][-4:]]


def test_texts_in_two_splits_are_named(capsys):
    """Success on test tasks that were learnt by heart."""
    tasks = {split: [a_task(text) for text in texts] for split, texts in
             (("train", ("a", "b")), ("valid", ("c",)), ("test", ("b", "c", "d")))}
    offline.warn_of_shared_texts(tasks)
    assert capsys.readouterr().out == ("warning: 2 of 3 test tasks have the text of a task of an earlier split; "
                                       "expected none\n")


def test_probes_are_not_imitated(tmp_path):
    """A policy that learns to probe, or the moves of a player that sees hidden facts."""
    says = lambda *said: lambda session, rng: lambda state: said[int(state) % len(said)]
    players = {"good": Player(says("take red mug", "open door 3"), imitate=True), "knows": Player(says("look up"))}
    args = collect.Args(probe_share=0.5)
    task = offline.tasks_with_start(Counter(), "train")[0]
    played = offline.play_many(Counter(), players, [task], 200, args, "train", tmp_path / "played")
    kept = {(e.source, s.action) for e in played for s in e.steps if s.imitate}
    assert kept == {(source, action) for source in ("good", "prober") for action in ("take red mug", "open door 3")}
    assert played == read_episodes(tmp_path / "played")
    assert any(not s.imitate for e in played if e.source == "prober" for s in e.steps)


def rewards(episodes, count=200, seed=0) -> list[Episode]:
    """Counterfactual ones, where no number tells anything."""
    return hindsight.counterfactual_rewards(episodes, count, np.random.default_rng(seed), {})


def labels(episodes) -> set[str]:
    return {e.label for e in rewards(episodes)}


def test_hindsight_judges_successes_under_tasks_that_name_something_else():
    """A miss that is none, since the page has all that the other task names; one that ends an episode where
    recorded failures go on, or goes on where they end; rewards of a step's own task that are turned round."""
    hat = lambda text, reward=1.0: judged(text, f"page of {text}", "buy hat", reward=reward)
    won, lost = list(map(hat, ("find red hat", "find blue hat", "find hat"))), hat("find green shoe", 0.0)
    going_on = replace(lost, stop=StopReason.STEP_LIMIT, steps=[replace(lost.steps[0], done=False)])
    for failures, ends in (([lost], True), ([replace(lost, stop="")], True), ([going_on], False)):     # a log may say no `stop`
        made = rewards(won + failures)
        assert len(rewards(won + failures, 3)) <= 3
        assert {e.label for e in made} == {"none", "another task", *["unpaid step"] * ends} and 16 <= len(made) <= 48
        for e in made:
            step, own = e.steps[0], e.steps[0].state.removeprefix("page of ")
            assert (step.reward, step.done, step.reward_reasoning) == {
                "none": (1.0, True, "x"), "another task": (0.0, ends, ""), "unpaid step": (0.0, True, "x")}[e.label]
            assert (e.task.text == own) == (e.label != "another task")
            assert e.label != "another task" or set(e.task.text.split()) - set(own.split())
        assert {e.steps[0].state for e in made if e.label != "unpaid step"} == {e.steps[0].state for e in won}
    assert rewards([lost]) == []
    orders = [judged(f"show order {i}", f"order {i} of 2.5", "buy hat") for i in range(9)]
    assert labels(orders) == {"none", "another task"}
    same = replace(won[0], task=a_task("fetch red hat"))      # other words for what the same step fulfils
    assert labels([won[0], same]) == {"none"}


def test_whole_numbers_that_no_success_shows_are_limits():
    """A step that is unpaid under "below 80" because no page says 80; numbers that are names, which count no
    more."""
    things = ("lamp", "vase", "rug")
    below = [judged(f"buy {thing} below {limit}", f"{thing} for $15") for thing in things for limit in (20, 60, 80)]
    cut = replace(judged("buy rug below 80", "lamp for $5", reward=0.0), stop="")      # a log that was cut off
    wrong = [replace(e, steps=[replace(e.steps[0], reward=0.0, done=False)], stop="") for e in below[:3]]
    made = rewards([*below, cut, *wrong], 400)
    assert {e.label for e in made} == {"none", "another task", "unpaid step"}
    for e in made:
        if e.label == "another task":
            assert e.task.text.split()[1] != e.steps[0].state.split()[0] and not e.steps[0].done
    orders = [judged(f"show order {i}", f"order {i}") for i in range(9)]
    assert "another task" in labels(orders)


def test_hindsight_judges_other_answers_that_the_state_shows():
    """A wrong answer that is a part of the right one, that the state does not show, or that was paid, too;
    one put in the place of an action that seldom ends an episode."""
    def answered(text, page, answer):
        episode = judged(text, page, f"stop [{answer}]")
        return replace(episode, steps=[replace(episode.steps[0], next_state="over", grounded="x")])
    page = "ann wrote good\nbob lee wrote bad"
    won = [answered("who wrote good", page, "ann"), answered("who wrote bad", page, "bob lee"),
           answered("name the last one", page, "lee"), answered("who sang", "page of eve", "eve"), judged("wave", page, "wave"),
           judged("find ann", page, "find ann"), judged("find bob", page, "find bob")]
    on = judged("find bob", page, "find lee", reward=0.0)
    on = replace(on, steps=[replace(on.steps[0], done=False)])
    made = [e for seed in range(9) for e in rewards([*won, on], seed=seed) if e.label == "another answer"]
    found = {(e.task.text, e.steps[0].action) for e in made}
    assert found == {("who wrote good", "stop [bob lee]"), ("who wrote good", "stop [lee]"), ("who wrote bad", "stop [ann]"),
                     ("name the last one", "stop [ann]")}
    assert not any(e.reward or e.steps[0].grounded for e in made)


def test_words_that_stand_for_others_are_learnt_from_successes():
    """A meaning of few tasks, of what other tasks show too, or of what is seldom there."""
    tags = {"heat": "hot", "wash": "clean", "bring": ""}
    episodes = [judged(f"{verb} the {thing} {i}", f"holding {tag} {thing}", f"put {thing}", "shelf")
                for i in range(6) for verb, tag in tags.items() for thing in THINGS]
    learnt = lambda names, some: reasoning.CompareWords(names, some).meaning
    assert learnt(Names([]), episodes) == {"heat": "hot", "wash": "clean"} | {name: name for name in THINGS}
    names = Names([f"{episode.task.text} now" for episode in episodes])
    assert learnt(names, episodes) == {"heat": "hot", "wash": "clean"}
    reason, task, step = reasoning.CompareWords(names, episodes), episodes[0].task, episodes[0].steps[0]
    assert "hot : hot yes" in reason(task, [], step)[1]
    assert "hot : none no" in reason(task, [], replace(step, state="holding clean mug", reward=0.0))[1]
    with_tag = lambda word, tag: [e if not e.task.text.startswith(word) or e.task.text[-1] > "0" else
                                  replace(e, steps=[replace(e.steps[0], state=f"holding {tag}")]) for e in episodes]
    assert learnt(names, with_tag("heat", "")) == {"wash": "clean"} == learnt(names, with_tag("heat", "cold"))
    assert learnt(names, with_tag("bring", "hot")) == {"heat": "hot", "wash": "clean"}
    few = [e for e in episodes if not e.task.text.startswith("heat") or e.task.text.endswith(" 0")]
    assert "heat" in learnt(names, few) and "heat" not in learnt(names, few[1:])


def test_unpaid_steps_look_like_successes():
    """A first of two things that nothing teaches; a step that nobody would pay; an action that went wrong by
    itself."""
    two = judged("put two mug in desk", "at desk, mug", "move mug to desk", "desk: mug mug")
    unpaid = replace(two.steps[0], reward=0.0, done=False)
    first, refused = replace(unpaid, next_state="desk: mug"), replace(unpaid, next_state="at desk, mug")
    other = a_step("at bed, mug", "move mug to bed", "bed: mug")
    lacking = a_step("at desk, cup", "move to desk", "desk: cup")        # a mug
    two.steps[:0] = [refused, other, lacking, first, a_step("", "take mug", "mug")]
    lost = judged("put two mug in desk", "bed", "look", "lost", 0.0)
    assert hindsight.unpaid_steps([two, lost]) == [(two.task, first), (lost.task, lost.steps[0])]
    assert hindsight.unpaid_steps([replace(lost, stop=StopReason.NOT_JUDGED)]) == []


def test_hindsight_learns_on_which_side_of_a_limit_successes_are():
    """A near miss whose number is on the right side, one made of a number that was on both sides, or of too
    few successes."""
    def pie(limit, price):
        return judged(f"a pie below {limit}.50", f"pie ${price}, weight {5 if price % 2 else 90}")

    def other_task(text, state, is_above, *limits):
        step, rng = replace(won[0].steps[0], state=state), np.random.default_rng(0)
        return hindsight.another_number(a_task(text), step, {"$": is_above}, list(limits), rng)

    won, sides = [pie(20 + i, 10 + i) for i in range(30)], hindsight.one_sided
    assert sides(won) == {"$": False}
    assert sides(won[:19]) == {}                                           # may be chance
    assert sides([*won, pie(20, 21)]) == {}                                # once on the other side
    assert sides(won[:2] * 20) == {}                                       # one success, recorded often
    assert sides([*won, judged("a pie between 10.50 and 20.50", "pie $15")]) == {"$": False}   # which limit?
    six = [judged(e.task.text, "pie" + "".join(f" ${20 + i}.{j}" for j in range(5))) for i, e in enumerate(won[:6])]
    assert sides(six) == {}                                   # numbers of one page are one piece of evidence
    made = hindsight.counterfactual_rewards(won, 400, np.random.default_rng(0), sides(won))
    near = [e for e in made if e.label == "another number"]
    assert len(near) > 5
    for e in near:
        price, limit = re.search(r"\$(\d+)", e.steps[0].state)[1], e.task.text.removeprefix("a pie below ")
        assert float(price) > float(limit) and (e.steps[0].reward, e.task.id) == (0.0, "")
    assert other_task("a pie from 20.50", "pie $10.50", True, "10.50", "9.50") is None
    assert other_task("a pie below 1,020.50", "pie $1,010", False, "9.50").text == "a pie below 9.50"
    assert other_task("a pie between 10.50 and 20.50", won[0].steps[0].state, False, "5.50") is None


def test_logs_tell_what_an_action_needs():
    """A right action that counts as refused, and a word that is there by chance."""
    def episode(i, *steps):
        made = [a_step(state, action, after, done=after == "end") for state, action, after in steps]
        return Episode(id=str(i), task=a_task("buy", id=str(i)), steps=made, stop=StopReason.FAILURE)

    fruits = ("apple", "pear", "plum", "fig")
    log = [episode(i, (f"start {i}", f"search[{name}]", f"shop {i}: {name} {fruits[i % 4]}"),
                   (f"shop {i}: {name} {fruits[i % 4]}", f"click[{name}]", f"item {name} {i}"),
                   (f"item {name} {i}", "click[buy]", "end")) for i in range(12) for name in fruits]
    needed = hindsight.needed_words(log)
    assert needed["click[pear]"] == {"pear", "shop"} and needed["click[buy]"] == {"item"}
    assert "start" in needed["search[apple]"] and "apple" not in needed["search[apple]"]
    assert hindsight.needed_words([episode(0, ("a door", "look", "a door"))]) == {}         # refused: tells nothing
    once = [(f"mug {i}", "look around", f"mug {i + 1}") for i in range(30)] + [("mug 30", "go", "end")]
    assert "look around" not in hindsight.needed_words([episode(0, *once)])                 # all in one episode
    made = hindsight.refused_actions(log, 0.4, np.random.default_rng(0))
    put_in = [step for e in made for step in e.steps if step.state == step.next_state]
    assert 0.2 < len(made) / (len(made) + len(log)) < 0.6 and len(put_in) > 20
    assert all(needed[step.action] - set(re.findall(r"\w+", step.state)) and not step.reward for step in put_in)
    assert not any(step.imitate for e in made for step in e.steps) and {e.source for e in made} == {"inferred"}
    recorded_steps = [[s for s in e.steps if s.state != s.next_state] for e in made]
    assert all(any(len(e.steps) == 3 and [s.action for s in e.steps] == [s.action for s in steps] for e in log)
               for steps in recorded_steps)
    assert hindsight.refused_actions(log, 0.0, np.random.default_rng(0)) == []


def test_counterfactuals_do_not_leak():
    """A reward probe whose task, or whose step, training has judged."""
    found = [Episode(id="x", task=a_task(text), steps=[a_step(state, "buy", "end")]) for text, state in (
        ("count in train", "a"), ("count in test", "b"), ("new", "c"), ("new", "d"))]
    env = Counter(counterfactuals=lambda episodes, count, rng: found[:count])
    tasks, parts = {split: offline.tasks_with_start(env, split) for split in SPLITS}, {split: [] for split in SPLITS}
    make = lambda split, count: offline.counterfactuals(env, parts, tasks, split, count, None)
    parts["train"] = make("train", 3)
    assert [(e.id, e.steps[0].state) for e in parts["train"]] == [("counterfactual-train-0", "a"),
                                                                  ("counterfactual-train-1", "c")]
    held_out = make("test", 4)
    assert [e.steps[0].state for e in held_out] == ["b", "d"] and held_out[0].task.start == "b"
    assert {(e.source, e.stop) for e in held_out} == {("counterfactual", "step_limit")} and make("test", 0) == []
    assert (held_out[0].task.id, held_out[0].task.env) == ("count in test", env.name)


# ---- a language model plays or explains ----

@pytest.fixture
def endpoint(monkeypatch):
    """An endpoint that says one wrapped action to every page; `asked`: what it saw; `answer` may be set."""
    class Fake:
        asked = []
        answer = staticmethod(lambda messages: "<think>hm</think><action>cd docs</action>")

        def __init__(self, *_):
            pass

        def complete(self, messages, **_):
            Fake.asked.append(list(messages))
            return Fake.answer(messages)
    monkeypatch.setattr(collect, "Endpoint", Fake)
    return Fake


def test_a_language_model_plays(again, endpoint):
    """A model whose answers are not parsed, that does not see the task or sees a state twice."""
    train = read_episodes(again(*PLAYER)[1] / "train.jsonl")
    assert {(e.source, s.action) for e in train for s in e.steps} == {("player", "cd docs")}
    begins = f"task: {train[0].task.text}\n"
    first, second = (next(m for m in endpoint.asked if len(m) == n and m[1]["content"].startswith(begins))
                     for n in (2, 4))
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"] and second[:2] == first
    for step, said in zip(train[0].steps, (first[1], second[3])):
        assert said["content"] == f"task: {train[0].task.text}\nstate:\n{step.state}\n"
    out = again(*PLAYER, "--transitions", 200, "--player-share", 0.5)[1]
    train = recorded(read_episodes(out / "train.jsonl"))
    assert {e.source for e in train} == {"player", "solver", "random"}


@pytest.mark.parametrize("who", ["player", "teacher"])
def test_what_a_language_model_made_is_not_lost(again, endpoint, who):
    """Data that other flags replace, or paid episodes of a killed collection that another one deletes."""
    flags = (*FEW, f"--{who}", URL, f"--{who}-model", "m")
    out = again(*flags, "--fresh")[1]
    killed = out / "played-train-0.jsonl"
    killed.write_text("")
    paid = contents(out)
    for other in ((), (*flags, "--seed", 1)):
        with pytest.raises(ValueError, match="data does not fit this run: .*use --fresh to replace these data"):
            again(*other)
    assert "kept" in again(*flags)[0] and contents(out) == paid
    again("--fresh")
    assert contents(out) != paid and [path.name for path in out.glob("played-*")] == [killed.name]


def test_a_language_model_plays_many_episodes_at_once(again, endpoint):
    """One request at a time, which leaves a server idle; more than the environment's instances."""
    together = threading.Barrier(teacher.REQUESTS)
    endpoint.answer = lambda messages: f"<think>in\ndocs?</think><action>cd docs {together.wait(10)}</action>"
    train = read_episodes(again(*PLAYER)[1] / "train.jsonl")
    assert [e.id for e in train] == [f"train-{i}" for i in range(teacher.REQUESTS)]
    assert all(len(e.steps) == 15 and e.steps[0].thought == "in docs?" for e in train)


def test_a_language_model_is_sent_a_bounded_conversation():
    """A long episode whose last request no context holds, so that all episodes before it are lost."""
    sent = []
    player = offline.language_model_player(Counter(), lambda messages: sent.append(messages) or "go", 1.0)
    act = player.make(Session(a_task("count"), "0"), None)
    for i in range(40):
        act(f"state {i}")
    assert [len(messages) for messages in sent[:14]] == [2 * i + 2 for i in range(12)] + [24, 24]
    assert sent[-1][:3] == sent[1][:3] and "state 39" in sent[-1][-1]["content"]
    assert [m["role"] for m in sent[-1]] == ["system"] + ["user", "assistant"] * 11 + ["user"]


def test_a_language_model_explains(again, workspace, endpoint, monkeypatch):
    """Reasoning that lands at other episodes, counterfactuals that keep a rule's."""
    monkeypatch.setattr(offline, "counterfactuals", lambda env, parts, tasks, split, *_: [
        replace(parts[split][0], id="counterfactual", source="counterfactual")])
    def answer(messages):
        count = len(json.loads(messages[1]["content"].split("\nThe episode")[0])["steps"])
        steps = [{"step_id": i, "thought": f"thought {i}", "transition_plan": f"plan {i}",
                  "reward_plan": f"reward {i}"} for i in range(count)]
        return json.dumps({"task_tutorial": {"overall_plan": "a"}, "state_transitions": steps})
    endpoint.answer = answer
    flags = ("--teacher", URL, "--teacher-model", "m")
    _, out = again(*flags, "--fresh")
    for name in SPLITS:
        before, after = (read_episodes(folder / f"{name}.jsonl") for folder in (workspace.data, out))
        assert [e.id for e in after] == [*(e.id for e in recorded(before)), "counterfactual"]
        assert all(s.reasoning == f"plan {i}" and s.reward_reasoning == f"reward {i}"
                   for e in after for i, s in enumerate(e.steps))
    requests = len(endpoint.asked)
    (out / "meta.json").unlink()  # as after a kill: nothing is asked again
    again(*flags)
    assert len(endpoint.asked) == requests
    again(*flags, "--fresh")
    assert len(endpoint.asked) == 2 * requests


@pytest.mark.parametrize("who", ["teacher", "player"])
def test_an_endpoint_that_is_down(again, endpoint, who):
    def down(messages):
        raise teacher.EndpointError(f"{URL}: refused")
    endpoint.answer = down
    with pytest.raises(ValueError, match="127.0.0.1:1/v1: refused"):
        again(f"--{who}", URL, f"--{who}-model", "m", "--fresh")


def test_a_local_model_as_teacher(tmp_path, monkeypatch):
    """A local teacher that cannot be loaded or asked; a random model's answer is of course unusable."""
    from dreamgym.model import save_model
    from dreamgym.tiny import create
    from dreamgym.word_tokenizer import build_tokenizer
    tokenizer = build_tokenizer(["find me a red vest"])
    save_model(create("scratch:16x1", tokenizer), tokenizer, tmp_path / "model")
    monkeypatch.setattr(offline, "TEACHER_ANSWER_TOK", 4)
    chat = [{"role": "system", "content": "explain"}, {"role": "user", "content": "red vest"}]
    assert isinstance(offline.local_teacher(str(tmp_path / "model"))(chat), str)
