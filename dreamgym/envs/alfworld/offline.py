"""Offline data of ALFWorld: episodes of the rule-based players with the teacher's traces, and judged steps relabelled with other sentences.

collect.py calls `play` by the shares of MIX, and `relabelled`. Relabelling makes the reward a judgement: the same real page under a sentence it fulfils, or
under one that it misses by a single constraint; without it the reward would follow from the task alone, because only the task that is played is ever won.
"""
from __future__ import annotations

from types import MappingProxyType

import numpy as np

from dreamgym.envs.alfworld import text as text, play_explained
from dreamgym.envs.alfworld.scripted import make_player
from dreamgym.envs.alfworld.teacher import check_trace, explain
from dreamgym.envs.alfworld.text import LAMPS, MADE, Wanted, kind_of
from dreamgym.episode import Episode, Step, Task

MIX = MappingProxyType({"oracle": 0.08, "searcher": 0.08, "imperfect": 0.50, "random": 0.06, "prober": 0.28})      # shares of episodes
FULFILLED = 0.45                                 # of the relabelled steps; the rest breaks one constraint, by these shares
# "many": an unrelated sentence. Easy, but without it a row holds so few "no" that a small model says "yes" to every constraint
BREAKABLE = MappingProxyType({"object": 0.22, "receptacle": 0.16, "state": 0.12, "count": 0.14, "kind": 0.12, "many": 0.24})
ATTEMPTS = 40                                    # steps tried for one relabelled episode
TEMPLATES = MappingProxyType({                   # the sentences of alfworld 0.4.2
    "pick": ("put a {thing} in {place}", "put some {thing} on {place}"), "two": ("put two {thing} in {place}", "find two {thing} and put them in {place}"),
    "clean": ("put a clean {thing} in {place}", "clean some {thing} and put it in {place}"), "hot": ("put a hot {thing} in {place}", "heat some {thing} and put it in {place}"),
    "cool": ("put a cool {thing} in {place}", "cool some {thing} and put it in {place}"), "look": ("look at {thing} under the {place}", "examine the {thing} with the {place}")})
# What a sentence may ask to clean, heat or cool (alfworld's constants); a near miss that no game could ask for would be no near miss
_FOOD = "apple egg potato tomato"
MAKEABLE = {"clean": f"{_FOOD} bowl butterknife cloth cup dishsponge fork kettle knife ladle lettuce mug pan plate pot soapbar spatula spoon".split(),
            "hot": f"{_FOOD} bread cup mug plate".split(), "cool": f"{_FOOD} bread bowl cup lettuce mug pan plate pot winebottle".split()}


def play(env, task: Task, kind: str, rng: np.random.Generator, name: str) -> Episode:
    """One real episode of a rule-based player (`kind`: one of MIX), each step explained. The environment must play in this process: two players read its engine."""
    session = env.start([task])[0]
    return play_explained(env, session, kind, make_player(kind, task.text, rng, session), explain, name)


def explain_recorded(task_text: str, history: list[str], step: Step) -> str:
    """The trace of a step that somebody else recorded; '' where the rules would have expected another outcome. history: the earlier states of its episode.

    The engine may refuse what a page seems to allow (a pot does not fit into the microwave), but it opens and closes what can be, and does nothing that the
    page forbids; a task is fulfilled where the rules say so."""
    kind, changed = text.action_type(step.state, step.action), step.next_state != step.state
    if kind == "refused" or not changed:
        expected = not changed and not step.reward and kind not in ("open", "close")
    else:
        expected = kind != "look" and bool(text.rule_success(task_text, step.state, step.action)) == (step.reward == 1)
    if not expected or not text.possible(step.state, step.action, step.next_state, step.reward):
        return ""
    trace = explain(task_text, history, step.state, step.action, step.next_state, step.reward)
    return trace if check_trace(trace, step.state, step.action, step.next_state, step.reward) else ""


# ---- relabelling -------------------------------------------------------------------------------------------------------------------------------

def relabelled(env, episodes: list[Episode], count: int, rng: np.random.Generator, prefix: str, forbidden: set[str], seen: set[str]) -> list[Episode]:
    """At most `count` one-step episodes: a judged real step of `episodes`, from a state not in `seen` (which grows by them), under a sentence not in `forbidden` that it fulfils
    (about 45 %) or of which it breaks one constraint; info["broken"] = none | object | receptacle | state | count | kind, or many: more than one.

    No (state, sentence) occurs twice, and none as it was played. `next_state` is as recorded, also where the sentence is fulfilled. Fewer than `count` come
    back where the pages do not offer more."""
    pages = {(step.state, step.action): step for episode in episodes for step in episode.steps
             if step.state not in seen and step.next_state != step.state and text.judged(step.state, step.action)}
    if not pages or not count:
        return []
    groups: dict[str, list[Step]] = {}           # steps with something to say are few: drawn as often as the plain ones
    for step in pages.values():
        groups.setdefault(_group(step), []).append(step)
    seen |= {state for state, _ in pages}
    used = {(step.state, episode.task.text) for episode in episodes for step in episode.steps}
    held_in = _held_in(episodes)
    results: list[Episode] = []
    for _ in range(count):
        broken = "none" if rng.random() < FULFILLED else str(rng.choice(list(BREAKABLE), p=list(BREAKABLE.values())))
        for _ in range(ATTEMPTS):
            group = groups[str(rng.choice(list(groups)))]
            step = group[rng.integers(len(group))]
            wishes = [wish for wish in _wishes(step, broken, held_in, rng) if _breaks(wish, step, broken)]
            if not wishes:
                continue
            wish = wishes[rng.integers(len(wishes))]
            sentence = str(rng.choice(TEMPLATES[wish.kind])).format(thing=wish.thing, place=wish.place)
            if sentence not in forbidden and (step.state, sentence) not in used:
                used.add((step.state, sentence))
                results.append(_relabelled(step, sentence, broken, f"{prefix}-{len(results)}"))
                break
    return results


