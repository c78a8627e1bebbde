"""ALFWorld as an environment: the adapter around the engine, splits, first states, bad input, worker processes."""
from __future__ import annotations

import gc
import gzip
import importlib.metadata
import json
import os
import random
import shutil
import weakref

import pytest
from alfworld_official import SOURCE, rebuild

from dreamgym.envs.alfworld import text as text
from dreamgym.envs import alfworld_workers, make_env, make_rules
from dreamgym.envs.alfworld.env import ALFWorld, receptacles
from dreamgym.episode import Task


def packages_missing() -> str:
    try:
        importlib.metadata.version("alfworld"), importlib.metadata.version("textworld")
    except importlib.metadata.PackageNotFoundError as error:
        return f"the ALFWorld packages are not installed ({error}): pip install -r requirements-alfworld.txt"
    return ""


pytestmark = pytest.mark.skipif(bool(packages_missing()), reason=packages_missing() or "-")
needs_official = pytest.mark.skipif(not SOURCE.exists(), reason=f"no official games: {SOURCE} is not there")
both = pytest.mark.parametrize("which", ["generated", pytest.param("official", marks=needs_official)])
COUNTS = {"train": 6, "valid_seen": 1, "valid_unseen": 2}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    base = tmp_path_factory.mktemp("alfworld")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ALFWORLD_DATA", raising=False)
        found = {"generated": ALFWorld(cache=base / "games", seed=3, counts=COUNTS)}
    if SOURCE.exists():
        for split, count in (("train", 10), ("valid_seen", 6), ("valid_unseen", 4)):
            rebuild(base / "official", split, count)
        found["official"] = ALFWorld(str(base / "official"), cache=base / "cache")
    return found


def plan(world: ALFWorld, task: Task, rng: random.Random, length: int) -> list[str]:
    """Actions of a random walk, one in five of them nothing that the engine knows."""
    [session], actions = world.start([task]), []
    while len(actions) < length:
        commands = session.inner.engine.admissible
        verb = rng.choice(sorted({command.split()[0] for command in commands}))
        actions.append(rng.choice([command for command in commands if command.startswith(verb)]) if rng.random() < 0.8 else rng.choice(["help", "", "go to moon 1", "wait"]))
        world.act([session], actions[-1:])
    return actions


# ---- tasks and first states --------------------------------------------------------------------------------------------------------------------

@both
def test_a_dream_begins_where_the_engine_does(worlds, which):
    # Stops first states and sentences, read from the PDDL text for speed, that the engine does not say: a dream would begin in another home.
    world = worlds[which]
    listing = ALFWorld(str(world.root), cache=world.root.parent / "again", admissible=True)
    for split in ("train", "valid_seen", "valid_unseen"):
        tasks = world.tasks(split)
        for task, session, listed in zip(tasks, world.start(tasks), listing.start(listing.tasks(split))):
            assert session.state == task.start and session.inner.engine.task == task.text
            assert listed.state == listed.task.start == f"{task.start}\ncommands: {'; '.join(session.inner.engine.admissible)}"
            assert text.page_kind(task.start) == "room" and text.starts(task.text, task.start)


def test_receptacles_are_numbered_as_the_engine_does():
    # Stops a numbering from the wrong end, which shows only where a thing of a receptacle's kind is no receptacle.
    facts = "(receptacleAtLocation Desk_bar_plus_b loc_bar_1) (objectAtLocation Desk_bar_minus_a loc_bar_2) (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_2)"
    assert receptacles(f"(:objects Desk_bar_z - object)\n(:init {facts})\n(:goal (receptacleAtLocation ?r ?l))") == ["desk 1", "sinkbasin 1"]


@needs_official
def test_receptacle_names_of_every_official_problem():
    # Stops a numbering that fits the few games of the test above only: every problem names as many receptacles of a kind as it has, from 1 on.
    with gzip.open(SOURCE, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line)["pddl_problem"] for line in lines]
    for problem in problems:
        names = receptacles(problem)
        kinds = [text.kind_of(name) for name in names]
        assert len(set(names)) == len(names) == problem.split("(:goal")[0].count("receptacleAtLocation ") and names == text.by_name(names)
        assert all(f"{kind} {number}" in names for kind in set(kinds) for number in range(1, kinds.count(kind) + 1))


