"""The ALFWorld engine: one `game.tw-pddl` file played a hundred times as fast as by the stock environment,
with the same answers.

What decides is TextWorld's: its translation of the PDDL, and its Fast Downward library (state and rules).
sentences.py writes the texts. All engines on one game share a copy of the library, which goes back into any
state that it met. Not for threads.
"""
from __future__ import annotations

import importlib.metadata
import json
import os
import re
import weakref
from collections import deque
from pathlib import Path
from typing import NamedTuple

from dreamgym.envs.alfworld.library import Library, translation
from dreamgym.envs.alfworld.sentences import COMMANDS, Narrator
from dreamgym.envs.alfworld.text import shown_names

VERSIONS = {"alfworld": "0.4.2", "textworld": "1.7.0"}

_alive: weakref.WeakValueDictionary[tuple, _Game] = weakref.WeakValueDictionary()
# games that stay open without a session: to open one again from a translation costs 5-20 ms
_recent: deque[_Game] = deque(maxlen=16)
_idle_libraries: list[Library] = []
_TASK = re.compile(r'(?<="Your task is to: )[^\\{}\[\]|#"]*(?=\.")')


def require() -> None:
    """Raises ValueError in one line when the ALFWorld packages are missing or of another version."""
    for package, version in VERSIONS.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != version:
            raise ValueError(
                f"ALFWorld needs {package}=={version}, found {found}: "
                "pip install -r requirements-alfworld.txt (it compiles Fast Downward; on Debian: "
                "apt-get install -y build-essential cmake)")


def read_game(path: str | Path) -> dict:
    """The content of a game.tw-pddl file, with its task sentence as `task`. Raises ValueError."""
    try:
        game = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); expected a game.tw-pddl file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a game: no JSON ({str(error)[:100]})") from None
    keys = ("pddl_domain", "grammar", "pddl_problem")
    missing = [key for key in keys if not isinstance(game, dict) or not isinstance(game.get(key), str)]
    if missing:
        raise ValueError(f"{path}: not a game: a {type(game).__name__} without text in "
                         f"{', '.join(f'`{key}`' for key in missing)}")
    if "move {o} to {r}" not in game["grammar"]:
        raise ValueError(
            f"{path}: the grammar has no `move {{o}} to {{r}}`: a game of alfworld < 0.4? Take the games "
            f"of `alfworld-download` {VERSIONS['alfworld']}, or unset ALFWORLD_DATA to generate games")
    task = _TASK.search(game["grammar"])
    if not task or "UNKNOWN GOAL" in task[0]:
        raise ValueError(f"{path}: the grammar has no sentence `Your task is to: ...` in plain words")
    return {**game, "task": task[0]}


class Engine:
    """A session of one game. `cache`: a folder that keeps translations ("": none). Raises as `read_game`."""

    def __init__(self, path: str | Path, cache: str | Path = ""):
        self._game = open_game(Path(path), cache)
        self._state = self._game.start
        self.task: str = self._game.task

    def reset(self) -> str:
        self._state = self._game.start
        return self._game.intro

    def step(self, command: str) -> str:
        """The engine's answer. A command that is not admissible changes nothing."""
        command = command.strip()
        if command not in self._state.operators:
            return "Nothing happens."
        text, self._state = self._game.move(self._state, command)
        return text

    @property
    def won(self) -> bool:
        return self._state.won

    @property
    def admissible(self) -> list[str]:
        """Commands that do something in this state, sorted, without `help`."""
        return sorted(command for command in self._state.operators if command != "help")

    @property
    def facts(self) -> frozenset[tuple[str, ...]]:
        """The hidden true state, such as ("inreceptacle", "apple 1", "fridge 1"). Never for prompts. `ison`
        is not told (a used lamp is `istoggled`): TextWorld's record of conditional effects is wrong."""
        names = self._game.narrator.names
        return frozenset((predicate, *[names[key] for key in keys]) for predicate, *keys in self._state.facts
                         if not predicate.startswith("not_") and predicate != "ison")


class _State(NamedTuple):
    """TextWorld writes its texts from a second record, `facts`, beside the library's state: each effect of an
    operator removes its opposite and is added, so that `not_inreceptacle(apple, fridge)` exists only once the
    apple was taken out."""
    number: int                                  # the library's
    facts: frozenset[tuple[str, ...]]
    won: bool
    operators: dict[str, tuple[int, int]]        # command -> (operator, number of its effects)


class _Game:
    """What all sessions of a game share."""

    def __init__(self, game: dict, translated: dict):
        self.parameters = translated["parameters"]
        if unknown := sorted(set(self.parameters) - set(COMMANDS)):
            raise ValueError(f"alfworld {VERSIONS['alfworld']} has no command for the PDDL's "
                             f"{', '.join(unknown)}; expected its own actions")
        facts = frozenset(map(tuple, translated["facts"]))
        self.narrator = Narrator(shown_names(key for _, *keys in facts for key in keys))
        self.task = game["task"]
        self.intro = self.narrator.surroundings(facts, at_start=True)
        self.ground: dict[int, tuple[str, dict, str]] = {}   # operator -> action, who is who in it, command
        self.library = _idle_libraries.pop() if _idle_libraries else Library()
        self.library.lib.load_sas(translated["sas"].encode())
        self.start = self._state(facts)
        weakref.finalize(self, _release, self.library).atexit = False

    def move(self, state: _State, command: str) -> tuple[str, _State]:
        operator, effects = state.operators[command]
        self.library.lib.set_state_id(state.number)
        facts = set(state.facts)
        for atom in self.library.apply(operator, effects):   # "NegatedAtom holds(agent1, apple_bar_1)"
            kind, *fact = filter(None, re.split(r"[ (),]+", atom))
            row, opposite = tuple(fact), (f"not_{fact[0]}", *fact[1:])
            facts.add(row if kind == "Atom" else opposite)
            facts.discard(opposite if kind == "Atom" else row)
        action, who, _ = self.ground[operator]
        return self.narrator.answer(action, who, facts), self._state(frozenset(facts))

    def _state(self, facts: frozenset) -> _State:
        """The library's current state. Of the ways to do what a command says, the first counts."""
        operators = {}
        for operator in self.library.operators():
            if operator.id not in self.ground:
                action, *keys = operator.name.split()
                who = dict(zip(self.parameters[action], keys))
                self.ground[operator.id] = action, who, self.narrator.command(action, who)
            operators.setdefault(self.ground[operator.id][2], (operator.id, operator.nb_effect_atoms))
        return _State(self.library.lib.get_state_id(), facts, self.library.lib.check_goal(), operators)


def _release(library: Library) -> None:
    """A game that nobody plays gives its library back."""
    library.lib.cleanup()
    _idle_libraries.append(library)


def open_game(path: Path, cache: str | Path) -> _Game:
    """A game that is in play or was lately, or a new one."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); expected a game.tw-pddl file") from None
    key = (os.path.abspath(path), stat.st_mtime_ns, stat.st_size)
    game = _alive.get(key)
    if game is None:
        data = read_game(path)
        try:
            game = _alive[key] = _Game(
                data, translation(data["pddl_domain"], data["pddl_problem"], str(VERSIONS), cache))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if game in _recent:
        _recent.remove(game)
    _recent.append(game)
    return game
