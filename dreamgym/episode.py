"""Task, Step, Episode: the one record type that flows through the whole program, and its JSONL form.

A real environment, the experience model, the demonstrators and imported logs all produce `Episode`s. Files hold one episode a line with
a `schema` number; the reader refuses a line that does not fit and names file, line and field. README, "Data formats", has an example.
Left out on purpose: tensors, tokenizers, anything about one benchmark (that lives in `Task.goal` and `Step.info`).
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

SCHEMA = 1


@dataclass
class Task:
    """One instruction. `goal` is the environment's own handle on it ({} for a generated task, which only the dream can play)."""
    id: str
    text: str
    env: str = "webshop"
    start: str = ""                              # the first state, as the environment's mapping writes it
    goal: dict = field(default_factory=dict)
    generated: bool = False
    parent: str = ""                             # the seed task of a generated one


@dataclass
class Step:
    """One transition (s_t, a_t, R_t, s_{t+1}, r_{t+1}, done); `grounded` is the action with the text of the element it names."""
    state: str
    action: str
    next_state: str
    reward: float = 0.0
    done: bool = False
    grounded: str = ""
    reasoning: str = ""
    valid: bool = True
    info: dict = field(default_factory=dict)


@dataclass
class Stream:
    """Token ids of one policy stream: ids only grow, mask 1 = sampled by the policy, logps of the masked tokens in order, turn_ends = index
    in `logps` after each action (so that a reward can be placed on a turn)."""
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)


@dataclass
class Episode:
    id: str
    task: Task
    steps: list[Step] = field(default_factory=list)
    world: str = "real"                          # "real" | "dream"
    source: str = ""                             # who acted: policy, demonstrator, imperfect, random, prober, relabelled, imported
    stop: str = ""                               # why it ended: success, failure, step_limit, malformed, context
    score: float = 0.0                           # the benchmark's raw score (WebShop: R)
    streams: list[Stream] = field(default_factory=list, repr=False)   # not written to JSONL

    @property
    def reward(self) -> float:
        return self.steps[-1].reward if self.steps else 0.0

    @property
    def success(self) -> bool:
        return self.reward == 1.0


def renamed_step(step: Step, change: Callable[[str], str]) -> Step:
    """The step with `change` made in every text of it."""
    return replace(step, **{name: change(getattr(step, name)) for name in ("state", "action", "next_state", "grounded", "reasoning")})


def renamed(episode: Episode, change: Callable[[str], str]) -> Episode:
    """The episode with `change` made in every text of it."""
    task = replace(episode.task, text=change(episode.task.text), start=change(episode.task.start))
    return replace(episode, task=task, steps=[renamed_step(step, change) for step in episode.steps])


def to_json(episode: Episode) -> dict:
    record = asdict(replace(episode, streams=[]))        # asdict copies number by number: not the token ids
    del record["streams"]
    return {"schema": SCHEMA, **record}


_STEP_FIELDS = {"state": str, "action": str, "next_state": str, "reward": (int, float), "done": bool, "grounded": str, "reasoning": str, "valid": bool, "info": dict}
_TASK_FIELDS = {"id": str, "text": str, "env": str, "start": str, "goal": dict, "generated": bool, "parent": str}
_EPISODE_FIELDS = {"id": str, "task": dict, "steps": list, "world": str, "source": str, "stop": str, "score": (int, float)}


def _checked(record: object, kinds: dict, required: tuple[str, ...], where: str) -> dict:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: found {type(record).__name__}, expected an object")
    for name in required:
        if name not in record:
            raise ValueError(f"{where}: field `{name}` is missing")
    for name, value in record.items():
        if name not in kinds:
            raise ValueError(f"{where}: unknown field `{name}`; expected some of {', '.join(kinds)}")
        kind = kinds[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = kind.__name__ if isinstance(kind, type) else "number"
            raise ValueError(f"{where}: field `{name}` is {type(value).__name__} ({str(value)[:40]!r}), expected {wanted}")
    return record


def task_from_json(record: object, where: str = "task") -> Task:
    """Raises ValueError naming `where` and the field."""
    task = Task(**_checked(record, _TASK_FIELDS, ("id", "text"), where))
    if len(task.text.strip().splitlines()) != 1:
        raise ValueError(f"{where}: field `text` is empty or has line breaks ({task.text[:40]!r}); expected the instruction on one line")
    return task


def episode_from_json(record: object, where: str = "episode") -> Episode:
    """Raises ValueError naming `where` (file and line) and the field that does not fit."""
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{where}: field `schema` is {str(found)[:40]!r}, expected {SCHEMA}; see README, 'Data formats'")
    record = dict(_checked({k: v for k, v in record.items() if k != "schema"}, _EPISODE_FIELDS, ("id", "task", "steps"), where))
    record["task"] = task_from_json(record["task"], f"{where}, task")
    steps = []
    for i, step in enumerate(record["steps"]):
        step = Step(**_checked(step, _STEP_FIELDS, ("state", "action", "next_state"), f"{where}, steps[{i}]"))
        if len(step.action.splitlines()) > 1 or len(step.grounded.splitlines()) > 1 or len(step.reasoning.splitlines()) > 1:
            raise ValueError(f"{where}, steps[{i}]: fields `action`, `grounded` and `reasoning` are single lines; found a line break")
        if step.reward not in (0, 1):
            raise ValueError(f"{where}, steps[{i}]: field `reward` is {step.reward}, expected 0 or 1 (the raw score goes into `score`)")
        if step.reward == 1 and not step.done:
            raise ValueError(f"{where}, steps[{i}]: reward 1 with done false; only a successful last step pays")
        if step.done and i + 1 < len(record["steps"]):
            raise ValueError(f"{where}, steps[{i}]: done before the last step")
        if i and step.state != steps[-1].next_state:
            raise ValueError(f"{where}, steps[{i}]: field `state` differs from the `next_state` before it")
        steps.append(step)
    record["steps"] = steps
    if not steps:
        raise ValueError(f"{where}: field `steps` is empty")
    if record.get("world", "real") not in ("real", "dream"):
        raise ValueError(f"{where}: field `world` is {record['world']!r}, expected real or dream")
    return Episode(**record)


def _refuse_constant(name: str):
    raise ValueError(f"{name} is no JSON number")


def _read_lines(path: Path | str):
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected JSONL")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    record = json.loads(text, parse_constant=_refuse_constant)
                    json.dumps(record, ensure_ascii=False).encode()     # a lone surrogate could be read but never be written again
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}:{number}: not JSON ({str(error)[:200]})") from None
                yield f"{path}:{number}", record


def read_episodes(path: Path | str) -> list[Episode]:
    """All episodes of a JSONL file. Raises ValueError naming file, line and field."""
    episodes: dict[str, Episode] = {}
    for where, record in _read_lines(path):
        episode = episode_from_json(record, where)
        if episode.id in episodes:
            raise ValueError(f"{where}: field `id`: {episode.id!r} occurs twice; ids must be unique (retrieval excludes an episode by its id)")
        episodes[episode.id] = episode
    return list(episodes.values())


def read_tasks(path: Path | str) -> list[Task]:
    return [task_from_json(record, where) for where, record in _read_lines(path)]
