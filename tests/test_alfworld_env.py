"""ALFWorld as an environment: the adapter around the engine, splits, first states, bad input, worker
processes."""
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

import numpy as np
import pytest
from alfworld_official import needs_official, needs_packages, random_command

from dreamgym import offline
from dreamgym.envs.alfworld import engine, text
from dreamgym.envs.alfworld.env import ALFWorld
from dreamgym.envs.base import make_env
from dreamgym.episode import Task
from tests.conftest import gone

pytestmark = needs_packages
both = pytest.mark.parametrize("which", ["generated", pytest.param("official", marks=needs_official)])
SPLITS = ("train", "valid", "test")


def again(env: ALFWorld, **options) -> ALFWorld:
    return ALFWorld(str(env.root), cache=str(env.root.parents[1] / "cache"), **options)


def plan(env: ALFWorld, task: Task, rng: random.Random, length: int) -> list[str]:
    """Actions of a random walk, one in five of them nothing that the engine knows."""
    [session], actions = env.reset([task]), []
    while len(actions) < length:
        known = random_command(rng, session.inner.engine.admissible)
        actions.append(known if rng.random() < 0.8 else rng.choice(["help", "", "go to moon 1", "wait"]))
        env.step([session], actions[-1:])
    return actions


# ---- tasks and first states ----

@both
def test_a_dream_begins_where_the_engine_does(alfworlds, which):
    """Stops first states and sentences, read from the PDDL text for speed, that the engine does not say."""
    env, listing = alfworlds[which], again(alfworlds[which], admissible=True)
    for split in SPLITS:
        tasks = env.tasks(split)
        for task, session, listed in zip(tasks, env.reset(tasks), listing.reset(listing.tasks(split))):
            assert session.state == task.start and session.inner.engine.task == task.text
            commands = "\n".join([task.start, "commands:", *session.inner.engine.admissible])
            assert listed.state == listed.task.start == commands and text.read_view(task.start).room
            assert text.read_view(listed.state) == text.read_view(task.start)


@both
def test_splits(alfworlds, which):
    """Ids that change or occur twice, test homes in training."""
    env = alfworlds[which]
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
def test_names_and_labels(alfworlds, which):
    """Generated games that pass for official ones, also when their folder is given as data."""
    env = alfworlds[which]
    made = make_env("alfworld", data_dir=str(env.root.parent), workers=1,
                    options=["cache=" + str(env.root.parents[1] / "cache")])
    assert made.describe() == env.describe() and made.tasks("train") == env.tasks("train")
    games, seed = ("generated games", 3) if which == "generated" else ("official data", None)
    expected = {"env": "alfworld", "state_version": text.STATE_VERSION, "games": games, "seed": seed,
                "admissible": False}
    assert json.loads(json.dumps(env.describe())) | expected == env.describe() and env.label == games


# ---- playing ----

def test_what_is_no_command(alfworlds):
    """An action off the engine's list that changes something, pays, or breaks the state."""
    env, rng = alfworlds["generated"], random.Random(2)
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


def test_commands_in_the_state(alfworlds):
    """A list of commands that is unsorted, holds `help`, or belongs to the state before."""
    base, rng = alfworlds["generated"], random.Random(3)
    env = again(base, admissible=True)
    for task in env.tasks("train")[:2]:
        [plain], [listed] = base.reset([task]), env.reset([task])
        for action in plan(base, task, rng, 30):
            [one], [two] = base.step([plain], [action]), env.step([listed], [action])
            commands = plain.inner.engine.admissible
            assert two.state == "\n".join([one.state, "commands:", *commands])
            assert commands == sorted(commands) and "help" not in commands
            assert (one.reward, one.done) == (two.reward, two.done)


def test_ended_sessions_are_garbage(alfworlds):
    """Unfinished sessions (step limit) that stay in memory although the rollout ended them."""
    env = alfworlds["generated"]
    sessions = env.reset(env.tasks("train"))
    env.step(sessions, ["look"] * len(sessions))
    plays = [weakref.ref(session.inner) for session in sessions]
    env.end(sessions)
    gc.collect()
    assert not any(play() for play in plays)


# ---- bad input ----

def refused(match: str, call, *arguments, **options) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "VERSIONS", {"no-such-package": "1"})
    refused("requirements-alfworld.txt.*build-essential cmake", ALFWorld, cache=str(tmp_path / "games"))
    assert not (tmp_path / "games").exists()


