"""Scripted players of ALFWorld, the traces of their steps, and counterfactual reward examples."""
import re
from collections import Counter

import numpy as np
import pytest
from alfworld_official import KINDS, needs_packages, page

from dreamgym import offline
from dreamgym.envs.alfworld import relabel, text
from dreamgym.envs.alfworld.scripted import PLAYERS
from dreamgym.envs.base import Session
from dreamgym.episode import (
    Episode, Step, StopReason, Task, check_episode, from_json, to_json)
from dreamgym.prompts import TAGS
from tests.conftest import probed

READERS = ("searcher", "imperfect")  # of states only


@pytest.fixture(scope="module")
def envs(alfworlds):
    return list(alfworlds.values())


@pytest.fixture(scope="module")
def played(envs) -> dict[str, list[Episode]]:
    """An episode of every player, and of the prober, on every game."""
    rng, games = np.random.default_rng(0), [(env, task) for env in envs for task in env.tasks("train")]
    found = {name: [offline.play(env, task, player, rng, f"{task.id}-{name}") for env, task in games]
             for name, player in PLAYERS.items()}
    pairs = [pair for name in ("searcher", "imperfect") for pair in zip(games, found[name])]
    return found | {"prober": [probed(env, before, found["random"], rng) for (env, _), before in pairs]}


@pytest.mark.parametrize("task, state, thought", [
    ("put a mug in desk", "room:\ndesk 1\nholding: nothing", "look for mug"),
    ("put a mug in desk", "at safe 1 closed\nholding: nothing", "look for mug : closed"),
    ("put a mug in desk", "at bed 1:\nbook 1\nhot mug 2\nmug 1\nholding: nothing",
     "look for mug : book 1 book : mug no mug 2 mug : mug yes"),
    ("put a mug in desk", "at bed 1:\nnothing\nholding: nothing", "look for mug : none no"),
    ("put two mug in desk", "at desk 1:\nmug 2\nholding: nothing", "look for mug : at desk : desk yes"),
    ("put a mug in desk", "at bed 1:\nnothing\nholding: book 1", "hold book 1 book : mug no"),
    ("heat some mug and put it in desk", "at microwave 1 closed\nholding: clean mug 1",
     "hold mug 1 mug : mug yes ; hot : clean no ; at microwave : microwave yes ; closed"),
    ("heat some mug and put it in desk", "at bed 1:\nnothing\nholding: hot mug 1",
     "hold mug 1 mug : mug yes ; hot : hot yes ; at bed : desk no"),
    ("look at mug under the desklamp", "at desk 1:\nlit desklamp 1\nholding: mug 1",
     "hold mug 1 mug : mug yes ; look for desklamp : desklamp 1 desklamp : desklamp yes"),
])
def test_players_think_of_what_decides(task, state, thought):
    """A thought that compares with another thing than the task's, looks into what is closed, or calls delivered
    what was delivered already; a mistake that is explained as if it were right."""
    for name in READERS:
        act = PLAYERS[name].make(Session(Task(id="t", text=task), state), np.random.default_rng(0))
        assert act(state).thought == thought


@pytest.fixture(scope="module")
def everything(played) -> list[Episode]:
    return [episode for episodes in played.values() for episode in episodes]


@pytest.fixture(scope="module")
def others(envs, everything) -> list[Episode]:
    made = relabel.counterfactuals(everything, 500, np.random.default_rng(1))
    return [offline.explained(envs[0], episode) for episode in made]


def steps_of(episodes) -> list[tuple[Episode, Step]]:
    return [(episode, step) for episode in episodes for step in episode.steps]


def start(name: str, sentence: str):
    """The player `name` on a task, without an engine."""
    return PLAYERS[name].make(Session(Task(id="t", text=sentence), ""), np.random.default_rng(0))


# ---- players ----

@needs_packages
def test_how_well_each_player_does(played, everything):
    share = {name: np.mean([episode.success for episode in episodes]) for name, episodes in played.items()}
    steps = {name: np.mean([len(episode.steps) for episode in episodes]) for name, episodes in played.items()}
    assert len({text.read_task(episode.task.text).kind for episode in played["searcher"]}) == 6
    assert share["oracle"] == 1 and share["searcher"] >= 0.94 and share["imperfect"] > 0.8, share
    assert share["random"] < 0.3 and share["prober"] > 0.6, share
    assert steps["imperfect"] > 1.1 * steps["searcher"], steps
    for episode in everything:
        assert check_episode(episode) and len(episode.steps) <= 50
        assert episode.stop == (StopReason.SUCCESS if episode.success else StopReason.STEP_LIMIT)
        assert not episode.success or episode.raw_score == 1.0


