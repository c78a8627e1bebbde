"""The browserless back end: the own sites' HTML in process, with what a browser does around it. No sockets, no JavaScript, no CSS.

Cookies of each site, redirects, forms with all current values and the browser's own checks of them, links, tabs and the history of each follow Chromium
(`tests/test_webarena_backends.py` walks both and finds no difference). Left out on purpose: keys other than Enter and Escape, hovering, frames, files: nothing happens.

    browser = InProcessBrowser(world)
    screen = browser.open([f"{world.bases['shopping']}/"], {"shopping": world.login("shopping")})
    screen = browser.act(parse("type [2] [blue speaker]"))
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any
from urllib.parse import quote, urlencode, urljoin, urlsplit, urlunsplit

from lxml import etree

from dreamgym.envs.webarena.ax_tree_sources import from_html, parse_html
from dreamgym.envs.webarena.locators import query
from dreamgym.envs.webarena.page import LINES, Addresses, Node, Screen
from dreamgym.envs.webarena.tabs import Cookies, Tabs, incomplete

Element = etree._Element
MAX_REDIRECTS, PARSED_PAGES = 20, 1024
_documents = count()
BUTTONS = ("submit", "image", "button", "reset")
FREE_TEXT = ("text", "search", "password", "email", "url", "tel", "number")
_EMAIL = re.compile(r"[\w.!#$%&'*+/=?^`{|}~-]+@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)*")


class InProcessBrowser(Tabs):
    """One episode at a time on a world's sites. Several browsers on one world share its database, as several people would."""

    def __init__(self, world: Any, size: int = LINES):
        super().__init__(Addresses(world.bases), size)
        self.world, self.jar = world, {}

    def open(self, urls: Sequence[str], cookies: Cookies = {}) -> Screen:  # noqa: B006
        """A new episode. Raises ValueError for a url that is on none of the sites."""
        self.jar = {site: dict(cookies.get(site, {})) for site in self.world.bases}
        return self.start(urls)

    def page(self, url: str) -> InProcessPage:
        """A fresh page with this episode's cookies, which no tab sees. Raises ValueError for a url that is on none of the sites."""
        final, _, body = self.fetch("GET", self.addresses.full(url))
        return InProcessPage(final, body)

    def close(self) -> None:
        self.tabs = []

    def _tab(self) -> Tab:
        return Tab(self)

    def fetch(self, method: str, url: str, form: list[tuple[str, str]] | None = None) -> tuple[str, str, str]:
        """-> (address after redirects, method of the last request, HTML)."""
        for _ in range(MAX_REDIRECTS):
            site, parts = self.addresses.site(url), urlsplit(url)
            if not site:
                raise ValueError(self.outside(url))
            fields: dict[str, list[str]] = {}
            for name, value in form or ():
                fields.setdefault(name, []).append(value)
            answer = self.world.handle(site, method, parts.path or "/", parts.query, fields, self.jar[site])
            for name, value in answer.set_cookies.items():
                if value:
                    self.jar[site][name] = value
                else:
                    self.jar[site].pop(name, None)
            if not 300 <= answer.status < 400:
                return url, method, answer.body
            url = canonical(urljoin(url, answer.headers["Location"]))
            method, form = (method, form) if answer.status in (307, 308) else ("GET", None)
        raise ValueError(f"{url}: redirects without end")


@dataclass
class Entry:
    """One place in a tab's history. Entries with one `document` number are places in the same document."""
    url: str
    document: int
    posted: bool = False                         # the answer to a posted form, which a browser does not show again


