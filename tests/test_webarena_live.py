"""A user's own WebArena: the own sites, served on loopback, stand in as its addresses, and a tiny server as
its reset service. test_webarena_env.py plays episodes there."""
import json
import os
import stat
import time

import pytest

from dreamgym.envs.webarena import live
from dreamgym.envs.webarena.actions import Action
from dreamgym.envs.webarena.evaluators import NotSupported, shop_helpers
from dreamgym.envs.webarena.live import Instance, Logins
from dreamgym.envs.webarena.page import Addresses
from dreamgym.envs.webarena.sites import SiteDatabase
from tests.conftest import http_server

@pytest.fixture
def gone():
    with http_server(lambda *_: (200, {}, "")) as url:
        pass
    return url


# ---- what the user gives ----

def test_one_instance_from_the_environment():
    environ = {"WA_SHOPPING_ADMIN": "http://h:7780/admin/", "REDDIT": "http://other", "WA_MAP": "http://m",
               "MAP": "http://no", "WA_FULL_RESET": "http://m:7565/reset"}
    assert live.read_instances(environ, ["map"]) == [Instance(
        {"shopping_admin": "http://h:7780/admin", "reddit": "http://other", "map": "http://m"}, "http://m:7565")]
    with pytest.raises(ValueError, match="^WA_GITLAB, WA_WIKIPEDIA: not set, but the tasks need"):
        live.read_instances(environ, ["wikipedia", "map", "gitlab"])


@pytest.mark.parametrize("value", ["g:8023", "ftp://g", "http://", "http://me:pw@g", "http://g/?x=1", "http://g h"])
def test_bad_address_is_named_but_not_repeated(value):
    with pytest.raises(ValueError, match="WA_GITLAB") as error:
        live.read_instances({"WA_GITLAB": value}, ["gitlab"])
    assert "pw" not in str(error.value)


def test_several_instances_from_a_file(tmp_path):
    path = tmp_path / "instances.jsonl"
    lines = [{"WA_MAP": f"http://m{i}", "WA_FULL_RESET": f"http://m{i}:7565/reset"} for i in range(2)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    environ = {"WA_INSTANCES": str(path), "WA_MAP": "http://not-this"}
    assert live.read_instances(environ, ["map"]) == [
        Instance({"map": f"http://m{i}"}, f"http://m{i}:7565") for i in range(2)]
    for text, said in (("", "no instance"), ("{", "line 1"), ("[]", "line 1"), ('{"WA_MAP": 3}', "line 1"),
                       ('{"WA_GITLAB": "http://g"}', "line 1: WA_MAP"),
                       ('{"MAP": "http://m"}\n' * 2, "line 2: http://m stands in an earlier line")):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"instances.jsonl: .*{said}"):
            live.read_instances(environ, ["map"])
    with pytest.raises(ValueError, match="cannot be read"):
        live.read_instances({"WA_INSTANCES": str(tmp_path / "none")}, [])


def test_more_hosts():
    assert live.read_hosts({}) == set()
    assert live.read_hosts({"WA_MORE_HOSTS": "router.test, 10.0.0.3,"}) == {"router.test", "10.0.0.3"}
    with pytest.raises(ValueError, match="WA_MORE_HOSTS: found 'http://r:5000'"):
        live.read_hosts({"WA_MORE_HOSTS": "http://r:5000"})


def test_accounts():
    assert live.read_accounts({}) == live.ACCOUNTS
    assert live.read_accounts({"WA_REDDIT_USERNAME": "me", "WA_REDDIT_PASSWORD": "pw"})["reddit"] == ("me", "pw")
    with pytest.raises(ValueError, match="WA_REDDIT_PASSWORD: one is not set") as error:
        live.read_accounts({"WA_REDDIT_USERNAME": "me"})
    assert "'me'" not in str(error.value)


# ---- reaching it, resetting it ----

def test_what_does_not_answer_is_told(gone):
    with http_server(lambda *_: (502, {}, "bad gateway")) as broken, \
            http_server(lambda *_: (404, {}, "")) as there:
        live.check_answers({"map": there})
        with pytest.raises(ValueError) as error:
            live.check_answers({"gitlab": broken, "map": there, "reddit": gone})
    assert f"gitlab at {broken}: HTTP 502; reddit at {gone}: " in str(error.value)
    assert "map" not in str(error.value)
    with pytest.raises(ValueError, match="the reset service does not answer"):
        live.full_reset(gone, limit_s=0.2)


@pytest.mark.parametrize("first, last, looks, said", [
    (200, (200, live.READY), 3, ""), (418, (200, live.READY), 3, ""), (500, (200, ""), 1, "/reset: HTTP 500"),
    (200, (500, "Error"), 2, "/status: HTTP 500 'Error'"),
    (200, (200, ""), 10**9, "not ready 0 seconds after the reset began, it says 'Reset ongoing'")])
def test_reset_is_waited_for(first, last, looks, said):
    """`looks`: at which look at its status the service says the last word."""
    asked = []

    def answers(method, path, headers, body):
        asked.append(path)
        if path == "/reset":
            return first, {}, "Reset initiated"
        status, text = last if asked.count("/status") >= looks else (418, "Reset ongoing")
        return status, {}, text

    with http_server(answers) as url:
        if said:
            with pytest.raises(ValueError, match=said):
                live.full_reset(url, limit_s=0.4, poll_s=0.02)
        else:
            live.full_reset(url, limit_s=60, poll_s=0.01)
            assert asked == ["/reset"] + ["/status"] * 3


# ---- logins, in a browser ----

@pytest.fixture
def served():
    with SiteDatabase().serve() as running:
        yield running


