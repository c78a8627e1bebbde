"""Scripted policies of ALFWorld. The oracle reads the engine's hidden facts and the random player its
admissible commands: they need an environment that plays in this process. The others read states only."""
from collections.abc import Callable

import numpy as np

from dreamgym.envs.alfworld.text import (
    LAMPS, TOOL, View, Wanted, by_name, kind_of, name_of, read_task, read_view, tags_of,
)
from dreamgym.envs.base import Act, Player, Session

SLIP = 0.20                                      # the imperfect player's chance of a mistake per step

# Where things of a kind are, the most finds per step first (a closed place costs two): counted in 200
# official train games
_HOMES = {
    "apple bread egg lettuce potato tomato":
        "diningtable countertop sidetable fridge garbagecan sinkbasin microwave coffeetable",
    "butterknife dishsponge fork knife ladle peppershaker saltshaker spatula spoon":
        "diningtable countertop sidetable sinkbasin bathtubbasin toilet cart shelf coffeetable drawer "
        "cabinet",
    "bowl cup glassbottle mug plate winebottle":
        "desk diningtable dresser sidetable countertop coffeetable sinkbasin coffeemachine shelf fridge "
        "microwave garbagecan cabinet",
    "kettle pan pot":
        "stoveburner countertop diningtable fridge sinkbasin sidetable coffeetable shelf cabinet",
    "candle cloth handtowel papertowelroll soapbar soapbottle spraybottle tissuebox toiletpaper towel":
        "countertop toilet sidetable bathtubbasin dresser diningtable coffeetable cart shelf sinkbasin "
        "garbagecan handtowelholder towelholder toiletpaperhanger cabinet drawer",
    "alarmclock book box cd pen pencil statue vase wateringcan":
        "desk diningtable dresser coffeetable sidetable countertop tvstand bed sofa shelf garbagecan "
        "drawer cabinet safe",
    "cellphone creditcard keychain laptop newspaper remotecontrol watch":
        "diningtable desk dresser coffeetable sofa bed tvstand countertop sidetable armchair ottoman "
        "shelf safe drawer",
    "baseballbat basketball pillow tennisracket":
        "bed sofa armchair ottoman diningtable desk dresser coffeetable sidetable countertop",
    "desklamp floorlamp":
        "desk sidetable dresser coffeetable shelf",
}
_PLACES = {thing: places.split() for things, places in _HOMES.items() for thing in things.split()}
# looked into last when nothing is known of a thing
_OPENABLE = ("safe", "fridge", "microwave", "cabinet", "drawer")
# How often the random player draws each command before the number of its objects counts: 'go to' and
# 'examine' would drown the rest
_WEIGHTS = {
    "go": 6, "open": 4, "close": 1, "take": 5, "move": 3, "clean": 4, "heat": 4, "cool": 4, "use": 4,
    "slice": 3, "examine": 0.7, "look": 0.3, "inventory": 0.3,
}


def engine_of(session: Session):
    if not hasattr(session.inner, "engine"):
        raise ValueError("this player reads the engine: it needs a session of ALFWorld with workers=1")
    return session.inner.engine


# ---- why an agent acts so: from task and state alone ----

def think(wanted: Wanted, view: View) -> str:
    """What a player looks at before it acts: whether the thing that it holds, or one of those it sees, is the
    wanted one; whether that is as wanted; whether this is the place for it."""
    here = kind_of(view.place) if view.place else "room"
    if not view.holding:
        seek = f"look for {wanted.thing}"
        if view.opened is False or not view.place:
            return seek + " : closed" * bool(view.place)
        if wanted.kind == "two" and here == wanted.place:              # what lies there stays there
            return f"{seek} : at {here} : {wanted.place} yes"
        return _seek(wanted.thing, view)
    kind, goal = kind_of(view.holding), wanted.place
    facts = [f"hold {view.held} {kind} : {wanted.thing} {_yes(kind == wanted.thing)}"]
    if kind == wanted.thing and wanted.kind == "look":
        facts.append(_seek(goal, view))
    elif kind == wanted.thing:
        tags = tags_of(view.holding)
        if wanted.kind in TOOL:
            facts.append(f"{wanted.kind} : {' '.join(tags) or 'plain'} {_yes(wanted.kind in tags)}")
            goal = goal if wanted.kind in tags else TOOL[wanted.kind][1]
        facts.append(f"at {here} : {goal} {_yes(here == goal)}")
        facts += ["closed"] * (here == goal and view.opened is False)
    return " ; ".join(facts)


