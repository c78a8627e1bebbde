"""Task templates of the own sites: every declaration holds together, plans win by WebArena's evaluators, and
held-out tasks share nothing with training."""
from collections import Counter
from dataclasses import replace
from urllib.parse import urljoin

import lxml.html
import pytest

from dreamgym.envs.webarena.direct import InProcessBrowser
from dreamgym.envs.webarena.evaluators import as_task, evaluate, located
from dreamgym.envs.webarena.sites import DATABASES, SiteDatabase
from dreamgym.envs.webarena.tasks import (
    COUNTS, drawn, fact, fields, filled, find, make_tasks, read_task, rule_success,
    sentence_split, task_record)
from dreamgym.envs.webarena.templates import TEMPLATES


@pytest.fixture(scope="module")
def world():
    return SiteDatabase()


@pytest.fixture(scope="module")
def tasks():
    return {split: make_tasks(split, 7) for split in COUNTS}


def test_templates_are_many_and_cover_sites_and_evaluators(tasks):
    """Stops a site, an evaluator, several tabs, or impossible tasks from dropping out of the own tasks."""
    everything = [task.goal["config"] for split in tasks.values() for task in split]
    assert len({template.id for template in TEMPLATES}) == len(TEMPLATES) >= 25
    assert {site for record in everything for site in record["sites"]} == {
        "shopping", "shopping_admin", "reddit", "gitlab", "map", "homepage"}
    assert {kind for record in everything for kind in record["eval"]["eval_types"]} == {
        "string_match", "url_match", "program_html"}
    assert any(" |AND| " in record["start_url"] for record in everything)
    assert sum(record["eval"]["reference_answers"] == {"exact_match": "N/A"} for record in everything) >= 8


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.id)
def test_a_template_says_all_that_players_and_rules_need(world, template):
    """A parameter that only the database knows must not leak into plan, page or shown lines."""
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


def test_counts_splits_and_determinism(tasks):
    assert {split: len(rows) for split, rows in tasks.items()} == COUNTS
    everything = [task for rows in tasks.values() for task in rows]
    assert len({task.text for task in everything}) == len({task.id for task in everything}) == len(everything)
    assert all(task.start and len(task.groups) == 3 for task in everything)
    assert Counter(task.groups[0] for task in tasks["test"]) == {"kind new": 40, "kind known": 120}
    assert min(Counter(task.goal["database"] for task in everything).values()) >= 30
    assert len({task.groups[1] for task in tasks["train"]}) >= 40
    assert make_tasks("test", 7) == tasks["test"] != make_tasks("test", 8)


def test_held_out_by_database_sentence_and_template(tasks):
    templates = {split: {task.groups[1] for task in rows} for split, rows in tasks.items()}
    assert templates["valid"] <= templates["train"]
    by_id = {str(template.id): template for template in TEMPLATES}
    for split, rows in tasks.items():
        assert {task.goal["database"] for task in rows} == {name for name in DATABASES if name.startswith(split)}
        for task in rows:
            template = by_id[task.groups[1].split()[1]]
            if task.groups[0] == "kind new":
                assert split == "test" and task.groups[1] not in templates["train"]
            else:
                assert sentence_split(template, task.goal["parameters"]) == split
                assert task.groups[1] in templates["train"]


def test_doing_nothing_earns_nothing(tasks):
    """The null agent: impossible tasks must not be won by saying N/A at once."""
    world = SiteDatabase()
    browser, cookies = InProcessBrowser(world), {site: world.login(site) for site in world.bases}
    for task in [task for side in tasks.values() for task in side]:
        world.reset(task.goal["database"])
        record = located(as_task(task.goal["config"]), world.bases)
        browser.open(list(record.start_urls), cookies)
        for answer in ("", "N/A", "done"):
            assert evaluate(record, answer, browser) == 0, (task.text, answer)
            assert rule_success(task.text, task.start, f"stop [{answer}]") is False, (task.text, answer)


PAGES_ATTACKED = 40


def pages_near(browser, starts: list[str]) -> list[str]:
    """Addresses that links lead to, the nearest first."""
    found = list(starts)
    for url in found:
        if len(found) >= PAGES_ATTACKED:
            break
        for link in lxml.html.document_fromstring(browser.page(url).html).iter("a"):
            there = urljoin(url, link.get("href", ""))
            if browser.addresses.site(there) and there not in found:
                found.append(there)
    return found[:PAGES_ATTACKED]


def forms_of(browser, url: str) -> list[tuple]:
    """(form, its text fields) of a fresh page."""
    browser.front.goto(url)
    found = {}
    for node in browser.front.nodes:
        if node.role in ("textbox", "searchbox"):
            found.setdefault(next(node.ref.iterancestors("form")), []).append(node)
    return list(found.items())


