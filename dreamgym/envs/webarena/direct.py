"""The browserless back end: the own sites' HTML in process, without sockets, JavaScript and CSS.

It follows Chromium as far as the own sites' pages go (tests/test_webarena_backends.py compares them). Left
out: keys other than Enter and Escape (env.OWN_KEYS), hovering, and what no own page has (frames, files,
fragments).
"""
from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlencode, urljoin, urlsplit, urlunsplit

import lxml.html
from lxml import etree
from lxml.cssselect import CSSSelector

from dreamgym.envs.webarena.ax_tree_sources import QUOTED, from_html, option_label, value_of
from dreamgym.envs.webarena.page import Addresses, Node, Page
from dreamgym.envs.webarena.tabs import Cookies, NotSupported, Tabs

Element = etree._Element
_LOCATOR = re.compile(rf"document\.querySelector\(({QUOTED})\)\.(outerText|value|checked);?\s*")
MAX_REDIRECTS = 20
CONTROLS = ("input", "select", "textarea", "button")
parsed = lru_cache(1024)(from_html)  # (title, nodes) of a page: shared, and never changed


class InProcessBrowser(Tabs):
    """One episode at a time on a SiteDatabase, which several browsers may share."""

    def __init__(self, sites: Any):
        super().__init__(Addresses(sites.bases))
        self.sites, self.jar = sites, {}

    def open(self, urls: Sequence[str], cookies: Cookies = {}) -> Page:  # noqa: B006
        """Raises as `start`."""
        self.jar = {site: dict(cookies.get(site, {})) for site in self.sites.bases}
        return self.start(urls)

    def new_tab(self) -> Tab:
        return Tab(self)

    def fetch(self, method: str, url: str, form: Sequence[tuple[str, str]] = ()) -> tuple[str, str, str]:
        """-> (address after redirects, the last method, HTML). Raises ValueError for another host."""
        for _ in range(MAX_REDIRECTS):
            site, parts = self.addresses.site(url), urlsplit(url)
            if not site:
                raise ValueError(f"{url} is outside these sites")
            jar = self.jar[site]
            answer = self.sites.handle(site, method, parts.path or "/", parts.query, form, jar)
            self.jar[site] = {name: value for name, value in {**jar, **answer.set_cookies}.items() if value}
            if not 300 <= answer.status < 400:
                return url, method, answer.body
            url, method, form = canonical(urljoin(url, answer.headers["Location"])), "GET", ()
        raise ValueError(f"{url}: redirects without end")


class Tab:
    """`entries` is the history: (address, whether it is the answer to a posted form). `held` is what controls
    hold where it is not what the page says: a text, whether a box is checked, or the index of an option."""

    def __init__(self, browser: InProcessBrowser):
        self.browser, self.at, self.window = browser, -1, 0
        self.entries: list[tuple[str, bool]] = []
        self.html, self.title, self.nodes, self.held = "", "", [], {}
        self.focus: Element | None = None

    @property
    def url(self) -> str:
        return self.entries[self.at][0] if self.entries else ""

    def read(self) -> list[Node]:
        return [changed(node, self.held[node.ref]) if node.ref in self.held else node for node in self.nodes]

    def close(self) -> None:
        """Nothing to close."""

    # ---- pages and history

    def goto(self, url: str) -> None:
        """The same address again takes the place of its entry."""
        url = canonical(url)
        self.load("GET", url, is_same=url == self.url)

    def move(self, step: int) -> None:
        target = self.at + step
        while 0 <= target < len(self.entries) and self.entries[target][1]:
            target += step
        if 0 <= target < len(self.entries):
            self.at = target
            final, _, body = self.browser.fetch("GET", self.url)
            self.entries[target] = final, False
            self.show(body)

    def load(self, method: str, url: str, form: Sequence[tuple[str, str]] = (),
             is_same: bool = False) -> None:
        final, last_method, body = self.browser.fetch(method, url, form)
        after = self.entries[self.at + 1:] if is_same else []
        self.at += not is_same
        self.entries[self.at:] = [(final, last_method == "POST"), *after]
        self.show(body)

    def show(self, body: str) -> None:
        self.html, (self.title, self.nodes) = body, parsed(body)
        self.held, self.focus, self.window = {}, None, 0

    # ---- actions

    def click(self, node: Node) -> None:
        around = (node.ref, *node.ref.iterancestors())
        element = next((e for e in around if e.tag in CONTROLS or e.get("href")), None)
        if element is None:
            return
        self.focus = element
        if element.tag in ("a", "button"):
            self.press("Enter")
        elif element.get("type") == "checkbox":
            self.held[element] = not self.held.get(element, "checked" in element.attrib)

    def hover(self, node: Node) -> None:
        """Nothing on the own sites hangs on it."""

    def press(self, key: str) -> None:
        """Enter follows a link, sends a form or begins a line, Escape empties a search field."""
        element, tag = self.focus, "" if self.focus is None else self.focus.tag
        if key.lower() == "escape" and tag == "input" and element.get("type") == "search":
            self.held[element] = ""
        elif key.lower() != "enter":
            return
        elif tag == "a":
            self.goto(urljoin(self.url, element.get("href").strip()))
        elif tag == "textarea":
            self.held[element] = value_of(element, self.held.get(element)) + "\n"
        elif tag in ("button", "input"):
            self.submit(next(element.iterancestors("form"), None))

    def fill(self, node: Node, text: str) -> bool:
        self.focus = node.ref
        self.held[node.ref] = text
        return True

    def options(self, node: Node) -> list[str]:
        return [option_label(option) for option in node.ref.iter("option")]

    def choose(self, node: Node, index: int) -> None:
        self.focus = node.ref
        self.held[node.ref] = index

    def submit(self, form: Element | None) -> None:
        if form is None:
            return
        url = urljoin(self.url, form.get("action", ""))
        if form.get("method", "get").lower() == "post":
            self.load("POST", canonical(url), self.values(form))
        else:  # a form writes two characters not as Python does
            query = urlencode(self.values(form)).replace("%2A", "*").replace("~", "%7E")
            self.load("GET", canonical(urlunsplit(urlsplit(url)._replace(query=query, fragment=""))))

    def values(self, form: Element) -> list[tuple[str, str]]:
        pairs = []
        for element in form.iter("input", "select", "textarea"):
            name, held = element.get("name"), self.held.get(element)
            if element.get("type") == "checkbox":
                if "checked" in element.attrib if held is None else held:
                    pairs.append((name, element.get("value", "on")))
            else:
                pairs.append((name, re.sub(r"\r?\n", "\r\n", value_of(element, held))))
        return pairs

    # ---- for evaluators

    def evaluate(self, js: str) -> str | None:
        return query(self.html, js, {e.getroottree().getpath(e): value for e, value in self.held.items()})


