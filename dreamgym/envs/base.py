"""The contract of an environment, with defaults for everything but `tasks`, `reset` and `step`.

The experience model has the same `reset`, `step` and `end`: a rollout does not know which of both it plays.
Reward is 1 on success at the end of an episode, else 0. Tutorial: docs/your-environment.md,
examples/files.py.
"""
import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dreamgym.episode import Episode, Step, StopReason, Task, number_lines, verb_of
from dreamgym.prompts import Prompts

BUILT_IN = {
    "webshop": "dreamgym.envs.webshop.env:WebShop",
    "alfworld": "dreamgym.envs.alfworld.env:ALFWorld",
    "webarena": "dreamgym.envs.webarena.env:WebArena",
    "logs": "dreamgym.envs.logs:Logs",
}


@dataclass
class Session:
    """One running episode. `inner` is its engine, browser, or, in the experience model, its history."""
    task: Task
    state: str
    inner: Any = None


@dataclass
class StepResult:
    """What followed an action. Reasoning and `output`, the text of a malformed answer, are the experience
    model's alone."""
    state: str
    reward: float = 0.0
    done: bool = False
    stop: StopReason = StopReason.RUNNING
    raw_score: float = 0.0                 # the benchmark's own score; 0: the reward
    reasoning: str = ""
    reward_reasoning: str = ""
    output: str = ""

    @property
    def malformed(self) -> bool:
        return self.stop == StopReason.MALFORMED


@contextlib.contextmanager
def noted(where: str) -> Iterator[None]:
    """Adds `where` and the failing line to an exception that is raised inside, for people who debug their
    environment."""
    try:
        yield
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        error.add_note(f"in {where} ({Path(line.filename).name}, line {line.lineno})")
        raise


def reset_all(world, tasks: Sequence[Task]) -> Sequence[Session]:
    """`world.reset`. Raises ValueError unless it returns one session for each task."""
    return _one_each(world, "reset", Session, [task.text for task in tasks], tasks) if tasks else []


def step_all(world, sessions: Sequence[Session], actions: Sequence[str]) -> Sequence[StepResult]:
    """`world.step`. Raises ValueError unless it returns one result for each session."""
    asked = [f"{session.task.text}: {action}" for session, action in zip(sessions, actions)]
    return _one_each(world, "step", StepResult, asked, sessions, actions)


def _one_each(world, method: str, kind: type, asked: list[str], *given: Sequence) -> Sequence:
    name = f"{type(world).__name__}.{method}"
    with noted(f"{name} for {asked[:3]}"):
        made = getattr(world, method)(*given)
    if not isinstance(made, Sequence) or len(made) != len(asked):
        found = f"a list of {len(made)}" if isinstance(made, Sequence) else f"a {type(made).__name__}"
        raise ValueError(f"{name} returned {found} for {len(asked)} episodes; expected a list with one entry "
                         "each, in order")
    for one in made:
        if not isinstance(one, kind) or not isinstance(one.state, str):
            found = f"the state {one.state!r}" if isinstance(one, kind) else f"a {type(one).__name__}"
            raise ValueError(f"{name} returned {found}; expected a {kind.__name__} whose `state` is text")
    return made


def record_step(episode: Episode, state: str, action: str, result: StepResult, max_steps: int) -> None:
    """Appends a step to a running episode, and notes why it ended."""
    episode.steps.append(Step(state=state, action=action, next_state=result.state,
                              reward=float(result.reward), done=bool(result.done),
                              reasoning=result.reasoning, reward_reasoning=result.reward_reasoning))
    if result.done:
        outcome = StopReason.SUCCESS if result.reward else StopReason.FAILURE
        episode.stop = StopReason(result.stop) or outcome
        episode.raw_score, episode.output = float(result.raw_score or result.reward), result.output
    elif len(episode.steps) >= max_steps:
        episode.stop = StopReason.STEP_LIMIT


class Act(str):
    """An action, the thought that led to it, and whether a policy may imitate it."""
    def __new__(cls, action: str, thought: str = "", imitate: bool = True):
        act = super().__new__(cls, action)
        act.thought, act.imitate = thought, imitate
        return act


