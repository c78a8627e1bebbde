"""Offline data of the own sites: traces fit what happened, relabelled steps are as labelled, and nothing held out is used."""
import re
from collections import Counter

import numpy as np
import pytest

from dreamgym.envs.webarena import text as text
from dreamgym.envs.webarena.env import WebArena
from dreamgym.envs.webarena.evaluators import exact_match
from dreamgym.envs.webarena.offline import MIX, SHARES, explain_recorded, miniatures, play, relabelled
from dreamgym.envs.webarena.sites import SiteDatabase
from dreamgym.envs.webarena.tasks import drawn, kinds_of_checks, read_task
from dreamgym.envs.webarena.teacher import check_trace, explain


@pytest.fixture(scope="module")
def env():
    env = WebArena()
    yield env
    env.close()


@pytest.fixture(scope="module")
def episodes(env):
    rng, tasks = np.random.default_rng(0), env.tasks("train")
    return [play(env, tasks[rng.integers(len(tasks))], str(rng.choice(list(MIX), p=list(MIX.values()))), rng, f"train-{i}") for i in range(90)]


@pytest.fixture(scope="module")
def rows(env, episodes):
    return relabelled(env, episodes, 250, np.random.default_rng(1), "relabelled", {task.text for task in env.tasks("test")}, set())


def test_mix_is_of_known_players():
    assert sum(MIX.values()) == pytest.approx(1) and sum(SHARES.values()) == pytest.approx(1)


def test_traces_fit_what_happened(episodes):
    steps = [step for episode in episodes for step in episode.steps]
    for step in steps:
        assert check_trace(step.reasoning, step.state, step.action, step.next_state, step.reward), (step.grounded, step.reasoning)
        assert len(step.reasoning.split()) <= 60
    assert np.mean([len(step.reasoning.split()) for step in steps]) < 20
    assert {text.action_type(step.state, step.action) for step in steps} >= {"link", "button", "search", "fill", "choose", "refused", "stop"}


def test_a_trace_of_another_outcome_is_refused(episodes):
    """check_trace must be able to say no: the trace of a step that led elsewhere, stayed, or earned something else."""
    refused = 0
    for episode in episodes:
        for step in episode.steps:
            if text.judged(step.state, step.action):
                assert not check_trace(step.reasoning, step.state, step.action, step.next_state, 1 - step.reward)
            elif text.unnumbered(step.next_state) != text.unnumbered(step.state):
                assert not check_trace(step.reasoning, step.state, step.action, step.state, 0)
                refused += 1
    assert refused > 100


def test_recorded_steps_are_explained_the_same_way_or_not_at_all(episodes):
    for episode in episodes:
        pages = [step.state for step in episode.steps]
        for i, step in enumerate(episode.steps):
            assert explain_recorded(episode.task.text, pages[:i], step) == step.reasoning
    stop = next(step for episode in episodes for step in episode.steps if step.reward)
    stop = type(stop)(stop.state, stop.action, stop.next_state, 0.0, True, stop.grounded)
    won = next(episode for episode in episodes if episode.success)
    assert explain_recorded(won.task.text, [], stop.__class__(won.steps[-1].state, won.steps[-1].action, text.STOPPED, 0.0, True)) == ""


def test_a_trace_needs_no_task_and_no_page():
    state = "page: Cart\nurl: shopping/cart\n[1] link 'Home'"
    assert explain("Win the lottery.", [], state, "click [9]", f"{state}\nnote: no element 9", 0.0) == "not on this page so the same page"
    assert explain("Win the lottery.", [], state, "stop [done]", text.STOPPED, 1.0) == "check so success"
    assert explain("Win the lottery.", [], "no page", "click [1]", state, 0.0) == ""
    item = "page: Blue Lamp\nurl: shopping/product/blue-lamp\n[1] heading 'Blue Lamp'\n[2] text 'price $25.00'"          # what the page says before what was said
    assert explain("What is the price of Blue Lamp?", [], item, "stop [$5.00]", text.STOPPED, 0.0).endswith("; answer price $25.00 stop [$5.00] $25 $5 no 00 00 yes so not done")


