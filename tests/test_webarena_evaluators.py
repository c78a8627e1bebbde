"""WebArena's task files and evaluators: each rule on a case made by hand, in both directions; the official
files where ../shared has them."""

import copy
import http.server
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dreamgym.envs.webarena import evaluators as ev
from dreamgym.envs.webarena.evaluators import evaluate, located, read_tasks
from dreamgym.envs.webarena.locators import NotSupported, query

BASES = {site: f"http://{site}.test" for site in ev.SITES}
DATA = Path(__file__).parent.parent.parent / "shared/data/webarena"
FILES = {"test.raw.json": (812, 118, 36), "test_webarena_lite.raw.json": (165, 40, 1)}
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="WebArena's task files are not in ../shared/data/webarena")

RECORD = {
    "sites": ["shopping"], "task_id": 3, "require_login": True,
    "storage_state": "./.auth/shopping_state.json", "start_url": "__SHOPPING__/cart", "geolocation": None,
    "intent_template": "x", "instantiation_dict": {}, "intent": "What does the blue speaker cost?",
    "require_reset": False, "intent_template_id": 9,
    "eval": {
        "eval_types": ["string_match"], "reference_answers": {"exact_match": "12"}, "reference_url": "",
        "program_html": None}}


def record(**changes) -> dict:
    """RECORD with fields replaced; those of `eval` are given as eval_NAME."""
    made = copy.deepcopy(RECORD)
    for name, value in changes.items():
        (made["eval"] if name.startswith("eval_") else made)[
            name.removeprefix("eval_") if name != "eval_types" else name
        ] = value
    return made


def task(tmp_path: Path, **changes) -> ev.WebTask:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([record(**changes)]))
    return located(read_tasks(path)[0], BASES)


@dataclass
class Page:
    """A page of made-up sites, and what was done to it."""
    url: str
    html: str
    did: list = field(default_factory=list)

    def evaluate(self, js):
        self.did.append(js)
        return query(self.html, js)

    def close(self):
        self.did.append("close")


def site(pages: dict[str, str], opened: list | None = None):
    def page(url):
        made = Page(url, pages.get(url, "<html><body><p>Not found</p></body></html>"))
        (opened if opened is not None else []).append(made)
        return made
    return page


def no_page(url):
    raise AssertionError(f"opened {url}")


def string_score(tmp_path, references: dict, answer, judge=None, **more):
    return evaluate(
        task(tmp_path, eval_reference_answers=references, **more), answer, "http://shopping.test/", no_page,
        judge)


# ---- task files --------------------------------------------------------------------------------------------

@needs_data
@pytest.mark.parametrize("name", FILES)
def test_official_files_load(name):
    count, fuzzy, impossible = FILES[name]
    tasks = read_tasks(DATA / name)
    assert len(tasks) == count and sum(t.needs_judge for t in tasks) == fuzzy
    assert sum(t.eval["reference_answers"].get("fuzzy_match") == "N/A" for t in tasks) == impossible
    assert all(t.lite == ("lite" in name) for t in tasks) and max(len(t.start_urls) for t in tasks) == 3
    for t in tasks:
        assert "__SH" not in json.dumps(placed := located(t, BASES).eval)
        assert "__GITLAB__" not in json.dumps(
            placed)


@needs_data
@pytest.mark.parametrize("name", FILES)
def test_every_official_locator_is_understood_without_a_browser(name):
    for t in read_tasks(DATA / name):
        for target in t.eval["program_html"]:
            if target["locator"].startswith(("document.", "[...")):
                assert query("<html><body><p>x</p></body></html>", target["locator"]) in (None, "")


class NoShop:
    """A shop without orders and reviews."""
    def latest_order_url(self):
        return None

    def latest_review(self, sku):
        return {}


@needs_data
@pytest.mark.parametrize("name, of_shop", [("test.raw.json", 15), ("test_webarena_lite.raw.json", 3)])
def test_null_agent_scores_nothing(name, of_shop):
    """The empty answer on the start page is 0 everywhere, without a judge; what asks a shop is not judged
    where there is none to ask."""
    helpers = {**ev.PAGE_HELPERS, **ev.shop_helpers(NoShop())}
    tasks = [located(t, BASES) for t in read_tasks(DATA / name)]
    assert [
        t.task_id for t in tasks if evaluate(t, "", t.start_urls[0], site({}), helpers=helpers).score != 0
    ] == []
    unasked = [
        verdict.reason for t in tasks if not (verdict := evaluate(t, "", t.start_urls[0], site({}))).judged]
    assert len(unasked) == of_shop and all("no helper shopping_" in reason for reason in unasked)


