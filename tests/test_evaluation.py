"""Reports: intervals, the experience model's errors, the alarm, reward confusion, Theorem 1."""
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from dreamgym import evaluation as measures
from dreamgym.envs.base import Audit, StepResult
from dreamgym.episode import Episode, StopReason
from dreamgym.evaluation import (alarm, bootstrap, experience_report, failed_probes, first_difference,
                                 interval, never_won, outcomes, pass_at_k, policy_report, probe_verdict,
                                 replayed_inconsistencies, theorem_1, word_f1)
from dreamgym.run import Dist
from tests.conftest import a_step, a_task

START, RESULTS, ITEM, PLACED = "search page", "slim jacket $40 [1]", "item slim jacket $40", "order placed"


class FakeAudit(Audit):
    """A purchase is right where the task says red; a page that says "wrong" contradicts another."""

    def success(self, task, state, action, next_state):
        return task.text == "red" if action == "buy" else None

    def inconsistencies(self, steps):
        return len(steps), sum(step.next_state == "wrong" for step in steps)


def bought(reward: float, text: str = "red", **more) -> Episode:
    step = a_step(ITEM, "buy", PLACED, reward, done=True)
    stop = StopReason.SUCCESS if reward else StopReason.FAILURE
    given = {"task": a_task(text), "world": "dream", "stop": stop, "raw_score": reward}
    return episode_of(step, **given | more)


def episode_of(*steps, **more) -> Episode:
    return Episode(**{"id": "e", "task": a_task("red", start=steps[0].state), "steps": list(steps)} | more)


# ---- shares ----

@pytest.mark.parametrize("a, b, f1", [("red vest", "red red vest", 0.8), ("a a a b", "a b b c", 0.5),
                                      ("x y", "y\nx", 1), ("", "x", 0), ("", "", 1)])
def test_word_f1(a, b, f1):
    """A bag of words that forgets how often a word occurs."""
    assert word_f1(a, b) == word_f1(b, a) == pytest.approx(f1)


@pytest.mark.parametrize("wins, n, low, high", [
    (0, 10, 0.0, 0.2775), (1, 10, 0.0179, 0.4042), (10, 10, 0.7225, 1.0), (150, 500, 0.2615, 0.3416), (0, 0, 0.0, 1.0)])
def test_wilson_interval(wins, n, low, high):
    """The normal approximation, which gives 0 of 10 the interval [0, 0]; published values."""
    assert interval(wins / max(1, n), n) == (pytest.approx(low, abs=2e-4), pytest.approx(high, abs=2e-4))


@pytest.mark.parametrize("by_task, size", [
    ({"a": [1, 1], "b": [0, 0], "c": [1, 1], "d": [0, 0]}, 4), ({"a": [1, 0], "b": [0, 1]}, 2), ({"a": [1, 1]}, 1),
    ({"a": [1, 1, 1, 0], "b": [0, 0, 0, 1], "c": [1, 0, 1, 0]}, 12),           # as if all were other tasks
    ({"a": [1, 1, 1, 0], "b": [0, 0, 0, 0], "c": [1, 1, 0, 0], "d": [1, 1, 1, 1]}, 5.4)])
def test_intervals_of_repeated_tasks(by_task, size):
    """16 episodes of each task that count as 16 tasks: an interval up to four times too narrow."""
    pairs = [(bool(row), task) for task, rows in by_task.items() for row in rows]
    rows, tasks = zip(*pairs)
    found = measures.share(rows, tasks)
    assert (found["low"], found["high"]) == pytest.approx(interval(sum(rows) / len(rows), size), abs=1e-3)
    assert found["n"] == len(rows) and found["share"] == sum(rows) / len(rows)


def test_pass_at_k_against_all_choices():
    """The biased 1 - (1 - p)^k, and tasks that weigh by their number of episodes."""
    wins = {"a": [1, 0, 0, 0], "b": [0] * 4, "c": [1, 1, 1, 0, 0]}
    found = pass_at_k(outcomes([bought(float(win), name) for name, row in wins.items() for win in row]))
    assert list(found) == [1, 2, 3, 4] and pass_at_k({}) == {}
    for k, value in found.items():
        slow = [sum(map(any, itertools.combinations(row[:4], k))) / math.comb(4, k) for row in wins.values()]
        assert value == pytest.approx(sum(slow) / 3)


