"""The 120 rooms of generated ALFWorld games, from what the `alfworld` wheel ships.

Its layout files give the receptacles of each AI2-THOR room, where the agent can stand, and the object types
found there. What they leave out (stove burners, garbage cans, cabinets that do not open, windows, lamps) is
added at random places, from the room's number alone: a room is the same in all its games. The package is
read, not imported: `import alfworld` sets $ALFWORLD_DATA.
"""
import functools
import importlib.util
import json
import random
import runpy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

OPENABLE = {"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"}
# How many of a listed type a room gets when the layout file has none, (least, most); other types: one.
ADDED = {
    "StoveBurner": (4, 4), "HandTowelHolder": (1, 2), "TowelHolder": (1, 2), "Drawer": (2, 4),
    "Cabinet": (2, 4),
}
# added ones that do not open, as a share of those that do (cabinets: kitchens only)
NEVER_OPEN = {"Cabinet": 0.25, "Drawer": 0.18}
# What cannot be picked up, (least, most) where the room's list has it. There is a sink and a bathtub for each
# basin.
FIXTURES = {
    "StoveKnob": (4, 4), "Window": (1, 2), "Chair": (1, 3), "LightSwitch": (1, 1), "Mirror": (1, 1),
    "HousePlant": (1, 1), "Blinds": (1, 2), "Painting": (1, 2), "DeskLamp": (1, 1), "FloorLamp": (1, 1),
    "Television": (1, 1), "ShowerDoor": (1, 1), "ShowerGlass": (1, 1), "Curtains": (1, 2),
    "LaundryHamperLid": (1, 1), "Poster": (2, 2), "Footstool": (1, 1), "Sink": (0, 0), "Bathtub": (0, 0),
}
MORE_IN_LIVING_ROOMS = {"Window": (2, 5), "Chair": (2, 5), "Painting": (1, 3)}
STANDS_ON = {
    "DeskLamp": {"Desk", "SideTable", "Dresser", "Shelf"},
    "Television": {"TVStand", "Dresser", "CoffeeTable"},
    "HousePlant": {"CounterTop", "SideTable", "DiningTable", "Shelf", "CoffeeTable", "Desk"},
}
# of the fixtures that stand on nothing are seen from a receptacle's view point
BESIDE_SHARE = 0.05


@dataclass(frozen=True)
class Place:
    """A receptacle or a thing. `at`: its location; `on`: id of the receptacle it is in ("" = none); `xyz`:
    metres."""
    id: str
    type: str
    at: str
    xyz: tuple
    on: str = ""
    openable: bool = False


@dataclass(frozen=True)
class Room:
    receptacles: list[Place]
    fixtures: list[Place]                        # what cannot be picked up
    types: list[str]                             # of the things that can
    points: list[tuple]                          # (x, z) where the agent can stand


@functools.cache
def shipped() -> tuple[Path, SimpleNamespace, SimpleNamespace]:
    """(folder of the alfworld package, what its gen/constants.py and gen/goal_library.py define)"""
    folder = Path(importlib.util.find_spec("alfworld").submodule_search_locations[0])
    constants, library = (runpy.run_path(str(folder / "gen" / file))
                          for file in ("constants.py", "goal_library.py"))
    return folder, SimpleNamespace(**constants), SimpleNamespace(**library)


def pddl_id(key: str) -> str:
    """'Mug|+01.15|-00.34' -> 'Mug_bar__plus_01_dot_15_bar__minus_00_dot_34', as official problems have it."""
    return key.translate(str.maketrans({"|": "_bar_", "+": "_plus_", "-": "_minus_", ".": "_dot_"}))


def location(x: float, z: float, rotation: float, horizon: float) -> str:
    """Grid of 0.25 m, quarter turns, degrees of looking down."""
    return pddl_id(f"loc|{round(4 * x)}|{round(4 * z)}|{round(rotation / 90) % 4}|{round(horizon)}")


