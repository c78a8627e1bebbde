"""Task templates of the own sites: every declaration holds together, plans win by WebArena's evaluators, and held-out tasks share nothing with training."""
from collections import Counter

import pytest

from dreamgym.envs.webarena.direct import InProcessBrowser
from dreamgym.envs.webarena.evaluators import as_task, evaluate, located
from dreamgym.envs.webarena.sites import SiteDatabase
from dreamgym.envs.webarena.tasks import ENTITIES, checks, drawn, fact, fields, filled, find, kinds_of_checks, make_tasks, read_task, task_record
from dreamgym.envs.webarena.templates import TEMPLATES


@pytest.fixture(scope="module")
def world():
    return SiteDatabase()


@pytest.fixture(scope="module")
def tasks(world):
    return make_tasks(world, 7)


def test_templates_are_many_and_cover_sites_and_evaluators(tasks):
    everything = [task.goal["config"] for side in tasks.values() for task in side]
    assert len({template.id for template in TEMPLATES}) == len(TEMPLATES) >= 25
    assert {site for record in everything for site in record["sites"]} == {"shopping", "shopping_admin", "reddit", "gitlab", "map", "homepage"}
    assert {kind for record in everything for kind in record["eval"]["eval_types"]} == {"string_match", "url_match", "program_html"}
    assert any(" |AND| " in record["start_url"] for record in everything)
    assert sum(task.goal["type"] == "impossible" for side in tasks.values() for task in side) >= 8


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.id)
def test_a_template_says_all_that_players_and_rules_need(world, template):
    """A parameter that only the database knows must not leak into plan, page or shown lines; each paraphrase asks the same."""
    named = fields(template.intents[0])
    public = [*template.plan, template.page, *template.shows, template.answer, *template.missing]
    assert {name for text in public for name in fields(text)} <= {*named, "answer"}
    assert all(sorted(fields(intent)) == sorted(named) for intent in template.intents)
    rows = drawn(template, world)
    assert rows and len({tuple(row[name] for name in named) for row in rows}) == len(rows)
    assert all(bool(template.answer) == ("answer" in row) for row in rows)
    for row in rows[:40]:
        for intent in template.intents:
            wanted = read_task(filled(intent, row))
            assert wanted.template is template and dict(wanted.values) == {name: row[name] for name in named}


def test_counts_splits_and_determinism(world, tasks):
    assert (len(tasks["train"]), len(tasks["test"])) == (300, 100)
    texts = [task.text for side in tasks.values() for task in side]
    assert len(set(texts)) == len(texts) and all(task.start for side in tasks.values() for task in side)
    assert Counter(task.goal["split"] for task in tasks["test"]) == {"new template": 40, "new entity": 60}
    assert make_tasks(SiteDatabase(), 7) == tasks and make_tasks(world, 8) != tasks


def test_held_out_by_template_and_by_entity(tasks):
    trained = {task.goal["config"]["intent_template_id"] for task in tasks["train"]}
    named = {value for task in tasks["train"] for name, value in task.goal["config"]["instantiation_dict"].items() if name in ENTITIES}
    for task in tasks["test"]:
        record = task.goal["config"]
        if task.goal["split"] == "new template":
            assert record["intent_template_id"] not in trained
        else:
            assert record["intent_template_id"] in trained
            assert {value for name, value in record["instantiation_dict"].items() if name in ENTITIES} - named


def test_doing_nothing_earns_nothing(world, tasks):
    """The null agent: impossible tasks must not be won by saying N/A at once, nor any other by a start page that already shows what is wanted."""
    browser, cookies = InProcessBrowser(world), {site: world.login(site) for site in world.bases}
    for task in [task for side in tasks.values() for task in side]:
        record = located(as_task(task.goal["config"]), world.bases)
        browser.open(list(record.start_urls), cookies)
        for answer in ("", "N/A", "done"):
            assert evaluate(record, answer, browser.url, browser.page).score == 0, (task.text, answer)
            assert not all(met for _, _, met in checks(read_task(task.text), task.start, f"stop [{answer}]")), (task.text, answer)


