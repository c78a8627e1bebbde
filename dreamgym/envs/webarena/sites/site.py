"""What every own site is made of: one layout, logins, confirmations, lists. No page of a site is here.

A site is a module with `SITE` and its first data (`fill(db, rng, split)`). Its pages are the blocks of
templates/SITE.html, named like the views. A view finds the database in `g.db`, the visitor in `g.user` (a row
of `users`, or None) and the user name in `g.name`. Every POST ends in `go`: a redirect, and a message that
the next page shows once.
"""
import hashlib
import re
import sqlite3
import tomllib
from collections.abc import Callable, Iterable
from datetime import date, timedelta
from functools import cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import jinja2
from flask import Flask, Response, abort, g, request
from markupsafe import Markup
from werkzeug.exceptions import HTTPException, NotFound

from dreamgym.envs.webarena.live import ACCOUNTS, RECIPES

DATABASE = "dreamgym.site_database"  # in a request's environ
FOLDER = Path(__file__).parent
TODAY = "2024-06-01"  # the clock stands still, so that an episode repeats exactly
# What the first data are made of, by site: so few words that a tiny language model can read and write them
WORDS = {part: SimpleNamespace(**words)
         for part, words in tomllib.loads((FOLDER / "words.toml").read_text()).items()}
PEOPLE = WORDS["people"]


class Site(Flask):
    """The Flask app of a site: its views, login, logout, static files. A request brings its SiteDatabase.
    `nav`: text -> path of the header's links. `search`: path of the header's search form (field `q`).
    `private`: every page asks for a login."""

    def __init__(self, name: str, title: str, nav: dict[str, str], search: str = "", private: bool = False):
        super().__init__(__name__)
        self.name, self.title, self.nav, self.search, self.private = name, title, nav, search, private
        # part of a route -> (its text, the parts loaded before) -> what the view gets in its place
        self.loaders: dict[str, Callable[[Any, dict], Any]] = {}
        self.account = ACCOUNTS.get(name)  # (user, password) that agents use
        self.config.update(PROPAGATE_EXCEPTIONS=True, SEND_FILE_MAX_AGE_DEFAULT=3600)
        self.before_request(self._visitor)
        self.register_error_handler(HTTPException, _refused)
        # a number that no database holds
        self.register_error_handler(OverflowError, lambda _: _refused(NotFound()))
        if self.account:
            path, self.user_label, self.login_text = RECIPES[name]
            self.login_path = path or "/login"
            self.add_url_rule(self.login_path, "login", _login, methods=["GET", "POST"])
            self.add_url_rule("/logout", "logout", _logout, methods=["POST"])

    def _visitor(self) -> Response | None:
        g.sites, g.site, g.user, g.filters, g.options = request.environ[DATABASE], self, None, {}, {}
        g.db = g.sites.db
        if sid := request.cookies.get(f"sid_{self.name}"):
            g.user = run("SELECT users.*, sid, message FROM sessions JOIN users ON users.id = user_id "
                         "WHERE sid = ? AND site = ?", sid, self.name).fetchone()
        g.name = g.user["name"] if g.user else ""
        open_to_all = not self.private or request.path == self.login_path or request.endpoint == "static"
        return None if g.user or open_to_all else ask_login()

    def get(self, *rules: str, member: bool = False) -> Callable:
        """Registers a view. `member`, as every `post`: others get the login form, and come back after it."""
        return partial(self._register, rules, "GET", member)

    def post(self, *rules: str) -> Callable:
        return partial(self._register, rules, "POST", True)

    def _register(self, rules: tuple[str, ...], method: str, member: bool, view: Callable) -> Callable:
        def answer(**parts):
            if member and g.user is None:
                return ask_login()
            loaded: dict[str, Any] = {}
            for name, text in parts.items():
                loaded[name] = self.loaders[name](text, loaded) if name in self.loaders else text
            return view(**loaded)
        for rule in rules:
            self.add_url_rule(rule, view.__name__, answer, methods=[method])
        return view

    def add_user(self, db: sqlite3.Connection, name: str, rng: Random, full_name: str = "",
                 joined: range | None = None) -> int:
        """Adds somebody who joined so many days ago; only `account` has a known password."""
        password = self.account[1] if name == self.account[0] else f"{rng.getrandbits(64):016x}"
        return insert(db, "users", site=self.name, name=name, password=password, full_name=full_name or name,
                      joined=day(rng.choice(joined)) if joined else TODAY)


