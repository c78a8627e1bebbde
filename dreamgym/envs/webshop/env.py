"""WebShop as an environment: tasks, sessions and abstract text states, on top of the exact engine.

With `$WEBSHOP_DATA` (or `data_dir`) set, the official catalogue is read; otherwise one is generated into
`cache`. `describe()` says which, and with which noun tagger: both belong into every result. An episode has 15
steps. Reward is 1 where upstream's score R is 1; R is the raw score.
"""
from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import numpy as np

from dreamgym.envs.base import Environment, Player, Session, StepResult
from dreamgym.envs.webshop import relabel, scripted, text
from dreamgym.envs.webshop.audit import WebShopAudit
from dreamgym.envs.webshop.engine import WebShopEngine
from dreamgym.envs.webshop.prompts import PROMPTS
from dreamgym.envs.webshop.toy_catalogue import embedded_nouns, make_catalogue
from dreamgym.episode import Episode, Step, StopReason, Task

# Goal numbers; upstream calls "valid" eval.
OFFICIAL_SPLITS = {"test": slice(0, 500), "valid": slice(500, 1500), "train": slice(1500, None)}
TEST_EVERY = 4                                   # generated catalogue: one target product in four is a test's
VALID_EVERY = 6                                  # and of the others one in six is for validation


class WebShop(Environment):
    """WebShop, real. `human_goals` (official data): instructions by people instead of synthetic ones."""
    name = "webshop"
    max_steps = 15
    prompts = PROMPTS
    audit = WebShopAudit()

    def __init__(self, data_dir: str = "", seed: int = 7, human_goals: bool = False, cache: str = "out/shop"):
        data_dir = data_dir or os.environ.get("WEBSHOP_DATA", "")
        self.generated = not data_dir
        self.label = "generated catalogue" if self.generated else "official data"
        folder = Path(data_dir or Path(cache) / f"catalogue-{seed}")
        if self.generated and not (folder / "items_human_ins.json").exists():
            make_catalogue(folder, seed)
        nouns = embedded_nouns if self.generated else None
        self.engine = WebShopEngine(folder, "text_rich", human_goals, seed, nouns=nouns)
        self.seed, self.human_goals = seed, human_goals
        self.results_shown = 5 if self.generated else 10            # of a page's ten results
        self.started = 0

    def describe(self) -> dict:
        nouns = "catalogue's own nouns" if self.generated else self.engine.noun_tagger
        return {"env": self.name, "form": text.FORM, "catalogue": self.label, "seed": self.seed,
                "goals": "human" if self.human_goals else "synthetic", "products": len(self.engine.products),
                "noun_tagger": nouns, "results_shown": self.results_shown}

    # ---- tasks

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split. Official data is split by goal number, as upstream splits it. The generated
        catalogue is split by target product: no product and no instruction is in two splits."""
        if split not in OFFICIAL_SPLITS:
            raise ValueError(f"split {split!r}: expected {', '.join(OFFICIAL_SPLITS)}")
        if self.generated:
            return [self._task(number) for number in self._generated_splits[split]]
        return [self._task(number) for number in range(len(self.engine.goals))[OFFICIAL_SPLITS[split]]]

    def _task(self, number: int) -> Task:
        goal = self.engine.goals[number]
        return Task(id=f"webshop-{number}", text=text.clean(goal.instruction), env=self.name,
                    start=text.START, goal={"goal_index": number}, groups=[f"category {goal.category}"])

    @cached_property
    def _generated_splits(self) -> dict[str, list[int]]:
        """Split -> goal numbers. Two products may have the same instruction: it stays where it is seen
        first."""
        targets = sorted({goal.asin for goal in self.engine.goals})
        test = set(targets[::TEST_EVERY])
        others = [asin for asin in targets if asin not in test]
        valid = set(others[::VALID_EVERY])
        groups = {"train": set(others) - valid, "valid": valid, "test": test}
        splits, known = {}, set()
        for split, asins in groups.items():
            splits[split] = [i for i, goal in enumerate(self.engine.goals)
                             if goal.asin in asins and goal.instruction not in known]
            known |= {self.engine.goals[i].instruction for i in splits[split]}
        return splits

    # ---- playing

    def reset(self, tasks: list[Task]) -> list[Session]:
        """Raises ValueError for a generated task: only the dream can play those."""
        sessions = []
        for task in tasks:
            if "goal_index" not in task.goal:
                raise ValueError(f"task {task.id}: has no goal_index; only a dream plays a generated task")
            engine = self.engine.fork()
            state = text.abstract(engine.reset(task.goal["goal_index"]), self.results_shown)
            self.started += 1
            sessions.append(Session(f"real-{self.started}", task, state, inner=engine))
        return sessions

    def step(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        return [self._step(session, action) for session, action in zip(sessions, actions, strict=True)]

    def _step(self, session: Session, action: str) -> StepResult:
        engine = session.inner
        page, score, done = engine.step(self._official(engine, session.state, action))
        if engine.valid:
            session.state = text.abstract(page, self.results_shown)
        session.steps += 1
        if not done:
            return StepResult(session.state)
        stop = StopReason.SUCCESS if score == 1.0 else StopReason.FAILURE
        return StepResult(session.state, float(score == 1.0), True, stop, raw_score=float(score))

    def end(self, sessions: list[Session]) -> None:
        for session in sessions:
            session.inner = None

    def _official(self, engine: WebShopEngine, state: str, action: str) -> str:
        """`click[2]` on a results page -> upstream's click on that product; a value as the state shows it ->
        upstream's own text of it, which may hold no-break or double blanks; anything else as it is."""
        verb, argument = text.split_action(action)
        kind = text.page_kind(state)
        # '01', '\u00b2' and the like are not among the numbers of a results page.
        if verb == "click" and kind == "results" and argument in text.read_results(state):
            return f"click[{engine.page_asins[int(argument) - 1]}]"
        if verb == "click" and kind == "item" and argument not in (targets := engine.clickables):
            return next((f"click[{target}]" for target in targets if text.clean(target) == argument), action)
        return action

    # ---- optional parts of the contract

    def ground(self, state: str, action: str) -> str:
        return text.ground(state, action)

    def players(self) -> dict[str, Player]:
        products = self.engine.products[:2000]
        values = {value for product in products for values in product.options.values() for value in values}
        return scripted.players(sorted(values) or ["red"])

    def explain(self, task: Task, history: list[Step], step: Step) -> tuple[str, str]:
        return relabel.explain(task.text, step)

    def counterfactuals(self, episodes: list[Episode], count: int, rng: np.random.Generator) -> list[Episode]:
        return relabel.counterfactuals(self.engine, episodes, count, rng)