@needs_packages
def test_only_the_prober_asks_for_what_is_refused(played):
    """Refused actions in what is imitated, and probes that probe nothing or always the same thing."""
    looks = ("look", "inventory", "examine")
    valid = {name: np.mean([step.valid or step.action.split()[0] in looks for _, step in steps_of(episodes)])
             for name, episodes in played.items()}
    assert min(valid["oracle"], valid["random"]) > 0.97 and 0.4 < valid["prober"] < 0.8, valid
    assert min(valid["searcher"], valid["imperfect"]) > 0.95, valid
    refused = Counter(step.action.split()[0] for _, step in steps_of(played["prober"]) if not step.valid)
    assert {"go", "take", "move", "open", "use"} <= set(refused), refused
    assert {"clean", "heat", "cool"} & set(refused), refused


def test_who_plays_how_often_and_reads_what():
    """A mix that does not add up, and a policy that imitates the prober."""
    assert sum(player.share for player in PLAYERS.values()) == pytest.approx(1)
    assert [name for name, player in PLAYERS.items() if player.imitate] == ["imperfect"]
    for name in PLAYERS:
        if name in READERS:
            act = start(name, "put a mug in desk")
            assert text.read_action(act("room:\ndesk 1\ndrawer 1\nholding: nothing"))
            with pytest.raises(ValueError, match="'buy a mug': cannot be read; expected one of"):
                start(name, "buy a mug")
        else:
            with pytest.raises(ValueError, match="reads the engine"):
                start(name, "put a mug in desk")


@needs_packages
def test_the_oracle_finds_a_way_back(envs):
    """Labels that are right only along the oracle's own path."""
    env, rng = envs[0], np.random.default_rng(5)
    for task in env.tasks("train")[::3]:
        [session] = env.reset([task])
        astray, back = (PLAYERS[name].make(session, rng) for name in ("random", "oracle"))
        results = [env.step([session], [(astray if i < 25 else back)(session.state)])[0] for i in range(45)]
        assert any(result.reward == 1 for result in results), task.text


# Pages and what is done there. Stops an order that a small model cannot learn (likely places first); a loop,
# where places that share a spot cannot be gone to from one another; and a second thing in a second
# receptacle, which never wins.
SEARCHES = {
    "put some cloth on toilet": """
        room: | cabinet 1 | cabinet 2 | countertop 1 | countertop 2 | drawer 1 -> go to countertop 1
        at countertop 1: | nothing -> go to countertop 2
        at countertop 2: | nothing -> go to cabinet 1
        at cabinet 1 closed -> open cabinet 1
        at cabinet 1 open: | nothing -> go to cabinet 2
        at cabinet 2 closed -> open cabinet 2
        at cabinet 2 open: | nothing -> go to drawer 1""",
    "put some cloth in toilet": """
        room: | shelf 1 | shelf 2 | shelf 3 | shelf 4 -> go to shelf 1
        at shelf 1: | nothing -> go to shelf 2
        at shelf 1: | nothing -> go to shelf 3
        at shelf 1: | nothing -> go to shelf 4
        at shelf 4: | nothing -> go to shelf 2""",
    "put two pen in drawer": """
        room: | desk 1 | drawer 1 | drawer 2 -> go to desk 1
        at desk 1: | pen 1 | pen 2 -> take pen 1 from desk 1
        at desk 1: | pen 2 | holding: pen 1 -> go to drawer 1
        at drawer 1 closed | holding: pen 1 -> open drawer 1
        at drawer 1 open: | nothing | holding: pen 1 -> move pen 1 to drawer 1
        at drawer 1 open: | pen 1 -> go to desk 1
        at desk 1: | pen 2 -> take pen 2 from desk 1
        at desk 1: | nothing | holding: pen 2 -> go to drawer 1
        at drawer 1 open: | pen 1 | holding: pen 2 -> move pen 2 to drawer 1"""}


@pytest.mark.parametrize("sentence", SEARCHES)
def test_what_the_searcher_does(sentence):
    act = start("searcher", sentence)
    for line in SEARCHES[sentence].strip().splitlines():
        state, action = line.strip().split(" -> ")
        assert act(page(state + " | holding: nothing" * ("holding" not in state))) == action, line


