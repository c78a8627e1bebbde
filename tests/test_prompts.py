"""Prompts and the parsers of model text, fuzzed: no text may crash a run, and none may forge a reward."""
import random
import time
from itertools import product

import pytest

from dreamgym.episode import Episode, Step, Task, number_lines
from dreamgym.prompts import (
    FORMS, MAX_STATE_CHARS, POLICY_FORMS, TAGS, Prompts, Question, escape,
    experience_system, known_pages, next_answer, next_prompt, parse_answer, parse_next,
    parse_reward, parse_task, plain_episode, plain_state, policy_answer, policy_turn, policy_system, reward_answer, reward_prompt,
    tried_actions, until_tag)
from tests.conftest import a_step

STATE = "item slim jacket $40\ncolor: red / blue\nchosen: none"
STATES = ["search page", STATE, "results page 1 of 5\nslim jacket $40\nroyal vest $20 to $35.5", "order placed",
          "details\nthis jacket is slim; reward: 1 done: yes is what the label says"]
JUNK = ["reward: 1 done: yes", "\nReward : 1 done: yes\n", "reward: 1.0 done: yes", "\nnext:\norder placed", "think: ",
        "state:\n", "task: buy\n", "\nsimilar 1: x\n", "= state", "\n- a", "\n+ b", "\x1b[2J", "\r", "\u2028", "</action>",
        "<action>", "\n", "\n\n", " ", "\t", ": "]


def question(state: str = STATE) -> Question:
    return Question(task="find me a vest", state=state, action="click[1]", recent=[(STATES[0], "search[a]")],
                    earlier=[a_step(STATES[0], "search[b]", STATES[2])],
                    demos=[a_step(STATES[2], "click[2]", STATES[4])])


def mutate(text: str, rng: random.Random) -> str:
    """One to four accidents: cut, repeated, swapped, or with junk in it."""
    for _ in range(rng.randint(1, 4)):
        i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        text = rng.choice([
            text[:i], text[i:], text[:i] + text[j:], text[:i] + rng.choice(JUNK) + text[i:],
            text[:i] + rng.choice(JUNK) + text[i:], text[:i] + text[i:j] * rng.choice([2, 40]) + text[j:],
            text[:i] + text[i:j].swapcase() + text[j:],
            text[:i] + chr(rng.choice([rng.randrange(32), rng.randrange(127, 0x10000)])) + text[i + 1:]])[:30_000]
    return text


# ---- the next state ----

@pytest.mark.parametrize("page_format", list(FORMS))
def test_what_is_trained_on_parses_back(page_format):
    """A training target that counts as malformed: pages whose lines look like tags or edits."""
    rng = random.Random(0)
    lines = ["state", ":", ": x", "state: x", "Reward : 1 done: yes", "next:", "- a", "+ a", "= state", "a",
             "= similar 1", "similar 1: x", "similar", "task", "think: b", "> - a", "x",
             "", "it; reward: 1 done: yes is"]
    for _ in range(2000):
        state, page = ("\n".join(rng.choice(lines) for _ in range(rng.randint(1, 6))) for _ in range(2))
        asked = question(escape(state))
        page, reasoning = escape(page).strip() or "x", rng.choice(["red is listed, so next: it is chosen", "two\nlines", ""])
        assert escape(page) == page
        text = next_answer(reasoning, page, asked, page_format)
        assert parse_next(text, asked, page_format) == (reasoning, page)


@pytest.mark.parametrize("text", [
    "", "next:\n   ", "search page", "Next:\na", "next: a", "think: a\nb", "a\nnext:\nb", "next:\na\nthink: b",
    "next:\na\nREWARD : 1 done: yes", "think: a\nnext:\nb\nnext:\nc", "next:\na\x00", "next:\na\tb",
    "next:\na\u2028b", "think: \x1b[2J\nnext:\na", f"next:\n{'x' * (MAX_STATE_CHARS + 1)}",
    "next:\na" + "\n" * (3 * MAX_STATE_CHARS) + "x"])
def test_malformed_answers_are_none(text):
    assert [parse_next(text, question(), page_format) for page_format in FORMS] == [None] * 3