class Placer:
    """Draws new places in a room. Ids are coordinates: they tell nothing of the role of a thing."""

    def __init__(self, rng: random.Random, points: list[tuple], places: list[Place]):
        self.rng, self.points, self.taken = rng, points, {place.id for place in places}

    def view(self) -> tuple:
        return (*self.rng.choice(self.points), 90 * self.rng.randrange(4), self.rng.choice([30, 45, 60]))

    def near(self, kind: str, xyz: tuple, at: str, on: str = "") -> Place:
        """Within 0.3 m."""
        basin = [kind] * kind.endswith("Basin")  # Sink|x|y|z|SinkBasin
        while True:                              # two decimals: two draws may meet
            spot = tuple(c + self.rng.uniform(-0.3, 0.3) for c in xyz)
            key = pddl_id("|".join([kind.removesuffix("Basin"), *(f"{c:+06.2f}" for c in spot), *basin]))
            if key not in self.taken:
                self.taken.add(key)
                return Place(key, kind, at, spot, on)

    def anywhere(self, kind: str) -> Place:
        """In front of a random view point, at a random height, in no receptacle."""
        x, z, rotation, horizon = self.view()
        dx, dz = ((0, 0.6), (0.6, 0), (0, -0.6), (-0.6, 0))[rotation // 90]
        spot = (x + dx, self.rng.uniform(0.3, 1.6), z + dz)
        return self.near(kind, spot, location(x, z, rotation, horizon))


@functools.cache
def room(number: int) -> Room:
    """A room as all its games have it, whatever the seed."""
    folder, constants, _ = shipped()
    files = str(folder / "gen" / "layouts" / f"FloorPlan{number}-")
    listed = set(json.loads(Path(files + "objects.json").read_text())) & (
        constants.OBJECTS_SET | constants.RECEPTACLES)
    holders = set(constants.VAL_RECEPTACLE_OBJECTS) - constants.MOVABLE_RECEPTACLES_SET
    receptacles = []
    for key, view in sorted(json.loads(Path(files + "openable.json").read_text()).items()):
        kind, *rest = key.split("|")
        kind, xyz = rest[3] if len(rest) > 3 else kind, tuple(map(float, rest[:3]))
        if kind in holders:
            receptacles.append(Place(pddl_id(key), kind, location(*view), xyz, openable=kind in OPENABLE))
    points = sorted((float(x), float(z)) for x, z in np.load(files + "layout.npy")[:, :2])
    placer = Placer(random.Random(f"room {number}"), points, receptacles)
    for kind in sorted(listed & holders):
        receptacles += _added(placer, kind, receptacles, kitchen=number < 100)
    numbers = FIXTURES | (MORE_IN_LIVING_ROOMS if 200 < number < 300 else {})
    fixtures = [place for kind in sorted(listed & set(FIXTURES))
                for place in _fixtures(placer, kind, placer.rng.randint(*numbers[kind]), receptacles)]
    return Room(receptacles, fixtures, sorted(listed - holders - set(FIXTURES)), points)


def _added(placer: Placer, kind: str, receptacles: list[Place], kitchen: bool) -> list[Place]:
    """Receptacles of a listed type that official rooms have and the layout file leaves out."""
    rng = placer.rng
    given = [r for r in receptacles if r.type == kind]
    if given:
        share = NEVER_OPEN.get(kind, 0) if kitchen or kind == "Drawer" else 0
        return [placer.near(kind, rng.choice(given).xyz, location(*placer.view()))
                for _ in given if rng.random() < share]
    tops = [r for r in receptacles if r.type == "CounterTop"]
    if kind in ("CoffeeMachine", "Toaster") and tops and rng.random() < 0.2:
        top = rng.choice(tops)
        return [placer.near(kind, top.xyz, top.at)]
    new = [placer.anywhere(kind) for _ in range(rng.randint(*ADDED.get(kind, (1, 1))))]
    if kind == "StoveBurner":                    # two burners are seen from one view point
        new[2:] = [placer.near(kind, burner.xyz, burner.at) for burner in new[:2]]
    return new


def _fixtures(placer: Placer, kind: str, number: int, receptacles: list[Place]) -> list[Place]:
    rng = placer.rng
    places = [Place(r.id.rsplit("_bar_", 1)[0], kind, r.at, r.xyz) for r in receptacles
              if r.id.startswith(f"{kind}_") and r.id.endswith("Basin")]
    stands = sorted({r.type for r in receptacles} & STANDS_ON.get(kind, set()))
    for _ in range(number):
        if stands:
            chosen = rng.choice(stands)
            below = rng.choice([r for r in receptacles if r.type == chosen])
            places.append(placer.near(kind, below.xyz, below.at, below.id))
        elif rng.random() < BESIDE_SHARE:
            beside = rng.choice(receptacles)
            places.append(placer.near(kind, beside.xyz, beside.at))
        else:
            places.append(placer.anywhere(kind))
    return places
