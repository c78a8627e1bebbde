"""The generator and the finder of ALFWorld games."""
import json
import multiprocessing
import os
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from alfworld_official import needs_packages, oracle_commands

from dreamgym.envs.alfworld import games as alfworld_games
from dreamgym.envs.alfworld.engine import Engine
from dreamgym.envs.alfworld.games import DATA, TASK_TYPES, TEST_ROOMS, VALID_ROOMS, find_games, generate
from dreamgym.envs.alfworld.rooms import room

pytestmark = needs_packages
COUNTS = {"train": 6, "valid": 2, "test": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """11 games; those for validation and test are won in the real engine while generating."""
    path = tmp_path_factory.mktemp("games")
    generate(path, 3, COUNTS)
    return path


def games_of(folder: Path) -> list[tuple[str, str, int, dict, dict]]:
    """(split, task type, room, game, facts) of each game."""
    return [(split, task_type, int(path.parts[-3].rsplit("-", 1)[1]), game, facts(game["pddl_problem"]))
            for split in COUNTS if (folder / DATA / split).exists()
            for path, task_type, game in find_games(folder / DATA / split)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def facts(text: str) -> dict[str, list[tuple]]:
    found, init = defaultdict(list), text.split("(:init")[1].split("(:goal")[0]
    for predicate, *arguments in (fact.split() for fact in re.findall(r"\(([A-Za-z][^()]*)\)", init)):
        found[predicate].append(tuple(arguments))
    return found


def test_an_unwinnable_game_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_games, "Oracle", lambda *_: lambda state: "look")
    with pytest.raises(RuntimeError, match="none of 5 layouts"):
        generate(tmp_path, counts={"valid": 1})
    assert not (tmp_path / DATA).exists()


def test_splits_are_balanced_with_disjoint_rooms_and_layouts(folder):
    """A home of one split in another, an official unseen room outside the test split."""
    games = games_of(folder)
    for split, n in COUNTS.items():
        assert Counter(kind for name, kind, *_ in games if name == split) == Counter(TASK_TYPES[:n])
    for split, _, number, *_ in games:
        assert (number in VALID_ROOMS, number in TEST_ROOMS) == (split == "valid", split == "test")
    assert {10, 219, 308, 424} <= set(TEST_ROOMS) and not set(TEST_ROOMS) & set(VALID_ROOMS)
    assert len({frozenset(found["inReceptacle"]) for *_, found in games}) == sum(COUNTS.values())


def test_no_target_starts_where_it_is_to_be_put(folder):
    """A game that is won before the first action, or nearly: a two-object game with one of them there."""
    for path in folder.rglob("game.tw-pddl"):
        assert not Engine(path).won, path
        record = json.loads(path.with_name("traj_data.json").read_text())
        thing, home = (f"{record['pddl_params'][key]}Type" for key in ("object_target", "parent_target"))
        found = facts(json.loads(path.read_text())["pddl_problem"])
        kinds, homes = dict(found["objectType"]), dict(found["receptacleType"])
        if record["task_type"].startswith(("pick_and_place", "pick_two")):
            assert (thing, home) not in {(kinds[o], homes[r]) for o, r in found["inReceptacle"]}, path


def test_a_room_is_the_same_in_all_its_games():
    first = room(10)
    room.cache_clear()
    assert room(10) == first
    types, ids = [r.type for r in first.receptacles], [p.id for p in first.receptacles + first.fixtures]
    assert types.count("StoveBurner") == 4 and {"Fridge", "Microwave", "SinkBasin"} <= set(types)
    # as in official games
    assert "Fridge_bar__plus_00_dot_97_bar__plus_00_dot_00_bar__plus_01_dot_25" in ids
    assert first.receptacles[types.index("Microwave")].at == "loc_bar_1_bar__minus_5_bar_1_bar_0"
    assert len(set(ids)) == len(ids)
    assert sum(r.type == "Cabinet" and not r.openable for r in first.receptacles) <= 3
    # alfworld calls "Sink|x|y|z|SinkBasin" a sinkbasin, and "SinkBasin|x|y|z" a sinkbasinbasin
    for number in alfworld_games.ROOMS:
        for basin in (r for r in room(number).receptacles if r.type.endswith("Basin")):
            name, *_, last = basin.id.split("_bar_")
            assert name in ("Sink", "Bathtub") and last == basin.type, (number, basin.id)
            assert basin.id.rsplit("_bar_", 1)[0] in {f.id for f in room(number).fixtures}, (number, basin.id)


def test_same_seed_same_bytes_and_resume(tmp_path, monkeypatch):
    counts, write = {"train": 4, "test": 3}, alfworld_games._write_game
    generate(tmp_path / "a", 5, counts)

    def interrupted(trial, *rest, **check):
        if trial.name.endswith("_00001") and "test" in str(trial):
            raise KeyboardInterrupt
        write(trial, *rest, **check)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(alfworld_games, "_write_game", interrupted)
        generate(tmp_path / "b", 5, counts)
    assert not (tmp_path / "b" / DATA).exists()
    half = next((tmp_path / "b").rglob("trial_*"))
    new = half.rename(half.with_name(half.name + ".new"))        # a game whose writing was cut off
    (new / "game.tw-pddl").write_text("{")
    generate(tmp_path / "b", 5, counts)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    generate(tmp_path / "c", 6, counts)
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


def test_kept_when_it_fits_and_replaced_when_not(tmp_path):
    """A needless second generation, a cache of another seed that is used."""
    generate(tmp_path, 1, {"train": 6})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    generate(tmp_path, 1, {"train": 6})
    assert before == {path: path.stat().st_mtime_ns for path in before} and before
    generate(tmp_path, 2, {"train": 1})
    assert len(games_of(tmp_path)) == 1 and {path.name for path in tmp_path.iterdir()} == {DATA, ".lock"}


def test_two_processes_at_once(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=generate, args=(tmp_path, 4, {"train": 6})) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0] and len(games_of(tmp_path)) == 6


