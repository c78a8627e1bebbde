"""A real browser: Chromium through Playwright and the DevTools protocol, for the own sites over HTTP and for
a user's WebArena.

    with Browser() as browser:                              # one Chromium
        page = Chromium(Addresses(served.bases), browser)   # one episode at a time, in a context of its own
        screen = page.open([served.bases["shopping"]], {"shopping": sites.login("shopping")})
        screen = page.act(parse("click [3]"))

Playwright belongs to one thread, so `Workers` are threads with a browser each, for many episodes at once. A
browser ends with this process, however that ends. It does not isolate what an episode does to a site:
episodes that run at the same time need a SiteDatabase each, served on ports of its own. Only the hosts of the
sites can be reached (`--host-resolver-rules`). Not seen: frames of other hosts, canvas, what a page draws
without text.
"""
from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any

from playwright.sync_api import Error, TimeoutError, sync_playwright

from dreamgym.envs.webarena.actions import Action
from dreamgym.envs.webarena.ax_tree_sources import from_cdp
from dreamgym.envs.webarena.locators import NotSupported
from dreamgym.envs.webarena.page import LINES, Addresses, Node, Screen, clean
from dreamgym.envs.webarena.tabs import Cookies, Tabs, incomplete

NAMES = ("chromium", "chromium-browser", "google-chrome")
# with scripts: a link or submit button that has asked for nothing by then was handled by a script
REQUEST_S = 1.0
READ_TRIES = 20              # of 50 ms
KEYS = {key.lower(): key for key in """Enter Tab Escape Backspace Delete Insert Home End PageUp PageDown Space
    ArrowUp ArrowDown ArrowLeft ArrowRight Control Shift Alt Meta""".split()} | {"ctrl": "Control"}
# fields that take no typed text
ASSIGNED = ("number", "date", "time", "datetime-local", "month", "week", "color", "range")
UNREADABLE = [Node("StaticText", "this page did not load")]
_playwright = threading.local()  # of this thread: `driver`, and in `users` how many browsers need it


def find_chromium(executable: str = "") -> str:
    """Path of the browser: the argument, $CHROMIUM, or a Chromium on the PATH. Raises ValueError when there
    is none."""
    given = executable or os.environ.get("CHROMIUM", "")
    path = shutil.which(given) if given else next(filter(None, map(shutil.which, NAMES)), None)
    if not path:
        raise ValueError(f"{given or ', '.join(NAMES)}: no such browser; install Chromium (Debian: "
                         "apt-get install -y chromium) or put its path in $CHROMIUM")
    return path