def changed(node: Node, held: Any) -> Node:
    """The node of a control that holds something else."""
    if isinstance(held, bool):
        return replace(node, checked=held)
    if isinstance(held, int):
        return replace(node, value=node.options[held])
    return replace(node, value="•" * len(held) if node.ref.get("type") == "password" else held)


def canonical(url: str) -> str:
    """An address as Chromium writes it: `/` for no path; no steps `.` and `..`; blanks, quotes and letters
    beyond ASCII escaped."""
    parts, path, last = urlsplit(url), [], ""
    for step in re.split(r"[/\\]", parts.path)[1:]:
        last = step.lower().replace("%2e", ".")
        if last == "..":
            path = path[:-1]
        elif last != ".":
            path.append(step)
    path = "/" + "/".join(path + [""] * (last in (".", "..")))
    return urlunsplit(parts._replace(netloc=parts.netloc.lower(),
                                     path=quote(path, safe="/%:@!$&'()*+,;=~[]"),
                                     query=quote(parts.query, safe="/%:@!$&()*+,;=~?|[]{}^`\\")))


# ---- locators of the own sites' tasks

def query(html: str, js: str, held: Mapping[str, Any] = {}) -> str | None:  # noqa: B006
    """document.querySelector('.row a').outerText, .value or .checked; None where it would throw. `held`:
    Tab.held, by paths. Raises NotSupported."""
    match = _LOCATOR.fullmatch(js)
    if not match:
        raise NotSupported(f"locator {js!r:.80} is not understood without a browser")
    root = lxml.html.document_fromstring(html or "<html></html>")  # an empty tab
    element = next(iter(_selector(ast.literal_eval(match[1]))(root)), None)
    if element is None:
        return None
    now = held.get(element.getroottree().getpath(element))
    if match[2] == "outerText":
        return inner_text(element)
    if match[2] == "value":
        return value_of(element, now)
    return str("checked" in element.attrib if now is None else now).lower()


@lru_cache(maxsize=2000)
def _selector(css: str) -> CSSSelector:
    try:
        # CSS closes what is open at the end: [name="x"
        return CSSSelector(css + "]" * (css.count("[") - css.count("]")), translator="html")
    except Exception as error:  # cssselect and lxml each have several
        raise NotSupported(f"selector {css!r:.80} is not understood without a browser "
                           f"({str(error)[:80]})") from None


def inner_text(element: Element) -> str:
    """The text on one line, blanks between elements. Where a browser breaks lines decides no own task."""
    return " ".join(" ".join(element.xpath(".//text()[not(ancestor::textarea)]")).split())