@both
def test_splits(worlds, which):
    # Stops ids that change or occur twice, rooms of the unseen split in training, and a `test` that is not the two held-out splits.
    world = worlds[which]
    tasks = {split: world.tasks(split) for split in ("train", "valid_seen", "valid_unseen")}
    ids = [task.id for found in tasks.values() for task in found]
    assert len(set(ids)) == len(ids) == sum(world.counts.values()) and world.counts == {split: len(found) for split, found in tasks.items()}
    assert world.tasks("test") == tasks["valid_seen"] + tasks["valid_unseen"] and all(task.goal["split"] == split for split, found in tasks.items() for task in found)
    assert tasks["train"][3].id == "alfworld-train-0003"
    games = [task.goal["game"] for task in tasks["train"]]
    assert games == sorted(games) and all((world.root / game).is_file() for game in games)
    rooms = {split: {task.goal["game"].split("/")[1].rsplit("-", 1)[1] for task in found} for split, found in tasks.items()}
    assert not rooms["train"] & rooms["valid_unseen"]
    with pytest.raises(ValueError, match="split 'eval': ALFWorld has train, valid_seen, valid_unseen"):
        world.tasks("eval")


@both
def test_names_and_labels(worlds, which):
    # Stops generated games that pass for official ones, also when their folder is given as data, and results of equal games that differ.
    world = worlds[which]
    described = world.describe()
    assert described["games"] == f"{which} games" and described["counts"] == world.counts and described["admissible"] is False
    again = ALFWorld(str(world.root.parent), cache=world.root.parent / "again")
    assert again.describe() == described and again.tasks("train") == world.tasks("train") and described["seed"] == (3 if which == "generated" else None)
    assert json.loads(json.dumps(described)) == described and world.text is make_rules("alfworld") and world.max_steps == 50


# ---- playing -----------------------------------------------------------------------------------------------------------------------------------

@both
def test_sessions_are_independent_and_repeatable(worlds, which):
    # Stops sessions that share a state: eight on one game, and others beside them, interleaved, must do what each does alone and in a second environment.
    world, rng = worlds[which], random.Random(1)
    tasks = [world.tasks("train")[0]] * 8 + world.tasks("train")[1:4]
    plans = [plan(world, task, rng, 25) for task in tasks]
    together = world.start(tasks)
    batched = [world.act(together, [actions[i] for actions in plans]) for i in range(25)]
    assert len({session.id for session in together}) == len(tasks) and all(session.steps == 25 for session in together)
    other = ALFWorld(str(world.root), cache=world.root.parent / "again")
    for k in range(len(tasks) - 1, -1, -1):
        for place in (world, other):
            [session] = place.start([tasks[k]])
            assert [place.act([session], [action])[0] for action in plans[k]] == [results[k] for results in batched]
    assert len({results[k].state for results in batched for k in range(8)}) > 20


def win(world: ALFWorld, task: Task) -> list[tuple[str, object]]:
    """Wins a pick or look task by the hidden facts: (action, result) of each step."""
    [session] = world.start([task])
    wanted, facts, steps = text.read_task(task.text), session.inner.engine.facts, []
    inside = [(fact[1], fact[2]) for fact in sorted(facts) if fact[0] == "inreceptacle"]
    thing, place = next((o, r) for o, r in inside if text.kind_of(o) == wanted.thing and ("pickupable", o) in facts and text.kind_of(r) != wanted.place)
    lamp, target = next((o, r) for o, r in inside if text.kind_of(o) == wanted.place) if wanted.kind == "look" else ("", next(
        fact[1] for fact in sorted(facts) if fact[0] == "receptacleatlocation" and text.kind_of(fact[1]) == wanted.place))
    last = f"use {lamp}" if lamp else f"move {thing} to {target}"
    for action in (f"go to {place}", f"open {place}", f"take {thing} from {place}", f"go to {target}", f"open {target}", last):
        steps += [(action, world.act([session], [action])[0])]
    return steps


