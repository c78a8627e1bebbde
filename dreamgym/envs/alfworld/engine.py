"""The ALFWorld engine: one `game.tw-pddl` file played at hundreds of times the speed of the stock
environment, with the same answers.

    engine = Engine("json_2.1.1/valid_seen/.../game.tw-pddl")
    text = engine.reset()        # "You are in the middle of a room. ..."; engine.task = "put some cup in ..."
    text = engine.step("go to fridge 1")  # engine.won, engine.admissible, engine.facts

What decides is TextWorld's: its translation of the PDDL, the state and the rules in its Fast Downward
library, its parser of the grammar, alfworld's names of things. What TextWorld computes anew at every step is
kept: translations, parsed grammars, the commands of an operator, and each game as a graph of the states seen
so far. All engines on one game share that graph and one copy of the library, which can be put back into any
state it has met. `StockEngine` is TextWorld's own PddlEnv, unchanged, behind the same methods: the measure of
equality (tests) and of speed (benchmarks/alfworld_speed.py). Not for threads: one process plays its games one
step at a time. Left out: planning, scores, shuffled names.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import weakref
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

from dreamgym.envs.alfworld.grammar import Narrator, aside
from dreamgym.envs.alfworld.library import Library, own_argv, translation

VERSIONS = {"alfworld": "0.4.2", "textworld": "1.7.0"}
NOTHING = "Nothing happens."
# graphs of idle games that stay in memory, 2-8 MB each; to open one again from a translation costs 5-20 ms
GAMES_KEPT = 16
# a graph larger than this is left to its sessions and begun anew
STATES_KEPT = 4000

_alive: weakref.WeakValueDictionary[tuple, _Game] = weakref.WeakValueDictionary()
_recent: OrderedDict[tuple, _Game] = OrderedDict()
_idle_libraries: list[Library] = []


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
                "pip install -r requirements-alfworld.txt "
                "(it compiles Fast Downward; on Debian: apt-get install -y build-essential cmake)"
            )


def read_game(path: str | Path) -> dict:
    """The content of a game.tw-pddl file, with its task sentence as `task`. Raises ValueError naming the file
    and what does not fit."""
    try:
        game = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); expected a game.tw-pddl file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a game: no JSON ({str(error)[:100]})") from None
    if not isinstance(game, dict):
        raise ValueError(
            f"{path}: not a game: {type(game).__name__}, "
            "expected an object with pddl_domain, grammar and pddl_problem"
        )
    for key in ("pddl_domain", "grammar", "pddl_problem"):
        if not isinstance(game.get(key), str) or not game[key].strip():
            raise ValueError(f"{path}: not a game: `{key}` is missing or no text")
    put = re.search(r'action\s+PutObject\b.*?template\s*::\s*"([^"]*)"', game["grammar"], re.DOTALL)
    if not put or put[1] != "move {o} to {r}":
        found = f"says `{put[1]}`" if put else "has no PutObject"
        hint = "a game of alfworld < 0.4: " if put and put[1].startswith("put") else ""
        raise ValueError(
            f"{path}: the grammar {found}, alfworld {VERSIONS['alfworld']} says `move {{o}} to {{r}}`: {hint}"
            "take the games of `alfworld-download` of that version, or unset ALFWORLD_DATA to generate games"
        )
    task = _TASK.search(game["grammar"])
    if not task or "UNKNOWN GOAL" in task[0]:
        raise ValueError(
            f"{path}: the grammar has no sentence `Your task is to: ...`; expected the goal in it"
        )
    if re.search(r'[\\{}\[\]|#"]', task[1]):
        raise ValueError(
            f"{path}: the task {task[1]!r} has a character that the grammar reads as code; "
            "expected plain words"
        )
    return {**game, "task": task[1]}


_TASK = re.compile(r'(?<="Your task is to: )(.*?)(?=\.")')


@contextlib.contextmanager
def variable_kept():
    """`import alfworld` sets $ALFWORLD_DATA, which a later environment would take for the user's: it is put
    back."""
    before = os.environ.get("ALFWORLD_DATA")
    try:
        yield
    finally:
        os.environ.pop("ALFWORLD_DATA", None)
        if before is not None:
            os.environ["ALFWORLD_DATA"] = before


class Engine:
    """A session of one game. `cache`: a folder that keeps translations between runs ("": none). Raises
    ValueError for a file that is no game."""

    def __init__(self, path: str | Path, cache: str | Path = ""):
        self.path, self.cache = Path(path), cache
        self._game = _open_game(self.path, cache)
        self.task: str = self._game.task
        self._node: _Node = self._game.start

    def reset(self) -> str:
        self._game = _open_game(self.path, self.cache)
        self._node = self._game.start
        return self._game.intro

    def step(self, command: str) -> str:
        """The engine's answer. A command that is not admissible changes nothing."""
        text, self._node = self._game.step(self._node, command.strip())
        return text

    @property
    def won(self) -> bool:
        return self._node.won

    @property
    def admissible(self) -> list[str]:
        """Commands that do something in this state, sorted, without `help`."""
        return list(self._node.options.admissible)

    @property
    def facts(self) -> frozenset[tuple[str, ...]]:
        """The hidden true state: (predicate, name, ...) with the names the player sees, e.g. ("inreceptacle",
        "apple 1", "fridge 1"). Never for prompts.

        A lamp that was used is `istoggled`; `ison` is not told.
        """
        return self._game.facts(self._node)

    def close(self) -> None:
        self._game = self._node = None


