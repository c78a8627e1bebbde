"""The abstract state of a web page: accessibility nodes in, short numbered lines out; and the reader of those lines. Pure functions.

Every page goes through `abstract`, wherever its nodes come from (`webarena_feeds`: a browser, HTML, recorded text), and the experience model writes the same
form, so that a policy sees one language in all worlds. `read_screen` is the inverse: `str(read_screen(text)) == text`. The form:

    tabs: Home | *Cart                           only with several tabs; the star is the current one
    page: One Stop Mini
    url: shopping/cart                           no host: the site's name, then path and query
    [1] searchbox 'Search' value 'blue'
    [2] combobox 'Sort by' value 'Price' options 'Name' | 'Price'
    [3] checkbox 'Featured' checked
    [4] text '$19.99'
    window 1 of 3                                only for a page longer than a window; ids run over the whole page
    note: no element [44]                          only after an action that failed

Nothing here sees a browser, a task or a model.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

LINES = 30                                       # of a window
STOPPED = "stopped"                              # the state after `stop`
MAX_CHARS, MAX_TAB_CHARS, MAX_OPTIONS = 120, 40, 24
SITES = ("shopping", "shopping_admin", "reddit", "gitlab", "map", "wikipedia", "homepage")
FIELDS = frozenset("textbox searchbox combobox listbox checkbox radio switch spinbutton slider date datetime time color".split())
CHECKED = frozenset(("checkbox", "radio", "switch", "menuitemcheckbox", "menuitemradio"))
PASSIVE = frozenset(("text", "heading", "img"))  # what nobody operates: dropped where a neighbour already says it

_NAME = r"'((?:[^']|(?<=\w)'(?=\w))*)'"          # a name holds apostrophes between letters only (Women's): a quote anywhere else ends it
_LINE = re.compile(rf"\[(\d+)\] (\w+) {_NAME}(?: value {_NAME})?( checked)?(?: options ('.+'))?")
_OPTION = re.compile(_NAME)
_WINDOW = re.compile(r"window ([1-9]\d*) of ([1-9]\d*)")
_LOOSE_QUOTE = re.compile(r"(?<!\w)'|'(?!\w)")
_ELEMENT = re.compile(r"(click|hover|type) \[(\d{1,9})\](.*)", re.DOTALL)


@dataclass(slots=True)
class Node:
    """One accessibility node worth showing. `ref` is the feeder's handle on the element: lxml element, CDP backendDOMNodeId, id in a recorded text."""
    role: str
    name: str = ""
    value: str = ""                              # of a field
    checked: bool | None = None
    options: tuple[str, ...] = ()                # of a combobox or listbox
    ref: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        value = f" value '{self.value}'" if self.value else ""
        options = " options '" + "' | '".join(self.options) + "'" if self.options else ""
        return f"{self.role} '{self.name}'{value}{' checked' if self.checked else ''}{options}"


@dataclass
class Page:
    """What a state text says; `str` writes it."""
    title: str
    address: str
    lines: dict[int, Node]
    tabs: tuple[str, ...] = ()
    tab: int = 0
    window: int = 0
    windows: int = 1
    error: str = ""

    def __str__(self) -> str:
        rows = [f"tabs: {' | '.join('*' * (i == self.tab) + tab for i, tab in enumerate(self.tabs))}"] if len(self.tabs) > 1 else []
        rows += [f"page: {self.title}", f"url: {self.address}", *(f"[{i}] {node}" for i, node in self.lines.items())]
        if self.windows > 1:
            rows.append(f"window {self.window + 1} of {self.windows}")
        if self.error:
            rows.append(f"note: {self.error}")
        return "\n".join(rows)


@dataclass
class Screen:
    """A shown state: its text, and the node of every id in it."""
    text: str
    refs: dict[int, Node]
    window: int = 0                              # scrolling position, from 0
    windows: int = 1


def clean(text: str, most: int = MAX_CHARS) -> str:
    """One line of at most `most` characters, blanks collapsed, without control and private-use characters (icon fonts)."""
    if not text.isascii() or not text.isprintable():
        text = "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)
    text = " ".join(text.split())
    return text if len(text) <= most else text[:most - 1].rstrip() + "…"


def quotable(text: str) -> str:
    """`clean`, and safe between single quotes: an apostrophe that is not between letters or digits becomes ’."""
    text = clean(text)
    return _LOOSE_QUOTE.sub("’", text) if "'" in text else text


def _shown(nodes: list[Node]) -> list[Node]:
    """The nodes that say something new, with clean names. A label in front of its control, or the heading around a link, says what the control says."""
    shown: list[Node] = []
    for node in nodes:
        role = "text" if node.role == "StaticText" else node.role
        name = quotable(node.name)
        if role in PASSIVE:
            if name and not (shown and shown[-1].name == name):
                shown.append(Node(role, name, ref=node.ref))
        elif name or role in FIELDS or role == "button":
            _drop_label(shown, name)
            options = tuple(option for o in node.options if (option := quotable(o)))[:MAX_OPTIONS] if node.options else ()
            shown.append(Node(role, name, quotable(node.value) if node.value else "", node.checked, options, node.ref))
    return shown


def _drop_label(shown: list[Node], name: str) -> None:
    """Drops the last passive nodes when they spell the name of the control that follows: 'Sort', 'by' before combobox 'Sort by'."""
    if not shown or shown[-1].role not in PASSIVE or not name.endswith(shown[-1].name):
        return
    said, start = "", len(shown)
    while start and shown[start - 1].role in PASSIVE and len(said) < len(name):
        start -= 1
        said = f"{shown[start].name} {said}".rstrip()
        if said == name:
            del shown[start:]
            return


