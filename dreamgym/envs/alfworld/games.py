"""ALFWorld games: find them on disk, or generate valid ones where the official ones are not there.

`find_games` reads the official folder layout (`$ALFWORLD_DATA/json_2.1.1`, or ours). `generate` writes that
layout with the domain, grammar, goals, task sentences and placement rules of the `alfworld` wheel and the
rooms of rooms.py. The wheel does not say where things lie, so they are laid out at random where the rules
allow; each game is won in the real engine before it is kept.

Left out on purpose: things inside bowls and pans, things that are cold from the start, sliced and
movable-receptacle tasks, images.
"""
from __future__ import annotations

import fcntl
import json
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dreamgym.envs.alfworld.rooms import (
    Place, Room, location, place_anywhere, place_near, random_view, room, shipped,
)

VERSION = 2                                      # raise it whenever the same seed would give other bytes
SPLITS = ("train", "valid", "test")              # of generated games, each in homes of its own
# the generator's, the official
FOLDERS = {"train": ("train",), "valid": ("valid", "valid_seen"), "test": ("test", "valid_unseen")}
TASK_TYPES = (
    "pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place",
)
DEFAULT_COUNTS = MappingProxyType({"train": 240, "valid": 60, "test": 120})
# the four official unseen ones; two kitchens and two bedrooms more for variety
TEST_ROOMS = (10, 219, 308, 424, 1, 2, 301, 302)
VALID_ROOMS = (3, 4, 5, 205, 303, 304, 305, 403)       # likewise
ROOMS = tuple(first + i for first in (0, 200, 300, 400) for i in range(1, 31))
DATA = "json_2.1.1"
ATTEMPTS = 5                                     # layouts tried for one goal
STATION = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin", "Cleanable"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave", "Heatable"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge", "Coolable"),
}
# elsewhere an unwashed, cold ... copy may lie there, as in official games
NO_COPY_AT_GOAL = ("pick_and_place_simple", "pick_two_obj_and_place")

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


@dataclass(frozen=True)
class Game:
    """A game on disk. `path`: its game.tw-pddl; `name`: <split>/<goal>/<trial>; `params`: the official
    pddl_params."""
    path: str
    task_type: str
    room: int
    name: str
    params: dict


def find_games(folder: str | Path, split: str) -> list[Game]:
    """The playable games of a split in sorted order: those AlfredTWEnv takes (no movable receptacles, nothing
    sliced, solvable).

    `folder` holds json_2.1.1, or is it. Raises ValueError for an unknown split, no games, an unreadable file,
    or games of another grammar."""
    known = [name for names in FOLDERS.values() for name in names]
    if split not in known:
        raise ValueError(f"split {split!r}: ALFWorld has {', '.join(known)}")
    root = Path(folder) / DATA if (Path(folder) / DATA).is_dir() else Path(folder)
    games = [game for path in sorted((root / split).glob("*/*/game.tw-pddl")) if (game := _read_game(path))]
    if not games:
        raise ValueError(
            f"{root / split}: no playable ALFWorld games; expected {DATA}/{split}/<goal>/<trial>/ with "
            "game.tw-pddl and traj_data.json"
        )
    return games


def _read_game(path: Path) -> Game | None:
    split, goal, trial = path.parts[-4:-1]
    if "movable" in goal or "Sliced" in goal or not path.with_name("traj_data.json").exists():
        return None
    try:
        record, game = (
            json.loads(path.with_name(name).read_text(encoding="utf-8"))
            for name in ("traj_data.json", path.name)
        )
        task_type, params, grammar, solvable = (
            record["task_type"], record["pddl_params"], game["grammar"], game.get("solvable"),
        )
        number = int(record.get("scene", {}).get("scene_num", goal.rsplit("-", 1)[-1]))
        if not isinstance(grammar, str):
            raise TypeError(f"grammar is {type(grammar).__name__}")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ValueError(
            f"{path.parent}: not a valid ALFWorld game ({type(error).__name__}: {error}); "
            "remove or restore this folder"
        ) from None
    if task_type not in TASK_TYPES or not solvable:
        return None
    if "move {o} to {r}" not in grammar:
        raise ValueError(
            f"{path}: made for alfworld < 0.4 (its grammar has no `move`); "
            "fetch or rebuild the games with alfworld 0.4.2"
        )
    return Game(str(path), task_type, number, f"{split}/{goal}/{trial}", params)


