"""ALFWorld as text: the mapping from the engine's feedback to states, its readers, and the audit, against the
engine's hidden facts."""
from __future__ import annotations

import copy
import random
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from alfworld_official import page, random_command

from dreamgym.envs.alfworld import text
from dreamgym.envs.alfworld.audit import ALFWorldAudit
from dreamgym.envs.alfworld.env import ALFWorld
from dreamgym.episode import Step, Task, verb_of

AUDIT = ALFWorldAudit()
TAG_FACTS = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "istoggled": "lit", "issliced": "sliced"}
KEPT = (*TAG_FACTS, "inreceptacle", "holds", "opened", "atlocation")


# ---- the mapping, on the engine's own sentences ----

def states_after(*feedbacks: str) -> list[str]:
    memory, states = text.ObservationMemory(), []
    for feedback in feedbacks:
        memory.read(feedback)
        states.append(memory.state())
    return states


ROOM = ("You are in the middle of a room. Looking quickly around you, you see a drawer 10, a drawer 2, "
        "a drawer 1, a desk 1, and a microwave 1.")


def test_mapping_of_each_sentence():
    """A changed state form, which every trained model and every imported log depends on."""
    alarm, lit = "at desk 1: | alarmclock 1 |", "at desk 1: | alarmclock 1 | lit desklamp 1 |"
    rows = [
        (ROOM, "room: | desk 1 | drawer 1 | drawer 2 | drawer 10 | microwave 1 | holding: nothing"),
        ("You arrive at drawer 2. The drawer 2 is closed.", "at drawer 2 closed | holding: nothing"),
        ("You open the drawer 2. The drawer 2 is open. In it, you see a pen 2, and a pen 1.",
         "at drawer 2 open: | pen 2 | pen 1 | holding: nothing"),
        ("You pick up the pen 1 from the drawer 2.", "at drawer 2 open: | pen 2 | holding: pen 1"),
        ("You close the drawer 2.", "at drawer 2 closed | holding: pen 1"),
        ("You arrive at desk 1. On the desk 1, you see a alarmclock 1, a desklamp 1, and a mug 3.",
         f"{alarm} desklamp 1 | mug 3 | holding: pen 1"),
        ("You turn on the desklamp 1.", f"{lit} mug 3 | holding: pen 1"),
        ("You move the pen 1 to the desk 1.", f"{lit} mug 3 | pen 1 | holding: nothing"),
        ("You pick up the mug 3 from the desk 1.", f"{lit} pen 1 | holding: mug 3"),
        ("Nothing happens.", f"{lit} pen 1 | holding: mug 3"),
        ("You heat the mug 3 using the microwave 1.", f"{lit} pen 1 | holding: hot mug 3"),
        ("You clean the mug 3 using the sinkbasin 1.", f"{lit} pen 1 | holding: clean hot mug 3"),
        ("You cool the mug 3 using the fridge 1.", f"{lit} pen 1 | holding: clean cool mug 3"),
        ("You sliced the pen 1 with the knife 1.", f"{lit} sliced pen 1 | holding: clean cool mug 3"),
        ("You arrive at drawer 1. On the drawer 1, you see nothing.",
         "at drawer 1: | nothing | holding: clean cool mug 3"),
    ]
    assert states_after(*(feedback for feedback, _ in rows)) == [page(state) for _, state in rows]
    assert text.ObservationMemory().state(["look"]) == "room:\nnothing\nholding: nothing\ncommands:\nlook"


@pytest.mark.parametrize("feedback", [
    "You are facing the desk 1, and drawer 1. Next to it, you see a mug 1.",
    "On the drawer 1, you see a mug 1.", ROOM[:-1], "", "This is a hot and clean mug 1.",
    "holding: mug 1", "You put the pen 1 in/on the desk 1.", "At desk 1", "You arrive at desk 2"])
def test_looking_and_unknown_sentences_note_nothing(feedback):
    """A neighbour's contents, a description, or text of another engine that is taken for the page."""
    before = "You arrive at desk 1. On the desk 1, you see a pen 1."
    states = states_after(before, "You pick up the pen 1 from the desk 1.", feedback)
    assert states[-1] == page("at desk 1: | nothing | holding: pen 1")


def test_a_thing_taken_from_one_of_its_two_places_stays_in_the_other():
    """A page that forgets what the engine still lists."""
    states = states_after(
        "You arrive at stoveburner 1. On the stoveburner 1, you see a pan 1.",
        "You arrive at stoveburner 2. On the stoveburner 2, you see a pan 1.",
        "You pick up the pan 1 from the stoveburner 1.",
        "You move the pan 1 to the stoveburner 2.")
    there = "at stoveburner 2: | pan 1 | holding: "
    assert states[2:] == [page(there + "pan 1"), page(there + "nothing")]


