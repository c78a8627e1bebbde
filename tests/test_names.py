"""Entity randomization: which words are names, and what exchanging them changes."""
import numpy as np
import pytest

from dreamgym.episode import Episode, Step, Task
from dreamgym.names import Names, tools
from dreamgym.words import tokens_of

TASKS = [f"buy a {colour} {thing} in size {number}" for number in range(5)
         for colour, thing in (("red", "mug"), ("red", "hat"), ("blue", "hat"))]
OTHERS = [f"read page {number}" for number in range(200)]


def test_words_that_can_replace_each_other_are_found():
    """Words of unlike things in one group, words of every task, a colour and a thing, or single words."""
    groups = [["blue", "red"], ["hat", "mug"]]
    assert Names(TASKS + OTHERS).groups == Names([text.upper() for text in TASKS] + OTHERS).groups == groups
    assert Names(TASKS).groups == [] and Names(TASKS + OTHERS[:30]).words == []      # words of most, or of many tasks
    assert Names(TASKS + OTHERS[:30]).groups == groups


def test_a_chain_of_places_is_one_group():
    pairs = ["put a mug here now", "put a cup here now", "take the cup off it", "take the jar off it"]
    assert Names(pairs + OTHERS).groups[0] == ["cup", "jar", "mug"]


def test_few_words_that_are_common_are_verbs():
    """The ten things of a small world that are missed because each is common; its three verbs that are taken."""
    things = [f"thing{letter}" for letter in "abcdefgh"]
    tasks = [f"{verb} the {thing} now" for verb in ("heat", "cool", "wash") for thing in things]
    assert Names(tasks).words == sorted(things)
    assert Names([text for text in tasks if text.split()[2][-1] < "e"]).words == []


@pytest.mark.parametrize("seed", range(4))
def test_names_change_places(seed):
    """A changed part of a word, "%2F" or number; a lost capital; two things that become one."""
    change = Names(TASKS + OTHERS).draw(1.0, np.random.default_rng(seed))
    words = ["red", "blue", "mug", "hat"]
    new = {word: change(word) for word in words}
    assert sorted(new.values()) == sorted(words)
    assert change("click[red] a reddish 1 red_mug /red-mug %2Fred 12") == (
        f"click[{new['red']}] a reddish 1 {new['red']}_{new['mug']} /{new['red']}-{new['mug']} %2F{new['red']} 12")
    assert change("Red Mug RED") == f"{new['red'].capitalize()} {new['mug'].capitalize()} {new['red'].upper()}"


def test_a_name_that_keeps_its_place_keeps_its_letters():
    changes = [Names(TASKS + OTHERS).draw(1.0, np.random.default_rng(seed)) for seed in range(30)]
    assert {change("rEd") for change in changes} == {"rEd", "blue", "hat", "mug"}        # kinds mix
    assert {change("YouTube, IDs") for change in changes} == {"YouTube, IDs"}            # no names


def test_words_that_no_page_shows_are_not_exchanged():
    """Verbs that are exchanged; a word of lost or few episodes that goes; a kind that the prober no longer knows."""
    def episode(text, state, reward=1.0):
        steps = [Step(state="", action="a", next_state="", reward=0.0), Step(state=state, action="b", next_state="", reward=reward, done=True)]
        return Episode(id="e", task=Task(id="t", text=text, env="x"), steps=steps)

    tasks = ["put mug here", "take mug here", "put hat here", "take hat here"] + OTHERS
    page = "Mug, take, hat"
    played = [episode("put mug here", page), episode("take hat here", page), episode("Put hat here", "put hat"),
              episode("put mug here", page), *[episode("take mug here", "", reward=0.0)] * 9]
    names = Names(tasks, played)
    assert names.words == ["hat", "mug", "take"] and names.kind("put") == names.kind("take")
    assert "put" in Names(tasks, played[2:4]).words and Names(tasks).words == ["hat", "mug", "put", "take"]


def test_a_tool_keeps_its_name():
    """Policies that learn to heat with whatever "oven" was exchanged for."""
    things = ["mug", "pan", "hat", "cup", "jar"]
    tasks = [f"put {thing} into {place} now" for thing in things for place in ("oven", "sink")] + OTHERS
    play = lambda action, after: Episode(id="e", task=Task(id="t", text=tasks[0], env="x"), steps=[
        Step(state="mug pan hat cup jar oven sink", action=action, next_state=after)])
    played = [play(f"{verb} {thing} 1 with {place}", "done") for thing in things
              for verb, place in [("heat", "oven"), ("wash", "oven"), ("wash", "sink")]]
    refused = play("heat mug 1 with sink", "mug pan hat cup jar oven sink")
    everything = {*things, "oven", "sink"}
    assert set(Names(tasks).words) == everything
    assert tools(everything, [*played, refused]) == {(("heat", "_", "with", "_"), 1): "oven"}
    assert set(Names(tasks, played).words) == everything - {"oven"}
    assert tools(everything, played[:12]) == {}, "four other names are too few"


def test_letters_with_marks():
    """Names in Hindi, or with accents apart, that fall to pieces: no names at all."""
    for things in (("किताब", "घड़ी", "छाता", "मेज़", "पानी"), ("cre\u0300me", "the\u0301", "ga\u0302teau", "pa\u0302te\u0301", "nin\u0303o")):
        tasks = [f"lao {thing} yahan {place}" for thing in things for place in ("ek", "do", "tin")]
        assert set(things) <= set(Names(tasks).words) and tokens_of(" ".join(things)) == set(things)


def test_kinds_of_words():
    names = Names(TASKS + OTHERS)
    assert names.kind("red") == names.kind("Blue") == 0 and names.kind("mug") == 1
    assert (names.kind("12"), names.kind("size"), names.kind("")) == ("number", None, None)


def test_a_share_of_the_draws_changes_nothing():
    names, rng = Names(TASKS + OTHERS), np.random.default_rng(0)
    assert names.draw(0.0, rng) is str
    assert 0.4 < np.mean([names.draw(0.5, rng) is str for _ in range(400)]) < 0.6
    assert Names(OTHERS[:1]).draw(1.0, rng)("read page 0") == "read page 0"
