"""Worlds for RL whose pages and rewards are learnt, looked up, true, or wrong on purpose (docs/results.md).

    python train_policy.py --no-enrich --max-generated-fraction 0 --dream pages=lookup rewards=rule
    ... --dream pages=true rewards=learnt          # one cell of {true, learnt} x {true, learnt}
    ... --dream pages=true false_positives=0.1     # the real world with wrong rewards

They are experiments and no way to train a policy: they read the truth.
"""
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct, ValidationError, convert

from dreamgym import run
from dreamgym.envs.base import Audit, Environment, Session, StepResult
from dreamgym.episode import StopReason, Task
from dreamgym.experience_model import ExperienceModel
from dreamgym.flags import Share


class Options(Struct, forbid_unknown_fields=True):
    """`--dream name=value ...`. A reward error flips the reward of the episode's last step (its end in the
    world, or the step limit)."""
    pages: Literal["learnt", "lookup", "true"] = "learnt"   # lookup: recorded (ExperienceModel.lookup)
    rewards: Literal["own", "learnt", "rule"] = "own"  # own: learnt, recorded or true, as the pages are;
                                                       # learnt: the experience model's; rule: the audit's
    false_positives: Share = 0.0   # share of failed episodes that are paid
    false_negatives: Share = 0.0   # share of successful ones that are not
    swapped_pages: Share = 0.0     # share of next states shown as those of the nearest other transition
    fixed: bool = False            # errors strike the same (task, action) always: they can be exploited


def parse_options(given: list[str]) -> Options:
    try:
        return convert(dict(option.split("=", 1) for option in given), Options, strict=False)
    except (ValidationError, ValueError) as error:
        raise ValueError(f"--dream {' '.join(given)}: {error}; expected name=value, the names "
                         f"{', '.join(Options.__struct_fields__)}") from None


class Lookup:
    """The world as a table: what was recorded for (task, state, action), else the recorded transition nearest
    to (state, action), else nothing changes."""

    def __init__(self, model: ExperienceModel):
        self.model, self.reset, self.end, self.slots = model, model.reset, model.end, model.slots
        self.own = {(t.task, t.state, t.action): t for t in model.buffer.records}

    def step(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        states = [s.state for s in sessions]
        grounded = [self.model.env.ground(*pair) for pair in zip(states, actions)]
        results = []
        for session, action, near in zip(sessions, grounded, self.model.lookup(states, grounded)):
            found = self.own.get((session.task.text, session.state, action), near)
            if found:
                session.state = found.next_state
            results.append(StepResult(session.state, *([found.reward, found.done] if found else ())))
        return results


@dataclass
class CountedSession(Session):
    steps: int = 0                     # actions taken


def check_options(options: Options, env: Environment) -> None:
    """Raises ValueError where `env` cannot give what they ask for."""
    if options.pages == "true" and not env.is_real:
        raise ValueError(f"--dream pages=true: {env.name} is no world to play in")
    if options.rewards == "rule" and type(env.audit).success is Audit.success:
        raise ValueError(f"--dream rewards=rule: {env.name} has no audit that judges; expected own or learnt")


class World:
    """The experience model with the pages and rewards of `options`. Raises ValueError like
    `check_options`."""

    def __init__(self, model: ExperienceModel, env: Environment, options: Options, seed: int, rank: int = 0):
        check_options(options, env)
        self.experience_model, self.env, self.options = model, env, options
        self.seed, self.rank, self.draws = seed, rank, 0
        self.base = {"true": env, "lookup": Lookup(model), "learnt": model}[options.pages]
        self.slots = min(self.base.slots, model.slots)

    def __getattr__(self, name: str):
        return getattr(self.experience_model, name)

    def reset(self, tasks: list[Task]) -> list[Session]:
        """`inner`: the session of the world beneath, which keeps its own page where another is shown."""
        return [CountedSession(s.task, s.state, inner=s) for s in self.base.reset(tasks)]

    def end(self, sessions: list[Session]) -> None:
        self.base.end([s.inner for s in sessions])

    def step(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        before = [s.inner.state for s in sessions]
        grounded = [self.env.ground(*pair) for pair in zip(before, actions)]
        results = self.base.step([s.inner for s in sessions], actions)
        steps = list(zip([s.task for s in sessions], before, grounded, results))
        readable = [step for step in steps if not step[-1].malformed]
        if self.options.rewards == "learnt":
            self._judge(readable)
        elif self.options.rewards == "rule":
            for task, state, action, result in readable:
                result.reward = float(self.env.audit.success(task, state, action, result.state) or 0)
                result.done = result.done or result.reward == 1
        for session, (_, state, action, result) in zip(sessions, steps):
            session.steps += 1
            if result.stop not in (StopReason.MALFORMED, StopReason.NOT_JUDGED):
                self._disturb(session, state, action, result)
            session.state = result.state
        return results

    def _judge(self, steps: list[tuple[Task, str, str, StepResult]]) -> None:
        """The experience model's verdicts in place of the rewards."""
        verdicts = self.experience_model.judge([(task.text, state, action, result.state)
                                                for task, state, action, result in steps])
        for (*_, result), (answer, text) in zip(steps, verdicts):
            if answer is None:
                result.reward, result.done, result.stop = 0.0, True, StopReason.MALFORMED
                result.output = text[:500]
            else:
                result.reward_reasoning, result.reward, done = answer
                result.done, result.stop = result.done or done, StopReason.RUNNING

    def _disturb(self, session: CountedSession, state: str, action: str, result: StepResult) -> None:
        o = self.options
        if self._strikes(o.swapped_pages, "page", session.task, action):
            near, = self.buffer.search(self.encoder([state], [action]), 16, [""])
            result.state = next((t.next_state for t, _ in near if t.next_state != result.state), result.state)
        if result.done or session.steps >= self.env.max_steps:
            rate = o.false_negatives if result.reward else o.false_positives
            if self._strikes(rate, "reward", session.task, action):
                result.reward, result.done = 1.0 - result.reward, True
        if result.done:
            result.stop = StopReason.SUCCESS if result.reward else StopReason.FAILURE
            result.raw_score = result.reward

    def _strikes(self, rate: float, what: str, task: Task, action: str) -> bool:
        self.draws += 1
        key = (task.text, action) if self.options.fixed else (self.rank, self.draws)
        return rate > 0 and run.rng(self.seed, what, *key).random() < rate

    def get_state(self) -> dict:
        return self.experience_model.get_state() | {"draws": self.draws}

    def set_state(self, state: dict) -> None:
        self.draws = state["draws"]
        self.experience_model.set_state(state)
