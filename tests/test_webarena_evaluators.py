"""WebArena's task files and evaluators: each rule on a case made by hand, in both directions; the official
files where ../shared has them."""
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from dreamgym.envs.webarena import evaluators as ev
from dreamgym.envs.webarena.direct import query
from dreamgym.envs.webarena.tabs import NotSupported

BASES = {site: f"http://{site}.test" for site in ev.SITES}
P = "http://shopping.test/p"
DATA = Path(__file__).parent.parent.parent / "shared/data/webarena"
RECORD = {"sites": ["shopping"], "task_id": 3, "start_url": "__SHOPPING__/cart", "intent": "How much?",
          "intent_template_id": 9, "eval": {"eval_types": ["string_match"], "reference_url": "",
                                            "reference_answers": {"exact_match": "12"}, "program_html": None}}


def record(evaluation=None, **changes) -> dict:
    """RECORD with fields replaced, and fields of its `eval`."""
    if isinstance(evaluation, dict):
        evaluation = RECORD["eval"] | evaluation
    return {**RECORD, "eval": RECORD["eval"] if evaluation is None else evaluation, **changes}


def answers(**references) -> dict:
    """`eval` of a task that looks at the answer."""
    return {"reference_answers": references}


def look(locator="", url="last", **contents) -> dict:
    """`eval` of a task that looks at one page."""
    target = {"url": url, "locator": locator, "required_contents": contents}
    return {"eval_types": ["program_html"], "program_html": [target]}


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
        made = Page(url, pages.get(url, "<p>Not found</p>"))
        (opened if opened is not None else []).append(made)
        return made
    return page


def no_page(url):
    raise AssertionError(f"opened {url}")


class Front(SimpleNamespace):
    """A browser whose tab in front shows `url`."""
    front = property(lambda self: self.page(self.url))


def score(evaluation, answer=None, url=P, page=no_page, judge=None, task=None, **more) -> float | None:
    made = ev.located(ev.as_task(record(evaluation, **(task or {}))), BASES)
    return ev.evaluate(made, answer, Front(url=url, page=page), judge, **more)


# ---- task files ----

@pytest.fixture(params=["test.raw.json", "test_webarena_lite.raw.json"])
def official(request):
    if not DATA.is_dir():
        pytest.skip("WebArena's task files are not in ../shared/data/webarena")
    tasks = [ev.as_task(record) for record in ev.read_records(DATA / request.param)]
    return "lite" in request.param, tasks, [ev.located(task, BASES) for task in tasks]


def test_official_files_load(official):
    lite, tasks, placed = official
    assert len(tasks) == (165 if lite else 812) and max(len(task.start_urls) for task in tasks) == 3
    assert all((task.old_task_id is not None) == lite for task in tasks)
    assert not any(f"__{name.upper()}__" in repr(task) for task in placed for name in BASES)


def test_logins_are_those_that_the_record_names(official):
    """Stops tasks of a shop and a forum on one host, whose logins end each other, from never starting."""
    lite, tasks, placed = official
    found = Counter((*sorted(task.sites), "->", *sorted(task.accounts)) for task in placed)
    assert found["reddit", "shopping", "->", "reddit"] == (1 if lite else 5)
    assert found["map", "shopping_admin", "->"] == (1 if lite else 2)
    assert found["gitlab", "reddit", "->", "gitlab", "reddit"] == (4 if lite else 18)
    assert found["shopping_admin", "->", "shopping_admin"] == (35 if lite else 182)
    assert ev.as_task(record(sites=["map", "reddit"])).accounts == ["map", "reddit"]        # Verified's


def test_null_agent_scores_nothing_and_na_gets_the_documented_credit(official):
    """The empty answer is 0 everywhere; what asks a shop is not judged where there is none."""
    lite, _, tasks = official
    blank = SimpleNamespace(html="", evaluate=lambda js: None, close=lambda: None)
    at = lambda url: Front(url=url, page=lambda _: blank)
    unasked = [task for task in tasks if ev.evaluate(task, "", at(task.start_urls[0])) is None]
    assert len(unasked) == (3 if lite else 15) and all("func:shopping_" in repr(task) for task in unasked)
    empty = SimpleNamespace(latest_order_url=lambda: None, latest_review=lambda sku: {})
    helpers = {**ev.PAGE_HELPERS, **ev.shop_helpers(empty)}
    for rules in (False, True):
        assert {ev.evaluate(task, "", at(task.start_urls[0]), None, helpers, lite=rules)
                for task in tasks} == {0}
    impossible = [task for task in tasks
                  if (found := task.eval.reference_answers) and found.fuzzy_match == "N/A"]
    assert [ev.evaluate(task, "N/A", at(P)) for task in impossible] == [1] * (1 if lite else 36)


