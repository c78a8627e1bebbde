"""ALFWorld as text: the engine's feedback becomes short states; states, actions and tasks are read back.
Each object stands on its own line, so that a line-wise difference of two states is short:

    room:                 at drawer 1 closed      at drawer 1 open:           at desk 1:
    bed 1                 holding: nothing        book 1                      hot mug 1
    desk 1                                        pen 2                       lit desklamp 1
    holding: nothing                              holding: clean cloth 1      holding: nothing

An empty list is the line `nothing`. With the option `admissible`, a line `commands:` and one command a line
follow.
"""
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dreamgym.prompts import clean

STATE_VERSION = 2                                     # raise it with every change of the state's form
NOTHING = "nothing"
TAGS = ("clean", "hot", "cool", "sliced", "lit")      # what was done to an object, in the order of writing
LAMPS = ("desklamp", "floorlamp")                     # all that can be switched on
TOOL = {"clean": ("clean", "sinkbasin"), "hot": ("heat", "microwave"), "cool": ("cool", "fridge")}
MAX_TASK_CHARS = 200

_NAME = r"[a-z]+ [0-9]{1,4}"
_TAGGED = rf"(?:(?:{'|'.join(TAGS)}) )*{_NAME}"
_PAGE = re.compile(
    rf"(?:room:(?P<room>\nnothing|(?:\n{_NAME})+)"
    rf"|at (?P<place>{_NAME})(?:(?P<closed> closed)|(?P<open> open)?:(?P<things>\nnothing|(?:\n{_TAGGED})+)))"
    rf"\nholding: (?P<held>nothing|{_TAGGED})(?:\ncommands:(?:\n.*)?)?", re.DOTALL)
_T, _P = rf"(?P<thing>{_NAME})", rf"(?P<place>{_NAME})"
_ACTIONS = [re.compile(rf"(?P<verb>{pattern}") for pattern in (
    rf"go) to {_P}", rf"open|close|examine) {_P}", rf"take) {_T} from {_P}", rf"move) {_T} to {_P}",
    rf"clean|heat|cool|slice) {_T} with {_P}", rf"use) {_T}", "look|inventory)")]

# The engine's sentences (alfred.twl2 of alfworld 0.4.2); what looking and examining say is not among them
_SAID = re.compile(
    r"You (?P<verb>arrive at|open|close|pick up|move|clean|heat|cool|turn on|sliced) "
    rf"(?:the )?(?P<thing>{_NAME})(?: (?:from|to|using|with) the (?P<place>{_NAME}))?\.(?: (?P<rest>.*))?")
_SEEN = re.compile(rf"(?:On the|The) (?P<place>{_NAME})(?P<open> is open\. In it)?, you see (?P<things>.*)\.")
_CLOSED = re.compile(rf"The (?P<place>{_NAME}) is closed\.")
_LISTED = re.compile(rf"\ban? ({_NAME})\b")
_TAG_OF = {"turn on": "lit", "sliced": "sliced"} | {verb: tag for tag, (verb, _) in TOOL.items()}


def shown_names(ids: Iterable[str]) -> dict[str, str]:
    """PDDL id -> the name that the player sees ('desk 2'): sorted ids are numbered downwards, as in
    alfworld."""
    names, numbers = {}, Counter()
    for key in sorted(set(ids), reverse=True):
        kind, located, _ = key.partition("_bar_")
        kind += "basin" if located and "basin" in key else ""
        numbers[kind] += 1
        names[key] = f"{kind} {numbers[kind]}" if located else kind
    return names


def by_name(names: Iterable[str]) -> list[str]:
    """'desk 2' before 'desk 10'."""
    return sorted(names, key=lambda name: (name.split()[0], int(name.split()[1])))


