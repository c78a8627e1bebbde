"""WebArena's two back ends: the same walk gives the same states, what cannot be done changes nothing, nothing
is left running."""
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, parse_qsl

import pytest

from benchmarks.webarena_speed import parity
from dreamgym.envs.webarena.actions import parse
from dreamgym.envs.webarena.direct import InProcessBrowser, canonical
from dreamgym.envs.webarena.page import Addresses
from dreamgym.envs.webarena.sites import SiteDatabase
from tests.conftest import free_port, gone, http_server

try:
    from dreamgym.envs.webarena.chromium import Chromium, Workers
except ImportError:                              # no Playwright: what needs it is skipped
    Chromium = Workers = None

FORM = """<!doctype html><title>Form</title><form action=/answer autocomplete=off><label for=n>Name</label>
<input id=n name=name type=text><input name=find type=search aria-label=Find><textarea name=note
aria-label=Note></textarea><input type=checkbox id=b name=box value=yes><label for=b>the Box</label>
<input type=checkbox name=late aria-label=Late checked><label>Color <select name=color><option
value=r>Red</option><option selected>Blue</option></select></label><input type=hidden name=token
value="a b~*"><button>Get</button></form><form method=post action=/post autocomplete=off><input name=word
aria-label=Word><button>Post</button></form><p><a href="/other">other</a></p><a href="http://example.com/">out</a>
<a href="/redirect">moved</a><button>Alone</button>"""
PAGES = {
    "/": FORM,
    "/other": "<!doctype html><title>Other</title><p>other page</p><a href=/>form</a><a href=/other>again</a>",
    "/script": """<!doctype html><title>Script</title><button onclick="alert('boo')">ring</button>
<a href=/slow>slow</a><a href=/file>file</a><a href=/other target=_blank>tab</a><iframe src=/inner></iframe>
<form action=/answer><input aria-label=Needed required><input type=number aria-label=Count><input
aria-label=Fixed readonly><button>Check</button></form><div style='position:relative;height:50px'><a href=/other
style='position:absolute;top:0;left:0'>covered</a><div style='position:absolute;top:0;left:0;width:300px;
height:50px;background:#eee'></div></div><button onclick='for(;;);'>hang</button>""",
    "/moving": "<!doctype html><title>Moving</title><script>onmousemove = () => document.body.style.margin = '90px'</script>"
               "<a href=/other>there</a>",
    "/inner": "<input aria-label=inside><iframe src=/deep></iframe>", "/deep": "<button>deep</button>"}


class SmallSite:
    """One site of a few pages with the face of a SiteDatabase; `seen` are the forms it was sent."""

    def __init__(self):
        self.bases, self.seen = {"shopping": "http://shopping.test"}, []

    def handle(self, site, method, path, query="", form=None, cookies=None):
        if path in ("/answer", "/post"):
            sent = parse_qs(query, keep_blank_values=True) if method == "GET" else list(form)
            self.seen.append((method, path, sent))
        if path in ("/redirect", "/post"):
            return SimpleNamespace(status=303, headers={"Location": "/other?from=1"}, body="", set_cookies={})
        body = PAGES.get(path, f"<!doctype html><title>Page</title><p>{path[1:]}</p><form method=post "
                               "action=/refused><button>Send</button></form>")
        return SimpleNamespace(status=200, headers={}, body=body, set_cookies={})


@pytest.fixture
def served() -> Iterator[SmallSite]:
    def answer(method, url, headers, body):
        path, _, query = url.partition("?")
        if path == "/slow":
            time.sleep(4)
        form = parse_qsl(body.decode(), keep_blank_values=True)
        found = world.handle("shopping", method, path, query, form)
        more = {"Content-Disposition": 'attachment; filename="a.zip"'} if path == "/file" else {}
        return found.status, {"Cache-Control": "no-store", **found.headers, **more}, found.body

    world = SmallSite()
    with http_server(answer) as url:
        world.bases = {"shopping": url}
        yield world


def play(browser, *actions: str) -> list[str]:
    """Texts after each action; `<name>` in an action stands for the number of the element of that name."""
    texts = []
    for action in actions:
        if "<" in action:
            name = action[action.index("<") + 1:action.index(">")]
            number = next(i for i, node in browser.shown.lines.items() if node.name == name)
            action = action.replace(f"<{name}>", str(number))
        texts.append(browser.act(parse(action)).text)
    return texts


# ---- what both do ----