@pytest.mark.parametrize("changes, named", [
    ({"sites": ["shop"]}, "sites"), ({"start_url": None}, "start_url"), ({"eval": []}, "eval"),
    ({"evaluation": {"eval_types": ["image_match"]}}, "eval.eval_types"),
    ({"evaluation": {"reference_answers": None}}, "reference_answers"),
    ({"evaluation": answers(must_exclude=["x"])}, "reference_answers"),
    ({"evaluation": answers(fuzzy_match="N/A")}, "string_note"),
    ({"evaluation": {"eval_types": ["program_html"], "program_html": [{"url": "last"}]}}, "locator"),
    ({"evaluation": look("window.x", exact_match="1")}, "locator"),
    ({"evaluation": look()}, "required_contents"),
    ({"evaluation": look(url="func:open('/etc')[0]", exact_match="1")}, "call"),
    ({"task_id": 1}, "no other task")])
def test_bad_task_is_named(tmp_path, changes, named):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([record(task_id=1), record(**changes)]))
    with pytest.raises(ValueError, match=f"mine.json: task [13].*{named}"):
        ev.read_records(path)


@pytest.mark.parametrize("content", ["{", "{}", "[]", "[3]", "\udcff", None])
def test_bad_file_is_named(tmp_path, content):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="mine.json: "):
        ev.read_records(path)


def test_webchorearena(tmp_path):
    urls = {"eval_types": ["url_match"], "reference_url": "__SHOPPING__/a?x=1",
            "or": [{"reference_url": "__SHOPPING__/b?y=2"}]}
    pages = look("", must_include=["Blue"])
    pages["program_html"][0]["or"] = look("", must_include=["Red"])["program_html"]
    tasks = [record(evaluation, task_id=50000 + i, start_url_lite="__SHOPPING__", type_main="Calculation")
             for i, evaluation in enumerate((answers(must_include=["5 |OR| five", "blue"]), urls, pages))]
    for task in tasks:
        del task["intent_template_id"]
    (tmp_path / "small.json").write_text(json.dumps(tasks))
    records = ev.read_records(tmp_path / "small.json")
    first, second, third = (ev.located(ev.as_task(record), BASES) for record in records)

    def scored(task, answer="", url=P, page=no_page):
        return ev.evaluate(task, answer, Front(url=url, page=page))
    assert [scored(first, text) for text in ("Blue, 5", "five blue", "six blue", "five")] == [1, 1, 0, 0]
    shop = BASES["shopping"]
    assert [scored(second, url=shop + path) for path in ("/a?x=1", "/b?y=2", "/a", "/b?x=1")] == [1, 1, 0, 0]
    for text, met in (("Blue", 1), ("Red", 1), ("Green", 0)):
        assert scored(third, page=site({P: f"<p>{text}</p>"})) == met
    assert score(answers(must_include=["5 |OR| five"]), "five") == 0           # in WebArena it is one text


def test_webarena_verified_is_left_to_its_own_scorer():
    task = ev.as_task(record([{"evaluator": "AgentResponseEvaluator", "expected": {"task_type": "navigate"}}],
                             start_url=None, start_urls=["__SHOPPING__/x", "__MAP__"]))
    assert ev.located(task, BASES).start_urls == [BASES["shopping"] + "/x", BASES["map"]]
    assert ev.evaluate(task, "x", Front(url=P, page=no_page)) is None


def test_placeholders_do_not_overlap():
    task = ev.as_task(record({"eval_types": ["url_match"], "reference_url": "__SHOPPING__"},
                             start_url="__SHOPPING_ADMIN__/x |AND| __SHOPPING__/y"))
    placed = ev.located(task, {"shopping": "http://a:1/", "shopping_admin": "http://b:2/admin"})
    assert placed.start_urls == ["http://b:2/admin/x", "http://a:1/y"]
    assert placed.eval.reference_url == "http://a:1"
    with pytest.raises(ValueError, match="WA_SHOPPING_ADMIN"):
        ev.located(task, {"shopping": "http://a"})


# ---- string_match ----

