"""Task, Step, Episode: the one record type that flows through the whole program, and its JSONL form
(docs/data.md): one episode a line, with a `schema` number. msgspec checks the types, `check_episode` the
rest, and an error names file, line and field.
"""
import math
import re
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

SCHEMA = 2


class Source:
    """Who acted in an episode, if it was no scripted player."""
    POLICY = "policy"                  # one that is trained here
    LANGUAGE_MODEL = "player"          # collect.py --player
    PROBER = "prober"                  # plays like a player, and often does what does not fit
    IMPORTED = "imported"              # somebody else's logs
    COUNTERFACTUAL = "counterfactual"  # nobody: a recorded page judged under another task
    INFERRED = "inferred"              # nobody: a recorded episode with refused actions put in


class StopReason(StrEnum):
    """Why an episode ended."""
    RUNNING = ""
    SUCCESS = "success"
    FAILURE = "failure"
    STEP_LIMIT = "step_limit"
    MALFORMED = "malformed"        # the experience model gave no answer that could be read
    CONTEXT = "context"            # task and page alone fill the policy's context
    NOT_JUDGED = "not_judged"      # the environment could not score it (a judge that is not there)

    @classmethod
    def _missing_(cls, value):
        raise ValueError(f"stop {value!r}: expected one of {', '.join(map(repr, map(str, cls)))}")


