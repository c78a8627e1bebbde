"""Importers on small made-up traces of each format: what becomes a step, what is left out, where a run is
cut, and what bad files get."""
import json

import msgspec
import pytest

from dreamgym import offline
from dreamgym.envs.base import make_env
from dreamgym.envs.webarena.actions import Action
from dreamgym.envs.webarena.importers import browsergym_action, read_traces, short_address, webarena_action
from dreamgym.envs.webarena.page import STOPPED, read_page
from dreamgym.episode import Episode

HOME = """Tab 0 (current): One Stop Market

[1] RootWebArea 'One Stop Market' focused: True
\t[1220] link 'My Account'
\t[1486] combobox '\\ue615 Search' required: False expanded: False
\t[1500] tabpanel ''
\t\t[1600] link 'Blue Speaker'
\t\t\t[1601] StaticText 'Speaker'
\t\t[1700] generic 'box'
\t\t\t[1701] button 'Add to Cart'"""
ITEM = """Tab 0 (current): Blue Speaker

[1] RootWebArea 'Blue Speaker' focused: True
\t[2001] heading 'Blue Speaker'
\t[2002] StaticText '$19.99'
\t[2003] button 'Add to Cart'"""
ADDED = ITEM + "\n\t[2010] StaticText 'added'"
LONG = "[1] RootWebArea 'Long'\n" + "\n".join(f"\t[{900 + i}] link 'Row {i}'" for i in range(1, 71))
SHOP = "http://metis.lti.cs.cmu.edu:7770/"


def read(path, form, dropped=frozenset(), bases=()):
    """Every imported episode passes the reader of our own files, and every state reads back."""
    episodes = read_traces(path, form, dropped, bases)
    for episode in episodes:
        assert msgspec.json.decode(msgspec.json.encode(episode), type=Episode) == episode
        assert (episode.source, episode.task.env) == ("imported", "webarena")
        assert episode.task.start == episode.steps[0].state
        for step in episode.steps:
            assert step.reasoning == "" and step.done == (step.next_state == STOPPED)
            for state in (step.state, *([] if step.done else [step.next_state])):
                assert read_page(state).text == state
    return episodes


def actions(episode):
    return [step.action for step in episode.steps]


# ---- render ----

def render(folder, number, steps, log=""):
    """What WebArena's RenderHelper leaves: unescaped text, and a state_obv that is opened twice and never
    closed. `steps`: (url, tree, what the agent said)."""
    body = f"<pre>task_id: {number}\nsites: ['shopping']\nintent: Show me the speaker's price\n</pre>\n"
    for url, text, said in steps:
        body += (f"<h3 class='url'><a href={url}>URL: {url}</a></h3>\n"
                 f"<div class='state_obv'><pre>{text}</pre><div>\n<div class='predict_action'>"
                 f"<div class='raw_parsed_prediction'><pre>{said}</pre></div>"
                 "<div class='parsed_action'><pre>click [1600] where [1600] is link</pre></div></div>\n")
    folder.mkdir(exist_ok=True)
    (folder / f"render_{number}.html").write_text(f"<!DOCTYPE html>\n<html><body>{body}</body></html>")
    (folder / "merge_log.txt").write_text(log)
    return folder


STEPS = [(SHOP, HOME, "The next action I will perform is ```click [1600]```"),
         (SHOP + "blue.html", ITEM, "The price is there. I will perform ```stop [$19.99]```")]


def test_rendered_traces(tmp_path):
    """Also stops a verdict of another task, and a `stop` that is labelled without one."""
    for number in (21, 22, 23):
        folder = render(tmp_path / "gpt", number, STEPS, "[Result] (PASS) /tmp/x/21.json\n(FAIL) a/22.json\n")
    passed, failed, unknown = read(folder, "render")
    assert (passed.id, passed.task.text) == ("import-gpt-21", "Show me the speaker's price")
    assert passed.task.goal == {"task_id": 21} and (passed.success, passed.stop) == (True, "success")
    click, stop = passed.steps
    assert click.state == """page: One Stop Market
url: shopping
link 'My Account'
combobox 'Search'
link 'Blue Speaker'
button 'Add to Cart'"""
    assert (click.action, click.grounded) == ("click [5]", "click [5] link 'Blue Speaker'")
    assert click.next_state == stop.state
    assert stop.state.startswith("page: Blue Speaker\nurl: shopping/blue.html\n")
    assert (stop.action, stop.reward, click.reward) == ("stop [$19.99]", 1.0, 0.0)
    assert [step.reward for step in failed.steps] == [0.0, 0.0] and failed.stop == "failure"
    assert actions(unknown) == ["click [5]"]
    assert [e.task.goal["task_id"] for e in read(folder, "render", {22})] == [21, 23]


