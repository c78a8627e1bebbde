"""What every own site is made of: pages behind one layout, logins, confirmations, paging. No page of a site
is here.

A site is a module with a `SITE`, its tables (`SCHEMA`), its first data (`fill(db, rng)`), and its views on a
Blueprint `pages`, which `build_app` turns into a Flask app. Views find the database's connection in `g.db`
and the visitor (a row of `users`, or None) in `g.user`. Every POST ends in `go(path, message)`: the answer to
a form is always a redirect, and the message is shown once, on the next page. Flask's own signed sessions are
not used: a session is a row of `sessions`, so that the reset of the database also logs everybody out.
"""
from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache, wraps
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from flask import Blueprint, Flask, Response, abort, g, request
from werkzeug.exceptions import HTTPException, NotFound

DATABASE = "dreamgym.site_database"              # in a request's environ
FOLDER = Path(__file__).parent
_LOCAL = re.compile(r"/(?![/\\])[!-~]*")        # a path of this site; "//host" would lead elsewhere
TODAY = "2024-06-01"                             # the clock stands still, so that an episode repeats exactly

SCHEMA = """
CREATE TABLE users (id INTEGER PRIMARY KEY, site TEXT NOT NULL, name TEXT NOT NULL, password TEXT NOT NULL,
    full_name TEXT NOT NULL, joined TEXT NOT NULL, UNIQUE (site, name));
CREATE TABLE sessions (id INTEGER PRIMARY KEY, sid TEXT NOT NULL UNIQUE, user_id INTEGER NOT NULL REFERENCES
    users, message TEXT NOT NULL DEFAULT '');
"""


@dataclass(frozen=True)
class Site:
    """How a site is called, where its header leads, and how one logs in."""
    name: str                                    # one of SITES; also the body's class in the stylesheet
    title: str
    nav: tuple[tuple[str, str], ...]             # (text, path) of the header's links
    search: str = ""                             # path of the header's search form (field `q`); "" for none
    account: tuple[str, str] | None = None       # (user, password) that agents use
    login_path: str = "/login"
    login_text: str = "Log in"                   # of the header's link and of the form's button
    user_label: str = "Username"
    private: bool = False                        # True: every page asks for a login


# ---- the database ------------------------------------------------------------------------------------------

def insert(db: sqlite3.Connection, table: str, **values: Any) -> int:
    """Adds a row; returns its id."""
    marks = ", ".join("?" * len(values))
    return db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})",
                      tuple(values.values())).lastrowid


def run(query: str, *arguments: Any) -> sqlite3.Cursor:
    return g.db.execute(query, arguments)


def one(query: str, *arguments: Any) -> sqlite3.Row:
    """The first row of a query; the page is not found without one."""
    return run(query, *arguments).fetchone() or abort(404)


def exists(query: str, *arguments: Any) -> bool:
    return run(query, *arguments).fetchone() is not None


def toggle(table: str, **key: Any) -> bool:
    """Takes the row of that key out of a table, or puts it in; returns whether it is in now."""
    where = " AND ".join(f"{name} = ?" for name in key)
    if run(f"DELETE FROM {table} WHERE {where}", *key.values()).rowcount:
        return False
    insert(g.db, table, **key)
    return True


def day(ago: int) -> str:
    return (date.fromisoformat(TODAY) - timedelta(days=ago)).isoformat()


def add_user(db: sqlite3.Connection, site: Site, name: str, password: str, full_name: str = "",
             joined: str = TODAY) -> int:
    """Adds somebody who can log in on `site`; returns the id."""
    return insert(db, "users", site=site.name, name=name, password=password, full_name=full_name or name,
                  joined=joined)


def draw_password(site: Site, name: str, rng: Random) -> str:
    """A password that nobody knows; that of the site's own account is in `SITE`."""
    return site.account[1] if name == site.account[0] else f"{rng.getrandbits(64):016x}"