@needs_data
def test_na_answer_gets_the_documented_credit():
    """The known weakness of WebArena: the word N/A scores on all 36 impossible tasks, without a judge."""
    scores = [
        evaluate(located(t, BASES), "N/A", "http://shopping.test", site({})).score
        for t in read_tasks(DATA / "test.raw.json")
        if t.eval["reference_answers"].get("fuzzy_match") == "N/A"]
    assert scores == [1.0] * 36


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"task_id": "3"}, "task_id"), ({"sites": ["shop"]}, "sites"), ({"sites": []}, "sites"),
        ({"intent": ""}, "intent"), ({"start_url": None}, "start_url"), ({"eval": []}, "eval"),
        ({"eval_types": ["image_match"]}, "eval.eval_types"),
        ({"eval_reference_answers": None}, "reference_answers"),
        ({"eval_reference_answers": {"must_exclude": ["x"]}}, "reference_answers"),
        ({"eval_reference_answers": {"must_include": [3]}}, "must_include"),
        ({"eval_reference_answers": {"exact_match": 3}}, "exact_match"),
        ({"eval_reference_answers": {"fuzzy_match": "N/A"}}, "string_note"),
        ({"eval_types": ["url_match"]}, "reference_url"),
        ({"eval_types": ["url_match"], "eval_reference_url": "x", "eval_url_note": "EXACT"}, "url_note"),
        ({"eval_types": ["program_html"]}, "program_html"),
        ({"eval_types": ["program_html"], "eval_program_html": [{"url": "last"}]}, "locator"),
        (
            {
                "eval_types": ["program_html"],
                "eval_program_html": [
                    {"url": "last", "locator": "window.x", "required_contents": {"exact_match": "1"}}]},
            "locator"),
        (
            {
                "eval_types": ["program_html"],
                "eval_program_html": [{"url": "last", "locator": "", "required_contents": {}}]},
            "required_contents"),
        (
            {
                "eval_types": ["program_html"],
                "eval_program_html": [
                    {"url": "func:open('/etc')[0]", "locator": "", "required_contents": {"exact_match": "1"}}
                ]},
            "call")])
def test_bad_task_is_named(tmp_path, changes, named):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([record(task_id=1), record(**changes)]))
    with pytest.raises(ValueError, match="mine.json: task [13]") as error:
        read_tasks(path)
    assert named in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "[3]", '[{"task_id": 1}]', "\udcff"])
def test_bad_file_is_named(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="mine.json: "):
        read_tasks(path)


def test_equal_ids_and_a_missing_file(tmp_path):
    (tmp_path / "two.json").write_text(json.dumps([record(), record()]))
    with pytest.raises(ValueError, match="no other task"):
        read_tasks(tmp_path / "two.json")
    with pytest.raises(ValueError, match="none.json"):
        read_tasks(tmp_path / "none.json")


def test_placeholders_do_not_overlap(tmp_path):
    bases = {"shopping": "http://a:1/", "shopping_admin": "http://b:2/admin"}
    path = tmp_path / "tasks.json"
    path.write_text(
        json.dumps(
            [
                record(
                    start_url="__SHOPPING_ADMIN__/x |AND| __SHOPPING__/y", eval_types=["url_match"],
                    eval_reference_url="__SHOPPING__")]))
    placed = located(read_tasks(path)[0], bases)
    assert placed.start_urls == ("http://b:2/admin/x", "http://a:1/y")
    assert placed.eval["reference_url"] == "http://a:1"
    with pytest.raises(ValueError, match="WA_SHOPPING_ADMIN"):
        located(read_tasks(path)[0], {"shopping": "http://a"})


# ---- string_match ------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "text, expected",
    [(' "Yes" ', "yes"), ("'a", "'a"), ("''x''", "'x'"), ('"', ""), ("' X '", " x "), ("\"x'", "\"x'")])
def test_clean(text, expected):
    assert ev.clean(text) == expected


@pytest.mark.parametrize(
    "answer, score", [("12", 1), (" '12' ", 1), ("12.0", 0), ("", 0), (None, 0), ("the price is 12", 0)])
