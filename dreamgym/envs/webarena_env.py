"""WebArena as an environment of DreamGym: own sites or a user's instances, a browserless or a real browser, WebArena's tasks and evaluators.

Without `data_dir` the tasks and sites are our own (`webarena_sites`): stand-ins, and every result says so. `data_dir` is a task file in WebArena's format, or a
folder with test.raw.json and test_webarena_lite.raw.json; it needs a WebArena that runs (WA_SHOPPING ..., see webarena_live) and Chromium. Evaluation happens
at `stop`, on fresh pages. A task that only a language model could judge is "not judged", never failed, when there is no judge.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dreamgym.envs import Session, StepResult, webarena_text
from dreamgym.envs.webarena_actions import Action, parse
from dreamgym.envs.webarena_direct import Direct
from dreamgym.envs.webarena_evaluators import PAGE_HELPERS, OwnShop, Verdict, as_task, evaluate, located, shop_helpers
from dreamgym.envs.webarena_page import Addresses
from dreamgym.envs.webarena_sites import World
from dreamgym.envs.webarena_tasks import make_tasks
from dreamgym.episode import Task

MAX_STEPS = 15                                   # own sites, where the longest way takes 7; WebArena's own limit is 30
BACKENDS = ("direct", "chromium")
STOPS = {True: "success", False: "failure", None: "not_judged"}


@dataclass
class Stage:
    """Where one episode plays: sites of its own, and a browser on them."""
    world: World
    browser: Any
    served: Any = None
    answer: str = ""


class WebArena:
    """The own sites. `seed` is that of their data and tasks; `workers` browsers play at the same time with `backend` chromium."""

    text = webarena_text
    max_steps = MAX_STEPS
    label = "own sites"

    def __init__(self, seed: int = 7, backend: str = "direct", workers: int = 1, judge: Callable | None = None):
        if backend not in BACKENDS:
            raise ValueError(f"--backend {backend}: expected one of {', '.join(BACKENDS)}")
        self.seed, self.backend, self.judge = seed, backend, judge
        self.slots = 128 if backend == "direct" else max(1, workers)     # episodes at once: a real browser each is slow to have many of
        self._tasks = make_tasks(World(seed), seed)
        self.started, self.free, self.farm = 0, [], None
        if backend == "chromium":
            from dreamgym.envs.webarena_chromium import Workers
            self.farm = Workers(self.slots)

    def describe(self) -> dict:
        return {"env": "webarena", "sites": self.label, "seed": self.seed, "backend": self.backend}

    def tasks(self, split: str) -> list[Task]:
        """train | test. Held-out tasks are of templates, or about things, that no training task has."""
        if split not in self._tasks:
            raise ValueError(f"split {split!r}: WebArena's own sites have {', '.join(self._tasks)}")
        return self._tasks[split]

    def _stage(self) -> Stage:
        if self.free:
            stage = self.free.pop()
            stage.world.reset()
            return stage
        world = World(self.seed)
        if not self.farm:
            return Stage(world, Direct(world))
        served = world.serve()
        return Stage(world, self.farm.browsers([Addresses(served.bases)])[0], served)

    def start(self, tasks: list[Task]) -> list[Session]:
        """Raises ValueError for a generated task: only the dream can play those."""
        for task in tasks:
            if "config" not in task.goal:
                raise ValueError(f"task {task.id}: no task of the real sites (a generated one?); expected goal `config`")
        stages = [self._stage() for _ in tasks]
        opened = [(located(as_task(task.goal["config"]), stage.world.bases).start_urls, {site: stage.world.login(site) for site in stage.world.bases})
                  for task, stage in zip(tasks, stages)]
        screens = self.farm.open([s.browser for s in stages], opened) if self.farm else [s.browser.open(*start) for s, start in zip(stages, opened)]
        self.started += len(tasks)
        return [Session(f"real-{self.started - len(tasks) + i}", task, screen.text, inner=stage) for i, (task, stage, screen) in enumerate(zip(tasks, stages, screens))]

    def act(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        """One action each. What is no action leaves the page as it is, with a note that says so; `stop` ends the episode and has it evaluated."""
        parsed, notes = zip(*[read(action) for action in actions]) if actions else ((), ())
        moving = [i for i, action in enumerate(parsed) if action and action.kind != "stop"]
        browsers, moves = [sessions[i].inner.browser for i in moving], [parsed[i] for i in moving]
        screens = self.farm.act(browsers, moves) if self.farm else [browser.act(move) for browser, move in zip(browsers, moves)]
        shown = {i: screen.text for i, screen in zip(moving, screens)}
        results = []
        for i, (session, text) in enumerate(zip(sessions, actions)):
            grounded = webarena_text.ground(session.state, text)
            session.steps += 1
            if parsed[i] and parsed[i].kind == "stop":
                verdict = self._verdict(session, parsed[i].text)
                session.state = webarena_text.STOPPED
                info = {"valid": True, "grounded": grounded, "score": verdict.score or 0.0, "stop": STOPS[None if verdict.score is None else verdict.score == 1]}
                results.append(StepResult(session.state, float(verdict.score == 1), True, info))
            else:
                session.state = shown.get(i) or webarena_text.with_note(session.state, notes[i])
                results.append(StepResult(session.state, 0.0, False, {"valid": webarena_text.valid("", "", session.state), "grounded": grounded, "score": 0.0, "stop": ""}))
            if results[-1].done or session.steps >= self.max_steps:
                self.free.append(session.inner)
        return results

    def _verdict(self, session: Session, answer: str) -> Verdict:
        stage = session.inner
        task = located(as_task(session.task.goal["config"]), stage.world.bases)
        helpers = PAGE_HELPERS | shop_helpers(OwnShop(stage.world))
        return evaluate(task, answer, stage.browser.url, stage.browser.page, self.judge, helpers)

    def close(self) -> None:
        """Ends browsers and servers."""
        if self.farm:
            self.farm.close()
        for stage in self.free:
            if stage.served:
                stage.served.close()


def read(text: str) -> tuple[Action | None, str]:
    """(action, "") or (None, why it is none)."""
    try:
        return parse(text), ""
    except ValueError as error:
        return None, str(error)
