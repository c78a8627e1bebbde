"""Reasoning traces by rule for ALFWorld's training data, and counterfactual reward examples. Both read pages
and outcomes only: what the engine knew and no page shows (a place within reach), the outcome tells.
"""
from dataclasses import dataclass

import numpy as np

from dreamgym.envs.alfworld.text import (
    LAMPS, MADE, MAKEABLE, NOTHING, TOOL, TREATED, Command, View, Wanted, kind_of, name_of, read_action,
    read_task, read_view, tags_of)
from dreamgym.episode import Episode, Step, Task, replace

SAME = "so the same page"
REACH = "within reach"                           # of a place beside this one, which the page does not show
LOOKS = ("look", "inventory", "examine")

Row = tuple[str, str, bool]                      # what is needed, what is found, whether it is met


@dataclass
class Transition:
    """One step, read. `command` is None for what is no command."""
    step: Step
    command: Command | None
    before: View
    after: View

    @property
    def changed(self) -> bool:
        return self.step.state != self.step.next_state


def read_step(step: Step) -> Transition | None:
    """None where a page cannot be read."""
    before, after = read_view(step.state), read_view(step.next_state)
    return Transition(step, read_action(step.action), before, after) if before and after else None


def conditions(command: Command, view: View) -> list[Row]:
    """What the page must show before a thing is taken, moved, treated, sliced or used, in a trace's order."""
    verb, thing, place, here = command.verb, command.thing, command.place, view.place == command.place
    at = (f"at {place}", view.place or "room", here)
    holds = lambda name: (f"hold {name}", view.held or NOTHING, view.held == name)
    # Everything up to the thing, one by one: a model that says "none" at once has not looked. The thing is
    # said beside each: what a small model compares must stand close together.
    names = view.names
    shown = " no ".join(f"{name} : {thing}" for name in _up_to(thing, names)) or "none"
    look_for = (f"look for {thing}", shown, thing in names)
    if verb in TREATED:
        wrong = [("tool", place, False)] if kind_of(place) != TREATED[verb][0] else []
        return [holds(thing), at, *wrong]
    if verb == "take":
        shut = [("open", "closed", False)] if here and view.opened is False else []
        return [("hold nothing", view.held or NOTHING, not view.held), at, *shut, look_for]
    if verb == "move":
        state = ("open", "open" if view.opened else "closed", bool(view.opened))
        return [holds(thing), at, *([state] if here and view.opened is not None else [])]
    if verb == "slice":
        return [holds(place), ("blade", kind_of(place), kind_of(place) in ("knife", "butterknife")), look_for]
    assert verb == "use", verb
    return [look_for]


# ---- why the next state follows ----------------------------------------------------------------------------

def explain(task: Task, history: list[Step], step: Step) -> tuple[str, str]:
    """As Environment.explain."""
    t, wanted = read_step(step), read_task(task.text)
    if t is None:
        return "", ""
    if not t.changed and (t.command is None or t.command.verb in LOOKS):
        reason = f"{'only looks' if t.command else 'not a command'} {SAME}"
    elif t.command is None or (t.changed and not _plausible(t)):
        reason = ""
    else:
        pages = [view for page in [*(s.state for s in history), step.state] if (view := read_view(page))]
        facts = {"go": _go, "open": _open, "close": _close}.get(t.command.verb, _act)(t, pages, wanted)
        verdict = _verdict(t) if t.changed else SAME
        reason = f"{' ; '.join(facts)} {verdict}".rstrip()
    return reason, _explain_reward(t, wanted)


def _plausible(t: Transition) -> bool:
    """Whether a command may lead from page to page: elsewhere by going or opening, another hand by its
    use."""
    command, before, after = t.command, t.before, t.after
    arrives = command.verb in ("go", "open") and after.place == command.place
    if command.verb in LOOKS or (after.place != before.place and not arrives):
        return False
    if before.holding == after.holding:
        return True
    if command.verb == "take":                   # as the page shows it, or from a place within reach
        shown = after.holding in before.things or command.thing not in before.names
        return not before.holding and after.held == command.thing and shown
    if command.verb == "move":
        return not after.holding and before.held == command.thing
    return command.verb in TREATED and before.held == after.held == command.thing


