"""The two back ends of WebArena: the same walk gives the same states, what agents do wrong is told in a note,
and nothing is left running."""
from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest

pytest.importorskip("flask", reason="the own sites need flask (requirements.txt)")

from benchmarks.webarena_speed import parity, walk                                     # noqa: E402
from dreamgym.envs.webarena.actions import parse                                       # noqa: E402
from dreamgym.envs.webarena.direct import InProcessBrowser, canonical                            # noqa: E402
from dreamgym.envs.webarena.page import Addresses                                      # noqa: E402
from dreamgym.envs.webarena.sites import SITES, SiteDatabase                                  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


try:
    from dreamgym.envs.webarena.chromium import Browser, Chromium, Workers, find_chromium
except ImportError:                               # without Playwright the tests of the real browser skip
    def find_chromium():
        raise ImportError("Playwright is not installed")


def _why_not() -> str:
    try:
        import playwright  # noqa: F401
        find_chromium()
    except (ImportError, ValueError) as error:
        return f"no real browser here: {error}"
    return ""


needs_chromium = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-")

FORM = """<!doctype html><title>Form</title>
<form action=/answer autocomplete=off><label>Name <input name=name required></label><label>Mail <input
name=mail type=email></label>
<label>Count <input name=count type=number min=1 max=9></label><label>Note <textarea
name=note></textarea></label>
<label><input type=checkbox name=box value=yes> Box</label>
<label><input type=radio name=size value=s checked> Small</label><label><input type=radio name=size
value=l> Large</label>
<label>Color <select name=color><option value=r>Red</option><option
selected>Blue</option></select></label><label>Fixed <input name=fixed value=f readonly></label>
<label>Off <input name=off disabled></label><input type=hidden name=token value="a b~*"><button name=go
value=1>Get</button>
<button name=go value=2 formmethod=post formaction=/post>Post</button><button name=go value=3
formnovalidate>Anyway</button></form>
<a href="/other">other</a><a href="/other" target=_blank>tab</a><a href="http://example.com/">out</a><a
href="#here">here</a><a href="/redirect">moved</a><button>Alone</button>"""
PAGES = {
    "/": FORM,
    "/other": "<!doctype html><title>Other</title><p>other page</p><a href=/>form</a><a "
         "href=/other>again</a>",
    "/script": "<!doctype html><title>Script</title><button onclick=\"alert('boo')\">ring</button><a "
         "href=/slow>slow</a><a href=/file>file</a>"
    "<div style='position:relative;height:50px'><a href=/other "
         "style='position:absolute;top:0;left:0'>covered</a><div style='position:absolute;"
    "top:0;left:0;width:300px;height:50px;background:#eee'></div></div><iframe src=/inner></iframe><button "
         "onclick='for(;;);'>hang</button>",
    "/inner": "<input aria-label=inside>"}


class SmallSite:
    """One site of a few pages with the face of a SiteDatabase; `seen` are the forms it was sent."""

    def __init__(self):
        self.bases, self.seen = {"shopping": "http://shopping.test"}, []

    def handle(
        self, site: str, method: str, path: str, query: str = "", form: dict | None = None,
        cookies: dict | None = None) -> SimpleNamespace:
        if path in ("/answer", "/post"):
            sent = parse_qs(query, keep_blank_values=True) if method == "GET" else form
            self.seen.append((method, path, sent))
        if path in ("/redirect", "/post"):
            return SimpleNamespace(
                status=303, headers={"Location": "/other?from=1"}, body="", set_cookies={"last": "1"})
        if path == "/refused":
            return SimpleNamespace(
                status=200, headers={}, body="<title>Refused</title><p>refused</p>", set_cookies={})
        known = PAGES.get(
            path,
            f"<!doctype html><title>Page</title><p>{path[1:]}</p><form method=post "
                          f"action=/refused><button>Send</button></form>",
        )
        return SimpleNamespace(status=200, headers={}, body=known, set_cookies={})


class Handler(BaseHTTPRequestHandler):
    """A SmallSite over HTTP."""

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if path == "/slow":
            time.sleep(4)
        size = int(self.headers.get("Content-Length") or 0)
        form = parse_qs(self.rfile.read(size).decode(), keep_blank_values=True) if size else None
        answer = self.server.world.handle("shopping", self.command, path, query, form)
        self.send_response(answer.status)
        for name, value in {
            "Content-Type": "text/html", "Cache-Control": "no-store", **answer.headers,
        }.items():
            self.send_header(name, value)
        if path == "/file":
            self.send_header("Content-Disposition", 'attachment; filename="a.zip"')
        self.end_headers()
        self.wfile.write(answer.body.encode())

    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def served() -> Iterator[SmallSite]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None        # a browser that gives up on a slow page
    server.world = world = SmallSite()
    world.bases = {"shopping": f"http://127.0.0.1:{server.server_port}"}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield world
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