@pytest.mark.parametrize("kind, references, answer, expected", [
    ("exact_match", "12", " '12' ", 1), ("exact_match", "12", None, 0),
    ("exact_match", "12", "it is 12", 0), ("exact_match", "x'", "''x''", 0), ("exact_match", "'a", "'A", 1),
    ("exact_match", "\"x'", "x", 0), ("exact_match", "", '"', 1),
    ("must_include", ["Blue"], "it is light BLUE", 1), ("must_include", ["blue", "red"], "blue", 0),
    ("must_include", ["blue", "red"], "red and blue", 1), ("must_include", ["12"], "$1.125", 1),
    ("must_include", ["0"], "$0.00", 0), ("must_include", ["0"], "There are 0. (No reviews.)", 1),
    ("must_include", ["0", "a"], "10 a", 1),     # the token rule is for a single reference only
    ("must_include", "yjlou", "yjlou, me", 1)])  # Lite's task 81: a text instead of a list
def test_string_match(kind, references, answer, expected):
    assert score(answers(**{kind: references}), answer) == expected


@pytest.mark.parametrize("text, tokens", [
    ("$0.00", "$ 0.00"), ("0.", "0 ."), ("0, 1", "0 , 1"), ("0,1", "0,1"), ("(0%)", "( 0 % )"),
    ("0-1", "0-1"), ("#0!", "# 0 !"), ("'0'", "' 0 '"), ('"0"', "`` 0 ''"), ("0's", "0 's"), ("0...", "0 ..."),
    ("stars: 0", "stars : 0"), ("are 0. the", "are 0. the"), ("0.)", "0 . )"), ("`0`", "` 0 `"),
    ("are 0. (no reviews.)", "are 0 . ( no reviews . )"), ("is 0. 5 read", "is 0 . 5 read"),
    ("0. - none", "0 . - none"), ("0.) the", "0 . ) the"), ("is 0.; no", "is 0. ; no"),
    ("not blue. it is", "not blue . it is"), ("b. it is", "b. it is"), ("4.5. it", "4.5. it"),
    ("see a11y.com. it is", "see a11y.com . it is")])
def test_tokens_are_nltk_s(text, tokens):
    """Expected: nltk 3.10's word_tokenize with a Punkt model that knows no abbreviation."""
    assert ev.word_tokenize(text) == tokens.split()


class Judge:
    """Says `says`, of several references only to the first ones, and remembers the questions."""
    def __init__(self, *says):
        self.says, self.asked = list(says), []

    def __call__(self, *question):
        self.asked.append(question)
        return self.says.pop(0)


def test_fuzzy_match_asks_the_judge_last_for_each_reference():
    """A question that costs money where the task has failed anyway, and an unjudged answer scored."""
    judge, fuzzy = Judge(True, True, False, None), answers(fuzzy_match=["blue", "green"])
    assert score(fuzzy, "'Teal'", judge=judge) == 1
    assert judge.asked == [("answer", "How much?", reference, "teal") for reference in ("blue", "green")]
    assert score(fuzzy, "teal", judge=judge) == 0 and len(judge.asked) == 3
    one = answers(fuzzy_match=["blue"])
    assert score(one, "teal", judge=judge) is None           # it says neither
    assert score(one, "", judge=judge) == 0                  # nothing to judge
    assert score(answers(must_include=["x"], fuzzy_match=["blue"]), "teal", judge=judge) == 0
    elsewhere = {"eval_types": ["string_match", "url_match"], "reference_url": "__SHOPPING__/cart"}
    assert score(one | elsewhere, "teal", judge=judge) == 0
    assert score(one, "teal") is None                        # there is none


@pytest.mark.parametrize("answer, judged, expected", [
    ("N/A", None, 1), ("'n/a'", None, 1), ("no such thing", None, None), ("no such thing", True, 1),
    ("it is 3", False, 0), ("", True, 0)])
@pytest.mark.parametrize("where", ["eval", "beside"])
def test_impossible(answer, judged, expected, where):
    judge = None if judged is None else Judge(judged)
    spec, note = answers(fuzzy_match="N/A"), {"string_note": "there is none"}
    assert expected == (score(spec | note, answer, judge=judge) if where == "eval"
                        else score(spec, answer, judge=judge, task=note))
    if judge:
        assert judge.asked == ([("reason", "How much?", "there is none", answer)] if answer else [])


# ---- url_match ----