def open_session(db: sqlite3.Connection, user_id: int, key: str = "") -> str:
    """The id of a session of that user: a new one, or with `key` always the same. Ids follow from the
    database alone, so that episodes repeat exactly."""
    key = key or str(db.execute("SELECT ifnull(max(id), 0) + 1 FROM sessions").fetchone()[0])
    sid = hashlib.sha256(f"{user_id} {key}".encode()).hexdigest()[:24]
    db.execute("INSERT OR IGNORE INTO sessions (sid, user_id) VALUES (?, ?)", (sid, user_id))
    return sid


# ---- pages -------------------------------------------------------------------------------------------------

class _Environment(jinja2.Environment):
    """Reads `row.column` at once: Jinja's own way tries an attribute first, and its failure costs a quarter
    of a page's time."""

    def getattr(self, obj, attribute: str):
        return obj[attribute] if type(obj) is sqlite3.Row else super().getattr(obj, attribute)


@cache
def _templates() -> jinja2.Environment:
    """One for the process: templates compile once, however many worlds there are."""
    env = _Environment(loader=jinja2.FileSystemLoader(FOLDER / "templates"), autoescape=True,
                       trim_blocks=True,
                       lstrip_blocks=True, auto_reload=False, undefined=jinja2.StrictUndefined)
    env.filters["money"] = lambda cents: f"${cents / 100:,.2f}"
    macros = env.get_template("macros.html").module
    env.globals |= {name: getattr(macros, name) for name in dir(macros) if not name.startswith("_")}
    return env


@cache
def _template(name: str) -> jinja2.Template:
    return _templates().get_template(name)


def page(template: str, title: str, code: int = 200, **context) -> Response:
    """A page of the site: `title` must not be empty. The waiting message of the visitor is shown, and is gone
    then."""
    assert title.strip(), template
    message = g.user["message"] if g.user is not None else ""
    if message:
        run("UPDATE sessions SET message = '' WHERE sid = ?", g.user["sid"])
    body = _template(template).render(title=title, site=g.site, user=g.user, message=message,
                                      path=request.path, **context)
    return Response(body, code, {"Cache-Control": "no-store"}, content_type="text/html; charset=utf-8")


def go(path: str, message: str = "") -> Response:
    """The answer to a form: a redirect to a path of this site, where `message` is shown."""
    if message and g.user is not None:
        run("UPDATE sessions SET message = ? WHERE sid = ?", message, g.user["sid"])
    return Response("", 303, {"Location": path, "Cache-Control": "no-store"})


def words(field: str, longest: int = 200) -> str:
    """A text of the form, white space collapsed and cut; "" when it was left empty."""
    return " ".join(request.form.get(field, "").split())[:longest]


def number(field: str, lowest: int = 0, highest: int = 999) -> int | None:
    """A whole number of the form, or None when it is none or out of bounds."""
    text = request.form.get(field, "").strip()
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_number and lowest <= int(text) <= highest else None


def asked(field: str) -> str:
    """A text of the address, white space collapsed and cut."""
    return " ".join(request.args.get(field, "").split())[:100]


def chosen(field: str, options: Iterable[str], default: str) -> str:
    """One of some options, from the address."""
    value = request.args.get(field, default)
    return value if value in options else default


def all_words(text: str, query: str, none: str) -> str:
    """The SQL condition that `text` has every word of a query; `none` where the query has no word."""
    return " AND ".join([f"instr({text}, ?)"] * len(query.split())) or none


@dataclass(frozen=True)
class Paged:
    """One page of a longer list, as the macro `paging` wants it."""
    rows: list
    page: int
    pages: int
    total: int


