"""ALFWorld as an environment of DreamGym: tasks, sessions and the abstract text states, on top of the real TextWorld engine.

With `$ALFWORLD_DATA` (or `data_dir`) set, its games are read; otherwise games are generated into `cache` on first use. `describe()` says which, and belongs
into every result. 50 steps (the rollout counts them), reward 1 iff the engine says won. `workers` > 1 plays in that many processes, with the same results.
"""
from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from dreamgym.envs import Session, StepResult, alfworld_text
from dreamgym.envs.alfworld.engine import read_game, require, variable_kept
from dreamgym.envs.alfworld.games import DATA, DEFAULT_COUNTS, SPLITS, find_games, generate
from dreamgym.envs.alfworld.workers import Here, Workers
from dreamgym.episode import Task

MAX_STEPS = 50
HELD_OUT = ("valid_seen", "valid_unseen")         # what the shared scripts call test: new games in known rooms, and in unknown ones
_ID = re.compile(r"([a-z]+)_bar_[a-z0-9_]*")


def receptacles(problem: str) -> list[str]:
    """The names of a PDDL problem's receptacles as the engine's first feedback lists them ('desk 1'), without the engine: of the ids of one kind, sorted,
    the last is number 1 (alfworld's Demangler)."""
    facts = problem.lower().split("(:init", 1)[-1].split("(:goal", 1)[0]
    ids: dict[str, set[str]] = {}
    for match in _ID.finditer(facts):
        ids.setdefault(match[1] + ("basin" if "basin" in match[0] else ""), set()).add(match[0])
    names = {key: f"{kind} {number}" for kind, keys in ids.items() for number, key in enumerate(sorted(keys, reverse=True), 1)}
    return alfworld_text.by_name({names[key] for key in re.findall(r"\(receptacleatlocation (\S+)", facts)})


def _import_package(folder: Path) -> None:
    """`import alfworld` makes the folder of $ALFWORLD_DATA, or ~/.cache/alfworld, and sets the variable; a later environment would take that for the user's."""
    with variable_kept():
        os.environ["ALFWORLD_DATA"] = str(folder)
        importlib.import_module("alfworld")


class ALFWorld:
    """Real ALFWorld. `seed` and `counts` (games of each split) are those of the generated games; `admissible` puts the commands into the states."""

    text = alfworld_text
    max_steps = MAX_STEPS

    def __init__(self, data_dir: str = "", cache: str | Path = "out/games", seed: int = 7, admissible: bool = False, workers: int = 1,
                 counts: Mapping[str, int] = DEFAULT_COUNTS):
        require()
        data_dir, cache = data_dir or os.environ.get("ALFWORLD_DATA", ""), Path(cache)
        self.root = (Path(data_dir) if data_dir else cache / f"seed-{seed}") / DATA
        if data_dir:
            self.root = self.root if self.root.is_dir() else Path(data_dir)
            self._check_folder()
        _import_package(self.root if data_dir else cache)
        if not data_dir:
            with tqdm(total=sum(counts.values()), desc="generating games and winning each once", leave=False, delay=1, mininterval=1) as bar:
                generate(cache / f"seed-{seed}", seed, counts, progress=lambda done, total: bar.update(done - bar.n))
        made = self.root / "games.json"          # the generator's: its games stay generated ones, whoever names their folder
        self.label, self.seed = ("generated games", json.loads(made.read_text())["seed"]) if made.exists() else ("official games", None)
        self.admissible, self.counts = admissible, {split: len(list((self.root / split).glob("*/*/game.tw-pddl"))) for split in SPLITS}
        workers = workers or os.cpu_count() or 1
        self.plays = Workers(workers, admissible, cache / "translations") if workers > 1 else Here(admissible, cache / "translations")
        self.started, self._tasks = 0, {}

    def _check_folder(self) -> None:
        """A folder without games, or with games of another grammar, ends before any work."""
        first = [path for split in SPLITS if (path := next((self.root / split).glob("*/*/game.tw-pddl"), None))]
        if not first:
            raise ValueError(f"{self.root}: no ALFWorld games there; expected {DATA}/<{'|'.join(SPLITS)}>/<goal>/<trial>/game.tw-pddl "
                             "(without ALFWORLD_DATA and --data-dir, games are generated)")
        for path in first:
            read_game(path)

    def describe(self) -> dict:
        return {"env": "alfworld", "games": self.label, "seed": self.seed, "counts": self.counts, "admissible": self.admissible}

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split (train | valid_seen | valid_unseen; test = both held-out ones), in sorted order of the games' folders."""
        if split not in (*SPLITS, "test"):
            raise ValueError(f"split {split!r}: ALFWorld has {', '.join(SPLITS)} (and test, which is {' and '.join(HELD_OUT)})")
        return [task for name in (HELD_OUT if split == "test" else (split,)) for task in self._split(name)]

    def _split(self, split: str) -> list[Task]:
        if split not in self._tasks:
            self._tasks[split] = [self._task(f"alfworld-{split}-{i:04d}", split, game) for i, game in enumerate(find_games(self.root, split))]
        return self._tasks[split]

    def _task(self, name: str, split: str, game) -> Task:
        data = read_game(game.path)
        room = receptacles(data["pddl_problem"])
        first = alfworld_text.Notes(room=room).state(sorted([*(f"go to {place}" for place in room), "inventory", "look"]) if self.admissible else None)
        return Task(name, data["task"], "alfworld", first, {"game": os.path.relpath(game.path, self.root), "split": split, "type": game.task_type})

    def start(self, tasks: list[Task]) -> list[Session]:
        """Raises ValueError for a generated task: only the dream can play those."""
        for task in tasks:
            if not isinstance(task.goal.get("game"), str):
                raise ValueError(f"task {task.id}: has no game of real ALFWorld (a generated task?); expected goal `game`")
        sessions = []
        for task, (play, state) in zip(tasks, self.plays.start([str(self.root / task.goal["game"]) for task in tasks])):
            self.started += 1
            sessions.append(Session(f"real-{self.started}", task, state, inner=play))
        return sessions

    def act(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        """One action each. What is no command goes to the engine all the same, changes nothing and counts as invalid."""
        grounded = [alfworld_text.ground(session.state, action) for session, action in zip(sessions, actions)]
        answers = self.plays.act([session.inner for session in sessions], grounded)
        return [self._result(session, action, *answer) for session, action, answer in zip(sessions, grounded, answers)]

    def _result(self, session: Session, action: str, state: str, won: bool, valid: bool) -> StepResult:
        session.state = state
        session.steps += 1
        info = {"valid": valid, "score": float(won), "stop": "success" if won else "", "grounded": action}
        return StepResult(state, float(won), won, info)