class StockEngine:
    """The same methods on TextWorld's unchanged PddlEnv under alfworld's demangler."""

    def __init__(self, path: str | Path):
        require()
        with variable_kept():
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld import EnvInfos
        from textworld.envs.pddl import PddlEnv

        with own_argv():
            self._env = AlfredDemangler(PddlEnv(EnvInfos(won=True, admissible_commands=True)))
            self._env.load(str(path))

    def reset(self) -> str:
        with own_argv():
            self._state = self._env.reset()
        text, self.task = _split_intro(self._state.feedback)
        return text

    def step(self, command: str) -> str:
        self._state, _, _ = self._env.step(command)
        return self._state.feedback.strip()

    @property
    def won(self) -> bool:
        return self._state["won"]

    @property
    def admissible(self) -> list[str]:
        return [command for command in self._state["admissible_commands"] if command != "help"]


def _split_intro(text: str) -> tuple[str, str]:
    """The first feedback without its header and without the task, and the task."""
    scene, _, task = text.partition("Your task is to: ")
    return scene.replace("-= Welcome to TextWorld, ALFRED! =-", "").strip(), task.strip().removesuffix(".")


class _Options:
    """What can be done in a state: command -> operator id, and the sorted list that is shown."""
    __slots__ = ("operators", "admissible")

    def __init__(self, operators: dict[str, int]):
        self.operators = operators
        self.admissible = sorted(command for command in operators if command != "help")


class _Node:
    """A state of a game: the library's id of it, the facts that differ from the start, and the steps taken
    from here."""
    __slots__ = ("state_id", "changed", "won", "options", "moves", "facts")

    def __init__(self, state_id: int, changed: dict, won: bool, options: _Options):
        self.state_id, self.changed, self.won, self.options = state_id, changed, won, options
        self.moves: dict[str, tuple[str, _Node]] = {}
        self.facts: frozenset | None = None


