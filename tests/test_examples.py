"""examples/files.py, which users copy: short, winnable, and true to the contract of an environment."""
import numpy as np
import pytest

from dreamgym.envs.base import Player, make_env
from dreamgym.episode import StopReason, check_episode
from dreamgym.offline import SPLITS, counterfactuals, play, read_tasks
from tests.conftest import ROOT

FILE = ROOT / "examples" / "files.py"


@pytest.fixture(scope="module")
def env():
    return make_env(str(FILE))


def test_it_is_short():
    """An example that grows until nobody reads it: it is the proof that an environment is small."""
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 110


def test_splits_share_no_task(env):
    """Training on the tasks that success is measured on."""
    texts = [{task.text for task in env.tasks(split)} for split in SPLITS]
    assert min(map(len, texts)) >= 10 and len(set().union(*texts)) == sum(map(len, texts))


@pytest.mark.parametrize("name, least, most", [("solver", 0.8, 1.0), ("random", 0.0, 0.15)])
def test_players(env, name, least, most):
    """A world in which nothing can be learnt: the solver cannot win, or anything does."""
    rng, tasks = np.random.default_rng(0), read_tasks(env, "train")[:200]
    episodes = [play(env, task, env.players()[name], rng, f"e{i}") for i, task in enumerate(tasks)]
    share = np.mean([episode.success for episode in episodes])
    assert least <= share <= most
    for episode in episodes:
        assert all(step.reasoning and step.reward_reasoning for step in episode.steps)
        assert episode.success == episode.steps[-1].reward_reasoning.endswith("so yes")
        assert (episode.stop == StopReason.SUCCESS) == episode.success
    assert {step.valid for episode in episodes for step in episode.steps} == ({True, False})


@pytest.mark.parametrize("action", ["", "dance", "cd", "cd nowhere", "cat", "cat nothing", "mv", "rm nothing", "answer",
                                    "answer what", "write", "cd docs extra", "rm\nrm", "mv notes docs now"])
def test_a_bad_action_changes_nothing(env, action):
    """A crash, or a page that changes, on what a policy may write."""
    for session in env.reset(env.tasks("train")[:50]):
        before = session.state
        result = env.step([session], [action])[0]
        assert (result.state, result.reward, result.done) == (before, 0.0, False) and session.state == before


def test_sessions_do_not_share_a_disk(env):
    """A task whose files were moved by the rollout before."""
    task = env.tasks("train")[0]
    for _ in range(2):
        session = env.reset([task])[0]
        assert session.state == task.start
        env.step([session] * 3, ["cd docs", "cd music", "cd docs"])
        assert session.state != task.start and session.steps == 3


def test_an_answer_counts_only_where_it_was_read(env):
    """A reward for a lucky guess: the page would not say why it is 1."""
    task = next(task for task in env.tasks("train") if task.text.startswith("answer"))
    guess = Player(lambda session, rng: lambda state: session.task.goal["command"])
    episode = check_episode(play(env, task, guess, None, "guess"))
    assert episode.stop == StopReason.FAILURE and len(episode.steps) == 1


def test_counterfactuals_are_optional(env):
    """An environment without counterfactuals that cannot be collected from."""
    tasks = {split: read_tasks(env, split) for split in SPLITS}
    assert counterfactuals(env, {split: [] for split in SPLITS}, tasks, "train", 10, np.random.default_rng(0)) == []