def test_nothing_of_somebody_else_is_deleted(tmp_path):
    """Stops the generator from replacing official games when it is pointed at $ALFWORLD_DATA."""
    (tmp_path / DATA / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="not generated here"):
        generate(tmp_path, counts={"train": 1})


def sizes(found: dict[str, list[tuple]]) -> dict[str, float]:
    """The rows of docs/environments.md's table; `placed`, `hidden`: share of the things to pick up that lie
    in a receptacle, in a closed one."""
    inside, things = dict(found["inReceptacle"]), {o for o, in found["pickupable"]}
    objects, openable = dict(found["objectType"]), {r for r, in found["openable"]}
    located = ("objectAtLocation", "receptacleAtLocation", "atLocation")
    return {
        "objects": len(objects), "pickupable": len(things), "types": len(set(objects.values())),
        "instances_per_type": len(objects) / len(set(objects.values())),
        "receptacles": len(found["receptacleType"]),
        "locations": len({at for name in located for _, at in found[name]}),
        "viewpoints": len({at for _, at in found["receptacleAtLocation"]}),
        "placed": sum(o in inside for o in things) / len(things),
        "hidden": sum(inside.get(o) in openable for o in things) / len(things)}


def test_sizes_lie_in_the_range_of_official_games(tmp_path):
    generate(tmp_path, counts={"train": 60})
    games = [sizes(found) for *_, found in games_of(tmp_path)]
    mean = {key: sum(game[key] for game in games) / len(games) for key in games[0]}
    official = {                                         # means of 374 official games +- 15 %
        "objects": (37, 48), "pickupable": (29, 38), "receptacles": (20, 28), "locations": (26, 35),
        "instances_per_type": (1.6, 1.9), "types": (21, 27), "placed": (0.9, 0.98), "hidden": (0.12, 0.28),
        "viewpoints": (18, 25)}
    assert not {key: mean[key] for key, (low, high) in official.items() if not low <= mean[key] <= high}


def test_the_packages_own_environment_plays_the_folder(folder, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    monkeypatch.setattr(sys, "argv", ["test"])  # Fast Downward reads the command line
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    config = {
        "dataset": {"data_path": f"{folder / DATA}/train", "eval_id_data_path": f"{folder / DATA}/valid",
                    "eval_ood_data_path": f"{folder / DATA}/test",
                    "num_train_games": -1, "num_eval_games": -1},
        "env": {"task_types": [1, 2, 3, 4, 5, 6], "domain_randomization": False,
                "goal_desc_human_anns_prob": 0, "expert_type": "handcoded"},
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}}}
    assert AlfredTWEnv(config, train_eval="train").num_games == COUNTS["train"]
    batch = AlfredTWEnv(config, train_eval="eval_out_of_distribution")
    assert sorted(batch.game_files) == [str(path) for path, *_ in find_games(folder / DATA / "test")]
    env = batch.init_env(batch_size=1)
    _, infos = env.reset()
    for command in oracle_commands(infos["extra.gamefile"][0]):
        assert not infos["won"][0] and command in infos["admissible_commands"][0]
        _, _, _, infos = env.step([command])
    assert infos["won"][0]
    env.close()


GRAMMAR = 'template :: "move {o} to {r}" "Your task is to: put a mug in desk."'


def write_game(split: Path, goal: str, **changes) -> Path:
    trial = split / goal / "trial_1"
    trial.mkdir(parents=True)
    game = {"pddl_domain": "-", "pddl_problem": "-", "grammar": GRAMMAR, "solvable": True, **changes}
    (trial / "game.tw-pddl").write_text(json.dumps(game))
    (trial / "traj_data.json").write_text(json.dumps({"task_type": goal.split("-")[0]}))
    return trial


def test_find_games_takes_what_the_package_takes(tmp_path):
    """Movable, sliced, unsolvable and half-deleted games, and an order that depends on the disk."""
    for goal in ("pick_two_obj_and_place-Mug-None-Desk-7", "look_at_obj_in_light-Mug-None-DeskLamp-7",
                 "pick_and_place_with_movable_recep-Mug-Pan-Desk-7",
                 "pick_cool_then_place_in_recep-AppleSliced-None-Desk-7"):
        write_game(tmp_path, goal)
    write_game(tmp_path, "pick_and_place_simple-Mug-None-Desk-8", solvable=False)
    os.remove(write_game(tmp_path, "pick_and_place_simple-Mug-None-Desk-9") / "traj_data.json")
    found = [(path.parts[-3], task_type) for path, task_type, _ in find_games(tmp_path)]
    assert found == [("look_at_obj_in_light-Mug-None-DeskLamp-7", "look_at_obj_in_light"),
                     ("pick_two_obj_and_place-Mug-None-Desk-7", "pick_two_obj_and_place")]


@pytest.mark.parametrize("file, content, said", [
    ("", "", "no playable ALFWorld games"),
    ("game.tw-pddl", "{", "not a game"),
    ("traj_data.json", "{", "not a record"),
    ("traj_data.json", "[]", "not a record")])
def test_errors_are_one_clear_line(tmp_path, file, content, said):
    if file:
        (write_game(tmp_path, "pick_and_place_simple-Mug-None-Desk-7") / file).write_text(content)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        find_games(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
