"""The generator and the finder of ALFWorld games."""

import importlib.util
import json
import multiprocessing
import os
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from alfworld_official import needs_packages

from dreamgym.envs.alfworld import games as alfworld_games
from dreamgym.envs.alfworld.games import (
    SPLITS,
    TASK_TYPES,
    TEST_ROOMS,
    VALID_ROOMS,
    find_games,
    generate,
    statistics,
)

COUNTS = {"train": 6, "valid": 2, "test": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """11 games, each won in the real engine while generating."""
    path = tmp_path_factory.mktemp("games")
    seen = []
    summary = generate(path, seed=3, counts=COUNTS, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, 11) for i in range(11)] and summary["checked"]
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def problem(game) -> str:
    return json.loads(Path(game.path).read_text())["pddl_problem"]


def facts(text: str) -> dict[str, list[tuple]]:
    found = defaultdict(list)
    for predicate, *arguments in (
        fact.split()
        for fact in re.findall(r"\(([A-Za-z][^()]*)\)", text.split("(:init")[1].split("(:goal")[0])
    ):
        found[predicate].append(tuple(arguments))
    return found


@needs_packages
def test_every_type_is_won_by_its_walkthrough_and_not_before(folder):
    """Stops a game that cannot be won, that is won at the start, or whose stored walkthrough belongs to other
    names; and a type that is missing."""
    from dreamgym.envs.alfworld.engine import Engine

    for task_type in TASK_TYPES:
        game = next(g for g in find_games(folder, "train") if g.task_type == task_type)
        commands = json.loads(Path(game.path).read_text())["walkthrough"]
        engine = Engine(game.path)
        engine.reset()
        assert not engine.won
        for command in commands:
            assert not engine.won and command in engine.admissible, (game.name, command)
            engine.step(command)
        assert engine.won, game.name
        engine.close()


@needs_packages
def test_an_unwinnable_game_is_not_kept(folder, tmp_path, monkeypatch):
    """Stops a check that lets everything pass."""
    monkeypatch.setattr(alfworld_games, "_walkthrough", lambda *_: ["look"])
    with pytest.raises(RuntimeError, match="none of 5 layouts"):
        generate(tmp_path, counts={"train": 1})
    assert not (tmp_path / "json_2.1.1").exists()


@needs_packages
def test_splits_are_balanced_with_disjoint_rooms_and_layouts(folder):
    """Stops a home of one split in another, an official unseen room outside the test split, and equal
    layouts."""
    games = {split: find_games(folder, split) for split in SPLITS}
    for split, n in COUNTS.items():
        assert Counter(g.task_type for g in games[split]) == Counter(TASK_TYPES[:n])
        homes = {"valid": VALID_ROOMS, "test": TEST_ROOMS}
        assert all(
            [name for name, rooms in homes.items() if g.room in rooms] == [split] * (split != "train")
            for g in games[split]
        )
        assert all(
            g.name.split("/")[0] == split and g.name.split("/")[1].endswith(f"-{g.room}")
            for g in games[split]
        )
    assert {10, 219, 308, 424} <= set(TEST_ROOMS) and not set(TEST_ROOMS) & set(VALID_ROOMS)
    everything = [frozenset(facts(problem(g))["inReceptacle"]) for split in SPLITS for g in games[split]]
    assert len(set(everything)) == sum(COUNTS.values())


@needs_packages
def test_targets_start_where_the_goal_does_not_hold(folder):
    """Stops a pick or two-object game with a copy already at its goal, too few copies, or a target on the
    floor where no command reaches it."""
    for game in (g for split in SPLITS for g in find_games(folder, split)):
        found = facts(problem(game))
        kind, home = dict(found["objectType"]), dict(found["receptacleType"])
        targets = [o for o in kind if kind[o] == game.params["object_target"] + "Type"]
        on = dict(found["inReceptacle"])
        assert len(targets) >= 1 + (game.task_type == "pick_two_obj_and_place") and all(
            t in on for t in targets
        ), game.name
        if game.task_type.startswith(("pick_and_place", "pick_two")):
            assert not any(home[on[t]] == game.params["parent_target"] + "Type" for t in targets), game.name
        assert not {"isClean", "isHot", "isCool", "isToggled", "holds"} & set(found)