def _relabelled(step: Step, sentence: str, broken: str, name: str) -> Episode:
    success = bool(text.rule_success(sentence, step.state, step.action))
    assert success == (broken == "none"), (sentence, step.state, step.action, broken)
    reasoning = explain(sentence, [], step.state, step.action, step.next_state, float(success))
    only = Step(step.state, step.action, step.next_state, float(success), success, step.grounded, reasoning, step.valid, {"broken": broken})
    return Episode(name, Task(name, sentence, "alfworld", step.state), [only], source="relabelled", stop="success" if success else "step_limit", score=float(success))


def _held_in(episodes: list[Episode]) -> dict[str, list[str]]:
    """Kind of receptacle -> kinds of things that the pages showed there, lamps left out."""
    held: dict[str, set[str]] = {}
    for episode in episodes:
        for step in episode.steps:
            if (view := text.read_view(step.next_state)) and view.place:
                held.setdefault(kind_of(view.place), set()).update(map(kind_of, view.things))
    return {place: sorted(things - set(LAMPS)) for place, things in sorted(held.items())}


def _group(step: Step) -> str:
    """lamp | made | two | plain: what kind of sentence a step could fulfil."""
    command, view = text.read_action(step.action), text.read_view(step.state)
    if command.verb != "move":
        return "lamp"
    if set(view.holding.split()[:-2]) & set(MADE):
        return "made"
    return "two" if kind_of(command.thing) in map(kind_of, view.things) else "plain"


def _wishes(step: Step, broken: str, held_in: dict[str, list[str]], rng: np.random.Generator) -> list[Wanted]:
    """Sentences that a step fulfils, or that break what `broken` names and, mostly, nothing else (`_breaks` decides)."""
    if broken == "many":
        places = [str(place) for place in rng.permutation(list(held_in))[:4] if held_in[str(place)]]
        return [Wanted(str(rng.choice(["pick", "two", *[kind for kind in MADE if thing in MAKEABLE[kind]]])), thing, place)
                for place in places for thing in [str(rng.choice(held_in[place]))]]
    command, view = text.read_action(step.action), text.read_view(step.state)
    at, tags = kind_of(view.place), view.holding.split()[:-2]
    thing = kind_of(command.thing if command.verb == "take" else view.holding)
    here = sorted(set(map(kind_of, view.things)) - {thing, *LAMPS})
    others = [kind for kind in [*here, *map(str, rng.permutation(held_in.get(at, []))[:3])] if kind != thing]      # what may well be there
    if command.verb != "move":
        lamps = [kind_of(lamp) for lamp in view.things if kind_of(lamp) in LAMPS]
        if broken == "none":
            return [Wanted("look", thing, lamp) for lamp in lamps if thing]
        missing = [Wanted("look", other, lamp) for other in others for lamp in lamps]
        wrong = [Wanted(kind, thing or str(rng.choice(others or ["book"])), place) for kind, place in [*(("look", lamp) for lamp in LAMPS if lamp not in lamps), ("pick", at)]]
        return missing + wrong if broken == "kind" else []
    fits = ["pick", *[tag for tag in tags if tag in MADE], *(["two"] if thing in map(kind_of, view.things) else [])]
    return {
        "none": [Wanted(kind, thing, at) for kind in [*fits, *fits[1:]]],
        "object": [Wanted(kind, other, at) for kind in fits for other in others if other in MAKEABLE.get(kind, others)],
        "receptacle": [Wanted(kind, thing, place) for kind in fits for place, things in held_in.items() if thing in things and place != at],
        "state": [Wanted(kind, thing, at) for kind in MADE if kind not in tags and thing in MAKEABLE[kind]],
        "count": [Wanted("two", thing, at)],
        "kind": [Wanted("look", thing, lamp) for lamp in LAMPS[:1]],
    }[broken]


def _breaks(wish: Wanted, step: Step, broken: str) -> bool:
    """Whether just what `broken` names is not as a sentence wants it; a sentence of another kind may miss more."""
    missed = [what for what, _, met in text.checks(wish, step.state, step.action) if not met]
    expected = {"none": [], "object": [wish.thing], "receptacle": [wish.place], "state": [wish.kind], "count": [f"another {wish.thing}"], "kind": missed or None}
    return len(missed) > 1 if broken == "many" else missed == expected[broken]
