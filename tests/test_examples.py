"""examples/files.py, which users copy: short, winnable, and true to the contract of an environment."""
import json
import re

import numpy as np
import pytest

from dreamgym.envs.base import Player, make_env
from dreamgym.episode import Episode, StopReason, check_episode, from_json
from dreamgym.offline import SPLITS, counterfactuals, play, tasks_with_start
from tests.conftest import ROOT

FILE = ROOT / "examples" / "files.py"


@pytest.fixture(scope="module")
def env():
    return make_env(str(FILE))


def test_splits_share_no_task(env):
    texts = [{task.text for task in env.tasks(split)} for split in SPLITS]
    assert min(map(len, texts)) >= 10 and len(set().union(*texts)) == sum(map(len, texts))


@pytest.mark.parametrize("name, least, most", [("solver", 0.8, 1.0), ("random", 0.0, 0.15)])
def test_players(env, name, least, most):
    """A world in which nothing can be learnt: the solver cannot win, or anything does."""
    rng, tasks = np.random.default_rng(0), tasks_with_start(env, "train")[:200]
    episodes = [play(env, task, env.players()[name], rng, f"e{i}") for i, task in enumerate(tasks)]
    share = np.mean([episode.success for episode in episodes])
    assert least <= share <= most
    for episode in episodes:
        assert all(step.reasoning and step.reward_reasoning for step in episode.steps)
        assert episode.success == episode.steps[-1].reward_reasoning.endswith("so yes")
        assert (episode.stop == StopReason.SUCCESS) == episode.success
    assert {step.valid for episode in episodes for step in episode.steps} == ({True, False})


@pytest.mark.parametrize("action", ["", "dance", "cd", "cd nowhere", "cat nothing", "mv", "rm nothing",
                                    "answer what", "cd docs extra", "rm\nrm", "mv notes docs now"])
def test_a_bad_action_changes_nothing(env, action):
    for session in env.reset(env.tasks("train")[:50]):
        before = session.state
        result = env.step([session], [action])[0]
        assert (result.state, result.reward, result.done) == (before, 0.0, False) and session.state == before


def test_an_answer_counts_only_where_it_was_read(env):
    """A reward for a lucky guess: the page would not say why it is 1."""
    task = next(task for task in env.tasks("train") if task.text.startswith("answer"))
    guess = Player(lambda session, rng: lambda state: session.task.goal["command"])
    episode = check_episode(play(env, task, guess, None, "guess"))
    assert episode.stop == StopReason.FAILURE and len(episode.steps) == 1


# ---- the tutorial ----

TUTORIAL = (ROOT / "docs" / "your-environment.md").read_text()
BLOCKS = [block.split("```")[0] for block in TUTORIAL.split("```python\n")[1:]]


def test_the_tutorials_environment_works(tmp_path):
    (tmp_path / "guess.py").write_text(BLOCKS[0])
    env = make_env(str(tmp_path / "guess.py"))
    task = tasks_with_start(env, "test")[1]
    for add, said, stop in ((-1, "too low", "step_limit"), (1, "too high", "step_limit"), (0, "right", "success")):
        guess = Player(lambda session, rng, add=add: lambda state: str(session.task.goal["number"] + add))
        episode = play(env, task, guess, None, "e")
        number = task.goal["number"] + add
        assert (episode.steps[0].next_state, episode.stop) == (f"{number} is {said}", stop)
    assert env.step(env.reset([task]), ["open it"])[0].state == task.start


def test_the_tutorials_counterfactuals_work(tmp_path):
    text = FILE.read_text().replace("import Task", "import Episode, Step, Task")
    (tmp_path / "files.py").write_text(text.replace("\n\ndef make_task", BLOCKS[1] + "\n\ndef make_task"))
    env, rng = make_env(str(tmp_path / "files.py")), np.random.default_rng(0)
    tasks = {split: tasks_with_start(env, split) for split in SPLITS}
    parts = {split: [] for split in SPLITS}
    parts["train"] = [play(env, task, env.players()["solver"], rng, task.id) for task in tasks["train"]]
    made = counterfactuals(env, parts, tasks, "train", 50, rng)
    assert {episode.label for episode in made} == {"none", "folder"} and len(made) > 20
    for episode in made:
        did = episode.steps[0].next_state.split("\ndid ")[1]
        assert episode.success == (did == episode.task.text) == (episode.label == "none")


def test_the_files_page_shows_an_episode_that_is_read():
    block = (ROOT / "docs" / "data.md").read_text().split("```json\n")[1].split("```")[0]
    assert from_json(json.loads(block), Episode, "docs/data.md").success


def test_the_converter_of_the_documents():
    """A converter that makes lines which collect.py refuses."""
    code = (ROOT / "docs" / "data.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code, made := {})
    line = made["episode"]("log-1", "delete\nnotes", [("file notes", "rm\nnotes"), ("", "")], True)
    episode = from_json(json.loads(line), Episode, "line")
    assert (episode.task.text, episode.success, episode.steps[0].next_state) == ("delete notes", True, "(end)")


def test_the_tutorial_names_what_exists():
    """A tutorial that counts and names what has changed since, and an example that grows too long."""
    count = len(FILE.read_text().splitlines())
    assert count <= 120 and f"in {count} lines" in TUTORIAL
    for script in set(re.findall(r"python (\w+\.py)", TUTORIAL)):
        assert (ROOT / script).is_file()
