"""WebArena as an environment: own sites or a user's instances, an in-process or a real browser, WebArena's
tasks and evaluators.

Without `data_dir` (or $WEBARENA_DATA) the tasks and sites are our own (sites/): stand-ins, and every result
says so. `data_dir` is a task file in WebArena's format, or a folder with test.raw.json and
test_webarena_lite.raw.json. It needs a WebArena that runs (WA_SHOPPING ..., see live.py) and Chromium.
Evaluation happens at `stop`. A task that only a language model could judge is "not judged", never failed,
when there is no judge.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from dreamgym.envs.base import Environment, Player, Session, StepResult
from dreamgym.envs.webarena import importers, live, relabel
from dreamgym.envs.webarena.actions import Action, parse
from dreamgym.envs.webarena.audit import WebArenaAudit
from dreamgym.envs.webarena.direct import InProcessBrowser
from dreamgym.envs.webarena.evaluators import (
    PAGE_HELPERS, Judge, OwnShop, WebTask, as_task, evaluate, located, read_records, read_tasks,
    shop_helpers)
from dreamgym.envs.webarena.names import VOCABULARY, other_names
from dreamgym.envs.webarena.page import STOPPED, Addresses
from dreamgym.envs.webarena.prompts import PROMPTS
from dreamgym.envs.webarena.scripted import PLAYERS
from dreamgym.envs.webarena.sites import SiteDatabase
from dreamgym.envs.webarena.tasks import make_tasks
from dreamgym.envs.webarena.text import ground
from dreamgym.episode import Episode, Step, StopReason, Task
from dreamgym.prompts import clean

STATE_FORM = 2                                   # grows when the same page gets another state text
OWN_STEPS = 15                                   # own sites: the longest way takes 7
LIVE_STEPS = 30                                  # WebArena's own limit
OWN_SLOTS = 128                                  # episodes in process at once; each has a database of its own
BACKENDS = ("direct", "chromium")
STOPS = {1.0: StopReason.SUCCESS, 0.0: StopReason.FAILURE, None: StopReason.NOT_JUDGED}
FULL, LITE = "test.raw.json", "test_webarena_lite.raw.json"
VALID_TEMPLATES = 1 / 8                          # of the official templates outside Lite: for valid
LOGINS = Path("out/logins")
SETTLE_S = 1.0                                   # real sites run scripts after an action
WAIT_S = 3.0                                     # ... and before an evaluator finds nothing


class WebArena(Environment):
    """`seed` is that of the own sites' data and tasks. With `backend` chromium, `workers` browsers play at
    the same time. `judge` is the URL of an endpoint whose model compares answers that only a language model
    can compare (evaluators.Judge); "": such tasks are not judged. `drop` is a task file in WebArena's format
    (WebArena-Lite's): recorded episodes of its tasks are not read."""

    prompts = PROMPTS
    numbered_lines = True

    def __init__(self, data_dir: str = "", seed: int = 7, backend: str = "direct", workers: int = 1,
                 judge: str = "", judge_model: str = "", judge_key_env: str = "OPENAI_API_KEY",
                 drop: str = ""):
        if backend not in BACKENDS:
            raise ValueError(f"backend {backend!r}: expected one of {', '.join(BACKENDS)}")
        self.name, self.seed, self.started = "webarena", seed, 0
        self.judge = Judge(judge, judge_model, judge_key_env) if judge else None
        self.data_dir = data_dir or os.environ.get("WEBARENA_DATA", "")
        self.own, self.drop = not self.data_dir, drop
        self.audit = WebArenaAudit(self.own)
        if self.own:
            self.label, self.max_steps, self.wait_s = "own sites", OWN_STEPS, 0.0
            self.sites = OwnSites(seed, backend, workers)
        else:
            self.label, self.max_steps, self.wait_s = "official data", LIVE_STEPS, WAIT_S
            tasks = [task for split in self._tasks.values() for task in split]
            names = {site for task in tasks for site in task.goal["config"]["sites"]}
            self.sites = LiveSites(self.data_dir, names)
        self.slots = self.sites.slots

    @cached_property
    def _tasks(self) -> dict[str, list[Task]]:
        """Made when they are asked for: training reads its tasks from collect.py's files."""
        if self.own:
            return make_tasks(SiteDatabase(self.seed), self.seed)
        return official_tasks(Path(self.data_dir))

    def describe(self) -> dict:
        data = {"seed": self.seed} if self.own else {"tasks": Path(self.data_dir).name}
        return {"env": "webarena", "state_form": STATE_FORM, "data": self.label, **data}

    def tasks(self, split: str) -> list[Task]:
        if split not in self._tasks:
            raise ValueError(f"split {split!r}: {self.label} has {', '.join(self._tasks)}")
        return self._tasks[split]

    def reset(self, tasks: list[Task]) -> list[Session]:
        """Raises ValueError for a generated task, which only the dream can play."""
        for task in tasks:
            if "config" not in task.goal:
                raise ValueError(f"task {task.id}: expected goal `config`; a generated task has none")
        records = [as_task(task.goal["config"]) for task in tasks]
        stages: list[Stage] = []
        try:
            for record in records:
                stages.append(self.sites.take(record))
            starts = [(located(record, stage.bases).start_urls, stage.cookies)
                      for record, stage in zip(records, stages)]
            farm, browsers = self.sites.farm, [stage.browser for stage in stages]
            if farm:
                screens = farm.open(browsers, starts)
            else:
                screens = [browser.open(*start) for browser, start in zip(browsers, starts)]
        except Exception:
            for stage in stages:
                self.sites.give_back(stage)
            raise
        self.started += len(tasks)
        first = self.started - len(tasks)
        return [Session(f"real-{first + i}", task, screen.text, inner=stage)
                for i, (task, screen, stage) in enumerate(zip(tasks, screens, stages))]

    def step(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        """One action each. `stop` ends the episode and has it evaluated. The browser finds the element
        behind a line number; a header line has none."""
        parsed = [_parsed(action) for action in actions]
        moving = [i for i, action in enumerate(parsed) if action and action.kind != "stop"]
        browsers, moves = [sessions[i].inner.browser for i in moving], [parsed[i] for i in moving]
        farm = self.sites.farm
        screens = farm.act(browsers, moves) if farm else [b.act(move) for b, move in zip(browsers, moves)]
        shown = {i: screen.text for i, screen in zip(moving, screens)}
        results = []
        for i, session in enumerate(sessions):
            session.steps += 1
            if parsed[i] and parsed[i].kind == "stop":
                score = self._score(session, parsed[i].text)
                results.append(StepResult(STOPPED, float(score == 1), True, STOPS[score], score or 0.0))
            else:
                results.append(StepResult(shown.get(i, session.state)))
            session.state = results[-1].state
        return results

    def _score(self, session: Session, answer: str) -> float | None:
        stage = session.inner
        record, browser = located(as_task(session.task.goal["config"]), stage.bases), stage.browser
        verdict = evaluate(record, answer, browser.url, browser.page, self.judge, stage.helpers, self.wait_s)
        return verdict.score

    def end(self, sessions: list[Session]) -> None:
        """Gives each session's sites and browser back, also where the episode was cut short."""
        for session in sessions:
            stage, session.inner = session.inner, None
            if stage is not None:
                self.sites.give_back(stage)

    def close(self) -> None:
        self.sites.close()

    def ground(self, state: str, action: str) -> str:
        return ground(state, action)

    def players(self) -> dict[str, Player]:
        """Of the own sites: they follow the templates' plans."""
        return PLAYERS if self.own else {}

    def explain(self, task: Task, history: list[Step], step: Step) -> tuple[str, str]:
        return relabel.explain(task.text, history, step, self.own)

    def counterfactuals(self, episodes: list[Episode], count: int, rng: np.random.Generator) -> list[Episode]:
        return relabel.counterfactuals(episodes, count, rng, self.seed) if self.own else []

    def read_traces(self, path: str, form: str) -> list[Episode]:
        """Other people's recorded episodes (importers.py). Raises ValueError for what does not fit."""
        dropped = read_tasks(self.drop) if self.drop else []
        ids = {task.old_task_id if task.lite else task.task_id for task in dropped}
        return importers.read_traces(path, form, ids)

    def renamer(self, rng: np.random.Generator) -> Callable[[str], str] | None:
        return other_names(rng) if self.own else None

    def vocabulary(self) -> list[str]:
        return VOCABULARY if self.own else []


def _parsed(text: str) -> Action | None:
    try:
        return parse(text)
    except ValueError:
        return None


# ---- where episodes play -----------------------------------------------------------------------------------

@dataclass
class Stage:
    """Where one episode plays: addresses, who is logged in there, and a browser. `sites` is what is given
    back to play again: a database, or an instance with its logins. `served`: the database over HTTP, when
    a real browser reads it."""
    bases: dict[str, str]
    helpers: dict[str, Callable]
    browser: Any = None
    cookies: dict = field(default_factory=dict)
    sites: Any = None
    served: Any = None


def _browsers(count: int, **settings):
    try:
        from dreamgym.envs.webarena.chromium import Workers
        return Workers(count, **settings)
    except ImportError:
        raise ValueError("backend chromium needs Playwright: "
                         "pip install -r requirements-webarena.txt") from None


class OwnSites:
    """Our sites, a database for each episode; databases are used again after a rollback."""

    def __init__(self, seed: int, backend: str, workers: int):
        self.seed, self.free = seed, []
        self.slots = max(1, workers) if backend == "chromium" else OWN_SLOTS
        self.farm = _browsers(self.slots) if backend == "chromium" else None

    def take(self, task: WebTask) -> Stage:
        if self.free:
            stage = self.free.pop()
            stage.sites.reset()
            return stage
        sites = SiteDatabase(self.seed)
        served = sites.serve() if self.farm else None
        browser = self.farm.browsers([Addresses(sites.bases)])[0] if self.farm else InProcessBrowser(sites)
        cookies = {site: sites.login(site) for site in sites.bases}
        helpers = PAGE_HELPERS | shop_helpers(OwnShop(sites))
        return Stage(sites.bases, helpers, browser, cookies, sites, served)

    def give_back(self, stage: Stage) -> None:
        self.free.append(stage)

    def close(self) -> None:
        if self.farm:
            self.farm.close()
        for stage in self.free:
            if stage.served:
                stage.served.close()
        self.free = []


class LiveSites:
    """A user's WebArena: the instance that WA_SHOPPING ... name, or those of the file $WA_INSTANCES, one
    episode at a time on each. Where WA_FULL_RESET is set, the sites are reset (minutes) before the first
    episode."""

    def __init__(self, data_dir: str, names: set[str]):
        several = os.environ.get("WA_INSTANCES", "")
        if several:
            instances = live.read_instances(several, names)
        else:
            instances = [found] if (found := live.read_instance(os.environ, names)) else []
        if not instances:
            raise ValueError(f"{data_dir}: official tasks need a WebArena that runs; expected its addresses "
                             "in WA_SHOPPING, WA_REDDIT, ... (docs/environments.md)")
        accounts = live.read_accounts(os.environ)
        for instance in instances:
            live.check_answers(instance.bases)
        self.slots, self.is_reset = len(instances), False
        hosts = set().union(*(Addresses(instance.bases).hosts for instance in instances))
        self.farm = _browsers(self.slots, hosts=hosts, settle_s=SETTLE_S)
        self.free = [(instance, live.Logins(instance.bases, accounts, LOGINS)) for instance in instances]

    def _full_reset(self) -> None:
        for instance, logins in self.free:
            if instance.reset_url:
                with tqdm(desc=f"resetting {instance.reset_url}", unit="s") as bar:
                    live.full_reset(instance.reset_url,
                                    progress=lambda seconds, said: bar.update(round(seconds) - bar.n))
                logins.forget()
        self.is_reset = True

    def take(self, task: WebTask) -> Stage:
        from dreamgym.envs.webarena.chromium import Browser
        if not self.is_reset:
            self._full_reset()
        if not self.free:
            raise ValueError(f"more episodes at once than the {self.slots} instances of WebArena; "
                             "expected end() after each episode")
        instance, logins = sites = self.free.pop()
        try:
            addresses, shop = Addresses(instance.bases), instance.bases.get("shopping")
            with Browser(hosts=addresses.hosts) as browser:
                state = logins.state(browser.chromium, task.sites)
            more = shop_helpers(live.Magento(shop, logins.accounts["shopping_admin"])) if shop else {}
            browser = self.farm.browsers([addresses], [{"storage_state": state}])[0]
        except Exception:
            self.free.append(sites)
            raise
        return Stage(instance.bases, PAGE_HELPERS | more, browser, sites=sites)

    def give_back(self, stage: Stage) -> None:
        self.free.append(stage.sites)
        stage.browser.close()

    def close(self) -> None:
        self.farm.close()


def official_tasks(path: Path) -> dict[str, list[Task]]:
    """From a folder with both official files: test is Lite, valid an eighth of the other templates, train
    the rest. From one file: test alone. Raises ValueError. First states are not known before an episode
    starts, so tasks have none until then: the dream needs recorded episodes of these sites."""
    def made(records: list[dict], split: str) -> list[Task]:
        tasks = []
        for record in records:
            groups = [f"type {'+'.join(record['eval']['eval_types'])}", f"site {'+'.join(record['sites'])}"]
            tasks.append(Task(id=f"webarena-{split}-{record['task_id']:04d}", text=clean(record["intent"]),
                              env="webarena", goal={"config": record}, groups=groups))
        return tasks
    if path.is_file():
        return {"test": made(read_records(path), "test")}
    if missing := [name for name in (FULL, LITE) if not (path / name).is_file()]:
        raise ValueError(f"{path}: found no {' and no '.join(missing)}; expected a task file in WebArena's "
                         f"format, or a folder with {FULL} and {LITE}")
    lite = read_records(path / LITE)
    in_lite = {record["old_task_id"] for record in lite}
    rest = [record for record in read_records(path / FULL) if record["task_id"] not in in_lite]
    parts: dict[str, list[dict]] = {"train": [], "valid": []}
    for record in rest:
        place = Random(f"official {record['intent_template_id']}").random()
        parts["valid" if place < VALID_TEMPLATES else "train"].append(record)
    return {split: made(records, split) for split, records in {**parts, "test": lite}.items()}
