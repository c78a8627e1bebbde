"""The own sites: a shop, its back office, a forum, a code host and a map, small but real web sites on one
database (schema.sql).

The same Flask apps answer in process (`handle`) and over HTTP (`serve`). They are stand-ins: they take
WebArena's site names, account names and login forms, and none of its content.
"""
from __future__ import annotations

import io
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.cookies import SimpleCookie
from random import Random
from urllib.parse import unquote_to_bytes, urlencode, urlsplit

import flask
from werkzeug.serving import WSGIRequestHandler, make_server

from dreamgym.envs.webarena.live import ACCOUNTS
from dreamgym.envs.webarena.sites import cms, code, forum, homepage, shop
from dreamgym.envs.webarena.sites import map as maps
from dreamgym.envs.webarena.sites.site import DATABASE, FOLDER, open_session

_SITES = {module.SITE.name: module.SITE for module in (shop, cms, forum, code, maps, homepage)}
SITES = tuple(_SITES)
COUNTS = {"train": 64, "valid": 2, "test": 4}  # databases of a seed
DATABASES = tuple(f"{split} {number}" for split, count in COUNTS.items() for number in range(count))


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: str
    set_cookies: dict[str, str]  # "": to be forgotten


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
        module.fill(db, Random(f"{seed} {name} {module.SITE.name}"), name.split()[0])
    for site in ACCOUNTS:
        _open_account(db, site)
    return db


def _open_account(db: sqlite3.Connection, site: str) -> str:
    user = db.execute("SELECT id FROM users WHERE site = ? AND name = ?", (site, ACCOUNTS[site][0]))
    return open_session(db, user.fetchone()[0], "login")


class SiteDatabase:
    """All sites with their data, which follow from the seed and the name, one of DATABASES. Databases of two
    splits share no product, person, post, project, issue, town or place. `apps` keep nothing of a
    database."""

    def __init__(self, seed: int = 7, name: str = DATABASES[0]):
        self.seed, self.name, self.db, self.lock = seed, name, _connect(), threading.RLock()
        self.reset()
        self.bases = {name: f"http://{name}.test" for name in SITES}
        self.accounts, self.apps = ACCOUNTS, _SITES

    def reset(self, name: str = "") -> None:
        """Undoes everything that was done, in 1 ms; sessions stay good. With a `name` it becomes that
        database."""
        with self.lock:
            self.name = name or self.name
            self.first = _first_data(self.seed, self.name)
            self.first.backup(self.db)

    def login(self, site: str) -> dict[str, str]:
        """Cookies of a session of the site's account, if it has one."""
        with self.lock:
            return {f"sid_{site}": _open_account(self.db, site)} if site in self.accounts else {}

    def answer(self, site: str, environ: dict) -> flask.Response:
        """The answer to a WSGI request. Raises what a view raises."""
        with self.lock, self.apps[site].request_context({**environ, DATABASE: self}):
            return self.apps[site].full_dispatch_request()

    def handle(self, site: str, method: str, path: str, query: str = "",
               form: dict | Sequence[tuple[str, str]] | None = None, cookies: dict | None = None) -> Response:
        """One request; redirects are not followed. `path` and `query` as they stand in an address."""
        body = urlencode(form or ()).encode()
        answer = self.answer(site, {  # by hand: werkzeug's EnvironBuilder takes as long as a page
            "REQUEST_METHOD": method, "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
            "QUERY_STRING": query, "HTTP_HOST": urlsplit(self.bases[site]).netloc,
            "SERVER_NAME": "localhost", "SERVER_PORT": "80",
            "HTTP_COOKIE": "; ".join(f"{name}={value}" for name, value in (cookies or {}).items()),
            "CONTENT_TYPE": "application/x-www-form-urlencoded", "CONTENT_LENGTH": str(len(body)),
            "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(body)})
        jar = {name: morsel.value for value in answer.headers.getlist("Set-Cookie")
               for name, morsel in SimpleCookie(value).items()}
        return Response(answer.status_code, dict(answer.headers), answer.get_data(as_text=True), jar)

    @contextmanager
    def serve(self) -> Iterator[SiteDatabase]:
        """The sites over HTTP on loopback ports, which are the `bases` meanwhile. `lock`: one request at a
        time."""
        before = self.bases
        servers = {site: make_server(
            "127.0.0.1", 0, lambda environ, start, site=site: self.answer(site, environ)(environ, start),
            threaded=True, request_handler=_Handler) for site in SITES}
        self.bases = {site: f"http://127.0.0.1:{server.server_port}" for site, server in servers.items()}
        for server in servers.values():
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield self
        finally:
            for server in servers.values():
                server.shutdown()  # waits for its thread
                server.server_close()
            self.bases = before


class _Handler(WSGIRequestHandler):
    def log(self, *_) -> None:
        """Quiet."""
