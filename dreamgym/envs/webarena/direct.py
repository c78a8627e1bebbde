"""The browserless back end: the own sites' HTML in process, with what a browser does around it.
No sockets, no JavaScript, no CSS.

Cookies of each site, redirects, forms with all current values and the browser's own checks of them, links,
tabs and the history of each follow Chromium: `tests/test_webarena_backends.py` walks both and finds no
difference. Left out on purpose: keys other than Enter and Escape, hovering, frames, files: nothing happens.

    browser = InProcessBrowser(sites)
    screen = browser.open([f"{sites.bases['shopping']}/"], {"shopping": sites.login("shopping")})
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

from dreamgym.envs.webarena.ax_tree_sources import from_html, option_label, parse_html
from dreamgym.envs.webarena.locators import query
from dreamgym.envs.webarena.page import LINES, Addresses, Node, Screen
from dreamgym.envs.webarena.tabs import Cookies, Tabs, incomplete

Element = etree._Element
MAX_REDIRECTS, PARSED_PAGES = 20, 1024
_documents = count()
CONTROLS = ("input", "select", "textarea", "button")
SENDERS, BUTTONS = ("submit", "image"), ("submit", "image", "button", "reset")
FREE_TEXT = ("text", "search", "password", "email", "url", "tel", "number")
_EMAIL = re.compile(r"[\w.!#$%&'*+/=?^`{|}~-]+@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)*")
_NUMBER = re.compile(r"-?\d*\.?\d+([eE][+-]?\d+)?")


class InProcessBrowser(Tabs):
    """One episode at a time on a SiteDatabase. Several browsers share one database, as several people
    would."""

    def __init__(self, sites: Any, size: int = LINES):
        super().__init__(Addresses(sites.bases), size)
        self.sites, self.jar = sites, {}

    def open(self, urls: Sequence[str], cookies: Cookies = {}) -> Screen:  # noqa: B006
        """A new episode. Raises ValueError for a url that is on none of the sites."""
        self.jar = {site: dict(cookies.get(site, {})) for site in self.sites.bases}
        return self.start(urls)

    def page(self, url: str) -> InProcessPage:
        """A fresh page with this episode's cookies, which no tab sees.
        Raises ValueError for a url that is on none of the sites."""
        final, _, body = self.fetch("GET", self.addresses.full(url))
        return InProcessPage(final, body)

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
            jar = self.jar[site]
            answer = self.sites.handle(site, method, parts.path or "/", parts.query, fields, jar)
            self.jar[site] = {name: value for name, value in {**jar, **answer.set_cookies}.items() if value}
            if not 300 <= answer.status < 400:
                return url, method, answer.body
            url = canonical(urljoin(url, answer.headers["Location"]))
            if answer.status not in (307, 308):
                method, form = "GET", None
        raise ValueError(f"{url}: redirects without end")


@dataclass
class Entry:
    """One place in a tab's history. Entries with one `document` number are places in the same document."""
    url: str
    document: int
    posted: bool = False  # the answer to a posted form, which a browser does not show again


class Tab:
    def __init__(self, browser: InProcessBrowser):
        self.browser, self.entries, self.at, self.window = browser, [], -1, 0
        self.title, self.root, self.nodes, self.owned = "", None, [], False
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
        """Opens an address, as typing it or following a link does: the same one again takes the place of its
        entry, a fragment only moves on the page."""
        url, before = canonical(url), self.url
        if before and "#" in url and url.split("#")[0] == before.split("#")[0]:
            self._enter(Entry(url, self.entries[self.at].document), replace=url == before)
            return ""
        return self._load("GET", url, replace=url == before)

    def move(self, step: int) -> bool:
        target = self.at + step
        while 0 <= target < len(self.entries) and self.entries[target].posted:
            target += step
        if not 0 <= target < len(self.entries):
            return False
        entry, left = self.entries[target], self.entries[self.at]
        self.at = target
        if entry.document != left.document:
            entry.url, _, body = self.browser.fetch("GET", entry.url)
            self._show(body)
        return True

    def _load(self, method: str, url: str, form: list[tuple[str, str]] | None = None,
              replace: bool = False) -> str:
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
        self.owned, self.focus, self.window = False, None, 0

    def _own(self, element: Element) -> Element:
        """The element in a tree of this tab's own, that may be changed: parsed pages are shared."""
        if self.owned:
            return element
        copy = deepcopy(self.root)
        twin = dict(zip(self.root.iter(), copy.iter()))
        self.root, self.focus, self.owned = copy, twin.get(self.focus), True
        return twin[element]

    def _changed(self) -> str:
        self.title, self.nodes = from_html(self.root)
        return ""

    # ---- actions

    def click(self, node: Node) -> str:
        around = (node.ref, *node.ref.iterancestors())
        element = next((e for e in around if e.tag in (*CONTROLS, "label") or e.get("href")), None)
        if element is not None and element.tag == "label":
            element = labelled(element)
        if element is None or has(element, "disabled"):
            return ""
        if element.tag == "a":
            return self._follow(element)
        self.focus = element
        kind = input_type(element)
        if kind in SENDERS:
            return self._submit(element, owner(element))
        if kind not in ("checkbox", "radio"):
            return ""
        element = self._own(element)
        for other in group(element) if kind == "radio" else [element]:
            flip(other, "checked", other is element and (kind == "radio" or not has(element, "checked")))
        return self._changed()

    def hover(self, node: Node) -> str:
        return ""

    def press(self, key: str) -> str:
        """Enter follows the link, sends the form, or begins a line of the field that has the focus; Escape
        empties a search field."""
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
        button = next((e for e in controls(form) if input_type(e) in SENDERS), None)
        if button is None and sum(input_type(e) in FREE_TEXT for e in controls(form)) > 1:
            return ""
        return "" if button is not None and has(button, "disabled") else self._submit(button, form)

    def fill(self, node: Node, text: str) -> str:
        if has(node.ref, "disabled") or has(node.ref, "readonly"):
            return f"'{node.name}' cannot be changed"
        kind = input_type(node.ref)
        if kind == "number" and text and not _NUMBER.fullmatch(text):
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
        if has(node.ref, "disabled"):
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

        if not has(form, "novalidate") and (button is None or not has(button, "formnovalidate")):
            if (wrong := next((e for e in controls(form) if not valid(e)), None)) is not None:
                return incomplete(self.nodes, wrong)
        url = urljoin(self.url, given("action", self.url).strip())
        if note := self.browser.outside(url):
            return note
        tab, pairs = self._target(given("target")), values(form, button)
        if given("method", "get").lower() == "post":
            return tab._load("POST", canonical(url), pairs)
        # forms write two characters of a query not as Python does
        query = urlencode(pairs).replace("%2A", "*").replace("~", "%7E")
        return tab._load("GET", canonical(urlunsplit(urlsplit(url)._replace(query=query, fragment=""))))