@both
def test_reward_is_1_only_when_the_engine_says_won(worlds, which):
    # Stops a reward on the way, a win that does not end the episode, and success told apart from the reward.
    world = worlds[which]
    tasks = [task for task in world.tasks("train") + world.tasks("valid_seen") if text.read_task(task.text).kind in ("pick", "look")]
    assert tasks
    for task in tasks:
        *way, (_, last) = win(world, task)
        assert all((result.reward, result.done, result.info["stop"], result.info["score"]) == (0.0, False, "", 0.0) for _, result in way)
        assert (last.reward, last.done, last.info["stop"], last.info["score"], last.info["valid"]) == (1.0, True, "success", 1.0, True)


@both
def test_what_is_no_command(worlds, which):
    # Stops an action off the engine's list that counts as valid, changes something, pays, or breaks the state; and a dream that reads another action.
    world, rng = worlds[which], random.Random(2)
    task = world.tasks("train")[0]
    [session] = world.start([task])
    place = text.read_view(session.state).room[0]
    odd = ["", " ", "help", "look around", "go to", f"Go to {place}", f"go to {place};", "\x00", "\u2028", "go to \ud800", "x" * 1_000_000, "go to " * 10_000, f"go to {place} 1",
           f"move {place} to {place}", "put mug 1 in desk 1", "reward: 1 done: yes"] + ["".join(rng.choices(list("abc 1\n\t\0é{}#[]"), k=rng.randint(0, 40))) for _ in range(3000)]
    for action in odd:
        [result] = world.act([session], [action])
        assert (result.state, result.reward, result.done) == (task.start, 0.0, False) and not result.info["valid"], action[:80]
        assert result.info["grounded"] == text.clean(action)
    [result] = world.act([session], [f" go\tto \x00 {place}\n"])       # blanks and control characters are no part of a command, here and in the dream
    assert result.info["valid"] and result.info["grounded"] == f"go to {place}" and text.read_view(result.state).place == place
    assert [world.act([session], [action])[0].info["valid"] for action in ("look", "inventory", f"go to {place}", "help")] == [True, True, False, False]


def test_commands_in_the_state(worlds):
    # Stops a list of commands that is unsorted, holds `help`, or belongs to the state before.
    base = worlds["generated"]
    world, rng = ALFWorld(str(base.root), cache=base.root.parent / "again", admissible=True), random.Random(3)
    for task in world.tasks("train")[:3]:
        plain, listed = base.start([task])[0], world.start([task])[0]
        for action in plan(base, task, rng, 30):
            [one], [two] = base.act([plain], [action]), world.act([listed], [action])
            commands = plain.inner.engine.admissible
            assert two.state == f"{one.state}\ncommands: {'; '.join(commands)}" and commands == sorted(commands) and "help" not in commands
            assert (one.reward, one.done, one.info) == (two.reward, two.done, two.info)


def test_dropped_sessions_are_garbage(worlds):
    # Stops unfinished sessions (step limit) that stay in memory.
    world = worlds["generated"]
    sessions = world.start(world.tasks("train") * 3)
    world.act(sessions, ["look"] * len(sessions))
    plays = [weakref.ref(session.inner) for session in sessions]
    del sessions
    gc.collect()
    assert not any(play() for play in plays)


# ---- bad input ---------------------------------------------------------------------------------------------------------------------------------

def refused(match: str, call, *arguments, **options) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_missing_packages(tmp_path, monkeypatch):
    # Stops a traceback, or minutes of work, where the packages are not installed.
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    refused("pip install -r requirements-alfworld.txt", make_env, "alfworld", cache=str(tmp_path / "games"))
    assert not (tmp_path / "games").exists()


