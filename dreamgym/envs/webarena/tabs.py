"""What both back ends share: an episode in a browser is a row of tabs, and an action works on the one in
front. `InProcessBrowser` and `Chromium` supply the tabs. A tab has

    url, title, window, read() -> [Node]         url "" until something was loaded
    goto(url)                                    raises ValueError when the address does not load
    click(node)   hover(node)   press(key)   options(node) -> [label]   choose(node, index)
    fill(node, text) -> whether the field took it
    move(step)                                   one page back or forward, where there is one
    html                                         as it is now, what is typed included
    evaluate(js) -> its text                     None where it throws or gives null; raises NotSupported
    close()

Choices that hold in both: what the page does not allow changes nothing; `type` replaces what a field holds;
history has no empty page and no answer to a posted form in it; links that lead to other hosts are not
followed; a new tab comes to the front, and when it is closed the one before it; the last tab stays.
"""
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dreamgym.envs.webarena.actions import Action
from dreamgym.envs.webarena.page import TYPED, Addresses, Node, Page, abstract, quotable

NEW_TAB = "New tab"
NOTHING = [Node("StaticText", "empty tab: goto an address")]
Cookies = Mapping[str, Mapping[str, str]]  # site -> name -> value


class NotSupported(Exception):
    """Something that the back end or the tables here cannot evaluate; the part is not judged."""


class Tabs:

    def __init__(self, addresses: Addresses):
        self.addresses = addresses
        self.tabs: list[Any] = []
        self.opened: list[Any] = []  # tabs that a page opened during the action
        self.at, self.shown = 0, Page("", "", {})

    def new_tab(self) -> Any:
        raise NotImplementedError

    def start(self, urls: Sequence[str]) -> Page:
        """One tab for each url. Raises ValueError for one that is on none of the sites or does not load."""
        if not urls:
            raise ValueError("no address to start from; expected at least one")
        full = [self.addresses.full(url) for url in urls]
        self.tabs, self.opened, self.at = [], [], 0
        for url, address in zip(urls, full):
            self.tabs.append(self.new_tab())
            try:
                self.tabs[-1].goto(address)
            except ValueError as error:
                raise ValueError(f"{url}: {error}") from None
        return self.screen()

    def act(self, action: Action) -> Page:
        with suppress(ValueError):  # an address that is on none of the sites, or does not load
            self.do(action)
        if self.opened:
            self.tabs, self.opened = self.tabs + self.opened, []
            self.at = len(self.tabs) - 1
        return self.screen()

    def page(self, url: str) -> Any:
        """A fresh page for an evaluator, which no tab sees. Raises ValueError for a url on none of the sites,
        NotSupported when it does not load."""
        full, tab = self.addresses.full(url), self.new_tab()
        try:
            tab.goto(full)
        except ValueError as error:
            tab.close()
            raise NotSupported(f"{url}: {error}") from None
        return tab

    @property
    def front(self) -> Any:
        return self.tabs[self.at]

    @property
    def url(self) -> str:
        return self.front.url if self.tabs else ""

    def screen(self) -> Page:
        tab = self.front
        nodes = tab.read() if tab.url else NOTHING
        titles = [t.title if t.url else NEW_TAB for t in self.tabs]
        address = self.addresses.short(tab.url)
        self.shown = abstract(titles[self.at], address, nodes, titles, self.at, tab.window)
        tab.window = self.shown.window
        return self.shown

    def do(self, action: Action) -> None:
        tab = self.front
        node = self.shown.lines.get(action.element) if tab.url else None
        match action.kind:
            case "click" if node and not node.options:
                tab.click(node)
            case "hover" if node:
                tab.hover(node)
            case "type" if node and node.options:
                labels, wanted = [quotable(label) for label in tab.options(node)], quotable(action.text)
                same = [i for i, label in enumerate(labels) if label.lower() == wanted.lower()]
                if same:
                    tab.choose(node, labels.index(wanted) if wanted in labels else same[0])
            case "type" if node and node.role in TYPED:
                if tab.fill(node, action.text) and action.enter:
                    tab.press("Enter")
            case "press" if tab.url:
                tab.press(action.text)
            case "scroll":
                tab.window += 1 if action.text == "down" else -1
            case "goto":
                tab.goto(self.addresses.full(action.text))
            case "go_back" | "go_forward":
                tab.move(-1 if action.kind == "go_back" else 1)
            case "new_tab":
                self.tabs.append(self.new_tab())
                self.at = len(self.tabs) - 1
            case "tab_focus" if action.element < len(self.tabs):
                self.at = action.element
            case "close_tab" if len(self.tabs) > 1:
                self.tabs.pop(self.at).close()
                self.at = max(0, self.at - 1)