# ---- the database

def insert(db: sqlite3.Connection, table: str, **values: Any) -> int:
    marks = ", ".join("?" * len(values))
    return db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})",
                      tuple(values.values())).lastrowid


def of_split(names: Iterable[str], split: str) -> list[str]:
    """The names that databases of a split alone use, whatever the seed."""
    names = list(names)
    Random(" ".join(names)).shuffle(names)
    quarter = len(names) // 4
    return {"train": names[2 * quarter:], "valid": names[:quarter], "test": names[quarter:2 * quarter]}[split]


def run(query: str, *arguments: Any) -> sqlite3.Cursor:
    return g.db.execute(query, arguments)


def rows(query: str, *arguments: Any) -> list[sqlite3.Row]:
    return run(query, *arguments).fetchall()


def one(query: str, *arguments: Any) -> sqlite3.Row:
    """The first row of a query; the page is not found without one."""
    return run(query, *arguments).fetchone() or abort(404)


def toggle(table: str, **key: Any) -> bool:
    """Takes a row out of a table, or puts it in. Whether it is in now."""
    where = " AND ".join(f"{name} = ?" for name in key)
    if run(f"DELETE FROM {table} WHERE {where}", *key.values()).rowcount:
        return False
    insert(g.db, table, **key)
    return True


def day(ago: int) -> str:
    return (date.fromisoformat(TODAY) - timedelta(days=ago)).isoformat()


def open_session(db: sqlite3.Connection, user_id: int, key: str = "") -> str:
    """The id of a session of that user: a new one, or with `key` always the same."""
    key = key or str(db.execute("SELECT ifnull(max(id), 0) + 1 FROM sessions").fetchone()[0])
    sid = hashlib.sha256(f"{user_id} {key}".encode()).hexdigest()[:24]
    db.execute("INSERT OR IGNORE INTO sessions (sid, user_id) VALUES (?, ?)", (sid, user_id))
    return sid


# ---- pages

class _Environment(jinja2.Environment):
    """Reads `row.column` at once: Jinja tries an attribute first, a quarter of a page's time."""

    def getattr(self, obj, attribute: str):
        return obj[attribute] if type(obj) is sqlite3.Row else super().getattr(obj, attribute)


@cache
def _templates() -> jinja2.Environment:
    env = _Environment(loader=jinja2.FileSystemLoader(FOLDER / "templates"), autoescape=True,
                       trim_blocks=True, lstrip_blocks=True, auto_reload=False,
                       undefined=jinja2.StrictUndefined)
    env.filters["money"] = lambda cents: f"${cents / 100:,.2f}"
    env.globals["g"] = g
    macros = env.get_template("macros.html").module
    env.globals |= {name: getattr(macros, name) for name in dir(macros) if not name.startswith("_")}
    return env


def page(title: str, view: str = "", code: int = 200, heading: str | None = None, **context: Any) -> Response:
    """The block of the view that answers, or of `view`, below `heading` (default: the title), with the
    waiting message."""
    message = g.user["message"] if g.user else ""
    if message:
        run("UPDATE sessions SET message = '' WHERE sid = ?", g.user["sid"])
    heading = title if heading is None else heading
    context |= {"title": title, "heading": heading, "site": g.site, "user": g.user, "path": request.path}
    file = "common" if view in ("login", "error") else g.site.name
    template = _templates().get_template(f"{file}.html")
    block = template.blocks[view or request.endpoint]
    content = Markup("".join(block(template.new_context(context))))
    body = _templates().get_template("base.html").render(context, message=message, content=content)
    return Response(body, code, {"Cache-Control": "no-store"}, content_type="text/html; charset=utf-8")