# ---- the experience model ----

def share(n: int, value: float | None) -> dict:
    return {"n": n, "share": value, "low": interval(value or 0.0, n)[0]}


def probes(near_miss=0.0, refusals=0.0, fits=0.99, malformed=0.0, price=(0, None)) -> dict:
    paid = {"none": share(100, fits), "noun": share(200, near_miss), "price": share(*price)}
    return {"near_miss_paid": paid, "refusals_accepted": share(40, refusals), "malformed": share(200, malformed)}


@pytest.mark.parametrize("report, said", [
    (probes(0.05, 0.10, 0.90, 0.02), []),  # exactly at the limits
    (probes(near_miss=0.06), ["near misses are paid in 6.0% of 200 (limit 5%)"]),
    (probes(price=(20, 0.1)), []),  # two of 20 may be chance
    (probes(price=(20, 0.2)), ["what breaks 'price' is paid in 20.0% of 20 (limit 5%)"]),
    (probes(fits=0.5),  # a model that never pays is no good judge either
     ["what fulfils the task is paid in 50.0% of 100 (limit 90%)"]),
    (probes(0.5, 0.5, malformed=0.03), ["near misses are paid in 50.0% of 200 (limit 5%)",
                                        "what breaks 'noun' is paid in 50.0% of 200 (limit 5%)",
                                        "answers are malformed in 3.0% of 200 (limit 2%)",
                                        "a refused action changes the page in 50.0% of 40 (limit 10%)"])])
def test_failed_probes(report, said):
    """A limit off by its edge, fulfilled tasks taken for near misses."""
    assert failed_probes(report) == said
    assert probe_verdict(report).startswith("PROBES NOT PASSED: " + said[0] if said else "probes passed")


def test_probes_that_nothing_was_recorded_for():
    """"probes passed" for an environment without counterfactuals, whose reward nobody has probed."""
    report = {"near_miss_paid": {}, "refusals_accepted": share(0, None), "malformed": share(0, None)}
    assert probe_verdict(report) == ("probes passed; not probed, for the data hold none: near misses, what fulfils "
                                     "the task, refused actions")
    assert probe_verdict(probes()) == "probes passed"


def test_experience_report():
    """Stops rewards that are counted from the wrong episodes."""
    rows = [(START, "search[a]", RESULTS), (RESULTS, "click[9]", RESULTS), (RESULTS, "click[1]", ITEM),
            (ITEM, "broken", ITEM), (ITEM, "buy", PLACED)]
    played = episode_of(*(a_step(*row, float(row[1] == "buy")) for row in rows))
    near = [bought(0.0, f"blue {i}", label="option", source="counterfactual") for i in range(4)]
    near.append(bought(1.0, "ok", label="none", source="counterfactual"))
    answers = {"search[a]": StepResult(RESULTS), "click[9]": StepResult(ITEM),
               "click[1]": StepResult("item slim jacket $90"), "broken": StepResult(ITEM, stop=StopReason.MALFORMED)}
    asked = []
    questions = lambda steps, dreaming: asked.extend(past for _, past, *_ in steps) or steps * (not dreaming)
    predict = lambda steps, dreaming: [] if dreaming else [
        answers.get(action) or StepResult(PLACED, float(task in ("blue 0", "ok")), True) for task, _, _, action in steps]
    lookup = lambda states, actions: [SimpleNamespace(next_state=RESULTS) if a == "search[a]" else None
                                      for a in actions]
    model = SimpleNamespace(env=SimpleNamespace(audit=Audit()), questions=questions, predict=predict, lookup=lookup)
    report = experience_report(model, [played, *near], Dist(), batch=3)
    assert [len(past) for past in asked] == [0, 1, 2, 3, 4, 0, 0, 0, 0, 0] and asked[4][3] == played.steps[3]
    assert (report["transitions"], report["answers"]) == (5, 10)
    assert (report["malformed"]["share"], report["exact"]["share"]) == (0.1, 0.4)
    assert report["reward_confusion"] == {"TP": 0, "FP": 0, "FN": 1, "TN": 0}
    assert {k: v["share"] for k, v in report["near_miss_paid"].items()} == {"none": 1.0, "option": 0.25}
    assert report["refusals_accepted"]["n"] == 2 and report["refusals_accepted"]["share"] == 0.5
    assert (report["after_refusal"]["n"], report["after_refusal"]["share"]) == (2, 0.5)  # click[1] no, buy yes
    assert {k: v["n"] for k, v in report["by_action"].items()} == {"search": 1, "refused": 2, "click": 1, "buy": 1}
    assert report["by_action"]["click"]["f1"] == pytest.approx(word_f1("item slim jacket $90", ITEM))
    # of the nearest transition, and of the page before where there is none
    assert report["exact_of_lookup"]["share"] == 3 / 5
    asked.clear()
    assert on_ranks(3, experience_report, model, [played, *near]) == [report] * 3 and len(asked) == 10


