"""The map of the own sites: four towns, about sixty places, search, directions, what is nearby. Nothing here
changes; nobody has to log in.

Positions are whole metres on a plane (x east, y north). Streets run straight and cross at right angles. The
same distance is driven, cycled and walked.
"""
import heapq
import math
import sqlite3
from collections import namedtuple
from functools import cache
from itertools import groupby, pairwise
from random import Random

from flask import abort, g

from dreamgym.envs.webarena.sites.site import WORDS, Site, asked, chosen, of_split, page, paged

SITE = Site("map", "Map", {"Towns": "/", "Directions": "/directions"}, "/search")
SPEED = {"car": 40, "bike": 15, "foot": 5}  # km/h, everywhere
TOWNS = ((8000, 7000, "10101"), (21000, 9000, "10202"), (11000, 19000, "10303"), (25000, 22000, "10404"))
ROADS = ((0, 1, "Road 1"), (0, 2, "Road 2"), (1, 3, "Road 3"), (2, 3, "Road 4"))      # between TOWNS
LINES = (-800, 0, 800)  # where streets run, from the middle of a town; half as long again to each side
REACH = 1500
KINDS = {  # category: (noun of the names, least and most in a town, opening hours, named after the town)
    "cafe": ("Cafe", 2, 2, ("7:00 to 18:00", "8:00 to 17:00", "9:00 to 20:00"), False),
    "hotel": ("Hotel", 1, 2, ("0:00 to 24:00",), False),
    "library": ("Library", 0, 1, ("9:00 to 18:00", "10:00 to 19:00"), True),
    "market": ("Market", 1, 2, ("7:00 to 20:00", "8:00 to 21:00"), False),
    "museum": ("Museum", 0, 2, ("10:00 to 17:00", "10:00 to 18:00"), False),
    "park": ("Park", 1, 2, (), False),
    "pharmacy": ("Pharmacy", 1, 2, ("8:00 to 18:00", "9:00 to 19:00"), False),
    "restaurant": ("Kitchen", 1, 2, ("11:00 to 22:00", "12:00 to 23:00", "17:00 to 23:00"), False),
    "school": ("School", 1, 1, ("8:00 to 15:00",), True),
    "station": ("Station", 1, 1, ("5:00 to 24:00",), True),
}


class Place(namedtuple("Place", "id slug name category town street number zip phone hours x y")):
    """A place, or a town as a whole (category 'town'). `phone`, `hours`: "" for none."""

    @property
    def at(self) -> tuple[int, int]:
        return self.x, self.y

    @property
    def address(self) -> str:
        return f"{self.number} {self.street}, {self.town}" if self.street else self.town

    @property
    def coordinates(self) -> str:
        return f"{50 + self.y / 111_000:.4f}, {8 + self.x / 71_000:.4f}"


def fill(db: sqlite3.Connection, rng: Random, split: str) -> None:
    """No name occurs twice."""
    towns = rng.sample(of_split(WORDS["map"].towns, split), len(TOWNS))
    places = [(town.lower(), town, "town", town, "", 0, code, "", "", x, y)
              for town, (x, y, code) in zip(towns, TOWNS)]
    streets = [(road, *TOWNS[a][:2], *TOWNS[b][:2]) for a, b, road in ROADS]
    left = {kind: of_split([f"{look} {noun}" for look in WORDS["shop"].looks], split)
            for kind, (noun, *_) in KINDS.items()}
    for names in left.values():
        rng.shuffle(names)
    for town, (x, y, code) in zip(towns, TOWNS):
        named = rng.sample(WORDS["map"].streets, 6)  # the first three run east, the others north
        for i, (street, line) in enumerate(zip(named, LINES * 2)):
            streets.append((street, x - REACH, y + line, x + REACH, y + line) if i < 3 else
                           (street, x + line, y - REACH, x + line, y + REACH))
        free = [(i, step) for i in range(len(named)) for step in range(-14, 15, 3)
                if all(abs(step * 100 - line) > 100 for line in LINES)]
        rng.shuffle(free)
        for kind, (noun, least, most, hours, of_town) in KINDS.items():
            for _ in range(rng.randint(least, most)):
                name = f"{town} {noun}" if of_town else left[kind].pop()
                i, step = free.pop()
                at = (x + step * 100, y + LINES[i]) if i < 3 else (x + LINES[i - 3], y + step * 100)
                phone = f"555-{rng.randrange(1000, 10000)}" if kind != "park" else ""
                places.append((name.lower().replace(" ", "-"), name, kind, town, named[i], step + 15, code,
                               phone, rng.choice(hours) if hours else "", *at))
    db.executemany("INSERT INTO map_streets VALUES (?,?,?,?,?)", streets)
    db.executemany("INSERT INTO map_places VALUES (NULL,?,?,?,?,?,?,?,?,?,?,?)", places)


