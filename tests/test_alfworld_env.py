"""ALFWorld as an environment: the adapter around the engine, splits, first states, bad input, worker
processes."""
from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
from alfworld_official import SOURCE, needs_official, needs_packages, rebuild, records

from dreamgym.envs.alfworld import engine, text
from dreamgym.envs.alfworld.env import ALFWorld, receptacles
from dreamgym.envs.alfworld.games import generate
from dreamgym.envs.base import make_env
from dreamgym.episode import StopReason, Task

pytestmark = needs_packages
both = pytest.mark.parametrize("which", ["generated", pytest.param("official", marks=needs_official)])
SPLITS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def envs(tmp_path_factory):
    base = tmp_path_factory.mktemp("alfworld")
    generate(base / "games", 3, {"train": 6, "valid": 1, "test": 2}, check=False)
    found = {"generated": ALFWorld(str(base / "games"), cache=str(base / "cache"))}
    if SOURCE.exists():
        for split, count in (("train", 6), ("valid_seen", 3), ("valid_unseen", 2)):
            rebuild(base / "official", split, count)
        found["official"] = ALFWorld(str(base / "official"), cache=str(base / "cache"))
    return found


def again(env: ALFWorld, **options) -> ALFWorld:
    return ALFWorld(str(env.root), cache=str(env.root.parents[1] / "cache"), **options)


def plan(env: ALFWorld, task: Task, rng: random.Random, length: int) -> list[str]:
    """Actions of a random walk, one in five of them nothing that the engine knows."""
    [session], actions = env.reset([task]), []
    while len(actions) < length:
        commands = session.inner.engine.admissible
        verb = rng.choice(sorted({command.split()[0] for command in commands}))
        known = rng.choice([command for command in commands if command.startswith(verb)])
        actions.append(known if rng.random() < 0.8 else rng.choice(["help", "", "go to moon 1", "wait"]))
        env.step([session], actions[-1:])
    return actions


# ---- tasks and first states --------------------------------------------------------------------------------

@both
def test_a_dream_begins_where_the_engine_does(envs, which):
    """Stops first states and sentences, read from the PDDL text for speed, that the engine does not say."""
    env, listing = envs[which], again(envs[which], admissible=True)
    for split in SPLITS:
        tasks = env.tasks(split)
        for task, session, listed in zip(tasks, env.reset(tasks), listing.reset(listing.tasks(split))):
            assert session.state == task.start and session.inner.engine.task == task.text
            commands = "\n".join([task.start, "commands:", *session.inner.engine.admissible])
            assert listed.state == listed.task.start == commands and text.read_view(task.start).room
            assert text.read_view(listed.state) == text.read_view(task.start)


def test_receptacles_are_numbered_as_the_engine_does():
    """Stops a numbering from the wrong end, which shows only where a thing of a receptacle's kind is no
    receptacle."""
    facts = ("(receptacleAtLocation Desk_bar_plus_b loc_bar_1) (objectAtLocation Desk_bar_minus_a loc_bar_2) "
             "(receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_2)")
    problem = f"(:objects Desk_bar_z - object)\n(:init {facts})\n(:goal (receptacleAtLocation ?r ?l))"
    assert receptacles(problem) == ["desk 1", "sinkbasin 1"]


@needs_official
def test_receptacle_names_of_every_official_problem():
    """Stops a numbering that fits a few games only: a problem names as many receptacles of a kind as it has,
    from 1 on."""
    for record in records():
        names = receptacles(record["pddl_problem"])
        kinds = [text.kind_of(name) for name in names]
        assert len(names) == record["pddl_problem"].split("(:goal")[0].count("receptacleAtLocation ")
        assert set(names) == {f"{kind} {i + 1}" for kind in kinds for i in range(kinds.count(kind))}


@both
def test_splits(envs, which):
    """Stops ids that change or occur twice, test homes in training, and generated validation in homes of
    another split."""
    env = envs[which]
    tasks = {split: env.tasks(split) for split in SPLITS}
    ids = [task.id for found in tasks.values() for task in found]
    assert len(set(ids)) == len(ids) == sum(env.describe()["counts"].values())
    assert tasks["train"][3].id == "alfworld-train-0003"
    folders = dict(zip(SPLITS, SPLITS if which == "generated" else ("train", "valid_seen", "valid_unseen")))
    homes = {}
    for split, found in tasks.items():
        games = [task.goal["game"] for task in found]
        assert games == sorted(games) and all((env.root / game).is_file() for game in games)
        for task in found:
            assert task.groups[0] == f"split {folders[split]}" and task.groups[1].startswith("type ")
        homes[split] = {game.split("/")[1].rsplit("-", 1)[1] for game in games}
    assert not homes["train"] & homes["test"]
    assert which == "official" or not homes["valid"] & (homes["train"] | homes["test"])
    with pytest.raises(ValueError, match="split 'eval': ALFWorld has train, valid, test"):
        env.tasks("eval")


