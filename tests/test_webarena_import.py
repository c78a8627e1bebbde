"""Importers on small made-up traces of each format: what becomes a step, what is left out, where a run is
cut, and what bad files get."""

import json

import msgspec
import pytest

from dreamgym import offline
from dreamgym.envs.base import make_env
from dreamgym.envs.webarena.actions import Action
from dreamgym.envs.webarena.importers import browsergym_action, read_traces, short_address, webarena_action
from dreamgym.envs.webarena.page import STOPPED, read_screen
from dreamgym.episode import Episode

HOME = """Tab 0 (current): One Stop Market

[1] RootWebArea 'One Stop Market' focused: True
\t[1220] link 'My Account'
\t[1486] combobox '\\ue615 Search' autocomplete: both hasPopup: listbox required: False expanded: False
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
LONG = "Tab 0 (current): Long\n\n[1] RootWebArea 'Long'\n" + "\n".join(
    f"\t[{900 + i}] link 'Row {i}'" for i in range(1, 71))


def flawless(episodes):
    """Every imported episode passes the reader of our own files, and every state reads back."""
    for episode in episodes:
        assert msgspec.json.decode(msgspec.json.encode(episode), type=Episode) == episode
        assert episode.source == "imported"
        assert episode.task.env == "webarena"
        assert episode.task.start == episode.steps[0].state
        for step in episode.steps:
            assert str(read_screen(step.state)) == step.state and (
                step.next_state == STOPPED
                if step.done
                else str(read_screen(step.next_state)) == step.next_state)
    return episodes


# ---- render ------------------------------------------------------------------------------------------------

def render(folder, number, steps, intent="Show me the speaker's price", config=True):
    """What WebArena's RenderHelper leaves: unescaped text, and a state_obv that is opened twice and never
    closed."""
    body = f"<pre>task_id: {number}\nsites: ['shopping']\nintent: {intent}\n</pre>\n" if config else ""
    for url, text, raw, parsed in steps:
        body += (
            f"<h2>New Page</h2>\n<h3 class='url'><a href={url}>URL: {url}</a></h3>\n"
            f"<div class='state_obv'><pre>{text}</pre><div>\n<img src='data:image/png;base64,AA'/>\n"
            f"<div class='prev_action'>None</div><div class='predict_action'>"
            f"<div class='raw_parsed_prediction'><pre>{raw}</pre></div>"
            f"<div class='action_object'><pre>{{'action_type': 1}}</pre></div>"
            f"<div class='parsed_action'><pre>{parsed}</pre></div></div>\n")
    folder.mkdir(exist_ok=True)
    (folder / f"render_{number}.html").write_text(
        f"<!DOCTYPE html>\n<head></head><html><body>{body}</body></html>")
    return folder


SHOP = "http://metis.lti.cs.cmu.edu:7770/"
STEPS = [
    (
        SHOP, HOME,
        "Let's think step-by-step. In summary, the next action I will perform is ```click [1600]```",
        "click [1600] where [1600] is link 'Blue Speaker'"),
    (
        SHOP + "blue.html", ITEM,
        "The price is there. In summary, the next action I will perform is ```stop [$19.99]```",
        "stop [$19.99]")]


def test_rendered_traces(tmp_path):
    folder = render(render(render(tmp_path / "gpt", 21, STEPS), 22, STEPS), 23, STEPS)
    (folder / "merge_log.txt").write_text(
        "2023 - INFO - [Result] (PASS) /tmp/x/21.json\n2023 - INFO - [Result] (FAIL) config_files/22.json\n")
    passed, failed, unknown = flawless(read_traces(folder, "render"))
    assert passed.task.text == "Show me the speaker's price"
    assert passed.task.goal == {"task_id": 21}
    assert passed.id == "import-gpt-21"
    click, stop = passed.steps
    assert click.state == """page: One Stop Market
