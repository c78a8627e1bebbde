"""ALFWorld as an environment of DreamGym: tasks, sessions and the abstract text states, on top of the real
TextWorld engine.

With `$ALFWORLD_DATA` (or `data_dir`) set, its games are played; otherwise games are generated into `cache` on
first use. `describe()` says which, and belongs into every result. Episodes have 50 steps; the reward is 1 iff
the engine says won.
"""
from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dreamgym.envs.alfworld import relabel, scripted, text
from dreamgym.envs.alfworld.audit import ALFWorldAudit
from dreamgym.envs.alfworld.engine import read_game, require, variable_kept
from dreamgym.envs.alfworld.games import DATA, DEFAULT_COUNTS, FOLDERS, Game, find_games, generate
from dreamgym.envs.alfworld.prompts import PROMPTS
from dreamgym.envs.alfworld.workers import Local, Workers
from dreamgym.envs.base import Environment, Player, Session, StepResult
from dreamgym.episode import Episode, Step, StopReason, Task

_ID = re.compile(r"([a-z]+)_bar_[a-z0-9_]*")


def receptacles(problem: str) -> list[str]:
    """The names of a PDDL problem's receptacles as the engine's first feedback lists them ('desk 1'), without
    the engine: of the ids of one kind, sorted, the last is number 1 (alfworld's Demangler)."""
    facts = problem.lower().split("(:init", 1)[-1].split("(:goal", 1)[0]
    ids: dict[str, set[str]] = {}
    for match in _ID.finditer(facts):
        ids.setdefault(match[1] + ("basin" if "basin" in match[0] else ""), set()).add(match[0])
    names = {
        key: f"{kind} {number}"
        for kind, keys in ids.items()
        for number, key in enumerate(sorted(keys, reverse=True), 1)
    }
    return text.by_name({names[key] for key in re.findall(r"\(receptacleatlocation (\S+)", facts)})


def _import_package(folder: Path) -> None:
    """`import alfworld` makes the folder of $ALFWORLD_DATA, or ~/.cache/alfworld, and sets the variable,
    which a later environment would take for the user's."""
    with variable_kept():
        os.environ["ALFWORLD_DATA"] = str(folder)
        importlib.import_module("alfworld")