def _seek(kind: str, view: View) -> str:
    """Whether a thing of a kind is in sight. Each thing up to the first stands beside that kind."""
    found = view.kinds
    looked = found[:found.index(kind) + 1] if kind in found else found
    compared = " no ".join(f"{name} {other} : {kind}" for name, other in zip(view.names, looked))
    return f"look for {kind} : {compared or 'none'} {_yes(kind in found)}"


def _yes(met: bool) -> str:
    return "yes" if met else "no"


# ---- players ----

class Searcher:
    """Looks for the wanted thing where such things usually are, does to it what the task says, and puts it
    down; a second thing goes to the receptacle of the first. It survives mistakes and refusals."""

    def __init__(self, session: Session, rng: np.random.Generator):
        self.session, self.wanted, self.rng = session, read_task(session.task.text), rng
        if self.wanted is None:
            raise ValueError(
                f"task {session.task.text[:80]!r}: cannot be read; expected one of ALFWorld's sentences, "
                "such as 'put a clean mug in desk' or 'find two pen and put them in drawer'")
        self.room: list[str] = []
        self.contents: dict[str, list[str]] = {}     # by place, as last seen
        self.origin: dict[str, str] = {}             # where other things than the wanted ones came from
        self.last = ""                               # the last state
        self.refused: set[str] = set()               # since the state last changed

    def __call__(self, state: str) -> Act:
        view = read_view(state)
        if state != self.last:
            self.refused.clear()
        self.notice(view)
        action = self.choose(view)
        if action in self.refused:
            action = self.wander(view)
        self.last = state
        self.refused.add(action)
        return Act(action, think(self.wanted, view))

    def notice(self, view: View) -> None:
        self.room = view.room or self.room
        if view.place and view.opened is not False:
            self.contents[view.place] = view.things

    def choose(self, view: View) -> str:
        if not view.holding:
            return self.fetch(view)
        if kind_of(view.holding) != self.wanted.thing:
            return self.put(view, self.origin.get(view.held) or view.place or self.target())
        return self.use_lamp(view) if self.wanted.kind == "look" else self.deliver(view)

    def fetch(self, view: View) -> str:
        """Takes a wanted thing that is known of, else looks further."""
        goal = self.target() if self.wanted.kind == "two" else ""
        for place in self.known(self.wanted.thing, view):
            if place != goal:
                return self.at(view, place, f"take {self.things(place, self.wanted.thing)[0]} from {place}")
        return self.explore(view, self.wanted.thing)

    def explore(self, view: View, thing: str) -> str:
        if view.opened is False and view.place not in self.contents:
            return f"open {view.place}"
        ways = [f"go to {place}" for place in self.order(thing) if place not in self.contents]
        return next((way for way in ways if way not in self.refused), None) or self.wander(view)

    def order(self, thing: str) -> list[str]:
        """The places of the room, the likeliest for `thing` first, those where it is to be put last."""
        likely = _PLACES.get(thing, [])
        own = self.wanted.place if self.wanted.kind in ("pick", "two") else ""

        def rank(place: str) -> tuple:
            kind = kind_of(place)
            usual = likely.index(kind) if kind in likely else len(likely)
            return kind == own, usual, kind in _OPENABLE

        return sorted(by_name(self.room), key=rank)

    def deliver(self, view: View) -> str:
        """Treats the held thing when the task asks for it, then puts it down where the task says."""
        if self.wanted.kind not in TOOL or self.wanted.kind in tags_of(view.holding):
            return self.put(view, self.target())
        verb, tool = TOOL[self.wanted.kind]
        if kind_of(view.place) == tool:
            return f"{verb} {view.held} with {view.place}"
        elsewhere = self.wander(view)
        return next((f"go to {place}" for place in by_name(self.room) if kind_of(place) == tool), elsewhere)

    def target(self) -> str:
        """The task's receptacle that has most of the wanted things, then the lowest number; '' for none."""
        places = [place for place in by_name(self.room) if kind_of(place) == self.wanted.place]
        return max(places, key=lambda place: len(self.things(place, self.wanted.thing)), default="")

    def use_lamp(self, view: View) -> str:
        lamp = self.wanted.place
        here = next((name for name in view.names if kind_of(name) == lamp), "")
        known = self.known(lamp, view)
        return self.at(view, known[0], f"use {here}") if known else self.explore(view, lamp)

    def put(self, view: View, place: str) -> str:
        return self.at(view, place, f"move {view.held} to {place}")

    def at(self, view: View, place: str, action: str) -> str:
        """The action where one stands at an open place, else the next step to that."""
        if place != view.place:
            return f"go to {place}" if place else self.wander(view)
        return f"open {place}" if view.opened is False else action

    def things(self, place: str, kind: str) -> list[str]:
        return [name_of(thing) for thing in self.contents.get(place, []) if kind_of(thing) == kind]

    def known(self, kind: str, view: View) -> list[str]:
        """Places where things of a kind were seen, the current one first."""
        places = [place for place in self.contents if self.things(place, kind)]
        return sorted(places, key=lambda place: place != view.place)

    def wander(self, view: View) -> str:
        ways = [f"go to {place}" for place in self.room if place != view.place]
        ways = [way for way in ways if way not in self.refused]
        return str(self.rng.choice(ways)) if ways else "look"