def test_what_changed_nothing_is_left_out_and_what_cannot_be_said_cuts(tmp_path):
    """Also: words without an action give way to what WebArena made of them."""
    nothing = [(SHOP, HOME, said) for said in ("```click [7777]```", "```scroll [down]```")]
    steps = [*nothing, (SHOP, HOME, "```click [1601]```"), (SHOP, ITEM, "```go_back```"),
             (SHOP, HOME, "```click [1700]```"), (SHOP, ITEM, "```click [7777]```"),
             (SHOP, HOME, "I would buy it."), (SHOP, ITEM, "```stop []```")]
    folder = render(tmp_path / "x", 5, steps, "(PASS) 5.json")
    first, second = read(folder / "render_5.html", "render")
    assert actions(first) == ["click [5]", "go_back", "click [6]"] and first.stop == "" and not first.success
    assert actions(second) == ["click [5]", "stop []"] and second.success
    assert (first.id, second.id) == ("import-x-5-part1", "import-x-5-part2")


def test_long_pages_get_the_scrolls_that_lead_there(tmp_path):
    steps = [(SHOP, LONG, "```click [965]```"), (SHOP, LONG, "```click [901]```"),
             (SHOP, ITEM, "```stop [x]```")]
    (episode,) = read(render(tmp_path / "x", 5, steps, "(FAIL) 5.json"), "render")
    assert actions(episode) == [
        "scroll [down]", "scroll [down]", "click [7]", "scroll [up]", "scroll [up]", "click [3]", "stop [x]"]
    assert episode.steps[2].state.endswith("window 3 of 3")
    assert episode.steps[2].grounded == "click [7] link 'Row 65'"
    assert episode.steps[5].grounded == "click [3] link 'Row 1'"


def test_a_change_below_the_first_window_is_seen(tmp_path):
    """Typing far down that passes for a refused action, and shows the page from its beginning."""
    empty = f"{LONG}\n\t[990] textbox 'Note' required: False"
    steps = [(SHOP, empty, "```type [990] [hello] [0]```"), (SHOP, empty + "\n\t\t[991] StaticText 'hello'", "```stop []```")]
    (episode,) = read(render(tmp_path / "x", 5, steps, "(PASS) 5.json"), "render")
    assert actions(episode) == ["scroll [down]", "scroll [down]", "type [13] [hello] [0]", "stop []"]
    assert episode.steps[2].next_state.endswith("textbox 'Note' value 'hello'\nwindow 3 of 3")


# ---- accessibility-tree JSON ----

def jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_trees_chained_by_previous_actions(tmp_path):
    """A row holds what followed its own action, which only the next row names."""
    said = ["None", "scroll [down]", "type [1486] [blue ] where [1486] is combobox 'Search'",
            "click [2003] where [2003] is button 'Add to Cart'"]
    rows = [{"task_id": 7, "previous_actions": said[:i + 1], "next_state_acctree": tree}
            for i, tree in enumerate([HOME, ITEM, ADDED, ITEM])]
    (episode,) = read(jsonl(tmp_path / "cot.jsonl", rows), "acctree")
    assert [step.grounded for step in episode.steps] == [
        "type [4] [blue] [1] combobox 'Search'", "click [5] button 'Add to Cart'"]
    assert episode.steps[1].next_state.endswith("text 'added'") and episode.task.text == "WebArena task 7"
    # another run of the same task between them: nothing is chained across
    rows[2]["previous_actions"] = ["None", "click [1]", said[2]]
    assert read(jsonl(tmp_path / "cot.jsonl", rows), "acctree") == []