# ---- readers and audit, by hand ----

@pytest.mark.parametrize("state", [
    "no state", "", "holding: nothing", "room:", "room: | holding: nothing", "at desk 1 | holding: nothing",
    "at desk 1: | holding: nothing", "at desk 1: | mug 1", "at desk 1 closed | mug 1 | holding: nothing",
    "at desk 1: | a mug | holding: nothing", "at desk 1: mug 1 | holding: nothing",
    "room: | hot desk 1 | holding: nothing", "at desk 1: | mug 1 | holding:",
    "at desk 1: | mug 1 | holding: nothing | look", "at desk 1: | nothing | mug 1 | holding: nothing",
    "at desk 1: | mug 1 | holding: nothing | commands: look"])
def test_what_is_no_state(state):
    assert text.read_view(page(state)) is None


# task / place: things there + what is held (-: nothing) / action / the same afterwards -> verdict
SHORT = {"put": "move mug 1 to desk 1", "use": "use desklamp 1", "take": "take mug 1 from desk 1",
         "go": "go to desk 1"}
VERDICTS = """
put a mug in desk / desk: - + mug 1 / put / desk: mug 1 + - -> True
put a mug in desk / bed: - + mug 1 / move mug 1 to bed 1 / bed: mug 1 + - -> False
put some mug on desk / desk: - + cup 1 / move cup 1 to desk 1 / desk: cup 1 + - -> False
put a mug in desk / desk: mug 1 + - / take / desk: - + mug 1 -> None
put a mug in desk / desk: - + mug 1 / put / desk: - + mug 1 -> None
clean some mug and put it in desk / desk: - + clean hot mug 1 / put / desk: clean hot mug 1 + - -> True
cool some mug and put it in desk / desk: - + hot mug 1 / put / desk: hot mug 1 + - -> False
put two mug in desk / desk: mug 2 + mug 1 / put / desk: mug 2, mug 1 + - -> True
find two mug and put them in desk / desk: cup 2 + mug 1 / put / desk: cup 2, mug 1 + - -> False
look at mug under the desklamp / desk: desklamp 1 + cup 1 / use / desk: lit desklamp 1 + cup 1 -> False
examine mug with the desklamp / desk: mug 1, lit desklamp 1 + - / take / desk: lit desklamp 1 + mug 1 -> True
examine mug with the desklamp / desk: mug 1, lit floorlamp 1 + - / take / desk: lit floorlamp 1 + mug 1 -> False
look at mug under the desklamp / bed: - + mug 1 / go / desk: desklamp 1 + mug 1 -> None
buy a mug / desk: - + mug 1 / put / desk: mug 1 + - -> None"""


@pytest.mark.parametrize("row", VERDICTS.strip().splitlines())
def test_success_by_rule(row):
    line, _, verdict = row.partition(" -> ")
    task, before, action, after = line.split(" / ")
    states = [re.sub(r"(\w+): (.*) \+ (.*)", r"at \1 1: | \2 | holding: \3", short.replace("-", "nothing"))
              .replace(", ", " | ") for short in (before, after)]
    action = SHORT.get(action, action)
    found = AUDIT.success(Task(id="t", text=task), page(states[0]), action, page(states[1]))
    assert str(found) == verdict


@pytest.mark.parametrize("sentence", [
    "", "put a mug", "put mug in desk", "put a very clean mug in desk", "look at the mug",
    "find three mug and put them in desk", "put a mug in desk and win",
    "put a mug in desk" * 99])
def test_sentences_that_are_no_task(sentence):
    assert text.read_task(sentence) is None


# ---- walks in the real engine ----

@dataclass
class Moment:
    """One step of a walk, with the hidden facts after it and what was observed."""
    task: Task
    step: Step
    admissible: bool
    facts: dict[str, set[tuple]]
    memory: text.ObservationMemory
    home: Home

    def __post_init__(self):
        self.command, self.kind = text.read_action(self.step.action), verb_of(self.step.action)
        self.before, self.view = text.read_view(self.step.state), text.read_view(self.step.next_state)

    @property
    def neighbour(self) -> bool:
        """The action names a place, or a lamp, that is not on the page but within reach."""
        if self.command is None or not self.before.place:
            return False
        where = self.home.location
        beside = where.get(self.command.place) == where[self.before.place]
        return self.command.verb == "use" or (self.command.place != self.before.place and beside)


