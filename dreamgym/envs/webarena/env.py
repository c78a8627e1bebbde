"""WebArena as an environment: without `data_dir` own sites and tasks, in process or in a browser, else a
user's instances (live.py). Evaluation happens at `stop`. What only a language model could judge is "not
judged", never failed, when there is no judge.
"""
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from dreamgym.envs.base import Environment, Player, Session, StepResult, real_goal
from dreamgym.envs.webarena import importers, live, verified
from dreamgym.envs.webarena.actions import parse
from dreamgym.envs.webarena.audit import WebArenaAudit
from dreamgym.envs.webarena.direct import InProcessBrowser
from dreamgym.envs.webarena.evaluators import (
    PAGE_HELPERS, Judge, WebTask, as_task, evaluate, located, read_records, shop_helpers)
from dreamgym.envs.webarena.page import STOPPED, Addresses, Page
from dreamgym.envs.webarena.prompts import PROMPTS
from dreamgym.envs.webarena.scripted import PLAYERS
from dreamgym.envs.webarena.sites import DATABASES, SiteDatabase
from dreamgym.envs.webarena.tasks import COUNTS, make_tasks
from dreamgym.envs.webarena.text import ground
from dreamgym.episode import Episode, StopReason, Task
from dreamgym.prompts import clean

STATE_FORM = 4                                   # grows when pages, tasks or their evaluation change
OWN_STEPS = 15                                   # own sites: the longest way takes 7
LIVE_STEPS = 30                                  # WebArena's own limit
OWN_SLOTS = 128                                  # episodes in process at once; each has a database of its own
BACKENDS = ("direct", "chromium")
SCORINGS = ("webarena", "lite")
OWN_KEYS = ("enter", "escape")  # the only ones that do the same in both back ends
FULL, LITE = "test.raw.json", "test_webarena_lite.raw.json"
VALID_TEMPLATES = 1 / 8  # of the templates of official tasks outside Lite: for valid
LOGINS = Path("out/logins")
RESPONSES = Path("out/webarena-verified")
SETTLE_S = 1.0                                   # real sites run scripts after an action
WAIT_S = 3.0                                     # ... and before an evaluator finds nothing


