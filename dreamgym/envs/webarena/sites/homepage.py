"""The homepage of the own sites: where they are, and which account is used there. It has no data."""
from __future__ import annotations

import sqlite3
from random import Random

from flask import Blueprint, Response, g

from dreamgym.envs.webarena.sites.site import Site, page

SITE = Site("homepage", "Homepage", (("Home", "/"),))
SCHEMA = ""
TITLES = {"shopping": "Shop", "shopping_admin": "Shop Admin", "reddit": "Forum", "gitlab": "Code Host",
          "map": "Map"}

pages = Blueprint("pages", __name__)


def fill(db: sqlite3.Connection, rng: Random) -> None:
    """Nothing to add."""


@pages.get("/")
def home() -> Response:
    return page("homepage.html", "Homepage", titles=TITLES, accounts=g.sites.accounts, bases=g.sites.bases)