class ALFWorld(Environment):
    """Real ALFWorld. `seed` is that of generated games; `admissible` writes the engine's commands into the
    states; `workers` > 1 plays in that many processes, with the same results."""

    name = "alfworld"
    max_steps = 50
    prompts = PROMPTS
    audit = ALFWorldAudit()

    def __init__(
        self,
        data_dir: str = "",
        seed: int = 7,
        admissible: bool = False,
        cache: str = "out/games",
        workers: int = 1,
    ):
        require()
        data_dir, folder = data_dir or os.environ.get("ALFWORLD_DATA", ""), Path(cache) / f"seed-{seed}"
        self.root = (Path(data_dir) if data_dir else folder) / DATA
        if data_dir:
            self.root = self.root if self.root.is_dir() else Path(data_dir)
            self._check_folder()
        _import_package(self.root if data_dir else Path(cache))
        if not data_dir:
            with tqdm(
                total=sum(DEFAULT_COUNTS.values()), desc="generating games and winning each once",
                leave=False, delay=15, mininterval=15,
            ) as bar:
                generate(folder, seed, progress=lambda done, total: bar.update(done - bar.n))
        # the generator's: its games stay generated ones, whoever names their folder
        made = self.root / "games.json"
        generated = made.exists()
        self.label = "generated games" if generated else "official data"
        self.seed = json.loads(made.read_text())["seed"] if generated else None
        self.admissible = admissible
        translations = Path(cache) / "translations"
        self.plays = (
            Workers(workers, admissible, translations) if workers > 1 else Local(admissible, translations)
        )
        self.started = 0
        self._tasks: dict[str, list[Task]] = {}

    def _check_folder(self) -> None:
        """A folder without games, or with games of another grammar, ends before any work."""
        names = [name for names in FOLDERS.values() for name in names]
        first = [path for name in names if (path := next((self.root / name).glob("*/*/game.tw-pddl"), None))]
        if not first:
            raise ValueError(
                f"{self.root}: no ALFWorld games there; expected {DATA}/<train|valid_seen|valid_unseen>/"
                "<goal>/<trial>/"
                "game.tw-pddl (without ALFWORLD_DATA and --data-dir, games are generated)"
            )
        for path in first:
            read_game(path)

    def _folder(self, split: str) -> str:
        """The folder of a split: official data has valid_seen for "valid" and valid_unseen for "test"."""
        if split not in FOLDERS:
            raise ValueError(f"split {split!r}: ALFWorld has {', '.join(FOLDERS)}")
        return next((name for name in FOLDERS[split] if (self.root / name).is_dir()), FOLDERS[split][-1])

    def describe(self) -> dict:
        counts = {
            split: len(list((self.root / self._folder(split)).glob("*/*/game.tw-pddl"))) for split in FOLDERS
        }
        return {
            "env": "alfworld", "state_version": text.STATE_VERSION, "games": self.label, "seed": self.seed,
            "counts": counts, "admissible": self.admissible,
        }

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split, in sorted order of the games' folders."""
        folder = self._folder(split)
        if folder not in self._tasks:
            games = find_games(self.root, folder)
            self._tasks[folder] = [
                self._task(f"alfworld-{folder}-{i:04d}", folder, game) for i, game in enumerate(games)
            ]
        return self._tasks[folder]

    def _task(self, name: str, folder: str, game: Game) -> Task:
        data = read_game(game.path)
        room = receptacles(data["pddl_problem"])
        commands = (
            sorted([*(f"go to {place}" for place in room), "inventory", "look"]) if self.admissible else None
        )
        return Task(
            id=name, text=data["task"], env="alfworld",
            start=text.ObservationMemory(room=room).state(commands),
            goal={"game": os.path.relpath(game.path, self.root)},
            groups=[f"split {folder}", f"type {game.task_type}"],
        )

    def reset(self, tasks: list[Task]) -> list[Session]:
        """Raises ValueError for a generated task: only the dream can play those."""
        for task in tasks:
            if not isinstance(task.goal.get("game"), str):
                raise ValueError(
                    f"task {task.id}: has no game of real ALFWorld (a generated task?); expected goal `game`"
                )
        sessions = []
        for task, (play, state) in zip(
            tasks, self.plays.start([str(self.root / task.goal["game"]) for task in tasks])
        ):
            self.started += 1
            sessions.append(Session(f"real-{self.started}", task, state, inner=play))
        return sessions

    def step(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        """What is no command goes to the engine all the same, and changes nothing."""
        grounded = [self.ground(session.state, action) for session, action in zip(sessions, actions)]
        results = []
        for session, (state, won) in zip(
            sessions, self.plays.step([session.inner for session in sessions], grounded)
        ):
            session.state, session.steps = state, session.steps + 1
            stop = StopReason.SUCCESS if won else StopReason.RUNNING
            results.append(StepResult(state, float(won), won, stop, raw_score=float(won)))
        return results

    def end(self, sessions: list[Session]) -> None:
        """The games go; a session that is ended twice is no fault."""
        self.plays.end([session.inner for session in sessions if session.inner is not None])
        for session in sessions:
            session.inner = None

    def close(self) -> None:
        self.plays.close()

    def ground(self, state: str, action: str) -> str:
        return text.ground(state, action)

    def players(self) -> dict[str, Player]:
        return scripted.PLAYERS

    def explain(self, task: Task, history: list[Step], step: Step) -> tuple[str, str]:
        return relabel.explain(task, history, step)

    def counterfactuals(self, episodes: list[Episode], count: int, rng: np.random.Generator) -> list[Episode]:
        return relabel.counterfactuals(episodes, count, rng)

    def renamer(self, rng: np.random.Generator) -> Callable[[str], str]:
        return text.renamer(rng)

    def vocabulary(self) -> list[str]:
        """Names that only `renamer` may bring in."""
        names = [f"{kind} {number}" for kind in (*text.KINDS, *text.PLACE_BLOCKS) for number in range(1, 5)]
        return [*text.KINDS, *names]