@pytest.mark.parametrize("reference, url, met", [
    ("f/x", "f/x/", True), ("f/x/", "f/x", True), ("f/x", "f/y", False),
    ("f/x", "f/xyz/3", True),                    # the known prefix weakness is WebArena's
    ("x", "x#top", True), ("1 |OR| http://a.test/2", "2", True), ("1 |OR| http://a.test/2", "3", False),
    ("s?q=usb+wifi", "s?q=usb%20wifi&p=2", True), ("s?q=usb", "s?q=usb+wifi", False), ("s?q=usb", "s", False),
    ("s", "s?q=1", True), ("s?l=a&l=b", "s?l=b", True), ("1?q=1 |OR| http://a.test/2?q=2", "1?q=2", True)])
def test_url_match(reference, url, met):
    assert ev.url_match(f"http://a.test/{reference}", f"http://a.test/{url}") == met
    assert not ev.url_match(f"http://a.test/{reference}", f"http://b.test/{url}")


# ---- Lite's own rules ----

def include(*references):
    return answers(must_include=list(references))


def at(reference, note="GOLD in PRED"):
    return {"eval_types": ["url_match"], "reference_url": f"http://a.test/{reference}", "url_note": note}


@pytest.mark.parametrize("evaluation, answer, url, webarena, lite", [
    (include("914"), "914km", P, 1, 0), (include("914"), "914 km", P, 1, 1),
    (include("Rachel", "nike"), "rachel. Nike shoes", P, 1, 1), (include("9.99", "x"), "$9.99x", P, 1, 0),
    (include("blue lamp"), "a blue lamps", P, 1, 1),                 # two words: a part of the text
    (include("65 |OR| 3"), "it is 3", P, 0, 1), (include("65 |OR| 3"), "it is 13", P, 0, 0),
    (at("s?b=1&a=2"), "", "http://a.test/s?a=2&b=1", 1, 0), (at("s?a=2"), "", "http://a.test/s?a=2&b=1", 1, 1),
    (at("s?a=2"), "", "http://a.test/s?a=21", 0, 1), (at("x/"), "", "http://a.test/x/y", 1, 1),
    (at("x", None), "", "http://a.test/x/y", 1, 0), (at("x", None), "", "http://a.test/x/", 1, 1),
    (at("y |OR| http://a.test/x", None), "", "http://a.test/x", 1, 1)])
def test_lite_s_own_rules(evaluation, answer, url, webarena, lite):
    """Cases where VisualAgentBench's evaluators (WebArena-Lite's repository) differ from WebArena's."""
    assert (score(evaluation, answer, url=url), score(evaluation, answer, url=url, lite=True)) == (webarena, lite)


def test_lite_asks_once_about_all_references():
    judge = Judge(True)
    assert score(answers(fuzzy_match=["blue", "green"]), "teal", judge=judge, lite=True) == 1
    assert judge.asked == [("answer", "How much?", "blue, green", "teal")]


# ---- program_html ----

PRODUCT = """<html><body><h1 class="name">Blue &amp; Red</h1><p class="price">now<br>$5</p><input
name="qty" value="7"><textarea id="t">
a b</textarea><select name="s"><option value="1">One<option value="2" selected>Two</select>
<div id="laid-out"> a  <i>b</i>
 c<p>p</p><ul><li>1</li> <li>2 </li></ul>end<br>.</div></body></html>"""
NAME = "document.querySelector('.name').outerText"


@pytest.mark.parametrize("locator, kind, wanted, expected", [
    ("", "must_include", ["Blue & Red", "$5 |OR| $6"], 1), ("", "must_include", ["$6 |OR| $7"], 0),
    (NAME, "exact_match", "blue & red", 1), (NAME, "exact_match", "Blue", 0),
    ("document.querySelector('.gone').outerText", "must_include", ["n"], 0),     # no element: 0
    ("document.querySelector('.gone').outerText", "exact_match", "", 0)])
def test_program_html(locator, kind, wanted, expected):
    opened = []
    spec = look(locator, "__SHOPPING__/p", **{kind: wanted})
    assert score(spec, url="", page=site({P: PRODUCT}, opened)) == expected
    assert [page.did[-1] for page in opened] == ["close"]