def _verdict(t: Transition) -> str:
    """What came of a command; of a move, also after which thing of the list this one is put; of a taken
    thing, also its tags and what else lies there: a model that says "nothing" at once has not looked."""
    verb = t.command.verb
    if verb == "take":
        return f"so {t.after.holding} is taken and {[*t.after.things, NOTHING][0]} is left"
    if verb == "move" and t.after.things[-1:] == [t.before.holding]:
        return f"so it is put there {f'after {t.before.things[-1]}' if t.before.things else 'alone'}"
    said = {"close": "closed", "move": "put there", "use": "on", "slice": "sliced"}
    said |= {verb: result for verb, (_, result) in TREATED.items()}
    return f"so it is {said[verb]}" if verb in said else ""


def _go(t: Transition, pages: list[View], wanted: Wanted | None) -> list[str]:
    place, here = t.command.place, t.before.place or "room"
    at = f"at {here} : {place} {_yes(place == here)}"      # both named before it is judged
    if place == here and not t.changed:
        return [at]
    room = next((view.room for view in pages if view.room), [])
    alike = [name for name in room if kind_of(name) == kind_of(place)]
    looked = " ".join(_up_to(place, alike)) or "none"
    seek = f"{at} ; look for {place} : {looked} {_yes(t.changed)}"
    if not t.changed:
        return [seek]
    keep = f"{seek} ; keep {t.after.holding or NOTHING}"
    if any(view.place == place for view in pages):
        return [keep, f"{place} is known"]
    if t.after.opened is False:
        return [keep, f"{place} is new and closed"]
    return [keep, f"{place} is new", *_shown(t, wanted)]


def _open(t: Transition, pages: list[View], wanted: Wanted | None) -> list[str]:
    place = t.command.place
    facts = [] if t.before.place == place else [f"at {place} {REACH if t.changed else 'no'}"]
    if not t.changed:
        return facts or [f"{place} is closed {_yes(t.before.opened is False)}"]
    if any(view.place == place and view.opened is not False for view in pages):
        return [*facts, f"{place} is closed yes and known"]
    return [*facts, f"{place} is closed yes and new", *_shown(t, wanted)]


def _close(t: Transition, *_) -> list[str]:
    place = t.command.place
    if t.before.place != place:
        return [f"at {place} {REACH if t.changed else 'no'}"]
    return [f"{place} is open {_yes(t.before.opened is True)}"]


def _act(t: Transition, *_) -> list[str]:
    """The conditions up to the first that is not met, then the outcome; an unmet one of what was done all the
    same was within reach."""
    facts = []
    for what, found, met in conditions(t.command, t.before):
        facts.append(f"{what} : {found} {'yes' if met else REACH if t.changed else 'no'}")
        if not met and not t.changed:
            return facts
    verb = t.command.verb
    touched = [thing for thing in t.before.things if name_of(thing) == t.command.thing]
    tags = [tag for thing in ([t.before.holding] if verb in TREATED else touched) for tag in tags_of(thing)]
    result = TREATED[verb][1] if verb in TREATED else "sliced"
    if verb == "move":
        return [*facts, f"fits {_yes(t.changed)}"]
    if verb in ("take", "use"):
        last = "can be taken no" if verb == "take" else "on already" if "lit" in tags else "is a lamp no"
        return facts if t.changed else [*facts, last]
    return [*facts, f"{result} already" if result in tags else f"can be {result} {_yes(t.changed)}"]


def _shown(t: Transition, wanted: Wanted | None) -> list[str]:
    """Whether a new page shows what the task wants; said before the page is written."""
    if wanted is None:
        return []
    kinds = [wanted.thing, wanted.place] if wanted.kind == "look" else [wanted.thing]
    return [" ".join(f"{kind} {_yes(kind in t.after.kinds)}" for kind in kinds)]


# ---- why an agent acts so: from task and state alone -------------------------------------------------------

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
    """Whether one of a kind is in sight, after `_compared`."""
    return f"look for {kind} : {_compared(kind, view) or 'none'} {_yes(kind in view.kinds)}"


def _compared(kind: str, view: View) -> str:
    """Each thing in sight up to the first of a kind, beside that kind."""
    looked = zip(view.names, _up_to(kind, view.kinds))
    return " no ".join(f"{name} {found} : {kind}" for name, found in looked)


def _up_to(wanted: str, found: list[str]) -> list[str]:
    """What is compared with `wanted`, one by one: what was found up to it, or all."""
    return found[:found.index(wanted) + 1] if wanted in found else found


def _yes(met: bool) -> str:
    return "yes" if met else "no"


# ---- why the reward follows: from task, state, action and next state alone ---------------------------------

