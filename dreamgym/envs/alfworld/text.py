"""ALFWorld as text: the one mapping from the engine's feedback to short states, and the readers of states,
actions and tasks.

`ObservationMemory` keeps what the agent has seen in this episode and writes the state. The experience model
writes the same form, so a policy sees one language in both worlds (DreamGym, section 4: abstract text
states). Nothing here sees the engine. Each object stands on its own line, so that a line-wise difference of
two states is short. The forms:

    room:                 at drawer 1 closed      at drawer 1 open:           at desk 1:
    bed 1                 holding: nothing        book 1                      hot mug 1
    desk 1                                        pen 2                       lit desklamp 1
    holding: nothing                              holding: clean cloth 1      holding: nothing

An empty list is the line `nothing`. With the option `admissible`, a line `commands:` and one command a line
follow.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from dreamgym.prompts import clean

STATE_VERSION = 2                                     # raise it with every change of the state's form
NOTHING = "nothing"
# what has been done to an object, in the order they are written
TAGS = ("clean", "hot", "cool", "sliced", "lit")
LAMPS = ("desklamp", "floorlamp")                     # all that can be switched on
# verb -> where, result
TREATED = {"clean": ("sinkbasin", "clean"), "heat": ("microwave", "hot"), "cool": ("fridge", "cool")}
MADE = tuple(result for _, result in TREATED.values())
TOOL = {result: (verb, tool) for verb, (tool, result) in TREATED.items()}     # wanted result -> verb, where
MAX_TASK_CHARS = 200

_NAME = r"[a-z]+ [0-9]{1,4}"
_THING = re.compile(rf"(?:(?:{'|'.join(TAGS)}) )*{_NAME}")
_PLAIN = re.compile(_NAME)
_HEAD = re.compile(rf"room:|at (?P<place>{_NAME})(?:(?P<closed> closed)|(?P<open> open)?:)")
_ACTIONS = [re.compile(pattern) for pattern in (
    rf"(?P<verb>go) to (?P<place>{_NAME})",
    rf"(?P<verb>open|close) (?P<place>{_NAME})",
    rf"(?P<verb>take) (?P<thing>{_NAME}) from (?P<place>{_NAME})",
    rf"(?P<verb>move) (?P<thing>{_NAME}) to (?P<place>{_NAME})",
    rf"(?P<verb>clean|heat|cool) (?P<thing>{_NAME}) with (?P<place>{_NAME})",
    rf"(?P<verb>slice) (?P<thing>{_NAME}) with (?P<place>{_NAME})",
    rf"(?P<verb>use) (?P<thing>{_NAME})",
    rf"(?P<verb>examine) (?P<place>{_NAME})",
    r"(?P<verb>look|inventory)")]

# The engine's sentences (alfred.twl2 of alfworld 0.4.2)
_ARRIVES = re.compile(rf"You (?:arrive at|open the) (?P<place>{_NAME})\. (?P<rest>.*)", re.DOTALL)
_SEEN = re.compile(
    rf"(?:On the (?P<on>{_NAME}), you see|The (?P<open>{_NAME}) is open\. In it, you see) (?P<things>.*)\.",
    re.DOTALL,
)
_CLOSED = re.compile(rf"The (?P<place>{_NAME}) is closed\.")
_CLOSES = re.compile(rf"You close the (?P<place>{_NAME})\.")
_TAKES = re.compile(rf"You pick up the (?P<thing>{_NAME}) from the (?P<place>{_NAME})\.")
_PUTS = re.compile(rf"You move the (?P<thing>{_NAME}) to the (?P<place>{_NAME})\.")
_CHANGES = re.compile(rf"You (?P<verb>clean|heat|cool) the (?P<thing>{_NAME}) using the {_NAME}\.")
_LIGHTS = re.compile(rf"You turn on the (?P<thing>{_NAME})\.")
_SLICES = re.compile(rf"You sliced the (?P<thing>{_NAME}) with the {_NAME}\.")
_LISTED = re.compile(rf"\ban? (?P<name>{_NAME})\b")


# ---- writing states ----------------------------------------------------------------------------------------

def by_name(names: Iterable[str]) -> list[str]:
    """'desk 2' before 'desk 10'."""
    return sorted(names, key=lambda name: (name.rsplit(" ", 1)[0], int(name.rsplit(" ", 1)[1])))


@dataclass
class ObservationMemory:
    """What the agent has observed in one episode: where it is, what it holds, what it saw where, what it did
    to which object. Objects keep the order in which they were first seen, so that a place reads the same when
    the agent comes back."""
    room: list[str] = field(default_factory=list)
    place: str = ""
    holding: str = ""
    contents: dict[str, list[str]] = field(default_factory=dict)
    opened: dict[str, bool] = field(default_factory=dict)         # only receptacles that can be opened
    tags: dict[str, set[str]] = field(default_factory=dict)

    def read(self, feedback: str) -> None:
        """Takes in one feedback of the engine. 'Nothing happens.', looking and examining change nothing."""
        text = clean(feedback)
        if text.startswith("You are in the middle of a room.") and not self.room:
            self.room = by_name(_LISTED.findall(text.split("you see", 1)[-1]))
        elif match := _ARRIVES.fullmatch(text):
            self.place = match["place"]
            self._see(match["rest"])
        elif match := _CLOSES.fullmatch(text):
            self.opened[match["place"]] = False
        elif match := _TAKES.fullmatch(text):
            self.holding = match["thing"]
            if self.holding in (things := self.contents.get(match["place"], [])):
                # a thing may lie in two places at once in official games: the other one keeps it
                things.remove(self.holding)
        elif match := _PUTS.fullmatch(text):
            self.holding = ""
            if match["thing"] not in (things := self.contents.setdefault(match["place"], [])):
                things.append(match["thing"])
        elif match := _CHANGES.fullmatch(text):
            tags = self.tags.setdefault(match["thing"], set())
            tags -= {"heat": {"cool"}, "cool": {"hot"}}.get(match["verb"], set())
            tags.add(TREATED[match["verb"]][1])
        elif match := _LIGHTS.fullmatch(text):
            self.tags.setdefault(match["thing"], set()).add("lit")
        elif match := _SLICES.fullmatch(text):
            self.tags.setdefault(match["thing"], set()).add("sliced")

    def _see(self, text: str) -> None:
        if match := _CLOSED.fullmatch(text):
            self.opened[match["place"]] = False
        elif match := _SEEN.fullmatch(text):
            place, listed = match["on"] or match["open"], _LISTED.findall(match["things"])
            if match["open"]:
                self.opened[place] = True
            known = [thing for thing in self.contents.get(place, []) if thing in listed]
            self.contents[place] = known + [thing for thing in listed if thing not in known]

    def state(self, commands: list[str] | None = None) -> str:
        """The abstract state, with the engine's admissible `commands` at the end when they are given."""
        if not self.place:
            lines = ["room:", *(self.room or [NOTHING])]
        elif self.opened.get(self.place) is False:
            lines = [f"at {self.place} closed"]
        else:
            things = [self._tagged(thing) for thing in self.contents.get(self.place, [])]
            lines = [
                f"at {self.place}{' open' if self.place in self.opened else ''}:",
                *(things or [NOTHING]),
            ]
        lines.append(f"holding: {self._tagged(self.holding) if self.holding else NOTHING}")
        return "\n".join(lines + (["commands:", *commands] if commands is not None else []))

    def _tagged(self, name: str) -> str:
        return " ".join([tag for tag in TAGS if tag in self.tags.get(name, ())] + [name])


