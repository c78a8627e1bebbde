"""The environments, and the contract they share with the experience model.

A world (real or dream) has two methods, batched over any set of running episodes:

    start(tasks) -> [Session]                      Session.state is the first state
    act(sessions, actions) -> [StepResult]         one action for each session; the session's `state` moves on

and a real one also `tasks(split) -> [Task]`, `max_steps`, `label` (which data it plays), `describe()` and `text`, the module of pure functions that
reads its states; where it needs them, `slots` (episodes at once) and `close()`.
An environment is four modules: NAME_env (the world), NAME_text (the state mapping and all rules), NAME_offline (players and teacher for
offline data) and what those need.
Sessions are values: episodes may start and end at any time, so a rollout keeps its batch full. Reward is 1 on success at the end, else 0;
`info` keeps the raw score, validity and stop reason. A real environment never asks a language model anything; the dream never touches a real one.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from dreamgym.episode import Episode, Step, Task


@dataclass
class Session:
    """One running episode in some world: `inner` belongs to that world (an engine, or the dream's own record of the episode)."""
    id: str
    task: Task
    state: str
    steps: int = 0
    inner: Any = None


@dataclass
class StepResult:
    state: str
    reward: float = 0.0
    done: bool = False
    info: dict = field(default_factory=dict)     # valid: bool, score: float, stop: str ("" while running), reasoning: str (dream only)


def record(episode: Episode, state: str, action: str, result: StepResult, reasoning: str, max_steps: int) -> None:
    """Appends a real step to an offline episode, and its end when it has one."""
    episode.steps.append(Step(state, action, result.state, result.reward, result.done, result.info["grounded"], reasoning, result.info["valid"]))
    if result.done:
        episode.stop, episode.score = result.info["stop"], result.info["score"]
    elif len(episode.steps) >= max_steps:
        episode.stop = "step_limit"


def play_explained(env, session: Session, kind: str, act: Callable[[str], str], explain: Callable[..., str], name: str) -> Episode:
    """One real episode of a rule-based player (`act`: state -> action), each step explained from the task, the states before it and its outcome."""
    task, episode, history = session.task, Episode(name, session.task, source=kind), []
    while not episode.stop:
        state, action = session.state, act(session.state)
        result = env.act([session], [action])[0]
        record(episode, state, action, result, explain(task.text, history, state, action, result.state, result.reward), env.max_steps)
        history.append(state)
    return episode


ENVIRONMENTS = ("webshop", "alfworld", "webarena")


def make_env(name: str, data_dir: str = "", cache: str = "", env_seed: int = 7, human_goals: bool = False, admissible: bool = False, workers: int = 1,
             backend: str = "direct"):
    """A real environment by name: `data_dir` official data (default: the environment's variable), `cache` where data is generated otherwise, from
    `env_seed`; `human_goals` is WebShop's, `admissible` (commands in the state) ALFWorld's, `backend` (direct | chromium) WebArena's, `workers` (processes that
    play) for the latter two. Raises ValueError for an unknown name; the environment itself explains missing data or packages."""
    make_rules(name)
    if name == "webshop":
        from dreamgym.envs.webshop.env import WebShop
        return WebShop(data_dir, cache or "out/shop", env_seed, human_goals)
    if name == "alfworld":
        from dreamgym.envs.alfworld.env import ALFWorld
        return ALFWorld(data_dir, cache or "out/games", env_seed, admissible, workers)
    from dreamgym.envs.webarena.env import LiveWebArena, WebArena
    data_dir = data_dir or os.environ.get("WEBARENA_DATA", "")
    return LiveWebArena(data_dir) if data_dir else WebArena(env_seed, backend, workers)


def env_of(collected: dict, workers: int = 1, **changes):
    """The environment in which data was collected (`settings` of its meta.json), with other arguments of `make_env` where `changes` names them."""
    kept = {name: collected[name] for name in ("data_dir", "env_seed", "human_goals", "admissible")}
    return make_env(collected["env"], **{**kept, "workers": workers, **changes})


def make_rules(name: str) -> ModuleType:
    """The module of pure functions that reads an environment's states: all that the dream knows of the real environment."""
    if name not in ENVIRONMENTS:
        raise ValueError(f"--env {name}: unknown environment; this version has {', '.join(ENVIRONMENTS)}")
    return import_module(f"dreamgym.envs.{name}_text")


def make_offline(name: str) -> ModuleType:
    """The module that plays an environment without a model, for offline data: MIX, `play`, `relabelled`, `explain_recorded`."""
    make_rules(name)
    return import_module(f"dreamgym.envs.{name}_offline")
