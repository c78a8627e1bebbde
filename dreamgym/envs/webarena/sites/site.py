"""What every own site is made of: pages behind one layout, logins, confirmations, paging. No page of a site is here.

A site is a module with a `SITE`, its tables (`SCHEMA`), its first data (`fill(db, rng)`) and its views on a module-level Blueprint, which `make_app(world)`
turns into a Flask app with `build_app`. Views find the world's connection in `g.db` and the visitor (a row of `users`, or None) in `g.user`. Every POST ends in
`go(path, message)`: the answer to a form is always a redirect, and the message is shown once, on the next page. Flask's own signed sessions are not used:
a session is a row of `sessions`, so that the reset of the database also logs everybody out.
"""
from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from random import Random
from urllib.parse import quote, urlencode

import jinja2
from flask import Blueprint, Flask, Response, g, request
from werkzeug.exceptions import HTTPException, NotFound

WORLD = "dreamgym.world"                         # in a request's environ
HERE = Path(__file__).parent
_LOCAL = re.compile(r"/(?![/\\])[!-~]*")        # a path of this site; "//host" would lead elsewhere
TODAY = "2024-06-01"                             # the sites' clock stands still: what an episode writes does not depend on when it is played

SCHEMA = """
CREATE TABLE users (id INTEGER PRIMARY KEY, site TEXT NOT NULL, name TEXT NOT NULL, password TEXT NOT NULL, full_name TEXT NOT NULL, joined TEXT NOT NULL,
                    UNIQUE (site, name));
CREATE TABLE sessions (id INTEGER PRIMARY KEY, sid TEXT NOT NULL UNIQUE, user_id INTEGER NOT NULL REFERENCES users, message TEXT NOT NULL DEFAULT '');
"""


@dataclass(frozen=True)
class Site:
    """How a site is called, where its header leads, and how one logs in. `account` is (user, password) of the account that agents use, or None."""
    name: str                                    # shopping | shopping_admin | reddit | gitlab | map | homepage; also the body's class in the stylesheet
    title: str
    nav: tuple[tuple[str, str], ...]             # (text, path) of the header's links
    search: str = ""                             # path of the header's search form (field `q`); "" for none
    account: tuple[str, str] | None = None
    login_path: str = "/login"
    login_text: str = "Log in"                   # of the header's link and of the form's button
    user_label: str = "Username"
    private: bool = False                        # True: every page asks for a login


def add_user(db: sqlite3.Connection, site: str, name: str, password: str, full_name: str = "", joined: str = TODAY) -> int:
    """Adds somebody who can log in on `site`; returns the id. Raises sqlite3.IntegrityError when the site has that name."""
    return db.execute("INSERT INTO users (site, name, password, full_name, joined) VALUES (?, ?, ?, ?, ?)",
                      (site, name, password, full_name or name, joined)).lastrowid


def user_password(rng: Random) -> str:
    """A password for an account that nobody uses."""
    return f"{rng.getrandbits(64):016x}"


def open_session(db: sqlite3.Connection, user_id: int, key: str = "") -> str:
    """The id of a session of that user: a new one, or with `key` always the same. Ids follow from the database alone, so that episodes repeat exactly."""
    key = key or str(db.execute("SELECT ifnull(max(id), 0) + 1 FROM sessions").fetchone()[0])
    sid = hashlib.sha256(f"{user_id} {key}".encode()).hexdigest()[:24]
    db.execute("INSERT OR IGNORE INTO sessions (sid, user_id) VALUES (?, ?)", (sid, user_id))
    return sid


# ---- pages ---------------------------------------------------------------------------------------------------------------------------------------

class _Environment(jinja2.Environment):
    """Reads `row.column` at once: Jinja's own way tries an attribute first, and its failure costs a quarter of a page's time."""

    def getattr(self, obj, attribute: str):
        return obj[attribute] if type(obj) is sqlite3.Row else super().getattr(obj, attribute)


@cache
def _templates() -> jinja2.Environment:
    """One for the process: templates compile once, however many worlds there are."""
    env = _Environment(loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True, auto_reload=False,
                       undefined=jinja2.StrictUndefined)
    env.filters["money"] = lambda cents: f"${cents / 100:,.2f}"
    macros = env.get_template("macros.html").module
    env.globals |= {name: getattr(macros, name) for name in dir(macros) if not name.startswith("_")}
    return env


@cache
def _template(name: str) -> jinja2.Template:
    return _templates().get_template(name)


def page(template: str, title: str, code: int = 200, **context) -> Response:
    """A page of the site: `title` must not be empty. The waiting message of the visitor is shown, and is gone then."""
    assert title.strip(), template
    message = ""
    if g.user is not None and g.user["message"]:
        message = g.user["message"]
        g.db.execute("UPDATE sessions SET message = '' WHERE sid = ?", (g.user["sid"],))
    body = _template(template).render(title=title, site=g.site, user=g.user, message=message, bases=g.world.bases, path=request.path, **context)
    return Response(body, code, {"Cache-Control": "no-store"}, content_type="text/html; charset=utf-8")


