"""Players of the own sites: the oracle and the searcher win everything by WebArena's evaluators, the others
do what they are for, and the rules agree."""
import numpy as np
import pytest

from dreamgym.envs.webarena.env import WebArena
from dreamgym.envs.webarena.page import STOPPED
from dreamgym.envs.webarena.tasks import rule_success
from dreamgym.envs.webarena.text import action_type, read_page


@pytest.fixture(scope="module")
def env():
    env = WebArena()
    yield env
    env.close()


def run(env, kind, task, seed=0, leave_at=None):
    """[(state, action, result)] of one episode. `leave_at`: the step before which somebody clicks line 3."""
    (session,) = env.reset([task])
    act, steps = env.players()[kind].make(session, np.random.default_rng(seed)), []
    while session.steps < env.max_steps and session.state != STOPPED:
        state = session.state
        action = "click [3]" if len(steps) == leave_at else act(state)
        steps.append((state, action, env.step([session], [action])[0]))
    env.end([session])
    return steps


def agrees(task, steps) -> bool:
    state, action, result = steps[-1]
    return not result.done or rule_success(task.text, state, action) == (result.reward == 1)


@pytest.mark.parametrize("kind", ["oracle", "searcher"])
def test_experts_win_every_template(env, kind):
    """Stops a template whose plan does not lead to its reward, or whose rule check differs from WebArena's
    evaluators; also where a task cannot be done."""
    everything = env.tasks("test") + env.tasks("valid") + env.tasks("train")
    impossible = [task for task in everything if task.goal["parameters"].get("answer") == "N/A"][:4]
    for task in [*{task.groups[1]: task for task in everything}.values(), *impossible]:
        steps = run(env, kind, task)
        assert steps[-1][2].reward == 1, (task.text, [step[1] for step in steps])
        assert agrees(task, steps)


def test_imperfect_errs_and_recovers_and_the_rules_agree(env):
    """Stops demonstrations without mistakes (nothing to improve on), and rewards that the rule check does not
    foresee."""
    played = [(task, run(env, "imperfect", task, seed)) for seed, task in enumerate(env.tasks("train")[::3])]
    won = [steps[-1][2].reward == 1 for _, steps in played]
    assert 0.5 < np.mean(won) < 0.95
    assert any(action == "go_back" and steps[-1][2].reward for _, steps in played for _, action, _ in steps)
    assert np.mean([agrees(task, steps) for task, steps in played]) >= 0.99


def test_prober_meets_refusals_and_random_never_wins_by_chance(env):
    """Stops offline data without refused actions, and actions called refused that change the page."""
    tasks = env.tasks("train")[::12]
    probed = [step for seed, task in enumerate(tasks) for step in run(env, "prober", task, seed)]
    kinds = [action_type(state, action) for state, action, _ in probed]
    assert kinds.count("refused") > len(kinds) / 6 and {"stop", "goto", "back", "tab"} <= set(kinds)
    assert all(result.state == state for (state, _, result), kind in zip(probed, kinds) if kind == "refused")
    wandered = [run(env, "random", task, seed) for seed, task in enumerate(tasks)]
    assert sum(steps[-1][2].reward for steps in wandered) <= 1
    assert all(read_page(state) for steps in wandered for state, _, _ in steps)


def test_searcher_fills_a_form_again_after_it_was_left(env):
    """Stops a player that only counts its steps: what was typed is gone when one comes back to a form."""
    task = next(task for task in env.tasks("train") if "template 113" in task.groups)
    assert run(env, "searcher", task, leave_at=3)[-1][2].reward == 1
