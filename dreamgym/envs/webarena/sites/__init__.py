"""The own sites: a shop, its back office, a forum, a code host and a map, small but real web sites on one
database, for `--env webarena`.

`SiteDatabase` is all of them with their data. The same Flask apps answer in process (`handle`, what the
browserless back end calls) and over HTTP (`serve`, what a browser is given). They are stand-ins: they take
WebArena's site names, account names and login forms, and none of its content; results on them are no results
on WebArena.
"""
from __future__ import annotations

import io
import sqlite3
import sys
import threading
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cache
from http.cookies import SimpleCookie
from random import Random
from urllib.parse import unquote_to_bytes, urlencode, urlsplit

from flask import Flask
from werkzeug.serving import WSGIRequestHandler, make_server

from dreamgym.envs.webarena.sites import cms, code, forum, homepage, shop
from dreamgym.envs.webarena.sites import map as maps
from dreamgym.envs.webarena.sites.site import DATABASE, SCHEMA, build_app, open_session

_MODULES = {"shopping": shop, "shopping_admin": cms, "reddit": forum, "gitlab": code, "map": maps,
            "homepage": homepage}
SITES = tuple(_MODULES)


@dataclass(frozen=True)
class Response:
    """An answer as a browser sees it. `set_cookies` maps names to values, "" for a cookie that is to be
    forgotten."""
    status: int
    headers: dict[str, str]
    body: str
    set_cookies: dict[str, str] = field(default_factory=dict)


def _connect() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None, cached_statements=500)
    db.row_factory = sqlite3.Row
    return db


@cache
def _first_data(seed: int) -> sqlite3.Connection:
    """The database that all of that seed begin with. Each site draws from its own generator, so that one
    site's data does not hang on another's."""
    db = _connect()
    db.executescript(SCHEMA)
    for name, module in _MODULES.items():
        db.executescript(module.SCHEMA)
        db.execute("BEGIN")
        module.fill(db, Random(f"{seed} {name}"))
        db.execute("COMMIT")
        if account := module.SITE.account:
            _open_account(db, name, account[0])
    return db


def _open_account(db: sqlite3.Connection, site: str, user: str) -> str:
    return open_session(db, db.execute("SELECT id FROM users WHERE site = ? AND name = ?",
                                       (site, user)).fetchone()[0], "login")


def _no_commit(action: int, name: str | None, *_) -> int:
    refused = action == sqlite3.SQLITE_TRANSACTION and name == "COMMIT"
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


@cache
def _apps(seed: int) -> dict[str, Flask]:
    """The sites' apps, made once for all databases of a seed: they keep nothing that visitors can change."""
    return {site: build_app(module.SITE, module.pages) for site, module in _MODULES.items()}


class SiteDatabase:
    """All sites with their data, which follow from the seed; independent of any other. `accounts` are (user,
    password) of the account that agents use on a site; `db` may be read and written by anybody, but all of it
    is one transaction that `reset` rolls back: a commit is refused."""

    def __init__(self, seed: int = 7):
        self.seed, self.db, self.lock = seed, _connect(), threading.RLock()
        _first_data(seed).backup(self.db)
        self.db.set_authorizer(_no_commit)
        self.db.execute("BEGIN")
        self.bases = {site: f"http://{site}.test" for site in SITES}
        self.accounts = {site: module.SITE.account for site, module in _MODULES.items()
                         if module.SITE.account}
        self.apps = _apps(seed)

    def reset(self) -> None:
        """Everything that was done since the first moment, or the last reset, is undone; sessions that
        `login` gave out stay good."""
        with self.lock:
            self.db.execute("ROLLBACK")
            self.db.execute("BEGIN")

    def login(self, site: str) -> dict[str, str]:
        """Cookies of a session of the site's account, always the same; none for a site without accounts."""
        with self.lock:
            return {f"sid_{site}": _open_account(self.db, site,
                                                 self.accounts[site][0])} if site in self.accounts else {}

    def handle(self, site: str, method: str, path: str, query: str = "", form: dict | None = None,
               cookies: dict | None = None) -> Response:
        """One request; redirects are not followed. `path` and `query` as they stand in an address; a value of
        `form` may be a list. Raises what a view raises (an error of the sites, not of the visitor)."""
        body, started = urlencode(form or {}, doseq=True).encode(), []
        environ = {  # by hand: werkzeug's EnvironBuilder takes as long as a page
            "REQUEST_METHOD": method, "SCRIPT_NAME": "",
            "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
            "QUERY_STRING": query, "SERVER_NAME": "localhost", "SERVER_PORT": "80",
                   "SERVER_PROTOCOL": "HTTP/1.1",
            "HTTP_HOST": urlsplit(self.bases[site]).netloc,
                   "CONTENT_TYPE": "application/x-www-form-urlencoded",
            "CONTENT_LENGTH": str(len(body)), "wsgi.url_scheme": "http",
            "HTTP_COOKIE": "; ".join(f"{name}={value}" for name, value in (cookies or {}).items()),
            "wsgi.input": io.BytesIO(body), "wsgi.errors": sys.stderr, "wsgi.version": (1, 0),
                   "wsgi.multithread": False,
            "wsgi.multiprocess": False, "wsgi.run_once": False, DATABASE: self}
        with self.lock:
            chunks = self.apps[site](environ, lambda status, headers,
                                     _=None: started.extend((status, headers)))
            text = b"".join(chunks).decode()
        given = [value for name, value in started[1] if name == "Set-Cookie"]
        jar = {name: morsel.value for value in given for name, morsel in SimpleCookie(value).items()}
        return Response(int(started[0][:3]), dict(started[1]), text, jar)

    def serve(self) -> Served:
        """All sites over HTTP on loopback ports, until the result is closed (it is a context manager).
        Meanwhile `bases` are those addresses."""
        return Served(self)


class _Handler(WSGIRequestHandler):
    def log(self, *_) -> None:
        """Quiet."""


class Served:
    """A SiteDatabase over HTTP: `bases` maps each site to http://127.0.0.1:PORT. Requests are answered one at
    a time, whichever thread brings them."""

    def __init__(self, sites: SiteDatabase):
        self.sites, self.before = sites, sites.bases
        self.servers = {site: make_server("127.0.0.1", 0, self._locked(app), threaded=True,
                                          request_handler=_Handler)
                        for site, app in sites.apps.items()}
        sites.bases = self.bases = {site: f"http://127.0.0.1:{s.server_port}" for site,
                                    s in self.servers.items()}
        self.threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05},
                                         daemon=True)
                        for server in self.servers.values()]
        for thread in self.threads:
            thread.start()

    def _locked(self, app: Flask):
        def answer(environ, start_response) -> list[bytes]:
            environ[DATABASE] = self.sites
            with self.sites.lock:
                chunks = app(environ, start_response)
                # a file of the stylesheet
                with closing(chunks) if hasattr(chunks, "close") else nullcontext():
                    return [b"".join(chunks)]
        return answer

    def close(self) -> None:
        for server, thread in zip(self.servers.values(), self.threads):
            server.shutdown()
            thread.join()
            server.server_close()
        self.sites.bases = self.before

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_) -> None:
        self.close()