# ---- reading states and actions ----------------------------------------------------------------------------

@dataclass
class View:
    """The parts of a state. `opened`: None where the receptacle cannot be closed. Things carry their tags
    ('hot mug 1')."""
    place: str
    opened: bool | None
    things: list[str]
    holding: str
    room: list[str]


def read_view(state: str) -> View | None:
    """The parts of a state; None when the text is not one."""
    page, _, commands = state.partition("\ncommands:")
    first, *lines = page.split("\n")
    head = _HEAD.fullmatch(first)
    held = lines.pop().partition("holding: ") if lines else ("", "", "")
    if (
        not head
        or held[0]
        or not (held[2] == NOTHING or _THING.fullmatch(held[2]))
        or commands[:1] not in ("", "\n")
    ):
        return None
    # a list stands exactly where the place is not closed
    if bool(lines) == bool(head["closed"]):
        return None
    things = [] if lines == [NOTHING] else lines
    if not all((_THING if head["place"] else _PLAIN).fullmatch(thing) for thing in things):
        return None
    holding = "" if held[2] == NOTHING else held[2]
    if not head["place"]:
        return View("", None, [], holding, things)
    return View(
        head["place"], False if head["closed"] else True if head["open"] else None, things, holding, []
    )


def name_of(thing: str) -> str:
    """'clean hot mug 1' -> 'mug 1'."""
    return " ".join(thing.split()[-2:])


def kind_of(thing: str) -> str:
    """'clean hot mug 1' -> 'mug'."""
    return thing.split()[-2] if thing else ""


def tags_of(thing: str) -> list[str]:
    """'clean hot mug 1' -> ['clean', 'hot']."""
    return thing.split()[:-2]


@dataclass
class Command:
    verb: str
    thing: str = ""
    place: str = ""


def read_action(action: str) -> Command | None:
    """The parts of an action; None for what ALFWorld's grammar does not hold. `examine` may name a thing,
    which is then in `place`."""
    for pattern in _ACTIONS:
        if match := pattern.fullmatch(action):
            parts = match.groupdict()
            return Command(parts["verb"], parts.get("thing") or "", parts.get("place") or "")
    return None