def go(path: str, message: str = "") -> Response:
    """The answer to a form: a redirect to a path of this site, where `message` is shown."""
    if message and g.user is not None:
        g.db.execute("UPDATE sessions SET message = ? WHERE sid = ?", (message, g.user["sid"]))
    return Response("", 303, {"Location": path, "Cache-Control": "no-store"})


def words(field: str, longest: int = 200) -> str:
    """A text of the form, white space collapsed and cut; "" when it was left empty."""
    return " ".join(request.form.get(field, "").split())[:longest]


def number(field: str, lowest: int = 0, highest: int = 999) -> int | None:
    """A whole number of the form, or None when it is none or out of bounds."""
    text = request.form.get(field, "").strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 and lowest <= int(text) <= highest else None


@dataclass(frozen=True)
class Paged:
    """One page of a longer list, as the macro `paging` wants it."""
    rows: list[sqlite3.Row]
    page: int
    pages: int
    total: int


def paged(query: str, arguments: tuple = (), size: int = 8) -> Paged:
    """The rows of `?page=` of an SQL query without LIMIT; a page that is not there gives the nearest one."""
    total = g.db.execute(f"SELECT count(*) FROM ({query})", arguments).fetchone()[0]
    pages = max(1, -(-total // size))
    shown = min(max(1, request.args.get("page", 1, int)), pages)
    return Paged(g.db.execute(f"{query} LIMIT ? OFFSET ?", (*arguments, size, (shown - 1) * size)).fetchall(), shown, pages, total)


def kept(**filters: str) -> str:
    """The address to which `paging` adds its page, so that the filter stays."""
    return f"?{urlencode(filters)}&"


# ---- logins --------------------------------------------------------------------------------------------------------------------------------------

def needs_login(view: Callable) -> Callable:
    """A view that only those who are logged in see; others get the login form, and come back after it."""
    @wraps(view)
    def guarded(*args, **kwargs):
        return view(*args, **kwargs) if g.user is not None else _ask_login()
    return guarded


def _ask_login() -> Response:
    back = quote(request.path) + f"?{request.query_string.decode('latin-1')}".rstrip("?") if request.method == "GET" else "/"
    return go(g.site.login_path if back == "/" else f"{g.site.login_path}?{urlencode({'next': back})}")


def _login() -> Response:
    if request.method == "GET":
        return page("login.html", g.site.login_text, next=request.args.get("next", "/"), failed="failed" in request.args)
    user = g.db.execute("SELECT id FROM users WHERE site = ? AND name = ? AND password = ?",
                        (g.site.name, request.form.get("user", "").strip(), request.form.get("password", ""))).fetchone()
    if user is None:
        return go(f"{g.site.login_path}?failed=1")
    back = request.form.get("next", "/")
    answer = go(back if _LOCAL.fullmatch(back) else "/")
    answer.set_cookie(f"sid_{g.site.name}", open_session(g.db, user["id"]), httponly=True, samesite="Lax")
    return answer


def _logout() -> Response:
    g.db.execute("DELETE FROM sessions WHERE sid = ?", (request.cookies.get(f"sid_{g.site.name}", ""),))
    answer = go("/")
    answer.delete_cookie(f"sid_{g.site.name}")
    return answer


def build_app(site: Site, pages: Blueprint) -> Flask:
    """The Flask app of a site: its views, the login and the logout (POST /logout), the stylesheet, and a page for what is not there. Each request brings
    the world that it is for (`SiteDatabase.handle`)."""
    app = Flask(site.name, static_folder=str(HERE / "static"))
    app.config.update(PROPAGATE_EXCEPTIONS=True, SEND_FILE_MAX_AGE_DEFAULT=3600)

    @app.before_request
    def visitor() -> Response | None:
        world = request.environ[WORLD]
        g.world, g.db, g.site, g.user = world, world.db, site, None
        if sid := request.cookies.get(f"sid_{site.name}"):
            g.user = g.db.execute("SELECT users.*, sid, message FROM sessions JOIN users ON users.id = user_id WHERE sid = ? AND site = ?",
                                  (sid, site.name)).fetchone()
        guest_page = not site.private or request.path == site.login_path or request.endpoint == "static"
        return None if g.user is not None or guest_page else _ask_login()

    @app.errorhandler(HTTPException)
    def refused(error: HTTPException) -> Response:
        return page("error.html", "Not found" if error.code == 404 else error.name, error.code, explanation="There is no such page."
                    if error.code == 404 else "This cannot be done here.")

    app.register_error_handler(OverflowError, lambda _: refused(NotFound()))      # /orders/ and a number that no database holds
    if site.account:
        app.add_url_rule(site.login_path, "login", _login, methods=["GET", "POST"])
        app.add_url_rule("/logout", "logout", _logout, methods=["POST"])
    app.register_blueprint(pages)
    return app
