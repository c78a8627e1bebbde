"""Scripted policies of the own sites. All but the random one follow the plan of the task's template on the
pages they see. Only the oracle is told the answer, by the task's hidden parameters."""
import re
from collections.abc import Callable

import numpy as np

from dreamgym.envs.base import Act, Player, Session
from dreamgym.envs.webarena.actions import Action, parse
from dreamgym.envs.webarena.evaluators import NOT_ACHIEVABLE
from dreamgym.envs.webarena.page import PASSIVE, TYPED, Node, Page, quotable
from dreamgym.envs.webarena.tasks import TaskConstraints, fact, filled, is_missing, read_task
from dreamgym.envs.webarena.text import ground, read_page

SLIP = 0.10                                      # the imperfect player's chance of a mistake per step
GIVE_UP = 3                                      # so many times the plan is begun again, before `stop [N/A]`
STOP_EARLY = 0.08                                # of the random player's actions
_STEP = re.compile(r"(click|type) (\w+) '(.+?)'(?: \[(.*?)\](?: \[([01])\])?)?")
_WORDS = ("Blue Lamp", "Red Mug", "Wool Scarf", "books", "Hello", "cafe", "3", "12.50", "Good", "anna", "map",
          "train")
_OTHER_WORDS = "Blue Red Green old small Rose Moon Wool tiny chat".split()


class Searcher:
    """Follows the plan step by step. A form that was left is filled in again."""

    def __init__(self, session: Session, rng: np.random.Generator):
        self.wanted, self.rng = read_task(session.task.text), rng
        self.plan = [filled(step, self.wanted.values) for step in self.wanted.template.plan]
        self.at = 0                              # the next step
        self.place = self.start = ""             # address of the next step; "" where the last action leads
        self.begun = 0
        self.back = False                        # the last action was to go back
        self.excused: set[int] = set()           # steps done otherwise than planned, and taken for done
        self.ticked: dict[str, bool] = {}        # what a step made of a checkbox
        self.left_out: set[str] = set()          # windows and list pages on which the wanted element is not

    def __call__(self, state: str) -> Act:
        page = read_page(state)
        self.start = self.start or page.address
        self.place = self.place or page.address
        thought = self.think(state, page)        # before the plan moves on
        return Act(self.choose(state, page), thought)

    def think(self, state: str, page: Page) -> str:
        """The whole plan, then the step that is due and its element, also before a mistake."""
        asked = re.sub(r"\{answer\}|[*']", "", self.wanted.template.answer)
        plan = [*map(brief, self.plan), f"stop {filled(asked, self.wanted.values)}".strip()]
        shown, at = " > ".join(plan), len(self.plan)
        if not is_missing(self.wanted, state):
            if page.address != self.place:
                return f"{shown} ; back"
            lost = self._unfilled(page)
            at = self.at if lost is None else lost
        if at == len(self.plan):
            said = f"stop [{fact(self.wanted, state)}]"
        else:
            match = _STEP.fullmatch(self.plan[at])
            said = f"click [{element(page, match[2], match[3])}]" if match else self.plan[at]
        return f"{shown} ; {plan[at]} : {ground(state, said).removeprefix(said).strip() or 'none'}"

    def choose(self, state: str, page: Page) -> str:
        if is_missing(self.wanted, state):
            return f"stop [{NOT_ACHIEVABLE}]"
        if page.address != self.place:  # back once, else straight to the address
            self.back = not self.back
            return "go_back" if self.back else f"goto [{self.place}]"
        self.back = False
        if (lost := self._unfilled(page)) is not None:
            return self.do(page, self.plan[lost])
        if self.at == len(self.plan):
            answer = self.answer(state)
            return f"stop [{answer}]" if answer else self.look_further(page)
        action = self.do(page, self.plan[self.at])
        if not action:
            return self.look_further(page)
        self.at, self.place, self.left_out = self.at + 1, "", set()
        return action

    def answer(self, state: str) -> str:
        return fact(self.wanted, state)

    def do(self, page: Page, step: str) -> str:
        """A step of the plan on the elements of a page; "" where its element is not."""
        match = _STEP.fullmatch(step)
        if not match:
            return step
        verb, role, name, text, enter = match.groups()
        number = element(page, role, name)
        if not number:
            return ""
        if role == "checkbox":
            self.ticked.setdefault(step, not page.lines[number].checked)
        return f"click [{number}]" if verb == "click" else f"type [{number}] [{text}] [{enter or 1}]"

    def _unfilled(self, page: Page) -> int | None:
        """The first of the last steps that filled in what the page does not hold any more."""
        step, lost = self.at, None
        while step and (held := self._holds(page, self.plan[step - 1])) is not None:
            step -= 1
            lost = lost if held or step in self.excused else step
        return lost

    def _holds(self, page: Page, step: str) -> bool | None:
        """Whether a field holds what a step put there; None for a step that leads on."""
        match = _STEP.fullmatch(step)
        if not match or not (number := element(page, match[2], match[3])):
            return None
        node = page.lines[number]
        if match[1] == "click":
            return node.checked == self.ticked.get(step) if node.role == "checkbox" else None
        return node.value == quotable(match[4]) if match[5] == "0" or match[2] == "combobox" else None

    def look_further(self, page: Page) -> str:
        """The other windows of a long page, then the next page of a list, then all over again."""
        self.left_out.add(f"{page.address} {page.window}")
        for window, way in ((page.window + 1, "down"), (page.window - 1, "up")):
            if 0 <= window < page.windows and f"{page.address} {window}" not in self.left_out:
                return f"scroll [{way}]"
        if following := element(page, "link", "Next"):
            self.place = ""
            return f"click [{following}]"
        self.begun += 1
        if self.begun >= GIVE_UP:
            return f"stop [{NOT_ACHIEVABLE}]"
        self.at, self.place, self.left_out, self.excused = 0, self.start, set(), set()
        return f"goto [{self.start}]"