class Browser:
    """A running Chromium that reaches 127.0.0.1 and `hosts`, nothing else; used and closed by the thread that
    made it. Raises ValueError without a browser, RuntimeError when it does not start."""

    def __init__(self, executable: str = "", hosts: Iterable[str] = ()):
        self.executable = find_chromium(executable)
        rules = "MAP * ~NOTFOUND" + "".join(f" , EXCLUDE {host}" for host in sorted({"127.0.0.1", *hosts}))
        # root has no sandbox
        flags = [f"--host-resolver-rules={rules}", "--disable-gpu"] + ["--no-sandbox"] * (os.geteuid() == 0)
        if not getattr(_playwright, "users", 0):
            _playwright.driver, _playwright.users = sync_playwright().start(), 0
        _playwright.users += 1
        self.chromium: Any = None
        try:
            self.chromium = _playwright.driver.chromium.launch(executable_path=self.executable, args=flags)
        except Error as error:
            self._leave()
            raise RuntimeError(f"{self.executable} does not start: {clean(error.message, 400)}") from None
        processes = self.chromium.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
        self.pid = next(process["id"] for process in processes if process["type"] == "browser")

    def kill(self) -> None:
        """Ends the browser from any thread, so that a call which a page's endless script holds up ends with
        an error."""
        os.killpg(os.getpgid(self.pid), signal.SIGKILL)  # a group of its own, with the processes of the pages

    def close(self) -> None:
        if self.chromium:
            self.chromium, chromium = None, self.chromium
            try:
                chromium.close()
            finally:
                self._leave()

    @staticmethod
    def _leave() -> None:
        _playwright.users -= 1
        if not _playwright.users:
            _playwright.driver.stop()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Chromium(Tabs):
    """One episode at a time in `browser`: a running one that is shared, or the path of one that is started
    here and ends with `close`.

    `settle_s` is how long the scripts of a page may go on after it has loaded, or after an action on it (0
    for sites without scripts); `limit_s` how long it may take to load; `context` what Playwright's
    new_context takes (storage_state, extra_http_headers). Raises as `Browser` does; RuntimeError when the
    page or the browser is no more, or answers nothing for four times `limit_s`."""

    def __init__(self, addresses: Addresses, browser: Browser | str = "", size: int = LINES,
                 settle_s: float = 0.0,
                 limit_s: float = 20.0, **context: Any):
        super().__init__(addresses, size)
        self.own = None if isinstance(browser, Browser) else Browser(browser, addresses.hosts)
        self.browser, self.settle_s, self.limit_s = self.own or browser, settle_s, limit_s
        self.settings, self.context = context, None

    def open(self, urls: Sequence[str], cookies: Cookies = {}) -> Screen:  # noqa: B006
        """A new episode in a fresh context. Raises ValueError for a url that is on none of the sites or does
        not load."""
        self.release()
        with self.watched():
            self.context = self.browser.chromium.new_context(accept_downloads=False, **self.settings)
            self.context.set_default_timeout(self.limit_s * 1000)
            self.context.on("page", lambda page: None if self.making else self.opened.append(Tab(self, page)))
            self.making = False
            self.context.add_cookies([{"name": name, "value": value, "url": self.addresses.bases[site]}
                                      for site, values in cookies.items() for name, value in values.items()])
            return self.start(urls)

    def act(self, action: Action) -> Screen:
        with self.watched():
            try:
                return super().act(action)
            except Error as error:
                # what Chromium itself refuses, such as an element that a script has taken away
                return self._screen(f"the browser refused: {clean(error.message.split('):')[-1], 80)}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ends the browser when a call takes far too long: nothing else ends a question to a page whose
        script runs for ever."""
        watchdog = threading.Timer(4 * self.limit_s, self.browser.kill)
        watchdog.start()
        try:
            yield
        except Error as error:
            raise RuntimeError(f"{self.url}: the page or its browser has ended (out of memory?): "
                               f"{clean(error.message, 200)}") from None
        finally:
            watchdog.cancel()

    def _screen(self, note: str) -> Screen:
        """A page that is being replaced, by a script or by Chromium's own error page, cannot be read for a
        moment."""
        for left in range(READ_TRIES, -1, -1):
            try:
                return super()._screen(note)
            except Error:
                if not left or self.tabs[self.at].crashed or not self.browser.chromium.is_connected():
                    raise
                time.sleep(0.05)

    def page(self, url: str) -> ChromiumPage:
        """A fresh page of this episode's context, which no tab sees.
        Raises ValueError for a url on none of the sites, NotSupported when it does not load."""
        full, tab = self.addresses.full(url), self._tab()
        with self.watched():
            note = tab.goto(full)
        if note:
            tab.close()
            raise NotSupported(f"{url}: {note}")
        return ChromiumPage(tab)

    def storage_state(self) -> dict:
        """Cookies and local storage of this episode, as `context=` of another takes them: a login to keep."""
        return self.context.storage_state()

    def release(self) -> None:
        """Ends the episode, also in the middle of it; may be called again, and after the browser has
        ended."""
        with suppress(Error):
            if self.context:
                self.context.close()
        self.context, self.tabs = None, []

    def close(self) -> None:
        self.release()
        if self.own:
            self.own.close()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _tab(self) -> Tab:
        self.making = True  # or the handler of pages that pages open would take it for one
        try:
            return Tab(self, self.context.new_page())
        finally:
            self.making = False


# What an element is, told before it is touched. `leads`: a page (or tab) will be asked for. A form that the
# browser would not send is found by `invalid`.
AIM = """function(key) {
  let el = this.nodeType === 1 ? this : this.parentElement;
  if (!el || !el.isConnected) return {gone: true};
  let active = el.closest('a[href], button, input, select, textarea, label, summary');
  if (active && active.tagName === 'LABEL') active = active.control;
  const link = active && active.tagName === 'A' ? active : null;
  const form = active && active.form, sender = ['submit', 'image'];
  const sends = active && sender.includes(active.type);
  const entered = /^(text|search|password|email|url|tel|number)$/;
  const enters = active && active.tagName !== 'TEXTAREA' && !['button', 'reset'].includes(active.type);
  const submits = form && (key ? enters : sends);
  const button = submits && (sends ? active : [...form.elements].find(e => sender.includes(e.type)));
  const alone = button || (submits && [...form.elements].filter(e => entered.test(e.type)).length < 2);
  const action = submits && (button && button.getAttribute('formaction') || form.getAttribute('action'));
  const checked = submits && !form.noValidate && !(button && (button.formNoValidate || button.disabled));
  const submitted = submits && alone && !(button && button.disabled);
  const leads = link ? !link.href.startsWith('javascript:') : submitted;
  return {href: link ? link.href : action ? new URL(action, el.baseURI).href : '', type: el.type || '',
          fixed: Boolean(el.disabled || el.readOnly), leads: Boolean(leads),
          incomplete: Boolean(checked && [...form.elements].some(e => e.willValidate && !e.validity.valid))};
}"""
INVALID = """function() {
  const el = this.closest('button, input, select, textarea') || this.closest('label').control;
  return [...el.form.elements].find(e => e.willValidate && !e.validity.valid);
}"""
# Where to press the mouse: a point of the element that nothing covers, in the coordinates of the outermost
# frame; null when there is none.
POINT = """function() {
  const el = this.nodeType === 1 ? this : this.parentElement;
  el.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
  for (const box of el.getClientRects()) {
    let x = box.left + box.width / 2, y = box.top + box.height / 2;
    const top = el.getRootNode().elementFromPoint(x, y);
    if (!top || !(el.contains(top) || (el.closest('a, button, label') || el).contains(top))) continue;
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
PUSH = """function() {
  const el = this.nodeType === 1 ? this : this.parentElement;
  (el.closest('a, button, label, input') || el).click();
}"""
FOCUS = "function() { this.focus(); this.select ? this.select() : getSelection().selectAllChildren(this); }"
CHANGED = "for (const name of ['input', 'change']) this.dispatchEvent(new Event(name, {bubbles: true}));"
ASSIGN = """function(text) {
  const before = this.value;
  this.focus();
  this.value = text;
  if (this.value !== text) { this.value = before; return false; }
  CHANGED
  return true;
}""".replace("CHANGED", CHANGED)
LABELS = "function() { return [...this.options].map(o => o.label); }"
CHOOSE = "function(i) { this.focus(); this.selectedIndex = i; CHANGED }".replace("CHANGED", CHANGED)
ACTIVE = """(() => {
  let el = document.activeElement;
  while (el && el.contentDocument) el = el.contentDocument.activeElement;
  return el || document.body;
})()"""


class Tab:
    """One page of the browser. The counters are written by Playwright's events, which arrive while a call
    waits."""

    def __init__(self, owner: Chromium, page: Any):
        self.owner, self.page, self.send = owner, page, page.context.new_cdp_session(page).send
        self.window, self.asked, self.moved, self.ready, self.crashed = 0, 0, 0, False, False
        self.said, self.failed, self.method, self.wanted = "", "", "GET", ""
        self.notes, self.posted = [], set()
        page.on("request", self._request)
        page.on("requestfailed", self._failure)
        page.on("framenavigated", self._navigated)
        page.on("domcontentloaded", self._loaded)
        page.on("dialog", self._dialog)
        page.on("download", lambda download: self.notes.append(f"download refused: "
                                                               f"{clean(download.suggested_filename, 60)}"))
        page.on("crash", self._crash)

    @property
    def url(self) -> str:
        url = self.page.url
        return "" if url == "about:blank" else self.wanted if url.startswith("chrome-error:") else url

    @property
    def title(self) -> str:
        return self.said or self.page.title()

    # ---- events

    def _main(self, request: Any) -> bool:
        return request.is_navigation_request() and request.frame.parent_frame is None

    def _request(self, request: Any) -> None:
        if self._main(request):
            self.asked += 1
            self.method, self.wanted, self.failed = request.method, request.url, ""

    def _failure(self, request: Any) -> None:
        if self._main(request):
            self.failed = clean(request.failure or "no answer", 80)

    def _navigated(self, frame: Any) -> None:
        if frame.parent_frame is None:
            self.moved += 1
            self.ready = False

    def _loaded(self, _: Any) -> None:
        self.ready, self.window = True, 0

    def _dialog(self, dialog: Any) -> None:
        if dialog.type == "beforeunload":
            dialog.accept()
        else:
            self.notes.append(f"dialog dismissed: {clean(dialog.message)}")
            dialog.dismiss()

    def _crash(self, _: Any) -> None:
        self.crashed = True
        self.page.close()                        # or a question to the dead page would never be answered

    # ---- waiting

    def _wait(self, done: Callable[[], Any], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not done():
            if self.crashed:
                raise RuntimeError(f"{self.url}: the page crashed (out of memory?)")
            if time.monotonic() > end:
                return False
            self.page.wait_for_timeout(3)
        return True

    def _after(self, leads: bool, do: Callable[[], Any]) -> str:
        """Does something, then waits for the page it leads to, if it leads to one. -> note."""
        asked, moved, opened = self.asked, self.moved, len(self.owner.opened)
        self.failed, self.notes = "", []
        do()
        settle_s, limit_s = self.owner.settle_s, self.owner.limit_s
        patience = settle_s if not leads else REQUEST_S if settle_s else limit_s
        self._wait(lambda: self.asked > asked or self.moved > moved or len(self.owner.opened) > opened
                   or self.notes, patience)
        if self.asked > asked and not self._wait(lambda: self.moved > moved and self.ready or self.failed,
                                                 limit_s):
            self.send("Page.stopLoading")
            self.notes.append(f"the page did not load in {limit_s:g} seconds")
        for tab in self.owner.opened[opened:]:
            tab._wait(lambda tab=tab: tab.url or tab.failed, limit_s) # born with an empty page
            tab._rested("domcontentloaded", limit_s)
        if self.failed:  # Chromium's own error page takes the place, or it turns out to be a download
            self._wait(lambda: self.moved > moved and self.ready or self.notes,
                       REQUEST_S if "ABORTED" in self.failed else limit_s)
        if self.failed and not self.notes:
            self.notes.append(f"the page did not load: {self.failed}")
        if self.asked > asked and self.method == "POST":
            at, entries = self._history()
            self.posted.add(entries[at]["id"])
        self._settle()
        return "; ".join(self.notes)

    def _settle(self) -> None:
        """Waits for inner frames, and for scripts where they are expected."""
        if len(self.page.frames) > 1:
            self._rested("load", self.owner.limit_s)
        if self.owner.settle_s:
            self._rested("networkidle", self.owner.settle_s)

    def _rested(self, state: str, seconds: float) -> None:
        with suppress(TimeoutError):             # a page that never rests is read as it is
            self.page.wait_for_load_state(state, timeout=seconds * 1000)

    # ---- pages and history

    def goto(self, url: str) -> str:
        return self._after(True, lambda: self.send("Page.navigate", {"url": url}))

    def _history(self) -> tuple[int, list[dict]]:
        answer = self.send("Page.getNavigationHistory")
        return answer["currentIndex"], answer["entries"]

    def move(self, step: int) -> bool:
        at, entries = self._history()
        at += step
        while 0 <= at < len(entries) and (entries[at]["id"] in self.posted
                                          or entries[at]["url"] == "about:blank"):
            at += step
        if not 0 <= at < len(entries):
            return False
        self._after(True, lambda: self.send("Page.navigateToHistoryEntry", {"entryId": entries[at]["id"]}))
        return True

    def read(self) -> list[Node]:
        if self.page.url.startswith("chrome-error:"):
            self.said = "Not loaded"
            return UNREADABLE
        self.said, nodes = from_cdp(self.send("Accessibility.getFullAXTree")["nodes"],
                                    self._frames() if len(self.page.frames) > 1 else {})
        return nodes

    def _frames(self) -> dict[int, list[dict]]:
        """The trees of inner frames by the iframe they are in; a frame of another process has none here."""
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

    def _handle(self, node: Node) -> str:
        return self.send("DOM.resolveNode", {"backendNodeId": node.ref})["object"]["objectId"]

    def _call(self, handle: str, function: str, *arguments: Any, by_value: bool = True) -> Any:
        values = [{"value": value} for value in arguments]
        answer = self.send("Runtime.callFunctionOn", {"objectId": handle, "functionDeclaration": function,
                                                      "returnByValue": by_value, "arguments": values})
        return answer["result"].get("value" if by_value else "objectId")

    def _refused(self, handle: str, aim: dict) -> str:
        """Why a browser, or this one, would not follow the link or send the form."""
        if not aim["leads"]:
            return ""
        if aim["href"] and (note := self.owner.outside(aim["href"])):
            return note
        if aim["incomplete"]:
            wrong = self.send("DOM.describeNode", {"objectId": self._call(handle, INVALID, by_value=False)})
            return incomplete(self.owner.nodes, wrong["node"]["backendNodeId"])
        return ""

    def click(self, node: Node) -> str:
        handle = self._handle(node)
        aim = self._call(handle, AIM, "")
        if aim.get("gone"):
            return "the element is gone"
        if note := self._refused(handle, aim):
            return note
        point = self._call(handle, POINT)
        return self._after(aim["leads"], lambda: self.page.mouse.click(*point)
                           if point else self._call(handle, PUSH))

    def hover(self, node: Node) -> str:
        if point := self._call(self._handle(node), POINT):
            return self._after(False, lambda: self.page.mouse.move(*point))
        return ""

    def press(self, key: str) -> str:
        key = "+".join(KEYS.get(part.lower(), part) for part in key.split("+"))
        leads = False
        if key == "Enter":
            handle = self.send("Runtime.evaluate", {"expression": ACTIVE})["result"]["objectId"]
            aim = self._call(handle, AIM, "Enter")
            if aim["type"].startswith("select"):
                return ""                        # it would open a menu of the operating system's
            if note := self._refused(handle, aim):
                return note
            leads = aim["leads"]
        return self._after(leads, lambda: self.page.keyboard.press(key))

    def fill(self, node: Node, text: str) -> str:
        handle = self._handle(node)
        aim = self._call(handle, AIM, "")
        if aim["fixed"]:
            return f"'{node.name}' cannot be changed"
        if aim["type"] in ASSIGNED:
            return "" if self._call(handle, ASSIGN, text) else f"'{node.name}' takes a {aim['type']}"
        self._call(handle, FOCUS)
        if not text:
            return self._after(False, lambda: self.page.keyboard.press("Delete"))
        return self._after(False, lambda: self.send("Input.insertText", {"text": text}))

    def options(self, node: Node) -> list[str]:
        return self._call(self._handle(node), LABELS)

    def choose(self, node: Node, index: int) -> str:
        handle = self._handle(node)
        if self._call(handle, AIM, "")["fixed"]:
            return f"'{node.name}' cannot be changed"
        return self._after(False, lambda: self._call(handle, CHOOSE, index))


class ChromiumPage:
    """A page for an evaluator."""

    def __init__(self, tab: Tab):
        self.tab, self.url, self.close = tab, tab.url, tab.close

    @property
    def html(self) -> str:
        """As it is now."""
        with self.tab.owner.watched():
            return self.tab.page.content()

    def evaluate(self, js: str) -> str | None:
        """The text of a JavaScript expression, None where it throws or gives null."""
        with self.tab.owner.watched():
            answer = self.tab.send("Runtime.evaluate",
                                   {"expression": js, "returnByValue": True, "awaitPromise": True})
        value = answer["result"].get("value")
        if "exceptionDetails" in answer or value is None:
            return None
        return value if isinstance(value, str) else json.dumps(value)


# ---- workers -----------------------------------------------------------------------------------------------

class Workers:
    """`count` threads with a browser each. Episodes are dealt out to them in turn; those of one worker are
    played one after the other, in contexts of their own.

        browsers = workers.browsers([Addresses(served.bases) for served in databases])
        screens = workers.open(browsers, [(urls, cookies), ...])
        screens = workers.act(browsers, actions)                 # all workers at once, results in order

    Raises as `Browser` and `Chromium` do, when all workers have answered."""

    def __init__(self, count: int, executable: str = "", hosts: Iterable[str] = (), settle_s: float = 0.0,
                 limit_s: float = 20.0, size: int = LINES):
        executable, hosts = find_chromium(executable), sorted(hosts)
        self.options = {"size": size, "settle_s": settle_s, "limit_s": limit_s}
        self.threads = [ThreadPoolExecutor(1) for _ in range(count)]
        starting = [thread.submit(Browser, executable, hosts) for thread in self.threads]
        wait(starting)
        self.workers = [(thread, start.result()) for thread, start in zip(self.threads, starting)
                        if not start.exception()]
        self.turns = cycle(self.workers)
        for start in starting:
            if start.exception():
                self.close()
                raise start.exception()

    def browsers(self, addresses: Sequence[Addresses],
                 contexts: Sequence[dict] | None = None) -> list[RemoteChromium]:
        """One for each episode that is to run; `contexts` as Chromium's `context`."""
        return [RemoteChromium(thread, Chromium(place, browser, **self.options, **context))
                for place, context,
                (thread, browser) in zip(addresses, contexts or [{}] * len(addresses), self.turns)]

    def open(self, browsers: Sequence[RemoteChromium],
             starts: Sequence[tuple[Sequence[str], Cookies]]) -> list[Screen]:
        return _results([browser.submit(Chromium.open, *start) for browser, start in zip(browsers, starts)])

    def act(self, browsers: Sequence[RemoteChromium], actions: Sequence[Action]) -> list[Screen]:
        return _results([browser.submit(Chromium.act, action) for browser, action in zip(browsers, actions)])

    def close(self) -> None:
        closing_all = [thread.submit(browser.close) for thread, browser in self.workers]
        for thread in self.threads:
            thread.shutdown()
        _results(closing_all)
        self.workers = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _results(futures: list[Future]) -> list:
    wait(futures)
    return [future.result() for future in futures]


class RemoteChromium:
    """A Chromium on a worker's thread; used like one, or many at a time through `Workers`."""

    def __init__(self, thread: ThreadPoolExecutor, chromium: Chromium):
        self.thread, self.chromium = thread, chromium

    def submit(self, method: Callable, *arguments: Any) -> Future:
        return self.thread.submit(method, self.chromium, *arguments)

    @property
    def url(self) -> str:
        return self.submit(lambda chromium: chromium.url).result()

    def open(self, urls: Sequence[str], cookies: Cookies = {}) -> Screen:  # noqa: B006
        return self.submit(Chromium.open, urls, cookies).result()

    def act(self, action: Action) -> Screen:
        return self.submit(Chromium.act, action).result()

    def page(self, url: str) -> RemotePage:
        return RemotePage(self.thread, self.submit(Chromium.page, url).result())

    def release(self) -> None:
        """Ends the episode, also in the middle of it; may be called again."""
        self.submit(Chromium.release).result()

    close = release


class RemotePage:
    """A ChromiumPage on a worker's thread."""

    def __init__(self, thread: ThreadPoolExecutor, page: ChromiumPage):
        self.thread, self.page, self.url = thread, page, page.url

    @property
    def html(self) -> str:
        return self.thread.submit(lambda: self.page.html).result()

    def evaluate(self, js: str) -> str | None:
        return self.thread.submit(self.page.evaluate, js).result()

    def close(self) -> None:
        self.thread.submit(self.page.close).result()
