"""A user's own WebArena, as environment variables name it (docs/environments.md): addresses, whether they
answer, logins, the full reset, and the shop's interface for evaluators."""
import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from tqdm import tqdm

from dreamgym.envs.webarena.page import SITES
from dreamgym.envs.webarena.tabs import NotSupported

ACCOUNTS = {  # those that WebArena's images come with, as its documentation gives them
    "shopping": ("emma.lopez@gmail.com", "Password.123"), "shopping_admin": ("admin", "admin1234"),
    "reddit": ("MarvelsGrantMan136", "test1234"), "gitlab": ("byteblaze", "hello1234"),
}
READY, RUNNING = "Ready for duty!", 418          # of the reset service: its last words, its status before
TRUST_S = 600.0                                  # so long a login that held is not looked at again
LOG_OUT = re.compile(r"(?:log|sign)_?out")       # in the addresses by which the sites end a login
EARLY_S = 300.0                                  # a cookie that has less left counts as gone
NO_ANSWER = (OSError, http.client.HTTPException)


# ---- what the user gives

class Instance(NamedTuple):
    bases: dict[str, str]                        # of each site, without a last slash
    reset_url: str = ""                          # of its reset service; "": it has none


def read_instances(environ: Mapping[str, str], sites: Iterable[str]) -> list[Instance]:
    """The instance that the environment names; or one for each line of the file `$WA_INSTANCES`, a JSON
    object of the same names. Raises ValueError where an address of `sites` lacks, or stands in two instances:
    their episodes would change each other's sites."""
    path = environ.get("WA_INSTANCES", "")
    if not path:
        return [read_instance(environ, sites)]
    instances, where = [], ""
    try:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                where = f"line {number}: "
                found = read_instance(msgspec.json.decode(line, type=dict[str, str]), sites)
                taken = [base for earlier in instances for base in earlier.bases.values()]
                if twice := set(found.bases.values()).intersection(taken):
                    raise ValueError(f"{min(twice)} stands in an earlier line, too")
                instances.append(found)
        if not instances:
            raise ValueError("holds no instance")
    except OSError as error:
        raise ValueError(f"WA_INSTANCES {path}: cannot be read ({error})") from None
    except (ValueError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {where}{error}; expected one JSON object of addresses a line") from None
    return instances


def read_instance(environ: Mapping[str, str], sites: Iterable[str]) -> Instance:
    bases = {site: base for site in SITES if (base := read_address(environ, site.upper()))}
    if missing := [f"WA_{site.upper()}" for site in SITES if site in set(sites) - set(bases)]:
        raise ValueError(f"{', '.join(missing)}: not set, but the tasks need a WebArena that runs there "
                         "(docs/environments.md)")
    return Instance(bases, read_address(environ, "FULL_RESET").removesuffix("/reset"))


def read_address(environ: Mapping[str, str], name: str) -> str:
    """`$WA_name`, else `$name`, checked. Raises ValueError without repeating what may be a password."""
    value = environ.get(f"WA_{name}") or environ.get(name) or ""
    parts = urlsplit(value)
    more = parts.username or parts.password or parts.query or parts.fragment or " " in value
    if value and (parts.scheme not in ("http", "https") or not parts.hostname or more):
        raise ValueError(f"WA_{name}: found scheme {parts.scheme!r}, host {parts.hostname!r}; expected "
                         f"http(s)://HOST[:PORT][/PATH] without user or query")
    return value.rstrip("/")


def read_hosts(environ: Mapping[str, str]) -> set[str]:
    """`$WA_MORE_HOSTS`: what scripts need besides the sites, such as the map's route server. Raises
    ValueError."""
    hosts = {host.strip() for host in environ.get("WA_MORE_HOSTS", "").split(",")} - {""}
    if wrong := [host for host in sorted(hosts) if not re.fullmatch(r"[\w.-]+", host)]:
        raise ValueError(f"WA_MORE_HOSTS: found {wrong[0]!r}; expected names without scheme and port, "
                         "joined by commas")
    return hosts


def read_accounts(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """(user, password) by site: `$WA_<SITE>_USERNAME` and `$WA_<SITE>_PASSWORD`, both or neither. Raises
    ValueError."""
    accounts = {}
    for site, default in ACCOUNTS.items():
        names = [f"WA_{site.upper()}_{name}" for name in ("USERNAME", "PASSWORD")]
        given = tuple(environ.get(name, "") for name in names)
        if any(given) and not all(given):
            raise ValueError(f"{' and '.join(names)}: one is not set; set both or neither")
        accounts[site] = given if all(given) else default
    return accounts


# ---- reaching it, resetting it

def ask(url: str, timeout_s: float, data: bytes | None = None,
        headers: dict[str, str] = {}) -> tuple[int, str]:  # noqa: B006
    """-> (status, body), also of an error. Raises NO_ANSWER."""
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode("utf-8", "replace")


def check_answers(bases: Mapping[str, str], timeout_s: float = 10.0) -> None:
    """Raises ValueError that lists every site without an answer, or with a server's error."""
    troubles = []
    for site, base in bases.items():
        try:
            status, _ = ask(base, timeout_s)
            trouble = f"HTTP {status}" if status >= 500 else ""
        except NO_ANSWER as error:
            trouble = str(error) or type(error).__name__
        troubles += [f"{site} at {base}: {trouble}"] if trouble else []
    if troubles:
        raise ValueError(f"{'; '.join(troubles)}. Start these sites, or correct the WA_ addresses")


def full_reset(reset_url: str, limit_s: float = 900.0, poll_s: float = 5.0) -> None:
    """All sites back to their first state (minutes). Raises ValueError when the service refuses, is lost, or
    takes longer than `limit_s`."""
    began, path, said = time.monotonic(), "reset", ""
    with tqdm(desc=f"resetting {reset_url}", unit="s") as bar:
        while (taken := time.monotonic() - began) <= limit_s:
            bar.update(round(taken) - bar.n)
            try:
                status, said = ask(f"{reset_url}/{path}", limit_s)
            except NO_ANSWER as error:
                raise ValueError(f"{reset_url}: the reset service does not answer ({error}); it is what "
                                 "$WA_FULL_RESET names") from None
            if status not in (200, RUNNING):
                raise ValueError(f"{reset_url}/{path}: HTTP {status} {said[:120]!r}, expected {RUNNING} "
                                 f"while it works, then 200 and {READY!r}")
            if path == "status" and status == 200 and READY in said:
                return
            path = "status"
            time.sleep(poll_s)
    raise ValueError(f"{reset_url}: not ready {limit_s:.0f} seconds after the reset began, it says "
                     f"{said[:120]!r}")


# ---- logins

class Recipe(NamedTuple):
    """How one logs in. Somebody is logged in when the site's first page has neither a password field nor a
    link to `path`."""
    path: str                                    # of the form, below the site's base
    user_label: str                              # of the field for the name
    button: str


RECIPES = {
    "shopping": Recipe("/customer/account/login/", "Email", "Sign In"),
    "shopping_admin": Recipe("", "Username", "Sign in"),
    "reddit": Recipe("/login", "Username", "Log in"),
    "gitlab": Recipe("/users/sign_in", "Username or email", "Sign in"),
}


def log_in(page: Any, base: str, recipe: Recipe, account: tuple[str, str]) -> None:
    """Sends the login form on a Playwright page. Raises Playwright's errors."""
    page.goto(base + recipe.path, wait_until="domcontentloaded")
    form = page.locator("form:has(input[type=password]:visible)").first
    form.get_by_label(recipe.user_label).first.fill(account[0])
    form.locator("input[type=password]").first.fill(account[1])
    with page.expect_navigation(wait_until="domcontentloaded"):
        form.get_by_role("button", name=recipe.button).first.click()


def logged_in(page: Any, base: str, recipe: Recipe, account: tuple[str, str]) -> bool:
    """Raises Playwright's errors."""
    answer = page.goto(f"{base}/", wait_until="domcontentloaded")
    asks = "input[type=password]:visible"
    if recipe.path:
        asks += "".join(f", a[href^='{start}{recipe.path}']:visible" for start in (urlsplit(base).path, base))
    return bool(answer and answer.ok and page.locator(asks).count() == 0)


@dataclass
class Logins:
    """Logged-in browser states of one instance, one for each set of sites, in `folder`."""
    bases: Mapping[str, str]
    accounts: Mapping[str, tuple[str, str]]
    folder: Path
    timeout_s: float = 30.0                      # of one page
    seen: dict[tuple[str, ...], float] = field(default_factory=dict)     # when a login was last seen to hold

    def state(self, browser: Any, sites: Iterable[str], asked: Iterable[str] = ()) -> dict:
        """Playwright's storage state in which the accounts of `sites` are logged in: the kept one if it still
        holds, else one from new logins. After a log-out among the addresses that the last episode `asked`
        for, all are looked at again. Raises ValueError, without a password in it."""
        sites = tuple(sorted(set(sites) & set(RECIPES)))
        if any(map(LOG_OUT.search, asked)):
            self.seen.clear()
        key = json.dumps([[site, self.bases[site], self.accounts[site][0]] for site in sites])
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        path = self.folder / f"{'.'.join(sites) or 'none'}-{digest}.json"
        state = read_state(path)
        if state and time.monotonic() - self.seen.get(sites, -TRUST_S) < TRUST_S:
            return state
        if state is None or self.logged_out(browser, state, sites):
            state = self.visit(browser, None, sites, log_in)[1]
            if out := self.logged_out(browser, state, sites):
                places = ", ".join(f"{site} at {self.bases[site]}" for site in out)
                names = ", ".join(f"$WA_{site.upper()}_USERNAME and _PASSWORD" for site in out)
                raise ValueError(f"login failed: after it, {places} still asks for one. Check {names}. "
                                 "Sites of one host name may overwrite each other's cookies")
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = path.with_suffix(f".{os.getpid()}.part")  # another process may read it at any time
            part.touch(0o600)
            part.write_text(json.dumps(state), encoding="utf-8")
            part.replace(path)
        self.seen[sites] = time.monotonic()
        return state

    def logged_out(self, browser: Any, state: dict, sites: tuple[str, ...]) -> list[str]:
        """Looked at after all logins: one may have ended another."""
        found, _ = self.visit(browser, state, sites, logged_in)
        return [site for site, is_in in zip(sites, found) if not is_in]

    def visit(self, browser: Any, state: dict | None, sites: tuple[str, ...],
              do: Callable[[Any, str, Recipe, tuple[str, str]], Any]) -> tuple[list, dict]:
        """`do` for each site in a fresh context -> (results, storage state). Raises ValueError for a page
        that does not come."""
        from playwright.sync_api import Error

        context, found = browser.new_context(storage_state=state), []
        try:
            context.set_default_timeout(self.timeout_s * 1000)
            page = context.new_page()
            for site in sites:
                base, recipe, account = self.bases[site], RECIPES[site], self.accounts[site]
                try:
                    found.append(do(page, base, recipe, account))
                except Error as error:
                    said = error.message.split("\n")[0].replace(account[1], "***")[:200]
                    raise ValueError(f"{site} at {base}: {said}; no usable login form at "
                                     f"{recipe.path or '/'}, or the site does not answer") from None
            return found, context.storage_state()
        finally:
            context.close()


def read_state(path: Path) -> dict | None:
    """None when there is none, or a cookie is about to run out. Cookies given for minutes are no login; those
    without a date (-1) do not say."""
    try:
        saved, state = path.stat().st_mtime, json.loads(path.read_text(encoding="utf-8"))
        ends = [cookie["expires"] for cookie in state["cookies"]]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return None if any(saved + 2 * EARLY_S < end < time.time() + EARLY_S for end in ends) else state


# ---- what evaluators ask

@dataclass
class Magento:
    """A real shop for `evaluators.shop_helpers`, by its REST interface. Every trouble raises NotSupported."""
    base: str
    account: tuple[str, str]  # of shopping_admin
    timeout_s: float = 30.0

    def latest_order_url(self) -> str | None:
        """None where there is no order."""
        order = {"searchCriteria[sortOrders][0][field]": "created_at",
                 "searchCriteria[sortOrders][0][direction]": "DESC", "searchCriteria[pageSize]": "1"}
        items = self.read(f"orders?{urlencode(order)}",
                          lambda answer: [int(item["increment_id"]) for item in answer["items"] or []])
        return f"{self.base}/sales/order/view/order_id/{items[0]}/" if items else None

    def latest_review(self, sku: str) -> dict[str, str]:
        """author, rating (percent), text, title; {} where there is none."""
        return self.read(f"products/{quote(sku, safe='')}/reviews", lambda answer: {
            "author": answer[-1]["nickname"], "rating": str(answer[-1]["ratings"][0]["percent"]),
            "text": answer[-1]["detail"], "title": answer[-1]["title"]} if answer else {})

    def read(self, path: str, take: Callable[[Any], Any]) -> Any:
        account = json.dumps(dict(zip(("username", "password"), self.account))).encode()
        try:
            token = self.ask("default/V1/integration/admin/token", account)
            return take(self.ask(f"V1/{path}", Authorization=f"Bearer {token}"))
        except (*NO_ANSWER, ValueError, LookupError, TypeError) as error:
            raise NotSupported(f"the shop's interface at {self.base} does not answer as expected "
                               f"({type(error).__name__} {str(error)[:80]})") from None

    def ask(self, path: str, data: bytes | None = None, **headers: str) -> Any:
        headers["Content-Type"] = "application/json"
        status, said = ask(f"{self.base}/rest/{path}", self.timeout_s, data, headers)
        if status != 200:
            raise ValueError(f"HTTP {status}")
        return json.loads(said)