def test_exact_match(tmp_path, answer, score):
    assert string_score(tmp_path, {"exact_match": "12"}, answer).score == score


@pytest.mark.parametrize(
    "references, answer, score",
    [
        (["Blue"], "it is light BLUE", 1), (["blue", "red"], "blue", 0), (["blue", "red"], "red and blue", 1),
        (["12"], "$1.125", 1), (["0"], "$0.00", 0), (["0"], "0.", 1), (["0"], "10", 0),
        (["0"], "there are 0 of them", 1), (["0"], "none", 0),
        (["0", "a"], "10 a", 1),  # the token rule is for a single reference only
        ("yjlou", "yjlou, me", 1),  # Lite's task 81: a text instead of a list
    ])
def test_must_include(tmp_path, references, answer, score):
    assert string_score(tmp_path, {"must_include": references}, answer).score == score


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("$0.00", "$ 0.00"), ("0.", "0 ."), ("0", "0"), ("0, 1", "0 , 1"), ("0,1", "0,1"), ("(0)", "( 0 )"),
        ("0%", "0 %"), ("0-1", "0-1"), ("0/5", "0/5"), ("#0!", "# 0 !"), ("'0'", "' 0 '"), ('"0"', "`` 0 ''"),
        ("0's", "0 's"), ("0...", "0 ..."), ("stars: 0", "stars : 0"), ("are 0. the", "are 0. the"),
        ("0.)", "0 . )"),
        ("v0", "v0")])
def test_tokens_are_nltk_s(text, tokens):
    """Expected values are those of nltk 3.9's word_tokenize(text, preserve_line=True)."""
    assert ev.word_tokenize(text) == tokens.split()


def test_fuzzy_match_asks_the_judge_for_each_reference(tmp_path):
    asked = []

    def judge(*question):
        asked.append(question)
        return question[2] != "red"

    assert string_score(tmp_path, {"fuzzy_match": ["blue", "green"]}, "'Teal'", judge).score == 1
    assert asked == [("answer", RECORD["intent"], reference, "teal") for reference in ("blue", "green")]
    assert string_score(tmp_path, {"fuzzy_match": ["red", "blue"]}, "teal", judge).score == 0
    assert len(asked) == 3


def test_without_a_judge_not_judged(tmp_path):
    verdict = string_score(tmp_path, {"fuzzy_match": ["blue"]}, "teal")
    assert verdict.score is None and not verdict.judged and "no judge" in verdict.reason
    assert string_score(tmp_path, {"fuzzy_match": ["blue"]}, "").score == 0  # nothing to judge
    # decided without it
    assert string_score(tmp_path, {"must_include": ["x"], "fuzzy_match": ["blue"]}, "teal").score == 0
    # it says neither
    assert string_score(tmp_path, {"fuzzy_match": ["blue"]}, "teal", lambda *_: None).score is None


def test_no_question_when_something_else_is_wrong(tmp_path):
    def judge(*_):
        raise AssertionError("asked")
    spec = {"eval_types": ["string_match", "url_match"], "eval_reference_url": "__SHOPPING__/cart"}
    assert string_score(tmp_path, {"fuzzy_match": ["blue"]}, "teal", judge, **spec).score == 0


@pytest.mark.parametrize(
    "answer, judged, score",
    [
        ("N/A", None, 1), ("'n/a'", None, 1), ("no such thing", None, None), ("no such thing", True, 1),
        ("it is 3", False, 0),
        ("", True, 0)])
def test_impossible(tmp_path, answer, judged, score):
    asked = []
    judge = None if judged is None else lambda *question: asked.append(question) or judged
    assert (
        string_score(
            tmp_path, {"fuzzy_match": "N/A"}, answer, judge, eval_string_note="the shop has none"
        ).score
        == score)
    assert asked == (
        [("reason", RECORD["intent"], "the shop has none", answer)] if judged is not None and answer else [])