class _Game:
    """The graph of one game's states, grown as they are met.

    TextWorld keeps a second record of facts beside the library's state, and its texts are written from that
    one: each effect of an operator removes its opposite and is added, so that `not_inreceptacle(apple,
    fridge)` exists only once the apple was taken out. A node is a pair of both.
    """

    def __init__(self, data: dict, translation: dict):
        self.types = translation["types"]
        self.parameters = translation["parameters"]
        self.fluents, self.untold = set(translation["fluents"]), set(translation["conditional"])
        self.first_facts: dict[tuple, frozenset] = {}
        for name, *names in translation["facts"]:
            _change(self.first_facts, {}, (name, tuple(self.types[n] for n in names)), tuple(names), True)
        self.entities = _entities(self.first_facts)
        self.templates, rules = _parse_grammar(_TASK.sub("UNKNOWN GOAL", data["grammar"], count=1))
        self.narrator = Narrator(rules, translation["hierarchy"], self.entities, self.first_facts)
        if missing := sorted(set(self.parameters) - set(self.templates)):
            raise ValueError(
                f"the grammar has no command for the PDDL's {', '.join(missing)}; "
                "expected one for each action"
            )
        self.words: dict[str, set[str]] = {}                 # of each action's command
        for action, (template, _) in self.templates.items():
            predicates, self.words[action] = self.narrator.sources(template)
            if changing := predicates & self.fluents:
                raise ValueError(
                    f"the grammar's command `{template}` depends on {', '.join(sorted(changing))}, "
                    "which change in play; expected fixed commands"
                )
        self.commands: dict[tuple, str] = {}
        self.task = data["task"]
        self.intro, _ = _split_intro(self.narrator.text("#intro#", {}, {}))
        self.operators: dict[int, _Operator] = {}
        self.options: dict[tuple, _Options] = {}
        self.nodes: dict[tuple, _Node] = {}
        self.library = _idle_libraries.pop() if _idle_libraries else Library()
        self.library.load(translation["sas"])
        self.start = self._node({})
        self._static: frozenset | None = None
        weakref.finalize(self, _release, self.library, self.nodes).atexit = False

    def step(self, node: _Node, command: str) -> tuple[str, _Node]:
        if command not in node.options.operators:
            return NOTHING, node
        move = node.moves.get(command)
        if move is None:
            move = node.moves[command] = self._move(node, self.operators[node.options.operators[command]])
        return move

    def _move(self, node: _Node, operator: _Operator) -> tuple[str, _Node]:
        self.library.state_id = node.state_id
        if operator.effects is None:
            operator.effects = [
                self._effect(atom) for atom in self.library.apply_and_tell(operator.id, operator.count)
            ]
        else:
            self.library.apply(operator.id)
        changed = dict(node.changed)
        for true, false, row in operator.effects:
            _change(changed, self.first_facts, false, row, False)
            _change(changed, self.first_facts, true, row, True)
        text = self.narrator.text(
            self.templates[operator.action][1], self._mapping(operator.action, operator.names), changed
        )
        return text.strip(), self._node(changed)

    def _node(self, changed: dict) -> _Node:
        """The node of the library's current state and these facts."""
        key = (self.library.state_id, frozenset(changed.items()))
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = _Node(key[0], changed, self.library.won(), self._options())
        return node

    def _options(self) -> _Options:
        ids = self.library.operators()
        options = self.options.get(ids)
        if options is None:
            commands: dict[str, int] = {}
            for i, operator in enumerate(ids):
                if operator not in self.operators:
                    self.operators[operator] = self._operator(operator, *self.library.operator(i))
                commands.setdefault(self.operators[operator].command, operator)
            options = self.options[ids] = _Options(commands)
        return options

    def _operator(self, number: int, name: str, count: int) -> _Operator:
        action, *names = name.split()
        # one for all ways to go there
        key = (
            action,
            *[name for (word, _), name in zip(self.parameters[action], names) if word in self.words[action]],
        )
        if key not in self.commands:
            self.commands[key] = self.narrator.text(
                self.templates[action][0], self._mapping(action, names), {}
            )
        return _Operator(number, action, names, self.commands[key], count)

    def _mapping(self, action: str, names: list[str]) -> dict[tuple, tuple]:
        return {(word, kind): (name, kind) for (word, kind), name in zip(self.parameters[action], names)}

    def _effect(self, atom: str) -> tuple[tuple, tuple, tuple]:
        """"NegatedAtom holds(agent1, apple)" -> the signature that becomes true, its opposite, and the
        names."""
        kind, rest = atom.split(" ", 1)
        predicate, names = rest[:-1].split("(", 1)
        row = tuple(name for name in names.split(", ") if name)
        types = tuple(self.types[name] for name in row)
        signatures = (predicate, types), (f"not_{predicate}", types)
        return (*(signatures[::-1] if kind == "NegatedAtom" else signatures), row)

    def facts(self, node: _Node) -> frozenset[tuple[str, ...]]:
        """Named facts, without `ison`: the library tells an operator's effects without their conditions, so
        TextWorld's record of those is wrong."""
        if self._static is None:
            self._static = self._named(
                {s: rows for s, rows in self.first_facts.items() if s[0] not in self.fluents}
            )
        if node.facts is None:
            node.facts = self._named(
                {
                    s: rows
                    for s, rows in {**self.first_facts, **node.changed}.items()
                    if s[0] in self.fluents - self.untold
                }
            )
        return self._static | node.facts

    def _named(self, facts: dict) -> frozenset[tuple[str, ...]]:
        return frozenset(
            (predicate, *[self.entities[name].name.strip() for name in row])
            for (predicate, _), rows in facts.items()
            for row in rows
        )


