"""WebShop as an environment of DreamGym: tasks, sessions and the abstract text states, on top of the conformant engine.

With `$WEBSHOP_DATA` (or `data_dir`) set, the official catalogue is read; otherwise the embedded one is generated into `cache`. `describe()` says which,
and with which noun tagger: both belong into every result. 15 steps, reward 1 iff upstream's R is 1; R is kept as the score.
"""
from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

from dreamgym.envs import Session, StepResult, webshop_text
from dreamgym.envs.webshop.engine import WebShopEngine
from dreamgym.envs.webshop.toy_catalogue import embedded_nouns, make_catalogue
from dreamgym.episode import Task

MAX_STEPS = 15
TEST_SHARE = 4                                   # one product in four of the embedded shop is held out


class WebShop:
    """Real WebShop. `results_shown`: how many of a page's ten results the mapping keeps (default 5 for the embedded shop, 10 for official data)."""

    text = webshop_text
    max_steps = MAX_STEPS

    def __init__(self, data_dir: str = "", cache: str | Path = "out/shop", seed: int = 7, human_goals: bool = False, results_shown: int = 0):
        data_dir = data_dir or os.environ.get("WEBSHOP_DATA", "")
        self.embedded = not data_dir
        if self.embedded:
            folder = Path(cache) / f"catalogue-{seed}"
            if not (folder / "items_human_ins.json").exists():
                make_catalogue(folder, seed)
            data_dir = str(folder)
        self.engine = WebShopEngine(data_dir, "text_rich", human_goals, seed, nouns=embedded_nouns if self.embedded else None)
        self.human_goals, self.results_shown = human_goals, results_shown or (5 if self.embedded else 10)
        self.started = 0

    @property
    def label(self) -> str:
        """Which data this is: belongs beside every result."""
        return "generated catalogue" if self.embedded else "official data"

    @cached_property
    def option_values(self) -> list[str]:
        """Values of options that the shop has: what a prober tries where they are not listed."""
        return sorted({value for product in self.engine.products[:2000] for values in product.options.values() for value in values}) or ["red"]

    def describe(self) -> dict:
        return {"env": "webshop", "catalogue": self.label, "goals": "human" if self.human_goals else "synthetic",
                "products": len(self.engine.products), "noun_tagger": "catalogue's own nouns" if self.embedded else self.engine.noun_tagger, "results_shown": self.results_shown}

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split ('train' | 'test', official data also 'eval'). The embedded shop is split by target product, so that no product is the
        target of a train and of a test task, and no instruction is in both; official data by goal index as upstream does (test 0-499, eval 500-1499, train 1500-)."""
        goals = self.engine.goals
        if self.embedded:
            if split not in ("train", "test"):
                raise ValueError(f"split {split!r}: the embedded shop has train and test")
            asins = sorted({goal.asin for goal in goals})
            held_out = set(asins[::TEST_SHARE])
            known = {goal.instruction for goal in goals if goal.asin not in held_out}       # two products may have the same instruction
            chosen = [i for i, goal in enumerate(goals) if (goal.asin not in held_out if split == "train" else goal.asin in held_out and goal.instruction not in known)]
        else:
            chosen = list(self.engine.split(split))
        return [Task(f"webshop-{i}", webshop_text.clean(goals[i].instruction), "webshop", webshop_text.START, {"goal_index": i}) for i in chosen]

    def start(self, tasks: list[Task]) -> list[Session]:
        """Raises ValueError for a generated task: only the dream can play those."""
        sessions = []
        for task in tasks:
            if "goal_index" not in task.goal:
                raise ValueError(f"task {task.id}: has no goal in the real shop (a generated task?); expected goal_index")
            engine = self.engine.fork()
            state, _ = webshop_text.abstract(engine.reset(task.goal["goal_index"]), self.results_shown)
            self.started += 1
            sessions.append(Session(f"real-{self.started}", task, state, inner=engine))
        return sessions

    def act(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        return [self._act(session, action) for session, action in zip(sessions, actions)]

    def _act(self, session: Session, action: str) -> StepResult:
        engine, before = session.inner, session.state
        official = self._official(engine, before, action)
        page, raw, done = engine.step(official)
        session.state, _ = webshop_text.abstract(page, self.results_shown)
        session.steps += 1
        reward = float(done and raw == 1.0)
        stop = ("success" if reward else "failure") if done else ""
        return StepResult(session.state, reward, done, {"valid": engine.valid, "score": float(raw), "stop": stop, "grounded": webshop_text.ground(before, action)})

    def _official(self, engine: WebShopEngine, state: str, action: str) -> str:
        """`click[2]` on a results page -> upstream's click on that product; a value as the state shows it -> upstream's own text of it, which may hold
        no-break or double blanks; everything else goes to the engine as it is."""
        verb, argument = webshop_text.split_action(action)
        kind = webshop_text.page_kind(state)
        if verb == "click" and kind == "results" and argument in webshop_text.read_results(state):     # '01', '\u00b2' and the like are not in it
            return f"click[{engine.page_asins[int(argument) - 1]}]"
        if verb == "click" and kind == "item" and argument not in (targets := engine.clickables):
            return next((f"click[{target}]" for target in targets if webshop_text.clean(target) == argument), action)
        return action
