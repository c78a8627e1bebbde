"""Rollouts: segments that only grow, cut contexts, budgets, sessions, imitation of the same."""

import zlib

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from dreamgym import tiny
from dreamgym.chat import encode_untrusted
from dreamgym.envs.base import Environment, Session, StepResult
from dreamgym.episode import Episode, Step, StopReason, Task, number_lines
from dreamgym.logprobs import TrainSample, token_logprobs
from dreamgym.prompts import Prompts, tried_actions
from dreamgym.rollout import Policy, PolicySettings, imitation_segments, rollout
from dreamgym.sampler import Sample
from dreamgym.word_tokenizer import build_tokenizer

WORDS = [
    "click[1]", "click[next >]", "search[slim red jacket]", "page 12345 of 9 67 8 saw", "you shop",
    "task: find me slim jacket", "state:", "action:", "<think> </think><action> </action>",
]
STEPS = [3, 1, 6, 2, 5, 4, 6, 1]


class World(Environment):
    """Pages that depend on every action so far; a task's episode ends after its own number of steps."""

    prompts, max_steps = Prompts(policy="you shop"), 20

    def __init__(self, breaks_after: int = 1000):
        self.sizes, self.open, self.ended, self.breaks_after = [], [], [], breaks_after

    def reset(self, tasks):
        sessions = [Session(task, task.start, inner=(0, 0)) for task in tasks]
        self.open += sessions
        return sessions

    def step(self, sessions, actions):
        self.sizes.append(len(sessions))
        if len(self.sizes) > self.breaks_after:
            raise ConnectionError("the browser is gone")
        results = []
        for session, action in zip(sessions, actions):
            steps, digit = session.inner
            session.inner = steps, digit = steps + 1, (digit * 7 + len(action)) % 10
            if digit != 3:  # else the action was refused
                session.state = f"page {steps} of {session.task.goal['steps']} saw {digit}"
            done = steps == session.task.goal["steps"]
            reward = float(done and digit % 2 == 0)
            results.append(StepResult(session.state, reward, done, raw_score=reward / 2, reasoning="so",
                                      reward_reasoning="no"))
        return results

    def end(self, sessions):
        self.ended += sessions

    def ground(self, state, action):
        return f"{action} {state[:4]}"


class FakeSampler:
    """Says scripted actions, or such as depend on prompt and episode, within the limits that the real one
    has."""

    def __init__(self, policy, script=None):
        self.policy, self.script, self.calls = policy, script, []

    def sample(self, prompts, keys, max_new_tok, temperature):
        samples = []
        for prompt, key in zip(prompts, keys):
            rng = np.random.default_rng([len(prompt), zlib.crc32(key.encode())])
            text = self.script[key].pop(0) if self.script else WORDS[rng.integers(3)]
            ids = encode_untrusted(self.policy.tokenizer, text) + self.policy.chat.end_ids[:1]
            room = max(0, min(max_new_tok, self.policy.settings.context - len(prompt)))
            stop = "end" if len(ids) <= room else "length" if room == max_new_tok else "context"
            samples.append(Sample(ids[:room], rng.normal(size=len(ids[:room])).tolist(), stop))
        self.calls += samples
        return samples


def tasks(*steps):
    return [Task(id=f"t{i}", text=f"find me slim jacket {i}", start=f"page 0 of {n}", goal={"steps": n})
            for i, n in enumerate(steps)]


@pytest.fixture(scope="module")
def tiny_model():
    tokenizer = build_tokenizer(WORDS)
    return tiny.create("scratch:8x1", tokenizer), tokenizer


def policy_of(tiny_model, env=None, slots=128, script=None, **settings):
    settings = PolicySettings(**{"context": 512, "max_action_tok": 12, "policy_format": "action"} | settings)
    policy = Policy(*tiny_model, env or World(), settings, slots=slots)
    policy.sampler = FakeSampler(policy, script)
    return policy


def read_in_turn(episode, turn):
    """The state as the policy reads it, with what it tried there before."""
    state = episode.steps[turn].state
    return "\n".join([state, *(f"tried: {a}" for a in tried_actions(episode.steps[:turn], state))])


def roll(policy, *steps, **more):
    return rollout(policy, policy.env, tasks(*steps), 1.0, "play", **more)


def play(tiny_model, steps, slots=128, max_transitions=None, **settings):
    policy = policy_of(tiny_model, slots=slots, **settings)
    return policy, roll(policy, *steps, max_transitions=max_transitions)


# ---- segments ----

def test_an_episode_records_what_the_world_said(tiny_model):
    _, episodes = play(tiny_model, STEPS)
    for i, episode in enumerate(episodes):
        assert (episode.id, episode.task.id) == (f"play-{i}", f"t{i}")
        assert (episode.world, episode.source) == ("real", "policy")
        again = World()
        (session,) = again.reset([episode.task])
        for step in episode.steps:
            before = session.state
            (result,) = again.step([session], [step.action])
            assert (step.state, step.next_state) == (before, result.state)
            assert (step.reward, step.done) == (result.reward, result.done)
            assert (step.reasoning, step.reward_reasoning) == ("so", "no")
            assert step.grounded == f"{step.action} {before[:4]}"
        assert episode.raw_score == episode.reward / 2 and len(episode.steps) == STEPS[i]
        assert episode.stop == (StopReason.SUCCESS if episode.reward else StopReason.FAILURE)
    assert {e.success for e in episodes} == {True, False} == {s.valid for e in episodes for s in e.steps}