def brief(step: str) -> str:
    """A step of a plan in few words."""
    match = _STEP.fullmatch(step)
    return " ".join(filter(None, (match[1], match[3], match[4]))) if match else step


def element(page: Page, role: str, name: str) -> int:
    """The number of the first such element, 0 for none; `*` in the name is anything."""
    pattern = re.compile(re.escape(quotable(name)).replace(r"\*", ".*"))
    return next((number for number, node in page.lines.items()
                 if node.role == role and pattern.fullmatch(node.name)), 0)


class Oracle(Searcher):
    def __init__(self, session: Session, rng: np.random.Generator):
        super().__init__(session, rng)
        self.hidden = session.task.goal["parameters"].get("answer", "") if self.wanted.template.answer else ""

    def answer(self, state: str) -> str:
        return self.hidden or super().answer(state)


class Imperfect(Searcher):
    """The searcher with mistakes, most of which it recovers from."""

    def choose(self, state: str, page: Page) -> str:
        if page.address != self.place or self.rng.random() >= SLIP:
            return super().choose(state, page)
        slips = self._slips(state, page)
        return str(slips[self.rng.integers(len(slips))]()) if slips else super().choose(state, page)

    def _slips(self, state: str, page: Page) -> list[Callable[[], str]]:
        links = [number for number, node in page.lines.items() if node.role == "link"]
        slips = [lambda: f"click [{self.rng.choice(links)}]"] if links else []
        wrong_stop = lambda: f"stop [{other_fact(self.wanted, state, self.rng)}]"
        if self.at == len(self.plan):
            return [*slips, wrong_stop] if self.wanted.template.answer else slips
        planned = self.do(page, self.plan[self.at])
        action = parse(planned) or Action("")
        if action.kind == "type":
            slips += [lambda: self._mistype(action, page.lines[action.element])] * 3
        role = page.lines[action.element].role if action.kind == "click" else ""
        if role == "link":
            near = sorted(links, key=lambda number: abs(number - action.element))[1:4]
            slips += [lambda: f"click [{self.rng.choice(near)}]"] * 2 if near else []
        if role == "button":
            slips.append(lambda: self._pass_by(state))
        return [*slips, wrong_stop] if self.rng.random() < 0.3 else slips

    def _mistype(self, action: Action, node: Node) -> str:
        """Another text or option. In half of the cases nobody notices."""
        others = [option for option in node.options if option != action.text]
        others = others or _variants(action.text, self.rng)
        if self.rng.random() < 0.5 and (node.options or not action.enter):
            self.excused.add(self.at)
            self.at += 1
        return f"type [{action.element}] [{self.rng.choice(others)}] [{int(action.enter)}]"

    def _pass_by(self, state: str) -> str:
        self.at = len(self.plan)
        return f"stop [{fact(self.wanted, state) or other_fact(self.wanted, state, self.rng)}]"


def _variants(text: str, rng: np.random.Generator) -> list[str]:
    """Texts like this one: another number, or another word in place of one."""
    if re.fullmatch(r"\d+", text):
        return [str(int(text) + step) for step in (-2, -1, 1, 2, 10) if int(text) + step > 0]
    words = text.split()
    words[rng.integers(len(words))] = str(rng.choice(_OTHER_WORDS))
    return [" ".join(words)]


def other_fact(wanted: TaskConstraints, state: str, rng: np.random.Generator) -> str:
    """A wrong answer: what stands on another line of the page, its last words or all of it."""
    if not wanted.template.answer:
        return "done"
    right = fact(wanted, state)
    nodes = list(read_page(state).lines.values())
    content = next((i for i, node in enumerate(nodes) if node.role == "heading"), 0)
    names = [node.name for node in nodes[content:] if node.role in ("text", "link") and node.name != right]
    if not names:
        return NOT_ACHIEVABLE
    name = names[rng.integers(len(names))]
    said = name.split(" ", 1)[1] if " " in name and name[:1].islower() else name
    return said if said != right else NOT_ACHIEVABLE


def explorer(_: Session, rng: np.random.Generator) -> Callable[[str], str]:
    """Random controls, sometimes history, scrolling, or a stop with some text of the page."""
    def act(state: str) -> str:
        lines = read_page(state).lines
        if rng.random() < STOP_EARLY or not lines:
            texts = [node.name for node in lines.values() if node.role == "text"] or [NOT_ACHIEVABLE]
            return f"stop [{rng.choice(texts)}]"
        if rng.random() < 0.12:
            return str(rng.choice(["go_back", "scroll [down]", "go_forward", "scroll [up]"]))
        controls = [number for number, node in lines.items() if node.role not in PASSIVE]
        number = int(rng.choice(controls or list(lines)))
        node = lines[number]
        if node.options:
            return f"type [{number}] [{rng.choice(node.options)}] [1]"
        if node.role in TYPED:
            return f"type [{number}] [{rng.choice(_WORDS)}] [{rng.integers(2)}]"
        return f"click [{number}]"
    return act


PLAYERS = {
    "null": Player(lambda session, rng: lambda state: "stop []", share=0),  # is evaluated at once
    "oracle": Player(Oracle, 0.06),
    "searcher": Player(Searcher, 0.19),
    "imperfect": Player(Imperfect, 0.56, imitate=True),
    "random": Player(explorer, 0.19),
}
