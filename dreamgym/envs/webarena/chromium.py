"""A real browser: Chromium through Playwright and the DevTools protocol.

Playwright belongs to one thread, so `Workers` are threads with a browser each. Not seen: frames of other
hosts, canvas, what a page draws without text.
"""
from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

from playwright.sync_api import Error, TimeoutError, sync_playwright

from dreamgym.envs.webarena.actions import KEYS, MODIFIERS, Action
from dreamgym.envs.webarena.ax_tree_sources import from_cdp
from dreamgym.envs.webarena.page import Addresses, Node, Page, clean
from dreamgym.envs.webarena.tabs import Cookies, Tabs

NAMES = ("chromium", "chromium-browser", "google-chrome")
ABORTED_S = 0.5              # a request is given up for another one, or for a download, where the page stays
HANDLED_S = 5.0              # with scripts: what has asked for nothing by then was handled by one
READ_TRIES = 20              # of 50 ms
KEY_NAMES = {key.lower(): key for key in (*KEYS, *MODIFIERS)} | {"ctrl": "Control"}
UNREADABLE = [Node("StaticText", "this page did not load")]


def find_chromium() -> str:
    """$CHROMIUM, or a Chromium on the PATH. Raises ValueError when there is none."""
    given = os.environ.get("CHROMIUM", "")
    path = shutil.which(given) if given else next(filter(None, map(shutil.which, NAMES)), None)
    if not path:
        raise ValueError(f"{given or ', '.join(NAMES)}: no such browser; install Chromium (Debian: "
                         "apt-get install -y chromium) or put its path in $CHROMIUM")
    return path


class Browser:
    """A running Chromium that reaches 127.0.0.1 and `hosts` alone; it ends with this process, however that
    ends. Raises ValueError without one, RuntimeError when it does not start."""

    def __init__(self, hosts: Iterable[str] = ()):
        executable = find_chromium()
        rules = "MAP * ~NOTFOUND" + "".join(f" , EXCLUDE {host}" for host in sorted({"127.0.0.1", *hosts}))
        # root has no sandbox
        flags = [f"--host-resolver-rules={rules}", "--disable-gpu"] + ["--no-sandbox"] * (os.geteuid() == 0)
        self.playwright = sync_playwright().start()
        try:
            self.chromium = self.playwright.chromium.launch(executable_path=executable, args=flags)
        except Error as error:
            self.playwright.stop()
            raise RuntimeError(f"{executable} does not start: {clean(error.message, 400)}") from None
        processes = self.chromium.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
        self.pid = next(process["id"] for process in processes if process["type"] == "browser")

    def kill(self) -> None:
        """Ends the browser from any thread; a call that is under way gets an error."""
        os.killpg(os.getpgid(self.pid), signal.SIGKILL)  # a group of its own, with the processes of the pages

    def close(self) -> None:
        try:
            self.chromium.close()
        finally:
            self.playwright.stop()


class Workers:
    """`count` threads with a Browser each: `pairs` of (thread, browser). Raises as `Browser`."""

    def __init__(self, count: int, hosts: Iterable[str] = ()):
        threads = [ThreadPoolExecutor(1) for _ in range(count)]
        starting = [thread.submit(Browser, hosts) for thread in threads]
        wait(starting)
        self.pairs = [(thread, start.result()) for thread, start in zip(threads, starting)
                      if not start.exception()]
        if failed := [start.exception() for start in starting if start.exception()]:
            self.close()
            raise failed[0]

    def close(self) -> None:
        closing = [thread.submit(browser.close) for thread, browser in self.pairs]
        for thread, _ in self.pairs:
            thread.shutdown()
        for closed in closing:
            closed.result()


