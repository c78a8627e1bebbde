"""task_generation.py: each test says which bug it stops."""
from types import SimpleNamespace

import numpy as np
import pytest

from dreamgym.episode import Episode, Step, Task
from dreamgym.task_generation import CANDIDATES, SAMPLING_TEMPERATURE, Known, variation_samples, words, write_tasks

TEXTS = [
    "find me slim jacket, and price lower than 50.00 dollars",
    "find me slim jacket with color: red, and size: large, and price lower than 60.00 dollars",
    "find me warm jacket with color: blue",
    "find me green tea",
    "find me warm slim vest with color: red",
]
TASKS = [Task(id=f"t{i}", text=text, start="search page", goal={"goal": i}, groups=["type shop"])
         for i, text in enumerate(TEXTS)]
HELD_OUT = "find me green vest"
PAGE = "item royal vegan boots $40\nsize: 6 / 7\ncolor: red / blue"


def bought(text: str, page: str, reward: float = 1.0) -> Episode:
    steps = [Step(state="a list of large shoes", action="click[1]", next_state=page),
             Step(state=page, action="buy", next_state="end", reward=reward, done=True)]
    return Episode(id="e", task=Task(id="t", text=text), steps=steps)


PLAYED = [bought("find me vegan boots with size: 6", PAGE),
          bought("find me slim warm jacket with color: red", "slim warm jacket\ncolor: red, blue\nsize: small"),
          bought("find me slim vest", "slim vest\ncolor: red, size: small", reward=0.0)]


def test_variation_samples_pair_tasks_that_share_a_rare_word():
    """A task taught as its own variation, and pairs joined by "find me" alone."""
    texts = [f"find me thing{i % 12} model{i}" + " really" * (i // 12) for i in range(60)]
    tasks = [Task(id=str(i), text=text) for i, text in enumerate(texts * 2)]
    pairs = variation_samples(tasks, 600, np.random.default_rng(0))
    assert pairs == variation_samples(tasks, 600, np.random.default_rng(0)) and len(pairs) == 600
    for seed, target in pairs:
        assert seed != target and {seed, target} <= set(texts) and seed.split()[2] == target.split()[2]
    longer = np.mean([len(target.split()) - len(seed.split()) for seed, target in pairs])
    assert longer > 0.8 and {seed for seed, _ in pairs} == set(texts)    # one draw instead of three: 0
    for lonely in ([], TASKS[:1], [TASKS[0], Task(id="x", text="go home")]):
        assert variation_samples(lonely, 10, np.random.default_rng(0)) == []


@pytest.mark.parametrize("text,want", [
    (None, "malformed"), ("", "malformed"), ("...", "malformed"),
    ("find me slim spaceship", "unknown"), ("find me tea lower than 55.00 dollars", "unknown"),
    (TEXTS[0], "copy"), ("Find me GREEN tea.", "copy"), (HELD_OUT, "copy"),
    ("find me slim warm jacket with color: blue", ""), ("find me royal vegan boots with size: 7", ""),
    ("find me royal warm boots with size: 7", "infeasible"), ("find me warm jacket with size: large", "infeasible"),
    ("find me slim vest with color: red", "infeasible"),          # a failure shows it
])
def test_each_reason_for_refusal(text, want):
    """Practice on tasks that cannot be read or that ask for what does not exist. In the shop 47 of 54 generated tasks
    were never or always won."""
    assert Known(TASKS, PLAYED).problem(text, set(map(words, [*TEXTS, HELD_OUT]))) == want


def test_without_successes_nothing_is_feasible():
    assert not Known(TASKS, PLAYED[2:]).feasible("find me slim vest")


def test_the_longest_acceptable_candidate_is_kept():
    """One task written twice, and refused candidates used."""
    short, long = "find me warm tea", "find me warm slim tea with color: red"
    asked = []

    def write_variations(texts, count, temperature):
        asked.append((texts, count, temperature))
        return [[short, long, TEXTS[0]], [long, None, "find me spaceship"], [short, short, None],
                ["find me green tea"] * 3]

    model = SimpleNamespace(write_variations=write_variations)
    known = Known(TASKS, [bought("find me tea", "warm slim tea, red: color with")])
    made, counts = write_tasks(model, TASKS[:4], TEXTS[:3], known, "new")
    assert asked == [(TEXTS[:4], CANDIDATES, SAMPLING_TEMPERATURE)]
    common = {"start": "search page", "groups": ["type shop"], "generated": True}
    assert made == [Task(id="new-0", text=long, parent="t0", **common),
                    Task(id="new-1", text=short, parent="t2", **common)]
    assert counts == {"accepted": 4, "copy": 5, "malformed": 2, "unknown": 1} and TASKS[0].goal == {"goal": 0}