def number(screen, name: str) -> int:
    return next(i for i, node in screen.refs.items() if node.name == name)


def play(browser, *actions: str) -> list[str]:
    """Texts after each action; `<name>` in an action stands for the number of the element of that name."""
    texts = []
    for action in actions:
        if "<" in action:
            name = action[action.index("<") + 1:action.index(">")]
            action = action.replace(f"<{name}>", str(number(browser.shown, name)))
        screen = browser.act(parse(action))
        texts.append(screen.text + f"\nnote: {screen.note}" * bool(screen.note))
    return texts


# ---- what both do ------------------------------------------------------------------------------------------

SCRIPTS = {
    "all values are sent": [
        "type [<Name>] [a b] [0]", "type [<Count>] [7] [0]", "type [<Note>] [one] [1]", "click [<Box>]",
        "click [<Large>]", "type [<Color>] [red]",
        "click [<Get>]"],
    "posted": ["type [<Name>] [x~y*] [0]", "click [<Post>]", "go_back", "go_forward"],
    "checked before sending": [
        "click [<Get>]", "type [<Name>] [n] [0]", "type [<Mail>] [nobody] [1]", "type [<Mail>] [a@b.c] [0]",
        "type [<Count>] [70] [1]", "type [<Count>] [many] [0]", "type [<Count>] [] [0]", "click [<Get>]",
        "go_back",
        "click [<Anyway>]"],
    "Enter": [
        "type [<Name>] [n] [1]", "go_back", "click [<Name>]", "press [Enter]", "type [<Name>] [n] [0]",
        "click [<Box>]", "press [Enter]", "go_back",
        "press [Enter]"],
    "what cannot be done": [
        "click [99]", "hover [98]", "type [97] [x] [1]", "type [<other>] [x] [1]", "type [<Fixed>] [x] [1]",
        "type [<Off>] [x] [1]", "type [<Color>] [Green]", "click [<Color>]", "click [<out>]",
        "goto [http://example.com/]", "goto [nowhere/x]", "go_back", "go_forward", "tab_focus [3]",
        "close_tab", "click [<Alone>]",
        "scroll [up]"],
    "history": [
        "click [<other>]", "click [<again>]", "click [<form>]", "go_back", "go_back", "go_back", "go_forward",
        "go_forward", "go_back", "click [<form>]",
        "go_forward"],
    "a fragment": [
        "type [<Name>] [kept] [0]", "click [<here>]", "click [<here>]", "go_back", "go_forward",
        "click [<other>]", "go_back", "go_back",
        "go_back"],
    "redirects are places once": ["click [<moved>]", "click [<form>]", "go_back", "go_back"],
    "an answer to a form is passed over": [
        "goto [shopping/ask]", "click [<Send>]", "goto [shopping/other]", "go_back", "go_forward", "go_back",
        "go_back"],
    "tabs": [
        "click [<tab>]", "click [<form>]", "type [<Name>] [kept] [0]", "new_tab", "go_back", "click [1]",
        "press [Enter]", "tab_focus [1]", "goto [shopping/other?a=b c'd]", "close_tab", "tab_focus [0]",
        "close_tab", "goto [shopping/other]",
        "close_tab"]}
NOTES = [
    "no element [99]", "no element [98]", "no element [97]", "cannot type into link 'other'",
    "'Fixed' cannot be changed", "'Off' cannot be changed", "no option 'Green', options: Red | Blue",
    "type the name of an option to choose it", "http://example.com/ is outside these sites",
    "no address 'http://example.com/': expected one of shopping, then a path",
    "no address 'nowhere/x': expected one of shopping, then a path", "no page to go back to",
    "no page to go forward to", "no tab 3", "the last tab stays open", "",
    ""]


def test_forms_send_what_a_browser_sends():
    """Stops: unchecked boxes sent, the wrong button's value, values of options instead of labels, line ends
    of text areas."""
    world = SmallSite()
    direct = InProcessBrowser(world)
    direct.open(["shopping"])
    play(direct, *SCRIPTS["all values are sent"])
    assert world.seen == [
        (
            "GET", "/answer",
            {
                "name": ["a b"], "mail": [""], "count": ["7"], "note": ["one\r\n"], "box": ["yes"],
                "size": ["l"], "color": ["r"], "fixed": ["f"], "token": ["a b~*"],
                "go": ["1"]})]


def test_what_cannot_be_done_is_told():
    direct = InProcessBrowser(SmallSite())
    start = direct.open(["shopping"]).text
    for action, text, note in zip(
        SCRIPTS["what cannot be done"], play(direct, *SCRIPTS["what cannot be done"]), NOTES, strict=True):
        assert text == start + f"\nnote: {note}" * bool(note), action