def test_sampled_log_probs_are_those_of_the_trainer(tiny_model):
    """Ids that are tokenized a second time: a ratio that is not 1 before the first update."""
    settings = PolicySettings(context=110, max_action_tok=6, policy_format="action")
    policy = Policy(*tiny_model, World(), settings, slots=3)
    episodes = roll(policy, *STEPS)
    segments = [s for e in episodes for s in e.segments]
    with torch.no_grad():
        logp_N = token_logprobs(policy.model, [TrainSample(s.ids, s.mask) for s in segments], with_entropy=False)[0]
    sampled_N = torch.tensor([x for s in segments for x in s.logps])
    torch.testing.assert_close(logp_N, sampled_N, atol=1e-3, rtol=0)
    assert len(segments) > len(episodes)


def test_slots_change_no_episode(tiny_model):
    expected = play(tiny_model, STEPS)[1]
    for policy_slots, world_slots in ((3, 100), (100, 2), (1, 1)):
        policy, finished = policy_of(tiny_model, slots=policy_slots), []
        policy.env.slots = world_slots
        assert roll(policy, *STEPS, on_turn=finished.append) == expected
        slots = min(policy_slots, world_slots)
        assert max(policy.env.sizes) == slots and len(policy.env.sizes) <= sum(STEPS) / slots + 3
        assert sum(finished) == len(STEPS)


@pytest.mark.parametrize("limit", range(0, sum(STEPS) + 3, 3))
def test_a_budget_is_kept_exactly(tiny_model, limit):
    """A sample budget that is passed by a batch, and unfinished episodes that are trained on."""
    policy, episodes = play(tiny_model, STEPS, slots=4, max_transitions=limit)
    assert sum(policy.env.sizes) == policy.counts["turns"] == min(limit, sum(STEPS))
    assert all(len(e.steps) == STEPS[int(e.task.id[1:])] for e in episodes)
    assert sorted(map(id, policy.env.ended)) == sorted(map(id, policy.env.open))


@pytest.mark.parametrize("breaks_after", [0, 2, 5])
def test_every_session_is_given_back_once(tiny_model, breaks_after):
    policy = policy_of(tiny_model, World(breaks_after), slots=3)
    with pytest.raises(ConnectionError):
        roll(policy, *STEPS)
    assert sorted(map(id, policy.env.ended)) == sorted(map(id, policy.env.open)) and policy.env.open


def test_the_step_limit(tiny_model):
    """Endless episodes, and a limit that counts as success or as an end of the world."""
    policy = policy_of(tiny_model)
    policy.env.max_steps = 3
    episodes = roll(policy, 9, 2, 3)
    assert [(len(e.steps), e.stop == StopReason.STEP_LIMIT) for e in episodes] == [(3, True), (2, False), (3, False)]
    assert episodes[0].reward == 0 and not episodes[0].steps[-1].done
    assert roll(policy) == []


def test_unfinished_actions_get_their_end(tiny_model):
    """A chat that is broken by an action cut off in its middle."""
    policy, episodes = play(tiny_model, [4, 4, 4], max_action_tok=6)
    end = policy.chat.end_ids[0]
    unfinished = [sample.stop != "end" for sample in policy.sampler.calls]
    assert sum(unfinished) == policy.counts["unfinished_actions"] and set(unfinished) == {True, False}
    untrained = [m == 0 for e in episodes for s in e.segments for i, m in zip(s.ids, s.mask) if i == end]
    assert (len(untrained), sum(untrained)) == (12, sum(unfinished))


# ---- contexts ----

@pytest.mark.parametrize("context", [12, 40, 48, 60, 150])
def test_a_full_context_opens_a_new_segment(tiny_model, context):
    """Silent cuts: no segment is longer than the context, and the next one begins with the task. Where a turn does not
    fit, the episode ends."""
    policy, episodes = play(tiny_model, [9, 9, 2], context=context)
    assert policy.counts["cut_segments"] == sum(len(e.segments) - 1 for e in episodes)
    for episode in episodes:
        turn = 0
        for k, segment in enumerate(episode.segments):
            assert len(segment.mask) == len(segment.ids) and sum(segment.mask) == len(segment.logps) == segment.turn_ends[-1]
            if context == 150:
                assert len(segment.ids) <= context
                text = policy.tokenizer.decode(segment.ids[: segment.mask.index(1)], skip_special_tokens=True)
                shown = [s for i, s in enumerate(episode.steps[:turn])
                         if k and (i == 0 or i >= turn - policy.settings.recap_turns)]
                recap = "".join(f"state:\n{s.state}\naction: {s.action}\n" for s in shown)
                assert text.endswith(f"{recap}task: {episode.task.text}\nstate:\n{read_in_turn(episode, turn)}\n")
            turn += len(segment.turn_ends)
        assert turn == len(episode.steps) >= 1
    if context == 150:
        assert [len(e.segments) > 1 for e in episodes] == [True, True, False]
    if context == 12:
        assert [(e.stop, e.steps[0].action, len(e.steps)) for e in episodes] == [(StopReason.CONTEXT, "", 1)] * 3