def on_ranks(size, report, *args):
    """What each of `size` ranks gets from report(*args, dist), each in a thread of its own."""
    barrier, parts = threading.Barrier(size, timeout=60), [[] for _ in range(size)]

    def gather(rank, items):
        parts[rank] = items
        barrier.wait()
        joined = [item for part in parts for item in part]
        barrier.wait()
        return joined

    dists = [SimpleNamespace(rank=r, world_size=size, gather=partial(gather, r)) for r in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda dist: report(*args, dist), dists))


def test_replayed_inconsistencies():
    """Consistency measured on recorded pages instead of the dream's own."""
    class Dream:
        env = SimpleNamespace(audit=FakeAudit())

        def reset(self, tasks):
            return [SimpleNamespace(inner=[]) for _ in tasks]

        def step(self, sessions, actions):
            for session, action in zip(sessions, actions):
                session.inner.append(a_step("s", action, action))
            return [StepResult(action, done=action == "end") for action in actions]

    episodes = [episode_of(*(a_step("real", action, "real") for action in actions))
                for actions in (["a", "wrong", "b"], ["a", "end", "wrong"], ["wrong"])]
    found = replayed_inconsistencies(Dream(), episodes, Dist())
    assert (found["n"], found["share"]) == (6, 2 / 6) and found["low"] < 2 / 6 < found["high"]
    assert on_ranks(4, replayed_inconsistencies, Dream(), episodes) == [found] * 4
    assert replayed_inconsistencies(Dream(), [], Dist())["share"] is None


# ---- dream against world ----

def all_episodes(world, policy, t=0, state="s0", steps=(), weight=1.0):
    """(probability, episode) of every course of 3 steps; world: (state, action) -> (next, reward, done)."""
    for action, p in zip("ab", policy[state]):
        page, reward, done = world[state, action]
        step = a_step(state, action, page, reward, done=done)
        if done or t == 2:
            yield weight * p, episode_of(*steps, step)
        else:
            yield from all_episodes(world, policy, t + 1, page, [*steps, step], weight * p)


def test_no_gap_is_above_its_bound():
    """A last page that counts, a wrong end that does not: exact, in 300 pairs of worlds."""
    rng, gaps, bounds = np.random.default_rng(0), [], []
    draw = lambda: (f"s{rng.integers(4)}", *[(0.0, False), (0.0, True), (1.0, True)][rng.integers(3)])
    for _ in range(300):
        real = {(f"s{s}", a): draw() for s in range(4) for a in "ab"}
        dream = {key: draw() if rng.random() < 0.2 else value for key, value in real.items()}
        policy = {f"s{s}": (p, 1 - p) for s, p in enumerate(rng.random(4))}
        success = [sum(w * e.reward for w, e in all_episodes(world, policy)) for world in (real, dream)]
        found = [(w, first_difference(e, [StepResult(*dream[s.state, s.action]) for s in e.steps]))
                 for w, e in all_episodes(real, policy)]
        gaps.append(abs(success[1] - success[0]))
        bounds.append(sum(w for w, what in found if what))
        assert gaps[-1] <= bounds[-1] + 1e-9
    tight = [gap > bound - 1e-9 for gap, bound in zip(gaps, bounds) if bound]
    assert len(tight) > 100 and 0.1 < np.mean(tight) < 0.9 and np.corrcoef(gaps, bounds)[0, 1] > 0.3