# ---- traces ----

def agrees(reason: str, reward_reason: str, step: Step) -> bool:
    """Whether the verdict words of a step's traces agree with what happened."""
    before, after, command = (
        text.read_view(step.state), text.read_view(step.next_state), text.read_action(step.action))
    words, verb = f" {reason} ", command.verb if command else ""
    told = re.search(r" new ; ((?:[a-z]+ (?:yes|no) )+)", words)
    shown = told[1].split() if told else []
    taken = verb == "take" and not before.holding and after.held == command.thing
    only_if = {
        " so it is on ": verb == "use" and f"lit {command.thing}" in after.things,
        " so it is closed ": after.opened is False,
        " is new and closed ": after.opened is False,
        " is closed yes and ": after.opened is True,
        **{f" so it is {tag} ": tag in text.tags_of(after.holding) for tag in text.MADE}}
    return all([
        (" so the same page " in words) == (step.next_state == step.state),
        (f" so {after.holding} is taken and {[*after.things, text.NOTHING][0]} is left " in words) == taken,
        (f" keep {after.holding or text.NOTHING} ;" in words) == (verb == "go" and before.place != after.place),
        (" so it is put there " in words) == (verb == "move" and bool(before.holding) and not after.holding),
        *(true for said, true in only_if.items() if said in words),
        *((kind in after.kinds) == (said == "yes") for kind, said in zip(shown[::2], shown[1::2])),
        reward_reason.endswith("yes") == (step.reward == 1)])


@needs_packages
def test_every_trace_agrees_with_what_happened(everything):
    """Reasoning that ends in another verdict than the engine's."""
    steps, rng = [step for _, step in steps_of(everything)], np.random.default_rng(2)
    assert len(steps) >= 1000
    assert not [step for step in steps if not agrees(step.reasoning, step.reward_reasoning, step)][:3]
    assert all(step.reasoning for step in steps)
    assert np.mean([not step.reward_reasoning for step in steps]) < 0.003
    pairs = [(steps[i], steps[j]) for i, j in rng.integers(len(steps), size=(1500, 2))]
    plain = lambda step: re.sub(r"\d+", "", step.reasoning)
    wrong = [agrees(a.reasoning, a.reward_reasoning, b) for a, b in pairs if plain(a) != plain(b)]
    assert np.mean(wrong) < 0.5


@needs_packages
def test_traces_are_short_plain_lines(everything, others):
    for _, step in steps_of([*everything, *others]):
        for trace in (step.reasoning, step.reward_reasoning):
            assert trace == " ".join(trace.lower().split()) and not TAGS.search(trace) and len(trace) < 800
    words = [len(step.reward_reasoning.split()) for _, step in steps_of(everything) if not step.reward]
    assert np.median(words) <= 3


ROOM = "room: | countertop 1 | desk 1 | drawer 1 | drawer 2 | fridge 1 | microwave 1 | holding: nothing"
DESK = "at desk 1: | knife 2 | apple 1 | desklamp 1 | holding: nothing"
AT_DESK, SHUT = "at desk 1: | nothing | holding: ", "at drawer 1 closed | holding: nothing"
PUT, LAMP, LIT = "at desk 1: | apple 1 | holding: nothing", *(
    f"at desk 1: | {lit}desklamp 1 | holding: apple 1" for lit in ("", "lit "))
MICROWAVE, FRIDGE = "at microwave 1 closed | holding: ", "at fridge 1 open: | egg 1 | "
HEAT, LOOK, TWO = "put a hot apple in desk", "look at apple under the desklamp", "put two apple in fridge"
HOLD, FITS = "hold apple 1 : apple 1 yes", "at desk 1 : desk 1 yes ; fits yes so it is put there alone"


