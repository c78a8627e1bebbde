"""ALFWorld games: find them on disk, or generate valid ones where the official ones are not there.

`generate` writes the official folder layout with the domain, grammar, goals, task sentences and placement
rules of the `alfworld` wheel and the rooms of rooms.py; things lie at random where the rules allow. Left out:
things inside bowls and pans, cold from the start, sliced and movable-receptacle tasks, images.
"""
import fcntl
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from dreamgym.envs.alfworld.engine import read_game
from dreamgym.envs.alfworld.rooms import Place, Placer, Room, location, room, shipped
from dreamgym.envs.alfworld.scripted import Oracle
from dreamgym.envs.alfworld.workers import Play
from dreamgym.envs.base import Session
from dreamgym.episode import Task

VERSION = 3                                      # raise it whenever the same seed would give other bytes
COUNTS = {"train": 2000, "valid": 60, "test": 120}     # each split in homes of its own
TASK_TYPES = (
    "pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place",
)
LAMP, TWO = TASK_TYPES[1], TASK_TYPES[5]
# the four official unseen ones; two kitchens and two bedrooms more for variety
TEST_ROOMS = (10, 219, 308, 424, 1, 2, 301, 302)
VALID_ROOMS = (3, 4, 5, 205, 303, 304, 305, 403)       # likewise
ROOMS = tuple(first + i for first in (0, 200, 300, 400) for i in range(1, 31))
DATA = "json_2.1.1"
ATTEMPTS = 5                                     # layouts tried for one goal
STATION = {
    "pick_clean_then_place_in_recep": ("SinkBasin", "Cleanable"),
    "pick_heat_then_place_in_recep": ("Microwave", "Heatable"),
    "pick_cool_then_place_in_recep": ("Fridge", "Coolable"),
}
# elsewhere an unwashed, cold ... copy may lie there, as in official games
NO_COPY_AT_GOAL = ("pick_and_place_simple", TWO)

# How many things lie on one receptacle of a type, relative to the others (1 where not named). Set by hand
# until the totals were near the official ones.
ROOMINESS = {
    "DiningTable": 9, "CounterTop": 5.5, "Desk": 4, "Dresser": 4, "Fridge": 7.5, "Bed": 8,
    "CoffeeTable": 3.5, "TVStand": 15, "Cart": 3, "Sofa": 4, "Toilet": 2.5, "SideTable": 2.2, "SinkBasin": 2,
    "BathtubBasin": 4, "Microwave": 2.2, "HandTowelHolder": 25, "TowelHolder": 9, "StoveBurner": 12,
    "CoffeeMachine": 12, "GarbageCan": 2, "Safe": 2, "LaundryHamper": 0.1, "Drawer": 0.9, "Cabinet": 0.9,
}
HOLDS_ONE = {"StoveBurner", "TowelHolder", "HandTowelHolder", "ToiletPaperHanger", "CoffeeMachine"}
ONE_OF_EACH = {
    "BaseballBat", "BasketBall", "Boots", "PaperTowelRoll", "Plunger", "ScrubBrush", "TeddyBear",
    "TennisRacket", "Towel", "WateringCan",
}
# at most; of other types MAX_NUM_OF_OBJ_INSTANCES of the wheel (3)
TWO_OF_EACH = {"Box", "Bread", "HandTowel", "Kettle", "Laptop", "Pan", "Pillow", "Pot"}
# the placement rules forgot these two
LIES_LIKE = {"PaperTowelRoll": "PaperTowel", "TeddyBear": "Pillow"}
# Share of a type that lies in no receptacle, where the text game cannot reach it (in official games 5 % of
# all things); targets never do.
ON_FLOOR = {
    "Plunger": 1, "ScrubBrush": 1, "Boots": 1, "BaseballBat": 0.6, "BasketBall": 0.6, "TennisRacket": 0.6,
    "WateringCan": 0.6,
}
ON_FLOOR_ELSE = 0.025


class Goal(NamedTuple):
    task_type: str
    object: str
    receptacle: str                              # "": under the desk lamp
    room: int

    def __str__(self) -> str:
        return f"{self.task_type}-{self.object}-None-{self.receptacle or 'DeskLamp'}-{self.room}"


