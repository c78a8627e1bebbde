"""Many episodes in lock-step: policy and environment batched, real and imagined alike.

A token segment is append-only: what was sampled is what is trained. When it would pass the context, a new one
begins with the first turn of the episode and its last ones, if they fit. Each segment is one training
row.
"""
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from dreamgym.chat import chat_format
from dreamgym.envs.base import Environment, Session, record_step, reset_all, step_all
from dreamgym.episode import Episode, Source, StopReason, Task, TokenSegment
from dreamgym.prompts import parse_answer, policy_answer, policy_system, policy_turn, tried_actions
from dreamgym.sampler import Sampler


@dataclass
class PolicySettings:
    """What a policy reads and writes, flags of train_policy.py; saved beside its weights."""
    context: int = 4608               # tokens of a segment
    max_action_tok: int = 512
    policy_format: str = "tags"
    system_prompts: bool = True
    tried_actions: int = 8
    task_last: bool = False
    recap_turns: int = 2              # turns repeated at the head of a new segment (verl-agent's history)


@dataclass
class Policy:
    """A language model that acts. `env` lends its prompts, the form of its states, `ground` and its step
    limit, in dreams too."""
    model: object
    tokenizer: object
    env: Environment
    settings: PolicySettings
    slots: int = 128
    seed: int = 0
    counts: dict = field(default_factory=lambda: {"turns": 0, "cut_segments": 0, "unfinished_actions": 0,
                                                  "cut_demonstrations": 0})

    def __post_init__(self):
        form = self.settings.policy_format
        system = policy_system(self.env.prompts, form) if self.settings.system_prompts else ""
        self.chat = chat_format(self.tokenizer, system, thinks=form == "tags")
        self.sampler = Sampler(self.model, self.slots, self.settings.context, self.chat.end_ids, self.seed)

    def turn_ids(self, task: str, state: str, turns: Sequence[tuple[str, str]] = (),
                 tried: Sequence[str] = (), is_first: bool = True) -> list[int]:
        """A turn's prompt; the first one of a segment may begin with `turns` of the segment before."""
        text = policy_turn(task, state, turns, self.env.show, tried, self.settings.task_last)
        return self.chat.prompt_ids(text, is_first)


@dataclass
class _Running:
    session: Session
    episode: Episode
    prompt: list[int]                 # ids to append before the next action; they show the session's state


def extend(segment: TokenSegment, prompt: list[int], action: list[int], logps: list[float],
           end_ids: list[int]) -> None:
    """Appends a turn. An action that was cut off gets its end token unsampled (mask 0)."""
    tail = [] if action and action[-1] in end_ids else end_ids[:1]
    segment.ids += prompt + action + tail
    segment.mask += [0] * len(prompt) + [1] * len(action) + [0] * len(tail)
    segment.logps += logps
    segment.turn_ends.append(len(segment.logps))


def _show_state(policy: Policy, running: _Running) -> None:
    """Sets what the policy reads next; opens a new segment where the old one has no room for it."""
    episode, settings = running.episode, policy.settings
    task, state = episode.task.text, running.session.state
    tried = tried_actions(episode.steps, state, settings.tried_actions)
    ids = policy.turn_ids(task, state, tried=tried, is_first=False)
    if len(episode.segments[-1].ids) + len(ids) + settings.max_action_tok > settings.context:
        turns = [(s.state, s.action) for i, s in enumerate(episode.steps)
                 if i == 0 or i >= len(episode.steps) - settings.recap_turns]
        ids = policy.turn_ids(task, state, turns, tried)
        if len(ids) + settings.max_action_tok > settings.context:
            ids = policy.turn_ids(task, state, tried=tried)
        episode.segments.append(TokenSegment())
        policy.counts["cut_segments"] += 1
    running.prompt = ids