def test_observation_action_rows(tmp_path):
    rows = [
        {"task_id": 7, "run_id": "a", "url": SHOP, "objective": "buy\nit", "observation": HOME,
         "current_action": "click [1600] where [1600] is link", "next_state_acctree": ITEM},
        {"task_id": 7, "run_id": "a", "url": SHOP + "b", "state": ITEM, "action": "click [2003]",
         "next_observation": ADDED},
        {"task_id": 8, "observation": HOME, "action": "type [1486] [blue] where [1486] is combobox",
         "next_observation": ITEM},
        {"task_id": 9, "intent": "won", "observation": HOME, "action": "stop [x]", "reward": 1, "done": True}]
    first, second, third = read(jsonl(tmp_path / "wma.jsonl", rows), "acctree")
    assert first.task.text == "buy it" and actions(first) == ["click [5]", "click [5]"]
    assert first.steps[1].next_state.endswith("'added'")
    assert actions(second) == ["type [4] [blue] [0]"]       # the history writes Enter as a blank at the end
    assert third.success and actions(third) == ["stop [x]"]
    (tmp_path / "wma.json").write_text(json.dumps({"data": rows[:2]}))
    assert [len(e.steps) for e in read(tmp_path / "wma.json", "acctree")] == [2]


def test_rows_without_a_task_take_it_from_the_name_of_the_file(tmp_path):
    row = {"observation": HOME, "action": "go_back", "next_observation": ITEM}
    jsonl(tmp_path / "steps-21.jsonl", [row, {**row, "task_id": 7}])
    jsonl(tmp_path / "steps-22.jsonl", [row])
    assert [e.task.goal["task_id"] for e in read(tmp_path, "acctree")] == [21, 7, 22]
    with pytest.raises(ValueError, match=r"steps.jsonl:1: no task_id; .*steps-21.jsonl"):
        read(jsonl(tmp_path / "steps.jsonl", [row]), "acctree")


# ---- BrowserGym ----

BG_HOME = """RootWebArea 'One Stop Market', focused, url='http://h:7770/'
\t[22] link 'Blue Speaker', clickable, url='http://h:7770/p/1'
\t\tStaticText 'Blue Speaker'
\t[a30] searchbox 'Search' value='red', clickable
\t[31] combobox 'Sort' value='Name', hasPopup='menu', expanded=False
\t\t[32] option 'Name', selected=True
\t\t[33] option 'Price', selected=False"""
BG_TYPED = BG_HOME.replace("'red'", '"it\'s blue"')
BG_ITEM = """RootWebArea 'Blue Speaker', focused
\t[40] heading 'Blue Speaker'
\tStaticText '$19.99'
\t[41] button 'Buy', clickable"""


def browsergym(folder, number, steps, reward):
    folder.mkdir(exist_ok=True)
    rows = [{"axtree": text, "url": SHOP + path, "open_pages_urls": [SHOP + path], "action": action}
            for text, path, action in steps]
    record = {"benchmark": "webarena", "agent": "GenericAgent-x", "goal": "Buy it.\n", "steps": rows,
              "summary_info": {"cum_reward": reward}}
    (folder / f"webarena.{number}.json").write_text(json.dumps(record))
    return folder


def test_browsergym_runs(tmp_path):
    steps = [
        (BG_HOME, "", "fill('a30', 'it\\'s blue')"), (BG_TYPED, "", "noop()"),
        (BG_TYPED, "", "select_option('31', 'Price')"), (BG_HOME, "?s=2", "click('22')"),
        (BG_ITEM, "p/1", "send_msg_to_user('$19.99')"), (BG_ITEM, "p/1", None)]
    (episode,) = read(browsergym(tmp_path / "run", 21, steps, 1.0), "browsergym")
    assert actions(episode) == ["type [4] [it's blue] [0]", "type [5] [Price] [0]", "click [3]",
                                "stop [$19.99]"]
    assert (episode.id, episode.success, episode.task.text) == ("import-GenericAgent-x-21", True, "Buy it.")
    assert episode.steps[0].state == """page: One Stop Market
url: shopping
link 'Blue Speaker'
searchbox 'Search' value 'red'
combobox 'Sort' value 'Name' options 'Name' | 'Price'"""