def patient(bases, folder, accounts=live.ACCOUNTS):
    """Logins that wait long enough on a busy machine."""
    return Logins(bases, accounts, folder, timeout_s=180)


def test_logins_are_kept_looked_at_and_renewed(browser, served, tmp_path):
    """A state that is not logged in, and one that others can read."""
    def sessions() -> int:
        return served.db.execute("SELECT count(*) FROM sessions").fetchone()[0]

    folder, first, both = tmp_path / "logins", sessions(), ["reddit", "gitlab"]
    state = patient(served.bases, folder).state(browser.chromium, ["gitlab", "reddit", "map"])
    assert sessions() == first + 2
    kept, = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept, folder)] == [0o600, 0o700]
    assert kept.name.startswith("gitlab.reddit-")
    assert not any(password in kept.read_text() for _, password in live.ACCOUNTS.values())
    logins = patient(served.bases, folder)             # another process looks at it, and sends nothing
    assert logins.state(browser.chromium, both) == state and sessions() == first + 2

    served.reset()                                     # all sessions are gone
    assert logins.state(browser.chromium, both) == state       # trusted for a while
    logins.seen.clear()
    renewed = logins.state(browser.chromium, both)
    assert sessions() == first + 2                     # the reset took the old two back

    soon = {**renewed, "cookies": [{**cookie, "expires": time.time() + 60} for cookie in renewed["cookies"]]}
    kept.write_text(json.dumps(soon))
    os.utime(kept, (0, 0))
    logins.state(browser.chromium, both)
    assert sessions() == first + 4


def test_a_log_out_ends_with_its_episode(browser, served, tmp_path):
    """Stops the episodes after one that logged out from beginning logged out."""
    from dreamgym.envs.webarena.chromium import Chromium
    logins, page = patient(served.bases, tmp_path), Chromium(Addresses(served.bases), browser)
    for _ in range(2):
        state = logins.state(browser.chromium, ["gitlab"], page.asked)
        shown = page.open([f"{served.bases['gitlab']}/account"], storage_state=state)
        page.act(Action("click", next(i for i, node in shown.lines.items() if node.name == "Log out")))
        page.close()


@pytest.mark.parametrize("site", live.RECIPES)
def test_wrong_password_is_told_and_never_shown(browser, served, tmp_path, site):
    accounts = {**live.ACCOUNTS, site: (live.ACCOUNTS[site][0], "wrong-secret")}
    said = f"login failed: after it, {site} at .* still asks for one. Check .WA_{site.upper()}_USERNAME"
    with pytest.raises(ValueError, match=said) as error:
        patient(served.bases, tmp_path, accounts).state(browser.chromium, [site])
    assert "wrong-secret" not in str(error.value) and list(tmp_path.iterdir()) == []


def test_site_without_a_login_form(browser, gone, tmp_path):
    with pytest.raises(ValueError, match=f"reddit at {gone}: .*ERR_CONNECTION_REFUSED"):
        patient({"reddit": gone}, tmp_path).state(browser.chromium, ["reddit"])
    with http_server(lambda *_: (200, {}, "<p>under construction</p>")) as other, \
            pytest.raises(ValueError, match="no usable login form at /login"):
        Logins({"reddit": other}, live.ACCOUNTS, tmp_path, timeout_s=0.5).state(browser.chromium, ["reddit"])


@pytest.mark.parametrize("content, age_s, reads", [
    ("", 0, False), ("{", 0, False), ("[]", 0, False), ("3", 0, False), ('{"cookies": [{}]}', 0, False),
    ([-1, 200, 10**6], 0, True), ([-50], 100, True), ([-1, 200], 10**4, False), ([-5], 10**4, False)])
def test_kept_states(tmp_path, content, age_s, reads):
    path, now = tmp_path / "a.json", time.time()
    if isinstance(content, list):
        content = json.dumps({"cookies": [{"expires": -1 if end == -1 else now + end} for end in content]})
    path.write_text(content)
    os.utime(path, (now - age_s, now - age_s))
    assert (live.read_state(path) is not None) == reads
    assert live.read_state(tmp_path / "none") is None


# ---- the shop's interface ----

def test_magento():
    def answers(method, path, headers, body):
        if path == "/rest/default/V1/integration/admin/token":
            known = json.loads(body) == {"username": "admin", "password": "admin1234"}
            return (200, {}, '"t-1"') if known and method == "POST" else (401, {}, "{}")
        if headers["Authorization"] != "Bearer t-1":
            return 401, {}, "{}"
        if path.startswith("/rest/V1/orders?"):
            return 200, {}, json.dumps({"items": [{"increment_id": "000000190"}]})
        reviews = [{"nickname": "a", "ratings": [{"percent": 20}], "detail": "bad", "title": "t"},
                   {"nickname": "Emma", "ratings": [{"percent": 80}], "detail": "ok", "title": "u"}]
        return 200, {}, json.dumps(reviews if path == "/rest/V1/products/B1/reviews" else [])

    with http_server(answers) as base:
        helpers = shop_helpers(live.Magento(base, live.ACCOUNTS["shopping_admin"]))
        assert helpers["shopping_get_latest_order_url"]() == f"{base}/sales/order/view/order_id/190/"
        assert [helpers[f"shopping_get_sku_latest_review_{name}"]("B1")
                for name in ("author", "rating", "text", "title")] == ["Emma", "80", "ok", "u"]
        assert helpers["shopping_get_sku_latest_review_author"]("B2") == ""
        with pytest.raises(NotSupported, match="HTTP 401") as error:
            live.Magento(base, ("admin", "wrong-secret")).latest_order_url()
    assert "wrong-secret" not in str(error.value)
    with pytest.raises(NotSupported, match="does not answer"):
        live.Magento(base, ("admin", "x")).latest_review("B1")