def ground(state: str, action: str) -> str:
    """Actions name their objects already; blanks and control characters are no part of a command."""
    return clean(action)


# ---- reading tasks -----------------------------------------------------------------------------------------

@dataclass
class Wanted:
    """kind: pick | clean | hot | cool | two | look. `thing` and `place` are types ('mug', 'desk'; the lamp
    for look)."""
    kind: str
    thing: str
    place: str


_IN = r"(?:in|on) (?P<place>[a-z]+)"
_TASKS = [re.compile(pattern) for pattern in (
    rf"put two (?P<thing>[a-z]+) {_IN}",
    rf"find two (?P<two>[a-z]+) and put them {_IN}",
    rf"put an? (?P<kind>clean|hot|cool) (?P<thing>[a-z]+) {_IN}",
    rf"(?P<do>clean|heat|cool) some (?P<thing>[a-z]+) and put it {_IN}",
    rf"put (?:an?|some) (?P<thing>[a-z]+) {_IN}",
    r"(?:look at|examine)(?: an?| the| some)? (?P<look>[a-z]+) (?:under|with) the (?P<place>[a-z]+)")]


def read_task(text: str) -> Wanted | None:
    """What a sentence asks for; None where none of ALFWorld's twelve templates expresses it."""
    sentence = clean(text).lower().rstrip(". ") if len(text) <= MAX_TASK_CHARS else ""
    for pattern in _TASKS:
        if match := pattern.fullmatch(sentence):
            parts = {key: value for key, value in match.groupdict().items() if value}
            if sentence.startswith(("put two", "find two")):
                return Wanted("two", parts.get("thing") or parts["two"], parts["place"])
            if "look" in parts:
                return Wanted("look", parts["look"], parts["place"])
            return Wanted(
                parts.get("kind") or TREATED.get(parts.get("do", ""), ("", "pick"))[1], parts["thing"],
                parts["place"],
            )
    return None


# ---- entity randomization ----------------------------------------------------------------------------------

# Kinds of one class can be heated, cooled, cleaned, sliced and lit alike (alfworld's constants), so the
# engine treats them alike.
CLASSES = tuple(line.split() for line in (
    "alarmclock baseballbat basketball book box candle cd cellphone creditcard glassbottle handtowel "
    "keychain laptop newspaper papertowelroll pen pencil peppershaker pillow plunger remotecontrol "
    "saltshaker soapbottle spraybottle statue teddybear tennisracket tissuebox toiletpaper towel vase watch "
    "wateringcan",
    "cloth dishsponge fork kettle ladle soapbar spatula spoon",
    "apple egg potato tomato",
    "bowl pan pot",
    "cup mug plate",
    "bread", "lettuce", "winebottle",
    "butterknife knife",                              # cleanable, too, and what slices
    "desklamp floorlamp"))
KINDS = tuple(sorted(kind for kinds in CLASSES for kind in kinds))
# Places of these kinds change numbers, in blocks of so many: a home has about as many of them, so that its
# numbers stay without gaps
PLACE_BLOCKS = {"cabinet": 4, "drawer": 3, "shelf": 3, "stoveburner": 4}
THING_BLOCK = 3
_KIND_WORD = re.compile(rf"\b(?P<kind>{'|'.join([*KINDS, *PLACE_BLOCKS])})\b(?: (?P<number>\d{{1,4}})\b)?")
_ROOM = re.compile(rf"^room:\n((?:{_NAME}\n)+)", re.MULTILINE)
_COMMANDS = re.compile(r"^commands:\n(.+)\Z", re.MULTILINE | re.DOTALL)


def renamer(rng: np.random.Generator) -> Callable[[str], str]:
    """A consistent change of names in every text of a training row: a kind of object becomes another of its
    class, and numbers change within a kind. What follows from a state does not depend on these names, and a
    small model that sees few homes would learn their contents by heart instead of reading."""
    kinds = {old: str(new) for same in CLASSES for old, new in zip(same, rng.permutation(same))}
    orders = {
        kind: rng.permutation(PLACE_BLOCKS.get(kind, THING_BLOCK)).tolist()
        for kind in [*KINDS, *PLACE_BLOCKS]
    }

    def renamed(match: re.Match) -> str:
        kind, number = match["kind"], match["number"]
        if not number or number == "0":
            return kinds.get(kind, kind) + (f" {number}" if number else "")
        block, place = divmod(int(number) - 1, len(orders[kind]))
        return f"{kinds.get(kind, kind)} {block * len(orders[kind]) + orders[kind][place] + 1}"

    def change(text: str) -> str:
        text = _KIND_WORD.sub(renamed, text)
        text = _ROOM.sub(lambda match: "\n".join(["room:", *by_name(match[1].splitlines()), ""]), text)
        return _COMMANDS.sub(lambda match: "\n".join(["commands:", *sorted(match[1].split("\n"))]), text)
    return change