class Task(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One instruction."""
    id: str
    text: str                      # one line
    env: str = ""
    start: str = ""                # the first state; a dream needs it
    goal: dict = {}                # the environment's own handle; empty for a generated task
    groups: list[str] = []         # labels for reports, such as "split valid_seen" or "type pick_and_place"
    generated: bool = False        # only the dream can play it
    parent: str = ""               # the seed task of a generated one


class Step(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One transition (s_t, a_t, R_t, s_{t+1}, r_{t+1}, done)."""
    state: str
    action: str                    # as the policy wrote it
    next_state: str
    reward: float = 0.0            # 0 or 1
    done: bool = False
    grounded: str = ""             # the action with the words of its element
    thought: str = ""              # why the agent acts so
    reasoning: str = ""            # why the next state follows
    reward_reasoning: str = ""     # why the reward follows
    imitate: bool = True           # a policy may learn this action; false for probes and some players

    @property
    def valid(self) -> bool:
        """In both worlds an action that changes nothing is invalid, unless it ends the episode."""
        return self.done or self.next_state != self.state

    @property
    def shown_action(self) -> str:
        """The action as models read it."""
        return self.grounded or self.action

    @property
    def element(self) -> str:
        """The words that grounding adds, "" for none."""
        return self.grounded.removeprefix(self.action).strip()


class TokenSegment(msgspec.Struct, kw_only=True):
    """One context window of a policy; it only grows."""
    ids: list[int] = []
    mask: list[int] = []           # 1 = sampled by the policy
    logps: list[float] = []        # of the masked tokens in order
    turn_ends: list[int] = []      # index in `logps` after each action, so that a reward can be placed on it


class Episode(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    id: str
    task: Task
    steps: list[Step] = []
    world: Literal["real", "dream"] = "real"
    source: str = ""               # who acted: a Source, or the name of a scripted player
    stop: StopReason = StopReason.RUNNING
    raw_score: float = 0.0         # the benchmark's own score
    label: str = ""  # of a counterfactual: the constraint that it breaks, "none" where it fulfils all
    output: str = ""               # the model's text that ended a malformed dream
    iteration: int = -1            # RL iteration that played it
    segments: list[TokenSegment] = []   # never written to a file

    @property
    def reward(self) -> float:
        return self.steps[-1].reward if self.steps else 0.0

    @property
    def readable(self) -> list[Step]:
        """The steps that have a next state: all but the last one of a malformed dream."""
        return self.steps[:-1] if self.stop == StopReason.MALFORMED else self.steps

    @property
    def success(self) -> bool:
        return self.reward == 1.0


def recorded(episodes: Iterable[Episode]) -> list[Episode]:
    """Those that somebody played, inferred refusals included: no counterfactuals."""
    return [episode for episode in episodes if episode.source != Source.COUNTERFACTUAL]


def successes(episodes: list[Episode]) -> float:
    """Share of successful episodes; 0 for none."""
    return sum(episode.success for episode in episodes) / max(1, len(episodes))


def verb_of(action: str) -> str:
    """The first word of an action: "click" of "click[red]"."""
    return re.split(r"[\s\[(]", action.strip(), maxsplit=1)[0]


def number_lines(text: str) -> str:
    """How a policy sees a state of an environment with `numbered_lines`. The number stands behind its line: a
    small model copies what follows more easily than what stands before."""
    return "\n".join(f"{line} [{i}]" for i, line in enumerate(text.split("\n"), 1))


def line_number(step: Step) -> str:
    """The "[3]" of "click [3]", if grounding quotes the third line of the state, else ""."""
    said, lines = re.search(r"\[(\d+)\]", step.action), step.state.split("\n")
    named = lines[int(said[1]) - 1] if said and 0 < int(said[1]) <= len(lines) else ""
    return said[0] if step.element and named.startswith(step.element) else ""


def rename_step(step: Step, change: Callable[[str], str]) -> Step:
    """The step with `change` made in every text of it."""
    names = ("state", "action", "next_state", "grounded", "thought", "reasoning", "reward_reasoning")
    return replace(step, **{name: change(getattr(step, name)) for name in names})


def rename_episode(episode: Episode, change: Callable[[str], str]) -> Episode:
    """The episode with `change` made in every text of it."""
    task = replace(episode.task, text=change(episode.task.text), start=change(episode.task.start))
    return replace(episode, task=task, steps=[rename_step(step, change) for step in episode.steps])


# ---- checks and files ----

def check_episode(episode: Episode, where: str = "episode") -> Episode:
    """The episode itself, or a ValueError that names `where` and the field that cannot be."""
    check_task(episode.task, f"{where}, task")
    if not episode.steps:
        raise ValueError(f"{where}: field `steps` is empty; expected at least one step")
    state = episode.steps[0].state
    for i, step in enumerate(episode.steps):
        for wrong, problem in (
                (not (step.state.strip() and step.next_state.strip()),
                 "field `state` or `next_state` is empty, which no experience model can answer; write "
                 "\"(end)\" where nothing was observed"),
                (len(step.action.splitlines()) > 1 or len(step.grounded.splitlines()) > 1,
                 "fields `action` and `grounded` are single lines; found a line break"),
                (step.reward not in (0, 1),
                 f"field `reward` is {step.reward}, expected 0 or 1 (a partial score goes into `raw_score`)"),
                (not math.isfinite(episode.raw_score), f"field `raw_score` is {episode.raw_score}"),
                (step.reward and not step.done, "reward 1 with done false; only a successful last step pays"),
                (step.done and i + 1 < len(episode.steps), "done before the last step"),
                (step.state != state, "field `state` differs from the `next_state` before it")):
            if wrong:
                raise ValueError(f"{where}, steps[{i}]: {problem}")
        state = step.next_state
    success, stop = episode.success, episode.stop
    if (stop == StopReason.SUCCESS and not success) or (stop == StopReason.FAILURE and success):
        raise ValueError(f"{where}: field `stop` is {str(stop)!r}, but the last `reward` is {step.reward:g}; "
                         "expected 1 of a success, 0 of a failure")
    if stop == StopReason.MALFORMED and episode.world == "real":
        raise ValueError(f"{where}: field `stop` is 'malformed', which only a dream can be")
    return episode


def check_task(task: Task, where: str) -> Task:
    """The task itself, or a ValueError that names `where`."""
    if len(task.text.strip().splitlines()) != 1:
        raise ValueError(f"{where}: field `text` is empty or has line breaks ({task.text[:40]!r}); expected "
                         "one line")
    return task


def to_json(record: Task | Episode) -> dict:
    """A record as plain JSON values, with the schema number and without token segments."""
    if isinstance(record, Episode):
        record = replace(record, segments=[])
    try:
        return {"schema": SCHEMA} | msgspec.to_builtins(record)
    except TypeError as error:                   # a `goal` of numpy numbers
        raise ValueError(f"{type(record).__name__} {record.id!r}: {error}; expected JSON values") from None


def converted(value: object, kind: Any, where: object, see: str = "") -> Any:
    """The value as a msgspec type. Raises ValueError naming `where` and the field that does not fit."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}{see}") from None


def from_json(record: object, kind: type, where: str):
    """A Task or an Episode. Raises ValueError naming `where` and the field that does not fit."""
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{where}: field `schema` is {str(found)[:40]!r}, expected {SCHEMA}; see "
                         "docs/data.md")
    value = converted({k: v for k, v in record.items() if k != "schema"}, kind, where, "; see docs/data.md")
    return check_task(value, where) if kind is Task else check_episode(value, where)


def as_read(record: Task | Episode, where: str):
    """The record as its file gives it back. Raises ValueError where it does not fit: constructors check no
    types."""
    return from_json(to_json(record), type(record), where)


def read_jsonl(path: Path | str) -> Iterator[tuple[str, object]]:
    """("file:line", value) for each line that is not blank."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected JSONL")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:                             # a Windows editor begins a file with a byte order mark
                    yield f"{path}:{number}", msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise ValueError(f"{path}:{number}: not JSON ({str(error)[:200]})") from None


def read_episodes(path: Path | str) -> list[Episode]:
    episodes: dict[str, Episode] = {}
    for where, record in read_jsonl(path):
        episode = from_json(record, Episode, where)
        if episode.id in episodes:
            raise ValueError(f"{where}: field `id`: {episode.id!r} occurs twice; expected another id for "
                             "each episode")
        episodes[episode.id] = episode
    return list(episodes.values())


def read_tasks(path: Path | str) -> list[Task]:
    return [from_json(record, Task, where) for where, record in read_jsonl(path)]
