"""Many episodes in lock-step: policy and world batched, in the dream and in a real environment alike.

A policy stream is append-only token ids: what was sampled is what is trained. When a stream would pass the context it is closed and a new one
begins from the task, the first turn (ALFWorld's lists the room) and the last ones; each stream is one training row, and long cuts are counted in `Policy.counts`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dreamgym.envs import Session, StepResult, make_rules
from dreamgym.episode import Episode, Step, Stream, Task
from dreamgym.model import chat_format, encode, encode_untrusted
from dreamgym.prompts import POLICY_SYSTEM, as_done, parse_action, policy_first, policy_next, policy_recap
from dreamgym.sampler import Sampler

POLICY_CONTEXT = 1024             # tokens of a stream


@dataclass
class Policy:
    """A language model that acts: its tokenizer, chat form, sampler and limits."""
    model: object
    tokenizer: object
    slots: int = 128
    context: int = 512
    max_action_tok: int = 24
    system: str = ""
    recap_turns: int = 2          # turns repeated at the head of a new stream (verl-agent's history length)
    seed: int = 0
    counts: dict = field(default_factory=lambda: {"turns": 0, "cut_streams": 0, "unfinished_actions": 0})

    def __post_init__(self):
        self.fmt = chat_format(self.tokenizer, self.system)
        self.sampler = Sampler(self.model, self.slots, self.context, self.fmt.end_ids, self.seed)

    def first_ids(self, text: str) -> list[int]:
        return encode(self.tokenizer, self.fmt.open) + encode_untrusted(self.tokenizer, text) + encode(self.tokenizer, self.fmt.ask)

    def turn_ids(self, text: str) -> list[int]:
        return encode(self.tokenizer, self.fmt.close) + encode_untrusted(self.tokenizer, text) + encode(self.tokenizer, self.fmt.ask)


def policy_for(model, tokenizer, env: str, tiny: bool, seed: int) -> Policy:
    """A policy of an environment; a tiny one, trained from scratch, reads no system prompt."""
    return Policy(model, tokenizer, context=POLICY_CONTEXT, max_action_tok=make_rules(env).ACTION_TOK, system="" if tiny else POLICY_SYSTEM[env], seed=seed)


@dataclass
class _Running:
    session: Session
    episode: Episode
    prompt: list[int]             # ids to append before the next action
    state: str = ""               # the state that prompt shows


def extend(stream: Stream, prompt: list[int], action: list[int], logps: list[float], end_ids: list[int]) -> None:
    """An action that was cut off gets its end token unsampled (mask 0), so that what follows stands where the chat form expects it."""
    tail = [] if action and action[-1] in end_ids else end_ids[:1]
    stream.ids += prompt + action + tail
    stream.mask += [0] * len(prompt) + [1] * len(action) + [0] * len(tail)
    stream.logps += logps
    stream.turn_ends.append(len(stream.logps))


def _next_prompt(policy: Policy, run: _Running) -> None:
    """What the policy reads next; opens a new stream when the old one has no room for the page and an action."""
    episode, stream = run.episode, run.episode.streams[-1]
    ids = policy.turn_ids(policy_next(run.session.state))
    if len(stream.ids) + len(ids) + policy.max_action_tok > policy.context:
        turns = [(s.state, s.action) for i, s in enumerate(episode.steps) if i == 0 or i >= len(episode.steps) - policy.recap_turns]
        ids = policy.first_ids(policy_recap(episode.task.text, turns, run.session.state))
        if len(ids) + policy.max_action_tok > policy.context:
            ids = policy.first_ids(policy_first(episode.task.text, run.session.state))
        episode.streams.append(Stream())
        policy.counts["cut_streams"] += 1
    run.prompt, run.state = ids, run.session.state


def _record(run: _Running, action: str, result: StepResult, max_steps: int, no_room: bool) -> bool:
    """Appends the step; returns True when the episode has ended. `no_room`: page and task alone fill the context, so the policy could not act."""
    episode, info = run.episode, result.info
    episode.steps.append(Step(run.state, action, result.state, result.reward, result.done, info.get("grounded", action), info.get("reasoning", ""),
                              info.get("valid", True), {k: v for k, v in info.items() if k in ("output",)}))
    if result.done:
        episode.stop, episode.score = info.get("stop") or ("success" if result.reward else "failure"), float(info.get("score", result.reward))
    elif no_room:
        episode.stop = "context"
    elif len(episode.steps) >= max_steps:
        episode.stop = "step_limit"
    return bool(episode.stop)


def rollout(policy: Policy, world, tasks: list[Task], max_steps: int, temperature: float, name: str, world_name: str,
            on_turn: Callable[[int], None] = lambda finished: None) -> list[Episode]:
    """One episode for each task (repeat a task for a GRPO group), in the order of `tasks`. At most `policy.slots` run at once, or as many as the world has room
    for (`slots`, WebArena in a real browser); a finished one makes room for the next. `on_turn(newly finished)` feeds a progress bar. Episode ids are `name-index`."""
    waiting: Iterator[tuple[int, Task]] = iter(enumerate(tasks))
    finished: dict[int, Episode] = {}
    running: dict[int, _Running] = {}
    slots = min(policy.slots, getattr(world, "slots", policy.slots))
    while len(finished) < len(tasks):
        fresh = [pair for _, pair in zip(range(slots - len(running)), waiting)]
        for (index, task), session in zip(fresh, world.start([task for _, task in fresh])):
            episode = Episode(f"{name}-{index}", task, world=world_name, source="policy", streams=[Stream()])
            session.id = episode.id
            running[index] = _Running(session, episode, policy.first_ids(policy_first(task.text, session.state)), session.state)
        order = list(running)
        prompts = [running[i].episode.streams[-1].ids + running[i].prompt for i in order]
        samples = policy.sampler.sample(prompts, [running[i].episode.id for i in order], policy.max_action_tok, temperature)
        actions = []
        for i, sample in zip(order, samples):
            policy.counts["turns"] += 1
            policy.counts["unfinished_actions"] += sample.stop != "end"
            actions.append(parse_action(policy.tokenizer.decode([t for t in sample.ids if t not in policy.fmt.end_ids])))
            extend(running[i].episode.streams[-1], running[i].prompt, sample.ids, sample.logps, policy.fmt.end_ids)
        results = world.act([running[i].session for i in order], actions)
        before = len(finished)
        for i, action, result, sample in zip(order, actions, results, samples):
            if _record(running[i], action, result, max_steps, not sample.ids):
                finished[i] = running.pop(i).episode
            else:
                _next_prompt(policy, running[i])
        on_turn(len(finished) - before)
    return [finished[i] for i in range(len(tasks))]


def imitation_streams(policy: Policy, episode: Episode, said: Callable[[str, str], str] = as_done) -> list[Stream]:
    """The same streams for somebody else's episode, with its actions as the trained tokens (log-probabilities 0): behaviour cloning. What the world refused is
    shown and not imitated. said(state, action): what a policy writes to do it."""
    run = _Running(Session(episode.id, episode.task, episode.task.start), Episode(episode.id, episode.task, streams=[Stream()]),
                   policy.first_ids(policy_first(episode.task.text, episode.steps[0].state)))
    for step in episode.steps:
        action = encode_untrusted(policy.tokenizer, said(step.state, step.action)) + policy.fmt.end_ids[:1]
        if step.valid:
            extend(run.episode.streams[-1], run.prompt, action, [0.0] * len(action), policy.fmt.end_ids)
        else:
            extend(run.episode.streams[-1], run.prompt + action, [], [], [])
        run.episode.steps.append(step)
        run.session.state = step.next_state
        _next_prompt(policy, run)
    return [stream for stream in run.episode.streams if any(stream.mask)]