@pytest.mark.parametrize("answers, first", [
    ([StepResult(RESULTS), StepResult(PLACED, 1.0, True)], ""),
    ([StepResult(RESULTS), StepResult("another last page", 1.0, True)], ""),
    ([StepResult(ITEM), StepResult(PLACED, 0.0, True)], "page"),
    ([StepResult(RESULTS), StepResult(PLACED, 0.0, True)], "reward"),
    ([StepResult(RESULTS, 1.0, True), StepResult("x")], "reward"),
    ([StepResult(RESULTS), StepResult("", stop=StopReason.MALFORMED)], "page")])
def test_what_differs_first(answers, first):
    episode = episode_of(a_step(START, "search", RESULTS), a_step(RESULTS, "buy", PLACED, 1.0))
    assert first_difference(episode, answers) == first
    episode.task.start = "another page"
    assert first_difference(episode, answers) == "page"


def test_bootstrap():
    """Seeds that are not drawn, or tasks; a pair that is broken; episodes that weigh in place of tasks."""
    one = [{"a": [1] * 8, "b": [0]}]
    assert bootstrap(one)["mean"] == 0.5 and bootstrap(one)["tasks"] == 2
    rng = np.random.default_rng(1)
    seeds = [{str(i): rng.random(4) < p for i in range(200)} for p in (0.3, 0.5, 0.7)]
    wide, narrow = bootstrap(seeds), bootstrap([seeds[1]])
    assert wide["high"] - wide["low"] > 2 * (narrow["high"] - narrow["low"])
    assert wide["low"] < 0.45 < 0.55 < wide["high"] and narrow["low"] < 0.5 < narrow["high"]
    same = bootstrap([seeds[1]] * 5)           # more seeds do not replace more tasks
    assert same["high"] - same["low"] == pytest.approx(narrow["high"] - narrow["low"], rel=0.1)
    better = [{k: [*v[:3], True] for k, v in tasks.items()} for tasks in seeds]
    paired = bootstrap(better, seeds)
    assert 0 < paired["low"] < paired["mean"] < paired["high"] < 0.25
    assert paired["mean"] == pytest.approx(np.mean([np.mean([not v[3] for v in s.values()]) / 4 for s in seeds]))
    found = bootstrap([{"a": [0] * 4}, {"a": [0, 0, 0, 1]}, {"a": [0, 0, 1, 1]}])      # 0.25 + t(2) * 0.25 / sqrt(3)
    assert (found["t_low"], found["t_high"]) == pytest.approx((0.25 - 0.621, 0.25 + 0.621), abs=1e-3)
    assert "t_low" not in narrow
    with pytest.raises(ValueError, match="no task"):
        bootstrap([{"c": [1]}], one)


# ---- policies ----

def test_never_won():
    """Stops a task from counting as lost by one lost episode, one that nobody could judge from counting."""
    task = lambda name: a_task(name, groups=["kind known" if name in "ab" else "kind new"])
    played = [("a", 1.0), ("a", 0.0), ("a", 0.0), *((name, 0.0) for name in "bbcc")]
    found = never_won([*(bought(won, task=task(name)) for name, won in played),
                       bought(0.0, task=task("d"), stop=StopReason.NOT_JUDGED)])
    assert found["ids"] == ["b", "c"] and found["episodes_each"] == 2 and found["tasks"]["share"] == 2 / 3
    assert {name: cells["share"] for name, cells in found["groups"].items()} == {"kind known": .5, "kind new": 1}
    assert found["success_of_others"]["share"] == 1 / 3 and never_won([])["tasks"]["share"] is None


def test_policy_report():
    """A reward that is audited against itself."""
    groups = a_task("red", id="g", groups=["unseen"])
    episodes = [bought(reward, task) for reward, task in [
        (1.0, "red"), (1.0, "blue"), (1.0, "blue"), (0.0, "red"), (0.0, "blue"), (1.0, "red")]]
    episodes[0].task = groups
    steps = a_step(START, "x", START), a_step(START, "search[a]", "wrong")
    episodes += [episode_of(*steps, task=groups, stop=StopReason.STEP_LIMIT, raw_score=0.5),
                 bought(0.0, stop=StopReason.MALFORMED),     # what could not be read is no verdict
                 bought(0.0, stop=StopReason.NOT_JUDGED)]
    report = policy_report(episodes, FakeAudit())
    assert report["reward_confusion"] == {"TP": 2, "FP": 2, "FN": 1, "TN": 1}
    assert (report["n"], report["success"], report["transitions"], report["length"]) == (8, 0.5, 9, 9 / 8)
    assert (report["low"], report["high"]) == interval(0.5, 8) and report["raw_score"] == pytest.approx(4.5 / 8)
    assert report["stops"] == {"success": 4, "failure": 2, "step_limit": 1, "malformed": 1, "not_judged": 1}
    assert report["invalid"] == pytest.approx(1 / 9) and report["inconsistent"] == pytest.approx(1 / 9)
    assert report["groups"]["unseen"]["n"] == 2 and report["groups"]["unseen"]["share"] == 0.5
    empty = policy_report([], FakeAudit())
    assert (empty["n"], empty["success"], empty["low"], empty["high"]) == (0, 0.0, 0.0, 1.0)