class WebArena(Environment):
    """`data_dir`: a task file in WebArena's format, or a folder with FULL and LITE. `seed`: of the own sites.
    With `backend` chromium, `workers` browsers play at once. `judge`: "URL,MODEL[,KEY_VARIABLE]" of a
    language model that compares answers (evaluators.Judge). `drop`: a task file; recorded episodes of its
    tasks are not read. `scoring` lite: by the rules of WebArena-Lite's own repository."""

    name = "webarena"
    prompts = PROMPTS
    numbered_lines = True

    def __init__(self, data_dir: str = "", seed: int = 7, backend: str = "direct", workers: int = 1,
                 judge: str = "", drop: str = "", scoring: str = "webarena"):
        for name, value, known in (("backend", backend, BACKENDS), ("scoring", scoring, SCORINGS)):
            if value not in known:
                raise ValueError(f"{name} {value!r}: expected one of {', '.join(known)}")
        if judge and not 1 <= judge.count(",") <= 2:
            raise ValueError(f"judge {judge!r}: expected URL,MODEL or URL,MODEL,KEY_VARIABLE")
        self.data_dir, self.seed, self.drop = data_dir, seed, drop
        self.judge = Judge(*judge.split(",")) if judge else None
        self.own = not data_dir
        self.audit = WebArenaAudit(self.own)
        if self.own:
            self.label, self.max_steps, self.wait_s = "own sites", OWN_STEPS, 0.0
            self.sites = OwnSites(seed, backend, workers)
        else:
            self.label, self.max_steps, self.wait_s = "official data", LIVE_STEPS, WAIT_S
            self.responses = RESPONSES / time.strftime("%Y%m%d-%H%M%S")
            tasks = [task for split in self._tasks.values() for task in split]
            self.sites = LiveSites({site for task in tasks for site in task.goal["config"]["sites"]})
            if any(as_task(task.goal["config"]).verified for task in tasks):
                print(f"answers and network logs for WebArena-Verified's scorer: {self.responses}/attempt-N")
        self.slots, self.lite = self.sites.slots, scoring == "lite"
        self.label += ", Lite's scoring" * self.lite

    @cached_property
    def _tasks(self) -> dict[str, list[Task]]:
        """Made on demand: training reads its tasks from collect.py's files."""
        if self.own:
            return {split: make_tasks(split, self.seed) for split in COUNTS}
        return official_tasks(Path(self.data_dir))

    def describe(self) -> dict:
        data = ({"data": "own sites", "seed": self.seed, "databases": len(DATABASES)} if self.own else
                {"data": "official data", "tasks": Path(self.data_dir).name})
        return {"env": "webarena", "state_form": STATE_FORM, **data}

    def tasks(self, split: str) -> list[Task]:
        if split not in self._tasks:
            raise ValueError(f"split {split!r}: {self.label} has {', '.join(self._tasks)}")
        return self._tasks[split]

    def reset(self, tasks: list[Task]) -> list[Session]:
        records = [as_task(real_goal(task, "config")) for task in tasks]
        for task in tasks:
            if self.own and task.goal.get("database") not in DATABASES:
                raise ValueError(f"task {task.id}: goal `database` is {task.goal.get('database')!r}, expected"
                                 f" one of {DATABASES[0]!r} to {DATABASES[-1]!r}: collect its data again")
        stages: list[Stage] = []
        try:
            stages += (self.sites.take(task) for task in tasks)
            for stage, record in zip(stages, records):
                stage.folder = (verified.start_attempt(self.responses, record.task_id) if record.verified
                                else None)
            screens = together(stage.thread.submit(stage.start, record)
                               for stage, record in zip(stages, records))
        except Exception:
            for stage in stages:
                self.sites.give_back(stage)
            raise
        return [Session(task, screen.text, inner=stage)
                for task, screen, stage in zip(tasks, screens, stages)]

    def step(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        results = together(session.inner.thread.submit(self._play, session, action)
                           for session, action in zip(sessions, actions))
        for session, result in zip(sessions, results):
            session.state = result.state
        return results

    def _play(self, session: Session, text: str) -> StepResult:
        stage, action = session.inner, parse(text)
        if not action or (self.own and action.kind == "press" and action.text.lower() not in OWN_KEYS):
            return StepResult(session.state)
        if action.kind != "stop":
            return StepResult(stage.browser.act(action).text)
        if stage.folder:
            verified.write_response(stage.folder, action.text)
        record = located(as_task(session.task.goal["config"]), stage.bases)
        score = evaluate(record, action.text, stage.browser, self.judge, stage.helpers, self.wait_s,
                         self.lite)
        if score is None:
            return StepResult(STOPPED, 0.0, True, StopReason.NOT_JUDGED)
        return StepResult(STOPPED, float(score == 1), True, raw_score=score)

    def end(self, sessions: list[Session]) -> None:
        for session in sessions:
            stage, session.inner = session.inner, None
            if stage is not None:
                self.sites.give_back(stage)

    def close(self) -> None:
        self.sites.close()

    ground = staticmethod(ground)

    def players(self) -> dict[str, Player]:
        if self.own:
            return PLAYERS
        # the others have no plan for official tasks
        return {name: replace(PLAYERS[name], share=0) for name in ("null", "random")}

    def read_traces(self, path: str, form: str) -> list[Episode]:
        """Other people's recorded episodes (importers.py), at the addresses that are played on, too."""
        dropped = read_records(self.drop) if self.drop else []
        ids = {record["task_id"] if record.get("old_task_id") is None else record["old_task_id"]
               for record in dropped}
        bases = [instance.bases for instance in live.read_instances(os.environ, ())]
        return importers.read_traces(path, form, ids, bases)


# ---- where episodes play

@dataclass
class Stage:
    """Where one episode plays."""
    bases: dict[str, str]
    helpers: dict[str, Callable]
    browser: Any
    thread: Executor                             # the browser is used on it alone
    session: Callable[[WebTask], dict]           # the login, as `browser.open` takes it
    sites: Any                                   # the database or the instance
    folder: Path | None = None                   # where an episode of WebArena-Verified leaves its files

    def start(self, task: WebTask) -> Page:
        log = {"record_har_path": self.folder / verified.NETWORK} if self.folder else {}
        return self.browser.open(located(task, self.bases).start_urls, **self.session(task), **log)


def together(futures: Any) -> list:
    """The results in order, when all have ended."""
    started = list(futures)
    wait(started)
    return [future.result() for future in started]


class OwnSites:
    """Our sites, a database for each episode, which later becomes that of another task."""

    def __init__(self, seed: int, backend: str, workers: int):
        self.seed, self.free, self.held = seed, [], ExitStack()
        self.slots = max(1, workers) if backend == "chromium" else OWN_SLOTS
        self.workers = chromium().Workers(self.slots) if backend == "chromium" else None
        self.turns = cycle(self.workers.pairs if self.workers else
                           [(self.held.enter_context(ThreadPoolExecutor(1)), None)])

    def take(self, task: Task) -> Stage:
        name = task.goal["database"]
        if self.free:
            stage = self.free.pop()
            stage.sites.reset(name)
            return stage
        sites, (thread, running) = SiteDatabase(self.seed, name), next(self.turns)
        if running:
            self.held.enter_context(sites.serve())
        browser = chromium().Chromium(Addresses(sites.bases), running) if running else InProcessBrowser(sites)
        return Stage(sites.bases, PAGE_HELPERS, browser, thread,
                     lambda task: {"cookies": {site: sites.login(site) for site in sites.bases}}, sites)

    def give_back(self, stage: Stage) -> None:
        self.free.append(stage)

    def close(self) -> None:
        if self.workers:
            self.workers.close()
        self.held.close()
        self.free = []


class LiveSites:
    """A user's WebArena: one episode at a time on each instance, reset before the first one."""

    def __init__(self, names: set[str]):
        instances, accounts = live.read_instances(os.environ, names), live.read_accounts(os.environ)
        for instance in instances:
            live.check_answers(instance.bases)
        self.slots, self.is_reset, self.free = len(instances), False, []
        hosts = {urlsplit(base).hostname for instance in instances for base in instance.bases.values()}
        self.workers = chromium().Workers(self.slots, hosts | live.read_hosts(os.environ))
        for instance, (thread, running) in zip(instances, self.workers.pairs):
            logins, shop = live.Logins(instance.bases, accounts, LOGINS), instance.bases.get("shopping")
            more = shop_helpers(live.Magento(shop, accounts["shopping_admin"])) if shop else {}
            browser = chromium().Chromium(Addresses(instance.bases), running, SETTLE_S)
            self.free.append(Stage(
                instance.bases, PAGE_HELPERS | more, browser, thread,
                lambda task, logins=logins, browser=browser: {
                    "storage_state": logins.state(browser.browser.chromium, task.accounts, browser.asked)},
                instance))

    def take(self, task: Task) -> Stage:
        if not self.is_reset:
            for url in {stage.sites.reset_url for stage in self.free} - {""}:
                live.full_reset(url)
            self.is_reset = True
        if not self.free:
            raise ValueError(f"more episodes at once than the {self.slots} instances of WebArena; "
                             "expected end() after each episode")
        return self.free.pop()

    def give_back(self, stage: Stage) -> None:
        stage.thread.submit(stage.browser.close).result()
        self.free.append(stage)

    def close(self) -> None:
        self.workers.close()


def chromium() -> Any:
    """The module, imported when it is needed. Raises ValueError without Playwright."""
    try:
        from dreamgym.envs.webarena import chromium
        return chromium
    except ImportError:
        raise ValueError("a real browser needs Playwright: "
                         "pip install -r requirements-webarena.txt") from None


def official_tasks(path: Path) -> dict[str, list[Task]]:
    """From a folder with both official files: test is Lite; of the other tasks, those of an eighth of their
    templates are valid, the rest train. From one file: test alone."""
    if path.is_file():
        parts = {"test": read_records(path)}
    elif missing := [name for name in (FULL, LITE) if not (path / name).is_file()]:
        raise ValueError(f"{path}: found no {' and no '.join(missing)}; expected a task file in WebArena's "
                         f"format, or a folder with {FULL} and {LITE}")
    else:
        parts = {"train": [], "valid": [], "test": read_records(path / LITE)}
        in_lite = {record["old_task_id"] for record in parts["test"]}
        for record in read_records(path / FULL):
            if record["task_id"] not in in_lite:
                template = record.get("intent_template_id", record["task_id"])
                place = Random(f"official {template}").random()
                parts["valid" if place < VALID_TEMPLATES else "train"].append(record)
    return {split: [_official_task(split, record) for record in records] for split, records in parts.items()}


def _official_task(split: str, record: dict) -> Task:
    text, kind = record["intent"], "WebArena-Verified"
    if as_task(record).verified:
        text = f"{text} ({verified.FORM})"
    else:
        kind = "+".join(record["eval"]["eval_types"])
    return Task(id=f"webarena-{split}-{record['task_id']:04d}", text=clean(text), env="webarena",
                goal={"config": record}, groups=[f"type {kind}", f"site {'+'.join(record['sites'])}"])
