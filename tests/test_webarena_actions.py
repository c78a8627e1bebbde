"""WebArena's grammar: what parses, to what, and how it is written back."""
import random

import pytest

from dreamgym.envs.webarena.actions import ALONE, Action, parse


@pytest.mark.parametrize("text, action", [
    ("click [5]", Action("click", 5)), ("hover[12]", Action("hover", 12)), ("tab_focus [0]", Action("tab_focus", 0)),
    ("type [7] [blue speaker] [1]", Action("type", 7, "blue speaker", True)),
    ("type [7] [blue] [0]", Action("type", 7, "blue", False)), ("type [7] [blue]", Action("type", 7, "blue", True)),
    ("type [7] []", Action("type", 7, "")), ("type [7] [1]", Action("type", 7, "1", True)),
    ("type [7] [see [1]] [0]", Action("type", 7, "see [1]", False)),
    ("press [Enter]", Action("press", text="Enter")), ("press [Ctrl+a]", Action("press", text="Ctrl+a")),
    ("scroll [down]", Action("scroll", text="down")), ("scroll up", Action("scroll", text="up")),
    ("goto [shopping/cart?p=[1]]", Action("goto", text="shopping/cart?p=[1]")),
    ("stop [a] b]", Action("stop", text="a] b")), ("stop []", Action("stop")),
    ("  go_back ", Action("go_back")), ("close_tab", Action("close_tab")),
    ("In summary, the next action I will perform is ```click [1234]```", Action("click", 1234)),
    ("```\nstop [N/A]\n```", Action("stop", text="N/A")),
])
def test_what_parses(text, action):
    """Stops an agent's usual spelling from being refused, and a written action from being read as another."""
    assert parse(text) == action == parse(str(action))


@pytest.mark.parametrize("text", [
    "", "buy [5]", "click 5", "click [x]", "click [-1]", "type [1]", "press [banana]", "scroll [left]",
    "scroll [Up]", "goto []", "stop", "click [5] now", "go_back [1]", "click [99999999999999]",
    "click [5]\nclick [6]"])
def test_what_does_not_parse(text):
    """Stops half an action from being guessed."""
    assert parse(text) is None


def test_the_canonical_text_always_parses_back():
    rng, bits = random.Random(5), ["]", "[", "[1]", "] [0]", " ", "a", "words", "'", "[ "]
    for _ in range(500):
        words = "".join(rng.choice(bits) for _ in range(rng.randint(0, 6)))
        for action in (Action("type", rng.randint(0, 99), words, rng.random() < 0.5),
                       Action("stop", text=words.strip()), *(Action(kind) for kind in ALONE)):
            assert parse(str(action)) == action