@lru_cache(PARSED_PAGES)
def parsed(body: str) -> tuple[Element | None, str, list[Node]]:
    """(root, title, nodes) of a page; they are shared, and never changed."""
    root = parse_html(body)
    return root, *from_html(root)


def canonical(url: str) -> str:
    """An address as Chromium writes it: `/` for no path; blanks, quotes and letters beyond ASCII escaped."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.lower(),
                                     path=quote(parts.path, safe="/%:@!$&'()*+,;=~|[]") or "/",
                                     query=quote(parts.query, safe="/%:@!$&()*+,;=~?|[]{}^`\\")))


# ---- forms -------------------------------------------------------------------------------------------------

def has(element: Element, attribute: str) -> bool:
    return element.get(attribute) is not None


def flip(element: Element, attribute: str, on: bool) -> None:
    if on:
        element.set(attribute, "")
    else:
        element.attrib.pop(attribute, None)


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
    return [e for e in form.getroottree().iter(*CONTROLS) if owner(e) is form]


def group(radio: Element) -> list[Element]:
    """The radio buttons of which one is chosen."""
    form, name = owner(radio), radio.get("name")
    return [e for e in radio.getroottree().iter("input")
            if input_type(e) == "radio" and e.get("name") == name and owner(e) is form]


def labelled(label: Element) -> Element | None:
    """The control of a label."""
    if name := label.get("for"):
        return next((e for e in label.getroottree().iter() if e.get("id") == name), None)
    return next(label.iter(*CONTROLS), None)


def value_of(element: Element) -> str:
    """What a control holds; of a select without a chosen option the first one, as browsers do."""
    if element.tag == "textarea":
        return (element.text or "").removeprefix("\n")
    if element.tag != "select":
        return element.get("value") or ""
    options = list(element.iter("option"))
    chosen = [option for option in options if has(option, "selected")][-1:] or options[:1]
    return chosen[0].get("value", option_label(chosen[0])) if chosen else ""


def values(form: Element, button: Element | None) -> list[tuple[str, str]]:
    """The (name, value) pairs that a form sends."""
    pairs = []
    for element in controls(form):
        kind, name = input_type(element), element.get("name")
        if not name or has(element, "disabled") or (kind in BUTTONS and element is not button):
            continue
        if kind not in ("checkbox", "radio"):
            pairs.append((name, re.sub(r"\r?\n", "\r\n", value_of(element))))
        elif has(element, "checked"):
            pairs.append((name, element.get("value", "on")))
    return pairs


def valid(element: Element) -> bool:
    """Whether a browser would send this field: required, email, number between min and max in whole steps,
    pattern."""
    kind, text, required = input_type(element), value_of(element), has(element, "required")
    if has(element, "disabled") or has(element, "readonly") or kind in (*BUTTONS, "hidden"):
        return True
    if kind == "checkbox":
        return not required or has(element, "checked")
    if kind == "radio":
        return not any(has(e, "required") for e in group(element)) or any(has(e, "checked")
                                                                          for e in group(element))
    if not text:
        return not required
    if kind == "number":
        number, low, high, step = float(text), *(element.get(name) for name in ("min", "max", "step"))
        steps = 0.0 if step == "any" else (number - float(low or 0)) / float(step or 1)
        inside = (low is None or number >= float(low)) and (high is None or number <= float(high))
        return inside and abs(steps - round(steps)) < 1e-6
    if kind == "email" and not _EMAIL.fullmatch(text):
        return False
    pattern = element.get("pattern")
    return pattern is None or kind not in FREE_TEXT or re.fullmatch(pattern, text) is not None


# ---- evaluation --------------------------------------------------------------------------------------------

@dataclass
class InProcessPage:
    """A page for an evaluator."""
    url: str
    html: str

    def evaluate(self, js: str) -> str | None:
        """What a locator gives, None where it would throw or give null.
        Raises NotSupported for what only a browser understands."""
        return query(self.html, js)

    def close(self) -> None:
        """Nothing to close."""