def test_folders_without_games(worlds, tmp_path, monkeypatch):
    # Stops $ALFWORLD_DATA that is silently ignored, and a package that sets it behind the user's back.
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nothing"))
    refused("nothing: no ALFWorld games there", make_env, "alfworld", cache=str(tmp_path / "games"))
    (tmp_path / "empty" / "json_2.1.1" / "train").mkdir(parents=True)
    refused("no ALFWorld games there", ALFWorld, str(tmp_path / "empty"), tmp_path)
    ALFWorld(str(worlds["generated"].root), tmp_path)
    assert os.environ["ALFWORLD_DATA"] == str(tmp_path / "nothing") and not (tmp_path / "nothing").exists()
    monkeypatch.delenv("ALFWORLD_DATA")
    ALFWorld(str(worlds["generated"].root), tmp_path)
    assert "ALFWORLD_DATA" not in os.environ


@pytest.mark.parametrize("change, message", [
    (lambda game: game | {"grammar": game["grammar"].replace("move {o} to {r}", "put {o} in/on {r}")}, "grammar.*`?put"),
    (lambda game: "{", "not a.*game"), (lambda game: [], "not a.*game"), (lambda game: {k: v for k, v in game.items() if k != "grammar"}, "not a.*game.*grammar")])
def test_invalid_games(worlds, tmp_path, change, message):
    # Stops games of another grammar (alfworld < 0.4), and files that are no games, from being met in the middle of a run.
    base = worlds["generated"]
    shutil.copytree(base.root / "valid_seen", tmp_path / "json_2.1.1" / "valid_seen")
    [path] = (tmp_path / "json_2.1.1").glob("*/*/*/game.tw-pddl")
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    refused(message, ALFWorld, str(tmp_path), tmp_path)


def test_tasks_that_only_a_dream_can_play(worlds):
    world = worlds["generated"]
    refused("task t: .*generated task", world.start, [world.tasks("train")[0], Task("t", "put a mug in desk", "alfworld", "room: desk 1\nholding: nothing", generated=True)])
    refused("away/game.tw-pddl", world.start, [Task("t", "put a mug in desk", "alfworld", "", {"game": "away/game.tw-pddl"})])
    refused("generated task", world.start, [Task("t", "put a mug in desk", "alfworld", "", {"game": 3})])


# ---- worker processes --------------------------------------------------------------------------------------------------------------------------

def test_workers_play_the_same(worlds, monkeypatch):
    # Stops processes that mix up sessions, rewards or order, or forget to take over when one has served its share of games.
    base, rng = worlds["generated"], random.Random(4)
    monkeypatch.setattr(alfworld_workers.Workers, "GAMES_PER_WORKER", 1)
    world = ALFWorld(str(base.root), cache=base.root.parent / "again", workers=2)
    first = {worker.child.pid for worker in world.plays.workers}
    tasks = [task for task in world.tasks("train")[:3] for _ in range(3)]
    plans = [plan(base, task, rng, 12) for task in tasks]
    near, far = base.start(tasks), world.start(tasks)
    assert [session.state for session in near] == [session.state for session in far] and len({session.inner.worker for session in far}) == 3
    for i in range(12):
        actions = [actions[i] for actions in plans]
        assert base.act(near, actions) == world.act(far, actions)
    won = next(task for task in tasks if text.read_task(task.text).kind in ("pick", "look"))
    actions = [action for action, _ in win(base, won)]
    [near], [far] = base.start([won]), world.start([won])
    results = [(base.act([near], [action]), world.act([far], [action])) for action in actions]
    assert all(one == two for one, two in results) and results[-1][1][0].reward == 1.0
    assert len(first - {worker.child.pid for worker in world.plays.workers}) >= 1
    refused("away/game.tw-pddl", world.start, [Task("t", "put a mug in desk", "alfworld", "", {"game": "away/game.tw-pddl"})])
    assert world.act([far], ["look"])[0].info["valid"]                 # the error has cost nobody else an answer
    children = [worker.child for worker in {far.inner.worker, *world.plays.workers}]
    far.inner.worker.child.kill()
    with pytest.raises(RuntimeError, match="worker process ended"):
        world.act([far], ["look"])
    del world, far
    gc.collect()
    assert all(child.poll() is not None for child in children)
