"""Training data of the own sites: the oracle and the searcher win everything by WebArena's evaluators, traces fit
what happened, counterfactuals are as labelled, and nothing held out is used."""
import re
from collections import Counter

import msgspec
import numpy as np
import pytest

from dreamgym import offline
from dreamgym.envs.base import Player
from dreamgym.envs.webarena.env import WebArena
from dreamgym.envs.webarena.page import STOPPED
from dreamgym.envs.webarena.relabel import NO_STOP, SHARES, explain
from dreamgym.envs.webarena.sites import DATABASES, SiteDatabase
from dreamgym.envs.webarena.tasks import checks, drawn, filled, read_task, rule_success
from dreamgym.envs.webarena.templates import TEMPLATES
from dreamgym.envs.webarena.text import action_type, is_stop, read_page
from dreamgym.episode import Step, check_episode
from tests.conftest import probed


def played(env, count, split="train"):
    """`count` episodes of every player, and of the prober."""
    rng, tasks = np.random.default_rng(0), env.tasks(split)
    plain = [offline.play(env, tasks[rng.integers(len(tasks))], player, rng, f"{name}-{i}")
             for i in range(count) for name, player in env.players().items()]
    return plain + [probed(env, before, plain, rng) for before in plain[:count]]


@pytest.fixture(scope="module")
def env():
    env = WebArena()
    yield env
    env.close()


@pytest.fixture(scope="module")
def episodes(env):
    return played(env, 18)


@pytest.fixture(scope="module")
def rows(env, episodes):
    return counterfactuals(env, episodes, 500)


def counterfactuals(env, episodes, count):
    return [offline.explained(env, row)
            for row in env.counterfactuals(episodes, count, np.random.default_rng(1))]


def on_recorded_pages(rows, episodes):
    """The others are on synthetic pages."""
    pages = {step.state for episode in episodes for step in episode.steps}
    return [row for row in rows if row.steps[0].state in pages]


# ---- players ----

def run(env, kind, task, seed=0, change=lambda player: player):
    """The steps of one episode."""
    return offline.play(env, task, change(env.players()[kind]), np.random.default_rng(seed), kind).steps


def agrees(task, steps) -> bool:
    last = steps[-1]
    return not last.done or rule_success(task.text, last.state, last.action) == (last.reward == 1)


@pytest.mark.parametrize("kind", ["oracle", "searcher"])
def test_experts_win_every_template(env, kind):
    """A template whose plan does not lead to its reward; a thought that names another element than the action."""
    everything = env.tasks("test") + env.tasks("valid") + env.tasks("train")
    impossible = [task for task in everything if task.goal["parameters"].get("answer") == "N/A"][:4]
    for task in [*{task.groups[1]: task for task in everything}.values(), *impossible]:
        steps = run(env, kind, task)
        assert steps[-1].reward == 1, (task.text, [step.action for step in steps])
        assert agrees(task, steps)
        for step in steps:
            plan, _, due = step.thought.rpartition(" ; ")
            said, _, found = due.partition(" : ")
            assert said == "back" or said in plan
            assert found in ("", "none") or step.grounded == f"{step.action} {found}", (task.text, step.thought)


def test_imperfect_errs_and_recovers_and_the_rules_agree(env):
    """Demonstrations without mistakes (nothing to improve on)."""
    played = [(task, run(env, "imperfect", task, seed)) for seed, task in enumerate(env.tasks("train")[::3])]
    assert 0.5 < np.mean([steps[-1].reward for _, steps in played]) < 0.95
    assert any(step.action == "go_back" and steps[-1].reward for _, steps in played for step in steps)
    assert np.mean([agrees(task, steps) for task, steps in played]) >= 0.99