class Oracle(Searcher):
    """The same errands with the engine's facts in place of a memory."""

    def __init__(self, session: Session, rng: np.random.Generator):
        super().__init__(session, rng)
        engine_of(session)

    def notice(self, view: View) -> None:
        facts = sorted(engine_of(self.session).facts)
        named = lambda predicate: [fact[1] for fact in facts if fact[0] == predicate]
        self.room = named("receptacleatlocation")
        self.contents = {place: [] for place in by_name(self.room)}
        for fact in facts:
            if fact[0] == "inreceptacle" and fact[2] in self.contents:
                self.contents[fact[2]].append(fact[1])


class Imperfect(Searcher):
    """The searcher with mistakes: a clean imitation would leave GRPO no variance."""

    def __init__(self, session: Session, rng: np.random.Generator):
        super().__init__(session, rng)
        self.forgets = rng.random() < SLIP           # to clean, heat or cool; until it has put the thing down
        self.passed_by: dict[str, bool] = {}         # looked into when nothing else is left

    def order(self, thing: str) -> list[str]:
        for place in self.room:
            self.passed_by.setdefault(place, self.rng.random() < SLIP)
        return sorted(super().order(thing), key=self.passed_by.__getitem__)

    def choose(self, view: View) -> str:
        if not view.holding and view.place and kind_of(view.place) == self.wanted.place:
            self.forgets = False
        slips = self.slips(view) if self.rng.random() < SLIP else []
        if slips and self.contents and self.rng.random() < SLIP:
            del self.contents[str(self.rng.choice(list(self.contents)))]         # forgotten
        return str(self.rng.choice(slips)) if slips else super().choose(view)

    def deliver(self, view: View) -> str:
        return self.put(view, self.target()) if self.forgets else super().deliver(view)

    def slips(self, view: View) -> list[str]:
        slips = [self.wander(view)] * 4
        if view.place:
            slips.append(str(self.rng.choice([f"examine {view.place}", "inventory"])))
        if view.opened is True:
            slips += [f"close {view.place}"] * 2
        if kind_of(view.place) in _PLACES.get(kind_of(view.holding), ()) and view.opened is not False:
            slips.append(f"move {view.held} to {view.place}")
        if not view.holding:
            spared = (self.wanted.thing, *LAMPS)
            others = [name for name in view.names if kind_of(name) in _PLACES and kind_of(name) not in spared]
            self.origin |= dict.fromkeys(others, view.place)
            slips += [f"take {thing} from {view.place}" for thing in others[:3]]
        return slips


def explorer(session: Session, rng: np.random.Generator) -> Callable[[str], str]:
    """Random admissible commands."""
    engine = engine_of(session)

    def act(state: str) -> str:
        groups: dict[str, list[str]] = {}
        for command in engine.admissible:
            groups.setdefault(command.split()[0], []).append(command)
        weights = np.array([_WEIGHTS[verb] for verb in groups])
        return str(rng.choice(groups[str(rng.choice(list(groups), p=weights / weights.sum()))]))
    return act


PLAYERS = {
    "oracle": Player(Oracle, 0.11), "searcher": Player(Searcher, 0.11),
    "imperfect": Player(Imperfect, 0.70, imitate=True), "random": Player(explorer, 0.08),
}