def test_history_has_no_empty_page_and_a_shared_page_is_never_written_on():
    world = SmallSite()
    direct, other = InProcessBrowser(world), InProcessBrowser(world)
    direct.open(["shopping"])
    texts = play(
        direct, "type [<Name>] [mine] [0]", "click [<other>]", "go_back", "go_back", "new_tab", "go_back")
    assert "value 'mine'" in texts[0]
    assert "mine" not in texts[2]
    assert texts[3] == texts[2] + "\nnote: no page to go back to"
    assert "page: New tab" in texts[5] and "no page to go back to" in texts[5] and direct.url == ""
    assert "mine" not in other.open(["shopping"]).text


def test_addresses_are_written_as_chromium_writes_them():
    assert canonical("http://A.test") == "http://a.test/"
    assert canonical("http://a.test/b c?q=d e'f\"é#x") == "http://a.test/b%20c?q=d%20e%27f%22%C3%A9#x"


def test_a_bad_start_is_a_value_error():
    with pytest.raises(ValueError, match="no address 'elsewhere'"):
        InProcessBrowser(SmallSite()).open(["elsewhere"])
    with pytest.raises(ValueError, match="expected at least one"):
        InProcessBrowser(SmallSite()).open([])


def test_an_evaluators_page_is_fresh_and_unseen():
    world = SiteDatabase()
    direct = InProcessBrowser(world)
    before = direct.open([f"{world.bases['shopping']}/account"], {"shopping": world.login("shopping")}).text
    page = direct.page("shopping/account")
    assert world.accounts["shopping"][0] in page.evaluate("document.querySelector('body').outerText")
    assert page.url == direct.url
    assert page.evaluate("document.querySelector('.nowhere').outerText") is None
    assert direct.act(parse("scroll [up]")).text == before


def test_a_walk_repeats_exactly():
    world = SiteDatabase()
    texts = [
        [
            screen.text
            for _, (_, screen) in zip(
                range(80), walk(InProcessBrowser(world), world, random.Random(3), list(SITES), world.bases))]
        for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) > 20


# ---- parity ------------------------------------------------------------------------------------------------

@needs_chromium
@pytest.mark.parametrize("name", SCRIPTS)
def test_both_do_the_same(name, served, browser):
    """Stops: any way in which the browserless back end is not a browser."""
    direct_world = SmallSite()
    direct, chromium = InProcessBrowser(direct_world), Chromium(Addresses(served.bases), browser)
    assert direct.open(["shopping"]).text == chromium.open(["shopping"]).text
    assert list(zip(SCRIPTS[name], play(direct, *SCRIPTS[name]))) == list(
        zip(SCRIPTS[name], play(chromium, *SCRIPTS[name])))
    assert [(m, p, dict(f)) for m, p, f in direct_world.seen] == [(m, p, dict(f)) for m, p, f in served.seen]
    chromium.close()


@needs_chromium
def test_random_walks_of_both_agree(browser):
    """500 states and more: python -m benchmarks.webarena_speed --parity 500."""
    compared, differences = parity(int(os.environ.get("PARITY_STATES", 100)), 40, seed=11, browser=browser)
    assert compared >= 100 and not differences, "\n".join(differences)


# ---- a real browser ----------------------------------------------------------------------------------------

@needs_chromium
def test_scripts_frames_dialogs_downloads_and_slow_pages(served, browser):
    chromium = Chromium(Addresses(served.bases), browser, settle_s=0.1)
    assert "textbox 'inside'" in chromium.open(["shopping/script"]).text
    chromium.limit_s = 2
    slow, = play(chromium, "click [<slow>]")
    chromium.limit_s = 20
    ring, file, typed, covered = play(
        chromium, "click [<ring>]", "click [<file>]", "type [<inside>] [deep] [0]", "click [<covered>]")
    assert ring.endswith("note: dialog dismissed: boo")
    assert slow.endswith("note: the page did not load in 2 seconds")
    assert file.endswith("note: download refused: a.zip")
    assert "textbox 'inside' value 'deep'" in typed
    assert covered.startswith("page: Other")
    chromium.close()


@needs_chromium
def test_an_address_that_does_not_answer(served, browser):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    chromium = Chromium(Addresses({**served.bases, "map": nobody}), browser)
    with pytest.raises(ValueError, match="map/x: the page did not load: net::ERR"):
        chromium.open(["map/x"])
    chromium.open(["shopping/other"])
    lost, back = play(chromium, "goto [map/x]", "go_back")
    assert lost.startswith("page: Not loaded\nurl: map/x\n")
    assert "note: the page did not load: net::ERR" in lost
    assert back.startswith("page: Other") and "note" not in back
    chromium.close()