def find_games(folder: Path) -> list[tuple[Path, str, dict]]:
    """(game.tw-pddl, task type, content) of a folder's playable games, sorted: those that AlfredTWEnv takes
    (no movable receptacles, nothing sliced, solvable). Raises ValueError for none, or a file that is no
    game."""
    games = []
    for path in sorted(folder.glob("*/*/game.tw-pddl")):
        record = path.with_name("traj_data.json")
        if "movable" in path.parts[-3] or "Sliced" in path.parts[-3] or not record.exists():
            continue
        try:
            task_type = json.loads(record.read_text(encoding="utf-8"))["task_type"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{record}: not a record of a game ({type(error).__name__}: {error})") from None
        game = read_game(path)
        if task_type in TASK_TYPES and game.get("solvable"):
            games.append((path, task_type, game))
    if not games:
        raise ValueError(f"{folder}: no playable ALFWorld games; expected {DATA}/{folder.name}/<goal>/"
                         "<trial>/ with game.tw-pddl and traj_data.json")
    return games


def generate(folder: Path, seed: int = 0, counts: Mapping[str, int] = COUNTS, cache: str = "") -> None:
    """Writes <folder>/json_2.1.1 with `counts` games of each split, balanced over the task types. Games that
    fit are kept; an interrupted run goes on where it stopped. The oracle wins each game for validation and
    test in the real engine (0.3 CPU-seconds each); the folder `cache` keeps their translations. Raises
    ValueError when the folder holds games of somebody else."""
    wanted = {"version": VERSION, "seed": seed, "counts": {split: counts.get(split, 0) for split in COUNTS},
              "checked": True}
    folder.mkdir(parents=True, exist_ok=True)
    final, made = folder / DATA, folder / DATA / "games.json"
    # other ranks of the same run wait here, then find the games; a killed one frees it
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.exists() and not made.exists():
            raise ValueError(f"{final}: holds games that were not generated here (no games.json); choose "
                             "another folder")
        if final.exists() and json.loads(made.read_text()) == wanted:
            return
        partial = folder / "-".join(map(str, ["partial", VERSION, seed, *wanted["counts"].values()]))
        goals = [(split, i, goal) for split, count in wanted["counts"].items()
                 for i, goal in enumerate(_goals(split, count, seed))]
        for split, i, goal in tqdm(goals, desc="generating games", leave=False, delay=15, mininterval=15):
            trial = partial / split / str(goal) / f"trial_G{seed:04d}_{i:05d}"
            if not trial.exists():               # there it is after an interrupted run
                _write_game(trial, goal, f"{seed} {split} {i}", split != "train", cache)
        (partial / "games.json").write_text(json.dumps(wanted, indent=1) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)


# Which goals a room has -------------------------------------------------------------------------------------

def room_goals(place: Room, task_type: str) -> dict[str, list[str]]:
    """Goal receptacle type ('' for the lamp) -> object types that can start elsewhere, by the wheel's
    rules."""
    constants = shipped()[1]
    holds = {r.type: constants.VAL_RECEPTACLE_OBJECTS[r.type] for r in place.receptacles}
    homes = {t: {r for r in holds if t in holds[r]} for t in place.types}
    if task_type == LAMP:
        lamp = any(f.type == "DeskLamp" and f.on for f in place.fixtures)
        return {"": [t for t in place.types if homes[t]]} if lamp else {}
    station, able = STATION.get(task_type, ("", ""))
    if station and station not in holds:
        return {}
    types = [t for t in place.types
             if len(homes[t]) > 1 and (not able or t in constants.VAL_ACTION_OBJECTS[able])
             and not (task_type == TWO and t in ONE_OF_EACH)]
    targets = set(holds) - {station} - (HOLDS_ONE if task_type == TWO else set())
    goals = {receptacle: [t for t in types if receptacle in homes[t]] for receptacle in sorted(targets)}
    return {receptacle: fits for receptacle, fits in goals.items() if fits}


def _goals(split: str, count: int, seed: int) -> list[Goal]:
    """The task types in turn; a goal comes again in its split only when 50 draws found no new one."""
    goals = []
    held_out = {"valid": VALID_ROOMS, "test": TEST_ROOMS}
    homes = held_out.get(split) or [n for n in ROOMS if n not in VALID_ROOMS + TEST_ROOMS]
    rooms = {t: [n for n in homes if room_goals(room(n), t)] for t in TASK_TYPES}
    for index in range(count):
        rng, task_type = random.Random(f"{seed} {split} {index} goal"), TASK_TYPES[index % len(TASK_TYPES)]
        for _ in range(50):
            number = rng.choice(rooms[task_type])
            options = room_goals(room(number), task_type)
            receptacle = rng.choice(list(options))
            goal = Goal(task_type, rng.choice(options[receptacle]), receptacle, number)
            if goal not in goals:
                break
        goals.append(goal)
    return goals


# One game ---------------------------------------------------------------------------------------------------

def _write_game(trial: Path, goal: Goal, name: str, check: bool, cache: str) -> None:
    """Raises RuntimeError when no layout of ATTEMPTS can be won: a fault of this generator."""
    folder, _, library = shipped()
    texts, place = library.gdict[goal.task_type], room(goal.room)
    domain, grammar = (
        _compact((folder / "data" / file).read_text()) for file in ("alfred.pddl", "alfred.twl2"))
    for attempt in range(ATTEMPTS):
        rng = random.Random(f"{name} layout {attempt}")
        words = {"obj": goal.object, "recep": goal.receptacle, "toggle": "DeskLamp"}
        sentence = rng.choice(texts["templates"]).format(**{key: word.lower() for key, word in words.items()})
        things, start = _layout(place, goal, rng)
        problem = _problem(place, things, start, texts["pddl"].replace("#", "-").format(**words))
        game = {
            "pddl_domain": domain,
            "grammar": grammar.replace("UNKNOWN GOAL", sentence),
            "pddl_problem": problem,
            "solvable": True,
        }
        record = {
            "task_type": goal.task_type,
            "pddl_params": {
                "mrecep_target": "", "object_sliced": False, "object_target": goal.object,
                "parent_target": goal.receptacle, "toggle_target": "" if goal.receptacle else "DeskLamp",
            },
            "scene": {"floor_plan": f"FloorPlan{goal.room}", "scene_num": goal.room},
            "turk_annotations": {"anns": [{"task_desc": sentence}]},
        }
        new = trial.with_name(trial.name + ".new")
        new.mkdir(parents=True, exist_ok=True)
        (new / "game.tw-pddl").write_text(json.dumps(game))
        (new / "traj_data.json").write_text(json.dumps(record))
        (new / "initial_state.pddl").write_text(problem)
        if not check or _wins(new / "game.tw-pddl", cache):
            new.rename(trial)
            return
    raise RuntimeError(f"{trial.name}: none of {ATTEMPTS} layouts for {goal} could be won")


def _compact(text: str) -> str:
    """PDDL and grammar without comments and indentation: the engine reads the same, a third of the size."""
    lines = (re.sub(r"\s;.*|^;.*", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def _wins(path: Path, cache: str) -> bool:
    """Whether the oracle wins the game within 50 steps, and it is not won at the start."""
    play = Play(str(path), False, cache)
    session = Session(Task(id="", text=play.engine.task), play.state(), inner=play)
    act = Oracle(session, np.random.default_rng(0))
    return not play.engine.won and any(play.step(act(play.state()))[1] for _ in range(50))


def _layout(place: Room, goal: Goal, rng: random.Random) -> tuple[list[Place], str]:
    """(what can be picked up in its places, the agent's location). The goal does not hold at the start."""
    constants = shipped()[1]
    placer, load, things = Placer(rng, place.points, place.receptacles + place.fixtures), Counter(), []
    for kind in place.types:
        target = kind == goal.object
        most = 1 if kind in ONE_OF_EACH else 2 if kind in TWO_OF_EACH else constants.MAX_NUM_OF_OBJ_INSTANCES
        if target and kind not in ONE_OF_EACH:
            most = constants.PICKUP_REPEAT_MAX
        fits = [r for r in place.receptacles
                if LIES_LIKE.get(kind, kind) in constants.VAL_RECEPTACLE_OBJECTS[r.type]
                and not (target and r.type == goal.receptacle and goal.task_type in NO_COPY_AT_GOAL)]
        for _ in range(rng.randint(2 if target and goal.task_type == TWO else 1, most)):
            homes = [r for r in fits if not (r.type in HOLDS_ONE and load[r.id])]
            if homes and (target or rng.random() >= ON_FLOOR.get(kind, ON_FLOOR_ELSE)):
                home = rng.choices(homes, [ROOMINESS.get(r.type, 1) for r in homes])[0]
                load[home.id] += 1
                things.append(placer.near(kind, home.xyz, home.at, home.id))
            else:
                things.append(placer.anywhere(kind))
    here = {p.at for p in place.receptacles + place.fixtures + things}
    while (start := location(*placer.view())) in here:
        pass
    return things, start


def _problem(place: Room, things: list[Place], start: str, goal: str) -> str:
    """The PDDL problem with the facts of official ones, without their 120 unused constants."""
    constants = shipped()[1]
    objects, receptacles = place.fixtures + things, place.receptacles
    otypes, rtypes = sorted({o.type for o in objects}), sorted({r.type for r in receptacles})
    locations = sorted({p.at for p in objects + receptacles} | {start})
    declared = {
        "agent": ["agent1"],
        "object": [o.id for o in objects],
        "receptacle": [r.id for r in receptacles],
        "location": locations,
        # with those that the domain names
        "otype": [f"{t}Type" for t in sorted({*otypes, "Knife", "ButterKnife"})],
        "rtype": [f"{t}Type" for t in sorted({*rtypes, "SinkBasin", "Microwave", "Fridge"})],
    }
    facts = [f"atLocation agent1 {start}"]
    facts += [f"canContain {r}Type {t}Type" for r in rtypes for t in otypes
              if t in constants.VAL_RECEPTACLE_OBJECTS[r]]
    for r in receptacles:
        facts += [f"receptacleType {r.id} {r.type}Type", f"receptacleAtLocation {r.id} {r.at}",
                  *[f"openable {r.id}"] * r.openable]
    for o in objects:
        facts += [f"objectType {o.id} {o.type}Type", f"objectAtLocation {o.id} {o.at}",
                  *[f"inReceptacle {o.id} {o.on}"] * bool(o.on)]
        facts += [f"{name.lower()} {o.id}"
                  for name in ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")
                  if o.type in constants.VAL_ACTION_OBJECTS[name]]
        facts += [f"isReceptacleObject {o.id}"] * (o.type in constants.MOVABLE_RECEPTACLES_SET)
    facts += [f"pickupable {o.id}" for o in things]
    lines = ["(define (problem generated)", "(:domain alfred)", "(:objects",
             *(f"{name} - {kind}" for kind, names in declared.items() for name in names), ")", "(:init",
             *(f"({fact})" for fact in facts), ")"]
    return "\n".join(lines) + "\n" + _compact(goal)