class Atlas:
    """The places and the streets between them, read once from the database."""

    def __init__(self, db: sqlite3.Connection):
        self.places = [Place(*row) for row in db.execute("SELECT * FROM map_places ORDER BY id")]
        self.by_slug = {place.slug: place for place in self.places}
        crossings = {(x + i, y + j) for x, y, _ in TOWNS for i in LINES for j in LINES}
        points = sorted(crossings | {place.at for place in self.places})
        self.ways: dict[tuple, list[tuple]] = {point: [] for point in points}
        for name, x1, y1, x2, y2 in db.execute("SELECT * FROM map_streets"):
            on = [(x1, y1), (x2, y2)] if name.startswith("Road") else [(x, y) for x, y in points
                                                                       if x1 <= x <= x2 and y1 <= y <= y2]
            for a, b in pairwise(on):
                self.ways[a].append((b, round(math.dist(a, b)), name))
                self.ways[b].append((a, round(math.dist(a, b)), name))
        self.trees: dict[tuple, dict] = {}

    def tree(self, start: tuple[int, int]) -> dict[tuple, tuple]:
        """point -> (metres from `start`, the point before it, street) along the shortest way (Dijkstra)."""
        if start not in self.trees:
            best, queue = {}, [(0, start, start, "")]
            while queue:
                metres, point, before, street = heapq.heappop(queue)
                if point not in best:
                    best[point] = metres, before, street
                    for following, more, name in self.ways[point]:
                        heapq.heappush(queue, (metres + more, following, point, name))
            self.trees[start] = best
        return self.trees[start]

    def metres(self, a: Place, b: Place) -> int:
        return self.tree(a.at)[b.at][0]

    def way(self, a: Place, b: Place) -> list[tuple[str, int]]:
        """[(street, metres on it)] from a to b."""
        best, points = self.tree(a.at), [b.at]
        while points[0] != a.at:
            points.insert(0, best[points[0]][1])
        parts = [(best[point][2], best[point][0] - best[before][0]) for before, point in pairwise(points)]
        legs = groupby(parts, lambda part: part[0])
        return [(street, sum(metres for _, metres in leg)) for street, leg in legs]

    def search(self, query: str) -> list[Place]:
        """Places with all the words in name, category or address, one of just that name first."""
        words = query.lower().split()
        found = [place for place in self.places
                 if all(word in f"{place.name} {place.category} {place.address} {place.zip}".lower()
                        for word in words)]
        return sorted(found, key=lambda place: place.name.lower() != " ".join(words)) if words else []


def km(metres: int) -> str:
    return f"{metres / 1000:.1f} km"


def minutes(metres: int, by: str) -> int:
    return max(1, -(-metres * 60 // (SPEED[by] * 1000)))


# ---- pages

atlas_of = cache(Atlas)  # by the first data: no page changes what is on the map


def _atlas() -> Atlas:
    return atlas_of(g.sites.first)


SITE.loaders["place"] = lambda slug, _: _atlas().by_slug.get(slug) or abort(404)


@SITE.get("/")
def home():
    return page("Map", towns=[place for place in _atlas().places if place.category == "town"])


@SITE.get("/search")
def search():
    q = asked("q")
    return page(f"Search {q}".strip(), found=paged(_atlas().search(q)))


@SITE.get("/place/<place>")
def place(place):
    return page(place.name, place=place, categories=KINDS)


@SITE.get("/nearby/<place>")
def nearby(place):
    """Places of a category, nearest first by road: those of other towns come last."""
    atlas, category = _atlas(), chosen("category", KINDS)
    found = sorted((atlas.metres(place, other), other.name, other) for other in atlas.places
                   if other.category == category and other is not place)
    return page(f"{category.capitalize()} near {place.name}", place=place,
                found=paged([(km(metres), other) for metres, _, other in found]))


@SITE.get("/directions")
def directions():
    texts, by = [asked("from"), asked("to")], chosen("by", SPEED)
    start, end = ends = [next(iter(_atlas().search(text)), None) for text in texts]
    legs = _atlas().way(start, end) if start and end else []
    metres = sum(length for _, length in legs)
    return page("Directions", start=start, end=end, legs=[(street, km(length)) for street, length in legs],
                wrong=[text for text, found in zip(texts, ends) if text and found is None], km=km(metres),
                minutes=minutes(metres, by))
