"""ALFWorld as an environment, on top of the real TextWorld engine. The reward is 1 iff the engine says
won."""
import json
import os
import re
from pathlib import Path

from dreamgym.envs.alfworld import scripted, text
from dreamgym.envs.alfworld.audit import ALFWorldAudit
from dreamgym.envs.alfworld.engine import read_game, require
from dreamgym.envs.alfworld.games import DATA, find_games, generate
from dreamgym.envs.alfworld.prompts import PROMPTS
from dreamgym.envs.alfworld.workers import Local, Workers
from dreamgym.envs.base import Environment, Player, Session, StepResult, real_goal
from dreamgym.episode import Task
from dreamgym.prompts import clean

# split -> its folder: the generator's, the official one
FOLDERS = {"train": ("train",), "valid": ("valid", "valid_seen"), "test": ("test", "valid_unseen")}


def receptacles(problem: str) -> list[str]:
    """The names of a PDDL problem's receptacles as the engine's first feedback lists them ('desk 1')."""
    facts = problem.lower().split("(:init", 1)[-1].split("(:goal", 1)[0]
    names = text.shown_names(re.findall(r"[a-z]+_bar_[a-z0-9_]*", facts))
    return text.by_name({names[key] for key in re.findall(r"\(receptacleatlocation (\S+)", facts)})


class ALFWorld(Environment):
    """The games in `data_dir`; otherwise games are generated from `seed` into `cache` on first use.
    `admissible`: the engine's commands are in the states; `workers` > 1: so many processes play."""

    name = "alfworld"
    max_steps = 50
    prompts = PROMPTS
    audit = ALFWorldAudit()

    def __init__(self, data_dir: str = "", seed: int = 7, admissible: bool = False, cache: str = "out/games",
                 workers: int = 1):
        require()
        folder = Path(data_dir or f"{cache}/seed-{seed}")
        if not data_dir:
            generate(folder, seed, cache=f"{cache}/translations")
        self.root = folder / DATA if (folder / DATA).is_dir() else folder
        first = [games[0] for split in FOLDERS if (games := self._games(split))]
        if not first:
            raise ValueError(
                f"{self.root}: no ALFWorld games there; expected {DATA}/<train|valid_seen|valid_unseen>/"
                "<goal>/<trial>/game.tw-pddl (without ALFWORLD_DATA and --data-dir, games are generated)")
        for path in first:                       # games of another grammar end the run before any work
            read_game(path)
        # the generator's: its games stay generated ones, whoever names their folder
        made = self.root / "games.json"
        self.label = "generated games" if made.exists() else "official data"
        self.seed = json.loads(made.read_text())["seed"] if made.exists() else None
        self.admissible = admissible
        self.settings = admissible, f"{cache}/translations"
        self.plays = Workers(workers, *self.settings) if workers > 1 else Local(*self.settings)
        self.ahead: Workers | None = None        # translates games that will be played
        self._tasks: dict[str, list[Task]] = {}

    def _folder(self, split: str) -> Path:
        if split not in FOLDERS:
            raise ValueError(f"split {split!r}: ALFWorld has {', '.join(FOLDERS)}")
        folders = [self.root / name for name in FOLDERS[split]]
        return next((folder for folder in folders if folder.is_dir()), folders[-1])

    def _games(self, split: str) -> list[Path]:
        return list(self._folder(split).glob("*/*/game.tw-pddl"))

    def describe(self) -> dict:
        return {
            "env": "alfworld", "state_version": text.STATE_VERSION, "games": self.label, "seed": self.seed,
            "counts": {split: len(self._games(split)) for split in FOLDERS}, "admissible": self.admissible}

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split, in sorted order of the games' folders."""
        if split not in self._tasks:
            folder = self._folder(split)
            self._tasks[split] = [self._task(f"alfworld-{folder.name}-{i:04d}", folder, *game)
                                  for i, game in enumerate(find_games(folder))]
        return self._tasks[split]

    def _task(self, name: str, folder: Path, path: Path, task_type: str, game: dict) -> Task:
        room = receptacles(game["pddl_problem"])
        commands = sorted([*(f"go to {place}" for place in room), "inventory", "look"])
        return Task(
            id=name, text=game["task"], env="alfworld",
            start=text.ObservationMemory(room=room).state(commands if self.admissible else None),
            goal={"game": os.path.relpath(path, self.root)},
            groups=[f"split {folder.name}", f"type {task_type}"])

    def prepare(self, tasks: list[Task]) -> None:
        self.ahead = self.ahead or Workers(1, *self.settings)
        self.ahead.prepare(self._paths(tasks))

    def _paths(self, tasks: list[Task]) -> list[str]:
        return [str(self.root / real_goal(task, "game")) for task in tasks]

    def reset(self, tasks: list[Task]) -> list[Session]:
        plays = self.plays.start(self._paths(tasks))
        return [Session(task, state, inner=play)
                for task, (play, state) in zip(tasks, plays)]

    def step(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        """What is no command goes to the engine all the same, and changes nothing."""
        plays, results = [session.inner for session in sessions], []
        for session, (state, won) in zip(sessions, self.plays.step(plays, list(map(clean, actions)))):
            session.state = state
            results.append(StepResult(state, float(won), won))
        return results

    def end(self, sessions: list[Session]) -> None:
        self.plays.end([session.inner for session in sessions if session.inner is not None])
        for session in sessions:
            session.inner = None

    def close(self) -> None:
        for plays in filter(None, (self.plays, self.ahead)):
            plays.close()

    def ground(self, state: str, action: str) -> str:
        return clean(action)

    def players(self) -> dict[str, Player]:
        return scripted.PLAYERS