def generate(
    folder: str | Path,
    seed: int = 0,
    counts: Mapping[str, int] = DEFAULT_COUNTS,
    check: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Write <folder>/json_2.1.1 with `counts` games of each split, balanced over the task types, and return
    its games.json.

    Games that are there and fit are kept; others that this function made are replaced; an interrupted run
    goes on where it stopped. The same arguments give the same bytes. `check` wins each game in the real
    engine (about 0.3 CPU-seconds each). Raises ValueError for wrong counts, without the alfworld package, or
    when the folder holds games made by somebody else."""
    if (
        not set(counts) <= set(SPLITS)
        or not all(type(n) is int and n >= 0 for n in counts.values())
        or not sum(counts.values())
    ):
        raise ValueError(f"counts {dict(counts)}: expected a number of games for some of {', '.join(SPLITS)}")
    wanted = {"version": VERSION, "seed": seed, "counts": {split: counts.get(split, 0) for split in SPLITS}}
    Path(folder).mkdir(parents=True, exist_ok=True)
    # other ranks of the same run wait here, then find the games; a killed one frees it
    with open(Path(folder) / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _finished(Path(folder) / DATA, wanted, check) or _generate(
            Path(folder), wanted, check, progress
        )


def _finished(final: Path, wanted: dict, check: bool) -> dict | None:
    """The games.json of a folder that has what is wanted. Raises ValueError when the folder is not ours to
    replace."""
    if not final.exists():
        return None
    try:
        found = json.loads((final / "games.json").read_text())
    except (OSError, ValueError):
        raise ValueError(
            f"{final}: holds games that were not generated here (no games.json); choose another folder"
        ) from None
    return found if wanted.items() <= found.items() and (found["checked"] or not check) else None


def _generate(folder: Path, wanted: dict, check: bool, progress: Callable[[int, int], None] | None) -> dict:
    name = "-".join(
        map(str, [VERSION, wanted["seed"], *wanted["counts"].values(), "checked" if check else "unchecked"])
    )
    partial, final, sizes, lengths = folder / f"partial-{name}", folder / DATA, [], defaultdict(list)
    for split, count in wanted["counts"].items():
        for index, goal in enumerate(_goals(split, count, wanted["seed"])):
            trial = partial / split / _goal_name(goal) / f"trial_G{wanted['seed']:04d}_{index:05d}"
            # there it is after an interrupted run
            if not trial.exists():
                _write_game(trial, goal, f"{wanted['seed']} {split} {index}", check)
            game = json.loads((trial / "game.tw-pddl").read_text())
            sizes.append(statistics(game["pddl_problem"]))
            lengths[goal["task_type"]].append(len(game["walkthrough"]))
            if progress:
                progress(len(sizes), sum(wanted["counts"].values()))
    means = {key: round(sum(s[key] for s in sizes) / len(sizes), 3) for key in sizes[0]}
    summary = {
        **wanted, "checked": check, "mean": means,
        "walkthrough_steps": {t: round(sum(v) / len(v), 2) for t, v in sorted(lengths.items())},
    }
    (partial / "games.json").write_text(json.dumps(summary, indent=1) + "\n")
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    return summary


def _goal_name(goal: dict) -> str:
    return f"{goal['task_type']}-{goal['object']}-None-{goal['receptacle'] or 'DeskLamp'}-{goal['room']}"


# Which goals a room has -------------------------------------------------------------------------------------

def room_goals(place: Room, task_type: str) -> dict[str, list[str]]:
    """Goal receptacle type ('' for look_at_obj_in_light) -> object types, by the wheel's rules. A goal needs
    another receptacle type to start in."""
    constants = shipped()[1]
    holds = {r.type: constants.VAL_RECEPTACLE_OBJECTS[r.type] for r in place.receptacles}
    homes = {t: {r for r in holds if t in holds[r]} for t in place.types}
    if task_type == "look_at_obj_in_light":
        lamp = any(f.type == "DeskLamp" and f.on for f in place.fixtures)
        return {"": [t for t in place.types if homes[t]]} if lamp else {}
    station, able = STATION.get(task_type, ("", "", ""))[1:]
    if station and station not in holds:
        return {}
    goals = {}
    for receptacle in sorted(
        set(holds) - {station} - (HOLDS_ONE if task_type == "pick_two_obj_and_place" else set())
    ):
        fits = [
            t
            for t in place.types
            if receptacle in homes[t]
            and len(homes[t]) > 1
            and (not able or t in constants.VAL_ACTION_OBJECTS[able])
        ]
        if task_type == "pick_two_obj_and_place":
            fits = [t for t in fits if t not in ONE_OF_EACH]
        if fits:
            goals[receptacle] = fits
    return goals


def _goals(split: str, count: int, seed: int) -> list[dict]:
    """`count` goals, the task types in turn; a goal comes again in its split only when 50 draws found no new
    one."""
    goals, used = [], set()
    held_out = {"valid": VALID_ROOMS, "test": TEST_ROOMS}
    homes = held_out.get(split) or [n for n in ROOMS if n not in VALID_ROOMS + TEST_ROOMS]
    rooms = {t: [n for n in homes if room_goals(room(n), t)] for t in TASK_TYPES}
    for index in range(count):
        rng, task_type = random.Random(f"{seed} {split} {index} goal"), TASK_TYPES[index % len(TASK_TYPES)]
        for _ in range(50):
            number = rng.choice(rooms[task_type])
            options = room_goals(room(number), task_type)
            receptacle = rng.choice(list(options))
            goal = (task_type, rng.choice(options[receptacle]), receptacle, number)
            if goal not in used:
                break
        used.add(goal)
        goals.append(dict(zip(("task_type", "object", "receptacle", "room"), goal)))
    return goals


# One game ---------------------------------------------------------------------------------------------------

def _write_game(trial: Path, goal: dict, name: str, check: bool) -> None:
    """Raises RuntimeError when no layout of ATTEMPTS can be won: a fault of this generator."""
    folder, _, library = shipped()
    texts = library.gdict[goal["task_type"]]
    words = {"obj": goal["object"], "recep": goal["receptacle"], "toggle": "DeskLamp"}
    for attempt in range(ATTEMPTS):
        rng = random.Random(f"{name} layout {attempt}")
        sentence = rng.choice(texts["templates"]).format(**{key: word.lower() for key, word in words.items()})
        things, start = _layout(room(goal["room"]), goal, rng)
        problem = _problem(room(goal["room"]), things, start, texts["pddl"].replace("#", "-").format(**words))
        game = {
            "pddl_domain": _compact((folder / "data" / "alfred.pddl").read_text()),
            "grammar": _compact((folder / "data" / "alfred.twl2").read_text()).replace(
                "UNKNOWN GOAL", sentence
            ),
            "pddl_problem": problem,
            "solvable": True,
            "walkthrough": _walkthrough(room(goal["room"]), things, start, goal),
        }
        params = {
            "mrecep_target": "", "object_sliced": False, "object_target": goal["object"],
            "parent_target": goal["receptacle"], "toggle_target": "" if goal["receptacle"] else "DeskLamp",
        }
        record = {
            "task_type": goal["task_type"],
            "pddl_params": params,
            "scene": {"floor_plan": f"FloorPlan{goal['room']}", "scene_num": goal["room"]},
            "turk_annotations": {"anns": [{"task_desc": sentence}]},
        }
        new = trial.with_name(trial.name + ".new")
        new.mkdir(parents=True, exist_ok=True)
        for file, text in (
            ("game.tw-pddl", json.dumps(game)), ("traj_data.json", json.dumps(record)),
            ("initial_state.pddl", problem),
        ):
            (new / file).write_text(text, encoding="utf-8")
        if not check or _wins(new / "game.tw-pddl", game["walkthrough"]):
            new.rename(trial)
            return
    raise RuntimeError(f"{trial.name}: none of {ATTEMPTS} layouts for {_goal_name(goal)} could be won")


def _compact(text: str) -> str:
    """PDDL and grammar without comment lines, indentation and trailing comments: the engine reads the same, a
    third of the size."""
    lines = (re.sub(r"\s;.*|^;.*", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def _wins(path: Path, walkthrough: list[str]) -> bool:
    """True when the last command of the walkthrough wins in the real engine, and nothing before it."""
    from dreamgym.envs.alfworld.engine import Engine
    engine = Engine(path)
    engine.reset()
    before = [engine.won]
    for command in walkthrough:
        engine.step(command)
        before.append(engine.won)
    engine.close()
    return before[-1] and not any(before[:-1])


def _layout(place: Room, goal: dict, rng: random.Random) -> tuple[list[Place], str]:
    """(what can be picked up in its places, the agent's location). The goal does not hold at the start."""
    constants = shipped()[1]
    taken, load, things = {p.id for p in place.receptacles + place.fixtures}, Counter(), []
    holds = constants.VAL_RECEPTACLE_OBJECTS
    for kind in place.types:
        target = kind == goal["object"]
        most = 1 if kind in ONE_OF_EACH else 2 if kind in TWO_OF_EACH else constants.MAX_NUM_OF_OBJ_INSTANCES
        least = 1 + (target and goal["task_type"] == "pick_two_obj_and_place")
        if target and kind not in ONE_OF_EACH:
            most = constants.PICKUP_REPEAT_MAX
        for _ in range(rng.randint(least, most)):
            homes = [
                r
                for r in place.receptacles
                if LIES_LIKE.get(kind, kind) in holds[r.type]
                and not (r.type in HOLDS_ONE and load[r.id])
                and not (target and r.type == goal["receptacle"] and goal["task_type"] in NO_COPY_AT_GOAL)
            ]
            if homes and (target or rng.random() >= ON_FLOOR.get(kind, ON_FLOOR_ELSE)):
                home = rng.choices(homes, [ROOMINESS.get(r.type, 1) for r in homes])[0]
                load[home.id] += 1
                things.append(place_near(rng, taken, home.xyz, kind, home.at, home.id))
            else:
                things.append(place_anywhere(rng, taken, place.points, kind))
    here = {p.at for p in place.receptacles + place.fixtures + things}
    while (start := location(*random_view(rng, place.points))) in here:
        pass
    return things, start


def _problem(place: Room, things: list[Place], start: str, goal: str) -> str:
    """The PDDL problem with the facts of official ones, each fact once, without their 120 unused
    constants."""
    constants = shipped()[1]
    able, objects = constants.VAL_ACTION_OBJECTS, place.fixtures + things
    otypes, rtypes = sorted({o.type for o in objects}), sorted({r.type for r in place.receptacles})
    locations = sorted({p.at for p in objects + place.receptacles} | {start})
    declared = [
        "agent1 - agent",
        *(f"{o.id} - object" for o in objects),
        *(f"{r.id} - receptacle" for r in place.receptacles),
        *(f"{spot} - location" for spot in locations),
        *(f"{t}Type - otype" for t in sorted({*otypes, "Knife", "ButterKnife"})),
        # the domain names these five
        *(f"{t}Type - rtype" for t in sorted({*rtypes, "SinkBasin", "Microwave", "Fridge"})),
    ]
    facts = [
        f"atLocation agent1 {start}",
        *(
            f"canContain {r}Type {t}Type"
            for r in rtypes
            for t in otypes
            if t in constants.VAL_RECEPTACLE_OBJECTS[r]
        ),
    ]
    for r in place.receptacles:
        facts += [f"receptacleType {r.id} {r.type}Type", f"receptacleAtLocation {r.id} {r.at}"] + [
            f"openable {r.id}"
        ] * r.openable
    for o in objects:
        facts += [f"objectType {o.id} {o.type}Type", f"objectAtLocation {o.id} {o.at}"] + [
            f"inReceptacle {o.id} {o.on}"
        ] * bool(o.on)
        facts += [
            f"{name.lower()} {o.id}"
            for name in ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")
            if o.type in able[name]
        ]
        facts += [f"isReceptacleObject {o.id}"] * (o.type in constants.MOVABLE_RECEPTACLES_SET)
    facts += [f"pickupable {o.id}" for o in things]
    body = "\n".join(
        [
            "(define (problem generated)", "(:domain alfred)", "(:objects", *declared, ")", "(:init",
            *(f"({fact})" for fact in facts), ")",
        ]
    )
    return body + "\n" + _compact(goal)


def _walkthrough(place: Room, things: list[Place], start: str, goal: dict) -> list[str]:
    """Commands that win from the start, for who knows where everything lies."""
    names, commands, here, opened = _names(place, things), [], start, set()
    receptacles = {r.id: r for r in place.receptacles}

    def visit(r: Place, reach: bool = True) -> None:
        nonlocal here
        if here != r.at:
            commands.append(f"go to {names[r.id]}")
            here = r.at
        if reach and r.openable and r.id not in opened:
            commands.append(f"open {names[r.id]}")
            opened.add(r.id)

    wanted = [t for t in things if t.type == goal["object"] and t.on]
    target = next((r for r in place.receptacles if r.type == goal["receptacle"]), None)
    for thing in wanted[:2 if goal["task_type"] == "pick_two_obj_and_place" else 1]:
        visit(receptacles[thing.on])
        commands.append(f"take {names[thing.id]} from {names[thing.on]}")
        if goal["task_type"] in STATION:
            verb, kind, _ = STATION[goal["task_type"]]
            station = next(r for r in place.receptacles if r.type == kind)
            visit(station, reach=False)
            commands.append(f"{verb} {names[thing.id]} with {names[station.id]}")
        if target:
            visit(target)
            commands.append(f"move {names[thing.id]} to {names[target.id]}")
    if not target:
        lamp = next(f for f in place.fixtures if f.type == "DeskLamp" and f.on)
        visit(receptacles[lamp.on], reach=False)
        commands.append(f"use {names[lamp.id]}")
    return commands


def _names(place: Room, things: list[Place]) -> dict[str, str]:
    """The engine's names ('cabinet 3'): first word of the id (+ 'basin'), ids in sorted order numbered
    downwards. Room 420 has a sink that is a bathtub."""
    kinds = defaultdict(list)
    for p in place.receptacles + place.fixtures + things:
        kinds[p.id.split("_")[0].lower() + "basin" * p.id.endswith("Basin")].append(p.id)
    return {
        name: f"{kind} {len(ids) - i}"
        for kind, ids in kinds.items()
        for i, name in enumerate(sorted(ids, key=str.lower))
    }


def statistics(problem: str) -> dict:
    """Sizes of one PDDL problem, official or generated. `viewpoints`: distinct locations of receptacles;
    `placed`, `hidden`: share of the things to pick up that lie in a receptacle, in a closed one; `beside`:
    share of view points where `look` names something that is not in the receptacle."""
    facts, init = defaultdict(set), problem.split("(:init", 1)[1].split("(:goal", 1)[0]
    for predicate, *arguments in (fact.split() for fact in re.findall(r"\(([A-Za-z][^()]*)\)", init)):
        facts[predicate].add(tuple(arguments))
    objects, at, inside = dict(facts["objectType"]), dict(facts["objectAtLocation"]), facts["inReceptacle"]
    pickupable, openable = {o for o, in facts["pickupable"]}, {r for r, in facts["openable"]}
    seen_from = defaultdict(set)
    for receptacle, spot in facts["receptacleAtLocation"]:
        seen_from[spot].add(receptacle)
    beside = {at[o] for o in objects if any((o, r) not in inside for r in seen_from.get(at.get(o), ()))}
    types = len(set(objects.values()))
    return {
        "objects": len(objects), "pickupable": len(pickupable), "types": types,
        "instances_per_type": len(objects) / types, "receptacles": len(facts["receptacleType"]),
        "openable": len(openable), "locations": len(re.findall(r"_bar_\S+ - location", problem)),
        "viewpoints": len(seen_from), "placed": len({o for o, _ in inside} & pickupable) / len(pickupable),
        "hidden": len({o for o, r in inside if r in openable} & pickupable) / len(pickupable),
        "beside": len(beside) / len(seen_from),
    }