# ---- url_match ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "reference, url, met",
    [
        ("http://a.test/f/x", "http://a.test/f/x/", True), ("http://a.test/f/x/", "http://a.test/f/x", True),
        ("http://a.test/f/x", "http://a.test/f/y", False),
        ("http://a.test/f/x", "http://a.test/f/xyz/3", True),  # the known prefix weakness is WebArena's
        ("http://a.test/x", "http://b.test/x", False), ("http://a.test/x", "https://a.test/x#top", True),
        ("http://a.test/1 |OR| http://a.test/2", "http://a.test/2", True),
        ("http://a.test/1 |OR| http://a.test/2", "http://a.test/3", False),
        ("http://a.test/s?q=usb+wifi", "http://a.test/s?q=usb%20wifi&p=2", True),
        ("http://a.test/s?q=usb", "http://a.test/s?q=usb+wifi", False),
        ("http://a.test/s?q=usb", "http://a.test/s", False), ("http://a.test/s", "http://a.test/s?q=1", True),
        ("http://a.test/s?l=a&l=b", "http://a.test/s?l=b", True),
        ("http://a.test/1?q=1 |OR| http://a.test/2?q=2", "http://a.test/1?q=2", True)])
def test_url_match(tmp_path, reference, url, met):
    made = task(tmp_path, eval_types=["url_match"], eval_reference_url=reference)
    assert evaluate(made, None, url, no_page).score == float(met)


# ---- program_html ------------------------------------------------------------------------------------------

PRODUCT = """<html><body><h1 class="name">Blue &amp; Red</h1><p class="price">now<br>$5</p><input
name="qty" value="7"><textarea id="t">
a b</textarea><select name="s"><option value="1">One<option value="2" selected>Two</select>
<div id="laid-out"> a  <i>b</i>
 c<p>p</p><ul><li>1</li> <li>2 </li></ul><script>x</script><table><tr><td>l</td><td>r</td></tr></table
>end<br>.</div></body></html>"""


def html_task(tmp_path, url="last", locator="", contents=None, **more):
    target = {
        "url": url, "locator": locator, "required_contents": contents or {"must_include": ["x"]},
        **more.pop("target", {})}
    return task(
        tmp_path, eval_types=["program_html"], eval_program_html=[target, *more.pop("targets", [])], **more)


@pytest.mark.parametrize(
    "locator, contents, score",
    [
        ("", {"must_include": ["Blue & Red", "$5 |OR| $6"]}, 1), ("", {"must_include": ["$6 |OR| $7"]}, 0),
        ("document.querySelector('.name').outerText", {"exact_match": "blue & red"}, 1),
        ("document.querySelector('.name').outerText", {"exact_match": "Blue"}, 0),
        ("document.querySelector('[name=\"qty\"').value", {"exact_match": "7"}, 1),
        ("document.querySelector('.price').outerText", {"exact_match": "now\n$5"}, 1),
        ("document.querySelector('.gone').outerText", {"must_include": ["n"]}, 0),  # no element: 0
        ("document.querySelector('.gone').outerText", {"exact_match": ""}, 0),
        ("document.querySelector('.name').getAttribute('lang')", {"must_include": ["none"]}, 0)])
def test_program_html(tmp_path, locator, contents, score):
    opened = []
    pages = site({"http://shopping.test/p": PRODUCT}, opened)
    assert (
        evaluate(
            html_task(tmp_path, locator=locator, contents=contents), None, "http://shopping.test/p", pages
        ).score
        == score)
    assert [page.did[-1] for page in opened] == ["close"]


def test_where_it_looks(tmp_path):
    """last, an address, an address from a helper: each on a fresh page, which is closed."""
    pages = {"http://shopping.test/a": "<p>one</p>", "http://reddit.test/f/books/3/": "<p>three</p>"}
    last = "http://reddit.test/f/books/3/some-title?x=1"
    opened = []
    post = "func:reddit_get_post_url('__last_url__')"
    for url, word, score in (
        ("last", "found", 1), ("__SHOPPING__/a", "one", 1), ("__SHOPPING__/a", "three", 0),
        (post, "three", 1)):
        assert (
            evaluate(
                html_task(tmp_path, url, contents={"must_include": [word]}), None, last, site(pages, opened)
            ).score
            == score
        ), url
    assert [page.url for page in opened] == [
        last, "http://shopping.test/a", "http://shopping.test/a",
        "http://reddit.test/f/books/3/"]
    assert all(page.did == ["close"] for page in opened)