def test_words_are_compared_one_by_one_and_addresses_without_what_is_compared_elsewhere():
    """Stops a verdict that no compared word tells of (names of other lengths), and a trace whose form gives away its outcome: `*` for a parameter only where it is met."""
    post = "page: A rake\nurl: reddit/f/garden/3\n[1] heading 'A rake'\n[2] text '2024-01-01'"
    trace = explain('Comment "So true" on the post A rake.', [], post, "stop [done]", text.STOPPED, 0.0)
    assert trace.endswith("; done MarvelsGrantMan136, score none for So true none So no none true no so not done")
    sold = "page: {0}\nurl: shopping_admin/products/{1}\n[1] heading '{0}'\n[2] text 'sold 4'"
    for name, slug in (("Blue Lamp", "blue-lamp"), ("Red Mat", "red-mat")):
        trace = explain("How many Blue Lamp were sold?", [], sold.format(name, slug), "stop [4]", text.STOPPED, float(name == "Blue Lamp"))
        assert trace.startswith("check page shopping_admin/products/* : shopping_admin/products/* yes ; entity ")


def test_relabelled_rows_are_as_labelled(env, episodes, rows):
    shares = Counter(row.steps[0].info["broken"] for row in rows)
    assert len(rows) > 100 and 0.2 < shares["none"] / len(rows) < 0.6 and set(shares) <= set(SHARES) and len(shares) >= 5
    held_out = {task.text for task in env.tasks("test")}
    played = {(step.state, episode.task.text) for episode in episodes for step in episode.steps if text.judged(step.state, step.action)}
    assert not held_out & {row.task.text for row in rows} and not played & {(row.steps[0].state, row.task.text) for row in rows}
    assert len({(row.steps[0].state, row.task.text) for row in rows}) == len(rows)
    for row in rows:
        (step,) = row.steps
        missed = [kind for kind, _, (_, _, met) in kinds_of_checks(read_task(row.task.text), step.state, step.action) if not met]
        assert bool(missed) == (step.info["broken"] != "none") and row.success == (not missed) and step.next_state == text.STOPPED
        assert check_trace(step.reasoning, step.state, step.action, step.next_state, step.reward)
        assert step.info["broken"] not in ("answer", "page", "done") or set(missed) == {step.info["broken"]}


def test_miniatures_are_judged_like_real_pages():
    """Stops made-up pages whose trace or reward the rules would not give, that ask for kinds of tasks held out, that all fail or all succeed, or whose names repeat."""
    rows = miniatures(7, 400, np.random.default_rng(0))
    assert [row.task.text for row in rows] == [row.task.text for row in miniatures(7, 400, np.random.default_rng(0))]
    for row in rows:
        (step,) = row.steps
        assert text.read_page(step.state) and check_trace(step.reasoning, step.state, step.action, step.next_state, step.reward) and step.grounded == step.action
        if text.readable(row.task.text):
            assert not read_task(row.task.text).template.held_out and text.rule_success(row.task.text, step.state, step.action) == row.success
    compared = Counter(re.findall(r"\b(yes|no)\b", " ".join(row.steps[0].reasoning for row in rows)))
    assert 0.25 < sum(row.success for row in rows) / len(rows) < 0.6 and compared["no"] > 0.15 * compared["yes"] and len({row.task.text for row in rows}) > 350


def test_fulfilled_answers_are_true_in_the_database(rows):
    """A relabelled success must be one by the evaluators too: its answer is what the database says (of what no task can change)."""
    world, compared = SiteDatabase(), 0
    for row in rows:
        wanted = read_task(row.task.text)
        if row.success and wanted.template.id in (101, 103, 206, 301, 402, 408, 501, 502, 503, 504, 505):
            true = next(values for values in drawn(wanted.template, world) if all(values[name] == value for name, value in wanted.values))
            assert exact_match(true["answer"], row.steps[0].action[len("stop ["):-1]), row.task.text
            compared += 1
    assert compared >= 10


def test_states_are_not_relabelled_twice(env, episodes):
    seen: set[str] = set()
    first = relabelled(env, episodes, 40, np.random.default_rng(2), "a", set(), seen)
    assert first and {row.steps[0].state for row in first} <= seen
    assert relabelled(env, episodes, 40, np.random.default_rng(2), "b", set(), seen) == []
