"""The own sites: a shop, its back office, a forum, a code host and a map, small but real web sites on one
database (schema.sql).

The same Flask apps answer in process (`handle`) and over HTTP (`serve`). They are stand-ins: they take
WebArena's site names, account names and login forms, and none of its content.
"""
from __future__ import annotations

import io
import sqlite3
import threading
from dataclasses import dataclass
from functools import cache, partial
from http.cookies import SimpleCookie
from random import Random
from urllib.parse import unquote_to_bytes, urlencode, urlsplit

import flask
from werkzeug.serving import WSGIRequestHandler, make_server

from dreamgym.envs.webarena.sites import cms, code, forum, homepage, shop
from dreamgym.envs.webarena.sites import map as maps
from dreamgym.envs.webarena.sites.site import DATABASE, FOLDER, build_app, open_session

_SITES = {module.SITE.name: module.SITE for module in (shop, cms, forum, code, maps, homepage)}
SITES = tuple(_SITES)
COUNTS = {"train": 16, "valid": 2, "test": 4}    # databases of a seed
DATABASES = tuple(f"{split} {number}" for split, count in COUNTS.items() for number in range(count))


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: str
    set_cookies: dict[str, str]                  # "": to be forgotten


def _connect() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None, cached_statements=500)
    db.row_factory = sqlite3.Row
    return db


@cache
def _first_data(seed: int, name: str) -> sqlite3.Connection:
    """What all databases of that seed and name begin with. Each site draws from its own generator."""
    db = _connect()
    db.executescript((FOLDER / "schema.sql").read_text())
    for module in (shop, cms, forum, code, maps):
        db.execute("BEGIN")
        module.fill(db, Random(f"{seed} {name} {module.SITE.name}"), name.split()[0])
        db.execute("COMMIT")
        if module.SITE.account:
            _open_account(db, module.SITE.name)
    return db


def _open_account(db: sqlite3.Connection, site: str) -> str:
    user = db.execute("SELECT id FROM users WHERE site = ? AND name = ?", (site, _SITES[site].account[0]))
    return open_session(db, user.fetchone()[0], "login")


def _no_commit(action: int, name: str | None, *_) -> int:
    refused = action == sqlite3.SQLITE_TRANSACTION and name == "COMMIT"
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


@cache
def _apps() -> dict[str, flask.Flask]:
    """The sites' apps, made once for all databases: they keep nothing of them."""
    return {name: build_app(site) for name, site in _SITES.items()}


class SiteDatabase:
    """All sites with their data, which follow from the seed and the name, one of DATABASES. Databases of two
    splits share no product, person, post, project, issue, town or place. `accounts`: (user, password) of the
    agents by site. All writes to `db` are one transaction that `reset` rolls back: a commit is refused."""

    def __init__(self, seed: int = 7, name: str = DATABASES[0]):
        self.seed, self.name, self.db, self.lock = seed, "", _connect(), threading.RLock()
        self.db.set_authorizer(_no_commit)
        self.db.execute("BEGIN")
        self.reset(name)
        self.bases = {name: f"http://{name}.test" for name in SITES}
        self.accounts = {name: site.account for name, site in _SITES.items() if site.account}
        self.apps = _apps()

    def reset(self, name: str = "") -> None:
        """Undoes everything that was done; sessions that `login` gave out stay good. With another `name` it
        becomes that database."""
        with self.lock:
            self.db.execute("ROLLBACK")
            if name and name != self.name:
                self.name, self.first = name, _first_data(self.seed, name)
                self.first.backup(self.db)
            self.db.execute("BEGIN")

    def login(self, site: str) -> dict[str, str]:
        """Cookies of the session of the site's account; none for a site without accounts."""
        with self.lock:
            return {f"sid_{site}": _open_account(self.db, site)} if site in self.accounts else {}

    def answer(self, site: str, environ: dict) -> flask.Response:
        """The answer to one WSGI request. Raises what a view raises."""
        with self.lock, self.apps[site].request_context({**environ, DATABASE: self}):
            return self.apps[site].full_dispatch_request()

    def handle(self, site: str, method: str, path: str, query: str = "", form: dict | None = None,
               cookies: dict | None = None) -> Response:
        """One request; redirects are not followed. `path` and `query` as they stand in an address; a value of
        `form` may be a list."""
        body = urlencode(form or {}, doseq=True).encode()
        answer = self.answer(site, {              # by hand: werkzeug's EnvironBuilder takes as long as a page
            "REQUEST_METHOD": method, "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
            "QUERY_STRING": query, "HTTP_HOST": urlsplit(self.bases[site]).netloc,
            "SERVER_NAME": "localhost", "SERVER_PORT": "80",
            "HTTP_COOKIE": "; ".join(f"{name}={value}" for name, value in (cookies or {}).items()),
            "CONTENT_TYPE": "application/x-www-form-urlencoded", "CONTENT_LENGTH": str(len(body)),
            "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(body)})
        jar = {name: morsel.value for value in answer.headers.getlist("Set-Cookie")
               for name, morsel in SimpleCookie(value).items()}
        return Response(answer.status_code, dict(answer.headers), answer.get_data(as_text=True), jar)

    def serve(self) -> Served:
        return Served(self)


class _Handler(WSGIRequestHandler):
    def log(self, *_) -> None:
        """Quiet."""


class Served:
    """A SiteDatabase over HTTP on loopback ports, which are its `bases` until this is closed. Requests are
    answered one at a time, whichever thread brings them."""

    def __init__(self, sites: SiteDatabase):
        self.sites, self.before = sites, sites.bases
        self.servers = {site: make_server("127.0.0.1", 0, partial(self._answer, site), threaded=True,
                                          request_handler=_Handler) for site in SITES}
        sites.bases = self.bases = {site: f"http://127.0.0.1:{server.server_port}"
                                    for site, server in self.servers.items()}
        for server in self.servers.values():
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def _answer(self, site: str, environ: dict, start_response):
        return self.sites.answer(site, environ)(environ, start_response)

    def close(self) -> None:
        for server in self.servers.values():
            server.shutdown()                    # waits for its thread
            server.server_close()
        self.sites.bases = self.before

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_) -> None:
        self.close()