def rollout(policy: Policy, world, tasks: list[Task], temperature: float, name: str, *,
            max_transitions: int | None = None,
            on_turn: Callable[[int], None] = lambda finished: None) -> list[Episode]:
    """One episode for each task, in the order of `tasks`; ids are "name-index".

    `world`: an Environment, the ExperienceModel, or a worlds.World. As many episodes run at once as policy
    and world have slots. Every session is given back (`world.end`), also when something is raised.
    `max_transitions`: a budget that is kept exactly; episodes that are unfinished when it is spent are left
    out. `on_turn(newly finished)`: progress.
    """
    kind = "real" if isinstance(world, Environment) else "dream"
    slots = min(policy.slots, world.slots)
    waiting: Iterator[tuple[int, Task]] = iter(enumerate(tasks))
    finished: dict[int, Episode] = {}
    running: dict[int, _Running] = {}
    try:
        spent = 0
        while len(finished) < len(tasks) and spent != max_transitions:
            fresh = [pair for _, pair in zip(range(slots - len(running)), waiting)]
            for (index, task), session in zip(fresh, reset_all(world, [task for _, task in fresh])):
                episode = Episode(id=f"{name}-{index}", task=task, world=kind, source=Source.POLICY,
                                  segments=[TokenSegment()])
                running[index] = _Running(session, episode, policy.turn_ids(task.text, session.state))
            order = list(running)[:None if max_transitions is None else max_transitions - spent]
            spent += len(order)
            ended = _turn(policy, world, running, order, temperature)
            if ended:
                world.end([running[i].session for i in ended])
            finished.update({i: running.pop(i).episode for i in ended})
            on_turn(len(ended))
    finally:
        if running:
            world.end([r.session for r in running.values()])
    return [finished[i] for i in sorted(finished)]


def _turn(policy: Policy, world, running: dict[int, _Running], order: list[int],
          temperature: float) -> list[int]:
    """One action in each running episode of `order`; returns the indices of those that ended."""
    prompts = [running[i].episode.segments[-1].ids + running[i].prompt for i in order]
    samples = policy.sampler.sample(prompts, [running[i].episode.id for i in order],
                                    policy.settings.max_action_tok, temperature)
    answers = []
    for i, sample in zip(order, samples):
        policy.counts["turns"] += 1
        policy.counts["unfinished_actions"] += sample.stop != "end"
        answers.append(parse_answer(policy.chat.answer_text(sample.ids), ended=sample.stop == "end"))
        extend(running[i].episode.segments[-1], running[i].prompt, sample.ids, sample.logps,
               policy.chat.end_ids)
    states, ended = [running[i].session.state for i in order], []
    results = step_all(world, [running[i].session for i in order], [action for _, action in answers])
    for i, state, (thought, action), result, sample in zip(order, states, answers, results, samples):
        episode = running[i].episode
        record_step(episode, state, action, result, policy.env.max_steps)
        step = episode.steps[-1]
        step.thought, step.grounded = thought, policy.env.ground(state, action)
        if not sample.ids and not result.done:   # without room the policy could not act at all
            episode.stop = StopReason.CONTEXT
        if episode.stop:
            ended.append(i)
        else:
            _show_state(policy, running[i])
    return ended


def imitation_segments(policy: Policy, episode: Episode, all_actions: bool = False) -> list[TokenSegment]:
    """The segments of somebody else's episode, with its actions as the trained tokens (log-probabilities 0).
    Actions that changed nothing, and those that are not to imitate, are shown and not trained, unless
    `all_actions` (DPO). The segments end before a turn that is too long for a rollout, which is counted."""
    copy = replace(episode, steps=[], segments=[TokenSegment()])
    first = episode.steps[0].state
    running = _Running(Session(episode.task, first), copy, policy.turn_ids(episode.task.text, first))
    for step in episode.steps:
        answer = policy_answer(step, policy.settings.policy_format, policy.env.numbered_lines)
        ids = policy.chat.answer_ids(answer)
        segment = copy.segments[-1]
        length = len(segment.ids) + len(running.prompt) + len(ids)
        if len(ids) > policy.settings.max_action_tok or length > policy.settings.context:
            policy.counts["cut_demonstrations"] += 1
            break
        if (step.valid and step.imitate) or all_actions:
            extend(segment, running.prompt, ids, [0.0] * len(ids), policy.chat.end_ids)
        else:
            extend(segment, running.prompt + ids, [], [], [])
        copy.steps.append(step)
        running.session.state = step.next_state
        _show_state(policy, running)
    return [segment for segment in copy.segments if any(segment.mask)]