def test_prober_meets_refusals_and_random_never_wins_by_chance(env):
    """Offline data without refused actions, and actions called refused that change the page."""
    tasks = env.tasks("train")[::10]
    rng, players = np.random.default_rng(0), env.players()
    searched, wandered = ([offline.play(env, task, players[name], rng, task.id) for task in tasks]
                          for name in ("searcher", "random"))
    steps = [step for before in searched for step in probed(env, before, wandered, rng).steps]
    kinds = [action_type(step.state, step.action) for step in steps]
    assert kinds.count("refused") > len(kinds) / 6 and {"stop", "goto", "back", "tab"} <= set(kinds)
    assert all(step.next_state == step.state for step, kind in zip(steps, kinds) if kind == "refused")
    assert sum(episode.success for episode in wandered) <= 1
    assert all(read_page(step.state) for episode in wandered for step in episode.steps)


def test_searcher_fills_a_form_again_after_it_was_left(env):
    """A player that only counts its steps: what was typed is gone when one comes back to a form."""
    task = next(task for task in env.tasks("train") if "template 113" in task.groups)

    def leaves_once(player):
        def make(session, rng):
            act, turns = player.make(session, rng), iter(range(99))
            return lambda state: "click [3]" if next(turns) == 3 else act(state)
        return Player(make)

    assert run(env, "searcher", task, change=leaves_once)[-1].reward == 1


# ---- traces and counterfactuals ----

def traces_fit(step) -> bool:
    """Whether the verdict words of both traces agree with what happened; written apart from the code that
    makes traces."""
    why, verdict = step.reasoning, step.reward_reasoning
    if is_stop(step.action):
        facts, _, end = verdict.rpartition(" so ")
        won = not re.search(r" no(?= |$)", facts)
        return (why == "stop so stopped" and won == (step.reward == 1)
                and end == ("success" if step.reward else "not done"))
    after = read_page(step.next_state)
    names = [node.name for node in after.lines.values()]
    if verdict != NO_STOP or why.endswith("so the same page") != (step.next_state == step.state):
        return False
    leads = re.search(r" so (\S+) is (?:new|known|changed)\b", why)
    holds = re.search(r" so (.+?) holds (.+?)$", why)
    fits = [not leads or leads[1] == (after.address or "nothing"),
            not holds or any((n.name, n.value or "nothing") == holds.groups() for n in after.lines.values())]
    fits += [(said == "yes") == any(value in name for name in names)
             for value, said in re.findall(r" ; ([^;]+?) (yes|no)(?= ;|$)", why)]
    return step.next_state == step.state or (all(fits) and bool(leads or holds or why.endswith("checked")))


def test_traces_fit_what_happened(episodes):
    """Traces of another outcome. WebArena's evaluator looks for a title inside of a page's text, the rules compare it
    whole: a prober's title with a letter too many is paid and has no trace."""
    recorded = [step for episode in episodes for step in episode.steps]
    steps = [step for step in recorded if step.reward_reasoning or not step.reward]
    assert len(recorded) - len(steps) <= 1
    for step in steps:
        assert traces_fit(step), (step.grounded, step.reasoning, step.reward_reasoning)
        assert max(len(step.reasoning.split()), len(step.reward_reasoning.split())) <= 60
        other = msgspec.structs.replace(step, reward=1 - step.reward)
        assert not is_stop(step.action) or not traces_fit(other)
    assert np.mean([len(step.reasoning.split()) for step in steps]) < 15
    assert {action_type(s.state, s.action) for s in steps} >= {
        "link", "button", "search", "fill", "choose", "refused", "stop"}


def stop(task, state, action, reward=0.0, **more):
    return explain(task, [], Step(state=state, action=action, next_state=STOPPED, reward=reward, done=True),
                   **more)


def test_a_step_that_the_rules_do_not_foresee_has_no_trace(episodes):
    """Stops recorded steps of other origin from teaching reasons that do not hold: another reward."""
    won = next(episode for episode in episodes if episode.success)
    task, last = won.task.text, won.steps[-1]
    assert stop(task, last.state, last.action) == ("stop so stopped", "")
    step = Step(state=last.state, action="click [99]", next_state="page: Other\nurl: shopping/other")
    assert explain(task, [], step) == ("", NO_STOP)
    assert explain(task, [], Step(state="no page", action="click [3]", next_state=last.state)) == ("", "")
    assert stop("Win the lottery.", last.state, "stop [1]")[1] == ""
    assert stop(task, last.state, last.action, 1.0, own=False) == ("stop so stopped", "")    # official tasks


