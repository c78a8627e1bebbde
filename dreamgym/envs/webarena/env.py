"""WebArena as an environment of DreamGym: own sites or a user's instances, a browserless or a real browser, WebArena's tasks and evaluators.

Without `data_dir` the tasks and sites are our own (`webarena_sites`): stand-ins, and every result says so. `data_dir` is a task file in WebArena's format, or a
folder with test.raw.json and test_webarena_lite.raw.json; it needs a WebArena that runs (WA_SHOPPING ..., see webarena_live) and Chromium. Evaluation happens
at `stop`, on fresh pages. A task that only a language model could judge is "not judged", never failed, when there is no judge.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dreamgym.envs import Session, StepResult, webarena_live as live, webarena_text
from dreamgym.envs.webarena.actions import Action, parse
from dreamgym.envs.webarena.direct import InProcessBrowser
from dreamgym.envs.webarena.evaluators import PAGE_HELPERS, OwnShop, Verdict, WebTask, as_task, evaluate, located, read_records, shop_helpers
from dreamgym.envs.webarena.page import Addresses
from dreamgym.envs.webarena.sites import SiteDatabase
from dreamgym.envs.webarena.tasks import make_tasks
from dreamgym.episode import Task

OWN_STEPS, LIVE_STEPS = 15, 30                   # own sites: the longest way takes 7; WebArena's own limit
BACKENDS = ("direct", "chromium")
STOPS = {1.0: "success", 0.0: "failure", None: "not_judged"}
FULL, LITE = "test.raw.json", "test_webarena_lite.raw.json"
LOGINS = Path("out/logins")
SETTLE_S, WAIT_S = 1.0, 3.0                      # real sites run scripts: after an action, and before an evaluator finds nothing


@dataclass
class Stage:
    """Where one episode plays: addresses, who is logged in there, and a browser. `sites`: the SiteDatabase, `served` when a real browser reads it; of a user's sites
    the instance with its logins."""
    bases: dict[str, str]
    helpers: dict[str, Callable]
    browser: Any = None
    cookies: dict = field(default_factory=dict)
    sites: Any = None
    served: Any = None


class WebArena:
    """The own sites. `seed` is that of their data and tasks; with `backend` chromium, `workers` browsers play at the same time."""

    text = webarena_text
    max_steps, label, wait_s = OWN_STEPS, "own sites", 0.0

    def __init__(self, seed: int = 7, backend: str = "direct", workers: int = 1):
        if backend not in BACKENDS:
            raise ValueError(f"--backend {backend}: expected one of {', '.join(BACKENDS)}")
        self.seed, self.backend = seed, backend
        self.judge: Callable | None = None       # for answers that only a language model can compare (webarena_evaluators.Judge)
        self.slots = 128 if backend == "direct" else max(1, workers)     # episodes at once; each has sites of its own
        self.started, self.free, self.farm = 0, [], None
        if backend == "chromium":
            self.farm = self._browsers()

    @cached_property
    def _tasks(self) -> dict[str, list[Task]]:
        """Made when they are asked for: training reads its tasks from collect.py's files."""
        return make_tasks(SiteDatabase(self.seed), self.seed)

    def _browsers(self, **settings):
        try:
            from dreamgym.envs.webarena.chromium import Workers
            return Workers(self.slots, **settings)
        except ImportError:
            raise ValueError("--backend chromium needs Playwright; install it: pip install -r requirements-webarena.txt") from None

    def describe(self) -> dict:
        return {"env": "webarena", "sites": self.label, "seed": self.seed, "backend": self.backend}

    def tasks(self, split: str) -> list[Task]:
        """train | test. Held-out tasks are of templates, or about things, that no training task has."""
        if split not in self._tasks:
            raise ValueError(f"split {split!r}: {self.label} have {', '.join(self._tasks)}")
        return self._tasks[split]

    def _stage(self, task: WebTask) -> Stage:
        if self.free:
            stage = self.free.pop()
            stage.sites.reset()
            return stage
        world = SiteDatabase(self.seed)
        served = world.serve() if self.farm else None
        browser = self.farm.browsers([Addresses(world.bases)])[0] if self.farm else InProcessBrowser(world)
        return Stage(world.bases, PAGE_HELPERS | shop_helpers(OwnShop(world)), browser, {site: world.login(site) for site in world.bases}, world, served)

    def _leave(self, stage: Stage) -> None:
        self.free.append(stage)

    def start(self, tasks: list[Task]) -> list[Session]:
        """Raises ValueError for a generated task: only the dream can play those."""
        for task in tasks:
            if "config" not in task.goal:
                raise ValueError(f"task {task.id}: no task of the real sites (a generated one?); expected goal `config`")
        records = [as_task(task.goal["config"]) for task in tasks]
        stages = [self._stage(record) for record in records]
        opened = [(located(record, stage.bases).start_urls, stage.cookies) for record, stage in zip(records, stages)]
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
                info = {"valid": True, "grounded": grounded, "score": verdict.score or 0.0, "stop": STOPS[verdict.score]}
                results.append(StepResult(session.state, float(verdict.score == 1), True, info))
            else:
                session.state = shown.get(i) or webarena_text.with_note(session.state, notes[i])
                results.append(StepResult(session.state, 0.0, False, {"valid": webarena_text.valid("", "", session.state), "grounded": grounded, "score": 0.0, "stop": ""}))
            if results[-1].done or session.steps >= self.max_steps:
                self._leave(session.inner)
        return results

    def _verdict(self, session: Session, answer: str) -> Verdict:
        stage = session.inner
        return evaluate(located(as_task(session.task.goal["config"]), stage.bases), answer, stage.browser.url, stage.browser.page, self.judge, stage.helpers, self.wait_s)

    def close(self) -> None:
        """Ends browsers and servers."""
        if self.farm:
            self.farm.close()
        for stage in self.free:
            if stage.served:
                stage.served.close()