def test_all_targets_and_all_types_count(tmp_path):
    pages = {"http://shopping.test/a": "<p>one</p>", "http://shopping.test/b": "<p>two</p>"}
    second = {"url": "__SHOPPING__/b", "locator": "", "required_contents": {"must_include": ["two"]}}
    for word, url, score in (
        ("one", "http://shopping.test/a", 1), ("two", "http://shopping.test/a", 0),
        ("one", "http://shopping.test/c", 0)):
        made = task(
            tmp_path, eval_types=["program_html", "url_match"], eval_reference_url="__SHOPPING__/a",
            eval_program_html=[
                {"url": "__SHOPPING__/a", "locator": "", "required_contents": {"must_include": [word]}},
                second])
        assert evaluate(made, None, url, site(pages)).score == score


def test_pages_are_opened_only_while_all_holds(tmp_path):
    made = task(
        tmp_path, eval_types=["program_html", "string_match"],
        eval_program_html=[{"url": "last", "locator": "", "required_contents": {"must_include": ["x"]}}])
    assert evaluate(made, "13", "http://shopping.test", no_page).score == 0


def test_unescape_is_webarena_s_and_not_lite_s(tmp_path):
    page = site({"http://shopping.test/p": PRODUCT})
    assert (
        evaluate(
            html_task(tmp_path, contents={"must_include": ["Blue & Red"]}), None, "http://shopping.test/p",
            page,
        ).score
        == 1)
    assert (
        evaluate(
            html_task(tmp_path, contents={"must_include": ["Blue & Red"]}, old_task_id=5), None,
            "http://shopping.test/p", page,
        ).score
        == 0)
    assert (
        evaluate(
            html_task(tmp_path, contents={"must_include": ["Blue &amp; Red"]}, old_task_id=5), None,
            "http://shopping.test/p", page,
        ).score
        == 1)


def test_fuzzy_page_text_is_one_question(tmp_path):
    made = html_task(
        tmp_path, locator="document.querySelector('.name').outerText",
        contents={"fuzzy_match": ["blue", "red"]},
        old_task_id=5)
    asked, page = [], site({"http://shopping.test/p": PRODUCT})
    assert evaluate(made, None, "http://shopping.test/p", page, lambda *q: asked.append(q) or True).score == 1
    assert asked == [("answer", RECORD["intent"], "blue, red", "Blue & Red")]
    assert evaluate(made, None, "http://shopping.test/p", page).score is None
    assert evaluate(made, None, "http://shopping.test/q", page).score == 0


def test_prep_actions_run_first_and_once(tmp_path):
    class Late(Page):
        """Shows its text at the third look after a click."""
        def evaluate(self, js):
            self.did.append(js)
            return None if js == "go()" or len(self.did) < 4 else "ready"

    page = Late("", "")
    made = html_task(
        tmp_path, locator="document.title", contents={"exact_match": "ready"},
        target={"prep_actions": ["go()"]})
    assert evaluate(made, None, "http://shopping.test", lambda url: page, wait_s=5.0).score == 1
    assert page.did == ["go()", *["document.title"] * 3, "close"]
    assert evaluate(made, None, "http://shopping.test", lambda url: Late("", ""), wait_s=0.0).score == 0


def test_page_is_closed_when_the_look_fails(tmp_path):
    page = Page("", "<p>x</p>")
    verdict = evaluate(
        html_task(tmp_path, locator="document.querySelector('p').animate()"), None, "http://shopping.test",
        lambda url: page)
    assert verdict.score is None and "animate" in verdict.reason and page.did[-1] == "close"


def test_unjudged_part_does_not_hide_a_zero(tmp_path):
    targets = [{"url": "last", "locator": "", "required_contents": {"must_include": ["absent"]}}]
    made = html_task(tmp_path, locator="lambda:() => 3", contents={"exact_match": "3"}, targets=targets)
    assert evaluate(made, None, "http://shopping.test", site({})).score == 0


# ---- helpers -----------------------------------------------------------------------------------------------

class Shop:
    def latest_order_url(self):
        return "http://shopping.test/order/7"

    def latest_review(self, sku):
        return {"author": "Emma", "rating": "80", "text": "nice", "title": "t"} if sku == "B1" else {}


@pytest.mark.parametrize(
    "locator, expected, score",
    [
        ("func:shopping_get_sku_latest_review_author('B1')", "Emma", 1),
        ("func:shopping_get_sku_latest_review_rating('B1')", "80", 1),
        ("func:shopping_get_sku_latest_review_text('B1')", "nice", 1),
        ("func:shopping_get_sku_latest_review_author('B2')", "Emma", 0),
        ("func:shopping_get_sku_latest_review_author()", "Emma", None),
        ("func:reddit_get_latest_comment('x')", "x", None)])