SCRIPTS = {
    "all values are sent": ["type [<Name>] [a b] [0]", "type [<Note>] [one] [1]", "click [<the Box>]",
                            "click [<Late>]", "type [<Color>] [red]", "click [<Get>]"],
    "posted": ["type [<Word>] [x~y*] [0]", "click [<Post>]", "go_back", "go_forward"],
    "Enter": ["type [<Name>] [n] [1]", "go_back", "type [<Find>] [x] [0]", "press [Escape]", "click [<Name>]",
              "press [enter]"],
    "what cannot be done": [
        "click [99]", "hover [98]", "type [97] [x] [1]", "type [<other>] [x] [1]", "type [<Color>] [Green]",
        "click [<Color>]", "click [<out>]", "goto [http://example.com/]", "goto [nowhere/x]", "go_back",
        "go_forward", "tab_focus [3]", "close_tab", "click [<Alone>]", "scroll [up]"],
    "steps up": [f"goto [shopping/{path}]" for path in (
        "../other", "x/../other?a=../b", "x/./y", "..", "x/%2E./", "x\\..\\y", "x//..//y|z", "./", "...")],
    "history": ["click [<other>]", "click [<again>]", "click [<form>]", "go_back", "go_back", "go_back",
                "go_forward", "go_forward", "go_back", "click [<form>]", "go_forward"],
    "redirects are places once": ["click [<moved>]", "click [<form>]", "go_back", "go_back"],
    "an answer to a form is passed over": ["goto [shopping/ask]", "click [<Send>]", "goto [shopping/other]",
                                           "go_back", "go_forward", "go_back", "go_back"],
    "tabs": ["new_tab", "go_back", "click [3]", "press [Enter]", "goto [shopping]", "type [<Name>] [kept] [0]",
             "tab_focus [0]", "goto [shopping/other?a=b c'd]", "tab_focus [1]", "close_tab", "close_tab"]}


def test_forms_send_what_a_browser_sends():
    """Unchecked boxes sent, values of options instead of labels, line ends of text areas."""
    world = SmallSite()
    direct = InProcessBrowser(world)
    direct.open(["shopping"])
    play(direct, *SCRIPTS["all values are sent"])
    assert world.seen == [("GET", "/answer", {
        "name": ["a b"], "find": [""], "note": ["one\r\n"], "box": ["yes"], "color": ["r"], "token": ["a b~*"]})]


def test_what_cannot_be_done_changes_nothing():
    direct = InProcessBrowser(SmallSite())
    start = direct.open(["shopping"]).text
    assert set(play(direct, *SCRIPTS["what cannot be done"])) == {start}


def test_addresses_are_written_as_chromium_writes_them():
    assert canonical("http://A.test") == "http://a.test/"
    assert canonical("http://a.test/b c?q=d e'f\"é#x") == "http://a.test/b%20c?q=d%20e%27f%22%C3%A9#x"


@pytest.mark.parametrize("urls, said", [(["elsewhere"], "no address 'elsewhere'"), ([], "expected at least one")])
def test_a_bad_start_is_a_value_error(urls, said):
    with pytest.raises(ValueError, match=said):
        InProcessBrowser(SmallSite()).open(urls)


DRAFT = ["type [<Name>] [a \"b\"] [0]", "type [<Note>] [one] [1]", "click [<the Box>]", "click [<Late>]",
         "type [<Color>] [red]"]
HELD = {"[name=name].value": 'a "b"', "[name=note].value": "one\n", "[name=box].checked": "true",
        "[name=late].checked": "false", "[name=color].value": "r", "[name=find].value": "",
        "[name=token].value": "a b~*", "[name=box].value": "yes", "h9.value": None}


def held(page) -> dict:
    """What the locators of HELD give."""
    return {locator: page.evaluate(f"document.querySelector('{css}').{member}")
            for locator in HELD for css, member in [locator.split(".")]}


def test_the_page_in_front_holds_what_was_typed():
    """Stops drafts from being lost to an evaluator, and from getting into a fresh page or one seen again."""
    world = SmallSite()
    direct, other = InProcessBrowser(world), InProcessBrowser(world)
    start = direct.open(["shopping"]).text
    before, shown = held(direct.front), play(direct, *DRAFT)[-1]
    assert other.open(["shopping"]).text == start != shown           # a shared page is never written on
    assert held(direct.front) == HELD != before == held(direct.page(direct.url))
    assert direct.act(parse("scroll [up]")).text == shown            # the evaluator's page is not seen
    assert play(direct, "click [<other>]", "go_back")[-1] == start and held(direct.front) == before
    play(direct, "new_tab")
    assert direct.front.html == "" and set(held(direct.front).values()) == {None}


# ---- parity ----

@pytest.mark.parametrize("name", SCRIPTS)
def test_both_do_the_same(name, served, browser):
    world = SmallSite()
    direct, chromium = InProcessBrowser(world), Chromium(Addresses(served.bases), browser)
    assert direct.open(["shopping"]).text == chromium.open(["shopping"]).text
    assert [*zip(SCRIPTS[name], play(direct, *SCRIPTS[name]))] == [
        *zip(SCRIPTS[name], play(chromium, *SCRIPTS[name]))]
    assert world.seen == served.seen
    chromium.close()


