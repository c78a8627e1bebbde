"""Entity randomization: everything is renamed the same way, and nothing that decides an outcome changes."""
import numpy as np
import pytest

from dreamgym.envs.webarena.env import WebArena
from dreamgym.envs.webarena.names import KINDS, other_names
from dreamgym.envs.webarena.tasks import read_task, rule_success
from dreamgym.envs.webarena.text import action_type, ground, is_stop, read_page
from test_webarena_offline import played


@pytest.fixture(scope="module")
def episodes():
    return played(WebArena(), 8)


def test_other_names_change_nothing_else(episodes):
    """Renamed rows whose task, page, address and action name different things."""
    rng, changed, judged = np.random.default_rng(0), 0, {True: 0, False: 0}
    for episode in episodes:
        change = other_names(rng)
        for step in episode.steps:
            state, action = change(step.state), change(step.action)
            before, after = read_page(step.state), read_page(state)
            changed += state != step.state
            assert [(i, n.role) for i, n in after.lines.items()] == [
                (i, n.role) for i, n in before.lines.items()]
            assert len({n.name for n in after.lines.values()}) == len({n.name for n in before.lines.values()})
            assert ground(state, action) == change(step.grounded)
            assert action_type(state, action) == action_type(step.state, step.action)
            task = change(episode.task.text)
            if is_stop(step.action) and read_task(task):
                judged[step.reward == 1] += 1
                assert rule_success(task, state, action) == (step.reward == 1)
    assert changed > 100 and min(judged.values()) >= 5


def test_element_numbers_stay():
    change = other_names(np.random.default_rng(0))
    for action in ("click [12]", "type [12] [", "hover [12]", "tab_focus [12]"):
        assert change(action) == action
    assert change("$12 in 2024-01-12, order 1012").startswith("$")
    assert change("2024-01-12 %2F") == "2024-01-12 %2F"
    assert change("$12") != "$12" and change("order 1012") != "order 1012"


def test_words_of_names_are_of_one_kind():
    """A word that becomes two others: a bijection needs every word in one kind."""
    words = [word for kind in KINDS for word in kind]
    assert len(words) == len(set(words)) > 300 and not {"map", "star", "radio"} & set(words)