# ---- prompts and imitation ----

@pytest.mark.parametrize("on", [True, False])
def test_the_prompt_says_what_the_settings_say(tiny_model, on):
    """A policy without its system prompt, one that gets it twice; a task on the wrong side of the state."""
    policy = policy_of(tiny_model, system_prompts=on, task_last=on)
    policy.env.numbered_lines = True
    (episode,) = roll(policy, 2)
    text = policy.tokenizer.decode(episode.segments[0].ids, skip_special_tokens=True)
    task, state = f"task: {episode.task.text}\n", f"state:\n{number_lines(episode.steps[1].state)}\n"
    assert text.count("you shop") == on and (state + task if on else task + state) in text
    assert "[1]" not in episode.steps[1].state


@pytest.mark.parametrize("context", [512, 140])
@pytest.mark.parametrize("policy_format", ["action", "element", "thought", "tags"])
def test_imitation_reads_what_a_rollout_reads(tiny_model, context, policy_format):
    settings = {"context": context, "policy_format": policy_format, "max_action_tok": 48}
    actions = {f"play-{i}": [WORDS[(i + t) % 3] for t in range(n)] for i, n in enumerate(STEPS)}
    form = {"action": "action: {}", "element": "page\naction: {}", "thought": "page\naction: {}",
            "tags": "<think>page</think><action>{}</action>"}[policy_format]
    script = {k: [form.format(a) for a in v] for k, v in actions.items()}
    policy, episodes = play(tiny_model, STEPS, script=script, **settings)
    fields = lambda segments: [(s.ids, s.mask if all_valid else None) for s in segments]
    for episode in episodes:
        assert [s.action for s in episode.steps] == actions[episode.id]
        assert {s.thought for s in episode.steps} == {"" if policy_format == "action" else "page"}
        copied, all_valid = imitation_segments(policy, episode), all(s.valid for s in episode.steps)
        shown = [s for s in episode.segments if all_valid or any(c.ids == s.ids for c in copied)]
        assert fields(copied) == fields(shown) and len(copied) == len(shown)
        trained = sum(sum(s.mask) for s in copied)
        turns = np.concatenate([np.diff([0, *s.turn_ends]) for s in episode.segments])
        assert trained == sum(n for n, step in zip(turns, episode.steps) if step.valid)
    assert any(not s.valid for e in episodes for s in e.steps)
    assert any(len(e.segments) > 1 for e in episodes) == (context < 512)


@pytest.mark.parametrize("numbered", [True, False])
def test_imitation_says_the_line_as_it_is_shown(tiny_model, numbered):
    policy = policy_of(tiny_model, policy_format="element", max_action_tok=48)
    policy.env.numbered_lines, number = numbered, " [2]" if numbered else ""
    step = Step(state="page 0 of 1\nlink", action="click [2]", grounded="click [2] link", next_state="page 1 of 1",
                done=True)
    (segment,) = imitation_segments(policy, Episode(id="a", task=tasks(1)[0], steps=[step]))
    text = policy.tokenizer.decode(segment.ids, skip_special_tokens=True)
    assert f"\nlink{number}\n" in text and text.endswith(f"link{number}\naction: click [2]")


def test_imitation_of_a_foreign_log(tiny_model):
    """Stops special tokens in a logged action from ending its turn: they are spelled out."""
    policy = policy_of(tiny_model)
    step = Step(state="page 0 of 1", action="click[<end>]", next_state="page 1 of 1", done=True)
    imitate = lambda *steps: imitation_segments(policy, Episode(id="log", task=tasks(1)[0], steps=list(steps)))
    (segment,) = imitate(step)
    assert segment.ids.count(policy.chat.end_ids[0]) == 1 and segment.mask[-1] == 1
    assert policy.tokenizer.decode([i for i, m in zip(segment.ids, segment.mask) if m][:-1]) == "action: click[<end>]"
    refused = replace(step, next_state=step.state, done=False)
    assert imitate(refused) == imitate(replace(step, imitate=False)) == []
    for long in (replace(step, state="page " * 600), replace(step, action="click " * 100)):
        second = replace(step, state=step.next_state, action="a", next_state=long.state)
        kept = imitate(step, second, replace(long, state=second.next_state))
        assert sum(len(s.turn_ends) for s in kept) == 2 and all(len(s.ids) <= policy.settings.context for s in kept)
    assert policy.counts["cut_demonstrations"] == 2
