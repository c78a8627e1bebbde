"""Players of the own sites: the oracle and the searcher win everything by WebArena's evaluators, the others do what they are for, and the rules agree."""
import numpy as np
import pytest

from dreamgym.envs.webarena import text as text
from dreamgym.envs.webarena.env import WebArena
from dreamgym.envs.webarena.scripted import make_player
from dreamgym.envs.webarena.tasks import checks, read_task


@pytest.fixture(scope="module")
def env():
    env = WebArena()
    yield env
    env.close()


def run(env, kind, task, seed=0):
    """[(state, action, result)] of one episode."""
    session = env.start([task])[0]
    act, steps = make_player(kind, task.text, np.random.default_rng(seed), session), []
    while session.steps < env.max_steps and not (steps and steps[-1][2].done):
        state = session.state
        action = act(state)
        steps.append((state, action, env.act([session], [action])[0]))
    return steps


def agrees(task, steps) -> bool:
    state, action, result = steps[-1]
    return not result.done or all(met for _, _, met in checks(read_task(task.text), state, action)) == (result.reward == 1)


def one_of_each(env):
    """A task of every template."""
    tasks = {}
    for task in env.tasks("test") + env.tasks("train"):
        tasks.setdefault(task.goal["config"]["intent_template_id"], task)
    return list(tasks.values()) + [task for task in env.tasks("train") if task.goal["type"] == "impossible"][:4]


@pytest.mark.parametrize("kind", ["oracle", "searcher"])
def test_experts_win_every_template(env, kind):
    for task in one_of_each(env):
        steps = run(env, kind, task)
        assert steps[-1][2].reward == 1, (task.text, [step[1] for step in steps])
        assert agrees(task, steps)


def test_imperfect_errs_and_recovers_and_the_rules_agree(env):
    played = [(task, run(env, "imperfect", task, seed)) for seed, task in enumerate(env.tasks("train")[::3])]
    won = [steps[-1][2].reward == 1 for _, steps in played]
    assert 0.5 < np.mean(won) < 0.95
    assert any(action == "go_back" and steps[-1][2].reward == 1 for _, steps in played for _, action, _ in steps)        # recovers
    assert np.mean([agrees(task, steps) for task, steps in played]) >= 0.99


def test_prober_meets_refusals_and_random_never_wins_by_chance(env):
    tasks = env.tasks("train")[::12]
    probed = [step for seed, task in enumerate(tasks) for step in run(env, "prober", task, seed)]
    kinds = [text.action_type(state, action) for state, action, _ in probed]
    assert kinds.count("refused") > len(kinds) / 6 and {"stop", "goto", "back", "tab"} <= set(kinds)
    wandered = [run(env, "random", task, seed) for seed, task in enumerate(tasks)]
    assert sum(steps[-1][2].reward for steps in wandered) <= 1 and all(text.read_page(state) for steps in wandered for state, _, _ in steps)


def test_searcher_fills_a_form_again_after_it_was_left(env):
    """What was typed is gone when one comes back to a form; a player that only counts steps would send it empty."""
    task = next(task for task in env.tasks("train") if task.goal["config"]["intent_template_id"] == 113)
    session = env.start([task])[0]
    act = make_player("searcher", task.text, np.random.default_rng(0), session)
    for _ in range(3):
        env.act([session], [act(session.state)])
    env.act([session], ["click [1]"])            # somebody leaves the form
    rewards = []
    while session.steps < env.max_steps and session.state != text.STOPPED:
        rewards.append(env.act([session], [act(session.state)])[0].reward)
    assert rewards[-1] == 1


def test_unknown_kinds_and_missing_sessions_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="expected oracle, searcher"):
        make_player("expert", "Disable Blue Lamp.", rng)
    with pytest.raises(ValueError, match="session"):
        make_player("oracle", "Disable Blue Lamp.", rng)
    with pytest.raises(ValueError, match="of none of the"):
        make_player("searcher", "Win the lottery.", rng)