@needs_packages
def test_a_room_is_the_same_in_all_its_games():
    """Stops receptacles or view points that move between games of a room, and unstable choices (hash order)
    behind them."""
    from dreamgym.envs.alfworld.rooms import room

    first = room(10)
    room.cache_clear()
    assert room(10) == first
    assert [r.type for r in first.receptacles].count("StoveBurner") == 4 and {
        "Fridge",
        "Microwave",
        "SinkBasin",
    } <= {r.type for r in first.receptacles}
    # as in official games
    assert "Fridge_bar__plus_00_dot_97_bar__plus_00_dot_00_bar__plus_01_dot_25" in {
        r.id for r in first.receptacles
    }
    assert (
        next(r.at for r in first.receptacles if r.type == "Microwave") == "loc_bar_1_bar__minus_5_bar_1_bar_0"
    )
    # alfworld calls "Sink|x|y|z|SinkBasin" a sinkbasin, and "SinkBasin|x|y|z" a sinkbasinbasin
    for number in alfworld_games.ROOMS:
        for basin in (r for r in room(number).receptacles if r.type.endswith("Basin")):
            assert (
                basin.id.split("_bar_")[0] in ("Sink", "Bathtub")
                and basin.id.split("_bar_")[-1] == basin.type
            ), (number, basin.id)
            assert basin.id.rsplit("_bar_", 1)[0] in {f.id for f in room(number).fixtures}, (number, basin.id)
    closed = [r for r in first.receptacles if r.type == "Cabinet" and not r.openable]
    assert (
        len({p.id for p in first.receptacles + first.fixtures}) == len(first.receptacles + first.fixtures)
        and len(closed) <= 3
    )


@needs_packages
def test_same_seed_same_bytes_and_resume(folder, tmp_path):
    """Stops hidden randomness, time stamps, and an interrupted run that ends otherwise than an uninterrupted
    one."""

    def interrupt(done, total):
        if done == 4:
            raise KeyboardInterrupt

    counts = {"train": 4, "test": 3}
    generate(tmp_path / "a", 5, counts, check=False)
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "b", 5, counts, check=False, progress=interrupt)
    with pytest.raises(ValueError, match="no playable"):
        find_games(tmp_path / "b", "train")
    half = next((tmp_path / "b").rglob("trial_*"))
    half.rename(half.with_name(half.name + ".new"))  # a game whose writing was cut off
    (half.with_name(half.name + ".new") / "game.tw-pddl").write_text("{")
    generate(tmp_path / "b", 5, counts, check=False)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    generate(tmp_path / "c", 6, counts, check=False)
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