def test_where_it_looks():
    """last is the tab in front, which stays open; an address, or one from a helper, a page that is closed."""
    last, opened = "http://reddit.test/f/books/3/some-title?x=1", []
    pages = site({"http://shopping.test/a": "<p>one</p>", "http://reddit.test/f/books/3/": "<p>three</p>"},
                 opened)
    for url, word, expected in (
            ("last", "not found", 1), ("__SHOPPING__/a", "one", 1), ("__SHOPPING__/a", "three", 0),
            ("func:reddit_get_post_url('__last_url__')", "three", 1)):
        assert score(look(url=url, must_include=[word]), url=last, page=pages) == expected, url
    assert [page.url for page in opened] == [last, *["http://shopping.test/a"] * 2,
                                             "http://reddit.test/f/books/3/"]
    assert [page.did for page in opened] == [[], ["close"], ["close"], ["close"]]


def test_all_targets_and_all_types_count_and_pages_are_opened_only_while_all_holds():
    a, b = "http://shopping.test/a", "http://shopping.test/b"
    pages = site({a: "<p>one</p>", b: "<p>two</p>"})
    second = look(url=b, must_include=["two"])["program_html"]
    for word, url, expected in (("one", a, 1), ("two", a, 0), ("one", "http://shopping.test/c", 0)):
        spec = look(url="__SHOPPING__/a", must_include=[word])
        spec |= {"eval_types": ["program_html", "url_match"], "reference_url": "__SHOPPING__/a",
                 "program_html": spec["program_html"] + second}
        assert score(spec, url=url, page=pages) == expected
    assert score(look(must_include=["x"]) | {"eval_types": ["program_html", "string_match"]}, "13") == 0


def test_unescape_is_webarena_s_and_not_lite_s():
    page = site({P: PRODUCT})
    assert score(look(must_include=["Blue & Red"]), page=page) == 1
    assert score(look(must_include=["Blue & Red"]), page=page, lite=True) == 0
    assert score(look(must_include=["Blue &amp; Red"]), page=page, lite=True) == 1


def test_fuzzy_page_text_is_one_question():
    spec, judge, page = look(NAME, fuzzy_match=["blue", "red"]), Judge(True), site({P: PRODUCT})
    assert score(spec, page=page, judge=judge) == 1
    assert judge.asked == [("answer", "How much?", "blue, red", "Blue & Red")]
    assert score(spec, page=page) is None
    assert score(spec, url="http://shopping.test/q", page=page) == 0


def test_prep_actions_run_first_and_once():
    class Late(Page):
        """Shows its text at the third look after a click."""
        def evaluate(self, js):
            self.did.append(js)
            return None if js == "go()" or len(self.did) < 4 else "ready"

    page, spec = Late("", ""), look("document.title", "__SHOPPING__/a", exact_match="ready")
    spec["program_html"][0]["prep_actions"] = ["go()"]
    assert score(spec, page=lambda url: page, wait_s=5.0) == 1
    assert page.did == ["go()", *["document.title"] * 3, "close"]
    assert score(spec, page=lambda url: Late("", "")) == 0


def test_what_a_back_end_cannot_tell_is_not_judged_unless_another_check_fails():
    page = Page("", "<p>x</p>")
    spec = look("document.querySelector('p').animate()", "__SHOPPING__/a", exact_match="x")
    assert score(spec, page=lambda url: page) is None and page.did[-1] == "close"
    spec = look("lambda:() => 3", exact_match="3")
    spec["program_html"] += look(must_include=["absent"])["program_html"]
    assert score(spec, page=site({})) == 0


# ---- helpers ----

REVIEWS = {"B1": {"author": "Emma", "rating": "80", "text": "nice", "title": "t"}}
SHOP = SimpleNamespace(latest_order_url=lambda: "http://shopping.test/order/7",
                       latest_review=lambda sku: REVIEWS.get(sku, {}))


@pytest.mark.parametrize("call, wanted, expected", [
    ("shopping_get_sku_latest_review_author('B1')", "Emma", 1),
    ("shopping_get_sku_latest_review_rating('B1')", "80", 1),
    ("shopping_get_sku_latest_review_author('B2')", "Emma", 0),
    ("shopping_get_sku_latest_review_author()", "Emma", None), ("reddit_get_latest_comment('x')", "x", None)])
def test_shop_helpers(call, wanted, expected):
    spec = look(f"func:{call}", exact_match=wanted)
    assert score(spec, page=site({}), helpers=ev.shop_helpers(SHOP)) == expected


@pytest.mark.parametrize("helpers, expected", [
    (ev.shop_helpers(SHOP), 1), (None, None), ({"shopping_get_latest_order_url": lambda: None}, 0)])
def test_latest_order(helpers, expected):
    spec = look(url="func:shopping_get_latest_order_url()", must_include=["seven"])
    assert score(spec, page=site({"http://shopping.test/order/7": "<p>seven</p>"}), helpers=helpers) == expected