def test_both_hold_the_same_draft(served, browser):
    chromium = Chromium(Addresses(served.bases), browser)
    chromium.open(["shopping"])
    play(chromium, *DRAFT)
    assert held(chromium.front) == HELD != held(page := chromium.page(chromium.url))
    page.close()
    assert not served.seen and held(chromium.front) == HELD          # reading it sends and changes nothing
    chromium.close()


def test_random_walks_of_both_agree(browser):
    """500 states and more: python -m benchmarks.webarena_speed --parity 500."""
    compared, differences = parity(int(os.environ.get("PARITY_STATES", 100)), 40, seed=11, browser=browser)
    assert compared >= 100 and not differences, "\n".join(differences)


# ---- a real browser ----

def test_what_only_a_real_browser_meets(served, browser):
    """Scripts, frames, dialogs, downloads, slow pages, covered links, and tabs that a page opens."""
    chromium = Chromium(Addresses(served.bases), browser, settle_s=0.1)
    start = chromium.open(["shopping/script"]).text
    assert "link 'tab'\ntextbox 'inside'\nbutton 'deep'\ntextbox 'Needed'" in start
    chromium.limit_s = 2
    assert play(chromium, "click [<slow>]", "click [<ring>]", "click [<file>]", "click [<Check>]",
                "type [<Count>] [many] [1]", "type [<Fixed>] [x] [1]") == [start] * 6
    assert not served.seen
    chromium.limit_s = 20
    typed, tab, _, covered = play(chromium, "type [<inside>] [deep] [0]", "click [<tab>]", "close_tab",
                                  "click [<covered>]")
    assert "textbox 'inside' value 'deep'" in typed
    assert tab.startswith("tabs: Script | *Other") and covered.startswith("page: Other")
    chromium.close()


def test_a_click_that_the_mouse_misses(served, browser):
    """Stops a page that scrolls under the mouse from leaving a click undone."""
    chromium = Chromium(Addresses(served.bases), browser)
    chromium.open(["shopping/moving"])
    assert play(chromium, "click [<there>]")[-1].startswith("page: Other")
    chromium.close()


def test_an_address_that_does_not_answer(served, browser):
    chromium = Chromium(Addresses({**served.bases, "map": f"http://127.0.0.1:{free_port()}"}), browser)
    with pytest.raises(ValueError, match="map/x: the page did not load: net::ERR"):
        chromium.open(["map/x"])
    chromium.open(["shopping/other"])
    lost, back = play(chromium, "goto [map/x]", "go_back")
    assert lost.startswith("page: Not loaded\nurl: map/x\n") and back.startswith("page: Other")
    chromium.close()


def test_other_hosts_cannot_be_reached(browser):
    page = browser.chromium.new_page()
    with pytest.raises(Exception, match="ERR_NAME_NOT_RESOLVED"):
        page.goto("http://example.com/")
    page.close()


def test_episodes_share_nothing(browser):
    world = SiteDatabase()
    with world.serve() as served:
        one, two = (Chromium(Addresses(served.bases), browser) for _ in range(2))
        account = one.open(["shopping/account"], {"shopping": world.login("shopping")}).text
        assert account != two.open(["shopping/account"]).text and "password" in two.shown.text.lower()
        state = one.context.storage_state()
        one.close()
        assert two.open(["shopping/account"], storage_state=state).text == account
        page = two.page("shopping/account")
        assert world.accounts["shopping"][0] in page.evaluate("document.body.outerText") and "<title>" in page.html
        two.close()


ALONE = """
import time
from dreamgym.envs.webarena.chromium import Workers
kept = Workers(2)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.usefixtures("needs_chromium")
def test_a_killed_process_takes_its_browsers_with_it():
    process = subprocess.Popen([sys.executable, "-c", ALONE], cwd=Path(__file__).parents[1], text=True,
                               stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    children = family(process.pid)
    assert len(children) > 6
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert gone(children)


@pytest.mark.skipif(Workers is None, reason="Playwright is not installed")
def test_a_missing_browser_is_a_value_error(monkeypatch):
    monkeypatch.setenv("CHROMIUM", "/no/such")
    with pytest.raises(ValueError, match="/no/such: no such browser; install Chromium"):
        Workers(1)


@pytest.mark.usefixtures("needs_chromium")
@pytest.mark.parametrize("action", ["click [<hang>]", "kill"])
def test_a_browser_that_hangs_or_dies_is_a_runtime_error(served, action):
    before = set(family(os.getpid()))
    workers = Workers(1)
    (thread, browser), = workers.pairs
    children = list(set(family(os.getpid())) - before)

    def ends() -> None:
        chromium = Chromium(Addresses(served.bases), browser)
        chromium.open(["shopping/script"])
        chromium.limit_s = 0.5
        if action == "kill":
            browser.kill()
        with pytest.raises(RuntimeError, match="the page or its browser has ended"):
            play(chromium, "click [<ring>]" if action == "kill" else action)
    thread.submit(ends).result()
    workers.close()
    assert len(children) > 3 and gone(children)


def family(pid: int) -> list[int]:
    """Ids of all processes below one."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]