url: shopping
link 'My Account'
combobox 'Search'
link 'Blue Speaker'
button 'Add to Cart'"""
    assert (click.action, click.grounded) == ("click [5]", "click [5] link 'Blue Speaker'")
    assert (click.reward, click.done, click.reasoning) == (0.0, False, "")
    assert click.next_state.startswith("page: Blue Speaker\nurl: shopping/blue.html\n")
    assert (
        click.next_state, stop.next_state,
    ) == (stop.state, STOPPED)
    assert (stop.action, stop.reward, stop.done) == ("stop [$19.99]", 1.0, True)
    assert passed.success and passed.stop == "success"
    assert [step.reward for step in failed.steps] == [0.0, 0.0]
    assert failed.steps[-1].done
    assert failed.stop == "failure"
    # no verdict, no label for the stop
    assert [step.action for step in unknown.steps] == ["click [5]"] and not unknown.steps[-1].done


def test_test_tasks_are_dropped(tmp_path):
    folder = render(render(tmp_path / "gpt", 21, STEPS), 22, STEPS)
    assert [e.task.goal["task_id"] for e in read_traces(folder, "render", {22})] == [21]
    assert read_traces(folder, "render", {21, 22}) == []


def test_what_changed_nothing_is_left_out_and_what_cannot_be_said_cuts(tmp_path):
    gibberish, unknown_id, text_in_link, box = (
        "I would buy it.", "```click [7777]```", "```click [1601]```",
        "```click [1700]```")
    steps = [(SHOP, HOME, raw, "") for raw in (gibberish, unknown_id, "```scroll [down]```")]
    steps += [
        (SHOP, HOME, text_in_link, ""), (SHOP, ITEM, "```go_back```", ""), (SHOP, HOME, box, ""),
        (SHOP, ITEM, gibberish, ""), (SHOP, HOME, "```click [1220]```", ""),
        (SHOP, ITEM, "```stop []```", "")]
    folder = render(tmp_path / "x", 5, steps)
    (folder / "merge_log.txt").write_text("(PASS) 5.json")
    first, second = flawless(read_traces(folder / "render_5.html", "render"))
    assert [s.action for s in first.steps] == ["click [5]", "go_back", "click [6]"]
    assert first.stop == ""
    assert not first.success
    assert [s.action for s in second.steps] == ["click [3]", "stop []"]
    assert second.success
    assert (first.id, second.id) == ("import-x-5-part1", "import-x-5-part2")


def test_long_pages_get_the_scrolls_that_lead_there(tmp_path):
    steps = [
        (SHOP, LONG, "```click [965]```", ""), (SHOP, LONG, "```click [901]```", ""),
        (SHOP, ITEM, "```stop [x]```", "")]
    folder = render(tmp_path / "x", 5, steps)
    (folder / "merge_log.txt").write_text("(FAIL) 5.json")
    (episode,) = flawless(read_traces(folder, "render"))
    assert [s.action for s in episode.steps] == [
        "scroll [down]", "scroll [down]", "click [7]", "scroll [up]", "scroll [up]", "click [3]", "stop [x]"]
    assert episode.steps[2].state.endswith("window 3 of 3")
    assert episode.steps[2].grounded == "click [7] link 'Row 65'"
    assert episode.steps[5].grounded == "click [3] link 'Row 1'"


@pytest.mark.parametrize(
    "content, told",
    [
        ("<html><body><pre>hello</pre></body></html>", "task_id"), ("", "task_id"),
        ("<pre>task_id: 3\nintent: x\n</pre>", "0 state_obv"),
        (
            "<pre>task_id: 3\nintent: x\n</pre><div class='state_obv'><pre>[1] link 'x'</pre></div>",
            "1 state_obv, 0 url")])
def test_malformed_rendered_traces_name_the_file(tmp_path, content, told):
    file = tmp_path / "render_3.html"
    file.write_text(content)
    with pytest.raises(ValueError, match=told) as error:
        read_traces(tmp_path, "render")
    assert "render_3.html" in str(error.value)


def test_an_observation_that_is_no_tree_names_the_file(tmp_path):
    with pytest.raises(ValueError, match="render_9.html.*no line of the form"):
        read_traces(render(tmp_path / "x", 9, [(SHOP, "crashed", "```click [1]```", "")]), "render")


# ---- accessibility-tree JSON -------------------------------------------------------------------------------

def jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_trees_chained_by_previous_actions(tmp_path):
    """A row holds what followed ITS action, which only the next row names: for row 1, row 0 gives the state
    and row 2 the action."""
    typed, bought = (
        "type [1486] [blue ] where [1486] is combobox 'Search'",
        "click [2003] where [2003] is button 'Add to Cart'")
    actions, trees = (
        ["None", "scroll [down]", typed, bought],
        [HOME, ITEM, ITEM + "\n\t[2010] StaticText 'added'", ITEM])
    rows = [
        {"task_id": 7, "step_idx": i, "previous_actions": actions[: i + 1], "next_state_acctree": tree}
        for i, tree in enumerate(trees)]
    (episode,) = flawless(read_traces(jsonl(tmp_path / "cot.jsonl", rows), "acctree", intents={7: "find it"}))
    assert [(s.action, s.grounded) for s in episode.steps] == [
        ("type [4] [blue] [1]", "type [4] [blue] [1] combobox 'Search'"),
        ("click [5]", "click [5] button 'Add to Cart'")]
    assert episode.steps[1].next_state.endswith("text 'added'") and episode.task.text == "find it"
    # another run of the same task between them: nothing is chained across
    rows[2]["previous_actions"] = ["None", "click [1]", typed]
    assert read_traces(jsonl(tmp_path / "cot.jsonl", rows), "acctree") == []


def test_observation_action_rows(tmp_path):
    rows = [
        {
            "task_id": 7, "run_id": "a", "url": SHOP, "objective": "buy\nit", "observation": HOME,
            "current_action": "click [1600] where [1600] is link",
            "next_state_acctree": ITEM},
        {
            "task_id": 7, "run_id": "a", "url": SHOP + "b", "observation": ITEM, "action": "click [2003]",
            "next_observation": ITEM + "\n\t[2010] StaticText 'added'"},
        {
            "task_id": 8, "objective": "other", "observation": HOME,
            "action": "type [1486] [blue] where [1486] is combobox",
            "next_observation": ITEM},
        {"task_id": 9, "intent": "won", "observation": HOME, "action": "stop [x]", "reward": 1, "done": True}]
    first, second, third = flawless(read_traces(jsonl(tmp_path / "wma.jsonl", rows), "acctree"))
    assert first.task.text == "buy it"
    assert [s.action for s in first.steps] == ["click [5]", "click [5]"]
    assert first.steps[1].next_state.endswith("'added'")
    # the history writes Enter as a blank at the end
    assert [s.action for s in second.steps] == ["type [4] [blue] [0]"]
    assert third.success and third.steps[0].action == "stop [x]"
    (tmp_path / "wma.json").write_text(json.dumps({"data": rows[:2]}))
    assert [len(e.steps) for e in read_traces(tmp_path / "wma.json", "acctree")] == [2]
    assert read_traces(tmp_path / "wma.jsonl", "acctree", {7, 8, 9}) == []


@pytest.mark.parametrize(
    "line, told",
    [
        ("{", "not JSON"), ("[1]", "expected an object"), ('{"observation": "x"}', "task_id"),
        ('{"task_id": "7"}', "found str"), ('{"task_id": 7}', "previous_actions"),
        ('{"task_id": 7, "observation": "junk", "action": "go_back"}', "no line of the form"),
        ('{"task_id": 7, "observation": "[1] link \'x\'"}', "current_action"),
        ('{"task_id": 7, "previous_actions": ["None"]}', "next_state_acctree")])
def test_malformed_rows_name_file_and_line(tmp_path, line, told):
    good = json.dumps({"task_id": 1, "observation": HOME, "action": "go_back", "next_observation": ITEM})
    (tmp_path / "x.jsonl").write_text(good + "\n" + line + "\n")
    with pytest.raises(ValueError, match=told) as error:
        read_traces(tmp_path / "x.jsonl", "acctree")
    assert "x.jsonl:2" in str(error.value)


# ---- BrowserGym --------------------------------------------------------------------------------------------

BG_HOME = """RootWebArea 'One Stop Market', focused, url='http://h:7770/'
\t[22] link 'Blue Speaker', clickable, url='http://h:7770/p/1'
\t\tStaticText 'Blue Speaker'
\t[a30] searchbox 'Search' value='red', clickable
\t[31] combobox 'Sort' value='Name', hasPopup='menu', expanded=False
\t\t[32] option 'Name', selected=True
\t\t[33] option 'Price', selected=False"""
BG_ITEM = """RootWebArea 'Blue Speaker', focused
\t[40] heading 'Blue Speaker'
\tStaticText '$19.99'
\t[41] button 'Buy', clickable"""


def browsergym(folder, number, steps, reward):
    folder.mkdir(exist_ok=True)
    rows = [{"num": i, "axtree": text, "url": "http://h:7770/" + path,
             "open_pages_urls": ["http://h:7770/" + path], "action": action, "reasoning": "because"}
            for i, (text, path, action) in enumerate(steps)]
    record = {"benchmark": "webarena", "agent": "GenericAgent-x", "goal": "Buy it.\n", "steps": rows,
              "summary_info": {"cum_reward": reward}}
    (folder / f"webarena.{number}.json").write_text(json.dumps(record))
    return folder


def test_browsergym_runs(tmp_path):
    steps = [
        (BG_HOME, "", "fill('a30', 'it\\'s blue')"), (BG_HOME.replace("'red'", '"it\'s blue"'), "", "noop()"),
        (BG_HOME.replace("'red'", '"it\'s blue"'), "", "select_option('31', 'Price')"),
        (BG_HOME, "?s=2", "click('22')"), (BG_ITEM, "p/1", "send_msg_to_user('$19.99')"),
        (BG_ITEM, "p/1", None)]
    (episode,) = flawless(read_traces(browsergym(tmp_path / "run", 21, steps, 1.0), "browsergym"))
    assert [s.action for s in episode.steps] == [
        "type [4] [it's blue] [0]", "type [5] [Price] [0]", "click [3]", "stop [$19.99]"]
    assert episode.success and episode.task.text == "Buy it." and episode.steps[0].reasoning == ""
    assert episode.steps[0].state == """page: One Stop Market
