"""The map of the own sites: four towns, about sixty places, search, directions, what is nearby. Nothing here
changes; nobody has to log in.

Positions are whole metres on a plane (x east, y north). Streets run straight and cross at right angles, so
the way between two places of a town is |dx| + |dy|; between towns it follows the main road. The same distance
is driven, cycled and walked; only the speed differs.
"""
from __future__ import annotations

import heapq
import math
import sqlite3
from dataclasses import dataclass
from itertools import pairwise, product
from random import Random

from flask import Blueprint, Response, abort, current_app, g, request

from dreamgym.envs.webarena.sites.site import Paged, Site, asked, chosen, kept, page, paged_list


SITE = Site("map", "Map", (("Towns", "/"), ("Directions", "/directions")), search="/search")
SPEED = {"car": 40, "bike": 15, "foot": 5}                            # km/h, everywhere
TOWNS = {"Alder": (8000, 7000, "10101"), "Bree": (21000, 9000, "10202"), "Colby": (11000, 19000, "10303"),
         "Dunton": (25000, 22000, "10404")}
ROADS = (("Alder", "Bree", "Road 1"), ("Alder", "Colby", "Road 2"), ("Bree", "Dunton", "Road 3"),
         ("Colby", "Dunton", "Road 4"))
STREETS = ("Oak Street", "Mill Street", "Church Street", "High Street", "Lake Street", "Hill Street")
LINES = (-800, 0, 800)  # where streets run, from the middle of a town; half as long again to each side
REACH = 1500
WORDS = ("Blue", "Red", "Green", "Gold", "Silver", "Sunny", "Royal", "Little", "Happy", "Quiet", "River",
         "Garden", "Star", "Moon", "Rose", "Stone")