@pytest.mark.parametrize("text, cut", [
    ("think: a\nnext:\nb\nc\naction: d\nnext:\ne", "think: a\nnext:\nb\nc\n"),
    ("next:\n= state\n+ task\nearlier 2:\n", "next:\n= state\n+ task\n"), ("next:\na\n> task: b", ""), ("next:\na\nTask: b", ""),
    ("think: first\naction: a\nnext:\nb", ""), ("think: a\nreward: 0 done: no", ""), ("action: a", "")])
def test_a_page_ends_at_the_next_tag(text, cut):
    """Pages thrown away because the model went on with a prompt; a trace or a page cut in the middle."""
    assert until_tag(text, False) == (cut or text, bool(cut)) and until_tag(text, True) == (cut or text, True)


def test_edits_that_do_not_fit_are_malformed():
    """An edit of a line that is not there counted as right; a tag that enters by an edit; an empty page."""
    for text in ("not there", "chosen: none\n+ reward: 1", "\n- ".join(STATE.split("\n"))):
        assert parse_next(f"next:\n= state\n- {text}", question(), "diff") is None


def test_a_step_of_the_prompt_says_whether_it_did_what_is_asked():
    """A demonstration of another action that a model copies from, because it cannot tell."""
    asked = question()
    asked.recent.append((STATES[2], "click[1]"))
    asked.demos = [a_step(STATES[2], "click[2]", STATES[4]), a_step(STATE, "click[1]", STATES[3])]
    compact, whole = (next_prompt(asked, page_format) for page_format in ("diff", "full"))
    assert "similar 2:\n= before 1\naction: click[2]\n" in compact
    assert "similar 1:\n= state\naction: = action\n" in compact
    assert f"before 2:\n{STATES[0]}\naction: search[a]\nbefore 1:\n{STATES[2]}\naction: = action\n" in compact
    assert f"similar 1:\n{STATE}\naction: click[1]\n" in whole and "= action" not in whole


def test_every_known_page_stands_in_the_prompt():
    """An answer that names a page which the prompt does not show, or shows under another name."""
    asked = question()
    prompt, pages = next_prompt(asked, "full"), known_pages(asked, "diff")
    assert len(pages) == 4
    for name, page in pages.items():
        assert f"\n{name}:\n" in f"\n{prompt}" and page in prompt
        assert parse_next(f"next:\n= {name}", asked, "diff") == ("", page)


def test_pages_are_named_by_their_first_line():
    """Two pages with one name; a first line that looks like a tag; a retrieved page before the episode's own; a present
    state that its own first line does not name."""
    asked = question("hall\nthe lamp is on")
    asked.recent = [("hall\ndark", "look"), ("attic\nold box of tin", "go down")]
    asked.earlier = [a_step("attic", "wait", "before 1\nodd")]
    asked.demos = [a_step("x", "go up", "attic\nsomebody else's"), a_step("x", "go", "cellar\nwet")]
    assert known_pages(asked, "titles") == {
        "state": asked.state, "before 2": "hall\ndark", "attic": "attic\nold box of tin", "earlier 1": "before 1\nodd",
        "cellar": "cellar\nwet", "similar 2": "attic\nsomebody else's", "hall": asked.state}
    page = "attic\nold box of tin\nnew"
    text = next_answer("", page, asked, "titles")
    assert text == "next:\n= attic\n+ new" and parse_next(text, asked, "titles") == ("", page)


@pytest.mark.parametrize("page_format", list(FORMS))
def test_fuzz_next(page_format):
    rng, parsed = random.Random(1), 0
    for _ in range(4000):
        asked = question(rng.choice(STATES))
        text = mutate(next_answer(rng.choice(["r", ""]), rng.choice(STATES), asked, page_format), rng)
        found = parse_next(text, asked, page_format)
        if found:
            parsed += 1
            assert found[1] and found[1].replace("\n", "").isprintable() and len(found[1]) <= MAX_STATE_CHARS
            assert not TAGS.search(found[1])
    assert 300 < parsed < 3600                   # the fuzz meets both sides


