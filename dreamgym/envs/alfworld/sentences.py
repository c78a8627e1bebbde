"""Commands and answers of ALFWorld: what TextWorld derives from the grammar of alfworld 0.4.2 (alfred.twl2).

Facts are tuples of a predicate and PDDL ids. Things are listed in the order of their ids.
"""
from collections.abc import Set

Facts = Set[tuple[str, ...]]

# PDDL action -> its command, and the answer where no fact decides it
COMMANDS = {
    "look": ("look", ""),
    "inventory": ("inventory", ""),
    "examinereceptacle": ("examine {r}", ""),
    "examineobject": ("examine {o}", ""),
    "gotolocation": ("go to {r}", "You arrive at {r}. "),
    "openobject": ("open {r}", "You open the {r}. "),
    "closeobject": ("close {r}", "You close the {r}."),
    "pickupobject": ("take {o} from {r}", "You pick up the {o} from the {r}."),
    "putobject": ("move {o} to {r}", "You move the {o} to the {r}."),
    "cleanobject": ("clean {o} with {r}", "You clean the {o} using the {r}."),
    "heatobject": ("heat {o} with {r}", "You heat the {o} using the {r}."),
    "coolobject": ("cool {o} with {r}", "You cool the {o} using the {r}."),
    "toggleobject": ("use {o}", "You turn on the {o}."),
    "sliceobject": ("slice {co} with {ko}", "You sliced the {co} with the {ko}."),
    # the stock engine lists the commands here; that is in no state, and left out
    "help": ("help", ""),
}


def rows(predicate: str, facts: Facts) -> list[tuple[str, ...]]:
    """The arguments of which a predicate holds, in order."""
    return sorted(fact[1:] for fact in facts if fact[0] == predicate)


class Narrator:
    """Writes the texts of one game. `names`: PDDL id -> the name that the player sees. `who`: parameter of an
    action -> PDDL id."""

    def __init__(self, names: dict[str, str]):
        self.names = names

    def command(self, action: str, who: dict[str, str]) -> str:
        return self._filled(COMMANDS[action][0], who)

    def answer(self, action: str, who: dict[str, str], facts: Facts) -> str:
        """What the engine says after an action. `facts` are those that hold then."""
        if action == "look":
            return self.surroundings(facts)
        if action == "inventory":
            held = [thing for _, thing in rows("holds", facts)]
            return f"You are carrying: {self._listed(held)}." if held else "You are not carrying anything."
        if action == "examineobject":
            return self._object(who["o"], facts)
        text = self._filled(COMMANDS[action][1], who)
        if action in ("gotolocation", "openobject", "examinereceptacle"):
            text += self._receptacle(who["r"], facts)
        return text

    def surroundings(self, facts: Facts, at_start: bool = False) -> str:
        """What `look` answers. A game starts with the same, and with all receptacles of the room."""
        here = {location for _, location in rows("atlocation", facts)}
        places = rows("receptacleatlocation", facts)
        near = [place for place, location in places if location in here]
        if not near:
            seen = self._listed([place for place, _ in places] if at_start else [])
            return f"You are in the middle of a room. Looking quickly around you, you see {seen}."
        # `not_inreceptacle` is a fact only of what was taken out of a place
        beside = [thing for thing, location in rows("objectatlocation", facts) if location in here
                  for place in near if ("not_inreceptacle", thing, place) in facts]
        return f"You are facing the {self._listed(near, '')}. Next to it, you see {self._listed(beside)}."

    def _receptacle(self, place: str, facts: Facts) -> str:
        name = self.names[place]
        things = self._listed([thing for thing, where in rows("inreceptacle", facts) if where == place])
        if ("openable", place) not in facts:
            return f"On the {name}, you see {things}."
        if ("opened", place) not in facts:
            return f"The {name} is closed."
        return f"The {name} is open. In it, you see {things}."

    def _object(self, thing: str, facts: Facts) -> str:
        name = self.names[thing]
        if ("isreceptacleobject", thing) in facts:
            inside = [inner for inner, outer in rows("inreceptacleobject", facts) if outer == thing]
            return f"This is a normal {name}. In it, you see {self._listed(inside)}."
        if ("istoggled", thing) in facts:
            return f"This {name} is on."
        made = " and ".join(word for word in ("hot", "cool", "clean") if (f"is{word}", thing) in facts)
        state = f"{made} sliced".strip() if ("issliced", thing) in facts else made
        if not state:
            return f"There's nothing special about {name}."
        return f"This is a {'cold' if state == 'cool' else state} {name}."

    def _filled(self, template: str, who: dict[str, str]) -> str:
        return template.format(**{word: self.names[thing] for word, thing in who.items()})

    def _listed(self, things: list[str], article: str = "a ") -> str:
        *first, last = [article + self.names[thing] for thing in things] or ["nothing"]
        return f"{', '.join(first)}, and {last}" if first else last
