"""The rule-based teacher for ALFWorld: one line of reasoning for a transition, from its pages and what the engine answered.

A trace states facts first and the verdict last, because a small model can only conclude from what it has already written: a thing is looked up among the
things of the page before it is taken, and a task is checked one constraint after the other. The facts are those a page shows; where the engine knew more
(a place beside this one, a thing that does not fit), the outcome says so. `check_trace` holds a trace against its outcome.
"""
from __future__ import annotations

import re

from dreamgym.envs.alfworld import text as text
from dreamgym.envs.alfworld.text import Command, View, Wanted, kind_of, name_of

SAME, SUCCESS, NOT_DONE = "so the same page", "so success", "so not done"
REACH = "within reach"                           # of a place beside this one, which the page does not show


def explain(task_text: str, history: list[str], state: str, action: str, next_state: str, reward: float) -> str:
    """The reasoning for one real transition; history = the earlier states of the episode. '' when a page is not in the abstract form."""
    before, after, command = text.read_view(state), text.read_view(next_state), text.read_action(action)
    if before is None or after is None:
        return ""
    wanted = text.read_task(task_text) if text.readable(task_text) else None
    changed = next_state != state
    if command is None:
        facts, verdict = ["not a command"], ""
    elif command.verb in ("look", "inventory", "examine"):
        facts, verdict = ["only looks"], ""
    else:
        facts, verdict = _FACTS[command.verb](command, before, after, changed, history, state, wanted)
    parts = [" ; ".join(facts) + (f" so {verdict}" if verdict and changed else "")]
    if wanted and command and (reward or (changed and text.judged(state, action))):
        parts.append(_check(wanted, command, state, action, after, bool(reward)))
    elif reward:
        parts[0] += f" {SUCCESS}"
    if not changed and not reward:
        parts[0] += f" {SAME}"
    if wanted and not reward:
        parts.append(f"next {stage(wanted, next_state)}")
    return " ; ".join(parts)


def stage(wanted: Wanted, state: str) -> str:
    """How far the task is, as far as a page shows it: what is to be done next, such as 'find apple' or 'heat it'."""
    view = text.read_view(state)
    held = kind_of(view.holding)
    if held == wanted.thing:
        if wanted.kind == "look":
            return f"use {wanted.place}"
        if wanted.kind in text.TOOL and wanted.kind not in view.holding.split()[:-2]:
            return f"{text.TOOL[wanted.kind][0]} it"
        return f"put it in {wanted.place}"
    if held:
        return "put it away"
    here = wanted.thing in map(kind_of, view.things)
    if wanted.kind == "two" and kind_of(view.place) == wanted.place and here:
        return f"find another {wanted.thing}"
    return f"{'take' if here else 'find'} {wanted.thing}"


# ---- the facts of each command: (facts, what then is so); the verdict counts only where the page changed ----------------------------------------

def _go(command: Command, before: View, after: View, changed: bool, history: list[str], state: str, wanted: Wanted | None):
    place = command.place
    if not changed:
        rooms = [view.room for page in [*history, state] if (view := text.read_view(page)) and view.room]
        absent = place != before.place and not (rooms and place in rooms[0])
        return [f"{place} is not in the room" if absent else f"already at {place}"], ""
    if text.determined(history, state, f"go to {place}"):
        return [f"{place} is known"], ""
    return ([f"{place} is new and closed"] if after.opened is False else [f"{place} is new", *_shown(wanted, after)]), ""


def _open(command: Command, before: View, after: View, changed: bool, history: list[str], state: str, wanted: Wanted | None):
    place, facts = command.place, []
    if before.place != place:
        facts.append(f"at {place} {REACH if changed else 'no'}")
        if not changed:
            return facts, ""
    if not changed:
        return [f"{place} is closed {_yes(before.place == place and before.opened is False)}"], ""
    if any(view.opened is not False for page in history if (view := text.read_view(page)) and view.place == place):
        return [*facts, f"{place} is closed yes and known"], ""
    return [*facts, f"{place} is closed yes and new", *_shown(wanted, after)], ""


def _close(command: Command, before: View, after: View, changed: bool, *_):
    if before.place != command.place:
        return [f"at {command.place} {REACH if changed else 'no'}"], "it is closed"
    return [f"{command.place} is open {_yes(before.opened is True)}"], "it is closed"


def _take(command: Command, before: View, after: View, changed: bool, *_):
    names = [name_of(thing) for thing in before.things]
    rows = [("hold nothing", _held(before), not before.holding), _at(command.place, before)]
    if before.place == command.place and before.opened is False:
        rows.append(("open", "closed", False))
    facts = _until_no([*rows, _look_for(command.thing, before)], changed)
    if command.thing in names and not changed and all(met for _, _, met in rows):
        facts.append("can be taken no")
    return facts, "it is taken"


def _treat(command: Command, before: View, after: View, changed: bool, *_):
    tool, result = text.TREATED[command.verb]
    at = kind_of(before.place) or "room"
    rows = [(f"hold {command.thing}", _held(before), name_of(before.holding) == command.thing), (f"at {tool}", at, before.place == command.place and at == tool)]
    facts = _until_no(rows, changed)
    if changed or all(met for _, _, met in rows):
        already = result in before.holding.split()[:-2]
        facts.append(f"{result} already" if already else f"can be {result} {_yes(changed)}")
    return facts, f"it is {result}"