@dataclass
class ObservationMemory:
    """What the agent has observed in one episode. Objects keep the order in which they were first seen."""
    room: list[str] = field(default_factory=list)
    place: str = ""
    holding: str = ""
    contents: dict[str, list[str]] = field(default_factory=dict)
    opened: dict[str, bool] = field(default_factory=dict)         # only receptacles that can be opened
    tags: dict[str, set[str]] = field(default_factory=dict)

    def read(self, feedback: str) -> None:
        """Takes in one feedback of the engine."""
        text = clean(feedback)
        if text.startswith("You are in the middle of a room.") and not self.room:
            self.room = by_name(_LISTED.findall(text.split("you see", 1)[-1]))
        if not (match := _SAID.fullmatch(text)):
            return
        verb, thing, place, rest = match.groups()
        if verb in ("arrive at", "open"):
            self.place = thing
            self._see(rest or "")
        elif verb == "close":
            self.opened[thing] = False
        elif verb == "pick up":
            self.holding = thing
            # a thing may lie in two places at once in official games: the other one keeps it
            if thing in (things := self.contents.get(place, [])):
                things.remove(thing)
        elif verb == "move":
            self.holding = ""
            if thing not in (things := self.contents.setdefault(place, [])):
                things.append(thing)
        else:
            tags = self.tags.setdefault(thing, set())
            tags -= {"heat": {"cool"}, "cool": {"hot"}}.get(verb, set())
            tags.add(_TAG_OF[verb])

    def _see(self, text: str) -> None:
        if match := _CLOSED.fullmatch(text):
            self.opened[match["place"]] = False
        elif match := _SEEN.fullmatch(text):
            place, listed = match["place"], _LISTED.findall(match["things"])
            if match["open"]:
                self.opened[place] = True
            known = [thing for thing in self.contents.get(place, []) if thing in listed]
            self.contents[place] = known + [thing for thing in listed if thing not in known]

    def state(self, commands: list[str] | None = None) -> str:
        """The abstract state, with the engine's admissible `commands` where they are given."""
        if not self.place:
            lines = ["room:", *(self.room or [NOTHING])]
        elif self.opened.get(self.place) is False:
            lines = [f"at {self.place} closed"]
        else:
            things = [self._tagged(thing) for thing in self.contents.get(self.place, [])]
            lines = [f"at {self.place}{' open' * (self.place in self.opened)}:", *(things or [NOTHING])]
        lines.append(f"holding: {self._tagged(self.holding) if self.holding else NOTHING}")
        return "\n".join(lines + (["commands:", *commands] if commands is not None else []))

    def _tagged(self, name: str) -> str:
        return " ".join([tag for tag in TAGS if tag in self.tags.get(name, ())] + [name])


# ---- reading states and actions ----------------------------------------------------------------------------

@dataclass
class View:
    """The parts of a state."""
    place: str
    opened: bool | None                          # None: the receptacle cannot be closed
    things: list[str]                            # with their tags ('hot mug 1')
    holding: str
    room: list[str]

    @property
    def names(self) -> list[str]:
        return [name_of(thing) for thing in self.things]

    @property
    def kinds(self) -> list[str]:
        return [kind_of(thing) for thing in self.things]

    @property
    def held(self) -> str:
        """The name of what is held, without tags."""
        return name_of(self.holding)


def read_view(state: str) -> View | None:
    """The parts of a state; None when the text is not one."""
    match = _PAGE.fullmatch(state)
    if not match:
        return None
    things, room = ([line for line in (match[name] or "").split("\n")[1:] if line != NOTHING]
                    for name in ("things", "room"))
    opened = False if match["closed"] else True if match["open"] else None
    return View(match["place"] or "", opened, things, "" if match["held"] == NOTHING else match["held"], room)


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
    """The parts of an action; None for what ALFWorld's grammar does not hold. What `examine` names, and the
    knife of `slice`, are in `place`."""
    matches = (pattern.fullmatch(clean(action)) for pattern in _ACTIONS)
    return next((Command(**match.groupdict()) for match in matches if match), None)


# ---- reading tasks -----------------------------------------------------------------------------------------

@dataclass
class Wanted:
    """kind: pick | clean | hot | cool | two | look. `thing` and `place` are types ('mug', 'desk'; the lamp
    for look)."""
    kind: str
    thing: str
    place: str


_KIND, _IN = r"(?P<thing>[a-z]+)", r"(?:in|on) (?P<place>[a-z]+)"
_TASKS = [(kind, re.compile(pattern)) for kind, pattern in (
    ("two", rf"put two {_KIND} {_IN}"),
    ("two", rf"find two {_KIND} and put them {_IN}"),
    *((kind, rf"put an? {kind} {_KIND} {_IN}") for kind in TOOL),
    *((kind, rf"{verb} some {_KIND} and put it {_IN}") for kind, (verb, _) in TOOL.items()),
    ("pick", rf"put (?:an?|some) {_KIND} {_IN}"),
    ("look", rf"(?:look at|examine)(?: an?| the| some)? {_KIND} (?:under|with) the (?P<place>[a-z]+)"))]


def read_task(text: str) -> Wanted | None:
    """What a sentence asks for; None where none of ALFWorld's twelve templates expresses it."""
    sentence = clean(text).lower().rstrip(". ") if len(text) <= MAX_TASK_CHARS else ""
    matches = ((kind, pattern.fullmatch(sentence)) for kind, pattern in _TASKS)
    return next((Wanted(kind, match["thing"], match["place"]) for kind, match in matches if match), None)