def test_folders_without_games(alfworlds, tmp_path, monkeypatch):
    """$ALFWORLD_DATA that is silently ignored, and a package that sets it behind the user's back."""
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nothing"))
    refused("nothing: no ALFWorld games there", make_env, "alfworld", options=[f"cache={tmp_path / 'games'}"])
    (tmp_path / "empty" / "json_2.1.1" / "train").mkdir(parents=True)
    refused("no ALFWorld games there", ALFWorld, str(tmp_path / "empty"))
    monkeypatch.delenv("ALFWORLD_DATA")
    env = again(alfworlds["generated"])
    env.reset(env.tasks("test"))
    assert "ALFWORLD_DATA" not in os.environ and not (tmp_path / "nothing").exists()


def test_games_of_another_grammar_are_met_before_the_run(alfworlds, tmp_path):
    shutil.copytree(alfworlds["generated"].root / "valid", tmp_path / "json_2.1.1" / "valid")
    [path] = (tmp_path / "json_2.1.1").glob("*/*/*/game.tw-pddl")
    path.write_text(path.read_text().replace("move {o} to {r}", "put {o} in/on {r}"))
    refused("alfworld < 0.4", ALFWorld, str(tmp_path))


def strange(**goal) -> Task:
    return Task(id="t", text="put a mug in desk", env="alfworld", start="room:\ndesk 1\nholding: nothing",
                goal=goal)


def test_tasks_that_only_a_dream_can_play(alfworlds):
    env = alfworlds["generated"]
    refused("task t: .*generated task", env.reset, [env.tasks("train")[0], strange()])
    refused("away/game.tw-pddl", env.reset, [strange(game="away/game.tw-pddl")])


# ---- worker processes ----

def test_workers_play_the_same(alfworlds):
    """Processes that mix up sessions, rewards or order, that lose an answer to an error or keep its batch."""
    base, rng = alfworlds["generated"], random.Random(4)
    env = again(base, workers=2)
    tasks = [task for task in env.tasks("train")[:3] for _ in range(2)]
    plans = [plan(base, task, rng, 12) for task in tasks]
    near, far = base.reset(tasks), env.reset(tasks)
    assert [s.state for s in near] == [s.state for s in far] and {s.inner[0] for s in far} == {0, 1}
    for actions in map(list, zip(*plans)):
        assert base.step(near, actions) == env.step(far, actions)
    env.end(far)
    won = base.tasks("train")[0]
    [near], [far] = base.reset([won]), env.reset([won])
    oracle = offline.play(base, won, base.players()["oracle"], np.random.default_rng(0), "e")
    results = [(base.step([near], [s.action]), env.step([far], [s.action])) for s in oracle.steps]
    assert all(one == two for one, two in results) and results[-1][1][0].reward == 1.0
    refused("away/game.tw-pddl", env.reset, [won, strange(game="away/game.tw-pddl")])
    started = far.inner[0], next(env.plays.numbers) - 2          # before the game that is away
    assert env.plays._ask("end", [started], [""]) == [False]
    assert env.step([far], ["look"])[0].state == results[-1][1][0].state
    children = env.plays.children
    children[far.inner[0]].kill()
    with pytest.raises(RuntimeError, match="worker process ended"):
        env.step([far], ["look"])
    env.close()
    assert all(child.poll() is not None for child in children)


def test_games_are_translated_beforehand(alfworlds, tmp_path):
    """A game that is translated when it is played; a broken one that ends the process; a process that stays."""
    env = ALFWorld(str(alfworlds["generated"].root), cache=str(tmp_path))
    env.prepare([strange(game="away/game.tw-pddl"), *env.tasks("train")[:2]])
    kept, deadline = tmp_path / "translations", time.monotonic() + 60
    while len(list(kept.glob("*.zlib"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    env.close()
    assert env.ahead.children[0].poll() is not None


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(alfworlds, end):
    root = alfworlds["generated"].root
    code = ("import signal, time; from dreamgym.envs.alfworld.env import ALFWorld\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"      # a background job ignores it
            f"env = ALFWorld({str(root)!r}, cache={str(root.parents[1] / 'cache')!r}, workers=2)\n"
            "env.reset(env.tasks('train')[:2]); print(*[c.pid for c in env.plays.children], flush=True)\n"
            "time.sleep(60)")
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    children = [int(pid) for pid in parent.stdout.readline().split()]
    parent.send_signal(end)
    parent.wait(120)
    assert len(children) == 2 and gone(children)