def may_end(t: Transition) -> bool:
    """Whether a step may fulfil a task: it put a thing down, lit a lamp, or brought a thing under a lit
    one."""
    command, before, after = t.command, t.before, t.after
    if command is None or not t.changed:
        return False
    if command.verb == "move":
        return before.place == command.place and before.held == command.thing
    if command.verb == "use":
        return command.thing in before.names
    brought = command.verb == "go" or (command.verb == "take" and after.held == command.thing)
    return brought and bool(after.holding) and any("lit" in tags_of(thing) for thing in after.things)


def checks(wanted: Wanted, t: Transition) -> list[Row]:
    """Each constraint of a task against a step that may end an episode."""
    if wanted.kind == "look":
        held = kind_of(t.after.holding)
        lit = any("lit" in tags_of(thing) and kind_of(thing) == wanted.place for thing in t.after.things)
        return [(wanted.thing, held or NOTHING, held == wanted.thing),
                (wanted.place, "on" if lit else "off", lit)]
    if t.command.verb != "move":
        return [(wanted.place, t.command.verb, False)]
    thing, place = kind_of(t.command.thing), kind_of(t.command.place)
    rows = [(wanted.thing, thing, thing == wanted.thing)]
    if wanted.kind in MADE:
        tags = tags_of(t.before.holding)
        rows.append((wanted.kind, " ".join(tags) or "plain", wanted.kind in tags))
    rows.append((wanted.place, place, place == wanted.place))
    if wanted.kind == "two":
        rows.append((f"another {wanted.thing}", _compared(wanted.thing, t.before) or NOTHING,
                     wanted.thing in t.before.kinds))
    return rows


def judge(sentence: str, step: Step) -> list[Row] | None:
    """The constraints of a task against a step; None where it cannot end an episode, or sentence or page
    cannot be read."""
    wanted, t = read_task(sentence), read_step(step)
    return checks(wanted, t) if wanted and t and may_end(t) else None


def _explain_reward(t: Transition, wanted: Wanted | None) -> str:
    paid = t.step.reward == 1
    if not may_end(t):
        return "" if paid else f"{t.command.verb if t.command and t.changed else 'same page'}: no"
    rows = checks(wanted, t) if wanted else None
    if rows is None or paid != all(met for _, _, met in rows):
        return ""
    return " ".join(f"{what} : {found} {_yes(met)}" for what, found, met in rows) + f" so {_yes(paid)}"


# ---- counterfactual reward examples: a real step judged under other tasks ----------------------------------

# Shares: 45 % fulfil their task, the rest breaks one constraint. "many" is an unrelated sentence: easy, but
# without it "no" is so rare that a small model says "yes" to every constraint.
FULFILLED = 0.45
BREAKABLE = {"object": 0.22, "receptacle": 0.16, "state": 0.12, "count": 0.14, "kind": 0.12, "many": 0.24}
ATTEMPTS = 40                                    # steps tried for one counterfactual
TEMPLATES = {                                    # the sentences of alfworld 0.4.2
    "pick": ("put a {thing} in {place}", "put some {thing} on {place}"),
    "two": ("put two {thing} in {place}", "find two {thing} and put them in {place}"),
    "look": ("look at {thing} under the {place}", "examine the {thing} with the {place}"),
} | {made: (f"put a {made} {{thing}} in {{place}}", f"{verb} some {{thing}} and put it in {{place}}")
     for made, (verb, _) in TOOL.items()}


def counterfactuals(episodes: list[Episode], count: int, rng: np.random.Generator) -> list[Episode]:
    """At most `count` one-step episodes: a recorded step that may end an episode, under a sentence of which
    it breaks what the label names (BREAKABLE), or nothing. No (state, sentence) occurs twice, or as
    played."""
    steps = [(episode, step) for episode in episodes for step in episode.steps]
    found = {(step.state, step.action): t for _, step in steps if (t := read_step(step)) and may_end(t)}
    groups: dict[str, list] = {}                 # each drawn as often: steps with a state or a lamp are few
    for t in found.values():
        groups.setdefault(_group(t), []).append(t)
    if not groups:
        return []
    used = {(step.state, episode.task.text) for episode, step in steps}
    labels = {"none": FULFILLED} | {name: (1 - FULFILLED) * share for name, share in BREAKABLE.items()}
    held_in, results = _held_in(episodes), []
    for _ in range(count):
        broken = str(rng.choice(list(labels), p=list(labels.values())))
        for _ in range(ATTEMPTS):
            group = groups[str(rng.choice(list(groups)))]
            t = group[rng.integers(len(group))]
            wishes = [wish for wish in _wishes(t, broken, held_in, rng) if _breaks(wish, t, broken)]
            if not wishes:
                continue
            wish = wishes[rng.integers(len(wishes))]
            sentence = str(rng.choice(TEMPLATES[wish.kind])).format(thing=wish.thing, place=wish.place)
            if (t.step.state, sentence) not in used:
                used.add((t.step.state, sentence))
                success = broken == "none"
                step = replace(t.step, reward=float(success), done=success, reasoning="", reward_reasoning="")
                results.append(
                    Episode(id="", task=Task(id="", text=sentence), steps=[step], label=broken))
                break
    return results