class Chromium(Tabs):
    """One episode at a time in `browser`, in a context of its own. `settle_s`: how long scripts may go on (0:
    sites without scripts); `limit_s`: how long a page may take to load. Raises RuntimeError when page or
    browser has ended, or answers nothing for four times `limit_s`."""

    def __init__(self, addresses: Addresses, browser: Browser, settle_s: float = 0.0, limit_s: float = 20.0):
        super().__init__(addresses)
        self.browser, self.settle_s, self.limit_s, self.context = browser, settle_s, limit_s, None
        self.asked: list[str] = []               # addresses that the last episode asked for

    def open(self, urls: Sequence[str], cookies: Cookies = {}, **context: Any) -> Page:  # noqa: B006
        """A new episode in a fresh context. `context`: for Playwright's new_context. Raises as `start`."""
        self.close()
        self.asked = []
        with self.watched():
            self.context = self.browser.chromium.new_context(accept_downloads=False, **context)
            self.context.set_default_timeout(self.limit_s * 1000)
            bases = json.dumps(list(self.addresses.prefixes.values()))
            self.context.add_init_script(LISTEN.replace("BASES", bases))
            self.context.add_cookies([{"name": name, "value": value, "url": self.addresses.bases[site]}
                                      for site, values in cookies.items() for name, value in values.items()])
            return self.start(urls)

    def act(self, action: Action) -> Page:
        with self.watched():
            try:
                return super().act(action)
            except Error:  # such as an element that a script has taken away
                return self.screen()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ends the browser when a call takes far too long: nothing else ends an endless script."""
        watchdog = threading.Timer(4 * self.limit_s, self.browser.kill)
        watchdog.start()
        try:
            yield
        except Error as error:
            raise RuntimeError(f"{self.url}: the page or its browser has ended (out of memory?): "
                               f"{clean(error.message, 200)}") from None
        finally:
            watchdog.cancel()

    def screen(self) -> Page:
        """A page that is just being replaced cannot be read for a moment."""
        for _ in range(READ_TRIES):
            with suppress(Error):
                return super().screen()
            time.sleep(0.05)
        return super().screen()

    def page(self, url: str) -> Tab:
        with self.watched():
            return super().page(url)

    def close(self) -> None:
        """Ends the episode; may be called again, and after the browser has ended."""
        with suppress(Error):
            if self.context:
                self.context.close()
        self.context, self.tabs = None, []

    def new_tab(self) -> Tab:
        return Tab(self, self.context.new_page())


# In every page before its own scripts: tells when a link or a form is followed, stops what leads to other
# hosts, keeps the message about a wrong field away.
LISTEN = """
const heed = (event, url) => {
  if (!url || event.defaultPrevented || url.startsWith('javascript:')) return;
  if (BASES.some(base => url === base || ['/', '?', '#'].some(mark => url.startsWith(base + mark))))
    window.dreamgymLeads = true;
  else event.preventDefault();
};
addEventListener('click', event => {
  const link = event.composedPath().find(element => element.tagName === 'A' && element.href);
  heed(event, link && link.href);
});
addEventListener('submit', event => {
  const form = event.target, button = event.submitter;
  const action = button && button.getAttribute('formaction') || form.getAttribute('action') || '';
  heed(event, new URL(action, form.baseURI).href);
});
addEventListener('invalid', event => event.preventDefault(), true);
"""
# A point of the element that nothing covers, in the coordinates of the outermost frame; null: none.
# Playwright's own clicks wait for drawing, which stops in a hidden tab.
POINT = """el => {
  const whole = el.closest('a, button, label') || el, press = event => {
    el.dreamgymMissed = !whole.contains(event.composedPath()[0]);
  };
  el.dreamgymMissed = true;
  el.ownerDocument.defaultView.addEventListener('mousedown', press, {capture: true, once: true});
  el.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
  for (const box of el.getClientRects()) {
    let x = box.left + box.width / 2, y = box.top + box.height / 2;
    const top = el.getRootNode().elementFromPoint(x, y);
    if (!top || !whole.contains(top)) continue;
    try {
      for (let w = el.ownerDocument.defaultView; w.frameElement; w = w.parent) {
        const frame = w.frameElement.getBoundingClientRect();
        x += frame.left + w.frameElement.clientLeft; y += frame.top + w.frameElement.clientTop;
      }
      return [x, y];
    } catch (error) { return null; }
  }
  return null;
}"""
MISSED = "el => el.dreamgymMissed"           # the page may have moved under the mouse
PUSH = "el => { if (el.isConnected) (el.closest('a, button, label, input') || el).click(); }"
# null: the field cannot be changed, or takes no such text; false: it holds the text; true: it waits for it
FILL = """(el, text) => {
  if (el.disabled || el.readOnly) return null;
  el.focus();
  if (!['number', 'date', 'time', 'datetime-local', 'month', 'week', 'color', 'range'].includes(el.type)) {
    el.select ? el.select() : getSelection().selectAllChildren(el);
    return true;
  }
  const before = el.value;
  el.value = text;
  if (el.value !== text) { el.value = before; return null; }
  for (const name of ['input', 'change']) el.dispatchEvent(new Event(name, {bubbles: true}));
  return false;
}"""
CHOOSE = """(el, index) => {
  if (el.disabled) return;
  el.focus();
  el.selectedIndex = index;
  for (const name of ['input', 'change']) el.dispatchEvent(new Event(name, {bubbles: true}));
}"""
IS_MENU = """(() => {
  let el = document.activeElement;
  while (el && el.contentDocument) el = el.contentDocument.activeElement;
  return Boolean(el && el.tagName === 'SELECT');
})()"""


class Tab:
    """One page. Playwright's events, which arrive while a call waits, write the counters."""

    def __init__(self, owner: Chromium, page: Any):
        self.owner, self.page, self.send = owner, page, page.context.new_cdp_session(page).send
        self.window, self.moved, self.is_ready = 0, 0, False
        self.request: Any = None                 # the last one for a page of the tab
        self.posted: set[int] = set()            # ids of history entries that answer a posted form
        page.on("request", self.on_request)
        page.on("framenavigated", self.on_navigated)
        page.on("domcontentloaded", self.on_loaded)
        page.on("popup", lambda popup: owner.opened.append(Tab(owner, popup)))
        page.on("crash", lambda _: page.close())  # or a question to the dead page would never be answered

    @property
    def url(self) -> str:
        url = self.page.url
        return "" if url == "about:blank" else self.request.url if self.is_error() else url

    @property
    def title(self) -> str:
        return "Not loaded" if self.is_error() else self.page.title()

    def is_error(self) -> bool:
        return self.page.url.startswith("chrome-error:")

    def on_request(self, request: Any) -> None:
        if request.is_navigation_request() and request.frame.parent_frame is None:
            self.request = request
            self.owner.asked.append(request.url)

    def on_navigated(self, frame: Any) -> None:
        if frame.parent_frame is None:
            self.moved, self.is_ready = self.moved + 1, False

    def on_loaded(self, _: Any) -> None:
        self.is_ready, self.window = True, 0

    # ---- waiting

    def wait(self, done: Callable[[], Any], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                return False
            self.page.wait_for_timeout(3)
        return True

    def rest(self, state: str, seconds: float) -> None:
        with suppress(TimeoutError):  # a page that never rests is read as it is
            self.page.wait_for_load_state(state, timeout=seconds * 1000)

    def after(self, do: Callable[[], Any], leads: bool = False) -> bool:
        """Does something, waits for the page it leads to, says whether it leads to one. Raises ValueError
        when that page does not load."""
        request, moved, opened = self.request, self.moved, len(self.owner.opened)
        settle_s, limit_s = self.owner.settle_s, self.owner.limit_s

        def failed() -> str:
            return self.request.failure or "" if self.request is not request else ""

        def arrived() -> bool:
            return self.moved > moved and self.is_ready

        def begun() -> bool:
            return self.request is not request or self.moved > moved or len(self.owner.opened) > opened

        do()
        if not self.wait(begun, settle_s) and (leads or self.followed()):
            self.wait(begun, limit_s if leads or not settle_s else HANDLED_S)
        if self.request is not request and not self.wait(lambda: arrived() or failed(), limit_s):
            self.send("Page.stopLoading")
            raise ValueError(f"the page did not load in {limit_s:g} seconds")
        for tab in self.owner.opened[opened:]:
            tab.wait(lambda tab=tab: tab.url, limit_s)  # born with an empty page
            tab.rest("domcontentloaded", limit_s)
        if why := failed():  # Chromium's own error page takes the place
            self.wait(arrived, ABORTED_S if "ABORTED" in why else limit_s)
            raise ValueError(f"the page did not load: {why}")
        if self.request is not request and self.request.method == "POST":
            at, entries = self.history()
            self.posted.add(entries[at]["id"])
        if len(self.page.frames) > 1:
            self.rest("load", limit_s)
        if settle_s:  # for scripts
            self.rest("networkidle", settle_s)
        return begun()

    def followed(self) -> bool:
        """Whether a link or a form is followed; a page that is gone says yes."""
        with suppress(Error):
            asked = self.ask("window.dreamgymLeads === true && delete window.dreamgymLeads")
            return asked["result"]["value"]
        return True

    # ---- pages and history

    def goto(self, url: str) -> None:
        self.after(lambda: self.send("Page.navigate", {"url": url}), leads=True)

    def history(self) -> tuple[int, list[dict]]:
        answer = self.send("Page.getNavigationHistory")
        return answer["currentIndex"], answer["entries"]

    def move(self, step: int) -> None:
        at, entries = self.history()
        at += step
        while 0 <= at < len(entries) and (entries[at]["id"] in self.posted
                                          or entries[at]["url"] == "about:blank"):
            at += step
        if 0 <= at < len(entries):
            entry = {"entryId": entries[at]["id"]}
            self.after(lambda: self.send("Page.navigateToHistoryEntry", entry), leads=True)

    def read(self) -> list[Node]:
        if self.is_error():
            return UNREADABLE
        return from_cdp(self.send("Accessibility.getFullAXTree")["nodes"],
                        self.frames() if len(self.page.frames) > 1 else {})[1]

    def frames(self) -> dict[int, list[dict]]:
        """The trees of inner frames by their iframe; a frame of another process has none here."""
        trees, inner = {}, [self.send("Page.getFrameTree")["frameTree"]]
        for branch in inner:
            for child in branch.get("childFrames", ()):
                inner.append(child)
                frame = {"frameId": child["frame"]["id"]}
                element = self.send("DOM.getFrameOwner", frame)["backendNodeId"]
                trees[element] = self.send("Accessibility.getFullAXTree", frame)["nodes"]
        return trees

    def close(self) -> None:
        self.page.close()

    # ---- actions

    def call(self, node: Node, function: str, *arguments: Any) -> Any:
        """A function on the element of a node, for a text on the one around it."""
        handle = self.send("DOM.resolveNode", {"backendNodeId": node.ref})["object"]["objectId"]
        element = "this.nodeType === 1 ? this : this.parentElement"
        function = f"function(...a) {{ return ({function})({element}, ...a); }}"
        call = {"objectId": handle, "functionDeclaration": function, "returnByValue": True,
                "arguments": [{"value": value} for value in arguments]}
        return self.send("Runtime.callFunctionOn", call)["result"].get("value")

    def click(self, node: Node) -> None:
        point = self.call(node, POINT)
        hit = point and (self.after(lambda: self.page.mouse.click(*point)) or not self.call(node, MISSED))
        if not hit:
            self.after(lambda: self.call(node, PUSH))

    def hover(self, node: Node) -> None:
        if point := self.call(node, POINT):
            self.after(lambda: self.page.mouse.move(*point))

    def press(self, key: str) -> None:
        key = "+".join(KEY_NAMES.get(part.lower(), part) for part in key.split("+"))
        if key != "Enter" or not self.page.evaluate(IS_MENU):  # a menu of the operating system's
            self.after(lambda: self.page.keyboard.press(key))

    def fill(self, node: Node, text: str) -> bool:
        waits = self.call(node, FILL, text)
        if waits:
            keyboard = self.page.keyboard
            self.after(lambda: keyboard.insert_text(text) if text else keyboard.press("Delete"))
        return waits is not None

    def options(self, node: Node) -> list[str]:
        return self.call(node, "el => [...el.options].map(o => o.label)")

    def choose(self, node: Node, index: int) -> None:
        self.after(lambda: self.call(node, CHOOSE, index))

    # ---- for evaluators

    @property
    def html(self) -> str:
        with self.owner.watched():
            return self.page.content()

    def evaluate(self, js: str) -> str | None:
        with self.owner.watched():
            answer = self.ask(js)
        value = answer["result"].get("value")
        if "exceptionDetails" in answer or value is None:
            return None
        return value if isinstance(value, str) else json.dumps(value)

    def ask(self, js: str) -> dict:
        return self.send("Runtime.evaluate", {"expression": js, "returnByValue": True, "awaitPromise": True})