# ---- the alarm ----

def evaluation(iteration: int, dream: float, real: float, n: int = 500, fp: int = 0, tp: int = 90) -> dict:
    low, high = interval(real, n)
    return {"iteration": iteration, "dream": {"success": dream, "low": interval(dream, n)[0], "reward_confusion": {"TP": tp, "FP": fp}},
            "real": {"success": real, "low": low, "high": high}}


def test_alarm():
    """Stops a hacked judge from passing for progress: the dream rises, and the world falls."""
    history = [evaluation(0, 0.35, 0.33), evaluation(5, 0.55, 0.34), evaluation(10, 0.9, 0.12, fp=60, tp=40)]
    assert alarm(history[:2], probes(near_miss=0.9)) == ""
    assert alarm(history, probes(near_miss=0.9)) == (
        "since iteration 0 RL has done harm: real success 0.330 -> 0.120, dream success 0.350 -> 0.900. Likely "
        "cause: 60% of what the experience model paid for is wrong by the audit; near misses are paid in 90.0% of 200 "
        "(limit 5%); what breaks 'noun' is paid in 90.0% of 200 (limit 5%)")
    assert "the probes are clean" in alarm([evaluation(0, 0.3, 0.3), evaluation(5, 0.6, 0.1)], probes())
    history = [evaluation(0, 0.6, 0.5), evaluation(5, 0.1, 0.1)]         # a bad dream that harms without a hack
    assert "real success 0.500 -> 0.100, dream success 0.600 -> 0.100" in alarm(history, probes())
    for one in history:
        del one["real"]
    assert "harm: dream success 0.600 -> 0.100. Likely" in alarm(history, probes())


@pytest.mark.parametrize("history", [
    [], [evaluation(0, 0.3, 0.3)], [evaluation(0, 0.3, 0.3), evaluation(5, 0.6, 0.5)],
    [evaluation(0, 0.6, 0.5), evaluation(5, 0.3, 0.47)],
    [evaluation(0, 0.3, 0.3, n=20), evaluation(5, 0.6, 0.15, n=20)],
    [{"iteration": i, "dream": {"success": 0.1 * i, "low": 0.0}} for i in range(3)]])  # no real environment
def test_no_alarm(history):
    assert alarm(history, probes(0.5, 0.5)) == ""


def test_alarm_looks_back_to_every_evaluation():
    history = [evaluation(i, 0.3 + 0.1 * i, 0.40 - 0.03 * i) for i in range(6)]
    assert all(alarm(history[i:i + 2], probes()) == "" for i in range(5))
    assert "since iteration 0" in alarm(history, probes())


def test_theorem_1():
    """A bound with another power of 1 - gamma: 2 (0.1 / 0.1 + 2 * 0.9 * 0.2 / 0.01) = 74."""
    report = {"reward_confusion": {"TP": 40, "FP": 6, "FN": 4, "TN": 50}, "exact": {"share": 0.8}}
    for words in ("eps_R 0.1000 (100 judged", "eps_P 0.2000", "term 74.00 of a largest return of 10", "vacuous"):
        assert words in theorem_1(report, 0.9)
    perfect = {"reward_confusion": {"TP": 1, "TN": 1, "FP": 0, "FN": 0}, "exact": {"share": 1.0}}
    assert "term 0.00 of a largest return of 10 (informative)" in theorem_1(perfect, 0.9)
    assert "nothing to estimate" in theorem_1(report | {"exact": {"share": None}}, 0.9)