@both
def test_names_and_labels(envs, which):
    """Stops generated games that pass for official ones, also when their folder is given as data, and an
    unreadable option."""
    env = envs[which]
    made = make_env("alfworld", data_dir=str(env.root.parent), workers=1,
                    options=["cache=" + str(env.root.parents[1] / "cache")])
    assert made.describe() == env.describe() and made.tasks("train") == env.tasks("train")
    games, seed = ("generated games", 3) if which == "generated" else ("official data", None)
    expected = {"env": "alfworld", "state_version": text.STATE_VERSION, "games": games, "seed": seed,
                "admissible": False}
    assert json.loads(json.dumps(env.describe())) | expected == env.describe() and env.label == games


# ---- playing -----------------------------------------------------------------------------------------------

@both
def test_sessions_are_independent_and_repeatable(envs, which):
    """Stops sessions that share a state: several on one game, and others beside them, must do what each does
    alone."""
    env, rng = envs[which], random.Random(1)
    tasks = [env.tasks("train")[0]] * 4 + env.tasks("train")[1:3]
    plans = [plan(env, task, rng, 20) for task in tasks]
    together = env.reset(tasks)
    batched = [env.step(together, list(actions)) for actions in zip(*plans)]
    assert len({session.id for session in together}) == len(tasks)
    assert all(session.steps == 20 for session in together)
    other = again(env)
    for k in reversed(range(len(tasks))):
        [session] = other.reset([tasks[k]])
        alone = [other.step([session], [action])[0] for action in plans[k]]
        assert alone == [results[k] for results in batched]
    assert len({results[k].state for results in batched for k in range(4)}) > 15


def win(env: ALFWorld, task: Task) -> list[tuple[str, object]]:
    """Wins a pick or look task by the hidden facts: (action, result) of each step."""
    [session] = env.reset([task])
    wanted, facts = text.read_task(task.text), session.inner.engine.facts
    inside = [(fact[1], fact[2]) for fact in sorted(facts) if fact[0] == "inreceptacle"]
    thing, place = next((o, r) for o, r in inside if text.kind_of(o) == wanted.thing
                        and ("pickupable", o) in facts and text.kind_of(r) != wanted.place)
    if wanted.kind == "look":
        lamp, target = next((o, r) for o, r in inside if text.kind_of(o) == wanted.place)
        last = f"use {lamp}"
    else:
        target = min(fact[1] for fact in facts if fact[0] == "receptacleatlocation"
                     and text.kind_of(fact[1]) == wanted.place)
        last = f"move {thing} to {target}"
    actions = (f"go to {place}", f"open {place}", f"take {thing} from {place}", f"go to {target}",
               f"open {target}", last)
    return [(action, env.step([session], [action])[0]) for action in actions]


def simple_tasks(env: ALFWorld) -> list[Task]:
    return [task for task in env.tasks("train") + env.tasks("valid")
            if text.read_task(task.text).kind in ("pick", "look")]


@both
def test_reward_is_1_only_when_the_engine_says_won(envs, which):
    """Stops a reward on the way, a win that does not end the episode, and success told apart from the
    reward."""
    tasks = simple_tasks(envs[which])
    assert tasks
    for task in tasks:
        results = [(r.reward, r.done, r.stop, r.raw_score) for _, r in win(envs[which], task)]
        assert results == [(0.0, False, StopReason.RUNNING, 0.0)] * 5 + [(1.0, True, StopReason.SUCCESS, 1.0)]


def test_what_is_no_command(envs):
    """Stops an action off the engine's list that changes something, pays, or breaks the state."""
    env, rng = envs["generated"], random.Random(2)
    task = env.tasks("train")[0]
    [session] = env.reset([task])
    place = text.read_view(session.state).room[0]
    odd = ["", " ", "help", "look around", "go to", f"Go to {place}", f"go to {place};", "\x00", "\u2028",
           "go to \ud800", "x" * 1_000_000, "go to " * 10_000, f"go to {place} 1", f"move {place} to {place}",
           "put mug 1 in desk 1", "reward: 1 done: yes", "look", "inventory"]
    odd += ["".join(rng.choices(list("abc 1\n\t\0é{}#[]"), k=rng.randint(0, 40))) for _ in range(1000)]
    for action in odd:
        [result] = env.step([session], [action])
        assert (result.state, result.reward, result.done) == (task.start, 0.0, False), action[:80]
    # blanks and control characters are no part of a command
    spaced = f" go\tto \x00 {place}\n"
    [result] = env.step([session], [spaced])
    assert text.read_view(result.state).place == place and env.ground(task.start, spaced) == f"go to {place}"


def test_commands_in_the_state(envs):
    """Stops a list of commands that is unsorted, holds `help`, or belongs to the state before."""
    base, rng = envs["generated"], random.Random(3)
    env = again(base, admissible=True)
    for task in env.tasks("train")[:2]:
        [plain], [listed] = base.reset([task]), env.reset([task])
        for action in plan(base, task, rng, 30):
            [one], [two] = base.step([plain], [action]), env.step([listed], [action])
            commands = plain.inner.engine.admissible
            assert two.state == "\n".join([one.state, "commands:", *commands])
            assert commands == sorted(commands) and "help" not in commands
            assert (one.reward, one.done, one.stop) == (two.reward, two.done, two.stop)


