"""The ALFWorld engine against TextWorld's unchanged one, its sessions, its caches and its refusals."""
import json
import random
import subprocess
import sys
from collections import deque
from weakref import WeakValueDictionary

import pytest
from alfworld_official import (
    KINDS, SOURCE, StockEngine, oracle_commands, packages_missing, random_command, rebuild)

from dreamgym.envs.alfworld import engine as alfworld_engine, library as alfworld_library
from dreamgym.envs.alfworld.engine import Engine, read_game
from dreamgym.envs.alfworld.games import generate


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """The smallest official valid_seen game of each type; generated ones where the official are not there."""
    if packages_missing():
        pytest.skip(packages_missing())
    folder, found = tmp_path_factory.mktemp("games"), {}
    if SOURCE.exists():
        rebuild(folder, "valid_seen")
    else:
        generate(folder, 1, {"train": 6})
    for path in sorted(folder.rglob("game.tw-pddl"), key=lambda path: path.stat().st_size):
        found.setdefault(json.loads((path.parent / "traj_data.json").read_text())["task_type"], path)
    return [found[kind] for kind in KINDS]


@pytest.fixture
def fresh(monkeypatch):
    """No game of another test. Calling it drops this test's own, as in a new process."""
    monkeypatch.setattr(alfworld_engine, "_recent", deque(maxlen=16))
    monkeypatch.setattr(alfworld_engine, "_alive", WeakValueDictionary())

    def forget():
        alfworld_engine._recent.clear()
        assert not alfworld_engine._alive, "a game is kept by something else"
    return forget


def next_command(rng, admissible, number):
    """A random command; every eighth is none."""
    if number % 8 == 7:
        return rng.choice(["", "fly to the moon", "put apple 1 in/on fridge 1", "Look", "open", "Help",
                           "look around", "take nothing 1 from nowhere 1"])
    return random_command(rng, admissible)


@pytest.mark.parametrize("kind", range(6), ids=KINDS)
def test_text_won_commands_and_facts_equal_the_stock_engine(games, kind):
    """A cache keyed by too little, an effect forgotten, and another order of names: 6 x 17 observations."""
    stock, ours, rng, wins = StockEngine(games[kind]), Engine(games[kind]), random.Random(kind), 0
    assert ours.reset() == stock.reset() and ours.task == stock.task and ours.admissible == stock.admissible
    script = oracle_commands(games[kind]) if kind == 0 else iter(())
    for number in range(16):
        command = next(script, None) or next_command(rng, stock.admissible, number)
        assert ours.step(command) == stock.step(command), command
        assert (ours.won, ours.admissible) == (stock.won, stock.admissible), command
        wins += ours.won
    assert ours.facts == stock.facts
    assert wins or kind != 0
    assert ours.task == read_game(games[kind])["task"] and ours.reset() == stock.reset()


def walk(path, seed, steps=25):
    """A transcript, one command at a time."""
    engine, rng = Engine(path), random.Random(seed)
    yield engine.reset(), engine.task
    for number in range(steps):
        command = next_command(rng, engine.admissible, number)
        yield command, engine.step(command), engine.won, engine.admissible, engine.facts


def test_interleaved_sessions_answer_as_alone(games, fresh):
    """Sessions of one game share its library: none may see where another one stands."""
    plays = [(path, seed) for path in games[:2] for seed in range(4)]
    together = [walk(path, seed) for path, seed in plays]
    transcripts = [list(turn) for turn in zip(*zip(*together))]
    del together  # suspended walks hold their sessions
    assert len({str(transcript) for transcript in transcripts}) == len(plays)
    for (path, seed), transcript in zip(plays, transcripts):
        fresh()
        assert list(walk(path, seed)) == transcript


def test_memory_is_bounded(games, fresh, monkeypatch):
    made = []
    monkeypatch.setattr(alfworld_engine, "_recent", deque(maxlen=2))
    monkeypatch.setattr(alfworld_engine, "Library", lambda: made.append(1) or alfworld_library.Library())
    monkeypatch.setattr(alfworld_engine, "_idle_libraries", [])
    for path in games * 2:
        list(walk(path, 0, 5))
    assert len(alfworld_engine._recent) == 2 and len(alfworld_engine._alive) <= 2 and len(made) <= 3


def test_the_cache_folder_replaces_the_translator(games, fresh, monkeypatch, tmp_path):
    """Every run translates every game again; a damaged file ends the run."""
    expected = list(walk(games[2], 1, 10))
    fresh()
    Engine(games[2], tmp_path)
    fresh()
    with monkeypatch.context() as patch:
        patch.setattr(alfworld_library, "translate", None)
        Engine(games[2], tmp_path)
        assert list(walk(games[2], 1, 10)) == expected
    for damage in (b"no zlib", b""):
        next(tmp_path.iterdir()).write_bytes(damage)
        fresh()
        assert Engine(games[2], tmp_path).reset() == expected[0][0]


def test_the_program_keeps_its_arguments(games, fresh, monkeypatch):
    """TextWorld's translator leaves its own sys.argv behind, which flags parsed later would read."""
    monkeypatch.setattr(sys, "argv", ["train_policy.py", "--env", "alfworld"])
    Engine(games[1])
    assert sys.argv == ["train_policy.py", "--env", "alfworld"]


def grammar(old, new):
    return lambda game: game | {"grammar": game["grammar"].replace(game.get(old, old), new)}


@pytest.mark.parametrize("change, said", [
    (lambda game: "{", "no JSON"),
    (lambda game: "[1]", "a list"),
    (lambda game: {**game, "grammar": None}, "`grammar`"),
    (lambda game: {k: v for k, v in game.items() if k != "pddl_problem"}, "`pddl_problem`"),
    (grammar("move {o} to {r}", "put {o} in/on {r}"), "alfworld < 0.4"),
    (grammar("task", "UNKNOWN GOAL"), "Your task is to"),
    (grammar("task", "{__import__('os')}"), "plain words"),
    (lambda game: game | {"pddl_domain": game["pddl_domain"].replace(":action look", ":action stare")},
     "no command for the PDDL's stare"),
    (lambda game: {**game, "pddl_problem": "(define"}, "cannot translate"),
    (lambda game: {**game, "pddl_problem": game["pddl_problem"].split("(:goal")[0]
                   + "(:goal (opened nowhere)))"}, "out of reach"),
    (None, "cannot be read")])
def test_a_file_that_is_no_game_is_refused_in_one_line(games, tmp_path, change, said):
    path = tmp_path / "game.tw-pddl"
    if change:
        changed = change(read_game(games[1]))
        path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(ValueError) as refusal:
        Engine(path)
    found = str(refusal.value)
    assert str(path) in found and said in found and "\n" not in found


def test_import_needs_no_package():
    """Users of the other environments do not have TextWorld."""
    code = ("import sys, dreamgym.envs.alfworld.engine; "
            "sys.exit(any(name in sys.modules for name in ('textworld', 'alfworld', 'fast_downward')))")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_games_grammar_runs_no_python(games, tmp_path):
    """A downloaded game that runs its own code: TextWorld evaluates whatever stands in a grammar."""
    game, path = read_game(games[0]), tmp_path / "game.tw-pddl"
    path.write_text(json.dumps(game | {"grammar": game["grammar"].replace("r.name", "__import__('os')._exit(1)")}))
    assert list(walk(path, 0)) == list(walk(games[0], 0))