def test_shop_helpers(tmp_path, locator, expected, score):
    verdict = evaluate(
        html_task(tmp_path, locator=locator, contents={"exact_match": expected}), None,
        "http://shopping.test", site({}),
        helpers=ev.shop_helpers(Shop()))
    assert verdict.score == score and (score is not None or "helper" in verdict.reason)


def test_latest_order(tmp_path):
    made = html_task(tmp_path, "func:shopping_get_latest_order_url()", contents={"must_include": ["seven"]})
    pages = site({"http://shopping.test/order/7": "<p>seven</p>"})
    assert evaluate(made, None, "http://shopping.test", pages, helpers=ev.shop_helpers(Shop())).score == 1
    assert (
        evaluate(
            made, None, "http://shopping.test", pages, helpers={"shopping_get_latest_order_url": lambda: None}
        ).score
        == 0)
    assert evaluate(made, None, "http://shopping.test", pages).score is None


@pytest.mark.parametrize(
    "url, post",
    [
        ("http://r.test:9/f/books/12/a-title?p=1", "http://r.test:9/f/books/12/"),
        ("http://r.test/f/books/12/t/-/comment/5", "http://r.test/f/books/12/"),
        ("http://r.test/f/books", "http://r.test/f/books"),
        ("http://r.test/user/a/b", "http://r.test/user/a/b"),
        ("", "")])
def test_post_url(url, post):
    assert ev.post_url(url) == post


def test_member_role(tmp_path):
    rows = "".join(
        f"<tr><td data-label='Account'><span class='gl-avatar-labeled-sublabel'>@{name}</span></td><td "
                   f"class='col-max-role'><span>{role}</span></td></tr>"
        for name, role in (("ann", "Developer"), ("bob", "Guest")))
    pages = site({"http://gitlab.test/m": f"<table><tbody>{rows}</tbody></table>"})
    for account, role, score in (("bob", "Guest", 1), ("ann", "Guest", 0), ("eve", "Guest", 0)):
        made = html_task(
            tmp_path, "__GITLAB__/m", f"func:gitlab_get_project_memeber_role(__page__, '{account}')",
            {"exact_match": role})
        assert evaluate(made, None, "http://gitlab.test", pages).score == score


@pytest.mark.parametrize(
    "text",
    [
        "func:", "func:f", "func:f(", "func:f(g())", "func:a.f()", "func:f(*'a')", "func:f(x='a')",
        "func:f(b'a')", "func:f()()", "func:(lambda: 1)()", "func:f(__import__)", "func:f(('a'))+1",
        "func:" + "(" * 300,
        "func:f('" + "a" * 600 + "')"])
def test_calls_are_read_strictly(text):
    with pytest.raises(ValueError, match="func:|helper|argument"):
        ev.read_call(text)


# ---- locators without a browser ----------------------------------------------------------------------------

QUERIES = [
    ("document.querySelector(\"[name='qty'\").value", "7"), ("document.querySelector('#t').value", "a b"),
    ("document.querySelector('[name=s]').value", "2"),
    ("document.querySelector('[name=s]').selectedIndex", "1"),
    ("document.querySelector('select').lastElementChild.outerText", "Two"),
    ("document.querySelector('p').lastChild.textContent", "$5"),
    ("document.querySelector('p').firstChild.textContent", "now"),
    ("document.querySelectorAll('option')[0].value", "1"),
    ("document.querySelectorAll('option')[5].value", None),
    ("document.querySelectorAll('option').length", "2"),
    ("document.querySelector('b')?.outerText || 'none'", "none"),
    ("document.querySelector('b')?.lastChild.textContent", None),
    ("document.querySelector('h1').outerText + (document.querySelector('b')?.outerText || '')", "Blue & Red"),
    (
        "[...document.querySelectorAll('option')].map(e => e.getAttribute('x') || "
     "e.getAttribute('value')).join(' ')",
        "1 2"),
    ("document.querySelector('body').querySelector('body')", None),
    ("document.querySelector('input').checked.toString()", "false"),
    ("document.querySelector('h1').className", "name"),
    ("document.querySelector('.price').getAttribute('id')", None),
    ("document.querySelector('#laid-out').innerText", "a b c\n\np\n\n1\n2\nl\tr\nend\n."),
]


