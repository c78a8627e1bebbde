"""The rules that read WebArena's states, held against real episodes of every player on the own sites."""

import numpy as np
import pytest

from dreamgym.envs import make_offline
from dreamgym.envs.webarena import text as text
from dreamgym.envs.webarena.env import WebArena
from dreamgym.envs.webarena.names import KINDS
from dreamgym.prompts import Demo, experience_answer, known_pages, parse_action, parse_experience
from dreamgym.report import step_queries

PAGE = "page: Cart\nurl: shopping/cart\n[1] link 'Home'\n[2] textbox 'Quantity' value '1'\n[3] combobox 'Sort' value 'Name' options 'Name' | 'Stars'\n[4] text 'Cart is empty.'"


@pytest.fixture(scope="module")
def episodes():
    env, offline = WebArena(), make_offline("webarena")
    rng, tasks = np.random.default_rng(0), env.tasks("train")
    return [offline.play(env, tasks[rng.integers(len(tasks))], kind, rng, f"{kind}-{i}") for i in range(12) for kind in offline.MIX]


def test_numbers_and_notes_come_back(episodes):
    """Stops a dreamt page from being numbered otherwise than a real one, also in later windows of a long page, and a lost note."""
    states = [s.next_state for e in episodes for s in e.steps] + [PAGE, "page: Long\nurl: shopping\n[31] link 'a'\n[32] link 'b'\nwindow 2 of 2", text.STOPPED]
    assert all(text.numbered(text.unnumbered(state, True)) == state for state in states)
    assert text.unnumbered(PAGE + "\nnote: no element [9]") == text.unnumbered(PAGE) and "[1]" not in text.unnumbered(PAGE)


def test_what_the_experience_model_is_to_write_is_what_followed(episodes):
    """Stops an answer, with its marks and names of pages, from standing for another page than the real one; and real steps from counting as impossible."""
    named = 0
    for query, (_, step) in zip(*step_queries(episodes)):
        history = [(text.unnumbered(s), a) for s, a in text.recall(query.history, query.state, query.grounded, 1)]
        state, following = text.unnumbered(query.state), text.unnumbered(step.next_state, True)
        for demos in ([], [Demo(query.grounded, following)], [Demo(query.grounded, state)]):
            pages = known_pages(state, history, demos)
            answer = experience_answer(step.reasoning, state, following, step.reward, step.done, True, pages, True)
            read = parse_experience(answer, state, pages, True)
            assert (text.numbered(read.next_state), read.reward, read.done) == (step.next_state, step.reward, step.done)
            named += answer.count("\n") < following.count("\n")
        assert text.possible(step.state, step.grounded, step.next_state, step.reward)
        assert text.valid(step.state, step.grounded, step.next_state) == step.valid
    assert named > 100


def test_refusals_are_foreseen(episodes):
    """Stops rules that call an action refused which does something; what only the browser knows (a form that it does not send) may be refused besides."""
    steps = [s for e in episodes for s in e.steps]
    refused = [s for s in steps if text.action_type(s.state, s.action) == "refused"]
    assert len(refused) > 20 and all(text.unnumbered(s.state) == text.unnumbered(s.next_state) for s in refused)
    accepted = [s for s in steps if text.action_type(s.state, s.action) != "refused"]
    assert sum(not s.valid for s in accepted) <= 0.05 * len(accepted)


@pytest.mark.parametrize(("action", "kind"), [
    ("click [1]", "link"), ("click link 'Home'", "link"), ("click [4]", "refused"), ("click [9]", "refused"), ("click link 'Away'", "refused"),
    ("type [2] [3] [0]", "fill"), ("type [2] [3] [1]", "search"), ("type [3] [Stars] [0]", "choose"),
    ("type combobox 'Sort' [Price] [1]", "refused"), ("type [1] [x] [1]", "refused"),
    ("scroll [down]", "refused"), ("close_tab", "refused"), ("new_tab", "tab"), ("go_back", "back"), ("stop [done]", "stop"), ("buy it", "refused")])
def test_action_types(action, kind):
    """Stops the raw and the grounded form of an action from being read differently."""
    assert text.action_type(PAGE, action) == kind == text.action_type(PAGE, text.ground(PAGE, action))


