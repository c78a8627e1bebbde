"""The abstract state of a web page, from accessibility nodes (ax_tree_sources.py); and its reader:

    tabs: Home | *Cart                           only with several tabs; the star is the current one
    page: One Stop Mini
    url: shopping/cart                           no host: the site's name, then path and query
    searchbox 'Search' value 'blue'
    combobox 'Sort by' value 'Price' options 'Name' | 'Price'
    checkbox 'Featured' checked
    text '$19.99'
    window 1 of 3                                only for a page longer than a window

An element's number is that of its line in the state, counted from 1.
"""
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urljoin, urlsplit

LINES = 30                                       # elements of a window
STOPPED = "stopped"                              # the state after `stop`
MAX_CHARS = 120                                  # of a name
MAX_TEXT_CHARS = 1000                            # of a text: reviews and posts hold what tasks ask for
MAX_TAB_CHARS = 40                               # of a tab's title
MAX_OPTIONS = 24                                 # of a combobox
SITES = ("shopping", "shopping_admin", "reddit", "gitlab", "map", "wikipedia", "homepage")
FIELDS = frozenset("textbox searchbox combobox listbox checkbox radio switch spinbutton slider "
                   "date datetime time color".split())
CHECKED = frozenset(("checkbox", "radio", "switch", "menuitemcheckbox", "menuitemradio"))
TYPED = FIELDS - CHECKED                         # fields that take text, or an option's name
PASSIVE = frozenset(("text", "heading", "img"))  # nobody operates them; dropped where a neighbour says it

# A name holds apostrophes between letters only (Women's): any other quote ends it
NAME = r"'((?:[^']|(?<=\w)'(?=\w))*)'"
_LINE = re.compile(rf"(\w+) {NAME}(?: value {NAME})?( checked)?(?: options ('.+'))?")
_OPTION = re.compile(NAME)
_STATE = re.compile(r"(?:tabs: (.*)\n)?page: (.*)\nurl: (.*)((?:\n.*)*?)"
                    r"(?:\nwindow ([1-9]\d{0,8}) of ([1-9]\d{0,8}))?")
_LOOSE_QUOTE = re.compile(r"(?<!\w)'|'(?!\w)")


@dataclass(slots=True)
class Node:
    """`ref` is its source's handle on the element (ax_tree_sources.py)."""
    role: str
    name: str = ""
    value: str = ""  # of a field
    checked: bool | None = None
    options: tuple[str, ...] = ()  # of a combobox or listbox
    ref: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        value = f" value '{self.value}'" if self.value else ""
        options = " options '" + "' | '".join(self.options) + "'" if self.options else ""
        return f"{self.role} '{self.name}'{value}{' checked' if self.checked else ''}{options}"


@dataclass
class Page:
    """What a state text says."""
    title: str
    address: str
    lines: dict[int, Node]  # by number
    tabs: tuple[str, ...] = ()
    tab: int = 0
    window: int = 0  # scrolling position, from 0
    windows: int = 1

    @property
    def text(self) -> str:
        rows = []
        if len(self.tabs) > 1:
            rows.append("tabs: " + " | ".join("*" * (i == self.tab) + tab for i, tab in enumerate(self.tabs)))
        rows += [f"page: {self.title}", f"url: {self.address}", *map(str, self.lines.values())]
        if self.windows > 1:
            rows.append(f"window {self.window + 1} of {self.windows}")
        return "\n".join(rows)


def clean(text: str, most: int = MAX_CHARS) -> str:
    """One line of at most `most` characters, blanks collapsed, without control and private-use characters
    (icon fonts)."""
    if not text.isascii() or not text.isprintable():
        text = "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)
    text = " ".join(text.split())
    return text if len(text) <= most else text[:most - 1].rstrip() + "…"


def quotable(text: str, most: int = MAX_CHARS) -> str:
    """`clean`, and safe between single quotes: an apostrophe that no letters surround becomes ’."""
    text = clean(text, most)
    return _LOOSE_QUOTE.sub("’", text) if "'" in text else text


def _tab_label(name: str) -> str:
    """The end of a long name: what a tab is called follows its messages ('This tab has errors. .. Sales')."""
    name = " ".join(name.split())
    return name if len(name) <= MAX_CHARS else "…" + name[1 - MAX_CHARS:]


def _shown(nodes: list[Node]) -> list[Node]:
    """The nodes that say something new, with clean names."""
    shown: list[Node] = []
    for node in nodes:
        role = "text" if node.role == "StaticText" else node.role
        name = quotable(_tab_label(node.name) if role == "tab" else node.name,
                        MAX_TEXT_CHARS if role == "text" else MAX_CHARS)
        if role in PASSIVE:
            if name and not (shown and shown[-1].name == name):
                shown.append(Node(role, name, ref=node.ref))
        elif name or role in FIELDS or role == "button":
            _drop_label(shown, name)
            options = tuple(option for o in node.options if (option := quotable(o)))[:MAX_OPTIONS]
            value = quotable(node.value) if node.value else ""
            shown.append(Node(role, name, value, node.checked, options, node.ref))
    return shown


