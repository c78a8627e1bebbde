"""ALFWorld as text: the one mapping from the engine's feedback to short states, and every rule that reads states. Pure functions and `Notes`.

Real feedback goes through `Notes`, which keeps what the agent has noticed in this episode; the experience model writes the same form, so that a policy
sees one language in both worlds (DreamGym, section 4: abstract text states). Nothing here sees the engine, hidden facts, or a model. The forms:

    room: bed 1, desk 1, drawer 1    | at drawer 1 closed    | at drawer 1 open: book 1, pen 2   | at desk 1: hot mug 1, lit desklamp 1
    holding: nothing                 | holding: nothing      | holding: clean cloth 1            | holding: nothing

With `admissible`, a third line lists the commands (`commands: close drawer 1; examine book 1; ...`). Actions are ALFWorld's own strings.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from dreamgym.prompts import accepted, as_done, as_it_is, clean

NOTHING = "nothing"
TAGS = ("clean", "hot", "cool", "sliced", "lit")      # what has been done to an object, in the order they are written
LAMPS = ("desklamp", "floorlamp")                     # all that can be switched on
MAX_TASK_CHARS = 200
# How the experience model is trained: names such as "drawer 3" are one token for a model made from scratch; an answer may name single lines of other pages; half of the
# demonstrations come from other tasks, hence from other homes, as they will for a new task
TOKENS, BY_LINE, EDITS, OTHER_TASKS = "numbered", True, False, 0.5
WITHOUT_DEMO = 0.15                                  # of the training rows show no demonstration: a place that the buffer does not know must be invented whole
LOOKED_THROUGH = 64                                  # transitions retrieved for each demonstration shown: all but those of the same action are left out (`similar`)
# WebArena's: judged steps on made-up pages, optimizer steps that see nothing else; weight of "yes" and "no" in the loss; words that only `renaming` brings in
MINIATURES, MINIATURE_STEPS, VERDICT_WEIGHT, MORE_WORDS = 0, 0, 1.0, ""
EXPERIENCE_STEPS = 1_600, 2_000                      # optimizer steps of the experience model before its probes are looked at, and at most
IMITATED, IMITATION_EPISODES, IMITATION_EPOCHS = ("imperfect",), 600, 20    # players whose episodes are imitated, how many, and passes over them (after 8: spoons for pots)
ACTION_TOK = 24                                  # tokens that a policy may write a turn
ITERATIONS, UPDATES, LOSS_MEAN = 10, 8, "episode"    # RL in the dream; optimizer steps an iteration; episodes weigh the same, for one that fails is several times as long
REFUSED_ROWS = 3                                     # a refused step is so many training rows (with other names): they are few, and the model would allow anything
THINGS = (
    "alarmclock apple baseballbat basketball book bowl box bread candle cd cellphone cloth creditcard cup dishsponge egg fork glassbottle "
    "handtowel kettle keychain ladle laptop lettuce mug newspaper pan papertowelroll pen pencil peppershaker pillow plate plunger pot potato "
    "remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle statue teddybear tennisracket tissuebox toiletpaper tomato towel vase "
    "watch wateringcan winebottle"
).split()

_NAME = r"[a-z]+ [0-9]{1,4}"
_THING = rf"(?:(?:{'|'.join(TAGS)}) )*{_NAME}"
_LIST = rf"(?:{NOTHING}|{_THING}(?:, {_THING})*)"
_PLACE = re.compile(rf"at (?P<place>{_NAME})(?:(?P<closed> closed)|(?P<open> open)?: (?P<things>{_LIST}))")
_ROOM = re.compile(rf"room: (?P<things>{_NAME}(?:, {_NAME})*|{NOTHING})")
_HOLDING = re.compile(rf"holding: (?P<thing>{NOTHING}|{_THING})")
_ACTIONS = [re.compile(pattern) for pattern in (
    rf"(?P<verb>go) to (?P<place>{_NAME})", rf"(?P<verb>open|close) (?P<place>{_NAME})", rf"(?P<verb>take) (?P<thing>{_NAME}) from (?P<place>{_NAME})",
    rf"(?P<verb>move) (?P<thing>{_NAME}) to (?P<place>{_NAME})", rf"(?P<verb>clean|heat|cool) (?P<thing>{_NAME}) with (?P<place>{_NAME})",
    rf"(?P<verb>slice) (?P<thing>{_NAME}) with (?P<place>{_NAME})", rf"(?P<verb>use) (?P<thing>{_NAME})", rf"(?P<verb>examine) (?P<place>{_NAME})",
    r"(?P<verb>look|inventory)")]
_NUMBERED_NAME = re.compile(rf"\b{_NAME}\b")
_ROOM_LINE = re.compile(rf"^(room: )({_NAME}(?:, {_NAME})*)$", re.MULTILINE)
_THING_WORD = re.compile(rf"\b(?P<kind>{'|'.join(THINGS)})\b(?: (?P<number>\d+)\b)?")
TREATED = {"clean": ("sinkbasin", "clean"), "heat": ("microwave", "hot"), "cool": ("fridge", "cool")}      # command -> where, and what the thing is then
MADE = tuple(result for _, result in TREATED.values())
TOOL = {result: (verb, tool) for verb, (tool, result) in TREATED.items()}          # what a thing is to be -> command and tool

# The engine's sentences (alfred.twl2 of alfworld 0.4.2)
_ARRIVES = re.compile(rf"You (?:arrive at|open the) (?P<place>{_NAME})\. (?P<rest>.*)", re.DOTALL)
_SEEN = re.compile(rf"(?:On the (?P<on>{_NAME}), you see|The (?P<open>{_NAME}) is open\. In it, you see) (?P<things>.*)\.", re.DOTALL)
_CLOSED = re.compile(rf"The (?P<place>{_NAME}) is closed\.")
_CLOSES = re.compile(rf"You close the (?P<place>{_NAME})\.")
_TAKES = re.compile(rf"You pick up the (?P<thing>{_NAME}) from the (?P<place>{_NAME})\.")
_PUTS = re.compile(rf"You move the (?P<thing>{_NAME}) to the (?P<place>{_NAME})\.")
_CHANGES = re.compile(rf"You (?P<verb>clean|heat|cool) the (?P<thing>{_NAME}) using the {_NAME}\.")
_LIGHTS = re.compile(rf"You turn on the (?P<thing>{_NAME})\.")
_SLICES = re.compile(rf"You sliced the (?P<thing>{_NAME}) with the {_NAME}\.")
_LISTED = re.compile(rf"\ban? (?P<name>{_NAME})\b")


# ---- the mapping -------------------------------------------------------------------------------------------------------------------------------

def by_name(names) -> list[str]:
    """'desk 2' before 'desk 10'."""
    return sorted(names, key=lambda name: (name.rsplit(" ", 1)[0], int(name.rsplit(" ", 1)[1])))


@dataclass
class Notes:
    """What the agent has noticed in one episode: where it is, what it holds, what it saw where, what it did to which object. Objects keep the order
    in which they were noticed, so that a receptacle reads the same when the agent comes back."""
    room: list[str] = field(default_factory=list)
    place: str = ""
    holding: str = ""
    contents: dict[str, list[str]] = field(default_factory=dict)
    opened: dict[str, bool] = field(default_factory=dict)         # only receptacles that can be opened
    tags: dict[str, set[str]] = field(default_factory=dict)

    def read(self, feedback: str) -> None:
        """Takes in one feedback of the engine. 'Nothing happens.', looking and examining change nothing that is noted."""
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
            if self.holding in (things := self.contents.get(match["place"], [])):       # official games have things that lie in two places at once
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
        """The abstract state; `commands` (the engine's admissible ones) become a third line when given."""
        if not self.place:
            first = f"room: {', '.join(self.room) or NOTHING}"
        elif self.opened.get(self.place) is False:
            first = f"at {self.place} closed"
        else:
            things = ", ".join(map(self._thing, self.contents.get(self.place, []))) or NOTHING
            first = f"at {self.place}{' open' if self.place in self.opened else ''}: {things}"
        lines = [first, f"holding: {self._thing(self.holding) if self.holding else NOTHING}"]
        return "\n".join(lines + ([f"commands: {'; '.join(commands)}"] if commands is not None else []))

    def _thing(self, name: str) -> str:
        return " ".join([tag for tag in TAGS if tag in self.tags.get(name, ())] + [name])


# ---- reading states and actions ----------------------------------------------------------------------------------------------------------------

@dataclass
class View:
    """The parts of a state. `opened`: None where the receptacle cannot be closed; things carry their tags ('hot mug 1')."""
    place: str
    opened: bool | None
    things: list[str]
    holding: str
    room: list[str]


def read_view(state: str) -> View | None:
    """The parts of a state; None when the text is not one."""
    lines = state.split("\n")
    if len(lines) not in (2, 3) or not (held := _HOLDING.fullmatch(lines[1])) or (len(lines) == 3 and not lines[2].startswith("commands: ")):
        return None
    holding = "" if held["thing"] == NOTHING else held["thing"]
    listed = lambda text: [] if not text or text == NOTHING else text.split(", ")
    if match := _ROOM.fullmatch(lines[0]):
        return View("", None, [], holding, listed(match["things"]))
    if match := _PLACE.fullmatch(lines[0]):
        return View(match["place"], False if match["closed"] else True if match["open"] else None, listed(match["things"]), holding, [])
    return None


def page_kind(state: str) -> str:
    """room | place | unknown."""
    view = read_view(state)
    return "unknown" if view is None else "place" if view.place else "room"


def name_of(thing: str) -> str:
    """'clean hot mug 1' -> 'mug 1'."""
    return " ".join(thing.split()[-2:])


def kind_of(thing: str) -> str:
    """'clean hot mug 1' -> 'mug'."""
    return thing.split()[-2] if thing else ""


@dataclass
class Command:
    verb: str
    thing: str = ""
    place: str = ""


def read_action(action: str) -> Command | None:
    """The parts of an action; None for what ALFWorld's grammar does not hold. `examine` may name a thing, which is then in `place`."""
    for pattern in _ACTIONS:
        if match := pattern.fullmatch(action):
            parts = match.groupdict()
            return Command(parts["verb"], parts.get("thing") or "", parts.get("place") or "")
    return None


def ground(state: str, action: str) -> str:
    """Actions name their objects already."""
    return clean(action)


unnumbered = numbered = as_it_is
said = as_done


def retrieval_text(task_text: str, state: str, action: str) -> str:
    """What the replay buffer is searched by: the action, its place above all, and the task, because what is found where depends on the home, and a task is of
    one home."""
    place = command.place if (command := read_action(action)) else ""
    return f"{action} {place} {place} {place}\n{task_text}"


def similar(action: str, demo_action: str) -> bool:
    """Whether a retrieved demonstration may be shown: only of the same action, because another place's page would be copied by mistake."""
    return action == demo_action


def action_type(state: str, action: str) -> str:
    """go | open | close | take | move | clean | heat | cool | slice | use | look | refused (by what this page shows the engine would change nothing;
    whether a place exists, and a neighbour within reach, it does not show)."""
    command, view = read_action(action), read_view(state)
    if command is None or view is None:
        return "refused"
    names, held, here = [name_of(thing) for thing in view.things], name_of(view.holding), command.place == view.place
    fits = {
        "go": not here, "open": here and view.opened is False, "close": here and view.opened is True,
        "take": here and not held and command.thing in names, "move": here and held == command.thing != "" and view.opened is not False,
        "slice": held == command.place and kind_of(held) in ("knife", "butterknife") and command.thing in names,
        "use": command.thing in names and kind_of(command.thing) in LAMPS, "examine": command.place in (view.place, held),
        "look": True, "inventory": True,
        **{verb: held == command.thing and here and kind_of(view.place) == tool for verb, (tool, _) in TREATED.items()},
    }[command.verb]
    if not fits:
        return "refused"
    return "look" if command.verb in ("look", "inventory", "examine") else command.verb


def valid(state: str, action: str, next_state: str) -> bool:
    """Whether an imagined action counts as admissible: it changed the page, or it only looks."""
    return action_type(state, action) == "look" or next_state != state


def judged(state: str, action: str) -> bool:
    """True where an action may fulfil a task, and task and page alone decide that it does: putting something down, using a lamp, taking something
    under a lit one. The experience model then sees neither history nor demonstrations."""
    kind = action_type(state, action)
    return kind in ("move", "use") or (kind == "take" and any(thing.startswith("lit ") for thing in read_view(state).things))


def _carried(action: str, after: View | None) -> bool:
    command = read_action(action)
    return command is not None and command.verb == "go" and after is not None and bool(after.holding) and any(thing.startswith("lit ") for thing in after.things)


def _may_hold(before: View, thing: str, command: Command | None) -> bool:
    """Whether a command may put `thing`, tags and all, into the hand (or nothing, by putting down)."""
    if command is None:
        return False
    if command.verb == "take":                   # as the page shows it, or from a neighbour within reach
        return not before.holding and name_of(thing) == command.thing and (thing in before.things or command.thing not in map(name_of, before.things))
    if command.verb == "move":
        return not thing and name_of(before.holding) == command.thing
    return command.verb in TREATED and name_of(before.holding) == name_of(thing) == command.thing


def possible(state: str, action: str, next_state: str, reward: float) -> bool:
    """What an imagined page must at least be: of a known form, elsewhere only after going or opening (a neighbour within reach), paying only where it may:
    for a judged action, or for carrying something to a lit lamp, which the page that is left does not show. The hand changes only by what is done with it."""
    before, after, command = read_view(state), read_view(next_state), read_action(action)
    if before is None or after is None or (reward and not _carried(action, after) and not judged(state, action)):
        return False
    if before.holding != after.holding and not _may_hold(before, after.holding, command):
        return False
    return after.place == before.place or (command is not None and command.verb in ("go", "open") and after.place == command.place)


def determined(history: list[str], state: str, action: str) -> bool:
    """True when the next page follows from pages already seen in this episode; False where the contents of a receptacle are seen for the first time."""
    command = read_action(action)
    if command is None or command.verb not in ("go", "open") or action_type(state, action) == "refused":
        return True
    seen = [view for page in history if (view := read_view(page)) and view.place == command.place]
    return any(view.opened is not False for view in seen) if command.verb == "open" else bool(seen)


def recall(history: list[tuple[str, str]], state: str, action: str, views: int) -> list[tuple[str, str]]:
    """The part of the (state, action) history that decides what follows: for a place seen before its last `views` pages; for a new one the room and the
    last pages of every other place, because an object is in one place only; nothing where the current page says it all. The most telling one last."""
    command = read_action(action)
    if command is None or command.verb not in ("go", "open"):
        return []
    pages: dict[str, list[tuple[str, str]]] = {}
    for page, done in history:
        view = read_view(page)
        pages.setdefault(view.place if view else "", []).append((page, done))
    if command.verb == "open":                   # the closed page in front of it tells nothing
        own = [(page, done) for page, done in pages.get(command.place, []) if read_view(page).opened]
    else:
        own = pages.get(command.place, [])
    if own:
        return own[-views:]
    telling = [pair for place, kept in pages.items() if place for pair in kept[-views:] if read_view(pair[0]).things]
    return pages.get("", [])[:1] + telling


def contradictions(steps: list[tuple[str, str, str]]) -> tuple[int, int]:
    """(pages that show what a place holds, those of them that contradict an earlier page) of an episode's (state, action, next state): a thing that is known to
    be elsewhere, or a place that does not hold what it held, but for what the agent itself took and put down. None in the real world."""
    where: dict[str, str] = {}                   # thing -> place, 'hand' when held
    held_by: dict[str, set[str]] = {}            # place -> what was last seen there
    checked = broken = 0
    for state, action, next_state in steps:
        before, view, command = read_view(state), read_view(next_state), read_action(action)
        if before is None or view is None:
            continue
        held, holds = name_of(before.holding), name_of(view.holding)
        by_itself = held != holds and (command is None or command.verb != ("take" if not held else "move"))      # nothing jumps into the hand, or out of it
        for thing in {held, holds} - {""}:
            place = "hand" if thing == holds else command.place if command else ""
            held_by.get(where.get(thing, ""), set()).discard(thing)
            held_by.get(place, set()).add(thing)
            where[thing] = place
        if not view.place or (view.opened is False and not by_itself):
            continue
        things = set(map(name_of, view.things))
        checked += 1
        broken += by_itself or any(where.get(thing, view.place) != view.place for thing in things) or held_by.get(view.place, things) != things
        where.update(dict.fromkeys(things, view.place))
        held_by[view.place] = things
    return checked, broken


def renaming(rng, action: str, taken: bool, start: str = "") -> Callable[[str], str] | None:
    """Other names for things, the same in every text of one training row, for half of the rows: what follows from a page does not depend on them, and a small
    model that sees few homes would learn their contents by heart instead of copying. Kinds stay where they decide (heating, cleaning, cooling, a refusal).
    With `start`, the first state of a home, its places change numbers among their kind, too: else a policy learns which drawer holds what in which home."""
    if rng.random() < 0.5:
        return None
    command = read_action(action)
    plain = not taken or (command is not None and command.verb in TREATED)
    kinds = dict(zip(THINGS, THINGS if plain else map(str, rng.permutation(THINGS))))
    numbers = {kind: dict(zip("123", map(str, rng.permutation(3) + 1))) for kind in THINGS}
    room = view.room if (view := read_view(start)) else []
    of_kind = {kind: [place for place in room if kind_of(place) == kind] for kind in map(kind_of, room)}
    places = {old: new for same in of_kind.values() for old, new in zip(same, map(str, rng.permutation(same)))}

    def renamed(match: re.Match) -> str:
        kind, number = match["kind"], match["number"]
        return kinds[kind] + (f" {numbers[kind].get(number, number)}" if number else "")

    def change(text: str) -> str:
        text = _THING_WORD.sub(renamed, text)
        if places:
            text = _NUMBERED_NAME.sub(lambda match: places.get(match[0], match[0]), text)
            text = _ROOM_LINE.sub(lambda match: match[1] + ", ".join(by_name(match[2].split(", "))), text)
        return text
    return change


# ---- reading tasks -----------------------------------------------------------------------------------------------------------------------------

@dataclass
class Wanted:
    """kind: pick | clean | hot | cool | two | look; `thing` and `place` are types ('mug', 'desk'; the lamp for look)."""
    kind: str
    thing: str
    place: str


_TASKS = [re.compile(pattern) for pattern in (
    r"put two (?P<thing>[a-z]+) (?:in|on) (?P<place>[a-z]+)", r"find two (?P<two>[a-z]+) and put them (?:in|on) (?P<place>[a-z]+)",
    r"put an? (?P<kind>clean|hot|cool) (?P<thing>[a-z]+) (?:in|on) (?P<place>[a-z]+)", r"(?P<do>clean|heat|cool) some (?P<thing>[a-z]+) and put it (?:in|on) (?P<place>[a-z]+)",
    r"put (?:an?|some) (?P<thing>[a-z]+) (?:in|on) (?P<place>[a-z]+)", r"(?:look at|examine)(?: an?| the| some)? (?P<look>[a-z]+) (?:under|with) the (?P<place>[a-z]+)")]


def read_task(text: str) -> Wanted:
    """Raises ValueError for a sentence that none of ALFWorld's twelve templates expresses."""
    sentence = clean(text).lower().rstrip(". ") if len(text) <= MAX_TASK_CHARS else ""
    for pattern in _TASKS:
        if match := pattern.fullmatch(sentence):
            parts = {key: value for key, value in match.groupdict().items() if value}
            if sentence.startswith(("put two", "find two")):
                return Wanted("two", parts.get("thing") or parts["two"], parts["place"])
            if "look" in parts:
                return Wanted("look", parts["look"], parts["place"])
            return Wanted(parts.get("kind") or TREATED.get(parts.get("do", ""), ("", "pick"))[1], parts["thing"], parts["place"])
    raise ValueError(f"task {text[:80]!r}: cannot be read; expected one of ALFWorld's sentences, such as 'put a clean mug in desk' or 'find two pen and put them in drawer'")


def readable(text: str) -> bool:
    """Whether `read_task` can read a sentence."""
    return accepted(read_task, text)


def difficulty(text: str) -> int:
    """Steps a task asks for beyond picking something up and putting it down."""
    return {"pick": 1, "look": 1, "clean": 2, "hot": 2, "cool": 2, "two": 3}[read_task(text).kind]


def topics(text: str) -> list[str]:
    """What a variation of a task may keep."""
    wanted = read_task(text)
    return [wanted.thing, wanted.place]


def needs(text: str) -> set[str]:
    """What the world must be known to have for a task to make sense: 'thing mug', 'hot mug', 'mug in desk'."""
    wanted = read_task(text)
    made = {f"{wanted.kind} {wanted.thing}"} if wanted.kind in MADE else set()
    return made | {f"thing {wanted.thing}", f"thing {wanted.place}" if wanted.kind == "look" else f"{wanted.thing} in {wanted.place}"}


def offers(state: str) -> set[str]:
    """What a page shows that the world has, in the words of `needs`."""
    view = read_view(state)
    if view is None:
        return set()
    things = [*view.things, *([view.holding] if view.holding else [])]
    tags = {f"{tag} {kind_of(thing)}" for thing in things for tag in MADE if tag in thing.split()}
    return tags | {f"thing {kind_of(thing)}" for thing in things} | {f"{kind_of(thing)} in {kind_of(view.place)}" for thing in view.things}


def starts(text: str, start: str) -> bool:
    """Whether a task can be done from a first state: its receptacle, and the tool it needs, are in the room (a lamp is an object, and may turn up)."""
    wanted, view = read_task(text), read_view(start)
    _, tool = TOOL.get(wanted.kind, ("", None))
    kinds = {kind_of(place) for place in view.room} if view else set()
    return (wanted.kind == "look" or wanted.place in kinds) and (tool is None or tool in kinds)


def finds(task_text: str, state: str, action: str, next_state: str) -> bool | None:
    """Whether a step that looked into a place showed what the task wants; None for any other step. A dream that finds more is easier than the world."""
    view = read_view(next_state)
    if action_type(state, action) not in ("go", "open") or view is None or view.opened is False or not readable(task_text):
        return None
    return read_task(task_text).thing in map(kind_of, view.things)


def checks(wanted: Wanted, state: str, action: str) -> list[tuple[str, str, bool]]:
    """Each constraint of a task against a judged action, by rule: (wanted, found, met). RL never sees it; it audits the experience model's reward."""
    command, view = read_action(action), read_view(state)
    if wanted.kind == "look":
        held, lamps = view.holding, [thing for thing in view.things if kind_of(thing) == wanted.place]
        if command.verb == "take":
            held, lamps = command.thing, [lamp for lamp in lamps if lamp.startswith("lit ")]
        elif command.verb == "use":
            lamps = [lamp for lamp in lamps if name_of(lamp) == command.thing or lamp.startswith("lit ")]
        else:
            held, lamps = "", [lamp for lamp in lamps if lamp.startswith("lit ")]
        return [(wanted.thing, kind_of(held) or NOTHING, kind_of(held) == wanted.thing), (wanted.place, "on" if lamps else "off", bool(lamps))]
    if command.verb != "move":
        return [(wanted.place, command.verb, False)]
    rows = [(wanted.thing, kind_of(command.thing), kind_of(command.thing) == wanted.thing)]
    if wanted.kind in MADE:
        tags = view.holding.split()[:-2]
        rows.append((wanted.kind, " ".join(tags) or "plain", wanted.kind in tags))
    rows.append((wanted.place, kind_of(command.place), kind_of(command.place) == wanted.place))
    if wanted.kind == "two":
        others = [thing for thing in view.things if kind_of(thing) == wanted.thing]
        rows.append((f"another {wanted.thing}", name_of(others[0]) if others else NOTHING, bool(others)))
    return rows


def rule_success(task_text: str, state: str, action: str, next_state: str = "") -> bool | None:
    """The rule check's verdict on a judged action that changes the page: True / False; None where nothing is judged or the task cannot be read. With
    `next_state` also on carrying something to a lit lamp, which only the page there shows."""
    if not readable(task_text):
        return None
    if _carried(action, after := read_view(next_state)):
        wanted = read_task(task_text)
        return wanted.kind == "look" and kind_of(after.holding) == wanted.thing and any(thing.startswith(f"lit {wanted.place} ") for thing in after.things)
    if not judged(state, action):
        return None
    return all(met for _, _, met in checks(read_task(task_text), state, action))