@pytest.mark.parametrize("action, written", [
    ("click [1]", "link 'Home'\nclick [1]"), ("type [2] [3] [0]", "textbox 'Quantity'\ntype [2] [3] [0]"), ("click [9]", "click [9]"), ("go_back", "go_back"),
    ("stop [empty]", "text 'Cart is empty.'\nstop [empty]"), ("stop [art]", "stop [art]"), ("stop [done]", "stop [done]"), ("stop []", "stop []"), ("nonsense", "nonsense"),
])
def test_what_a_policy_writes(action, written):
    """Stops a thought that names another line than the action's, or that the action cannot be read from."""
    assert text.said(PAGE, action) == written and parse_action(written) == action


def test_stop_alone_is_judged_and_paid():
    """Stops a reward for anything but `stop`, an end that goes on, and a stop that does not end."""
    assert text.judged(PAGE, "stop [x]") and not text.judged(PAGE, "click [1]")
    assert text.possible(PAGE, "stop [x]", text.STOPPED, 1.0) and not text.possible(PAGE, "stop [x]", PAGE, 0.0)
    assert not text.possible(PAGE, "click [1]", text.STOPPED, 0.0) and not text.possible(PAGE, "click [1]", PAGE, 1.0) and not text.possible(PAGE, "click [1]", "no page", 0.0)
    assert text.rule_success("Subscribe to the forum music.", PAGE, "click [1]") is None


def test_recall_shows_what_decides():
    """Stops go_back without the page before, and a page that was seen from being invented anew."""
    other = PAGE.replace("Cart", "Home").replace("shopping/cart", "shopping")
    history = [(other, "click link 'Cart'"), (PAGE, "click link 'Home'"), (other, "click link 'Cart'")]
    assert text.recall(history, PAGE, "go_back", 1) == history[-1:]
    assert text.recall(history, PAGE, "click link 'Home'", 1) == [history[2]]
    assert text.recall(history, PAGE, "type textbox 'Quantity' [2] [0]", 1) == []


def test_contradictions():
    """Stops a page that changed by itself from passing, and one that a form changed from counting."""
    changed, home = PAGE.replace("empty", "full"), PAGE.replace("shopping/cart", "shopping")
    assert text.contradictions([(home, "click [1]", PAGE), (PAGE, "click [1]", home), (home, "click [1]", changed)])[1] == 0      # it tells of something done
    one, two, home = (page.replace("Cart is empty.", words) for page, words in ((PAGE, "total $1"), (PAGE, "total $2"), (home, "Hello")))
    assert text.contradictions([(home, "click [1]", one), (one, "click [1]", home), (home, "click [1]", two)]) == (1, 1)
    assert text.contradictions([(home, "click [1]", one), (one, "type [2] [3] [1]", two)]) == (0, 0)


def test_tasks_are_read():
    """Stops generated tasks about things that no page shows, or that cannot be done from where they start."""
    task = "Subscribe to the forum music."
    assert text.readable(task) and not text.readable("Buy me a pony") and text.difficulty(task) >= 2
    assert "music" in text.needs(task) and "Home" in text.offers(PAGE)
    assert text.starts(task, "page: Forums\nurl: reddit") and not text.starts(task, PAGE)


def test_other_names_change_nothing_else(episodes):
    """Stops renamed rows whose task, page, address and action name different things, whose line numbers changed, or that another reward fits."""
    rng, changed, judged = np.random.default_rng(0), 0, {True: 0, False: 0}
    for episode in episodes * 3:
        if (change := text.renaming(rng, "", True)) is None:
            continue
        for step in episode.steps:
            state, action = change(step.state), change(step.action)
            before, after = text.read_page(step.state), text.read_page(state)
            changed += state != step.state
            assert list(after.lines) == list(before.lines) and [n.role for n in after.lines.values()] == [n.role for n in before.lines.values()]
            assert len({n.name for n in after.lines.values()}) == len({n.name for n in before.lines.values()})
            assert text.ground(state, action) == change(step.grounded) and text.action_type(state, action) == text.action_type(step.state, step.action)
            if text.judged(step.state, step.action) and text.readable(change(episode.task.text)):
                judged[step.reward == 1] += 1
                assert text.rule_success(change(episode.task.text), state, action) == text.rule_success(episode.task.text, step.state, step.action)
    assert changed > 30 and min(judged.values()) >= 3


def test_words_of_names_are_of_one_kind():
    """Stops a word that becomes two others: a bijection needs every word in one kind."""
    words = [word for kind in KINDS for word in kind]
    assert len(words) == len(set(words)) > 300 and not {"map", "star", "radio"} & set(words)