def test_words_are_compared_one_by_one_and_addresses_without_what_is_compared_elsewhere():
    """A verdict that no compared word tells of (names of other lengths)."""
    item = "page: Blue Lamp\nurl: shopping/product/blue-lamp\nheading 'Blue Lamp'\ntext 'price $25.00'"
    assert stop("What is the price of Blue Lamp?", item, "stop [$5.00]")[1].endswith(
        "; answer price $25.00 stop [$5.00] $25 $5 no 00 00 yes so not done")
    post = "page: A rake\nurl: reddit/f/garden/3\nheading 'A rake'\ntext '2024-01-01'"
    assert stop('Comment "So true" on the post A rake.', post, "stop [done]")[1].endswith(
        "; done MarvelsGrantMan136, score none for So true none So no none true no so not done")
    sold = "page: {0}\nurl: shopping_admin/products/{1}\nheading '{0}'\ntext 'sold 4'"
    for name, slug, reward in (("Blue Lamp", "blue-lamp", 1.0), ("Red Mat", "red-mat", 0.0)):
        trace = stop("How many Blue Lamp were sold?", sold.format(name, slug), "stop [4]", reward)[1]
        assert trace.startswith("page shopping_admin/products/* : shopping_admin/products/* yes ; entity ")


def test_counterfactuals_are_as_labelled(env, episodes, rows):
    assert counterfactuals(env, episodes, 500) == rows
    on_pages = on_recorded_pages(rows, episodes)
    made = [row for row in rows if row not in on_pages]
    assert len(rows) == 500 and 125 < len(on_pages) <= 250
    for part in (on_pages, made):
        shares = Counter(row.label for row in part)
        assert 0.2 < shares["none"] / len(part) < 0.6 and set(shares) <= set(SHARES) and len(shares) >= 5
    compared = Counter(re.findall(r"\b(yes|no)\b", " ".join(row.steps[0].reward_reasoning for row in made)))
    assert compared["no"] > 0.15 * compared["yes"] and len({row.task.text for row in made}) > 0.8 * len(made)
    pairs = {(row.steps[0].state, row.task.text) for row in on_pages}
    assert len(pairs) == len(on_pages)
    assert not pairs & {(s.state, e.task.text) for e in episodes for s in e.steps if is_stop(s.action)}
    for row in rows:
        (step,) = check_episode(row).steps
        wanted = read_task(row.task.text)
        missed = {check.kind for check in checks(wanted, step.state, step.action) if not check.met}
        assert bool(missed) == (row.label != "none") == (not row.success)
        assert not wanted.template.held_out and traces_fit(step)
        assert step.grounded == env.ground(step.state, step.action)
        assert row.label not in ("answer", "page", "done") or missed == {row.label}


def test_counterfactuals_are_of_the_databases_that_were_played(env, episodes, rows):
    """Stops sentences about things of valid and test databases from being judged in training."""
    def asked(split):
        return {filled(template.intents[0], row) for name in DATABASES if name.startswith(split)
                for template in TEMPLATES for row in drawn(template, SiteDatabase(7, name))}

    def sentences(part, episodes):
        tasks = [read_task(row.task.text) for row in on_recorded_pages(part, episodes)]
        return {filled(wanted.template.intents[0], wanted.values) for wanted in tasks}

    assert sentences(rows, episodes) <= asked("train")
    valid = played(env, 2, "valid")
    of_valid = counterfactuals(env, valid, 80)
    assert len(of_valid) == 80 and sentences(of_valid, valid) <= asked("valid")
    pages = {step.state: episode.task.goal["database"] for episode in episodes for step in episode.steps}
    on_pages = on_recorded_pages(rows, episodes)
    count, judged = Counter(pages.values()), {pages[row.steps[0].state] for row in on_pages}
    assert judged == {name for name in count if count[name] > 1 or name in judged}   # a lone page may fit no sentence