def go(message: str = "", path: str = "") -> Response:
    """A redirect to a path, or the form's own, where `message` is shown."""
    if message and g.user:
        run("UPDATE sessions SET message = ? WHERE sid = ?", message, g.user["sid"])
    return Response("", 303, {"Location": path or request.path, "Cache-Control": "no-store"})


def words(name: str, longest: int = 200) -> str:
    """A text of the form, white space collapsed and cut."""
    return " ".join(request.form.get(name, "").split())[:longest]


def number(name: str, lowest: int = 0, highest: int = 999) -> int | None:
    """A whole number of the form, None when it is none or out of bounds."""
    text = request.form.get(name, "").strip()
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_number and lowest <= int(text) <= highest else None


def asked(name: str) -> str:
    """A text of the address. As what is `chosen`, a filter, which `filter_form` and `paging` show and pass
    on."""
    return g.filters.setdefault(name, " ".join(request.args.get(name, "").split())[:100])


def chosen(name: str, options: Iterable[str], label: str = "", strict: bool = True) -> str:
    """One of the options, from the address; by default, and for any other text if `strict`, the first."""
    options = list(options)
    value = request.args.get(name, options[0])
    g.options[name] = options, label or name.capitalize()
    return g.filters.setdefault(name, value if value in options or not strict else options[0])


def all_words(text: str, parts: list[str]) -> list[str]:
    """The SQL condition that `text` has all the words, false for none; then its arguments."""
    return [" AND ".join([f"instr({text}, ?)"] * len(parts)) or "0", *parts]


class Paged(NamedTuple):
    rows: list
    page: int
    pages: int
    total: int


def paged(found: list | str, *arguments: Any, size: int = 8) -> Paged:
    """The part of a list, or of a query's rows, that `?page=` asks for, or the nearest."""
    is_list = isinstance(found, list)
    total = len(found) if is_list else one(f"SELECT count(*) FROM ({found})", *arguments)[0]
    pages = max(1, -(-total // size))
    page = min(max(1, request.args.get("page", 1, int)), pages)
    first = (page - 1) * size
    part = found[first:first + size] if is_list else rows(f"{found} LIMIT {size} OFFSET {first}", *arguments)
    return Paged(part, page, pages, total)


# ---- logins, and what is refused

def ask_login() -> Response:
    back = quote(request.path) + f"?{request.query_string.decode('latin-1')}".rstrip("?")
    query = f"?{urlencode({'next': back})}" if request.method == "GET" and back != "/" else ""
    return go(path=g.site.login_path + query)


def _login() -> Response:
    if request.method == "GET":
        return page(g.site.login_text, "login", heading=g.site.title, next=request.args.get("next", "/"),
                    failed="failed" in request.args)
    user = run("SELECT id FROM users WHERE site = ? AND name = ? AND password = ?", g.site.name,
               request.form.get("user", "").strip(), request.form.get("password", "")).fetchone()
    if user is None:
        return go(path=f"{g.site.login_path}?failed=1")
    back = request.form.get("next", "/")
    answer = go(path=back if re.fullmatch(r"/(?![/\\])[!-~]*", back) else "/")  # "//host" leads elsewhere
    answer.set_cookie(f"sid_{g.site.name}", open_session(g.db, user["id"]), httponly=True, samesite="Lax")
    return answer


def _logout() -> Response:
    run("DELETE FROM sessions WHERE sid = ?", request.cookies.get(f"sid_{g.site.name}", ""))
    answer = go(path="/")
    answer.delete_cookie(f"sid_{g.site.name}")
    return answer


def _refused(error: HTTPException) -> Response:
    if error.code == 404:
        return page("Not found", "error", 404, explanation="There is no such page.")
    return page(error.name, "error", error.code, explanation="This cannot be done here.")