def test_a_success_without_stop_gets_one(tmp_path):
    steps = [(BG_HOME, "", "click('22')"), (BG_ITEM, "p/1", None)]
    won, lost = read(browsergym(browsergym(tmp_path / "run", 1, steps, 1), 2, steps, 0), "browsergym")
    assert actions(won) == ["click [3]", "stop []"] and won.success
    assert actions(lost) == ["click [3]"] and lost.stop == "step_limit"


# ---- what does not fit ----

CONFIG = "<pre>task_id: 3\nintent: x\n</pre>"
TREE = "<div class='state_obv'><pre>[1] link 'x'</pre></div>"
SAID = "<p class='url'>x</p><p class='raw_parsed_prediction'>click [1]</p>"


@pytest.mark.parametrize("form, file, content, told", [
    ("render", "render_3.html", "<html><body><pre>hello</pre></body></html>", "task_id"),
    ("render", "render_3.html", "", "task_id"), ("render", "render_3.html", CONFIG, "0 state_obv"),
    ("render", "render_3.html", CONFIG + TREE, "1 state_obv, 0 url"),
    ("render", "render_3.html", CONFIG + TREE.replace("[1] link 'x'", "crashed") + SAID,
     "no line of the form"),
    ("render", "other.html", "", "render_N.html"),
    *(("acctree", "x.jsonl:2", line, told) for line, told in (
        ("{", "not JSON"), ("[1]", "Expected `object`"), ('{"observation": "x"}', "task_id"),
        ('{"task_id": "7"}', "got `str`"), ('{"task_id": 7}', "previous_actions"),
        ('{"task_id": 7, "observation": "junk", "action": "go_back"}', "no line of the form"),
        ('{"task_id": 7, "observation": "[1] link \'x\'"}', "current_action"),
        ('{"task_id": 7, "previous_actions": ["None"]}', "next_state_acctree"))),
    ("acctree", "x.json", '{"data": 3}', "Expected `array`"),
    *(("browsergym", "webarena.3.json", line, told) for line, told in (
        ("{", "not JSON"), ('{"steps": [], "goal": "", "benchmark": "workarena"}', "workarena"),
        ('{"steps": [{"url": "x"}], "goal": "x"}', "axtree")))])
def test_a_malformed_file_is_named(tmp_path, form, file, content, told):
    path = tmp_path / file.partition(":")[0]
    good = json.dumps({"task_id": 1, "observation": HOME, "action": "go_back", "next_observation": ITEM})
    path.write_text(f"{good}\n{content}\n" if ":" in file else content)
    with pytest.raises(ValueError, match=told) as error:
        read_traces(path if form == "acctree" else tmp_path, form)
    assert file in str(error.value) or file == "other.html"


@pytest.mark.parametrize("name, form, told", [
    (".", "pickle", "expected one of render, acctree, browsergym"), ("absent", "render", "no such file")])
def test_unknown_formats_and_paths(tmp_path, name, form, told):
    with pytest.raises(ValueError, match=told):
        read_traces(tmp_path / name, form)


# ---- actions and addresses ----

@pytest.mark.parametrize("text, action", [
    ("click('12')", Action("click")), ("click('12', button='right')", None), ("hover('12')", Action("hover")),
    ("fill('12', 'a')", Action("type", 0, "a", False)), ("clear('12')", Action("type", 0, "", False)),
    ("check('12')", Action("click")), ("press('12', 'Enter')", Action("press", text="Enter")),
    ("keyboard_press('Tab')", Action("press", text="Tab")),
    ("select_option('12', ['Price'])", Action("type", 0, "Price", False)),
    ("scroll(0, 300)", Action("scroll", text="down")), ("scroll(0, -300)", Action("scroll", text="up")),
    ("goto('http://h:9999/f/books')", Action("goto", text="http://h:9999/f/books")),
    ("tab_focus(1)", Action("tab_focus", 1)), ("tab_close()", Action("close_tab")),
    ("new_tab()", Action("new_tab")), ("report_infeasible('no such page')", Action("stop", text="N/A")),
    ("send_msg_to_user('two\\nlines')", Action("stop", text="two lines")),
    *((text, None) for text in (
        "noop(1000)", "drag_and_drop('1', '2')", "click('12')\nclick('12')", "click(", "",
        "__import__('os').system('x')", "click(open('x'))")), ("click('12') # x", Action("click"))])