class Tab:
    def __init__(self, browser: InProcessBrowser):
        self.browser, self.entries, self.at, self.window = browser, [], -1, 0
        self.title, self.root, self.nodes, self.mine = "", None, [], False
        self.focus: Element | None = None

    @property
    def url(self) -> str:
        return self.entries[self.at].url if self.entries else ""

    def read(self) -> list[Node]:
        return self.nodes

    def close(self) -> None:
        self.root = None

    # ---- pages and history

    def goto(self, url: str) -> str:
        """Opens an address, as typing it or following a link does: the same one again takes the place of its entry, a fragment only moves on the page."""
        url, here = canonical(url), self.url
        if here and "#" in url and url.split("#")[0] == here.split("#")[0]:
            self._enter(Entry(url, self.entries[self.at].document), replace=url == here)
            return ""
        return self._load("GET", url, replace=url == here)

    def move(self, step: int) -> bool:
        target = self.at + step
        while 0 <= target < len(self.entries) and self.entries[target].posted:
            target += step
        if not 0 <= target < len(self.entries):
            return False
        same, self.at = self.entries[target].document == self.entries[self.at].document, target
        if not same:
            entry = self.entries[target]
            entry.url, _, body = self.browser.fetch("GET", entry.url)
            self._show(body)
        return True

    def _load(self, method: str, url: str, form: list[tuple[str, str]] | None = None, replace: bool = False) -> str:
        try:
            final, last_method, body = self.browser.fetch(method, url, form)
        except ValueError as error:
            return str(error)
        self._enter(Entry(final, next(_documents), last_method == "POST"), replace)
        self._show(body)
        return ""

    def _enter(self, entry: Entry, replace: bool) -> None:
        self.entries[self.at + (not replace):] = [entry] + (self.entries[self.at + 1:] if replace else [])
        self.at += not replace

    def _show(self, body: str) -> None:
        self.root, self.title, self.nodes = parsed(body)
        self.mine, self.focus, self.window = False, None, 0

    def _own(self, element: Element) -> Element:
        """The element in a tree of this tab's own, that may be changed: parsed pages are shared."""
        if self.mine:
            return element
        copy = deepcopy(self.root)
        twin = dict(zip(self.root.iter(), copy.iter()))
        self.root, self.focus, self.mine = copy, twin.get(self.focus), True
        return twin[element]

    def _changed(self) -> str:
        self.title, self.nodes = from_html(self.root)
        return ""

    # ---- actions

    def click(self, node: Node) -> str:
        element = next((e for e in (node.ref, *node.ref.iterancestors()) if e.tag in ("button", "input", "select", "textarea", "label") or e.get("href")), None)
        if element is not None and element.tag == "label":
            element = labelled(element)
        if element is None or element.get("disabled") is not None:
            return ""
        if element.tag == "a":
            return self._follow(element)
        self.focus = element
        kind = input_type(element)
        if kind in ("submit", "image"):
            return self._submit(element, owner(element))
        if kind not in ("checkbox", "radio"):
            return ""
        element = self._own(element)
        for other in group(element) if kind == "radio" else [element]:
            flip(other, "checked", other is element and (kind == "radio" or element.get("checked") is None))
        return self._changed()

    def hover(self, node: Node) -> str:
        return ""

    def press(self, key: str) -> str:
        """Enter follows the link, sends the form, or begins a line of the field that has the focus; Escape empties a search field."""
        element = self.focus
        if element is not None and key.lower() == "escape" and input_type(element) == "search":
            return self.fill(Node("searchbox", ref=element), "")
        if element is None or key.lower() != "enter":
            return ""
        if element.tag == "a":
            return self._follow(element)
        if element.tag == "textarea":
            element = self._own(element)
            element.text = (element.text or "") + "\n"
            return self._changed()
        if input_type(element) in BUTTONS:
            return self.click(Node("button", ref=element))
        form = owner(element)
        if form is None or element.tag == "select":
            return ""
        button = next((e for e in controls(form) if input_type(e) in ("submit", "image")), None)
        if button is None and sum(input_type(e) in FREE_TEXT for e in controls(form)) > 1 or button is not None and button.get("disabled") is not None:
            return ""
        return self._submit(button, form)

    def fill(self, node: Node, text: str) -> str:
        if node.ref.get("disabled") is not None or node.ref.get("readonly") is not None:
            return f"'{node.name}' cannot be changed"
        kind = input_type(node.ref)
        if kind == "number" and text and not is_number(text):
            return f"'{node.name}' takes a number"
        self.focus = element = self._own(node.ref)
        if limit := element.get("maxlength"):
            text = text[:int(limit)]
        if kind == "textarea":
            element.text = text
        else:
            element.set("value", text.strip() if kind in ("email", "url") else text)
        return self._changed()

    def options(self, node: Node) -> list[str]:
        return [option_label(option) for option in node.ref.iter("option")]

    def choose(self, node: Node, index: int) -> str:
        if node.ref.get("disabled") is not None:
            return f"'{node.name}' cannot be changed"
        self.focus = element = self._own(node.ref)
        for i, option in enumerate(element.iter("option")):
            flip(option, "selected", i == index)
        return self._changed()

    def _follow(self, link: Element) -> str:
        url = urljoin(self.url, link.get("href").strip())
        if note := self.browser.outside(url):
            return note
        self.focus = link
        return self._target(link.get("target")).goto(url)

    def _target(self, name: str | None) -> Tab:
        if not name or name.lower() in ("_self", "_top", "_parent"):
            return self
        self.browser.opened.append(Tab(self.browser))
        return self.browser.opened[-1]

    def _submit(self, button: Element | None, form: Element | None) -> str:
        if form is None:
            return ""

        def given(name: str, default: str = "") -> str:
            over = button.get(f"form{name}") if button is not None else None
            return over if over is not None else form.get(name) or default

        checked = form.get("novalidate") is None and (button is None or button.get("formnovalidate") is None)
        if checked and (wrong := next((e for e in controls(form) if not valid(e)), None)) is not None:
            return incomplete(self.nodes, wrong)
        url = urljoin(self.url, given("action", self.url).strip())
        if note := self.browser.outside(url):
            return note
        tab, pairs = self._target(given("target")), values(form, button)
        if given("method", "get").lower() == "post":
            return tab._load("POST", canonical(url), pairs)
        return tab._load("GET", canonical(urlunsplit(urlsplit(url)._replace(query=encoded(pairs), fragment=""))))