@needs_packages
def test_kept_when_it_fits_and_replaced_when_not(tmp_path):
    """Stops a needless second generation, a cache of another seed that is used, and unchecked games passed
    off as checked."""
    generate(tmp_path, 1, {"train": 6}, check=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    generate(tmp_path, 1, {"train": 6}, check=False)
    assert before == {path: path.stat().st_mtime_ns for path in before} and before
    assert generate(tmp_path, 2, {"train": 1}, check=True)["checked"]
    assert len(find_games(tmp_path, "train")) == 1 and {path.name for path in tmp_path.iterdir()} == {
        "json_2.1.1",
        ".lock",
    }
    assert generate(tmp_path, 2, {"train": 1}, check=False)["checked"]


@needs_packages
def test_two_processes_at_once(tmp_path):
    """Stops the ranks of one run from tripping over each other's half-written games."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=generate, args=(tmp_path, 4, {"train": 6}, False))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0] and len(find_games(tmp_path, "train")) == 6


@needs_packages
def test_nothing_of_somebody_else_is_deleted(tmp_path):
    """Stops the generator from replacing official games when it is pointed at $ALFWORLD_DATA."""
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="not generated here"):
        generate(tmp_path, counts={"train": 1}, check=False)


@needs_packages
def test_sizes_lie_in_the_range_of_official_games(tmp_path):
    """Stops empty rooms, one instance of everything, and a statistics function that counts the unused
    constants of official problems."""
    mean = generate(tmp_path, counts={"train": 60}, check=False)["mean"]
    official = {
        "objects": (37, 48),
        "pickupable": (29, 38),
        "receptacles": (20, 28),
        "locations": (26, 35),
        "instances_per_type": (1.6, 1.9),
        # means of 374 official games +- 15 %
        "types": (21, 27),
        "placed": (0.9, 0.98),
        "hidden": (0.12, 0.28),
        "viewpoints": (18, 25),
    }
    assert not {key: mean[key] for key, (low, high) in official.items() if not low <= mean[key] <= high}
    text = (
        "(:objects Mug - object a_bar_1 - object loc_bar_1 - location)(:init (objectType a_bar_1 MugType) (pickupable a_bar_1) (receptacleType r_bar_1 DeskType)"
        "(receptacleAtLocation r_bar_1 loc_bar_1) (objectAtLocation a_bar_1 loc_bar_1) (inReceptacle a_bar_1 r_bar_1))(:goal (inReceptacle ?o ?r))"
    )
    assert statistics(text) == {
        "objects": 1,
        "pickupable": 1,
        "types": 1,
        "instances_per_type": 1,
        "receptacles": 1,
        "openable": 0,
        "locations": 1,
        "viewpoints": 1,
        "placed": 1,
        "hidden": 0,
        "beside": 0,
    }


@needs_packages
def test_the_packages_own_environment_plays_the_folder(folder, monkeypatch, capsys):
    """Stops a folder that only our reader understands: the unmodified AlfredTWEnv finds all games and wins
    one."""
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    monkeypatch.setattr(sys, "argv", ["test"])  # Fast Downward reads the command line
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    data = str(folder / "json_2.1.1")
    config = {
        "dataset": {
            "data_path": f"{data}/train",
            "eval_id_data_path": f"{data}/valid",
            "eval_ood_data_path": f"{data}/test",
            "num_train_games": -1,
            "num_eval_games": -1,
        },
        "env": {
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "goal_desc_human_anns_prob": 0,
            "expert_type": "handcoded",
        },
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}},
    }
    assert AlfredTWEnv(config, train_eval="train").num_games == COUNTS["train"]
    batch = AlfredTWEnv(config, train_eval="eval_out_of_distribution")
    assert sorted(batch.game_files) == [g.path for g in find_games(folder, "test")]
    env = batch.init_env(batch_size=1)
    _, infos = env.reset()
    for command in json.loads(Path(infos["extra.gamefile"][0]).read_text())["walkthrough"]:
        assert not infos["won"][0] and command in infos["admissible_commands"][0]
        _, _, _, infos = env.step([command])
    assert infos["won"][0]
    env.close()


def write_game(root: Path, goal: str, **changes) -> None:
    trial = root / "json_2.1.1" / "valid_seen" / goal / "trial_1"
    trial.mkdir(parents=True)
    game = {"grammar": 'template :: "move {o} to {r}"', "solvable": True, **changes}
    record = {
        "task_type": goal.split("-")[0],
        "pddl_params": {"object_target": "Mug"},
        "scene": {"scene_num": 7},
    }
    (trial / "game.tw-pddl").write_text(json.dumps(game))
    (trial / "traj_data.json").write_text(json.dumps(record))


def test_find_games_takes_what_the_package_takes(tmp_path):
    """Stops movable, sliced, unsolvable and half-deleted games, an order that depends on the disk, and a
    folder given one level too deep."""
    for goal in (
        "pick_two_obj_and_place-Mug-None-Desk-7",
        "look_at_obj_in_light-Mug-None-DeskLamp-7",
        "pick_and_place_with_movable_recep-Mug-Pan-Desk-7",
        "pick_cool_then_place_in_recep-AppleSliced-None-Desk-7",
    ):
        write_game(tmp_path, goal)
    write_game(tmp_path, "pick_and_place_simple-Mug-None-Desk-8", solvable=False)
    write_game(tmp_path, "pick_and_place_simple-Mug-None-Desk-9")
    os.remove(next(tmp_path.rglob("*Desk-9/trial_1/traj_data.json")))
    names = [
        "valid_seen/look_at_obj_in_light-Mug-None-DeskLamp-7/trial_1",
        "valid_seen/pick_two_obj_and_place-Mug-None-Desk-7/trial_1",
    ]
    assert (
        [g.name for g in find_games(tmp_path, "valid_seen")]
        == [g.name for g in find_games(tmp_path / "json_2.1.1", "valid_seen")]
        == names
    )
    assert find_games(tmp_path, "valid_seen")[0].room == 7 and find_games(tmp_path, "valid_seen")[
        0
    ].params == {"object_target": "Mug"}


def test_errors_are_one_clear_line(tmp_path, monkeypatch):
    """Stops a traceback, or work begun, on a wrong split, an empty folder, a broken file, games of the old
    grammar, wrong counts, missing packages."""
    cases = [
        (lambda: find_games(tmp_path, "dev"), "split 'dev'"),
        (lambda: find_games(tmp_path, "train"), "no playable ALFWorld games"),
        (lambda: generate(tmp_path, counts={"valid_seen": 3}), "expected a number of games"),
        (lambda: generate(tmp_path, counts={"train": 0}), "expected a number"),
    ]
    write_game(tmp_path, "pick_and_place_simple-Mug-None-Desk-7", grammar='template :: "put {o} in/on {r}"')
    cases.append((lambda: find_games(tmp_path, "valid_seen"), "alfworld < 0.4"))
    broken = tmp_path / "broken"
    write_game(broken, "pick_and_place_simple-Mug-None-Desk-7")
    next(broken.rglob("game.tw-pddl")).write_text("{")
    cases.append((lambda: find_games(broken, "valid_seen"), "not a valid ALFWorld game"))
    alfworld_games.shipped.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cases.append(
        (lambda: generate(tmp_path / "new", counts={"train": 1}), "pip install -r requirements-alfworld.txt")
    )
    for call, expected in cases:
        with pytest.raises(ValueError, match=re.escape(expected)) as caught:
            call()
        assert "\n" not in str(caught.value)