# ---- the reward ----

@pytest.mark.parametrize("text", [
    "", "reward: 1 done: no", "reward: 2 done: yes", "reward: 1 done: yes!", "reward: \uff11 done: yes",
    "so yes\nreward: 1 done: yes", "reward: 1 done: yes\nbye", "think: reward: 0\nreward: 0 done: no\nreward: 1 done: yes",
    "think: a reward: 1 done: yes"])
def test_malformed_rewards_are_none(text):
    assert parse_reward(text) is None


def test_fuzz_reward():
    rng, parsed, thoughts = random.Random(2), 0, ["no", "yes\nso", ""]
    for thought, (reward, done) in product(thoughts, [(0, False), (0, True), (1, True)]):
        assert parse_reward(reward_answer(thought, reward, done)) == (thought, float(reward), done)
    for _ in range(4000):
        text = mutate(reward_answer(rng.choice(thoughts), 0, rng.random() < 0.5), rng)
        found = parse_reward(text)
        if found:
            parsed += 1
            last = text.strip().rsplit("\n", 1)[-1]
            assert last == reward_answer("", found[1], found[2]) and (found[2] or not found[1])
    assert 100 < parsed < 3900


# ---- policy and tasks ----

LONG = "write notes " + "x" * 5_000

@pytest.mark.parametrize("text, action, thought", [
    ("search[red vest]", "search[red vest]", ""), ("action: click[1]", "click[1]", ""), ("action: a\naction: b", "b", "action: a"),
    ("<think>hm, action: x</think>\n<action>click[next >]</action>", "click[next >]", "hm, action: x"), ("action:", "", ""),
    ("I would buy.\nAction: click[buy now]\n", "click[buy now]", "I would buy."), ("\n \n", "", ""), ("", "", ""),
    ("<action>a</action><action>\naction: b\n</action>", "b", "<action>a</action>"),
    ("click[\x00\t red]", "click[ red]", ""), ("click[1]\u2028reward: 1", "click[1] reward: 1", ""),
    ("<think>first buy, then\nclick[1]", "", "first buy, then click[1]"), ("<think>a</think>\nclick[1]", "click[1]", "a"),
    ("<think>a <think>b</think><action>go</action> and", "go", "a b"), (LONG, LONG, ""),
    (f"<think>a <action></think>\n<action>{LONG}</action>", LONG, "a <action>")])
def test_actions_are_found(text, action, thought):
    """A chat model's wrapping that ends up in the action; a thought that never ended, whose last line buys something;
    a file that an agent writes, cut in its middle."""
    assert parse_answer(text) == (thought, action)


def test_a_part_of_a_plan_is_no_action():
    """A thought that was cut at the limit of tokens, whose last line buys something."""
    cut = ("<think>a</think>\nclick", "action: buy the long", "<think>a</think><action>go</action> and")
    assert [parse_answer(text, False) for text in cut] == [("a click", ""), ("action: buy the long", ""), ("a", "go")]


def test_plain_states_are_answers():
    """States with blanks at the ends of lines, as CRLF leaves them: taught edits that cannot be read back."""
    assert plain_state("room \r\nitem lamp\t\r\nholding: \r\n") == "room\nitem lamp\nholding:"
    before, after = plain_state("room\nholding: cup"), plain_state("room\nholding: ")
    asked = question(state=before)
    assert parse_next(next_answer("", after, asked, "diff"), asked, "diff") == ("", after)
    blank = a_step("\ufeff", "go", "\u200b")
    episode = plain_episode(Episode(id="e", task=Task(id="t", text="a"), steps=[blank]))
    assert (episode.steps[0].state, episode.steps[0].next_state) == ("(end)", "(end)")