class Home:
    """What never changes in a game, and what is odd about it."""

    def __init__(self, facts: frozenset):
        self.location = {fact[1]: fact[2] for fact in facts if fact[0] == "receptacleatlocation"}
        self.openable = {fact[1] for fact in facts if fact[0] == "openable"}
        lying = Counter(fact[1] for fact in facts if fact[0] == "inreceptacle")
        self.doubled, self.things = {thing for thing, count in lying.items() if count > 1}, sorted(lying)
        self.cold = {fact[1] for fact in facts if fact[0] == "iscool"}


def random_action(rng: random.Random, state: str, commands: list[str], home: Home) -> str:
    """An admissible command of a random kind, or a command about what is here that may not be."""
    if rng.random() < 0.6:
        return random_command(rng, commands)
    view, places = text.read_view(state), sorted(home.location)
    things = [*view.names, *filter(None, [view.held]), rng.choice(home.things)]
    thing, other = rng.choice(things), rng.choice(things)
    place = rng.choice([view.place or places[0]] * 2 + [rng.choice(places)])
    return rng.choice([
        f"go to {place}", f"open {place}", f"close {place}", f"take {thing} from {place}",
        f"move {thing} to {place}", f"clean {thing} with {place}", f"heat {thing} with {place}",
        f"cool {thing} with {place}", f"use {thing}", f"slice {thing} with {other}", f"examine {thing}",
        f"examine {place}", "help"])


def walk(env: ALFWorld, task: Task, player: str, mix: float, seed: int) -> list[Moment]:
    """One episode of a player whose actions are random with probability `mix`."""
    rng, [session] = random.Random(seed), env.reset([task])
    engine, moments, home = session.inner.engine, [], Home(session.inner.engine.facts)
    act = env.players()[player].make(session, np.random.default_rng(seed))
    while len(moments) < env.max_steps and not (moments and moments[-1].step.done):
        state, commands = session.state, engine.admissible
        action = random_action(rng, state, commands, home) if rng.random() < mix else act(state)
        [result] = env.step([session], [action])
        facts = {name: {fact[1:] for fact in engine.facts if fact[0] == name} for name in KEPT}
        step = Step(state=state, action=action, next_state=result.state, reward=result.reward,
                    done=result.done)
        memory = copy.deepcopy(session.inner.memory)
        moments.append(Moment(task, step, action in commands, facts, memory, home))
    env.end([session])
    return moments


@pytest.fixture(scope="module")
def walks(alfworlds) -> list[list[Moment]]:
    """Walks in six generated games, and in six official ones where they are; the counts below hold for
    either."""
    plans = [("oracle", 0.0), ("searcher", 0.1), ("imperfect", 0.3), ("imperfect", 0.6), ("searcher", 1.0)]
    return [walk(env, task, player, mix, seed) for env, step in zip(alfworlds.values(), (2, 1))
            for task in env.tasks("train")[::step]
            for seed, (player, mix) in enumerate(plans)]


@pytest.fixture(scope="module")
def moments(walks) -> list[Moment]:
    return [moment for moments in walks for moment in moments]


def test_walks_cover_what_is_claimed(walks, moments):
    """Stops the tests below from passing because nothing happened."""
    kinds = Counter(m.kind for m in moments)
    every = "go open close take move clean heat cool use look help".split()
    assert all(kinds[kind] >= 3 for kind in every), kinds
    assert len({text.read_task(walk[0].task.text).kind for walk in walks if walk[-1].step.reward}) == 6
    assert 0.3 < np.mean([walk[-1].step.reward for walk in walks]) < 0.95


def test_states_tell_the_truth(moments):
    checked = Counter()
    for m in moments:
        view, lying, memory = m.view, m.facts["inreceptacle"], m.memory
        assert {memory.holding} - {""} == {thing for _, thing in m.facts["holds"]}
        assert view.held == memory.holding
        at = {(agent.strip(), place) for agent, place in m.facts["atlocation"]}
        assert not view.place or ("agent1", m.home.location[view.place]) in at
        assert all(is_open == ((place,) in m.facts["opened"]) for place, is_open in memory.opened.items())
        for place, things in memory.contents.items():
            if memory.opened.get(place) is not False:
                assert (place in memory.opened) == (place in m.home.openable)
                assert sorted(things) == sorted(thing for thing, home in lying if home == place)
                checked["contents"] += 1
        if view.place and view.opened is not False:
            assert view.names == memory.contents[view.place]
        for thing in {row[0] for name in TAG_FACTS for row in m.facts[name]} | set(memory.tags):
            true = {tag for name, tag in TAG_FACTS.items() if (thing,) in m.facts[name]}
            assert thing in m.home.cold or memory.tags.get(thing, set()) == true
        for thing in [*view.things, *filter(None, [view.holding])]:
            assert set(text.tags_of(thing)) == memory.tags.get(text.name_of(thing), set())
            checked["tagged"] += bool(text.tags_of(thing))
    assert checked["contents"] > 1000 and checked["tagged"] > 50, checked