def paged_list(total: int, read: Callable[[int, int], list], size: int = 8) -> Paged:
    """The part of a list that `?page=` asks for, or the nearest; `read(first, size)` gives it."""
    pages = max(1, -(-total // size))
    page = min(max(1, request.args.get("page", 1, int)), pages)
    return Paged(read((page - 1) * size, size), page, pages, total)


def paged(query: str, arguments: tuple = (), size: int = 8) -> Paged:
    """A page of the rows of an SQL query without LIMIT."""
    total = run(f"SELECT count(*) FROM ({query})", *arguments).fetchone()[0]
    return paged_list(total, lambda first,
                      size: run(f"{query} LIMIT ? OFFSET ?", *arguments, size, first).fetchall(), size)


def kept(**filters: str) -> str:
    """The address to which `paging` adds its page, so that the filter stays."""
    return f"?{urlencode(filters)}&"


# ---- logins ------------------------------------------------------------------------------------------------

class Members:
    """`get` and `post` of a blueprint for those who are logged in; others get the login form, and come back
    after it."""

    def __init__(self, pages: Blueprint):
        self.pages = pages

    def get(self, path: str, **options: Any) -> Callable:
        return lambda view: self.pages.get(path, **options)(_guarded(view))

    def post(self, path: str, **options: Any) -> Callable:
        return lambda view: self.pages.post(path, **options)(_guarded(view))


def _guarded(view: Callable) -> Callable:
    @wraps(view)
    def guarded(*args, **kwargs):
        return view(*args, **kwargs) if g.user is not None else _ask_login()
    return guarded


def _ask_login() -> Response:
    back = "/"
    if request.method == "GET":
        back = quote(request.path) + f"?{request.query_string.decode('latin-1')}".rstrip("?")
    return go(g.site.login_path if back == "/" else f"{g.site.login_path}?{urlencode({'next': back})}")


def _login() -> Response:
    if request.method == "GET":
        return page("login.html", g.site.login_text, next=request.args.get("next", "/"),
                    failed="failed" in request.args)
    given = request.form.get("user", "").strip(), request.form.get("password", "")
    user = run("SELECT id FROM users WHERE site = ? AND name = ? AND password = ?", g.site.name,
               *given).fetchone()
    if user is None:
        return go(f"{g.site.login_path}?failed=1")
    back = request.form.get("next", "/")
    answer = go(back if _LOCAL.fullmatch(back) else "/")
    answer.set_cookie(f"sid_{g.site.name}", open_session(g.db, user["id"]), httponly=True, samesite="Lax")
    return answer


def _logout() -> Response:
    run("DELETE FROM sessions WHERE sid = ?", request.cookies.get(f"sid_{g.site.name}", ""))
    answer = go("/")
    answer.delete_cookie(f"sid_{g.site.name}")
    return answer


def build_app(site: Site, pages: Blueprint) -> Flask:
    """The Flask app of a site: its views, the login and the logout (POST /logout), the stylesheet, and a page
    for what is not there. Each request brings the SiteDatabase that it is for."""
    app = Flask(site.name, static_folder=str(FOLDER / "static"))
    app.config.update(PROPAGATE_EXCEPTIONS=True, SEND_FILE_MAX_AGE_DEFAULT=3600)

    @app.before_request
    def visitor() -> Response | None:
        g.sites, g.site, g.user = request.environ[DATABASE], site, None
        g.db = g.sites.db
        if sid := request.cookies.get(f"sid_{site.name}"):
            g.user = run("SELECT users.*, sid, message FROM sessions JOIN users ON users.id = user_id "
                         "WHERE sid = ? AND site = ?", sid, site.name).fetchone()
        guest_page = not site.private or request.path == site.login_path or request.endpoint == "static"
        return None if g.user is not None or guest_page else _ask_login()

    @app.errorhandler(HTTPException)
    def refused(error: HTTPException) -> Response:
        if error.code == 404:
            return page("error.html", "Not found", 404, explanation="There is no such page.")
        return page("error.html", error.name, error.code, explanation="This cannot be done here.")

    # /orders/ and a number that no database holds
    app.register_error_handler(OverflowError, lambda _: refused(NotFound()))
    if site.account:
        app.add_url_rule(site.login_path, "login", _login, methods=["GET", "POST"])
        app.add_url_rule("/logout", "logout", _logout, methods=["POST"])
    app.register_blueprint(pages)
    return app
