"""A user's own WebArena: the own sites, served on loopback, stand in as its addresses, and a tiny server as
its reset service."""

import http.server
import json
import stat
import threading
import time
from contextlib import contextmanager

import pytest

from dreamgym.envs.webarena import live as live
from dreamgym.envs.webarena.evaluators import SITES, NotSupported, shop_helpers
from dreamgym.envs.webarena.live import Instance, LiveError, Logins

ALL = {f"WA_{site.upper()}": f"http://{site}.test:80" for site in SITES}
WITH_LOGIN = tuple(live.RECIPES)
PATIENCE_S = 180                                 # of one page: a busy machine takes more than 30


@contextmanager
def server(answers):
    """A loopback server; answers(method, path, headers, body) -> (status, text)."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            status, text = answers(
                self.command, self.path, self.headers,
                self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_port}"
    finally:
        served.shutdown()
        thread.join()
        served.server_close()


# ---- what the user gives -----------------------------------------------------------------------------------

def test_addresses():
    assert live.addresses({}) is None and live.addresses({"PATH": "/bin"}) is None
    found = live.addresses({**ALL, "WA_SHOPPING_ADMIN": "http://h:7780/admin/", "REDDIT": "http://other"})
    assert found["shopping_admin"] == "http://h:7780/admin"
    assert found["reddit"] == "http://reddit.test:80"
    assert set(found) == set(SITES)
    assert live.addresses({"GITLAB": "http://g:8023", "WA_GITLAB": ""}, ["gitlab"]) == {
        "gitlab": "http://g:8023"}
    with pytest.raises(
        ValueError, match="^WA_MAP, WA_WIKIPEDIA: not set, but the tasks need them; set are gitlab"):
        live.addresses({"GITLAB": "http://g:8023"}, ["wikipedia", "map", "gitlab"])


@pytest.mark.parametrize(
    "value", ["g:8023", "ftp://g", "http://", "http://me:pw@g", "http://g/?x=1", "http://g h"])
def test_bad_address_is_named_but_not_repeated(value):
    with pytest.raises(ValueError, match="WA_GITLAB") as error:
        live.addresses({"WA_GITLAB": value}, ["gitlab"])
    assert "pw" not in str(error.value)


def test_instances(tmp_path):
    path = tmp_path / "instances.jsonl"
    lines = [{"WA_MAP": f"http://m{i}", "WA_FULL_RESET": f"http://m{i}:7565/reset"} for i in range(2)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert live.read_instances(path, ["map"]) == [
        Instance({"map": f"http://m{i}"}, f"http://m{i}:7565") for i in range(2)]
    assert live.read_instance(lines[0], ["map"]).reset_url == "http://m0:7565"
    assert live.read_instance({}) is None
    twice = json.dumps(lines[0]) + "\n" + json.dumps(lines[0])
    for text, said in (
        ("", "no instance"), ("{", "line 1"), ("[]", "line 1: names no address"),
        ('{"WA_MAP": 3}', "line 1: WA_MAP"), ('{"WA_GITLAB": "http://g"}', "line 1: WA_MAP"),
        (twice, "line 2: http://m0 stands in an earlier line")):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"instances.jsonl: .*{said}"):
            live.read_instances(path, ["map"])
    with pytest.raises(ValueError, match="cannot be read"):
        live.read_instances(tmp_path / "none")


def test_accounts():
    assert live.read_accounts({}) == live.ACCOUNTS
    assert live.read_accounts({"WA_REDDIT_USERNAME": "me", "WA_REDDIT_PASSWORD": "pw"})["reddit"] == (
        "me",
        "pw")
    with pytest.raises(ValueError, match="WA_REDDIT_PASSWORD: not set") as error:
        live.read_accounts({"WA_REDDIT_USERNAME": "me"})
    assert "'me'" not in str(error.value)


# ---- reaching it, resetting it -----------------------------------------------------------------------------

def test_what_does_not_answer_is_listed():
    with server(lambda *_: (502, "bad gateway")) as broken, server(lambda *_: (404, "")) as there:
        with server(lambda *_: (200, "")) as gone:
            pass
        live.check_answers({"map": there})
        with pytest.raises(LiveError) as error:
            live.check_answers({"gitlab": broken, "map": there, "reddit": gone})
    assert f"gitlab at {broken}: HTTP 502; reddit at {gone}: " in str(error.value)
    assert "map" not in str(
        error.value)


def reset_service(looks: int, first=200, last=(200, live.READY)):
    """Ready at the last of so many looks; `asked` are the paths that were asked for."""
    asked = []

    def answers(method, path, headers, body):
        asked.append(path)
        if path == "/reset":
            return first, "Reset initiated"
        return last if asked.count("/status") >= looks else (418, "Reset ongoing")
    return answers, asked


@pytest.mark.parametrize("first", [200, 418])
def test_reset_is_waited_for(first):
    answers, asked = reset_service(3, first)
    seen = []
    with server(answers) as url:
        assert (
            0.02
            <= live.full_reset(url, limit_s=10, poll_s=0.01, progress=lambda seconds, said: seen.append(said))
            < 5)
    assert asked == ["/reset"] + ["/status"] * 3 and seen == ["Reset ongoing", "Reset ongoing", live.READY]


def test_reset_that_fails():
    for answers, said in (
        (reset_service(1, first=500)[0], "/reset: HTTP 500"),
        (reset_service(2, last=(500, "Error"))[0], "/status: HTTP 500 'Error'"),
        (reset_service(10**9)[0], "not ready 0 seconds after the reset began, it says 'Reset ongoing'")):
        with server(answers) as url, pytest.raises(LiveError, match=said):
            live.full_reset(url, limit_s=0.2, poll_s=0.02)
    with pytest.raises(LiveError, match="does not answer"):
        live.full_reset(url, limit_s=0.2)


# ---- logins, in a browser ----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright", reason="a real browser needs Playwright (requirements-webarena.txt)")
    from dreamgym.envs.webarena.chromium import Browser, find_chromium

    try:
        find_chromium()
    except ValueError as error:
        pytest.skip(str(error))
    with Browser() as running:
        yield running.chromium


@pytest.fixture(scope="module")
def world():
    pytest.importorskip("flask", reason="the own sites need flask")
    from dreamgym.envs.webarena.sites import SiteDatabase

    return SiteDatabase()


@pytest.fixture
def served(world):
    world.reset()
    with world.serve() as running:
        yield running


def patient(bases, folder, accounts=live.ACCOUNTS):
    """Logins that wait long enough on a busy machine."""
    return Logins(bases, accounts, folder, timeout_s=PATIENCE_S)


def sent_logins(world) -> int:
    """How many sessions the sites have given out."""
    return world.db.execute("SELECT count(*) FROM sessions").fetchone()[0]


def shown(browser, state, url: str) -> str:
    context = browser.new_context(storage_state=state)
    context.set_default_timeout(1000 * PATIENCE_S)
    try:
        page = context.new_page()
        page.goto(url)
        return page.content()
    finally:
        context.close()


def test_logins_are_kept_asserted_and_renewed_after_a_reset(browser, served, tmp_path):
    environ = {f"WA_{site.upper()}": base for site, base in served.bases.items()}
    instance = live.read_instance(environ, served.bases)
    live.check_answers(instance.bases)
    logins = patient(instance.bases, tmp_path / "logins", live.read_accounts({}))
    first = sent_logins(served.sites)
    state = logins.state(browser, ["gitlab", "reddit", "map"])
    assert sent_logins(served.sites) == first + 2
    assert live.RECIPES["gitlab"].path not in shown(browser, state, served.bases["gitlab"])

    kept, = (tmp_path / "logins").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert kept.name.startswith("gitlab.reddit-")
    assert not any(password in kept.read_text() for _, password in live.ACCOUNTS.values())
    again = patient(instance.bases, tmp_path / "logins").state(browser, ["reddit", "gitlab"])
    # another process: the kept one, looked at, nothing sent
    assert again == state and sent_logins(served.sites) == first + 2

    served.sites.reset()                                                     # all sessions are gone
    assert live.RECIPES["reddit"].path in shown(browser, state, served.bases["reddit"])
    logins.forget()
    renewed = logins.state(browser, ["gitlab", "reddit"])
    assert sent_logins(served.sites) == first + 2                            # the reset took the old two back
    assert live.RECIPES["reddit"].path not in shown(browser, renewed, served.bases["reddit"])
    assert browser.contexts == []


@pytest.mark.parametrize("site", WITH_LOGIN)
def test_wrong_password_is_told_and_never_shown(browser, served, tmp_path, site):
    accounts = {**live.ACCOUNTS, site: (live.ACCOUNTS[site][0], "wrong-secret")}
    logins = patient(served.bases, tmp_path, accounts)
    said = f"login failed: after it, {site} at .* still asks for one. Check .WA_{site.upper()}_USERNAME"
    with pytest.raises(LiveError, match=said) as error:
        logins.state(browser, [site])
    assert "wrong-secret" not in str(error.value)
    assert browser.contexts == []
    assert list(tmp_path.iterdir()) == []


def test_all_sites_at_once_and_no_look_while_trusted(browser, served, tmp_path):
    logins = patient(served.bases, tmp_path)
    state = logins.state(browser, WITH_LOGIN)
    assert {cookie["name"] for cookie in state["cookies"]} == {f"sid_{site}" for site in WITH_LOGIN}
    served.close()
    assert logins.state(browser, WITH_LOGIN) is state
    served.servers.clear()                                                   # closed once is enough


def test_site_that_does_not_answer(browser, tmp_path):
    with server(lambda *_: (200, "")) as gone:
        pass
    with pytest.raises(LiveError, match=f"reddit at {gone}: .*ERR_CONNECTION_REFUSED"):
        patient({"reddit": gone}, tmp_path).state(browser, ["reddit"])
    with server(lambda *_: (200, "<p>under construction</p>")) as other, \
            pytest.raises(LiveError, match="no usable login form at /login"):
        Logins({"reddit": other}, live.ACCOUNTS, tmp_path, timeout_s=0.5).state(browser, ["reddit"])
    with pytest.raises(ValueError, match="WA_GITLAB"):
        patient({"reddit": gone}, tmp_path).state(browser, ["reddit", "gitlab"])
    assert browser.contexts == []


def test_damaged_cache_is_none(tmp_path):
    logins = Logins({"reddit": "http://r"}, live.ACCOUNTS, tmp_path / "logins")
    path = logins._path(("reddit",))
    record = {"schema": 1, "saved": 5.0, "state": {"cookies": [], "origins": []}}
    assert logins._cached(("reddit",)) is None
    logins._keep(path, record)
    assert logins._cached(("reddit",)) == record
    for content in (
        "", "{", "[]", "3", '{"schema": 2}', '{"schema": 1, "saved": "x", "state": {"cookies": []}}',
        '{"schema": 1, "saved": 5, "state": {}}'):
        path.write_text(content)
        assert logins._cached(("reddit",)) is None, content


def test_expired_cache_is_replaced(browser, served, tmp_path):
    """Although the site would still take the cookie."""
    state = patient(served.bases, tmp_path).state(browser, ["reddit"])
    path, = tmp_path.iterdir()
    cookie = {**state["cookies"][0], "expires": time.time() + 60}
    path.write_text(
        json.dumps({"schema": 1, "saved": time.time() - 10**6, "state": {"cookies": [cookie], "origins": []}})
    )
    before = sent_logins(served.sites)
    patient(served.bases, tmp_path).state(browser, ["reddit"])
    assert sent_logins(served.sites) == before + 1
    assert json.loads(path.read_text())["saved"] > time.time() - 60


def test_cookie_given_for_minutes_is_no_login():
    def record(saved, *ends):
        return {"saved": saved, "state": {"cookies": [{"expires": end} for end in ends]}}

    now = time.time()
    assert not live._expired(record(now, -1, now + 200, now + 10**6))
    assert not live._expired(record(now - 100, now - 50))
    assert live._expired(record(now - 10**4, -1, now + 200)) and live._expired(record(now - 10**4, now - 5))


# ---- the shop's interface ----------------------------------------------------------------------------------

def test_magento():
    asked = []

    def answers(method, path, headers, body):
        asked.append((method, path.split("?")[0]))
        if path == "/rest/default/V1/integration/admin/token":
            known = json.loads(body) == {"username": "admin", "password": "admin1234"}
            return (200, '"t-1"') if known else (401, "{}")
        if headers["Authorization"] != "Bearer t-1":
            return 401, "{}"
        if path.startswith("/rest/V1/orders?"):
            return 200, json.dumps({"items": [{"increment_id": "000000190"}]})
        reviews = [{"nickname": "a", "ratings": [{"percent": 20}], "detail": "bad", "title": "t"},
                   {"nickname": "Emma", "ratings": [{"percent": 80}], "detail": "ok", "title": "u"}]
        return 200, json.dumps(reviews if path == "/rest/V1/products/B1/reviews" else [])

    with server(answers) as base:
        helpers = shop_helpers(live.Magento(base, live.ACCOUNTS["shopping_admin"]))
        assert helpers["shopping_get_latest_order_url"]() == f"{base}/sales/order/view/order_id/190/"
        assert [
            helpers[f"shopping_get_sku_latest_review_{name}"]("B1")
            for name in ("author", "rating", "text", "title")
        ] == ["Emma", "80", "ok", "u"]
        assert helpers["shopping_get_sku_latest_review_author"]("B2") == ""
        with pytest.raises(NotSupported, match="HTTPError") as error:
            live.Magento(base, ("admin", "wrong-secret")).latest_order_url()
    assert "wrong-secret" not in str(error.value)
    assert asked[:2] == [
        ("POST", "/rest/default/V1/integration/admin/token"),
        ("GET", "/rest/V1/orders")]
    with pytest.raises(NotSupported, match="does not answer"):
        live.Magento(base, ("admin", "x")).latest_review("B1")


# ---- the whole way -----------------------------------------------------------------------------------------

def test_own_sites_stand_in_for_a_webarena(browser, served, tmp_path):
    """Addresses, answers, reset through the service, login, an episode that changes a site, the verdict, and
    another reset that undoes it."""
    from dreamgym.envs.webarena.evaluators import PAGE_HELPERS, OwnShop, evaluate, located, read_tasks

    def answers(method, path, headers, body):
        if path == "/reset":
            served.sites.reset()
        return 200, live.READY

    orders = {
        "task_id": 1, "sites": ["shopping"], "intent": "Buy it again", "intent_template_id": 1,
        "start_url": "__SHOPPING__/",
        "eval": {
            "eval_types": ["program_html"],
            "program_html": [
                {
                    "url": "func:shopping_get_latest_order_url()",
                    "locator": "document.querySelector('.badge').outerText",
                    "required_contents": {"exact_match": "status Pending"}}]}}
    (tmp_path / "tasks.json").write_text(json.dumps([orders]))
    with server(answers) as reset_url:
        environ = {f"WA_{site.upper()}": base for site, base in served.bases.items()}
        instance = live.read_instance({**environ, "WA_FULL_RESET": reset_url}, served.bases)
        live.full_reset(instance.reset_url, poll_s=0.01)
        logins = patient(instance.bases, tmp_path / "logins", live.read_accounts({}))
        context = browser.new_context(storage_state=logins.state(browser, ["shopping"]))
        context.set_default_timeout(1000 * PATIENCE_S)
        task = located(read_tasks(tmp_path / "tasks.json")[0], instance.bases)
        helpers = {**PAGE_HELPERS, **shop_helpers(OwnShop(served.sites))}

        class Fresh:
            def __init__(self, url):
                self.page = context.new_page()
                self.page.goto(url)
                self.url = url

            def evaluate(self, js):
                return self.page.evaluate(f"() => {js}")

            def close(self):
                self.page.close()

        def orders_placed() -> int:
            return served.sites.db.execute("SELECT count(*) FROM shop_orders").fetchone()[0]

        try:
            before = orders_placed()
            page = context.new_page()
            page.goto(f"{instance.bases['shopping']}/orders")
            page.locator("main a[href^='/orders/']").first.click()
            page.wait_for_url("**/orders/*")
            page.get_by_role("button", name="Reorder").click()
            page.goto(f"{instance.bases['shopping']}/checkout")
            page.get_by_role("button", name="Place Order").click()
            page.wait_for_url("**/orders/*")
            assert orders_placed() == before + 1
            verdict = evaluate(task, "", page.url, Fresh, helpers=helpers, wait_s=2.0)
            assert verdict.score == 1, verdict
            assert len(context.pages) == 1                                   # the evaluator's page is closed
            live.full_reset(instance.reset_url, poll_s=0.01)
            assert orders_placed() == before
        finally:
            context.close()