def test_refusals_are_the_engines(moments):
    for m in moments:
        if not m.admissible or m.kind in ("look", "inventory", "examine"):
            assert m.step.next_state == m.step.state and not m.step.valid
        elif m.kind in ("go", "open", "close", "take", "move") and not m.neighbour:
            assert m.step.next_state != m.step.state and m.step.valid
            assert AUDIT.action_type(m.step.state, m.step.action) == m.kind


def test_success_by_rule_is_the_engines(moments):
    verdicts = Counter()
    for m in moments:
        step, odd = m.step, m.home.cold | m.home.doubled
        verdict = AUDIT.success(m.task, step.state, step.action, step.next_state)
        if verdict is not None:
            verdicts[verdict] += 1
            assert verdict == bool(step.reward) or {m.command.thing, m.before.held} & odd, (m.task.text, step)
        elif step.reward:
            assert m.neighbour or m.command.thing in odd, (m.task.text, step)
    assert verdicts[True] > 3 and verdicts[False] > 5, verdicts      # fewer without the official games


def test_the_real_environment_does_not_contradict_itself(walks):
    told = Counter()
    for walk in walks:
        steps, doubled = [m.step for m in walk], walk[0].home.doubled
        pages, broken = AUDIT.inconsistencies(steps)
        told["pages"] += pages
        told["in two places" if doubled else "plain"] += broken
        last = next((m.view for m in walk[::-1] if m.view.things), None)
        if last and not doubled:
            elsewhere = page(f"at shelf 99: | {last.things[0]} | holding: nothing")
            moved = Step(state=steps[-1].next_state, action="go to shelf 99", next_state=elsewhere)
            assert AUDIT.inconsistencies([*steps, moved])[1] > broken
    assert told["plain"] == 0 and told["pages"] > 200, told


# ---- fuzz ----

PIECES = [
    *"room:|at |holding: |nothing|commands:|closed| open:|:|, | |desk 1|hot mug 2|clean |lit desklamp 1|"
    "go to |take | from |move | to |use |open |slice | with |look|put a |put two | in |and put them|desk|mug|"
    "reward: 1|; |A".split("|"), "\n", "1" * 5000, "\u0663", "\u00b2", "\x00", "\ud800"]


def test_malformed_text_is_no_exception_and_no_reward():
    """Text of a model, a log or a user that breaks a rule, is paid, or takes minutes to read."""
    rng, paid = random.Random(0), 0
    states = [page(state) for state in (
        "room: | desk 1 | holding: nothing", "at desk 1: | clean mug 1 | lit desklamp 1 | holding: hot cup 1",
        "at desk 1: | clean mug 1 | cup 1 | holding: nothing", "at fridge 1 closed | holding: cup 1",
        "at fridge 1 open: | nothing | holding: cup 1", "no state")]
    actions = ["go to desk 1", "take mug 1 from desk 1", "move cup 1 to desk 1", "use desklamp 1", "look"]
    tasks = ["put a cup in desk", "look at mug under the desklamp"]

    def make(good: list[str]) -> str:
        odd = "".join(rng.choices([*PIECES, *good], k=rng.randint(0, 7)))
        return rng.choice(good) if rng.random() < 0.6 else odd

    for _ in range(2_000):
        state, action, after, task = make(states), make(actions), make(states), make(tasks)
        verdict = AUDIT.success(Task(id="t", text=task), state, action, after)
        paid += verdict is True
        if text.read_view(state) is None or text.read_action(action) is None:
            assert verdict is None
        AUDIT.inconsistencies([Step(state=state, action=action, next_state=after)])
        text.read_task(task)
        memory = text.ObservationMemory()
        for feedback in (after, f"You arrive at desk 1. {after}", f"You are in the middle of a room. {state}",
                         f"You pick up the {action}."):
            memory.read(feedback)
        assert text.read_view(memory.state()) is not None
    assert paid
    many = 100_000
    for long in ("clean " * many, "at desk 1:\n" + "mug 1, " * many, "a 1 " * many, "put a " * many):
        assert text.read_view(long + "\nholding: nothing") is None
        assert text.read_action(long) is None and text.read_task(long) is None
        text.ObservationMemory().read("You arrive at desk 1. On the desk 1, you see " + long)