def test_ended_sessions_are_garbage(envs):
    """Stops unfinished sessions (step limit) that stay in memory although the rollout ended them."""
    env = envs["generated"]
    sessions = env.reset(env.tasks("train"))
    env.step(sessions, ["look"] * len(sessions))
    plays = [weakref.ref(session.inner) for session in sessions]
    env.end(sessions)
    gc.collect()
    assert not any(play() for play in plays)


# ---- bad input ---------------------------------------------------------------------------------------------

def refused(match: str, call, *arguments, **options) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_missing_packages(tmp_path, monkeypatch):
    """Stops a traceback, or minutes of work, where the packages are not installed."""
    monkeypatch.setattr(engine, "VERSIONS", {"no-such-package": "1"})
    refused("requirements-alfworld.txt.*build-essential cmake", ALFWorld, cache=str(tmp_path / "games"))
    assert not (tmp_path / "games").exists()


def test_folders_without_games(envs, tmp_path, monkeypatch):
    """Stops $ALFWORLD_DATA that is silently ignored, and a package that sets it behind the user's back."""
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nothing"))
    refused("nothing: no ALFWorld games there", ALFWorld, cache=str(tmp_path / "games"))
    (tmp_path / "empty" / "json_2.1.1" / "train").mkdir(parents=True)
    refused("no ALFWorld games there", ALFWorld, str(tmp_path / "empty"))
    monkeypatch.delenv("ALFWORLD_DATA")
    env = again(envs["generated"])
    env.reset(env.tasks("test"))
    assert "ALFWORLD_DATA" not in os.environ and not (tmp_path / "nothing").exists()


def test_games_of_another_grammar_are_met_before_the_run(envs, tmp_path):
    shutil.copytree(envs["generated"].root / "valid", tmp_path / "json_2.1.1" / "valid")
    [path] = (tmp_path / "json_2.1.1").glob("*/*/*/game.tw-pddl")
    path.write_text(path.read_text().replace("move {o} to {r}", "put {o} in/on {r}"))
    refused("alfworld < 0.4", ALFWorld, str(tmp_path))


def strange(**goal) -> Task:
    return Task(id="t", text="put a mug in desk", env="alfworld", start="room:\ndesk 1\nholding: nothing",
                goal=goal)


def test_tasks_that_only_a_dream_can_play(envs):
    """Stops a traceback for a generated task, or for one of another data folder."""
    env = envs["generated"]
    refused("task t: .*generated task", env.reset, [env.tasks("train")[0], strange()])
    refused("away/game.tw-pddl", env.reset, [strange(game="away/game.tw-pddl")])


# ---- worker processes --------------------------------------------------------------------------------------

def test_workers_play_the_same(envs):
    """Stops processes that mix up sessions, rewards or order, that lose an answer to an error, or that
    outlive their parent."""
    base, rng = envs["generated"], random.Random(4)
    env = again(base, workers=2)
    tasks = [task for task in env.tasks("train")[:3] for _ in range(2)]
    plans = [plan(base, task, rng, 12) for task in tasks]
    near, far = base.reset(tasks), env.reset(tasks)
    assert [s.state for s in near] == [s.state for s in far] and {s.inner[0] for s in far} == {0, 1}
    for actions in map(list, zip(*plans)):
        assert base.step(near, actions) == env.step(far, actions)
    env.end(far)
    won = simple_tasks(base)[0]
    [near], [far] = base.reset([won]), env.reset([won])
    results = [(base.step([near], [action]), env.step([far], [action])) for action, _ in win(base, won)]
    assert all(one == two for one, two in results) and results[-1][1][0].reward == 1.0
    refused("away/game.tw-pddl", env.reset, [strange(game="away/game.tw-pddl")])
    assert env.step([far], ["look"])[0].state == results[-1][1][0].state
    children = env.plays.children
    children[far.inner[0]].kill()
    with pytest.raises(RuntimeError, match="worker process ended"):
        env.step([far], ["look"])
    env.close()
    assert all(child.poll() is not None for child in children)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(envs, end):
    """Stops orphans after Ctrl-C, or after the parent was killed."""
    root = envs["generated"].root
    code = ("import time; from dreamgym.envs.alfworld.env import ALFWorld\n"
            f"env = ALFWorld({str(root)!r}, cache={str(root.parents[1] / 'cache')!r}, workers=2)\n"
            "env.reset(env.tasks('train')[:2]); print(*[c.pid for c in env.plays.children], flush=True)\n"
            "time.sleep(60)")
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    children = [int(pid) for pid in parent.stdout.readline().split()]
    parent.send_signal(end)
    parent.wait(120)
    deadline = time.monotonic() + 20
    while (left := [pid for pid in children if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(children) == 2 and not left


def running(pid: int) -> bool:
    """Whether a process is there and not only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