class _Operator:
    """A ground operator: its PDDL action and arguments, its command, and (once applied) its effects on the
    facts."""
    __slots__ = ("id", "action", "names", "command", "count", "effects")

    def __init__(self, number: int, action: str, names: list[str], command: str, count: int):
        self.id, self.action, self.names, self.command, self.count = number, action, names, command, count
        self.effects: list[tuple] | None = None


def _entities(facts: dict) -> dict:
    """TextWorld's record of every thing that occurs in the facts, with alfworld's name for it ("apple 1")."""
    with variable_kept():
        from alfworld.agents.utils.misc import Demangler
    from textworld.generator.game import EntityInfo

    entities = {
        name: EntityInfo(name, kind)
        for (_, types), rows in facts.items()
        for row in rows
        for name, kind in zip(row, types)
    }
    demangler = Demangler(game_infos=entities)
    for entity in entities.values():
        entity.name, entity.definite, entity.indefinite = (
            demangler.demangle_alfred_name(entity.id), "the", "a",
        )
    return entities


def _change(facts: dict, first: dict, signature: tuple, row: tuple, true: bool) -> None:
    """Makes one fact true or false in the layer `facts` over `first`."""
    rows = facts.get(signature)
    if rows is None:
        rows = first.get(signature, frozenset())
    if (row in rows) != true:
        facts[signature] = rows | {row} if true else rows - {row}


def _release(library: Library, nodes: dict) -> None:
    """A game that nobody plays gives its library back; its nodes point at each other and would wait for the
    garbage collector."""
    for node in nodes.values():
        node.moves.clear()
    library.clear()
    _idle_libraries.append(library)


def _open_game(path: Path, cache: str | Path) -> _Game:
    """The graph of a game that is in play or was lately, or a new one."""
    try:
        stat = path.stat()
        key = (os.path.abspath(path), stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); expected a game.tw-pddl file") from None
    game = _alive.get(key)
    if game is None or len(game.nodes) > STATES_KEPT:
        require()
        data = read_game(path)
        try:
            game = _alive[key] = _Game(
                data, translation(data["pddl_domain"], data["pddl_problem"], str(VERSIONS), cache)
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    _recent[key] = game
    _recent.move_to_end(key)
    if len(_recent) > GAMES_KEPT:
        _recent.popitem(last=False)
    return game


@lru_cache(maxsize=8)
def _parse_grammar(grammar: str) -> tuple[dict[str, tuple[str, str]], dict]:
    """{action: (command template, feedback rule)} and the rules, by TextWorld's parser."""
    from textworld.envs.pddl.logic import GameLogic
    try:
        logic = aside(lambda: GameLogic(domain="", grammar=grammar))
    except Exception as error:  # whatever the generated parser and its JSON raise
        raise ValueError(
            f"TextWorld cannot parse the grammar ({type(error).__name__}: {str(error).splitlines()[0][:150]})"
        ) from None
    return {name: (action.template, action.feedback_rule) for name, action in logic.actions.items()}, dict(
        logic.grammar._rules
    )