# (task, state, action, next state ("=": the same), why it follows, why the reward follows)
@pytest.mark.parametrize("task, state, action, after, trace, reward_trace", [
    (HEAT, ROOM, "go to drawer 2", SHUT.replace("1", "2"), "at room : drawer 2 no ; look for drawer 2 : drawer 1 drawer 2 yes ; keep nothing ; drawer 2 is new and closed", "go: no"),
    (HEAT, ROOM, "go to desk 1", DESK, "at room : desk 1 no ; look for desk 1 : desk 1 yes ; keep nothing ; desk 1 is new ; apple yes", "go: no"),
    (LOOK, ROOM, "go to desk 1", "at desk 1: | book 1 | holding: nothing",
     "at room : desk 1 no ; look for desk 1 : desk 1 yes ; keep nothing ; desk 1 is new ; apple no desklamp no", "go: no"),
    (HEAT, SHUT, "go to desk 1", DESK,
     "at drawer 1 : desk 1 no ; look for desk 1 : desk 1 yes ; keep nothing ; desk 1 is known", "go: no"),
    (HEAT, DESK, "go to drawer 9", "=", "at desk 1 : drawer 9 no ; look for drawer 9 : drawer 1 drawer 2 no", ""),
    (HEAT, DESK, "go to bed 1", "=", "at desk 1 : bed 1 no ; look for bed 1 : none no", ""),
    (HEAT, DESK, "go to desk 1", "=", "at desk 1 : desk 1 yes", ""),
    (HEAT, SHUT, "open drawer 1", "at drawer 1 open: | apple 2 | holding: nothing",
     "drawer 1 is closed yes and new ; apple yes", "open: no"),
    (HEAT, DESK, "open desk 1", "=", "desk 1 is closed no", ""),
    (HEAT, DESK, "take apple 1 from desk 1", "at desk 1: | knife 2 | desklamp 1 | holding: apple 1",
     "hold nothing : nothing yes ; at desk 1 : desk 1 yes ; look for apple 1 : knife 2 : apple 1 no apple 1 : apple 1 yes so apple 1 is taken and knife 2 is left",
     "take: no"),
    (HEAT, DESK, "take mug 1 from desk 1", "=",
     "hold nothing : nothing yes ; at desk 1 : desk 1 yes ; look for mug 1 : knife 2 : mug 1 no apple 1 : mug 1 no desklamp 1 : mug 1 no", ""),
    (HEAT, AT_DESK + "apple 1", "take mug 1 from desk 1", "=", "hold nothing : apple 1 no", ""),
    (HEAT, MICROWAVE + "apple 1", "heat apple 1 with microwave 1", MICROWAVE + "hot apple 1",
     f"{HOLD} ; at microwave 1 : microwave 1 yes ; can be hot yes so it is hot", "heat: no"),
    (HEAT, MICROWAVE + "book 1", "heat book 1 with microwave 1", "=",
     "hold book 1 : book 1 yes ; at microwave 1 : microwave 1 yes ; can be hot no", ""),
    (HEAT, AT_DESK + "apple 1", "heat apple 1 with microwave 1", "=", f"{HOLD} ; at microwave 1 : desk 1 no", ""),
    (HEAT, FRIDGE + "holding: apple 1", "heat apple 1 with fridge 1", "=",
     f"{HOLD} ; at fridge 1 : fridge 1 yes ; tool : fridge 1 no", ""),
    (HEAT, AT_DESK + "apple 1", "move apple 1 to desk 1", PUT, f"{HOLD} ; {FITS}",
     "apple : apple yes hot : plain no desk : desk yes so no"),
    (HEAT, AT_DESK + "hot apple 1", "move apple 1 to desk 1", "at desk 1: | hot apple 1 | holding: nothing",
     f"{HOLD} ; {FITS}", "apple : apple yes hot : hot yes desk : desk yes so yes"),
    (HEAT, "at microwave 1 open: | nothing | holding: pot 1", "move pot 1 to microwave 1", "=",
     "hold pot 1 : pot 1 yes ; at microwave 1 : microwave 1 yes ; open : open yes ; fits no", ""),
    (TWO, FRIDGE + "holding: apple 1", "move apple 1 to fridge 1", FRIDGE + "apple 1 | holding: nothing",
     f"{HOLD} ; at fridge 1 : fridge 1 yes ; open : open yes ; fits yes so it is put there after egg 1",
     "apple : apple yes fridge : fridge yes another apple : egg 1 egg : apple no so no"),
    (LOOK, LAMP, "use desklamp 1", LIT, "look for desklamp 1 : desklamp 1 : desklamp 1 yes so it is on",
     "apple : apple yes desklamp : on yes so yes"),
    (LOOK, SHUT.replace("nothing", "apple 1"), "go to desk 1", LIT,                   # the lamp came first
     "at drawer 1 : desk 1 no ; look for desk 1 : desk 1 yes ; keep apple 1 ; desk 1 is known",
     "apple : apple yes desklamp : on yes so yes"),
    (HEAT, LAMP, "use desklamp 1", LIT, "look for desklamp 1 : desklamp 1 : desklamp 1 yes so it is on",
     "desk : use no so no"),
    (HEAT, DESK, "use apple 1", "=", "look for apple 1 : knife 2 : apple 1 no apple 1 : apple 1 yes ; is a lamp no", ""),
    (HEAT, DESK, "inventory", "=", "only looks", ""),
    (HEAT, DESK, "put apple 1 in desk 1", "=", "not a command", ""),
    # what somebody else recorded, and no rule explains
    (HEAT, DESK, "take apple 1 from desk 1", SHUT, "", "take: no"),
    (HEAT, DESK, "take pen 1 from bed 1", "at desk 1: | apple 1 | holding: mug 1", "", "take: no"),
    (HEAT, DESK, "look", SHUT, "", "look: no"),
    (HEAT, DESK, "go to drawer 1", SHUT,
     "at desk 1 : drawer 1 no ; look for drawer 1 : drawer 1 yes ; keep nothing ; drawer 1 is new and closed", "paid for nothing"),
    (HEAT, AT_DESK + "apple 1", "move apple 1 to desk 1", PUT, f"{HOLD} ; {FITS}", "paid for nothing"),
    (HEAT, DESK, "go to drawer 1", "a page of another form", "", "")])
