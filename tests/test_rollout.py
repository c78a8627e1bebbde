"""Rollouts: append-only streams, their log-probs, slots, cut contexts, unfinished actions, and the same streams from somebody else's actions."""

import numpy as np
from dataclasses import replace

import pytest
import torch

from dreamgym.envs import Session, StepResult
from dreamgym.episode import Episode, Step, Task
from dreamgym.model import Row, build_tokenizer, clip_grad_norm, create_tiny, encode, encode_untrusted, row_logps
from dreamgym.prompts import parse_action, policy_first
from dreamgym.rollout import Policy, imitation_streams, rollout
from dreamgym.sampler import Sample

WORDS = ["click[1]", "click[next >]", "search[slim red jacket]", "page 12345 of 9 67 8 saw", "task: find me slim jacket", "state:", "action:"]


class World:
    """Pages that depend on every action so far; episode i ends after its own number of steps, with a reward that depends on the actions."""

    def __init__(self):
        self.acts = []

    def start(self, tasks):
        return [Session("w", task, f"page 0 of {task.goal['steps']}", inner=0) for task in tasks]

    def act(self, sessions, actions):
        self.acts.append(len(sessions))
        results = []
        for session, action in zip(sessions, actions):
            session.steps += 1
            session.inner = (session.inner * 7 + len(action)) % 10
            session.state = f"page {session.steps} of {session.task.goal['steps']} saw {session.inner}"
            done = session.steps == session.task.goal["steps"]
            reward = float(done and session.inner % 2 == 0)
            results.append(StepResult(session.state, reward, done, {"valid": session.inner != 3, "score": reward / 2, "grounded": action + "!", "reasoning": "so"}))
        return results


class Scripted:
    """A sampler that says given actions."""

    def __init__(self, tokenizer, actions):
        self.tokenizer, self.actions = tokenizer, actions

    def sample(self, prompts, keys, max_new_tok, temperature):
        turn = [self.actions[key].pop(0) for key in keys]
        return [Sample(ids := encode_untrusted(self.tokenizer, a) + [self.tokenizer.eos_token_id], [0.0] * len(ids), "end") for a in turn]


def tasks(*steps):
    return [Task(f"t{i}", f"find me slim jacket {i}", start=f"page 0 of {n}", goal={"steps": n}) for i, n in enumerate(steps)]