def test_records_are_webarenas_format(world):
    template = next(template for template in TEMPLATES if template.id == 101)
    record = task_record(template, {"product": "Blue Lamp", "answer": "$25.00"}, "What is the price of Blue Lamp?", 3)
    assert record["start_url"] == "__SHOPPING__" and record["intent_template"] == "What is the price of {{product}}?"
    assert record["eval"]["reference_answers"] == {"exact_match": "$25.00"} and record["eval"]["eval_types"] == ["string_match"]
    absent = task_record(template, {"product": "Odd Lamp", "answer": "N/A"}, "What is the price of Odd Lamp?", 4)
    assert absent["eval"]["reference_answers"] == {"fuzzy_match": "N/A"} and absent["eval"]["eval_types"] == ["string_match", "url_match"]
    assert absent["eval"]["reference_url"].startswith("__SHOPPING__/search?q=Odd+Lamp |OR| ")
    assert as_task(record).needs_judge is False


STATE = """page: Blue Lamp
url: shopping/product/blue-lamp
[1] searchbox 'Search' value 'lamp'
[2] heading 'Blue Lamp'
[3] text 'price $25.00'
[4] text 'stock 3'"""


def test_patterns_and_checks_on_a_page():
    wanted = read_task("What is the price of Blue Lamp?")
    assert find("text 'price {answer}'", STATE) == {"answer": "$25.00"} and find("heading '*' > text 'price *' > text 'stock {n}'", STATE) == {"n": "3"}
    assert find("searchbox 'Search'", STATE) == {} and find("text 'stock'", STATE) is None
    assert fact(wanted, STATE) == "$25.00" and all(met for _, _, met in checks(wanted, STATE, "stop [$25.00]"))
    assert [met for _, _, met in checks(wanted, STATE, "stop [$2.00]")] == [True, True, False]
    assert [met for _, _, met in checks(read_task("What is the price of Red Lamp?"), STATE, "stop [$25.00]")] == [False, False, True]
    missing = "page: Results\nurl: shopping/search?q=Red+Lamp\n[1] heading 'Results for Red Lamp'\n[2] text 'No products found.'"
    assert fact(read_task("What is the price of Red Lamp?"), missing) == "N/A" and fact(wanted, missing) == ""
    with pytest.raises(ValueError, match="of none of the"):
        read_task("Win the lottery.")


def test_what_stands_before_what_is_found():
    """Stops a constraint that is compared with something else than what the page shows there, and one met where nothing is shown."""
    before = lambda task, state, action="stop [done]": [(kind, label, row) for kind, label, row in kinds_of_checks(read_task(task), state, action) if kind != "page"][-1]
    assert before("What is the price of Blue Lamp?", STATE, "stop [$2.00]") == ("answer", "price", ("$2.00", "$25.00", False))
    review = STATE + "\n[5] link 'Write Review'\n[6] text 'Ann Lee, stars 4'"
    assert before("Who wrote the last review of Blue Lamp?", review, "stop [Ann Lee]") == ("answer", "Write Review", ("Ann Lee", "Ann Lee", True))
    order = "page: Order 7\nurl: shopping_admin/orders/7\n[1] heading 'Order 7'\n[2] text 'status Pending'"
    assert before("Cancel order 7.", order) == ("done", "status", ("Canceled", "Pending", False))
    assert before("Cancel order 7.", order.replace("Pending", "Canceled")) == ("done", "status", ("Canceled", "Canceled", True))
    assert before("Cancel order 7.", order.replace("status", "state")) == ("done", "status", ("Canceled", "none", False))
    stock = STATE.replace("shopping/", "shopping_admin/products/")
    assert before("Set the stock of Blue Lamp to 3.", stock) == ("done", "stock", ("3", "3", True))
    assert before("Set the stock of Blue Lamp to 5.", stock) == ("done", "stock", ("5", "3", False))
    forum = "page: tech\nurl: reddit/f/tech\n[1] heading 'tech'\n[2] button 'Subscribe'"
    assert before("Subscribe to the forum tech.", forum) == ("done", "button", ("Unsubscribe", "Subscribe", False))
    place = "page: Address\nurl: shopping/address\n[1] heading 'Address'\n[2] text 'city Boston'\n[3] text 'phone 555-1234'"
    assert before("Change my phone to 555-4000.", place) == ("done", "phone", ("555-4000", "555-1234", False))
    assert before("Change my city to Boston.", place) == ("done", "city", ("Boston", "Boston", True))
    post = "page: A rake\nurl: reddit/f/garden/3\n[1] heading 'A rake'\n[2] text 'ann, score 4'\n[3] text 'No way'\n[4] text '{}, score 1'\n[5] text 'So true'"
    assert before('Comment "No way" on the post A rake.', post.format("ben"))[1:] == ("MarvelsGrantMan136, score", ("No way", "none", False))    # another's comment
    assert before('Comment "So true" on the post A rake.', post.format("MarvelsGrantMan136"))[2] == ("So true", "So true", True)