def _group(t: Transition) -> str:
    """What kind of sentence a step could fulfil."""
    if t.command.verb != "move":
        return "lamp"
    if set(tags_of(t.before.holding)) & set(MADE):
        return "made"
    return "two" if kind_of(t.command.thing) in t.before.kinds else "plain"


def _held_in(episodes: list[Episode]) -> dict[str, list[str]]:
    """Kind of receptacle -> kinds of things that the pages showed there, lamps left out."""
    held: dict[str, set[str]] = {}
    for episode in episodes:
        for step in episode.steps:
            if (view := read_view(step.next_state)) and view.place:
                held.setdefault(kind_of(view.place), set()).update(view.kinds)
    return {place: sorted(things - set(LAMPS)) for place, things in sorted(held.items())}


def _wishes(
    t: Transition, broken: str, held_in: dict[str, list[str]], rng: np.random.Generator
) -> list[Wanted]:
    """Sentences that a step fulfils, or of which it breaks what `broken` names (`_breaks` decides)."""
    if broken == "many":
        wishes = []
        for place in map(str, rng.permutation(list(held_in))[:4]):
            if held_in[place]:
                thing = str(rng.choice(held_in[place]))
                kinds = ["pick", "two", *[kind for kind in MADE if thing in MAKEABLE[kind]]]
                wishes.append(Wanted(str(rng.choice(kinds)), thing, place))
        return wishes
    moved, at = t.command.verb == "move", kind_of(t.before.place)
    thing = kind_of(t.command.thing if moved else t.after.holding)
    here = sorted(set(t.before.kinds) - {thing, *LAMPS})
    others = [kind for kind in [*here, *map(str, rng.permutation(held_in.get(at, []))[:3])] if kind != thing]
    if not moved:
        lit = {kind_of(lamp) for lamp in t.after.things if "lit" in tags_of(lamp)}
        on, off = [lamp for lamp in LAMPS if lamp in lit], [lamp for lamp in LAMPS if lamp not in lit]
        return {
            "none": [Wanted("look", thing, lamp) for lamp in on if thing],
            "object": [Wanted("look", other, lamp) for other in others for lamp in on],
            "receptacle": [Wanted("look", thing, lamp) for lamp in off if thing],
            "kind": [Wanted("pick", thing or str(rng.choice(others or ["book"])), at or "desk")],
        }.get(broken, [])
    made = [tag for tag in tags_of(t.before.holding) if tag in MADE]
    fits = ["pick", *made, *["two"] * (thing in t.before.kinds)]
    return {
        "none": [Wanted(kind, thing, at) for kind in [*fits, *fits[1:]]],
        "object": [Wanted(kind, other, at)
                   for kind in fits for other in others if other in MAKEABLE.get(kind, others)],
        "receptacle": [Wanted(kind, thing, place) for kind in fits
                       for place, things in held_in.items() if thing in things and place != at],
        "state": [Wanted(kind, thing, at) for kind in MADE if kind not in made and thing in MAKEABLE[kind]],
        "count": [Wanted("two", thing, at)],
        "kind": [Wanted("look", thing, LAMPS[0])],
    }[broken]


def _breaks(wish: Wanted, t: Transition, broken: str) -> bool:
    """Whether just what `broken` names is not as a sentence wants it; another kind of sentence may miss
    more."""
    missed = [what for what, _, met in checks(wish, t) if not met]
    if broken in ("kind", "many"):
        return len(missed) > (broken == "many")
    return missed == {"none": [], "object": [wish.thing], "receptacle": [wish.place], "state": [wish.kind],
                      "count": [f"another {wish.thing}"]}[broken]
