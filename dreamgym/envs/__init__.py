"""The environments, and the contract they share with the experience model.

A world (real or dream) has two methods, batched over any set of running episodes:

    start(tasks) -> [Session]                      Session.state is the first state
    act(sessions, actions) -> [StepResult]         one action for each session; the session's `state` moves on

and a real one also `tasks(split) -> [Task]` and `text`, the module of pure functions that reads its states (`ground`, `judged`, `action_type`, ...).
Sessions are values: episodes may start and end at any time, so a rollout keeps its batch full. Reward is 1 on success at the end, else 0;
`info` keeps the raw score, validity and stop reason. A real environment never asks a language model anything; the dream never touches a real one.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from dreamgym.episode import Task


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


ENVIRONMENTS = ("webshop",)


def make_env(name: str, **options):
    """A real environment by name. Raises ValueError for an unknown name; the environment itself explains missing data or packages."""
    if name == "webshop":
        from dreamgym.envs.webshop_env import WebShop
        return WebShop(**options)
    raise ValueError(f"--env {name}: unknown environment; this version has {', '.join(ENVIRONMENTS)}")


def make_rules(name: str) -> ModuleType:
    """The module of pure functions that reads an environment's states: all that the dream knows of the real environment."""
    if name == "webshop":
        from dreamgym.envs import webshop_text
        return webshop_text
    raise ValueError(f"environment {name!r}: unknown; this version has {', '.join(ENVIRONMENTS)}")