def paid_attacks(world, template, html=None) -> list[str]:
    """Pages on which an attack was paid, before or after a form was sent: each form near the pages that the
    task is about is filled with the words that its evaluators look for, but the fields that the plan fills
    get other words in the forms that the plan sends. `html` takes the place of the template's."""
    template = replace(template, html=template.html if html is None else html)
    values = next(row for row in drawn(template, world) if row.get("answer") != "N/A")
    task = located(as_task(task_record(template, values, filled(template.intents[0], values), 0)), world.bases)
    words = next((filled(row[2], values) for row in template.html), values.get("answer", " ".join(values.values())))
    places = [target.url for target in task.eval.program_html or []]
    if task.eval.eval_types != ["url_match"]:    # there, to be at the address is to do the task
        places += (task.eval.reference_url or "").split(" |OR| ")
    places = [url for url in places if url]
    world.reset()
    browser = InProcessBrowser(world)
    browser.open(task.start_urls, {site: world.login(site) for site in world.bases})
    near, paid = pages_near(browser, list(dict.fromkeys(places + task.start_urls))), []
    own = {filled(step, values).split("'")[1] for step in template.plan if step.startswith("type textbox")}

    def look():
        if evaluate(task, "done", browser):
            paid.append(browser.url)

    for url in near:
        for i in range(len(forms_of(browser, url))):
            form, nodes = forms_of(browser, url)[i]
            sends = {f"click button '{button.text}'" for button in form.iter("button")}
            is_planned = not sends.isdisjoint(template.plan)
            for node in nodes:
                browser.front.fill(node, "something else" if is_planned and node.name in own else words)
            look()
            browser.front.submit(form)
            look()
    for url in places:
        browser.front.goto(url)
        look()
    return paid


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.id)
def test_words_in_other_fields_are_never_paid(world, template):
    """A task whose evaluator finds the wanted words in a comment, and a title."""
    assert not paid_attacks(world, template)


def test_the_attack_finds_what_it_is_for(world):
    """Both were paid for a comment that says so."""
    by_id = {template.id: template for template in TEMPLATES}
    for number, words in ((405, "closed"), (406, "assignee {person}")):
        address = by_id[number].html[0][0]
        assert paid_attacks(world, by_id[number], ((address, "main", words),))


def test_records_are_webarenas_format(tasks):
    """A generated task that WebArena's own code could not load."""
    record = next(task.goal["config"] for task in tasks["train"] if task.text.startswith("What is the price"))
    assert record["instantiation_dict"]["product"] in record["intent"] and record["start_url"] == "__SHOPPING__"
    assert record["intent_template"] == "What is the price of {{product}}?"


STATE = """page: Blue Lamp
url: shopping/product/blue-lamp
searchbox 'Search' value 'lamp'
heading 'Blue Lamp'
text 'price $25.00'
text 'stock 3'"""


def test_patterns_on_a_page():
    """Patterns that match half a line or a line too far."""
    price, red = "What is the price of Blue Lamp?", "What is the price of Red Lamp?"
    blue = read_task(price)
    assert find("text 'price {answer}'", STATE) == {"answer": "$25.00"}
    assert find("heading '*' > text 'price *' > text 'stock {n}'", STATE) == {"n": "3"}
    assert find("searchbox 'Search'", STATE) == {} and find("text 'stock'", STATE) is None
    assert fact(blue, STATE) == "$25.00" and rule_success(price, STATE, "stop [$25.00]")
    assert rule_success(price, STATE, "stop [$25.00] text 'price $25.00'")                # grounded
    assert rule_success(price, STATE, "stop [$2.00]") is False
    assert rule_success(red, STATE, "stop [$25.00]") is False and rule_success(price, STATE, "go_back") is None
    missing = ("page: Results\nurl: shopping/search?q=Red+Lamp\nheading 'Results for Red Lamp'\n"
               "text 'No products found.'")
    assert fact(read_task(red), missing) == "N/A" and fact(blue, missing) == ""
    assert read_task("Win the lottery.") is None and read_task(f"What is the price of {'a' * 500}?") is None


REVIEW = STATE + "\nlink 'Write Review'\ntext 'Ann Lee, stars 4'"
STOCK = STATE.replace("shopping/product/", "shopping_admin/products/")
POST = ("page: A rake\nurl: reddit/f/garden/3\nheading 'A rake'\ntext 'ann, score 4'\ntext 'No way'\n"
        "text '{}, score 1'\ntext 'So true'")


@pytest.mark.parametrize("task, state, answer, expected", [
    ("Who wrote the last review of Blue Lamp?", REVIEW, "Ann Lee", True),
    ("Set the stock of Blue Lamp to 3.", STOCK, "done", True),
    ("Set the stock of Blue Lamp to 4.", STOCK, "done", False),
    ('Comment "No way" on the post A rake.', POST.format("ben"), "done", False)])         # another's comment
def test_what_fulfils_a_task(task, state, answer, expected):
    """A constraint that is looked for elsewhere on the page than the task means."""
    assert rule_success(task, state, f"stop [{answer}]") is expected