KINDS = {  # category: (noun of the names, least and most in a town, opening hours, named after the town)
    "cafe": ("Cafe", 2, 3, ("7:00 to 18:00", "8:00 to 17:00", "9:00 to 20:00"), False),
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
SCHEMA = """
CREATE TABLE map_places (id INTEGER PRIMARY KEY, slug TEXT NOT NULL UNIQUE, name TEXT NOT NULL UNIQUE,
    category TEXT NOT NULL, town TEXT NOT NULL, street TEXT NOT NULL, number INTEGER NOT NULL, zip TEXT NOT
    NULL, phone TEXT NOT NULL, hours TEXT NOT NULL, x INTEGER NOT NULL, y INTEGER NOT NULL);
CREATE TABLE map_streets (name TEXT NOT NULL, town TEXT NOT NULL, x1 INTEGER NOT NULL, y1 INTEGER NOT NULL, x2
    INTEGER NOT NULL, y2 INTEGER NOT NULL);
"""


@dataclass(frozen=True)
class Place:
    """A place, or a town as a whole (category 'town'). `phone` and `hours` are "" where a place has none."""
    id: int
    slug: str
    name: str
    category: str
    town: str
    street: str
    number: int
    zip: str
    phone: str
    hours: str
    x: int
    y: int

    @property
    def address(self) -> str:
        return f"{self.number} {self.street}, {self.town}" if self.street else self.town

    @property
    def coordinates(self) -> str:
        return f"{50 + self.y / 111_000:.4f}, {8 + self.x / 71_000:.4f}"


pages = Blueprint("pages", __name__)


def fill(db: sqlite3.Connection, rng: Random) -> None:
    """Streets and places; a word of the names is used once for each category, so that every name is the only
    one of its kind."""
    rows = [(town.lower(), town, "town", town, "", 0, code, "", "", x, y) for town,
            (x, y, code) in TOWNS.items()]
    streets = [(road, "", *TOWNS[a][:2], *TOWNS[b][:2]) for a, b, road in ROADS]
    left = {kind: rng.sample(WORDS, len(WORDS)) for kind in KINDS}
    for town, (x, y, code) in TOWNS.items():
        named = rng.sample(STREETS, len(STREETS))  # the first three run east, the others north
        for i, (street, line) in enumerate(zip(named, LINES * 2)):
            streets.append((street, town, *((x - REACH, y + line, x + REACH, y + line)
                                            if i < 3 else (x + line, y - REACH, x + line, y + REACH))))
        free = [(i, step) for i in range(len(named)) for step in range(-14, 15, 3)
                if all(abs(step * 100 - line) > 100 for line in LINES)]
        rng.shuffle(free)
        for kind, (noun, least, most, hours, of_town) in KINDS.items():
            for _ in range(rng.randint(least, most)):
                name = f"{town if of_town else left[kind].pop()} {noun}"
                i, step = free.pop()
                at = (x + step * 100, y + LINES[i]) if i < 3 else (x + LINES[i - 3], y + step * 100)
                phone = f"555-{rng.randrange(1000, 10000)}" if kind != "park" else ""
                rows.append((name.lower().replace(" ", "-"), name, kind, town, named[i], step + 15, code,
                             phone, rng.choice(hours) if hours else "", *at))
    db.executemany("INSERT INTO map_streets VALUES (?,?,?,?,?,?)", streets)
    db.executemany("INSERT INTO map_places VALUES (NULL,?,?,?,?,?,?,?,?,?,?,?)", rows)


class Atlas:
    """The places and the streets between them, read once from the database."""

    def __init__(self, db: sqlite3.Connection):
        self.places = [Place(*row) for row in db.execute("SELECT * FROM map_places ORDER BY id")]
        self.by_slug = {place.slug: place for place in self.places}
        self.streets = [tuple(row) for row in db.execute("SELECT name, x1, y1, x2, y2 FROM map_streets")]
        crossings = {(x + i, y + j) for x, y, _ in TOWNS.values() for i in LINES for j in LINES}
        points = sorted(crossings | {(place.x, place.y) for place in self.places})
        self.ways: dict[tuple, list[tuple]] = {point: [] for point in points}
        # the points of a street, in order, are joined one to the next
        for name, x1, y1, x2, y2 in self.streets:
            on = [(x1, y1), (x2, y2)] if name.startswith("Road") else [(x, y) for x, y in points
                                                                       if x1 <= x <= x2 and y1 <= y <= y2]
            for a, b in pairwise(on):
                metres = round(math.dist(a, b))
                self.ways[a].append((b, metres, name))
                self.ways[b].append((a, metres, name))
        self.trees: dict[tuple, dict] = {}

    def tree(self, start: Place) -> dict[tuple, tuple]:
        """point -> (metres from `start`, the point before it, street) along the shortest way (Dijkstra)."""
        at = (start.x, start.y)
        if at not in self.trees:
            best, queue = {}, [(0, at, at, "")]
            while queue:
                metres, point, before, street = heapq.heappop(queue)
                if point not in best:
                    best[point] = metres, before, street
                    for following, more, name in self.ways[point]:
                        heapq.heappush(queue, (metres + more, following, point, name))
            self.trees[at] = best
        return self.trees[at]

    def metres(self, a: Place, b: Place) -> int:
        return self.tree(a)[b.x, b.y][0]

    def way(self, a: Place, b: Place) -> tuple[list[tuple[str, int]], list[tuple]]:
        """([(street, metres on it)], points passed) from a to b."""
        best, at, legs, points = self.tree(a), (b.x, b.y), [], [(b.x, b.y)]
        while best[at][1] != at:
            metres, before, street = best[at]
            step = metres - best[before][0]
            legs = [(street, step + legs[0][1]),
                    *legs[1:]] if legs and legs[0][0] == street else [(street, step), *legs]
            points.insert(0, at := before)
        return legs, points

    def search(self, query: str) -> list[Place]:
        """Places that have every word of the query in their name, category or address; a place of exactly
        that name comes first."""
        words = query.lower().split()
        found = [place for place in self.places
                 if all(word in f"{place.name} {place.category} {place.address} {place.zip}".lower()
                        for word in words)]
        return sorted(found, key=lambda place: place.name.lower() != " ".join(words)) if words else []


def km(metres: int) -> str:
    return f"{metres / 1000:.1f} km"


def minutes(metres: int, by: str) -> int:
    """Whole minutes that `metres` take by car, bike or foot, rounded up."""
    return max(1, -(-metres * 60 // (SPEED[by] * 1000)))


# ---- pages -------------------------------------------------------------------------------------------------

def _atlas() -> Atlas:
    """Read once: no page changes what is on the map."""
    if "atlas" not in current_app.extensions:
        current_app.extensions["atlas"] = Atlas(g.db)
    return current_app.extensions["atlas"]


def _place(slug: str) -> Place:
    return _atlas().by_slug.get(slug) or abort(404)


def _paged(rows: list) -> Paged:
    return paged_list(len(rows), lambda first, size: rows[first:first + size])


@pages.get("/")
def home() -> Response:
    return page("map_home.html", "Map",
                towns=[place for place in _atlas().places if place.category == "town"])


@pages.get("/search")
def search() -> Response:
    q = asked("q")
    return page("map_search.html", f"Search {q}".strip(), found=_paged(_atlas().search(q)), q=q,
                address=kept(q=q))


@pages.get("/place/<slug>")
def place(slug: str) -> Response:
    shown = _place(slug)
    return page("map_place.html", shown.name, place=shown, categories=list(KINDS))


@pages.get("/nearby/<slug>")
def nearby(slug: str) -> Response:
    """Places of a category, nearest first by road: those of other towns come last."""
    atlas, centre, category = _atlas(), _place(slug), chosen("category", KINDS, next(iter(KINDS)))
    others = [other for other in atlas.places if other.category == category and other is not centre]
    found = sorted((atlas.metres(centre, other), other.name, other) for other in others)
    return page("map_nearby.html", f"{category.capitalize()} near {centre.name}", place=centre,
                category=category,
                categories=list(KINDS), found=_paged([(other, km(metres)) for metres, _, other in found]),
                address=kept(category=category))


@pages.get("/directions")
def directions() -> Response:
    texts = {name: asked(name) for name in ("from", "to")}
    by = chosen("by", SPEED, "car")
    start, end = ends = [next(iter(_atlas().search(text)), None) for text in texts.values()]
    wrong = [text for text, found in zip(texts.values(), ends) if text and found is None]
    legs, metres = [], 0
    if start and end:
        legs, metres = _atlas().way(start, end)[0], _atlas().metres(start, end)
    return page("map_directions.html", "Directions", asked=texts, by=by, ways=list(SPEED), start=start,
                end=end, wrong=wrong,
                legs=[(street, km(length)) for street, length in legs], km=km(metres),
                minutes=minutes(metres, by))


# ---- pictures ----------------------------------------------------------------------------------------------

@pages.get("/picture.svg")
def picture() -> Response:
    """A drawing of the map: everything, around a place (`at`), or of a way (`from`, `to`); all slugs. The
    pages' alternative texts say what is on it."""
    atlas = _atlas()
    marks = [_place(request.args[name]) for name in ("at", "from", "to") if request.args.get(name)]
    line = atlas.way(*marks)[1] if len(marks) == 2 else []
    points = line or [(place.x, place.y) for place in marks or atlas.places]
    middle = [(min(axis) + max(axis)) / 2 for axis in zip(*points)]
    width = max(2600, *(2.4 * (max(axis) - min(axis)) for axis in zip(*points)))
    return Response(draw(atlas, marks, line, middle, width), content_type="image/svg+xml",
                    headers={"Cache-Control": "no-store"})


def draw(atlas: Atlas, marks: list[Place], line: list[tuple], middle: list[float], width: float,
         across: int = 640, down: int = 400) -> str:
    """The SVG text of the streets, places and names around `middle`, `width` metres wide."""
    scale = across / width

    def at(x: float, y: float) -> tuple[float, float]:
        return round(across / 2 + (x - middle[0]) * scale, 1), round(down / 2 - (y - middle[1]) * scale, 1)

    near = scale > 0.08                                               # close enough for dots and their names
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" '
             f'font-family="sans-serif" font-size="12" text-anchor="middle">',
             f'<rect width="{across}" height="{down}" fill="#f1efe6"/>']
    river = [at(x, 14000 + 2500 * math.sin(x / 4000)) for x in range(-10000, 50000, 500)]
    parts.append(f'<polyline points="{_points(river)}" fill="none" stroke="#a9cfe8" '
                 f'stroke-width="{max(5, 300 * scale):.0f}"/>')
    for x, y, _ in TOWNS.values():
        (left, top), side = at(x - 1700, y + 1700), 3400 * scale
        parts.append(f'<rect x="{left}" y="{top}" width="{side:.1f}" height="{side:.1f}" rx="{side / 8:.1f}" '
                     f'fill="#e3ddcb"/>')
    for park in [place for place in atlas.places if place.category == "park"]:
        x, y = at(park.x, park.y)
        parts.append(f'<circle cx="{x}" cy="{y}" r="{170 * scale:.1f}" fill="#b9dca5"/>')
    for casing in (True, False):
        for name, x1, y1, x2, y2 in atlas.streets:
            wide = (5 if name.startswith("Road") else max(1, 60 * scale)) + 2 * casing
            colour = "#c9bf9f" if casing else "#f7d774" if name.startswith("Road") else "#ffffff"
            parts.append(f'<polyline points="{_points([at(x1, y1), at(x2, y2)])}" stroke="{colour}" '
                         f'stroke-width="{wide:.1f}" stroke-linecap="round"/>')
    for (name, x1, y1, x2, _), along in product(atlas.streets if near else (), (REACH - 400, REACH + 400)):
        if not name.startswith("Road"):
            x, y = at(x1 + along, y1 - 10) if x1 != x2 else at(x1 + 10, y1 + along)
            parts.append(f'<text transform="translate({x} {y}) rotate({-90 if x1 == x2 else 0})" dy="3" '
                         f'font-size="10" fill="#8a8266">{name}</text>')
    if line:
        way = _points([at(*point) for point in line])
        parts.append(f'<polyline points="{way}" fill="none" stroke="#2563eb" stroke-width="5" '
                     f'stroke-linejoin="round" opacity=".8"/>')
    shown = [place for place in atlas.places if (place.category != "town") == near and place not in marks]
    for place in [*shown, *marks]:
        x, y = at(place.x, place.y)
        mark = place in marks
        above, weight = (-12, 700) if mark else (20, 400) if place.id % 2 else (-10, 400)
        parts.append(f'<circle cx="{x}" cy="{y}" r="{8 if mark else 4}" '
                     f'fill="{"#d6336c" if mark else "#6b7280"}" stroke="#fff" stroke-width="2"/><text '
                     f'x="{x}" '
                     f'y="{y + above:.1f}" font-weight="{weight}" fill="#374151" stroke="#fff" '
                     f'stroke-width="3" paint-order="stroke">{place.name}</text>')
    return "".join([*parts, "</svg>"])


def _points(points: list[tuple]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)