def _drop_label(shown: list[Node], name: str) -> None:
    """Drops the last passive nodes when they spell the name of the control that follows: 'Sort', 'by'
    before combobox 'Sort by'."""
    if not shown or shown[-1].role not in PASSIVE or not name.endswith(shown[-1].name):
        return
    label, start = "", len(shown)
    while start and shown[start - 1].role in PASSIVE and len(label) < len(name):
        start -= 1
        label = f"{shown[start].name} {label}".rstrip()
        if label == name:
            del shown[start:]
            return


def _numbered(nodes: Sequence[Node], tabs: Sequence[str]) -> dict[int, Node]:
    """By number: title and address stand above, and maybe the tabs."""
    return dict(enumerate(nodes, 4 if len(tabs) > 1 else 3))


def abstract(title: str, address: str, nodes: list[Node], tabs: Sequence[str] = (), tab: int = 0,
             window: int = 0, size: int = LINES) -> Page:
    """Nodes in document order -> the state. `tab` and `window` count from 0; a window past the last is the
    last."""
    shown = _shown(nodes)
    windows = max(1, -(-len(shown) // size))
    window = min(max(window, 0), windows - 1)
    titles = tuple(clean(t).replace("|", "/").lstrip("* ")[:MAX_TAB_CHARS].rstrip() or "untitled"
                   for t in (tabs if len(tabs) > 1 else ()))
    lines = _numbered(shown[window * size:(window + 1) * size], titles)
    return Page(clean(title) or "untitled", clean(address, 300), lines, titles, tab if titles else 0, window,
                windows)


# ---- reading a state

def read_line(line: str) -> Node | None:
    """`link 'Home'` -> Node; None for what is none."""
    match = _LINE.fullmatch(line)
    if not match:
        return None
    role, name, value, checked, options = match.groups()
    return Node(role, name, value or "", bool(checked) if role in CHECKED else None,
                tuple(_OPTION.findall(options or "")))


@lru_cache(maxsize=50_000)
def read_page(state: str) -> Page | None:
    """None unless `abstract` could have written the state."""
    if not (match := _STATE.fullmatch(state)):
        return None
    tabs, title, address, rows, window, windows = match.groups()
    tabs, nodes = tabs.split(" | ") if tabs else [], [read_line(row) for row in rows.split("\n")[1:]]
    if None in nodes:
        return None
    current = next((i for i, tab in enumerate(tabs) if tab[:1] == "*"), 0)
    page = Page(title, address, _numbered(nodes, tabs), tuple(tab.removeprefix("*") for tab in tabs), current,
                int(window or 1) - 1, int(windows or 1))
    return page if page.window < page.windows and page.text == state else None


# ---- addresses

class Addresses:
    """Host-free addresses: 'shopping/cart?p=2' for `{bases['shopping']}/cart?p=2`. Of a base that is an
    article, as WebArena exports Wikipedia's (`http://h:8888/wiki/A/Landing`), the site is all below
    `http://h:8888/wiki`, and the search beside it."""

    def __init__(self, bases: Mapping[str, str]):
        self.bases = {site: base.rstrip("/") for site, base in bases.items()}
        self.prefixes: dict[str, str] = {}       # what short addresses begin with -> what urls begin with
        for site, base in self.bases.items():
            self.prefixes[site], article, _ = base.partition("/A/")
            if article:
                self.prefixes[f"{site}/search"] = urljoin(self.prefixes[site], "search")
        self._names = {prefix: name for name, prefix in self.prefixes.items()}

    def site(self, url: str) -> str:
        """'' for none."""
        return _longest(url, self._names).split("/")[0]

    def short(self, url: str) -> str:
        """Without host where it is of a site, never with a fragment."""
        url = url.split("#", 1)[0]
        name = _longest(url, self._names)
        if not name:
            return url.removeprefix("http://").removeprefix("https://")
        rest = url[len(self.prefixes[name]):]
        return name + ("" if rest == "/" else self._slash(name, rest) + rest)

    def full(self, address: str) -> str:
        """The url of a short or full address. Raises ValueError where it is on none of the sites."""
        address = address.strip()
        if address in self.bases:
            return self.bases[address] + self._slash(address, "?")
        if name := _longest(address, {name: name for name in self.prefixes}):
            rest = address[len(name):]
            return self.prefixes[name] + self._slash(name, rest) + rest
        if self.site(address):
            return address
        raise ValueError(f"no address {address[:80]!r}: expected one of {', '.join(self.bases)}, then a path")

    def _slash(self, name: str, rest: str) -> str:
        """The path of a host alone, in front of a query."""
        return "/" if rest[:1] in ("?", "#") and not urlsplit(self.prefixes[name]).path else ""


def _longest(text: str, named: Mapping[str, str]) -> str:
    """The name of the longest prefix after which `text` ends or its path goes on, '' for none."""
    found = [prefix for prefix in named
             if text.startswith(prefix) and text[len(prefix):len(prefix) + 1] in ("", "/", "?", "#")]
    return named[max(found, key=len)] if found else ""
