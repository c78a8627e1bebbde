"""Training data of the own sites: the oracle and the searcher win everything by WebArena's evaluators, and counterfactual
rewards are right."""
import numpy as np
import pytest

from dreamgym import hindsight, offline
from dreamgym.envs.base import Player
from dreamgym.envs.webarena.env import WebArena
from dreamgym.envs.webarena.tasks import read_task, rule_success
from dreamgym.envs.webarena.text import action_type, read_page
from tests.conftest import probed


def played(env, count, split="train"):
    """`count` episodes of every player, and of the prober."""
    rng, tasks = np.random.default_rng(0), env.tasks(split)
    plain = [offline.play(env, tasks[rng.integers(len(tasks))], player, rng, f"{name}-{i}")
             for i in range(count) for name, player in env.players().items()]
    return plain + [probed(env, before, plain, rng) for before in plain[:count]]


@pytest.fixture(scope="module")
def env():
    env = WebArena()
    yield env
    env.close()


@pytest.fixture(scope="module")
def episodes(env):
    return played(env, 18)


# ---- players ----

def run(env, kind, task, seed=0, change=lambda player: player):
    return offline.play(env, task, change(env.players()[kind]), np.random.default_rng(seed), kind).steps


def agrees(task, steps) -> bool:
    last = steps[-1]
    return not last.done or rule_success(task.text, last.state, last.action) == (last.reward == 1)


@pytest.mark.parametrize("kind", ["oracle", "searcher"])
def test_experts_win_every_template(env, kind):
    """A template whose plan does not lead to its reward; a thought that names another element than the action."""
    everything = env.tasks("test") + env.tasks("valid") + env.tasks("train")
    impossible = [task for task in everything if task.goal["parameters"].get("answer") == "N/A"][:4]
    for task in [*{task.groups[1]: task for task in everything}.values(), *impossible]:
        steps = run(env, kind, task)
        assert steps[-1].reward == 1, (task.text, [step.action for step in steps])
        assert agrees(task, steps)
        for step in steps:
            plan, _, due = step.thought.rpartition(" ; ")
            said, _, found = due.partition(" : ")
            assert said == "back" or said in plan
            assert found in ("", "none") or step.grounded == f"{step.action} {found}", (task.text, step.thought)


def test_a_wrong_answer_about_an_absent_thing_is_a_failure(env):
    """Wrong answers that only a judge could tell from the right one."""
    task = next(task for task in env.tasks("train") if task.goal["parameters"].get("answer") == "N/A")
    *way, last = [step.action for step in run(env, "searcher", task)]
    for said, outcome in ((last, "success"), ("stop [No products found.]", "failure"), ("stop []", "failure")):
        actions = iter([*way, said])
        player = Player(lambda session, rng, actions=actions: lambda state: next(actions))
        assert offline.play(env, task, player, np.random.default_rng(0), "0").stop == outcome


def test_imperfect_errs_and_recovers_and_the_rules_agree(env):
    """Demonstrations without mistakes (nothing to improve on)."""
    played = [(task, run(env, "imperfect", task, seed)) for seed, task in enumerate(env.tasks("train")[::3])]
    assert 0.5 < np.mean([steps[-1].reward for _, steps in played]) < 0.95
    assert any(step.action == "go_back" and steps[-1].reward for _, steps in played for step in steps)
    assert np.mean([agrees(task, steps) for task, steps in played]) >= 0.99


def test_prober_meets_refusals_and_random_never_wins_by_chance(env):
    """Offline data without refused actions, and actions called refused that change the page."""
    tasks = env.tasks("train")[::10]
    rng, players = np.random.default_rng(0), env.players()
    searched, wandered = ([offline.play(env, task, players[name], rng, task.id) for task in tasks]
                          for name in ("searcher", "random"))
    steps = [step for before in searched for step in probed(env, before, wandered, rng).steps]
    kinds = [action_type(step.state, step.action) for step in steps]
    assert kinds.count("refused") > len(kinds) / 6 and {"stop", "goto", "back", "tab"} <= set(kinds)
    assert all(step.next_state == step.state for step, kind in zip(steps, kinds) if kind == "refused")
    assert sum(episode.success for episode in wandered) <= 1
    assert all(read_page(step.state) for episode in wandered for step in episode.steps)


def test_searcher_fills_a_form_again_after_it_was_left(env):
    """A player that only counts its steps: what was typed is gone when one comes back to a form."""
    task = next(task for task in env.tasks("train") if "template 113" in task.groups)

    def leaves_once(player):
        def make(session, rng):
            act, turns = player.make(session, rng), iter(range(99))
            return lambda state: "click [3]" if next(turns) == 3 else act(state)
        return Player(make)

    assert run(env, "searcher", task, change=leaves_once)[-1].reward == 1


def test_the_audit_calls_few_counterfactual_rewards_wrong(env, episodes):
    """Successes under tasks that they fulfil, too, and tasks of held-out templates."""
    made = hindsight.counterfactual_rewards(episodes, 500, np.random.default_rng(1), {})
    wrong = [rule_success(e.task.text, e.steps[0].state, e.steps[0].action) != e.success for e in made]
    assert len(made) > 100 and np.mean(wrong) < 0.03
    assert not any(read_task(e.task.text).template.held_out for e in made)