@needs_chromium
def test_other_hosts_cannot_be_reached(browser):
    page = browser.chromium.new_page()
    with pytest.raises(Exception, match="ERR_NAME_NOT_RESOLVED"):
        page.goto("http://example.com/")
    page.close()


@needs_chromium
def test_unknown_elements_fail_at_once(served, browser):
    chromium = Chromium(Addresses(served.bases), browser)
    chromium.open(["shopping"])
    start = time.monotonic()
    play(chromium, "click [99]", "type [99] [x] [1]", "hover [99]")
    assert time.monotonic() - start < 15                                     # a search for them waits 20
    chromium.close()


@needs_chromium
def test_episodes_share_nothing(browser):
    """Stops: a login or a cart of one episode seen in another."""
    world = SiteDatabase()
    with world.serve() as served:
        one, two = (Chromium(Addresses(served.bases), browser) for _ in range(2))
        account = one.open(["shopping/account"], {"shopping": world.login("shopping")}).text
        assert account != two.open(["shopping/account"]).text and "password" in two.shown.text.lower()
        state = one.storage_state()
        one.close()
        again = Chromium(Addresses(served.bases), browser, storage_state=state)
        assert again.open(["shopping/account"]).text == account
        assert world.accounts["shopping"][0] in again.page("shopping/account").evaluate(
            "document.body.outerText")
        again.close()
        two.close()


@needs_chromium
def test_workers_play_many_in_order_and_leave_nothing_running():
    before = set(family(os.getpid()))              # the browser of the other tests
    worlds = [SiteDatabase() for _ in range(3)]
    places = [world.serve() for world in worlds]
    with Workers(2) as workers:
        browsers = workers.browsers([Addresses(place.bases) for place in places])
        screens = workers.open(browsers, [([site], {}) for site in ("shopping", "reddit", "homepage")])
        direct = InProcessBrowser(SiteDatabase())
        assert [screen.text for screen in screens] == [
            direct.open([site]).text for site in ("shopping", "reddit", "homepage")]
        moved = workers.act(browsers, [parse("click [4]"), parse("go_back"), parse("goto [shopping]")])
        assert moved[1].note == "no page to go back to"
        assert moved[2].text == screens[0].text
        assert moved[0].text != screens[0].text
        page = browsers[1].page("reddit")
        assert page.evaluate("document.title") == screens[1].text.split("\n")[0].removeprefix("page: ")
        assert "<title>" in page.html
        page.close()
        with pytest.raises(ValueError, match="no address"):
            workers.open(browsers[:1], [(["nowhere"], {})])
        children = [child for child in family(os.getpid()) if child not in before]
        assert len(children) > 6
    for place in places:
        place.close()
    assert gone(children)


ALONE = """
import sys, time
from dreamgym.envs.webarena.chromium import Browser, Workers
kept = Browser() if sys.argv[1] == "browser" else Workers(1)
print("ready", flush=True)
time.sleep(60)
"""


@needs_chromium
@pytest.mark.parametrize("what", ["browser", "workers"])
def test_a_killed_process_takes_its_browsers_with_it(what):
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, what], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    children = family(process.pid)
    assert len(children) > 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert gone(children)


@pytest.mark.skipif("Workers" not in globals(), reason="Playwright is not installed")
def test_a_missing_browser_is_a_value_error(monkeypatch):
    with pytest.raises(ValueError, match="/no/such: no such browser; install Chromium"):
        Workers(1, "/no/such")
    monkeypatch.setenv("CHROMIUM", "/nor/this")
    with pytest.raises(ValueError, match="/nor/this: no such browser"):
        find_chromium()


@needs_chromium
def test_a_browser_that_hangs_or_dies_is_a_runtime_error(served):
    for action in ("click [<hang>]", "kill"):
        before = set(family(os.getpid()))
        with Chromium(Addresses(served.bases)) as chromium:
            chromium.open(["shopping/script"])
            chromium.limit_s = 0.5
            children = list(set(family(os.getpid())) - before)
            assert len(children) > 3
            if action == "kill":
                chromium.browser.kill()
            with pytest.raises(RuntimeError, match="the page or its browser has ended"):
                play(chromium, "click [<ring>]" if action == "kill" else action)
        assert gone(children)


def family(pid: int) -> list[int]:
    """Ids of all processes below one."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def gone(pids: list[int], seconds: float = 120) -> bool:
    """Whether all of them end soon; a zombie has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(
            Path(f"/proc/{pid}/stat").exists()
            and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
            for pid in pids):
            return True
        time.sleep(0.1)
    return False