@dataclass
class Player:
    """A policy that makes offline data: `make(session, rng)` returns `act(state) -> text or Act` for one
    episode. `share`: its weight among the players (0: evaluate.py alone). `imitate`: its episodes are
    demonstrations."""
    make: Callable[[Session, np.random.Generator], Callable[[str], str]]
    share: float = 1.0
    imitate: bool = False


class Audit:
    """What the truth says about a step. Reports use it; training does not, except in the experiments of
    worlds.py (--dream rewards=rule)."""

    def action_type(self, state: str, action: str) -> str:
        """The kind of an action that changes something, for tables."""
        return verb_of(action) or "none"

    def success(self, task: Task, state: str, action: str, next_state: str) -> bool | None:
        """Whether this step fulfils the task, by rule; None where no rule can tell."""
        return None

    def inconsistencies(self, steps: list[Step]) -> tuple[int, int]:
        """(pages that could contradict an earlier page of this episode, pages that do)."""
        return 0, 0


class Environment:
    """A text environment. The keyword arguments of `__init__` are its `--env-options name=value`, whose
    defaults give their types; `data_dir` and `seed` among them get --data-dir and --env-seed."""
    name: str = ""
    label: str = "own environment"         # which data is played, for reports: "own sites", ...
    max_steps: int = 15
    slots: int = 1_000_000                 # episodes that can run at once
    is_real: bool = True                   # False: no world to play in, only recorded episodes (envs/logs.py)
    numbered_lines: bool = False           # the policy sees lines with their numbers: "link 'Cart' [3]"
    prompts: Prompts = Prompts()
    audit: Audit = Audit()

    def tasks(self, split: str) -> list[Task]:
        """Of "train", "valid" (every choice is made on them) or "test" (nothing is chosen on them)."""
        raise NotImplementedError

    def prepare(self, tasks: list[Task]) -> None:
        """Tasks that will soon be reset, the first one last: an environment may make them ready meanwhile."""

    def reset(self, tasks: list[Task]) -> list[Session]:
        """One running episode for each task. Raises ValueError for a generated one (`real_goal`)."""
        raise NotImplementedError

    def step(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        """One action for each session, whose `state` moves on. A refused or unreadable action changes
        nothing: the same state comes back. In a result with `done`, `stop` is needed only where the reward
        does not say it (StopReason.NOT_JUDGED)."""
        raise NotImplementedError

    def end(self, sessions: list[Session]) -> None:
        """Frees what sessions hold: called once for each, also for episodes that were cut short."""

    def close(self) -> None:
        """Frees what the environment holds."""

    def show(self, state: str) -> str:
        """What a policy sees of a state."""
        return number_lines(state) if self.numbered_lines else state

    def ground(self, state: str, action: str) -> str:
        """The action with the words of the element it names ("click[2]" -> the words of line 2), on one line.
        Reads the two texts alone. The experience model and the replay buffer see this form."""
        return action

    def players(self) -> dict[str, Player]:
        """By name; "random" and "oracle" check an installation (evaluate.py)."""
        return {}

    def explain(self, task: Task, history: list[Step], step: Step) -> tuple[str, str] | None:
        """(why the next state follows, why the reward follows) by rule; "" where none can tell, or expects
        another outcome. Facts first, the verdict last: a small model concludes only from what it has written.
        None: dreamgym.reasoning.CompareWords makes both of the texts alone."""
        return None

    def counterfactuals(self, episodes: list[Episode], count: int, rng: np.random.Generator,
                        ) -> list[Episode] | None:
        """About `count` one-step episodes: a recorded page judged under another task (played episodes alone
        would tell the reward by the task). `label`: the constraint that is broken, "none" where all are met.
        Ids and reasoning may be left empty. None: dreamgym.hindsight makes them of the recorded episodes."""
        return None

    def read_traces(self, path: str, form: str) -> list[Episode]:
        """Episodes that others recorded (--import-format)."""
        raise ValueError(f"--import-format {form}: {self.name} reads no traces of other formats")

    def describe(self) -> dict:
        """What identifies the data that is played: runs on different data are refused. JSON values."""
        return {"env": self.name}


def real_goal(task: Task, key: str) -> Any:
    """What a task's goal says. Raises ValueError for a generated task: only the dream can play those."""
    if key not in task.goal:
        raise ValueError(f"task {task.id}: its goal has no `{key}`; only a dream plays a generated task")
    return task.goal[key]


def environment_class(name: str) -> type[Environment]:
    """The class behind `--env`. Raises ValueError that says what was found and what was expected."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ValueError(f"--env {name}: no such file")
        if (folder := str(Path(name).resolve().parent)) not in sys.path:
            sys.path.append(folder)              # modules beside it
        spec = importlib.util.spec_from_file_location(f"env_{Path(name).stem}", name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module          # dataclasses look their module up there
        try:
            spec.loader.exec_module(module)
        except SyntaxError as error:
            raise ValueError(f"--env {name}: {error}") from None
        found = [c for c in vars(module).values()
                 if isinstance(c, type) and issubclass(c, Environment) and c.__module__ == spec.name]
        if len(found) != 1:
            raise ValueError(f"--env {name}: found {len(found)} subclasses of Environment in it, not one; "
                             "or name it: package.module:Class")
        return found[0]
    module_name, _, class_name = BUILT_IN.get(name, name).partition(":")
    if not class_name:
        raise ValueError(f"--env {name}: expected one of {', '.join(BUILT_IN)}, package.module:Class, "
                         "or path/to/file.py")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not module_name.startswith(error.name or " "):
            raise                                # a package that the environment itself lacks
        raise ValueError(f"--env {name}: {error}") from None


def data_folder(name: str, data_dir: str) -> str:
    """`data_dir`, else what $WEBSHOP_DATA or the like names; "" for none."""
    return data_dir or os.environ.get(f"{name}_DATA".upper(), "")


def make_env(name: str, data_dir: str = "", seed: int = 7, options: Sequence[str] = (),
             **more: Any) -> Environment:
    """The environment behind `--env`, with `options` as "name=value" texts. `data_folder`, `seed` and `more`
    (such as `file` or `workers`) are passed on where its `__init__` takes them. Raises ValueError naming the
    flag that does not fit."""
    cls = environment_class(name)
    if missing := [m for m in ("tasks", "reset", "step") if getattr(cls, m) is getattr(Environment, m)]:
        raise ValueError(f"--env {name}: {cls.__name__} has no method {' or '.join(missing)}; expected "
                         "tasks, reset and step (docs/your-environment.md)")
    default = {key: parameter.default for key, parameter in inspect.signature(cls).parameters.items()
               if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)}
    empty = inspect.Parameter.empty
    given = {k: v for k, v in {"data_dir": data_folder(name, data_dir), "seed": seed, **more}.items()
             if k in default and (v != "" or default[k] is empty)}
    if data_dir and "data_dir" not in default:
        raise ValueError(f"--data-dir {data_dir}: {name} takes no data folder")
    kinds = {key: str if value in (None, empty) else type(value) for key, value in sorted(default.items())}
    own = {key: kind for key, kind in kinds.items()
           if key not in ("data_dir", "seed") and issubclass(kind, (bool, int, float, str, Path))}
    for option in options:
        key, _, text = option.partition("=")
        if key not in own:
            raise ValueError(f"--env-options {option}: {name} has no option {key!r}; "
                             f"it has {', '.join(own) or 'none'}")
        try:
            given[key] = {"true": True, "false": False}[text.lower()] if own[key] is bool else own[key](text)
        except (KeyError, ValueError):
            raise ValueError(f"--env-options {option}: expected a {own[key].__name__} "
                             "(true or false for bool)") from None
    if needed := [key for key in default if default[key] is empty and key not in given]:
        raise ValueError(f"--env {name}: expected --env-options {needed[0]}=VALUE, which has no default")
    env = cls(**given)
    env.name = env.name or name
    return env


def env_of_data(name: str, settings: dict, **more: Any) -> Environment:
    """The environment of collected data, by the `settings` in its meta.json; `more` as for make_env."""
    return make_env(name, settings["data_dir"], settings["env_seed"], settings["env_options"],
                    file=settings["import_file"], **more)


def out_folder(name: str) -> Path:
    """Where the scripts write for an `--env` that names nothing else: out/webshop, out/files for a path."""
    return Path("out") / (Path(name).stem if name.endswith(".py") else name)
