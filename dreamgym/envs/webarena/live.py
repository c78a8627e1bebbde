"""A user's own WebArena: its addresses, whether they answer, logins, and the full reset.

    instance = read_instance(os.environ)         # None: no address is set, the own sites are played
    check_answers(instance.bases)
    full_reset(instance.reset_url)
    logins = Logins(instance.bases, read_accounts(os.environ), Path("out/logins"))
    state = logins.state(browser, task.sites)    # for Playwright's new_context(storage_state=...): logged in

Addresses are `$WA_SHOPPING`, `$WA_SHOPPING_ADMIN`, ... (or WebArena's own unprefixed names), the reset
service is `$WA_FULL_RESET`, accounts are `$WA_SHOPPING_USERNAME` and `$WA_SHOPPING_PASSWORD` (default:
WebArena's public ones). Logins go through the sites' own forms, told apart by `RECIPES`, and are cached in
files that only their owner can read. What is wrong with the outside world raises LiveError; nothing is left
open. Starting the sites is the user's.
"""
from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dreamgym.envs.webarena.locators import NotSupported
from dreamgym.envs.webarena.page import SITES

ACCOUNTS = {  # those that WebArena's images come with, as its documentation gives them
    "shopping": ("emma.lopez@gmail.com", "Password.123"), "shopping_admin": ("admin", "admin1234"),
    "reddit": ("MarvelsGrantMan136", "test1234"), "gitlab": ("byteblaze", "hello1234"),
}
# what the reset service says when it is done, and the status that it answers with while it works
READY, RUNNING = "Ready for duty!", 418
TRUST_S = 600.0  # a login that was seen to hold is not looked at again for so long
EARLY_S = 300.0                                  # a cookie that has less left counts as gone
SCHEMA = 1


class LiveError(ValueError):
    """The user's sites are not as they have to be: an address does not answer, a login or a reset fails.
    Never holds a password."""


# ---- what the user gives -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Instance:
    """One set of sites: base addresses without a last slash, and the base of its reset service ("": it has
    none)."""
    bases: dict[str, str]
    reset_url: str = ""


def _variable(environ: Mapping[str, str], name: str) -> str:
    """`$WA_name`, else `$name`, checked. Raises ValueError without repeating what may be a password."""
    key = f"WA_{name}" if environ.get(f"WA_{name}") else name
    if not isinstance(value := environ.get(key) or "", str):
        raise ValueError(f"{key}: is no text, expected an address")
    if not value:
        return ""
    parts = urllib.parse.urlsplit(value)
    more = parts.username or parts.password or parts.query or parts.fragment or " " in value
    if parts.scheme not in ("http", "https") or not parts.hostname or more:
        raise ValueError(f"{key}: found scheme {parts.scheme!r}, host {parts.hostname!r}; expected "
                         f"http(s)://HOST[:PORT][/PATH] without user or query")
    return value.rstrip("/")


def addresses(environ: Mapping[str, str], sites: Iterable[str] = SITES) -> dict[str, str] | None:
    """Base address of each site that is set; None when none is. Raises ValueError naming the variables of
    `sites` (those that the tasks need) that lack."""
    bases = {site: value for site in SITES if (value := _variable(environ, site.upper()))}
    if bases and (missing := [f"WA_{site.upper()}" for site in SITES if site in set(sites) - set(bases)]):
        raise ValueError(f"{', '.join(missing)}: not set, but the tasks need "
                         f"{'it' if len(missing) == 1 else 'them'}; set are "
                         f"{', '.join(bases)} (unset all to play the own sites)")
    return bases or None


def read_instance(environ: Mapping[str, str], sites: Iterable[str] = SITES) -> Instance | None:
    """The instance that environment variables name; None when they name none. Raises ValueError."""
    bases = addresses(environ, sites)
    return Instance(bases, _variable(environ, "FULL_RESET").removesuffix("/reset")) if bases else None


