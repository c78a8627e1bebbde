"""WebShop as an environment on top of the exact engine. Reward is 1 where upstream's score R is 1; R is the
raw score."""
from functools import cached_property
from pathlib import Path

from dreamgym.envs.base import Environment, Player, Session, StepResult, real_goal
from dreamgym.envs.webshop import scripted, text
from dreamgym.envs.webshop.audit import WebShopAudit
from dreamgym.envs.webshop.catalogue import Catalogue
from dreamgym.envs.webshop.engine import WebShopEngine
from dreamgym.envs.webshop.prompts import PROMPTS
from dreamgym.envs.webshop.reward import noun_tagger
from dreamgym.envs.webshop.toy_catalogue import embedded_nouns, make_catalogue
from dreamgym.episode import Task

# Goal numbers; upstream calls "valid" eval.
OFFICIAL_SPLITS = {"test": slice(0, 500), "valid": slice(500, 1500), "train": slice(1500, None)}
TEST_EVERY = 4                                   # generated catalogue: one target product in four is a test's
VALID_EVERY = 6                                  # and of the others one in six is for validation


class WebShop(Environment):
    """The official catalogue in `data_dir`; otherwise one is generated into `cache`. `human_goals` (official
    data): instructions by people instead of synthetic ones."""
    name = "webshop"
    prompts = PROMPTS
    audit = WebShopAudit()

    def __init__(self, data_dir: str = "", seed: int = 7, human_goals: bool = False, cache: str = "out/shop"):
        self.generated = not data_dir
        self.label = "generated catalogue" if self.generated else "official data"
        folder = Path(data_dir or Path(cache) / f"catalogue-{seed}")
        if self.generated and not (folder / "items_human_ins.json").exists():
            make_catalogue(folder, seed)
        nouns, self.noun_tagger = ((embedded_nouns, "catalogue's own nouns") if self.generated
                                   else noun_tagger())
        self.catalogue = Catalogue(folder, human_goals, seed, nouns)
        self.seed, self.human_goals = seed, human_goals
        self.results_shown = 5 if self.generated else 10            # of a page's ten results

    def describe(self) -> dict:
        return {"env": self.name, "form": text.FORM, "catalogue": self.label, "seed": self.seed,
                "goals": "human" if self.human_goals else "synthetic",
                "products": len(self.catalogue.products), "noun_tagger": self.noun_tagger,
                "results_shown": self.results_shown}

    def tasks(self, split: str) -> list[Task]:
        """Official data is split by goal number, as upstream; a generated catalogue by target product."""
        if split not in OFFICIAL_SPLITS:
            raise ValueError(f"split {split!r}: expected {', '.join(OFFICIAL_SPLITS)}")
        goals = self.catalogue.goals
        numbers = self._splits[split] if self.generated else range(len(goals))[OFFICIAL_SPLITS[split]]
        return [Task(id=f"webshop-{number}", text=text.clean(goals[number].instruction), env=self.name,
                     start=text.START, goal={"goal_index": number},
                     groups=[f"category {goals[number].product.category}"]) for number in numbers]

    @cached_property
    def _splits(self) -> dict[str, list[int]]:
        """Split -> goal numbers of the generated catalogue. An instruction stays where it is seen first."""
        targets = sorted({goal.product.asin for goal in self.catalogue.goals})
        test = set(targets[::TEST_EVERY])
        valid = set([asin for asin in targets if asin not in test][::VALID_EVERY])
        splits, known = {}, set()
        for split, asins in {"train": set(targets) - test - valid, "valid": valid, "test": test}.items():
            found = {i: goal.instruction for i, goal in enumerate(self.catalogue.goals)
                     if goal.product.asin in asins and goal.instruction not in known}
            splits[split] = list(found)
            known |= set(found.values())
        return splits

    def reset(self, tasks: list[Task]) -> list[Session]:
        sessions = []
        for task in tasks:
            engine = WebShopEngine(self.catalogue)
            engine.reset(self.catalogue.goals[real_goal(task, "goal_index")])
            sessions.append(Session(task, text.START, inner=engine))
        return sessions

    def step(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        results = []
        for session, action in zip(sessions, actions, strict=True):
            engine = session.inner
            score, done = engine.act(official_action(engine, session.state, action))
            if engine.valid:
                session.state = text.abstract(engine, self.results_shown)
            results.append(StepResult(session.state, float(score == 1.0), done, raw_score=float(score)))
        return results

    ground = staticmethod(text.ground)

    def players(self) -> dict[str, Player]:
        return scripted.PLAYERS


def official_action(engine: WebShopEngine, state: str, action: str) -> str:
    """`click[2]` on a results page -> upstream's click on that product; a value as the state shows it ->
    upstream's own text of it; anything else as it is."""
    (verb, argument), kind = text.split_action(action), text.page_kind(state)
    # '01', '\u00b2' and the like are not among the numbers of a results page.
    if verb == "click" and kind == "results" and argument in text.read_results(state):
        return f"click[{engine.page_asins[int(argument) - 1]}]"
    if verb == "click" and kind == "item" and argument not in (targets := engine.clickables):
        return next((f"click[{target}]" for target in targets if text.clean(target) == argument), action)
    return action
