"""What both back ends share: an episode in a browser is a row of tabs, and an action works on the one in
front. Notes are worded here, once for both.

`Tabs` turns (action) into (screen); `InProcessBrowser` and `Chromium` supply the tabs. A tab has

    url, title, window, read() -> [Node]         what it shows; url "" until something was loaded
    goto(url) click(node) fill(node, text) press(key) hover(node) choose(node, index) -> note or ""
    options(node) -> [label]   move(step) -> bool (one page back or forward; False: there is none)   close()

Choices that hold in both: `type` replaces what a field holds; history has no empty page and no answer to a
posted form in it; links that lead to other hosts are not followed; a new tab comes to the front, and when it
is closed the one before it; the last tab stays.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dreamgym.envs.webarena.actions import Action
from dreamgym.envs.webarena.page import LINES, Addresses, Node, Screen, abstract, clean, quotable

NEW_TAB = "New tab"
NOTHING = [Node("StaticText", "empty tab: goto an address")]
TYPED = frozenset("textbox searchbox combobox spinbutton slider date datetime time color".split())


class Tabs:
    """One episode at a time. `size` lines make a window of a long page."""

    def __init__(self, addresses: Addresses, size: int = LINES):
        self.addresses, self.size = addresses, size
        self.tabs: list[Any] = []
        self.opened: list[Any] = []              # tabs that a page opened during the action
        self.at, self.nodes, self.shown = 0, [], Screen("", {})

    def _tab(self) -> Any:
        """A new empty tab."""
        raise NotImplementedError

    def release(self) -> None:
        """Ends the episode, also in the middle of it; may be called again."""
        self.tabs = []

    def close(self) -> None:
        """Ends the episode, and whatever was started for it."""
        self.release()

    def start(self, urls: Sequence[str]) -> Screen:
        """One tab for each url, the first in front. Raises ValueError for a url that is on none of the sites,
        or does not load."""
        if not urls:
            raise ValueError("no address to start from; expected at least one")
        full = [self.addresses.full(url) for url in urls]
        self.tabs, self.opened, self.at = [], [], 0
        for url, address in zip(urls, full):
            self.tabs.append(self._tab())
            if note := self.tabs[-1].goto(address):
                raise ValueError(f"{url}: {note}")
        return self._screen("")

    def act(self, action: Action) -> Screen:
        """The next screen. What the page does not allow is told in its note."""
        note = self._do(action)
        if self.opened:
            self.tabs, self.opened = self.tabs + self.opened, []
            self.at = len(self.tabs) - 1
        return self._screen(note)

    @property
    def url(self) -> str:
        """Full address of the tab in front, "" while it is empty."""
        return self.tabs[self.at].url

    def _screen(self, note: str) -> Screen:
        tab = self.tabs[self.at]
        self.nodes = tab.read() if tab.url else NOTHING
        titles = [t.title if t.url else NEW_TAB for t in self.tabs]
        address = self.addresses.short(tab.url)
        self.shown = abstract(titles[self.at], address, self.nodes, titles, self.at, tab.window, self.size)
        self.shown.note = clean(note)
        tab.window = self.shown.window
        return self.shown

    def _do(self, action: Action) -> str:
        tab = self.tabs[self.at]
        match action.kind:
            case "click" | "type" | "hover":
                node = self.shown.refs.get(action.element)
                if node is None or not tab.url:
                    return f"no element [{action.element}]"
                if action.kind == "type":
                    return self._type(tab, node, action)
                if action.kind == "click" and node.options:
                    return "type the name of an option to choose it"
                return getattr(tab, action.kind)(node)
            case "press":
                return tab.press(action.text) if tab.url else ""
            case "scroll":
                tab.window += 1 if action.text == "down" else -1
            case "goto":
                try:
                    return tab.goto(self.addresses.full(action.text))
                except ValueError as error:
                    return str(error)
            case "go_back" | "go_forward":
                if not tab.move(-1 if action.kind == "go_back" else 1):
                    return f"no page to {action.kind.replace('_', ' ')} to"
            case "new_tab":
                self.tabs.append(self._tab())
                self.at = len(self.tabs) - 1
            case "tab_focus":
                if action.element >= len(self.tabs):
                    return f"no tab {action.element}"
                self.at = action.element
            case "close_tab":
                if len(self.tabs) == 1:
                    return "the last tab stays open"
                self.tabs.pop(self.at).close()
                self.at = max(0, self.at - 1)
            case _:
                raise ValueError(f"action {action}: not for a browser")
        return ""

    def _type(self, tab: Any, node: Node, action: Action) -> str:
        """Types into a field, or chooses the option of that name."""
        if node.options:
            labels = [quotable(label) for label in tab.options(node)]
            wanted = quotable(action.text)
            for same in (str, str.lower):
                if same(wanted) in (same(label) for label in labels):
                    return tab.choose(node, [same(label) for label in labels].index(same(wanted)))
            return f"no option '{wanted}', options: {' | '.join(labels)}"
        if node.role not in TYPED:
            return f"cannot type into {node.role} '{node.name}'"
        return tab.fill(node, action.text) or (tab.press("Enter") if action.enter else "")

    def outside(self, url: str) -> str:
        """The note on an address on another host, "" for ours."""
        try:
            self.addresses.full(url)
        except ValueError:
            return f"{clean(url, 60)} is outside these sites"
        return ""


def incomplete(nodes: list[Node], ref: Any) -> str:
    """The note on a form that a browser does not send: its first field with a missing or wrong value."""
    name = next((quotable(node.name) for node in nodes if node.ref == ref), "a field")
    return f"not sent: '{name}' is missing or wrong"


Cookies = Mapping[str, Mapping[str, str]]        # site -> name -> value