@lru_cache(PARSED_PAGES)
def parsed(body: str) -> tuple[Element | None, str, list[Node]]:
    """(root, title, nodes) of a page; they are shared, and never changed."""
    root = parse_html(body)
    return root, *from_html(root)


def canonical(url: str) -> str:
    """An address as Chromium writes it: `/` for no path, blanks, quotes and letters beyond ASCII escaped."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.lower(), path=quote(parts.path, safe="/%:@!$&'()*+,;=~|[]") or "/",
                                     query=quote(parts.query, safe="/%:@!$&()*+,;=~?|[]{}^`\\")))


def encoded(pairs: list[tuple[str, str]]) -> str:
    """A query as forms write it, which differs from Python's in two characters."""
    return urlencode(pairs).replace("%2A", "*").replace("~", "%7E")


# ---- forms ---------------------------------------------------------------------------------------------------------------------------------------

def input_type(element: Element) -> str:
    """What kind of control: the type of an input or button, else the tag."""
    if element.tag == "button":
        kind = (element.get("type") or "submit").lower()
        return kind if kind in BUTTONS else "submit"
    return (element.get("type") or "text").lower() if element.tag == "input" else element.tag


def owner(element: Element) -> Element | None:
    """The form a control belongs to."""
    if name := element.get("form"):
        return next((form for form in element.getroottree().iter("form") if form.get("id") == name), None)
    return next(element.iterancestors("form"), None)


def controls(form: Element) -> list[Element]:
    """The controls of a form, in document order."""
    return [e for e in form.getroottree().iter("input", "select", "textarea", "button") if owner(e) is form]


def group(radio: Element) -> list[Element]:
    """The radio buttons of which one is chosen."""
    form = owner(radio)
    return [e for e in radio.getroottree().iter("input") if input_type(e) == "radio" and e.get("name") == radio.get("name") and owner(e) is form]


def labelled(label: Element) -> Element | None:
    """The control of a label."""
    if name := label.get("for"):
        return next((e for e in label.getroottree().iter() if e.get("id") == name), None)
    return next(label.iter("input", "select", "textarea", "button"), None)


def flip(element: Element, attribute: str, on: bool) -> None:
    if on:
        element.set(attribute, "")
    else:
        element.attrib.pop(attribute, None)


def option_label(option: Element) -> str:
    return option.get("label") or " ".join("".join(option.itertext()).split())


def value_of(element: Element) -> str:
    """What a control holds; of a select without a chosen option the first one, as browsers do."""
    if element.tag == "textarea":
        return (element.text or "").removeprefix("\n")
    if element.tag != "select":
        return element.get("value") or ""
    options = list(element.iter("option"))
    chosen = next((o for o in reversed(options) if o.get("selected") is not None), options[0] if options else None)
    return "" if chosen is None else chosen.get("value", option_label(chosen))


def values(form: Element, button: Element | None) -> list[tuple[str, str]]:
    """The (name, value) pairs that a form sends."""
    pairs = []
    for element in controls(form):
        kind, name = input_type(element), element.get("name")
        if not name or element.get("disabled") is not None or (kind in BUTTONS and element is not button):
            continue
        if kind not in ("checkbox", "radio"):
            pairs.append((name, re.sub(r"\r?\n", "\r\n", value_of(element))))
        elif element.get("checked") is not None:
            pairs.append((name, element.get("value", "on")))
    return pairs


def is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d*\.?\d+([eE][+-]?\d+)?", text) is not None


def valid(element: Element) -> bool:
    """Whether a browser would send this field: required, email, numbers between min and max in whole steps, pattern."""
    kind, text = input_type(element), value_of(element)
    if element.get("disabled") is not None or element.get("readonly") is not None or kind in (*BUTTONS, "hidden"):
        return True
    if kind == "checkbox":
        return element.get("required") is None or element.get("checked") is not None
    if kind == "radio":
        return all(e.get("required") is None for e in group(element)) or any(e.get("checked") is not None for e in group(element))
    if not text:
        return element.get("required") is None
    if kind == "number":
        number, low, high, step = float(text), element.get("min"), element.get("max"), element.get("step") or "1"
        steps = 0.0 if step == "any" else (number - float(low or 0)) / float(step)
        return (low is None or number >= float(low)) and (high is None or number <= float(high)) and abs(steps - round(steps)) < 1e-6
    if kind == "email" and not _EMAIL.fullmatch(text):
        return False
    return (pattern := element.get("pattern")) is None or kind not in FREE_TEXT or re.fullmatch(pattern, text) is not None


# ---- evaluation ----------------------------------------------------------------------------------------------------------------------------------

@dataclass
class InProcessPage:
    """A page for an evaluator."""
    url: str
    html: str

    def evaluate(self, js: str) -> str | None:
        """What a locator gives, None where it would throw or give null. Raises NotSupported for what only a browser understands."""
        return query(self.html, js)

    def close(self) -> None:
        """Nothing to close."""
