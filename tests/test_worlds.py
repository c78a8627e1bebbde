"""Worlds of experiments, around a judge by rule and the files of examples/files.py."""
from types import SimpleNamespace

import pytest

from dreamgym.encoder import WordEncoder
from dreamgym.envs.base import Audit, StepResult, env_of_data, make_env
from dreamgym.episode import StopReason, read_episodes
from dreamgym.experience_model import ExperienceModel, ExperienceSettings, new_retrieval
from dreamgym.run import load_meta
from dreamgym.worlds import Options, World, parse_options
from tests.conftest import EXAMPLE


class FilesAudit(Audit):
    def success(self, task, state, action, next_state):
        return f"did {task.text}" in next_state


class Judge(ExperienceModel):
    """Pays every listing and ends the episode; cannot read a page that says "moved"."""

    def __init__(self, env, memory):
        super().__init__(None, None, env, ExperienceSettings(), memory, slots=4)

    def judge(self, steps):
        return [(None, "???") if "did move" in page else (("seen", float(action == "ls"), action == "ls"), "")
                for _, _, action, page in steps]

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


@pytest.fixture
def world(workspace):
    """world(option=value, ...) over the recorded episodes of the workspace; and these."""
    env = env_of_data(EXAMPLE, load_meta(workspace.data)["settings"])
    env.audit, episodes = FilesAudit(), read_episodes(workspace.data / "train.jsonl")
    model = Judge(env, new_retrieval("words", episodes))
    return SimpleNamespace(make=lambda seed=0, **options: World(model, env, Options(**options), seed),
                           env=env, episodes=[e for e in episodes if e.source != "counterfactual"])


def replay(world, episode) -> tuple[list, list]:
    """(results of the episode's own actions until the world ends it, sessions)."""
    sessions, results = world.reset([episode.task]), []
    for step in episode.steps:
        results += world.step(sessions, [step.action])
        if results[-1].done:
            break
    world.end(sessions)
    return results, sessions


def test_the_true_world_and_the_lookup_play_what_was_recorded(world):
    """A grounding of the wrong state; rewards or ends that are lost."""
    found = 0
    for episode in world.episodes:
        recorded = [(s.next_state, s.reward, s.done) for s in episode.steps]
        results, sessions = replay(world.make(pages="true"), episode)
        assert [(r.state, r.reward, r.done) for r in results] == recorded
        assert sessions[0].steps == len(results) and sessions[0].state == recorded[-1][0]
        results, _ = replay(world.make(pages="lookup"), episode)
        found += [(r.state, r.reward, r.done) for r in results] == recorded
    assert found > 0.8 * len(world.episodes)     # a table cannot tell apart what a page does not show


def test_what_was_never_seen_changes_nothing(world):
    session, = (table := world.make(pages="lookup")).reset([world.episodes[0].task])
    result, = table.step([session], ["open the red door of the castle"])
    assert (result.state, result.done, result.reward) == (session.state, False, 0.0)


def test_rewards_come_from_where_the_options_say(world):
    won = next(e for e in world.episodes if e.success and "move" not in e.task.text)
    assert replay(world.make(pages="true", rewards="rule"), won)[0][-1].reward == 1.0
    moved = next(e for e in world.episodes if e.success and e.task.text.startswith("move"))
    broken = replay(world.make(pages="true", rewards="learnt"), moved)[0][-1]
    if any(s.action == "ls" for s in moved.steps):
        assert (broken.stop, broken.reward) == (StopReason.SUCCESS, 1.0)
    else:
        assert (broken.stop, broken.output) == (StopReason.MALFORMED, "???")
    session, = (learnt := world.make(pages="true", rewards="learnt")).reset([won.task])
    result, = learnt.step([session], ["ls"])
    assert (result.reward, result.done, result.stop) == (1.0, True, StopReason.SUCCESS)


def test_a_broken_dream_is_not_judged_again(world, monkeypatch):
    learnt = world.make(pages="learnt", rewards="learnt")
    session, = learnt.reset([world.episodes[0].task])
    broken = StepResult(session.state, done=True, stop=StopReason.MALFORMED)
    monkeypatch.setattr(learnt.base, "step", lambda *_: [broken])
    result, = learnt.step([session], ["ls"])
    assert (result.reward, result.stop) == (0.0, StopReason.MALFORMED)


@pytest.mark.parametrize("rates, paid", [
    ({}, 0.0), ({"false_positives": 1.0}, 1.0), ({"false_negatives": 1.0}, 0.0)])
def test_an_outcome_is_turned_at_the_step_limit_too(world, rates, paid):
    session, = (noisy := world.make(pages="true", **rates)).reset([world.episodes[0].task])
    results = [noisy.step([session], ["nothing"])[0] for _ in range(world.env.max_steps)]
    assert [r.reward for r in results[:-1]] == [0.0] * (world.env.max_steps - 1)
    assert (results[-1].reward, results[-1].done) == (paid, bool(paid))


def test_errors_at_random_and_errors_that_can_be_exploited(world):
    """Rates that are not kept, groups that always fall alike, draws that a resume repeats."""
    won = [e for e in world.episodes if e.success][:8]
    outcomes = lambda noisy: [[replay(noisy, e)[0][-1].reward for e in won] for _ in range(25)]
    noisy = world.make(pages="true", false_negatives=0.4)
    rows = outcomes(noisy)
    assert 0.5 < sum(map(sum, rows)) / 200 < 0.7 and len({tuple(row) for row in rows}) > 20
    again = world.make(pages="true", false_negatives=0.4)
    again.set_state(noisy.get_state())
    assert outcomes(again) == outcomes(noisy) != rows
    fixed = outcomes(world.make(pages="true", false_negatives=0.4, fixed=True))
    assert len({tuple(row) for row in fixed}) == 1 and 0 < sum(fixed[0]) < 8
    assert outcomes(world.make(1, pages="true", false_negatives=0.4, fixed=True)) != fixed


def test_a_swapped_page_is_shown_and_the_world_goes_on(world):
    episode = next(e for e in world.episodes if e.success and len(e.steps) > 2)
    results, (session,) = replay(world.make(pages="true", swapped_pages=1.0), episode)
    pages = {s.next_state for e in world.episodes for s in e.steps}
    assert all(r.state in pages and r.state != s.next_state for r, s in zip(results, episode.steps))
    assert session.inner.state == episode.steps[-1].next_state and results[-1].reward == 1.0


@pytest.mark.parametrize("given, said", [
    (["pages=drawn"], "pages"), (["pages"], "name=value"), (["colour=red"], "colour"),
    (["swapped_pages=1.5"], "swapped_pages")])
def test_options_that_do_not_fit(given, said):
    with pytest.raises(ValueError, match=f"--dream {given[0]}.*{said}"):
        parse_options(given)
    assert parse_options(["pages=true", "fixed=true", "false_positives=0.1"]) == Options(
        pages="true", fixed=True, false_positives=0.1)


def test_what_an_environment_cannot_give(world, workspace):
    logs = make_env("logs", file=str(workspace.data / "train.jsonl"))
    for options, said in ((Options(pages="true"), "no world to play in"), (Options(rewards="rule"), "no audit")):
        with pytest.raises(ValueError, match=said):
            World(Judge(logs, (None, WordEncoder(8))), logs, options, 0)