def read_instances(path: Path | str, sites: Iterable[str] = SITES) -> list[Instance]:
    """Several instances, one for each worker: a file with one JSON object per line that maps the variables'
    names to addresses. Raises ValueError naming file and line; no address may stand in two of them, for their
    episodes would change each other's sites."""
    instances: list[Instance] = []
    sites = tuple(sites)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected one JSON object of addresses per "
                         "line") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            instance = read_instance(record, sites) if isinstance(record, dict) else None
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        if instance is None:
            raise ValueError(f'{path}: line {number}: names no address; expected '
                             f'{{"WA_SHOPPING": "http://...", ...}}')
        if twice := {base for other in instances
                     for base in other.bases.values()} & set(instance.bases.values()):
            raise ValueError(f"{path}: line {number}: {min(twice)} stands in an earlier line, too; each "
                             f"instance needs sites of its own")
        instances.append(instance)
    if not instances:
        raise ValueError(f"{path}: holds no instance; expected one JSON object of addresses per line")
    return instances


def read_accounts(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """(user, password) by site: `$WA_<SITE>_USERNAME` and `$WA_<SITE>_PASSWORD`, both or neither. Raises
    ValueError."""
    accounts = dict(ACCOUNTS)
    for site in ACCOUNTS:
        keys = [f"WA_{site.upper()}_{name}" for name in ("USERNAME", "PASSWORD")]
        given = [environ.get(key, "") for key in keys]
        if any(given) and not all(given):
            raise ValueError(f"{keys[not given[1]]}: not set, but {keys[not given[0]]} is; set both or "
                             f"neither")
        accounts[site] = (given[0], given[1]) if all(given) else ACCOUNTS[site]
    return accounts


# ---- reaching it, resetting it -----------------------------------------------------------------------------

def _get(url: str, timeout_s: float) -> tuple[int, str]:
    """-> (status, body); an error status is an answer, too. Raises OSError or HTTPException where there is
    none."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return response.status, response.read(100_000).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(2_000).decode("utf-8", "replace")


def check_answers(bases: Mapping[str, str], timeout_s: float = 10.0) -> None:
    """Raises LiveError that lists every site without an answer, or with a server's error."""
    troubles = []
    for site, base in bases.items():
        try:
            status, _ = _get(base, timeout_s)
            trouble = f"HTTP {status}" if status >= 500 else ""
        except (OSError, http.client.HTTPException) as error:
            trouble = str(getattr(error, "reason", error)) or type(error).__name__
        troubles += [f"{site} at {base}: {trouble}"] if trouble else []
    if troubles:
        raise LiveError(f"{'; '.join(troubles)}. Start these sites, or correct the WA_ addresses")


def full_reset(reset_url: str, limit_s: float = 900.0, poll_s: float = 5.0,
               progress: Callable[[float, str], None] | None = None) -> float:
    """All sites back to their first state: GET /reset, then /status until it says so; a reset that is under
    way is waited for. Returns the seconds it took. progress(seconds so far, what the service says) is called
    at each look. Raises LiveError when it refuses, is lost, or takes longer than `limit_s`."""
    began = time.monotonic()
    try:
        status, said = _get(f"{reset_url}/reset", limit_s)
        if status not in (200, RUNNING):
            raise LiveError(f"{reset_url}/reset: HTTP {status} {said[:120]!r}, expected 200, or {RUNNING} "
                            f"while a reset is running")
        while (taken := time.monotonic() - began) <= limit_s:
            status, said = _get(f"{reset_url}/status", max(poll_s, 10.0))
            if progress:
                progress(taken, said.strip()[:80])
            if status == 200 and READY in said:
                return taken
            if status not in (200, RUNNING):
                raise LiveError(f"{reset_url}/status: HTTP {status} {said[:120]!r}, expected 200 and "
                                f"{READY!r} in the end")
            time.sleep(poll_s)
    except (OSError, http.client.HTTPException) as error:
        raise LiveError(f"{reset_url}: the reset service does not answer "
                        f"({getattr(error, 'reason', error)}); it is what $WA_FULL_RESET names") from None
    raise LiveError(f"{reset_url}: not ready {limit_s:.0f} seconds after the reset began, it says "
                    f"{said[:120]!r}")


# ---- logins ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Recipe:
    """How one logs in: the form's address below the site's base, the label of the field for the name, and the
    form's button. The password has the only password field of the form. Somebody is logged in when the site's
    first page has neither such a field nor a link to that address."""
    path: str
    user_label: str
    button: str


RECIPES = {
    "shopping": Recipe("/customer/account/login/", "Email", "Sign In"),
           "shopping_admin": Recipe("", "Username", "Sign in"),
    "reddit": Recipe("/login", "Username", "Log in"),
           "gitlab": Recipe("/users/sign_in", "Username or email", "Sign in"),
}
_FORM = "form:has(input[type=password]:visible)"


def log_in(page: Any, base: str, recipe: Recipe, account: tuple[str, str]) -> None:
    """Fills in and sends the login form on a Playwright page. Whether it worked is for `logged_in` to see.
    Raises Playwright's errors."""
    page.goto(base + recipe.path, wait_until="domcontentloaded")
    form = page.locator(_FORM).first
    form.get_by_label(recipe.user_label).first.fill(account[0])
    form.locator("input[type=password]").first.fill(account[1])
    with page.expect_navigation(wait_until="domcontentloaded"):
        form.get_by_role("button", name=recipe.button).first.click()


def logged_in(page: Any, base: str, recipe: Recipe) -> bool:
    """Whether the site's first page, opened now, is one for somebody who is logged in. Raises Playwright's
    errors."""
    answer = page.goto(f"{base}/", wait_until="domcontentloaded")
    path = urllib.parse.urlsplit(base).path + recipe.path
    links = f", a[href^='{path}']:visible, a[href^='{base + recipe.path}']:visible" if recipe.path else ""
    if answer is None or not answer.ok:
        return False
    return page.locator(f"input[type=password]:visible{links}").count() == 0


@dataclass
class Logins:
    """Logged-in browser states of one instance, one for each set of sites, kept in `folder` (mode 0700, files
    0600)."""
    bases: Mapping[str, str]
    accounts: Mapping[str, tuple[str, str]]
    folder: Path
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: RECIPES)
    timeout_s: float = 30.0                      # of one page
    # when a record of a login was last seen to hold
    seen: dict[tuple[str, ...], tuple[float, dict]] = field(default_factory=dict, init=False)

    def forget(self) -> None:
        """To be called after a reset: each state is looked at before it is used again."""
        self.seen.clear()

    def state(self, browser: Any, sites: Iterable[str]) -> dict:
        """The storage state for `new_context` of a Playwright browser, in which the accounts of `sites` are
        logged in: the cached one if it still holds, else one from new logins. Raises LiveError when a login
        fails or does not last; ValueError for a site without an address."""
        sites = tuple(sorted(set(sites) & set(self.recipes)))
        if missing := [site for site in sites if site not in self.bases]:
            raise ValueError(f"no address of {', '.join(missing)}; expected "
                             f"{', '.join(f'WA_{site.upper()}' for site in missing)}")
        since, record = self.seen.get(sites, (0.0, {}))
        if not record or time.monotonic() - since > TRUST_S or _expired(record):
            record = self._cached(sites)
            if record is None or _expired(record) or self._logged_out(browser, record["state"], sites):
                record = self._renewed(browser, sites)
            self.seen[sites] = (time.monotonic(), record)
        return record["state"]

    def _renewed(self, browser: Any, sites: tuple[str, ...]) -> dict:
        def do(page: Any, site: str) -> None:
            log_in(page, self.bases[site], self.recipes[site], self.accounts[site])

        state = self._visit(browser, None, sites, do)
        if out := self._logged_out(browser, state, sites):
            hosts = [urllib.parse.urlsplit(self.bases[site]).hostname for site in sites]
            shared = (" The sites share a host name, and cookies are not kept apart by port: give them "
                      "different names." if len(set(hosts)) < len(hosts) else "")
            places = ", ".join(f"{site} at {self.bases[site]}" for site in out)
            names = ", ".join(f"$WA_{site.upper()}_USERNAME and _PASSWORD" for site in out)
            raise LiveError(f"login failed: after it, {places} still asks for one. Check {names}.{shared}")
        record = {"schema": SCHEMA, "saved": time.time(), "state": state}
        self._keep(self._path(sites), record)
        return record

    def _logged_out(self, browser: Any, state: dict, sites: tuple[str, ...]) -> list[str]:
        """Looks at all sites after all logins: one may have ended another."""
        out: list[str] = []

        def do(page: Any, site: str) -> None:
            if not logged_in(page, self.bases[site], self.recipes[site]):
                out.append(site)

        self._visit(browser, state, sites, do)
        return out

    def _visit(self, browser: Any, state: dict | None, sites: tuple[str, ...],
               do: Callable[[Any, str], None]) -> dict:
        """Does something for each site on the page of a fresh context; returns the context's state. Raises
        LiveError for a page that does not come."""
        from playwright.sync_api import Error

        context = browser.new_context(storage_state=state)
        try:
            context.set_default_timeout(self.timeout_s * 1000)
            page = context.new_page()
            for site in sites:
                try:
                    do(page, site)
                except Error as error:
                    said = error.message.split("\n")[0]
                    secret = self.accounts[site][1]
                    raise LiveError(f"{site} at {self.bases[site]}: {said.replace(secret, '***')[:200]}; no "
                                    f"usable login form at {self.recipes[site].path or '/'}, or the site "
                                    "does not answer") from None
            return context.storage_state()
        finally:
            context.close()

    def _path(self, sites: tuple[str, ...]) -> Path:
        key = json.dumps([[site, self.bases[site], self.accounts[site][0]] for site in sites])
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        return self.folder / f"{'.'.join(sites) or 'none'}-{digest}.json"

    def _cached(self, sites: tuple[str, ...]) -> dict | None:
        """The kept record; None when there is none, or it cannot be read."""
        try:
            record = json.loads(self._path(sites).read_text(encoding="utf-8"))
            return record if record["schema"] == SCHEMA and isinstance(record["state"]["cookies"],
                                                                       list) and record["saved"] > 0 else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _keep(self, path: Path, record: dict) -> None:
        """Written beside and renamed: another worker may read it at any time."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w",
                       encoding="utf-8") as file:
            json.dump(record, file)
        part.replace(path)


def _expired(record: dict) -> bool:
    """Whether a cookie is about to run out. Those that were given for minutes (a message, a form's key) are
    no login; those without a date (-1) do not say."""
    ends = [cookie.get("expires", -1) for cookie in record["state"]["cookies"]]
    return any(record["saved"] + 2 * EARLY_S < end < time.time() + EARLY_S for end in ends)


# ---- what evaluators ask -----------------------------------------------------------------------------------

@dataclass
class Magento:
    """A real shop for `evaluators.shop_helpers`: its REST interface, asked with the back office's account.
    Every trouble raises NotSupported: a task that cannot be looked at is not judged."""
    base: str
    account: tuple[str, str]                     # of shopping_admin
    timeout_s: float = 30.0

    def latest_order_url(self) -> str | None:
        order = {"searchCriteria[sortOrders][0][field]": "created_at",
                 "searchCriteria[sortOrders][0][direction]": "DESC", "searchCriteria[pageSize]": "1"}
        items = self._ask(f"/rest/V1/orders?{urllib.parse.urlencode(order)}",
                          lambda answer: [int(item["increment_id"]) for item in answer["items"] or []])
        return f"{self.base}/sales/order/view/order_id/{items[0]}/" if items else None

    def latest_review(self, sku: str) -> dict[str, str]:
        def read(answer: list) -> dict[str, str]:
            if not answer:
                return {}
            last = answer[-1]
            return {"author": last["nickname"], "rating": str(last["ratings"][0]["percent"]),
                    "text": last["detail"], "title": last["title"]}

        return self._ask(f"/rest/V1/products/{urllib.parse.quote(sku, safe='')}/reviews", read)

    def _ask(self, path: str, read: Callable[[Any], Any]) -> Any:
        user, password = self.account
        try:
            token = self._json("/rest/default/V1/integration/admin/token",
                               {"username": user, "password": password}, {})
            return read(self._json(path, None, {"Authorization": f"Bearer {token}"}))
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise NotSupported(f"the shop's interface at {self.base} does not answer as expected "
                               f"({type(error).__name__} {str(error)[:80]})") from None

    def _json(self, path: str, body: dict | None, headers: dict) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data,
                                         {"Content-Type": "application/json", **headers})
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            return json.loads(response.read(4_000_000))