@pytest.fixture(scope="module")
def trained():
    """A tiny model that has half learnt to say short actions: its samples vary, most of them end."""
    tokenizer = build_tokenizer(WORDS)
    model = create_tiny(tokenizer, "tiny", 0)
    policy = Policy(model, tokenizer)
    rows = []
    for i, action in enumerate(WORDS[:3] * 2):
        prompt = policy.first_ids(policy_first(f"find me slim jacket {i}", f"page {i} of {9 - i} saw {i}"))
        answer = encode(tokenizer, action) + policy.fmt.end_ids[:1]
        rows.append(Row(prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(25):
        (-row_logps(model, rows, with_entropy=False)[0].mean()).backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def policy_of(trained, **changes):
    return Policy(*trained, **{"max_action_tok": 12, **changes})


def play(trained, steps, temperature=1.0, max_steps=20, **changes):
    policy = policy_of(trained, **changes)
    return policy, rollout(policy, World(), tasks(*steps), max_steps, temperature, "play", "dream")


STEPS = [3, 1, 6, 2, 5, 4, 6, 1]


# ---------------------------------------------------------------------------------------------------------------- streams


def test_streams_only_grow_and_say_what_was_sampled(trained):
    """Stops ids that are rendered or tokenized a second time: every prompt is the stream so far plus one page, every trained token was sampled."""
    policy = policy_of(trained)
    calls, real = [], policy.sampler.sample

    def spy(prompts, keys, *rest):
        samples = real(prompts, keys, *rest)
        calls.append(dict(zip(keys, zip(prompts, samples))))
        return samples

    policy.sampler.sample = spy
    episodes = rollout(policy, World(), tasks(*STEPS), 20, 1.0, "play", "real")
    assert len({s.action for e in episodes for s in e.steps}) > 5, "the test needs a policy that varies"
    for episode in episodes:
        (stream,) = episode.streams
        said = [call[episode.id] for call in calls if episode.id in call]
        assert len(said) == len(episode.steps) == len(stream.turn_ends)
        for (prompt, sample), step in zip(said, episode.steps):
            assert stream.ids[: len(prompt) + len(sample.ids)] == prompt + sample.ids
            assert parse_action(policy.tokenizer.decode([i for i in sample.ids if i not in policy.fmt.end_ids])) == step.action
            assert policy.tokenizer.decode(prompt, skip_special_tokens=True).endswith(f"state:\n{step.state}\n")
        assert [i for i, m in zip(stream.ids, stream.mask) if m] == [i for _, sample in said for i in sample.ids]
        assert stream.logps == [x for _, sample in said for x in sample.logps]
        assert stream.turn_ends == np.cumsum([len(sample.ids) for _, sample in said]).tolist()
        assert len(stream.mask) == len(stream.ids) and stream.mask[0] == 0


def test_an_episode_records_what_the_world_said(trained):
    """Stops steps that are shifted against each other, and lost rewards, scores, validity, reasoning or stop reasons."""
    _, episodes = play(trained, STEPS)
    for i, episode in enumerate(episodes):
        assert (episode.id, episode.task.id, episode.world, episode.source, len(episode.steps)) == (f"play-{i}", f"t{i}", "dream", "policy", STEPS[i])
        inner, before = 0, episode.task.start
        for t, step in enumerate(episode.steps, 1):
            inner = (inner * 7 + len(step.action)) % 10
            page, done = f"page {t} of {STEPS[i]} saw {inner}", t == STEPS[i]
            assert (step.state, step.next_state, step.done, step.valid, step.grounded, step.reasoning) == (before, page, done, inner != 3, step.action + "!", "so")
            before = page
        assert episode.reward == float(inner % 2 == 0) and episode.score == episode.reward / 2
        assert episode.stop == ("success" if episode.reward else "failure")
    assert {e.stop for e in episodes} == {"success", "failure"}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_log_probs_are_those_of_the_trainer(trained, temperature):
    """Stops a ratio that is not 1 before the first update: cached decoding over turns against one forward over the finished stream."""
    _, episodes = play(trained, STEPS, temperature)
    streams = [s for e in episodes for s in e.streams]
    with torch.no_grad():
        logp_N, _, _ = row_logps(trained[0], [Row(s.ids, s.mask) for s in streams], temperature, with_entropy=False)
    torch.testing.assert_close(logp_N, torch.tensor([x for s in streams for x in s.logps]), atol=1e-3, rtol=0)


def test_slots_change_no_episode(trained):
    """Stops episodes that depend on how many run at once, or that come back in the order they finish in."""
    runs = [play(trained, STEPS, 0.0, slots=slots)[1] for slots in (64, 3, 1)]
    for episodes in runs[1:]:
        assert [e.id for e in episodes] == [f"play-{i}" for i in range(len(STEPS))]
        assert [(e.steps, [(s.ids, s.mask, s.turn_ends) for s in e.streams]) for e in episodes] == [(e.steps, [(s.ids, s.mask, s.turn_ends) for s in e.streams]) for e in runs[0]]


def test_finished_episodes_make_room(trained):
    """Stops a batch that runs dry: with 2 slots the 8 episodes take sum(steps) / 2 rounds and not the sum of the longest; on_turn counts each once."""
    policy, world, finished = policy_of(trained, slots=2), World(), []
    rollout(policy, world, tasks(*STEPS), 20, 1.0, "play", "real", finished.append)
    assert sum(finished) == len(STEPS) and max(world.acts) == 2 and sum(world.acts) == sum(STEPS) and len(world.acts) <= sum(STEPS) / 2 + 2


def test_the_step_limit(trained):
    """Stops endless episodes, and a limit that counts as success or as an end of the world."""
    _, episodes = play(trained, [9, 2, 3], max_steps=3)
    assert [(len(e.steps), e.stop == "step_limit") for e in episodes] == [(3, True), (2, False), (3, False)]
    assert episodes[0].reward == 0 and not episodes[0].steps[-1].done


def test_no_tasks(trained):
    """Stops a crash on the rank that has no share of a small evaluation."""
    assert rollout(policy_of(trained), World(), [], 5, 1.0, "play", "real") == []


def test_unfinished_actions_get_their_end(trained):
    """Stops a chat form that is broken by an action cut off in its middle: the end token is written, not trained, and the cut is counted."""
    policy, episodes = play(trained, [4, 4, 4], max_action_tok=2)
    end, open_turns = policy.fmt.end_ids[0], 0
    for episode in episodes:
        (stream,) = episode.streams
        starts = [i for i in range(1, len(stream.ids)) if stream.mask[i] and not stream.mask[i - 1]]
        assert len(starts) == 4
        for start in starts:
            turn = next(i for i in range(start, start + 3) if stream.ids[i] == end)
            assert turn <= start + 2 and stream.mask[turn] == (turn < start + 2)
            open_turns += turn == start + 2
    assert open_turns == policy.counts["unfinished_actions"] > 0 and policy.counts["turns"] == 12


# ---------------------------------------------------------------------------------------------------------------- contexts


def test_a_full_context_opens_a_new_stream(trained):
    """Stops silent cuts: no stream is longer than the context, the next one begins from the task, its first and its last turns, turns stay in order, cuts are counted."""
    policy, episodes = play(trained, [9, 9, 2], context=150)
    assert [len(e.streams) > 1 for e in episodes] == [True, True, False]
    assert policy.counts["cut_streams"] == sum(len(e.streams) - 1 for e in episodes)
    for episode in episodes:
        assert sum(len(s.turn_ends) for s in episode.streams) == len(episode.steps)
        turn = 0
        for k, stream in enumerate(episode.streams):
            assert len(stream.ids) <= 150 and len(stream.mask) == len(stream.ids) and sum(stream.mask) == len(stream.logps) == stream.turn_ends[-1]
            text = policy.tokenizer.decode(stream.ids[: stream.mask.index(1)], skip_special_tokens=True)
            shown = [s for i, s in enumerate(episode.steps[:turn]) if i == 0 or i >= turn - policy.recap_turns] if k else []
            recap = "".join(f"state:\n{s.state}\naction: {s.action}\n" for s in shown)
            assert text == f"task: {episode.task.text}\n{recap}state:\n{episode.steps[turn].state}\n"
            turn += len(stream.turn_ends)
    with torch.no_grad():
        streams = [s for e in episodes for s in e.streams]
        logp_N, _, _ = row_logps(trained[0], [Row(s.ids, s.mask) for s in streams], with_entropy=False)
    torch.testing.assert_close(logp_N, torch.tensor([x for s in streams for x in s.logps]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("context", [12, 20, 34, 45])
def test_a_context_without_room_ends_the_episode(trained, context):
    """Stops a crash, an endless loop or an untrained reward where page and task alone fill the context: the episode ends with stop 'context'."""
    policy, episodes = play(trained, [3, 3], context=context)
    for episode in episodes:
        assert len(episode.steps) == sum(len(s.turn_ends) for s in episode.streams) >= 1
        assert all(len(s.mask) == len(s.ids) and sum(s.mask) == len(s.logps) for s in episode.streams)
    assert context > 12 or [(e.stop, e.steps[0].action) for e in episodes] == [("context", "")] * 2


def test_a_world_may_have_room_for_few(trained):
    """Stops more episodes at once than a world has browsers for."""
    policy, world = policy_of(trained), World()
    world.slots = 2
    policy.sampler = Scripted(policy.tokenizer, {f"play-{i}": [WORDS[0]] * 3 for i in range(5)})
    assert len(rollout(policy, world, tasks(*[3] * 5), 20, 1.0, "play", "real")) == 5
    assert max(world.acts) == 2 and sum(world.acts) == 15


# ---------------------------------------------------------------------------------------------------------------- imitation


@pytest.mark.parametrize("context", [512, 110])
@pytest.mark.parametrize("system", ["", "you shop"])
def test_imitation_reads_what_a_rollout_reads(trained, context, system):
    """Stops imitation from training another prompt than the one the policy acts on, cut contexts included."""
    policy = policy_of(trained, context=context, system=system)
    actions = {f"play-{i}": [WORDS[(i + t) % 3] for t in range(n)] for i, n in enumerate(STEPS)}
    policy.sampler = Scripted(policy.tokenizer, {k: list(v) for k, v in actions.items()})
    for episode in rollout(policy, World(), tasks(*STEPS), 20, 1.0, "play", "real"):
        assert [s.action for s in episode.steps] == actions[episode.id]
        taken = replace(episode, steps=[replace(s, valid=True) for s in episode.steps])
        assert imitation_streams(policy, taken) == episode.streams
        if len(episode.steps) > 1:               # a refused action is read, and not imitated
            refused = imitation_streams(policy, replace(taken, steps=[replace(taken.steps[0], valid=False), *taken.steps[1:]]))
            assert [s.ids for s in refused] == [s.ids for s in episode.streams] and not refused[0].mask[:refused[0].mask.index(1)].count(1)
            assert sum(sum(s.mask) for s in episode.streams) - sum(sum(s.mask) for s in refused) == episode.streams[0].turn_ends[0]


def test_imitation_of_what_is_thought_before(trained):
    """Stops an environment's form of answers (the line an action is about comes first) from being left out of what is imitated."""
    policy = policy_of(trained)
    episode = Episode("log", tasks(1)[0], [Step("page 0 of 1", "click[1]", "page 1 of 1", done=True)])
    (stream,) = imitation_streams(policy, episode, lambda state, action: f"{state[:6]}\n{action}")
    written = policy.tokenizer.decode([i for i, m in zip(stream.ids, stream.mask) if m][:-1])
    assert written == "page 0\nclick[1]" and parse_action(written) == "click[1]"


def test_imitation_of_a_foreign_log(trained):
    """Stops special tokens in a logged action from ending its turn: they are spelled out."""
    policy = policy_of(trained)
    episode = Episode("log", tasks(1)[0], [Step("page 0 of 1", "click[<end>]", "page 1 of 1", done=True)])
    (stream,) = imitation_streams(policy, episode)
    assert stream.ids.count(policy.fmt.end_ids[0]) == 1 and stream.mask[-1] == 1
    assert policy.tokenizer.decode([i for i, m in zip(stream.ids, stream.mask) if m][:-1]) == "click[<end>]"
