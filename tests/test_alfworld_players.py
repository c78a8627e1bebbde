"""Who acts in ALFWorld when no model does, what the rule-based teacher says about it, and steps relabelled with other sentences."""
from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("alfworld", reason="needs the ALFWorld packages: pip install -r requirements-alfworld.txt")
pytest.importorskip("textworld", reason="needs the ALFWorld packages: pip install -r requirements-alfworld.txt")

from alfworld_official import SOURCE, rebuild
from dreamgym.envs.alfworld import text as text
from dreamgym.envs.alfworld.env import ALFWorld
from dreamgym.envs.alfworld.games import generate
from dreamgym.envs.alfworld.offline import MIX, TEMPLATES, explain_recorded, play, relabelled
from dreamgym.envs.alfworld.scripted import KINDS, make_player
from dreamgym.envs.alfworld.teacher import check_trace, explain
from dreamgym.episode import Step, episode_from_json, to_json
from dreamgym.prompts import TAGS

GAMES, OFFICIAL = 18, 12


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Generated games of all six types, and official ones where they are."""
    folder = tmp_path_factory.mktemp("alfworld")
    generate(folder / "generated", seed=3, counts={"train": GAMES}, check=False)
    worlds = [ALFWorld(data_dir=str(folder / "generated"), cache=folder)]
    if SOURCE.exists():
        rebuild(folder / "official", "train", OFFICIAL)
        worlds.append(ALFWorld(data_dir=str(folder / "official"), cache=folder))
    return worlds


@pytest.fixture(scope="module")
def played(worlds):
    """An episode of every player on every game; two of the imperfect one."""
    rng, episodes = np.random.default_rng(0), {kind: [] for kind in KINDS}
    for world in worlds:
        for task in world.tasks("train"):
            for kind in [*KINDS, "imperfect"]:
                episodes[kind].append(play(world, task, kind, rng, f"{kind}-{len(episodes[kind])}"))
    return episodes


@pytest.fixture(scope="module")
def everything(played):
    return [episode for episodes in played.values() for episode in episodes]


@pytest.fixture(scope="module")
def others(worlds, everything):
    return relabelled(worlds[0], everything, 600, np.random.default_rng(1), "r", set(), set())


def steps_of(episodes):
    return [(episode, step) for episode in episodes for step in episode.steps]


# ---- players -----------------------------------------------------------------------------------------------------------------------------------

def test_how_well_each_player_does(played):
    # Stops an expert that teaches failure on some type of task, and a rate of mistakes that leaves nothing to improve on, or nothing to imitate.
    share = {kind: np.mean([episode.success for episode in episodes]) for kind, episodes in played.items()}
    assert {text.read_task(episode.task.text).kind for episode in played["searcher"]} == {"pick", "clean", "hot", "cool", "two", "look"}
    assert share["oracle"] == 1 and share["searcher"] >= 0.96, share
    steps = {kind: np.mean([len(episode.steps) for episode in played[kind]]) for kind in ("searcher", "imperfect")}
    assert share["imperfect"] > 0.8 and steps["imperfect"] > 1.2 * steps["searcher"], (share, steps)
    assert share["random"] < 0.3 and share["prober"] > 0.6, share
    assert all(len(episode.steps) <= 50 and episode.stop == ("success" if episode.success else "step_limit") for episodes in played.values() for episode in episodes)


def test_only_the_prober_asks_for_what_is_refused(played):
    # Stops refused actions in what is imitated, and probes that probe nothing or always the same thing.
    valid = {kind: np.mean([step.valid for _, step in steps_of(episodes)]) for kind, episodes in played.items()}
    assert valid["oracle"] == valid["random"] == 1 and valid["searcher"] > 0.95 and valid["imperfect"] > 0.95 and 0.4 < valid["prober"] < 0.75, valid
    refused = Counter(step.action.split()[0] for _, step in steps_of(played["prober"]) if not step.valid)
    assert {"go", "take", "move", "open", "close", "use"} <= set(refused) and {"clean", "heat", "cool"} & set(refused), refused


def test_the_searcher_and_its_kin_read_states_only(worlds):
    # Stops an expert that nobody could imitate, because it looks into closed drawers.
    task = worlds[0].tasks("train")[0]
    for kind in ("searcher", "imperfect", "prober"):
        act = make_player(kind, task.text, np.random.default_rng(0))
        assert text.read_action(act(task.start))
    for kind in ("oracle", "random"):
        with pytest.raises(ValueError, match="session"):
            make_player(kind, task.text, np.random.default_rng(0))
    with pytest.raises(ValueError, match="expected oracle"):
        make_player("wizard", task.text, np.random.default_rng(0))


def test_the_oracle_finds_a_way_back(worlds):
    # Stops labels that are right only along the oracle's own path.
    world, rng = worlds[0], np.random.default_rng(5)
    for task in world.tasks("train")[::3]:
        session = world.start([task])[0]
        astray, back = (make_player(kind, task.text, rng, session) for kind in ("random", "oracle"))
        won = False
        for i in range(45):
            result = world.act([session], [(astray if i < 25 else back)(session.state)])[0]
            won = won or result.reward == 1
        assert won, task.text


def test_the_searcher_looks_in_likely_places_first_and_in_order():
    # Stops an order that a small model cannot learn.
    act = make_player("searcher", "put some cloth on toilet", np.random.default_rng(0))
    state, asked = "room: cabinet 1, cabinet 2, countertop 1, countertop 2, drawer 1, toilet 1\nholding: nothing", []
    for _ in range(7):
        action = act(state)
        asked.append(action)
        place = text.read_action(action).place
        state = f"at {place} closed\nholding: nothing" if action.startswith("go to cabinet") else f"at {place}{' open' if 'cabinet' in place else ''}: nothing\nholding: nothing"
    assert asked == ["go to countertop 1", "go to countertop 2", "go to cabinet 1", "open cabinet 1", "go to cabinet 2", "open cabinet 2", "go to drawer 1"]


def test_the_searcher_passes_over_a_place_beside_it():
    # Stops a loop: places that share a spot cannot be gone to from one another.
    act = make_player("searcher", "put some cloth on toilet", np.random.default_rng(0))
    room, here = "room: shelf 1, shelf 2, shelf 3, shelf 4\nholding: nothing", "at shelf 1: nothing\nholding: nothing"
    assert [act(room), act(here), act(here), act(here)] == ["go to shelf 1", "go to shelf 2", "go to shelf 3", "go to shelf 4"]
    assert act("at shelf 4: nothing\nholding: nothing") == "go to shelf 2"


def test_both_things_go_to_one_receptacle():
    # Stops a second thing in a second receptacle, which never wins.
    act = make_player("searcher", "put two pen in drawer", np.random.default_rng(0))
    room = "room: desk 1, drawer 1, drawer 2\nholding: nothing"
    pages = [("at desk 1: pen 1, pen 2\nholding: nothing", "take pen 1 from desk 1"), ("at desk 1: pen 2\nholding: pen 1", "go to drawer 1"),
             ("at drawer 1 closed\nholding: pen 1", "open drawer 1"), ("at drawer 1 open: nothing\nholding: pen 1", "move pen 1 to drawer 1"),
             ("at drawer 1 open: pen 1\nholding: nothing", "go to desk 1"), ("at desk 1: pen 2\nholding: nothing", "take pen 2 from desk 1"),
             ("at desk 1: nothing\nholding: pen 2", "go to drawer 1"), ("at drawer 1 open: pen 1\nholding: pen 2", "move pen 2 to drawer 1")]
    assert act(room) == "go to desk 1"
    assert [act(page) for page, _ in pages] == [action for _, action in pages]


def test_the_same_seed_plays_the_same_episode(worlds):
    # Stops players that draw from anywhere but their generator.
    task = worlds[0].tasks("train")[1]
    for kind in MIX:
        first, second = (play(worlds[0], task, kind, np.random.default_rng(7), "e") for _ in range(2))
        assert first == second


# ---- traces ------------------------------------------------------------------------------------------------------------------------------------

def test_every_trace_agrees_with_what_happened(everything):
    # Stops reasoning that ends in a verdict other than the engine's.
    steps = steps_of(everything)
    assert len(steps) >= 2000
    wrong = [(step.state, step.action, step.next_state, step.reasoning) for _, step in steps
             if not check_trace(step.reasoning, step.state, step.action, step.next_state, step.reward)]
    assert not wrong, wrong[:3]


def test_check_trace_can_say_no(everything):
    # Stops an agreement test that agrees with everything: a trace is held against the outcome of another step.
    steps = [step for _, step in steps_of(everything)]
    rng = np.random.default_rng(2)
    pairs = [(steps[i], steps[j]) for i, j in rng.integers(len(steps), size=(1500, 2))]
    different = [(a, b) for a, b in pairs if re.sub(r"\d+", "", a.reasoning) != re.sub(r"\d+", "", b.reasoning)]
    assert np.mean([check_trace(a.reasoning, b.state, b.action, b.next_state, b.reward) for a, b in different]) < 0.5
    for trace in ("hold apple 1 : apple 1 yes so it is put there", "only looks so the same page", "check apple : apple yes so success", ""):
        assert not check_trace(trace, "at desk 1: nothing\nholding: nothing", "go to bed 1", "at bed 1: nothing\nholding: nothing", 0.0)


def test_traces_are_one_plain_line(everything, others):
    # Stops traces that break the form of the experience model's answer.
    for _, step in steps_of([*everything, *others]):
        assert step.reasoning and step.reasoning == " ".join(step.reasoning.lower().split()) and not TAGS.search(step.reasoning)
        assert len(step.reasoning) < 500


ROOM = "room: countertop 1, desk 1, drawer 1, drawer 2, fridge 1, microwave 1\nholding: nothing"
DESK = "at desk 1: knife 2, apple 1, desklamp 1\nholding: nothing"
HEAT, LOOK, TWO = "put a hot apple in desk", "look at apple under the desklamp", "put two apple in fridge"


@pytest.mark.parametrize(("task", "history", "state", "action", "next_state", "reward", "trace"), [
    (HEAT, [], ROOM, "go to drawer 1", "at drawer 1 closed\nholding: nothing", 0, "drawer 1 is new and closed ; next find apple"),
    (HEAT, [], ROOM, "go to desk 1", DESK, 0, "desk 1 is new ; apple yes ; next take apple"),
    (LOOK, [], ROOM, "go to desk 1", "at desk 1: book 1\nholding: nothing", 0, "desk 1 is new ; apple no desklamp no ; next find apple"),
    (HEAT, [ROOM, DESK], "at drawer 1 closed\nholding: nothing", "go to desk 1", DESK, 0, "desk 1 is known ; next take apple"),
    (HEAT, [ROOM], DESK, "go to drawer 9", DESK, 0, "drawer 9 is not in the room so the same page ; next take apple"),
    (HEAT, [ROOM], DESK, "go to desk 1", DESK, 0, "already at desk 1 so the same page ; next take apple"),
    (HEAT, [ROOM], "at drawer 1 closed\nholding: nothing", "open drawer 1", "at drawer 1 open: apple 2\nholding: nothing", 0,
     "drawer 1 is closed yes and new ; apple yes ; next take apple"),
    (HEAT, [ROOM], DESK, "open desk 1", DESK, 0, "desk 1 is closed no so the same page ; next take apple"),
    (HEAT, [ROOM], DESK, "take apple 1 from desk 1", "at desk 1: knife 2, desklamp 1\nholding: apple 1", 0,
     "hold nothing : nothing yes ; at desk 1 : desk 1 yes ; look for apple 1 : apple 1 yes so it is taken ; next heat it"),
    (HEAT, [ROOM], DESK, "take mug 1 from desk 1", DESK, 0,
     "hold nothing : nothing yes ; at desk 1 : desk 1 yes ; look for mug 1 : none no so the same page ; next take apple"),
    (HEAT, [ROOM], "at desk 1: mug 1\nholding: apple 1", "take mug 1 from desk 1", "at desk 1: mug 1\nholding: apple 1", 0, "hold nothing : apple 1 no"
     " so the same page ; next heat it"),
    (HEAT, [ROOM], "at microwave 1 closed\nholding: apple 1", "heat apple 1 with microwave 1", "at microwave 1 closed\nholding: hot apple 1", 0,
     "hold apple 1 : apple 1 yes ; at microwave : microwave yes ; can be hot yes so it is hot ; next put it in desk"),
    (HEAT, [ROOM], "at microwave 1 closed\nholding: book 1", "heat book 1 with microwave 1", "at microwave 1 closed\nholding: book 1", 0,
     "hold book 1 : book 1 yes ; at microwave : microwave yes ; can be hot no so the same page ; next put it away"),
    (HEAT, [ROOM], "at desk 1: nothing\nholding: apple 1", "heat apple 1 with microwave 1", "at desk 1: nothing\nholding: apple 1", 0,
     "hold apple 1 : apple 1 yes ; at microwave : desk no so the same page ; next heat it"),
    (HEAT, [ROOM], "at desk 1: nothing\nholding: apple 1", "move apple 1 to desk 1", "at desk 1: apple 1\nholding: nothing", 0,
     "hold apple 1 : apple 1 yes ; at desk 1 : desk 1 yes ; fits yes so it is put there ; check apple : apple yes hot : plain no desk : desk yes so not done ; next take apple"),
    (HEAT, [ROOM], "at desk 1: nothing\nholding: hot apple 1", "move apple 1 to desk 1", "at desk 1: hot apple 1\nholding: nothing", 1,
     "hold apple 1 : apple 1 yes ; at desk 1 : desk 1 yes ; fits yes so it is put there ; check apple : apple yes hot : hot yes desk : desk yes so success"),
    (HEAT, [ROOM], "at microwave 1 open: nothing\nholding: pot 1", "move pot 1 to microwave 1", "at microwave 1 open: nothing\nholding: pot 1", 0,
     "hold pot 1 : pot 1 yes ; at microwave 1 : microwave 1 yes ; open : open yes ; fits no so the same page ; next put it away"),
    (TWO, [ROOM], "at fridge 1 open: egg 1\nholding: apple 1", "move apple 1 to fridge 1", "at fridge 1 open: egg 1, apple 1\nholding: nothing", 0,
     "hold apple 1 : apple 1 yes ; at fridge 1 : fridge 1 yes ; open : open yes ; fits yes so it is put there ; check apple : apple yes fridge : fridge yes "
     "another apple : nothing no"
     " so not done ; next find another apple"),
    (LOOK, [ROOM], "at desk 1: desklamp 1\nholding: apple 1", "use desklamp 1", "at desk 1: lit desklamp 1\nholding: apple 1", 1,
     "look for desklamp 1 : desklamp 1 yes so it is on ; check apple : apple yes desklamp : on yes so success"),
    (HEAT, [ROOM], DESK, "use apple 1", DESK, 0, "look for apple 1 : apple 1 yes ; is a lamp no so the same page ; next take apple"),
    (HEAT, [ROOM], DESK, "inventory", DESK, 0, "only looks so the same page ; next take apple"),
    (HEAT, [ROOM], DESK, "put apple 1 in desk 1", DESK, 0, "not a command so the same page ; next take apple")])
def test_what_a_trace_says(task, history, state, action, next_state, reward, trace):
    # Stops a change of the words that trained models conclude from.
    assert explain(task, history, state, action, next_state, reward) == trace
    assert check_trace(trace, state, action, next_state, reward)


def test_coming_back_to_a_lit_lamp_is_a_success_too(worlds):
    # Stops a trace without a verdict for the one way to win by walking: the lamp first, then the thing.
    world = worlds[0]
    task = next(task for task in world.tasks("train") if text.read_task(task.text).kind == "look")
    wanted, session = text.read_task(task.text), world.start([task])[0]
    where = {fact[1]: fact[2] for fact in sorted(session.inner.engine.facts) if fact[0] == "inreceptacle"}
    lamp = next(thing for thing in where if thing.startswith(wanted.place))
    thing = next(thing for thing, place in where.items() if thing.startswith(f"{wanted.thing} ") and place != where[lamp])
    history, result = [], None
    for action in (f"go to {where[lamp]}", f"use {lamp}", f"go to {where[thing]}", f"open {where[thing]}", f"take {thing} from {where[thing]}", f"go to {where[lamp]}"):
        state = session.state
        result = world.act([session], [action])[0]
        trace = explain(task.text, history, state, action, result.state, result.reward)
        history.append(state)
    assert result.reward == 1 and trace.endswith("so success") and check_trace(trace, state, action, result.state, 1.0)


# ---- rules against the engine, imported steps --------------------------------------------------------------------------------------------------

def test_the_rules_verdict_is_the_engines(everything):
    # Stops relabelled rewards that the engine would not give.
    judged = [(episode, step, verdict) for episode, step in steps_of(everything) if step.next_state != step.state
              and (verdict := text.rule_success(episode.task.text, step.state, step.action)) is not None]
    assert len(judged) > 200 and all(verdict == (step.reward == 1) for _, step, verdict in judged)


def test_recorded_steps_are_explained_only_where_the_rules_agree(everything):
    # Stops made-up reasons for outcomes that the rules contradict.
    same = [explain_recorded(episode.task.text, [s.state for s in episode.steps[:i]], step) == step.reasoning for episode in everything for i, step in enumerate(episode.steps)]
    assert np.mean(same) > 0.97
    page, other = "at desk 1: apple 1\nholding: nothing", "at bed 1: nothing\nholding: nothing"
    for action, next_state, reward in (("take apple 1 from desk 1", other, 0.0), ("take pen 1 from desk 1", "at desk 1: apple 1\nholding: pen 1", 0.0), ("look", other, 0.0),
                                       ("go to bed 1", other, 1.0), ("take apple 1 from desk 1", page, 1.0), ("go to bed 1", "a page of another form", 0.0)):
        assert explain_recorded("put an apple in bed", [], Step(page, action, next_state, reward)) == ""
    assert explain_recorded("put an apple in bed", [], Step(page, "go to bed 1", other)).startswith("bed 1 is new ; apple no")


# ---- relabelling -------------------------------------------------------------------------------------------------------------------------------

def test_relabelled_steps_are_real_and_judged(everything, others):
    # Stops invented pages, sentences outside ALFWorld's templates, and rewards that no rule supports.
    real = {(step.state, step.action, step.next_state) for _, step in steps_of(everything)}
    kinds = Counter(episode.steps[0].info["broken"] for episode in others)
    assert len(others) > 300 and set(kinds) == {"none", "object", "receptacle", "state", "count", "kind", "many"} and 0.35 < kinds["none"] / len(others) < 0.6, kinds
    for episode in others:
        step, success = episode.steps[0], text.rule_success(episode.task.text, episode.steps[0].state, episode.steps[0].action)
        assert (step.state, step.action, step.next_state) in real and len(episode.steps) == 1 and episode.source == "relabelled"
        assert success == (step.info["broken"] == "none") == (step.reward == 1) == step.done
        assert check_trace(step.reasoning, step.state, step.action, step.next_state, step.reward)
        assert episode_from_json(to_json(episode)) == episode
    assert {text.read_task(episode.task.text).kind for episode in others if episode.success} == {"pick", "clean", "hot", "cool", "two", "look"}
    assert len({(episode.steps[0].state, episode.task.text) for episode in others}) == len(others)


def test_a_near_miss_misses_by_one_thing(others):
    # Stops easy negatives: all but the `kind` and `many` ones would be fulfilled but for one constraint.
    for episode in others:
        step, wanted = episode.steps[0], text.read_task(episode.task.text)
        missed = [what for what, _, met in text.checks(wanted, step.state, step.action) if not met]
        expected = {"none": [], "object": [wanted.thing], "receptacle": [wanted.place], "state": [wanted.kind], "count": [f"another {wanted.thing}"]}
        assert missed == expected.get(step.info["broken"], missed) and (len(missed) > 1 or step.info["broken"] != "many")


def test_relabelling_leaves_alone_what_it_is_told_to(worlds, everything, others):
    # Stops test sentences in training data, and held-out pages that were trained on.
    sentences, states = {episode.task.text for episode in others[:200]}, {episode.steps[0].state for episode in others}
    again = relabelled(worlds[0], everything, 200, np.random.default_rng(1), "r", sentences, set())
    assert again and not sentences & {episode.task.text for episode in again}
    held = set(sorted(states)[::2])
    before = frozenset(held)
    rest = relabelled(worlds[0], everything, 200, np.random.default_rng(1), "r", set(), held)
    shown = {episode.steps[0].state for episode in rest}
    assert rest and not before & shown and shown <= held - before
    assert relabelled(worlds[0], [], 10, np.random.default_rng(1), "r", set(), set()) == []


def test_templates_are_the_packages_own():
    # Stops sentences that ALFWorld never says.
    from alfworld.gen.goal_library import gdict
    names = {"pick": "pick_and_place_simple", "clean": "pick_clean_then_place_in_recep", "hot": "pick_heat_then_place_in_recep", "cool": "pick_cool_then_place_in_recep",
             "two": "pick_two_obj_and_place", "look": "look_at_obj_in_light"}
    for kind, name in names.items():
        said = {template.format(obj="mug", recep="desk", toggle="desk") for template in gdict[name]["templates"]}
        assert said == {template.format(thing="mug", place="desk") for template in TEMPLATES[kind]}
        assert all(text.read_task(sentence) == text.Wanted(kind, "mug", "desk") for sentence in said)