def abstract(title: str, address: str, nodes: list[Node], tabs: Sequence[str] = (), tab: int = 0, window: int = 0, size: int = LINES, error: str = "") -> Screen:
    """Nodes in document order -> the state. `tabs` are titles, `tab` and `window` count from 0; a window past the last is the last. Never raises on odd text."""
    shown = _shown(nodes)
    windows = max(1, -(-len(shown) // size))
    window = min(max(window, 0), windows - 1)
    refs = dict(enumerate(shown[window * size:(window + 1) * size], window * size + 1))
    titles = tuple(clean(t).replace("|", "/").lstrip("* ")[:MAX_TAB_CHARS].rstrip() or "untitled" for t in tabs) if len(tabs) > 1 else ()
    page = Page(clean(title) or "untitled", clean(address, 300), refs, titles, tab if titles else 0, window, windows, clean(error))
    return Screen(str(page), refs, window, windows)


# ---- reading states and actions ----------------------------------------------------------------------------------------------------------------

def read_line(line: str) -> tuple[int, Node]:
    """`[2] link 'Home'` -> (2, Node). Raises ValueError."""
    match = _LINE.fullmatch(line)
    if not match:
        raise ValueError(f"state line {line[:80]!r}: expected [N] ROLE 'NAME', then value, checked or options")
    number, role, name, value, checked, options = match.groups()
    return int(number), Node(role, name, value or "", bool(checked) if role in CHECKED else None, tuple(_OPTION.findall(options or "")))


def read_screen(text: str) -> Page:
    """The parts of a state text: `str(read_screen(text)) == text`. Raises ValueError unless `abstract` could have written it."""
    rows = text.split("\n")
    tabs = rows.pop(0)[len("tabs: "):].split(" | ") if rows[0].startswith("tabs: ") else []
    if len(rows) < 2 or not rows[0].startswith("page: ") or not rows[1].startswith("url: "):
        raise ValueError(f"state {text[:80]!r}: expected the lines page: and url: first")
    page = Page(rows[0][len("page: "):], rows[1][len("url: "):], {}, tuple(t.removeprefix("*") for t in tabs), next((i for i, t in enumerate(tabs) if t[:1] == "*"), 0))
    rest = rows[2:]
    if rest and rest[-1].startswith("note: "):
        page.error = rest.pop()[len("note: "):]
    if rest and (match := _WINDOW.fullmatch(rest[-1])):
        page.window, page.windows = int(match[1]) - 1, int(match[2])
        rest.pop()
    lines = [read_line(row) for row in rest]
    page.lines = dict(lines)
    first = lines[0][0] if lines else 1
    size, odd = divmod(first - 1, page.window) if page.window else (len(lines), first - 1)
    if [i for i, _ in lines] != list(range(first, first + len(lines))) or odd or len(lines) > size or page.window >= page.windows or str(page) != text:
        raise ValueError(f"state {text[:80]!r}: its lines are not numbered one after the other, or not in the form that `abstract` writes")
    return page


def ground_text(screen_text: str, action_text: str) -> str:
    """The action with the element it names in words: `click [12]` -> `click link 'Blue Speaker'`, `type [3] [blue] [1]` -> `type searchbox 'Search' [blue] [1]`.
    An action on no element, or on one that is not shown, stays as it is."""
    match = _ELEMENT.fullmatch(action_text)
    line = match and re.search(rf"^\[{match[2]}\] (\w+ {_NAME})", screen_text, re.MULTILINE)
    return f"{match[1]} {line[1]}{match[3]}" if line else action_text


# ---- addresses ---------------------------------------------------------------------------------------------------------------------------------

class Addresses:
    """Host-free addresses: 'shopping/cart?p=2' for `{bases['shopping']}/cart?p=2`. `elsewhere` lets other hosts through `full`."""

    def __init__(self, bases: Mapping[str, str], elsewhere: bool = False):
        self.bases, self.elsewhere = {site: base.rstrip("/") for site, base in bases.items()}, elsewhere
        self._longest = sorted(((base, site) for site, base in self.bases.items()), key=lambda pair: -len(pair[0]))

    @property
    def hosts(self) -> set[str]:
        """What a browser must be able to reach."""
        return {urlsplit(base).hostname for base in self.bases.values()}

    def site(self, url: str) -> str:
        """The site a full url belongs to, '' for none."""
        return next((site for base, site in self._longest if url.startswith(base) and url[len(base):len(base) + 1] in ("", "/", "?", "#")), "")

    def short(self, url: str) -> str:
        """What a state shows: no host for our sites, never a fragment."""
        url = url.split("#", 1)[0]
        site = self.site(url)
        rest = url[len(self.bases[site]):] if site else ""
        if not site:
            return url.removeprefix("http://").removeprefix("https://")
        return site + ("" if rest == "/" else f"/{rest}" if rest[:1] == "?" else rest)

    def full(self, address: str) -> str:
        """The url of a short address or of a full url. Raises ValueError for one that is on none of the sites."""
        address = address.strip()
        site = re.split(r"[/?#]", address, maxsplit=1)[0]
        if site in self.bases:
            base, rest = self.bases[site], address[len(site):]
            return base + (rest if rest[:1] == "/" or (not rest and urlsplit(base).path) else "/" + rest)
        if self.site(address) or (self.elsewhere and re.match(r"https?://[^/\s]", address)):
            return address
        raise ValueError(f"no address {address[:80]!r}: expected one of {', '.join(self.bases)}, then a path")