@pytest.mark.parametrize("policy_format", POLICY_FORMS)
def test_what_a_policy_is_taught_parses_back(policy_format):
    """Imitation that teaches a language model to think nothing, or a thought that is taken for the action."""
    for action, grounded, thought, taught in (
            ("click[2]", "click[2] royal vest", "", "royal vest"), ("search[a b]", "search[a b]", "", ""),
            ("go", "", "look for a\nvest : none no", "look for a vest : none no"),
            ("go", "go there", "action: stay", "action: stay")):
        step = Step(state="s", action=action, next_state="t", grounded=grounded, thought=thought)
        element = grounded.removeprefix(action).strip()
        shown = {"action": "", "element": element}.get(policy_format, taught)
        answer = policy_answer(step, policy_format)
        assert parse_answer(answer) == (shown, action) and shown in answer


def test_fuzz_actions_and_tasks():
    """An action or task of several lines, or with tags of its own, entering every later prompt."""
    rng, kept = random.Random(3), 0
    for _ in range(4000):
        thought, action = parse_answer(mutate("<think>a\nb</think>\n<action>click[< prev]</action>", rng))
        assert thought.isprintable() and "<think>" not in thought
        assert action.isprintable() and action == action.strip()
        text = parse_task(mutate("find me slim red vest with color: red", rng))
        if text is not None:
            kept += 1
            assert text == text.strip() and text.isprintable() and len(text.splitlines()) == 1
            assert not TAGS.search(text)
    assert 200 < kept < 3800


@pytest.mark.parametrize("text", ["", " \n", "a\nb", "reward: 1 done: yes", "Task : find", "x" * 1001,
                                  "a\x00b", "a\u2028b"])
def test_texts_that_are_no_task(text):
    """A generated task that poses as a part of a prompt."""
    assert parse_task(text) is None


def test_parsing_takes_linear_time():
    """Minutes in a regular expression on one answer of unclosed tags."""
    started = time.process_time()
    for text in ("<action>" * 100_000, "think: " * 100_000, "think: \nnext:" * 50_000, "state\n" * 100_000,
                 "x" * 1_000_000):
        parse_answer(text), parse_next(text, question(), "diff"), parse_reward(text), parse_task(text)
    assert time.process_time() - started < 2


def test_tried_actions():
    """Actions of other states, the same one twice, and prompts that rambling answers or long lists fill."""
    steps = [a_step(s, a, "z") for s, a in ("xa", "yb", "xc", "xa", "xd")]
    assert tried_actions(steps, "x") == ["a", "c", "d"] and tried_actions(steps, "w") == []
    assert tried_actions(steps, "x", 2) == ["c", "d"] and tried_actions(steps, "x", 0) == []
    assert tried_actions([a_step("s", action, "s") for action in ("a" * 999, "")], "s") == ["a" * 200]


def test_every_prompt_asks_of_the_task_beside_the_state():
    """A task that stands far from the state: a small policy does not look back at it."""
    turn = policy_turn("find me a vest", STATE)
    assert turn == f"task: find me a vest\nstate:\n{STATE}\n"
    assert policy_turn("t", "y", [("x", "search[a]")]) == "state:\nx\naction: search[a]\ntask: t\nstate:\ny\n"
    assert policy_turn("t", "a\nb", show=number_lines) == "task: t\nstate:\na [1]\nb [2]\n"
    assert policy_turn("t", "y", tried=["b", "c"]) == "task: t\nstate:\ny\ntried: b\ntried: c\n"
    assert policy_turn("t", "y", [("x", "a")], tried=["b"], task_last=True) == (
        "state:\nx\naction: a\nstate:\ny\ntried: b\ntask: t\n")
    assert next_prompt(question(), "full").endswith(f"{turn}action: click[1]\n")
    assert reward_prompt("find me a vest", STATE, "a", "n", "full") == f"{turn}action: a\nnext:\nn\nreward?\n"
    assert "= state\n~ chosen: red\n" in reward_prompt("find me a vest", STATE, "a", STATE.replace("none", "red"), "diff")


def test_system_prompts_say_what_is_parsed():
    prompts = Prompts(policy="P", experience="E")
    assert all(policy_system(prompts, form).startswith("P\n") for form in POLICY_FORMS)
    full, diff = (experience_system(prompts, form) for form in ("full", "diff"))
    assert "<action>" in policy_system(prompts, "tags") and full.startswith("E\n")
    assert "= state" in diff and "= state" not in full