def test_browsergym_calls_become_our_grammar_and_are_never_run(text, action):
    found = browsergym_action(text)
    assert (found and found[0]) == action
    assert not action or action.kind not in ("click", "hover", "type") or found[1] == "12"


@pytest.mark.parametrize("text, action", [
    ("click [12]", Action("click", 12)), ("page_focus [1]", Action("tab_focus", 1)), ("buy it", None),
    ("goto [http://onestopmarket.com/a]", Action("goto", text="http://onestopmarket.com/a")),
    ("type [12] [a b ] where [12] is textbox 'x'", Action("type", 12, "a b", True))])
def test_webarena_actions(text, action):
    assert webarena_action(text) == (action and (action, str(action.element)))


@pytest.mark.parametrize("url, short", [
    ("http://h:7780/admin/sales/", "shopping_admin/sales/"), ("http://luma.com/admin", "shopping_admin"),
    ("http://www.openstreetmap.org/#map=7/4", "map"), ("", "unknown"), ("about:blank", "about:blank"),
    ("http://h:8888/wikipedia_en_all_maxi_2022-05/A/Pisa", "wikipedia/A/Pisa"),
    ("http://example.com/x?a=1", "example.com/x?a=1"), ("http://h:99999999/x", "h:99999999/x"),
    ("http://h:8023/a?b=c", "gitlab/a?b=c")])
def test_recorded_addresses_lose_their_host(url, short):
    assert short_address(url) == short


def test_sites_of_other_ports_are_named_by_their_bases(tmp_path, monkeypatch):
    for name in ("WA_SHOPPING", "SHOPPING", "WA_INSTANCES"):
        monkeypatch.delenv(name, raising=False)
    one, two = "http://158.130.4.158:8090", "https://env.example/w2/shop"
    rows = [{"task_id": i, "url": base + "/cart?p=2", "observation": HOME, "action": f"goto [{base}/b]",
             "next_observation": ITEM} for i, base in enumerate((one, two))]
    path, file = jsonl(tmp_path / "runs.jsonl", rows), tmp_path / "bases.jsonl"

    def shown(episodes):
        return [(e.steps[0].state.split("\n")[1], e.steps[0].action) for e in episodes]

    known = ("url: shopping/cart?p=2", "goto [shopping/b]")
    assert shown(read(path, "acctree", bases=[{"shopping": one}, {"shopping": two + "/"}])) == [known, known]
    assert shown(read(path, "acctree"))[0] == ("url: 158.130.4.158:8090/cart?p=2",
                                               "goto [158.130.4.158:8090/b]")
    file.write_text(f'{{"WA_SHOPPING": "{one}"}}\n{{"WA_SHOPPING": "{two}"}}\n')
    env = make_env("webarena")
    monkeypatch.setenv("WA_SHOPPING", one)
    assert shown(env.read_traces(str(path), "acctree"))[0] == known
    monkeypatch.setenv("WA_INSTANCES", str(file))
    assert shown(env.read_traces(str(path), "acctree")) == [known, known]


def test_collect_reads_traces_through_the_environment(tmp_path):
    """Test tasks in training, and a format that collect.py cannot ask for."""
    for number in (21, 22):
        folder = render(tmp_path / "gpt", number, STEPS, "(PASS) 21.json (FAIL) 22.json")
    lite = {"task_id": 0, "old_task_id": 22, "sites": ["shopping"], "intent": "x", "start_url": "http://x",
            "eval": {"eval_types": ["url_match"], "reference_url": "http://x"}}
    (tmp_path / "lite.json").write_text(json.dumps([lite]))
    env = make_env("webarena", options=[f"drop={tmp_path / 'lite.json'}"])
    logs = offline.read_logs(env, str(folder), "render")
    (episode,) = offline.by_split(env, logs, {split: [] for split in offline.SPLITS})["train"]
    assert (episode.task.goal, episode.source, episode.success) == ({"task_id": 21}, "imported", True)