def test_what_a_trace_says(task, state, action, after, trace, reward_trace):
    """Stops a change of the words that trained models conclude from."""
    if after == "=":
        after, trace, reward_trace = state, f"{trace} so the same page", "same page: no"
    seen = [ROOM, DESK] if " is known" in trace else [ROOM]
    before = [Step(state=page(short), action="look", next_state="") for short in seen]
    paid = reward_trace.endswith(" so yes") or reward_trace.startswith("paid")
    step = Step(state=page(state), action=action, next_state=page(after), reward=float(paid), done=paid)
    expected = (trace, "" if reward_trace.startswith("paid") else reward_trace)
    assert relabel.explain(Task(id="t", text=task), before, step) == expected


# ---- counterfactuals ----

@needs_packages
def test_counterfactuals_are_real_steps_judged_by_rule(envs, everything, others):
    """Invented pages, sentences outside ALFWorld's templates, rewards that no rule supports."""
    real = {(step.state, step.action, step.next_state) for _, step in steps_of(everything)}
    played = {(step.state, episode.task.text) for episode, step in steps_of(everything)}
    labels = Counter(episode.label for episode in others)
    assert set(labels) == {"none", *relabel.BREAKABLE} and len(others) > 250, labels
    assert 0.35 < labels["none"] / len(others) < 0.6, labels
    for episode in others:
        [step], wanted = episode.steps, text.read_task(episode.task.text)
        success = envs[0].audit.success(episode.task, step.state, step.action, step.next_state)
        assert success == (episode.label == "none") == (step.reward == 1) == step.done
        assert (step.state, step.action, step.next_state) in real
        assert (step.state, episode.task.text) not in played
        assert agrees(step.reasoning, step.reward_reasoning, step) and step.reward_reasoning
        assert from_json(to_json(episode), Episode, "e") == check_episode(episode) == episode
        missed = [what for what, _, met in relabel.judge(episode.task.text, step) if not met]
        expected = {"none": [], "object": [wanted.thing], "receptacle": [wanted.place],
                    "state": [wanted.kind], "count": [f"another {wanted.thing}"]}
        assert missed == expected.get(episode.label, missed) and (len(missed) > 1 or episode.label != "many")
    assert {text.read_task(e.task.text).kind for e in others if e.success} == set(relabel.TEMPLATES)
    asked = {(e.steps[0].state, e.task.text) for e in others}
    assert len(asked) == len(others)


def test_counterfactuals_of_nothing():
    state = "room:\ndesk 1\nholding: nothing"
    episode = Episode(id="e", task=Task(id="t", text="put a mug in desk"),
                      steps=[Step(state=state, action="look", next_state=state)])
    assert relabel.counterfactuals([episode], 10, np.random.default_rng(0)) == []


@needs_packages
def test_templates_are_the_packages_own():
    from dreamgym.envs.alfworld.rooms import shipped

    for name, kind in KINDS.items():
        templates = shipped()[2].gdict[name]["templates"]
        said = {template.format(obj="mug", recep="desk", toggle="desk") for template in templates}
        assert said == {template.format(thing="mug", place="desk") for template in relabel.TEMPLATES[kind]}
        assert all(text.read_task(sentence) == text.Wanted(kind, "mug", "desk") for sentence in said)