@pytest.mark.parametrize("url, post", [
    ("http://r.test:9/f/books/12/a-title?p=1", "http://r.test:9/f/books/12/"),
    ("http://r.test/f/books/12/t/-/comment/5", "http://r.test/f/books/12/"),
    ("http://r.test/f/books", "http://r.test/f/books"), ("http://r.test/user/a/b", "http://r.test/user/a/b")])
def test_post_url(url, post):
    assert ev.post_url(url) == post


def test_member_role():
    columns = {"td[data-label='Account'] span": "@ann\n@bob", "td.col-max-role span": "Developer\nGuest"}

    class Members(Page):
        def evaluate(self, js):
            return next(text for css, text in columns.items() if css in js)

    for account, role, expected in (("bob", "Guest", 1), ("ann", "Guest", 0), ("eve", "Guest", 0)):
        locator = f"func:gitlab_get_project_memeber_role(__page__, '{account}')"
        assert score(look(locator, exact_match=role), page=lambda url: Members("", "")) == expected


@pytest.mark.parametrize("text", [
    "f", "f(g())", "a.f()", "f(x='a')", "f()()", "f(__import__)", "f('a' 'b')", "f('a',)", "(" * 300])
def test_calls_are_read_strictly(text):
    with pytest.raises(ValueError, match="no call of a helper"):
        ev.read_call(f"func:{text}")


# ---- locators without a browser ----

QUERIES = [
    ("document.querySelector(\"[name='qty'\").value", "7"), ("document.querySelector('#t').value", "a b"),
    ("document.querySelector('[name=s]').value", "2"), ("document.querySelector('b').value", None),
    ("document.querySelector('.price').outerText", "now $5"),
    ("document.querySelector('[name=qty]').checked", "false"),
    ("document.querySelector('#laid-out').outerText", "a b c p 1 2 end .")]


def test_queries():
    assert [query(PRODUCT, js) for js, _ in QUERIES] == [expected for _, expected in QUERIES]


def test_queries_give_what_a_browser_gives(browser):
    """But for its line breaks."""
    page = browser.chromium.new_page()
    page.set_content(PRODUCT)
    ask = "js => { try { const v = eval(js); return v == null ? null : `${v}`.replace(/\\s+/g, ' ') } catch { return null } }"
    assert [page.evaluate(ask, js) for js, _ in QUERIES] == [expected for _, expected in QUERIES]
    page.close()


@pytest.mark.parametrize("js", [
    "fetch('/x')", "document.querySelector('h1')", "(" * 5000, "document.querySelector('h1').outerText = 3",
    "document.querySelector('h1:hover(').outerText", "document.querySelector(`h1`).outerText"])
def test_query_refuses_what_it_does_not_know(js):
    with pytest.raises(NotSupported):
        query(PRODUCT, js)


# ---- the judge ----

@pytest.mark.parametrize("text, expected", [
    ("It agrees. CORRECT", True), ("INCORRECT", False), ("", None), ("PARTIALLY", False),
    ("The price is correct, the color is not: partially correct.", False), ("correctly", None),
    ("not incorrect but... correct", True), ("<think>incorrect?</think>Correct.", True),
    ("**Incorrect**", False)])
def test_read_judgement(text, expected):
    assert ev.read_judgement(text) == expected


def test_judge_asks_its_endpoint(monkeypatch):
    """Stops an answer without a verdict, or an endpoint that fails, from being scored."""
    got, says = [], ["CORRECT", "no idea", ev.EndpointError("is down")]

    def complete(messages, temperature):
        got.append((messages, temperature))
        if isinstance(says[0], Exception):
            raise says.pop(0)
        return says.pop(0)

    monkeypatch.setattr(ev, "Endpoint", lambda *args, **more: SimpleNamespace(complete=complete))
    judge = ev.Judge("http://127.0.0.1/v1", "m", "MY_KEY")
    assert judge("answer", "how much?", "5", "five") is True
    for problem in ("no idea", "is down"):
        with pytest.warns(UserWarning, match=f"{problem}.*not judged"):
            assert judge("reason", "how much?", "there is none", "five") is None
    assert got[0][1] == 0 and json.loads(got[0][0][1]["content"])["right_answer"] == "5"
    assert got[0][0][0] != got[1][0][0] and json.loads(got[1][0][1]["content"])["reason"] == "there is none"
