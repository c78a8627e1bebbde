"""Players of the own sites: the oracle and the searcher win everything by WebArena's evaluators, the others
do what they are for, and the rules agree."""
import numpy as np
import pytest

from dreamgym import offline
from dreamgym.envs.base import Player
from dreamgym.envs.webarena.env import WebArena
from dreamgym.envs.webarena.tasks import rule_success
from dreamgym.envs.webarena.text import action_type, read_page


@pytest.fixture(scope="module")
def env():
    env = WebArena()
    yield env
    env.close()


def run(env, kind, task, seed=0, change=lambda player: player):
    """The steps of one episode."""
    return offline.play(env, task, change(env.players()[kind]), np.random.default_rng(seed), kind).steps


def agrees(task, steps) -> bool:
    last = steps[-1]
    return not last.done or rule_success(task.text, last.state, last.action) == (last.reward == 1)


@pytest.mark.parametrize("kind", ["oracle", "searcher"])
def test_experts_win_every_template(env, kind):
    """A template whose plan does not lead to its reward."""
    everything = env.tasks("test") + env.tasks("valid") + env.tasks("train")
    impossible = [task for task in everything if task.goal["parameters"].get("answer") == "N/A"][:4]
    for task in [*{task.groups[1]: task for task in everything}.values(), *impossible]:
        steps = run(env, kind, task)
        assert steps[-1].reward == 1, (task.text, [step.action for step in steps])
        assert agrees(task, steps)


def test_imperfect_errs_and_recovers_and_the_rules_agree(env):
    """Demonstrations without mistakes (nothing to improve on)."""
    played = [(task, run(env, "imperfect", task, seed)) for seed, task in enumerate(env.tasks("train")[::3])]
    assert 0.5 < np.mean([steps[-1].reward for _, steps in played]) < 0.95
    assert any(step.action == "go_back" and steps[-1].reward for _, steps in played for step in steps)
    assert np.mean([agrees(task, steps) for task, steps in played]) >= 0.99


def test_prober_meets_refusals_and_random_never_wins_by_chance(env):
    """Offline data without refused actions, and actions called refused that change the page."""
    tasks = env.tasks("train")[::12]
    probed = [step for seed, task in enumerate(tasks) for step in run(env, "prober", task, seed)]
    kinds = [action_type(step.state, step.action) for step in probed]
    assert kinds.count("refused") > len(kinds) / 6 and {"stop", "goto", "back", "tab"} <= set(kinds)
    assert all(step.next_state == step.state for step, kind in zip(probed, kinds) if kind == "refused")
    wandered = [run(env, "random", task, seed) for seed, task in enumerate(tasks)]
    assert sum(steps[-1].reward for steps in wandered) <= 1
    assert all(read_page(step.state) for steps in wandered for step in steps)


def test_searcher_fills_a_form_again_after_it_was_left(env):
    """A player that only counts its steps: what was typed is gone when one comes back to a form."""
    task = next(task for task in env.tasks("train") if "template 113" in task.groups)

    def leaves_once(player):
        def make(session, rng):
            act = player.make(session, rng)
            return lambda state: "click [3]" if session.steps == 3 else act(state)
        return Player(make)

    assert run(env, "searcher", task, change=leaves_once)[-1].reward == 1