url: shopping
link 'Blue Speaker'
searchbox 'Search' value 'red'
combobox 'Sort' value 'Name' options 'Name' | 'Price'"""


def test_a_success_without_stop_gets_one(tmp_path):
    steps = [(BG_HOME, "", "click('22')"), (BG_ITEM, "p/1", None)]
    won, lost = flawless(
        read_traces(browsergym(browsergym(tmp_path / "run", 1, steps, 1), 2, steps, 0), "browsergym"))
    assert [s.action for s in won.steps] == ["click [3]", "stop []"] and won.success
    assert [s.action for s in lost.steps] == ["click [3]"]
    assert lost.stop == "step_limit"
    assert not lost.steps[-1].done


@pytest.mark.parametrize(
    "content, told",
    [
        ("{", "not JSON"), ("[]", "benchmark 'list'"),
        ('{"benchmark": "workarena"}', "benchmark 'workarena'"), ('{"benchmark": "webarena"}', "`steps`"),
        ('{"steps": [3], "goal": "x"}', "steps\\[0\\]"), ('{"steps": [{"url": "x"}], "goal": "x"}', "axtree"),
        ('{"steps": []}', "`goal`")])
def test_malformed_browsergym_files_name_the_file(tmp_path, content, told):
    (tmp_path / "webarena.3.json").write_text(content)
    with pytest.raises(ValueError, match=told) as error:
        read_traces(tmp_path, "browsergym")
    assert "webarena.3.json" in str(error.value)


# ---- actions and addresses ---------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "text, action",
    [
        ("click('12')", Action("click", 5)), ("click('12', button='right')", None),
        ("hover('12')", Action("hover", 5)), ("fill('12', 'a')", Action("type", 5, "a", False)),
        ("clear('12')", Action("type", 5, "", False)), ("check('12')", Action("click", 5)),
        ("press('12', 'Enter')", Action("press", text="Enter")),
        ("keyboard_press('Tab')", Action("press", text="Tab")),
        ("select_option('12', ['Price'])", Action("type", 5, "Price", False)),
        ("scroll(0, 300)", Action("scroll", text="down")), ("scroll(0, -300)", Action("scroll", text="up")),
        ("goto('http://h:9999/f/books')", Action("goto", text="reddit/f/books")),
        ("tab_focus(1)", Action("tab_focus", 1)), ("tab_close()", Action("close_tab")),
        ("new_tab()", Action("new_tab")), ("go_back()", Action("go_back")),
        ("report_infeasible('no such page')", Action("stop", text="N/A")),
        ("send_msg_to_user('two\\nlines')", Action("stop", text="two lines")), ("noop()", None),
        ("noop(1000)", None), ("mouse_click(3, 4)", None), ("drag_and_drop('1', '2')", None),
        ("click('12')\nclick('12')", None), ("click('99')", None), ("__import__('os').system('x')", None),
        ("click(open('x'))", None), ("click(", None), ("", None), ("click('12') # x", Action("click", 5)),
    ])
def test_browsergym_calls_become_our_grammar_and_are_never_run(text, action):
    assert browsergym_action(text, {"12": 5}.get) == action


@pytest.mark.parametrize(
    "text, action",
    [
        ("click [12]", Action("click", 5)), ("click [99]", None), ("page_focus [1]", Action("tab_focus", 1)),
        ("buy it", None), ("goto [http://onestopmarket.com/a]", Action("goto", text="shopping/a")),
        ("type [12] [a b ] where [12] is textbox 'x'", Action("type", 5, "a b", True))])
def test_webarena_actions_are_aimed_anew(text, action):
    assert webarena_action(text, {"12": 5}.get) == action


@pytest.mark.parametrize(
    "url, short",
    [
        ("http://h:7780/admin/sales/", "shopping_admin/sales/"), ("http://luma.com/admin", "shopping_admin"),
        ("http://www.openstreetmap.org/#map=7/4", "map"),
        ("http://h:8888/wikipedia_en_all_maxi_2022-05/A/Pisa", "wikipedia/A/Pisa"),
        ("http://example.com/x?a=1", "example.com/x?a=1"), ("about:blank", "about:blank"),
        ("http://h:99999999/x", "h:99999999/x"), ("", "unknown"),
        ("http://h:8023/a?b=c", "gitlab/a?b=c")])
def test_recorded_addresses_lose_their_host(url, short):
    assert short_address(url) == short


def test_unknown_formats_and_paths(tmp_path):
    with pytest.raises(ValueError, match="expected one of render, acctree, browsergym"):
        read_traces(tmp_path, "pickle")
    with pytest.raises(ValueError, match="no such file"):
        read_traces(tmp_path / "absent", "render")
    with pytest.raises(ValueError, match="render_N.html"):
        read_traces(tmp_path, "render")
    (tmp_path / "x.json").write_text('{"data": 3}')
    with pytest.raises(ValueError, match="x.json: found int, expected a list"):
        read_traces(tmp_path / "x.json", "acctree")


# ---- collect.py --import-format ----------------------------------------------------------------------------

def test_collect_reads_traces_through_the_environment(tmp_path):
    """Stops test tasks in training, agents' thoughts as reasons, and an environment that collect.py cannot
    ask."""
    folder = render(render(tmp_path / "gpt", 21, STEPS), 22, STEPS)
    (folder / "merge_log.txt").write_text("(PASS) 21.json (FAIL) 22.json")
    lite = {"task_id": 0, "old_task_id": 22, "sites": ["shopping"], "intent": "x", "intent_template_id": 1,
            "start_url": "__SHOPPING__",
            "eval": {"eval_types": ["url_match"], "reference_url": "__SHOPPING__"}}
    (tmp_path / "lite.json").write_text(json.dumps([lite]))
    env = make_env("webarena", options=[f"drop={tmp_path / 'lite.json'}"])
    logs = offline.read_logs(env, str(folder), "render")
    parts = offline.by_split(env, logs, {split: [] for split in offline.SPLITS})
    (episode,) = parts["train"]
    assert (episode.task.goal, episode.source, episode.success) == ({"task_id": 21}, "imported", True)
    assert not any("think" in step.reasoning for step in episode.steps)
    with pytest.raises(ValueError, match="expected one of render, acctree, browsergym"):
        offline.read_logs(env, str(folder), "pickle")