@pytest.mark.parametrize("js, expected", QUERIES)
def test_query(js, expected):
    assert query(PRODUCT, js) == expected


def test_queries_give_what_a_browser_gives():
    pytest.importorskip("playwright", reason="a real browser needs Playwright (requirements-webarena.txt)")
    from dreamgym.envs.webarena.chromium import Browser, find_chromium

    try:
        find_chromium()
    except ValueError as error:
        pytest.skip(str(error))
    with Browser() as browser:
        page = browser.chromium.new_page()
        page.set_content(PRODUCT)
        ask = "js => { try { const v = eval(js); return v == null ? null : String(v) } catch { return null } }"
        found = [page.evaluate(ask, js) for js, _ in QUERIES]
    assert found == [expected for _, expected in QUERIES]


@pytest.mark.parametrize(
    "js",
    [
        "fetch('/x')", "document.cookie", "document.querySelector('h1')",
        "document.querySelector('h1').outerText = 3", "1 < 2", "document.querySelector('h1:hover(').id",
        "document.querySelector(`h1`).id", "document.querySelector('h1').click()", "(" * 5000,
        "document.querySelector('h1').outerText)"])
def test_query_refuses_what_it_does_not_know(js):
    with pytest.raises(NotSupported):
        query(PRODUCT, js)


# ---- the judge ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "text, verdict",
    [
        ("It agrees. CORRECT", True), ("INCORRECT", False), ("", None),
        ("The price is correct, the color is not: partially correct.", False), ("PARTIALLY", False),
        ("well", None), ("not incorrect but... correct", True), ("<think>incorrect?</think>Correct.", True),
        ("correctly", None),
        ("**Incorrect**", False)])
def test_read_judgement(text, verdict):
    assert ev.read_judgement(text) == verdict


def test_judge_talks_to_an_endpoint(monkeypatch):
    got, says = [], ["CORRECT", "no idea"]

    class Endpoint(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(
                (
                    self.headers["Authorization"],
                    json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            body = json.dumps({"choices": [{"message": {"content": says.pop(0)}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setenv("MY_KEY", "k-1")
    judge = ev.Judge(f"http://127.0.0.1:{server.server_port}/v1", "m", "MY_KEY", tries=1)
    try:
        assert judge("answer", "how much?", "5", "five") is True
        with pytest.warns(UserWarning, match="no idea.*not judged"):
            assert judge("reason", "how much?", "there is none", "five") is None
    finally:
        server.shutdown()
        server.server_close()
    with pytest.warns(UserWarning, match="not judged") as warned:
        assert judge("answer", "how much?", "5", "five") is None
    assert "k-1" not in str(warned[0].message)
    assert got[0][0] == "Bearer k-1"
    assert got[0][1]["temperature"] == 0
    assert "five" in got[0][1]["messages"][1]["content"]
    assert got[0][1]["messages"][0] != got[1][1]["messages"][0]


# ---- the own sites -----------------------------------------------------------------------------------------

def test_own_shop_answers_the_shop_helpers():
    pytest.importorskip("flask", reason="the own sites need flask")
    from dreamgym.envs.webarena.sites import SiteDatabase

    world = SiteDatabase()
    helpers = ev.shop_helpers(ev.OwnShop(world))
    first = helpers["shopping_get_latest_order_url"]()
    row = world.db.execute("SELECT user_id FROM shop_orders").fetchone()
    number = world.db.execute(
        "INSERT INTO shop_orders (user_id, date, status, payment, total) VALUES (?, '2024-06-01', 'Pending', "
                              "'Card', 5)",
        (row[0],),
    ).lastrowid
    assert helpers["shopping_get_latest_order_url"]() == f"http://shopping.test/orders/{number}" != first
    product, sku = world.db.execute("SELECT id, sku FROM shop_products").fetchone()
    world.db.execute(
        "INSERT INTO shop_reviews (product_id, user_id, stars, text, date, status) VALUES (?, ?, 4, 'good "
                     "one', '2024-06-01', 'Pending')",
        (product, row[0]))
    assert [helpers[f"shopping_get_sku_latest_review_{name}"](sku) for name in ("rating", "text")] == [
        "80",
        "good one"]
    assert helpers["shopping_get_sku_latest_review_author"]("no such sku") == ""
