"""Reasoning traces by rule for ALFWorld's training data, and counterfactual reward examples. Both read pages
and outcomes only.

A trace states facts first and the verdict last, because a small model concludes only from what it has already
written: a thing is looked up in the list before it is taken, and a task is checked one constraint after the
other. Where the engine knew more than the page shows (a place within reach, a thing that does not fit), the
outcome tells the fact.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dreamgym.envs.alfworld.text import (
    LAMPS, MADE, NOTHING, TREATED, Command, View, Wanted, ground, kind_of, name_of, read_action, read_task,
    read_view, tags_of)
from dreamgym.episode import Episode, Step, StopReason, Task, replace

SAME = "so the same page"
REACH = "within reach"                           # of a place beside this one, which the page does not show
LOOKS = ("look", "inventory", "examine")

Row = tuple[str, str, bool]                      # what is needed, what is found, whether it is met


@dataclass
class Transition:
    """One step, read. `pages`: the views before it in this episode, the present one last."""
    command: Command
    before: View
    after: View
    changed: bool
    pages: list[View]
    wanted: Wanted | None


def explain(task: Task, history: list[Step], step: Step) -> tuple[str, str]:
    """(why the next state follows, why the reward follows). Each is "" where the rules expect another outcome
    than the recorded one."""
    before, after = read_view(step.state), read_view(step.next_state)
    if before is None or after is None:
        return "", ""
    command = read_action(ground(step.state, step.action))
    wanted = read_task(task.text)
    changed = step.next_state != step.state
    pages = [view for page in [*(s.state for s in history), step.state] if (view := read_view(page))]
    if not changed and (command is None or command.verb in LOOKS):
        reason = f"{'only looks' if command else 'not a command'} {SAME}"
    elif command is None or (changed and not _plausible(command, before, after)):
        reason = ""
    else:
        facts, verdict = _FACTS[command.verb](Transition(command, before, after, changed, pages, wanted))
        end = (f" so {verdict}" if verdict else "") if changed else f" {SAME}"
        reason = " ; ".join(facts) + end
    return reason, _explain_reward(task, command, step)


def _plausible(command: Command, before: View, after: View) -> bool:
    """Whether a command may lead from page to page: elsewhere only by going or opening, and the hand changes
    only by what is done with it."""
    arrives = command.verb in ("go", "open") and after.place == command.place
    if command.verb in LOOKS or (after.place != before.place and not arrives):
        return False
    if before.holding == after.holding:
        return True
    if command.verb == "take":                   # as the page shows it, or from a place within reach
        held = after.holding
        shown = held in before.things or command.thing not in map(name_of, before.things)
        return not before.holding and name_of(held) == command.thing and shown
    if command.verb == "move":
        return not after.holding and name_of(before.holding) == command.thing
    return command.verb in TREATED and name_of(before.holding) == name_of(after.holding) == command.thing


# ---- why the next state follows: (facts, what then is so); the verdict counts only where the page changed --

def _go(t: Transition) -> tuple[list[str], str]:
    place = t.command.place
    if not t.changed:
        room = next((view.room for view in t.pages if view.room), None)
        absent = place != t.before.place and (room is None or place not in room)
        return [f"{place} is not in the room" if absent else f"already at {place}"], ""
    if any(view.place == place for view in t.pages):
        return [f"{place} is known"], ""
    return [f"{place} is new and closed"] if t.after.opened is False else [f"{place} is new", *_shown(t)], ""


def _open(t: Transition) -> tuple[list[str], str]:
    place, here = t.command.place, t.before.place == t.command.place
    facts = [] if here else [f"at {place} {REACH if t.changed else 'no'}"]
    if not t.changed:
        return facts or [f"{place} is closed {_yes(t.before.opened is False)}"], ""
    if any(view.place == place and view.opened is not False for view in t.pages):
        return [*facts, f"{place} is closed yes and known"], ""
    return [*facts, f"{place} is closed yes and new", *_shown(t)], ""


def _close(t: Transition) -> tuple[list[str], str]:
    if t.before.place != t.command.place:
        return [f"at {t.command.place} {REACH if t.changed else 'no'}"], "it is closed"
    return [f"{t.command.place} is open {_yes(t.before.opened is True)}"], "it is closed"


def _take(t: Transition) -> tuple[list[str], str]:
    held = name_of(t.before.holding)
    rows = [("hold nothing", held or NOTHING, not held), _at(t.command.place, t)]
    if t.before.place == t.command.place and t.before.opened is False:
        rows.append(("open", "closed", False))
    rows.append(_look_for(t.command.thing, t))
    return _until_no(rows, t.changed, "can be taken no" if not t.changed else ""), "it is taken"


def _treat(t: Transition) -> tuple[list[str], str]:
    tool, result = TREATED[t.command.verb]
    at = kind_of(t.before.place) or "room"
    rows = [_hold(t.command.thing, t), (f"at {tool}", at, t.before.place == t.command.place and at == tool)]
    already = result in tags_of(t.before.holding)
    return _until_no(
        rows, t.changed, f"{result} already" if already else f"can be {result} {_yes(t.changed)}"
    ), f"it is {result}"


def _move(t: Transition) -> tuple[list[str], str]:
    rows = [_hold(t.command.thing, t), _at(t.command.place, t)]
    if t.before.place == t.command.place and t.before.opened is not None:
        rows.append(("open", "open" if t.before.opened else "closed", t.before.opened))
    return _until_no(rows, t.changed, f"fits {_yes(t.changed)}"), "it is put there"


def _use(t: Transition) -> tuple[list[str], str]:
    lit = any(
        tags_of(thing)[-1:] == ["lit"] and name_of(thing) == t.command.thing for thing in t.before.things
    )
    last = "" if t.changed else "on already" if lit else "is a lamp no"
    return _until_no([_look_for(t.command.thing, t)], t.changed, last), "it is on"


def _slice(t: Transition) -> tuple[list[str], str]:
    knife, here = (
        kind_of(t.command.place),
        [thing for thing in t.before.things if name_of(thing) == t.command.thing],
    )
    rows = [
        _hold(t.command.place, t), ("blade", knife, knife in ("knife", "butterknife")),
        _look_for(t.command.thing, t),
    ]
    already = bool(here) and "sliced" in tags_of(here[0])
    return _until_no(
        rows, t.changed, "sliced already" if already else f"can be sliced {_yes(t.changed)}"
    ), "it is sliced"


_FACTS: dict[str, Callable[[Transition], tuple[list[str], str]]] = {
    "go": _go, "open": _open, "close": _close, "take": _take, "move": _move, "use": _use, "slice": _slice,
    **dict.fromkeys(TREATED, _treat)}


def _hold(thing: str, t: Transition) -> Row:
    return f"hold {thing}", name_of(t.before.holding) or NOTHING, name_of(t.before.holding) == thing


def _at(place: str, t: Transition) -> Row:
    return f"at {place}", t.before.place or "room", t.before.place == place


def _look_for(thing: str, t: Transition) -> Row:
    here = thing in map(name_of, t.before.things)
    return f"look for {thing}", thing if here else "none", here


def _until_no(rows: list[Row], changed: bool, last: str) -> list[str]:
    """The rows up to the first that is not met, and `last` where all are met or the engine did it all the
    same: then what the page did not show was within reach. What is found is written before the verdict: a
    small model says yes to what it has not looked up."""
    facts = []
    for what, found, met in rows:
        facts.append(f"{what} : {found} {'yes' if met else REACH if changed else 'no'}")
        if not met and not changed:
            return facts
    return facts + ([last] if last else [])


def _shown(t: Transition) -> list[str]:
    """Whether a page that is seen for the first time shows what the task wants; said before the page is
    written."""
    if t.wanted is None:
        return []
    kinds = [t.wanted.thing, t.wanted.place] if t.wanted.kind == "look" else [t.wanted.thing]
    return [" ".join(f"{kind} {_yes(kind in map(kind_of, t.after.things))}" for kind in kinds)]


def _yes(met: bool) -> str:
    return "yes" if met else "no"


# ---- why the reward follows: from task, state, action and next state alone ---------------------------------

def may_end(command: Command, before: View, after: View) -> bool:
    """Whether a step that changed the page may fulfil a task: putting down, switching a lamp on, bringing a
    thing under a lit one."""
    if command.verb == "move":
        return before.place == command.place and name_of(before.holding) == command.thing
    if command.verb == "use":
        return command.thing in map(name_of, before.things)
    brought = command.verb == "go" or (command.verb == "take" and name_of(after.holding) == command.thing)
    return brought and bool(after.holding) and any("lit" in tags_of(thing) for thing in after.things)


def checks(wanted: Wanted, command: Command, before: View, after: View) -> list[Row]:
    """Each constraint of a task against a step that may end an episode."""
    if wanted.kind == "look":
        held = kind_of(after.holding)
        lit = any("lit" in tags_of(thing) and kind_of(thing) == wanted.place for thing in after.things)
        on = "on" if lit else "off"
        return [(wanted.thing, held or NOTHING, held == wanted.thing), (wanted.place, on, lit)]
    if command.verb != "move":
        return [(wanted.place, command.verb, False)]
    rows = [(wanted.thing, kind_of(command.thing), kind_of(command.thing) == wanted.thing)]
    if wanted.kind in MADE:
        tags = tags_of(before.holding)
        rows.append((wanted.kind, " ".join(tags) or "plain", wanted.kind in tags))
    rows.append((wanted.place, kind_of(command.place), kind_of(command.place) == wanted.place))
    if wanted.kind == "two":
        others = [name_of(thing) for thing in before.things if kind_of(thing) == wanted.thing]
        rows.append((f"another {wanted.thing}", others[0] if others else NOTHING, bool(others)))
    return rows


def read_step(step: Step) -> tuple[Command, View, View] | None:
    """A step that may end an episode, read; None for any other."""
    command = read_action(ground(step.state, step.action))
    before, after = read_view(step.state), read_view(step.next_state)
    if command is None or before is None or after is None or step.state == step.next_state:
        return None
    return (command, before, after) if may_end(command, before, after) else None


def judge(sentence: str, step: Step) -> list[Row] | None:
    """The constraints of a task against a step; None where the step cannot end an episode, or where the
    sentence or a page cannot be read."""
    wanted, read = read_task(sentence), read_step(step)
    return checks(wanted, *read) if wanted and read else None


def _explain_reward(task: Task, command: Command | None, step: Step) -> str:
    paid = step.reward == 1
    if read_step(step) is None:
        kind = command.verb if command and step.next_state != step.state else "same page"
        return "" if paid else f"{kind}: no"
    rows = judge(task.text, step)
    if rows is None or paid != all(met for _, _, met in rows):
        return ""
    return " ".join(f"{what} : {found} {_yes(met)}" for what, found, met in rows) + f" so {_yes(paid)}"


# ---- counterfactual reward examples: a real step judged under other tasks ----------------------------------

FULFILLED = 0.45                  # share that fulfils its task; the rest breaks one constraint
# What is broken, by shares of the rest. "many" is an unrelated sentence: easy, but without it "no" is so rare
# that a small model says "yes" to every constraint.
BREAKABLE = {"object": 0.22, "receptacle": 0.16, "state": 0.12, "count": 0.14, "kind": 0.12, "many": 0.24}
ATTEMPTS = 40                                    # steps tried for one counterfactual
TEMPLATES = {                                    # the sentences of alfworld 0.4.2
    "pick": ("put a {thing} in {place}", "put some {thing} on {place}"),
    "two": ("put two {thing} in {place}", "find two {thing} and put them in {place}"),
    "clean": ("put a clean {thing} in {place}", "clean some {thing} and put it in {place}"),
    "hot": ("put a hot {thing} in {place}", "heat some {thing} and put it in {place}"),
    "cool": ("put a cool {thing} in {place}", "cool some {thing} and put it in {place}"),
    "look": ("look at {thing} under the {place}", "examine the {thing} with the {place}")}
# What a sentence may ask to clean, heat or cool (alfworld's constants): a near miss that no game could ask
# for is no near miss
_FOOD = "apple egg potato tomato"
MAKEABLE = {
    "clean": (f"{_FOOD} bowl butterknife cloth cup dishsponge fork kettle knife ladle lettuce mug pan plate "
              "pot soapbar spatula spoon").split(),
    "hot": f"{_FOOD} bread cup mug plate".split(),
    "cool": f"{_FOOD} bread bowl cup lettuce mug pan plate pot winebottle".split(),
}


@dataclass
class Judged:
    """A recorded step that may end an episode, read."""
    name: str                                    # of its episode
    step: Step
    command: Command
    before: View
    after: View

    def group(self) -> str:
        """lamp | made | two | plain: what kind of sentence the step could fulfil."""
        if self.command.verb != "move":
            return "lamp"
        if set(tags_of(self.before.holding)) & set(MADE):
            return "made"
        return "two" if kind_of(self.command.thing) in map(kind_of, self.before.things) else "plain"


def counterfactuals(episodes: list[Episode], count: int, rng: np.random.Generator) -> list[Episode]:
    """At most `count` one-step episodes: a recorded step that may end an episode, under a sentence that it
    fulfils (about 45 %) or of which it breaks one constraint. The label names that one: object | receptacle |
    state | count | kind; `many`: more than one.

    No (state, sentence) occurs twice, and none as it was played. Fewer than `count` come back where the pages
    do not offer more."""
    groups: dict[str, list[Judged]] = {}         # each drawn as often: steps with a state or a lamp are few
    for judged in _judged_steps(episodes):
        groups.setdefault(judged.group(), []).append(judged)
    if not groups:
        return []
    used = {(step.state, episode.task.text) for episode in episodes for step in episode.steps}
    labels = {"none": FULFILLED} | {name: (1 - FULFILLED) * share for name, share in BREAKABLE.items()}
    held_in, results = _held_in(episodes), []
    for _ in range(count):
        broken = str(rng.choice(list(labels), p=list(labels.values())))
        for _ in range(ATTEMPTS):
            group = groups[str(rng.choice(list(groups)))]
            judged = group[rng.integers(len(group))]
            wishes = [wish for wish in _wishes(judged, broken, held_in, rng) if _breaks(wish, judged, broken)]
            if not wishes:
                continue
            wish = wishes[rng.integers(len(wishes))]
            sentence = str(rng.choice(TEMPLATES[wish.kind])).format(thing=wish.thing, place=wish.place)
            if (judged.step.state, sentence) not in used:
                used.add((judged.step.state, sentence))
                results.append(_counterfactual(judged, sentence, broken, len(results)))
                break
    return results


def _judged_steps(episodes: list[Episode]) -> list[Judged]:
    """Each (state, action) that may end an episode, once."""
    found: dict[tuple[str, str], Judged] = {}
    for episode in episodes:
        for step in episode.steps:
            if read := read_step(step):
                found[step.state, step.action] = Judged(episode.id, step, *read)
    return list(found.values())


def _counterfactual(judged: Judged, sentence: str, broken: str, number: int) -> Episode:
    success, name = broken == "none", f"{judged.name}-counterfactual-{number}"
    step = replace(judged.step, reward=float(success), done=success)
    task = Task(id=name, text=sentence, env="alfworld", start=step.state)
    step.reasoning, step.reward_reasoning = explain(task, [], step)
    return Episode(
        id=name, task=task, steps=[step], source="counterfactual", label=broken, raw_score=float(success),
        stop=StopReason.SUCCESS if success else StopReason.STEP_LIMIT,
    )


def _held_in(episodes: list[Episode]) -> dict[str, list[str]]:
    """Kind of receptacle -> kinds of things that the pages showed there, lamps left out."""
    held: dict[str, set[str]] = {}
    for episode in episodes:
        for step in episode.steps:
            if (view := read_view(step.next_state)) and view.place:
                held.setdefault(kind_of(view.place), set()).update(map(kind_of, view.things))
    return {place: sorted(things - set(LAMPS)) for place, things in sorted(held.items())}


def _wishes(
    judged: Judged, broken: str, held_in: dict[str, list[str]], rng: np.random.Generator
) -> list[Wanted]:
    """Sentences that a step fulfils, or that break what `broken` names and, mostly, nothing else (`_breaks`
    decides)."""
    if broken == "many":
        wishes = []
        for place in map(str, rng.permutation(list(held_in))[:4]):
            if held_in[place]:
                thing = str(rng.choice(held_in[place]))
                kinds = ["pick", "two", *[kind for kind in MADE if thing in MAKEABLE[kind]]]
                wishes.append(Wanted(str(rng.choice(kinds)), thing, place))
        return wishes
    at = kind_of(judged.before.place)
    thing = kind_of(judged.command.thing if judged.command.verb == "move" else judged.after.holding)
    here = sorted(set(map(kind_of, judged.before.things)) - {thing, *LAMPS})
    others = [kind for kind in [*here, *map(str, rng.permutation(held_in.get(at, []))[:3])] if kind != thing]
    if judged.command.verb == "move":
        return _move_wishes(judged, thing, others, held_in)[broken]
    lit = {kind_of(lamp) for lamp in judged.after.things if "lit" in tags_of(lamp)}
    on, off = [lamp for lamp in LAMPS if lamp in lit], [lamp for lamp in LAMPS if lamp not in lit]
    return {
        "none": [Wanted("look", thing, lamp) for lamp in on if thing],
        "object": [Wanted("look", other, lamp) for other in others for lamp in on],
        "receptacle": [Wanted("look", thing, lamp) for lamp in off if thing],
        "kind": [Wanted("pick", thing or str(rng.choice(others or ["book"])), at or "desk")],
    }.get(broken, [])


def _move_wishes(
    judged: Judged, thing: str, others: list[str], held_in: dict[str, list[str]]
) -> dict[str, list[Wanted]]:
    at, tags = kind_of(judged.before.place), tags_of(judged.before.holding)
    two = ["two"] if thing in map(kind_of, judged.before.things) else []
    fits = ["pick", *[tag for tag in tags if tag in MADE], *two]
    able = [(kind, other) for kind in fits for other in others if other in MAKEABLE.get(kind, others)]
    elsewhere = [place for place, things in held_in.items() if thing in things and place != at]
    return {
        "none": [Wanted(kind, thing, at) for kind in [*fits, *fits[1:]]],
        "object": [Wanted(kind, other, at) for kind, other in able],
        "receptacle": [Wanted(kind, thing, place) for kind in fits for place in elsewhere],
        "state": [Wanted(kind, thing, at) for kind in MADE if kind not in tags and thing in MAKEABLE[kind]],
        "count": [Wanted("two", thing, at)],
        "kind": [Wanted("look", thing, LAMPS[0])],
    }


def _breaks(wish: Wanted, judged: Judged, broken: str) -> bool:
    """Whether just what `broken` names is not as a sentence wants it; a sentence of another kind may miss
    more."""
    missed = [what for what, _, met in checks(wish, judged.command, judged.before, judged.after) if not met]
    if broken == "kind":
        return bool(missed)
    if broken == "many":
        return len(missed) > 1
    return missed == {"none": [], "object": [wish.thing], "receptacle": [wish.place], "state": [wish.kind],
                      "count": [f"another {wish.thing}"]}[broken]