class LiveWebArena(WebArena):
    """A user's WebArena: the instance that WA_SHOPPING ... name, or those of the file $WA_INSTANCES, one episode at a time on each. Where WA_FULL_RESET is set,
    the sites are reset (minutes) before the first episode. `data_dir` is a task file, or a folder with both official ones: then held-out tasks are Lite's, and
    training tasks the others. First states are not known before an episode starts, so tasks have none until then: the dream needs `data` of these sites."""

    max_steps, label, wait_s = LIVE_STEPS, "WebArena (the user's sites)", WAIT_S

    def __init__(self, data_dir: str):
        self._tasks = _official_tasks(Path(data_dir))
        sites = {site for tasks in self._tasks.values() for task in tasks for site in task.goal["config"]["sites"]}
        several = os.environ.get("WA_INSTANCES", "")
        instances = live.read_instances(several, sites) if several else [found] if (found := live.read_instance(os.environ, sites)) else []
        if not instances:
            raise ValueError(f"{data_dir}: official tasks need a WebArena that runs; expected its addresses in WA_SHOPPING, WA_REDDIT, ... (README, \"WebArena\")")
        accounts = live.read_accounts(os.environ)
        for instance in instances:
            live.check_answers(instance.bases)
        self.backend, self.judge, self.seed, self.data_dir = "chromium", None, None, data_dir
        self.slots, self.started, self.reset = len(instances), 0, False
        self.farm = self._browsers(hosts=set().union(*(Addresses(instance.bases).hosts for instance in instances)), settle_s=SETTLE_S)
        self.free = [(instance, live.Logins(instance.bases, accounts, LOGINS)) for instance in instances]

    def describe(self) -> dict:
        return {"env": "webarena", "sites": self.label, "tasks": Path(self.data_dir).name, "backend": self.backend}

    def start(self, tasks: list[Task]) -> list[Session]:
        if not self.reset:
            for instance, logins in self.free:
                if instance.reset_url:
                    with tqdm(desc=f"resetting {instance.reset_url}", unit="s") as bar:
                        live.full_reset(instance.reset_url, progress=lambda seconds, said: bar.update(round(seconds) - bar.n))
                    logins.forget()
            self.reset = True
        return super().start(tasks)

    def _stage(self, task: WebTask) -> Stage:
        from dreamgym.envs.webarena.chromium import Browser
        instance, logins = self.free.pop()
        addresses, shop = Addresses(instance.bases), instance.bases.get("shopping")
        with Browser(hosts=addresses.hosts) as browser:
            state = logins.state(browser.chromium, task.sites)
        helpers = shop_helpers(live.Magento(shop, logins.accounts["shopping_admin"])) if shop else {}
        return Stage(instance.bases, PAGE_HELPERS | helpers, self.farm.browsers([addresses], [{"storage_state": state}])[0], sites=(instance, logins))

    def _leave(self, stage: Stage) -> None:
        stage.browser.close()
        self.free.append(stage.sites)

    def close(self) -> None:
        self.farm.close()


def _official_tasks(path: Path) -> dict[str, list[Task]]:
    """{"train": ..., "test": ...} from a folder with both official files, or {"test": ...} from one file. Raises ValueError."""
    def made(file: Path, split: str, without: set[int] = frozenset()) -> list[Task]:
        kept = [record for record in read_records(file) if record["task_id"] not in without]
        return [Task(f"webarena-{split}-{record['task_id']:04d}", record["intent"], "webarena", "",
                     {"config": record, "split": split, "type": "+".join(record["eval"]["eval_types"])}) for record in kept]
    if path.is_file():
        return {"test": made(path, "test")}
    if missing := [name for name in (FULL, LITE) if not (path / name).is_file()]:
        raise ValueError(f"{path}: found no {' and no '.join(missing)}; expected a task file in WebArena's format, or a folder with {FULL} and {LITE}")
    lite = made(path / LITE, "test")
    return {"train": made(path / FULL, "train", {task.goal["config"]["old_task_id"] for task in lite}), "test": lite}


def read(text: str) -> tuple[Action | None, str]:
    """(action, "") or (None, why it is none)."""
    try:
        return parse(text), ""
    except ValueError as error:
        return None, str(error)