def _move(command: Command, before: View, after: View, changed: bool, *_):
    rows = [(f"hold {command.thing}", _held(before), name_of(before.holding) == command.thing), _at(command.place, before)]
    if before.place == command.place and before.opened is not None:
        rows.append(("open", "open" if before.opened else "closed", before.opened))
    facts = _until_no(rows, changed)
    if changed or all(met for _, _, met in rows):
        facts.append(f"fits {_yes(changed)}")
    return facts, "it is put there"


def _use(command: Command, before: View, after: View, changed: bool, *_):
    here = [thing for thing in before.things if name_of(thing) == command.thing]
    facts = _until_no([_look_for(command.thing, before)], changed)
    if here and not changed:
        facts.append("on already" if here[0].startswith("lit ") else "is a lamp no")
    return facts, "it is on"


def _slice(command: Command, before: View, after: View, changed: bool, *_):
    here = [thing for thing in before.things if name_of(thing) == command.thing]
    knife = kind_of(command.place)
    rows = [(f"hold {command.place}", _held(before), name_of(before.holding) == command.place), ("knife", knife, knife in ("knife", "butterknife")),
            _look_for(command.thing, before)]
    facts = _until_no(rows, changed)
    if changed or all(met for _, _, met in rows):
        already = bool(here) and "sliced" in here[0].split()
        facts.append("sliced already" if already else f"can be sliced {_yes(changed)}")
    return facts, "it is sliced"


_FACTS = {"go": _go, "open": _open, "close": _close, "take": _take, "move": _move, "use": _use, "slice": _slice, **dict.fromkeys(text.TREATED, _treat)}


def _held(view: View) -> str:
    return name_of(view.holding) or text.NOTHING


def _at(place: str, view: View) -> tuple[str, str, bool]:
    return f"at {place}", view.place or "room", view.place == place


def _look_for(thing: str, view: View) -> tuple[str, str, bool]:
    here = thing in map(name_of, view.things)
    return f"look for {thing}", thing if here else "none", here


def _until_no(rows: list[tuple[str, str, bool]], changed: bool) -> list[str]:
    """The rows (what is needed, what is found, met) up to the first that is not met. When the engine did it all the same, what was not met here was within
    reach. What is found is written before the verdict: a small model says yes to anything that it has not just written down."""
    facts = []
    for what, found, met in rows:
        facts.append(f"{what} : {found} {'yes' if met else REACH if changed else 'no'}")
        if not met and not changed:
            break
    return facts


def _shown(wanted: Wanted | None, after: View) -> list[str]:
    """Whether a page that is seen for the first time shows what the task wants; said before the page is written."""
    if wanted is None:
        return []
    kinds = [wanted.thing, wanted.place] if wanted.kind == "look" else [wanted.thing]
    return [" ".join(f"{kind} {_yes(kind in map(kind_of, after.things))}" for kind in kinds)]


def _check(wanted: Wanted, command: Command, state: str, action: str, after: View, success: bool) -> str:
    """The task's constraints against a judged action, then the verdict; against the page it led to where the page before does not show them all."""
    if text.judged(state, action):
        rows = text.checks(wanted, state, action)
    else:
        lamps = any(thing.startswith("lit ") and kind_of(thing) == wanted.place for thing in after.things)
        rows = [(wanted.thing, kind_of(after.holding) or text.NOTHING, kind_of(after.holding) == wanted.thing), (wanted.place, "on" if lamps else "off", lamps)]
        rows = rows if wanted.kind == "look" else [(wanted.place, command.verb, False)]
    facts = " ".join(f"{what} : {found} {_yes(met)}" for what, found, met in rows)
    if success != all(met for _, _, met in rows):
        facts += f" ; {REACH} {_yes(success)}"
    return f"check {facts} {SUCCESS if success else NOT_DONE}"


def _yes(met: bool) -> str:
    return "yes" if met else "no"


# ---- a trace against its outcome ---------------------------------------------------------------------------------------------------------------

def check_trace(trace: str, state: str, action: str, next_state: str, reward: float) -> bool:
    """Whether the verdict words of a trace agree with what happened."""
    before, after, command = text.read_view(state), text.read_view(next_state), text.read_action(action)
    if not trace or before is None or after is None:
        return False
    words, held = f" {trace} ", name_of(after.holding)
    tags = after.holding.split()[:-2]
    agree = [
        (f" {SAME} " in words) == (next_state == state and not reward),
        (f" {SUCCESS} " in words) == (reward == 1),
        f" {NOT_DONE} " not in words or (not reward and next_state != state),
        not reward or " next " not in words,
        (" so it is taken " in words) == (bool(command) and command.verb == "take" and not before.holding and held == command.thing),
        (" so it is put there " in words) == (bool(command) and command.verb == "move" and bool(before.holding) and not held),
        " so it is on " not in words or f"lit {command.thing}" in after.things,
        " so it is closed " not in words or after.opened is False,
        " is new and closed " not in words or after.opened is False,
        " is closed yes and " not in words or after.opened is True,
        *(f" so it is {tag} " not in words or tag in tags for tag in text.MADE),
        " so it is sliced " not in words or any("sliced" in thing.split() and name_of(thing) == command.thing for thing in after.things)]
    if seen := re.search(r" new ; ((?:[a-z]+ (?:yes|no) )+)", words):
        kinds, said = seen[1].split()[::2], seen[1].split()[1::2]
        agree += [after.opened is not False, *((kind in map(kind_of, after.things)) == (answer == "yes") for kind, answer in zip(kinds, said))]
    if done := re.search(r" next (?:take|find|find another) ([a-z]+) ", words):
        agree.append(not held and (" next take " not in words or done[1] in map(kind_of, after.things)))
    return all(agree)
