"""Reports: shares with intervals, what the probes say, the gap alarm, the judge's confusion, Theorem 1."""
from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest

from dreamgym.envs import StepResult
from dreamgym.envs.webshop import text as text
from dreamgym.episode import Episode, Step, Task
from dreamgym.prompts import Prediction
from dreamgym.report import experience_report, gap_alarm, interval, policy_report, probes_passed, replayed_contradictions, search_report, seed_interval, theorem_1, word_f1

TASK = "find me slim jacket with color: red, and price lower than 50.00 dollars"
RESULTS = "results page 1 of 1\nclassic slim jacket $40 [1]\nroyal vest $20 [2]"
RIGHT, WRONG = "item classic slim jacket $40\ncolor: red / blue\nchosen: red", "item classic slim jacket $40\ncolor: red / blue\nchosen: blue"


def bought(page: str, reward: float, name: str = "e", stop: str = "", task: str = TASK, source: str = "policy", broken: str = "") -> Episode:
    step = Step(page, "click[buy now]", text.PLACED, reward, True, "click[buy now]", info={"broken": broken} if broken else {})
    return Episode(name, Task("t", task), [step], "dream", source, stop or ("success" if reward else "failure"), reward)


# ---- shares ------------------------------------------------------------------------------------------------------------------------------------

def test_word_f1_against_a_loop():
    # Stops a bag of words that forgets how often a word occurs.
    def slow(a: str, b: str) -> float:
        left, rest = a.split(), b.split()
        common = 0
        for word in left:
            if word in rest:
                rest.remove(word)
                common += 1
        if not left and not b.split():
            return 1.0
        precision, recall = common / max(1, len(left)), common / max(1, len(b.split()))
        return 2 * precision * recall / (precision + recall) if common else 0.0
    pairs = [("red vest", "red vest"), ("red red vest", "red vest"), ("a a a b", "a b b c"), ("", ""), ("", "x"), ("x", ""), ("x y", "z"), ("b\na", "a b")]
    for a, b in pairs:
        assert word_f1(a, b) == pytest.approx(slow(a, b)) == pytest.approx(word_f1(b, a))
    assert word_f1("red red vest", "red vest") == pytest.approx(0.8)


def test_wilson_interval():
    # Stops the normal approximation, which gives 0 of 10 the interval [0, 0]. Values from published tables of the Wilson score interval.
    for wins, n, low, high in ((0, 10, 0.0, 0.2775), (1, 10, 0.0179, 0.4042), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (150, 500, 0.2615, 0.3416)):
        assert interval(wins, n) == (pytest.approx(low, abs=2e-4), pytest.approx(high, abs=2e-4))
        assert interval(n - wins, n) == pytest.approx((1 - interval(wins, n)[1], 1 - interval(wins, n)[0]))
    assert interval(0, 0) == (0.0, 1.0)


def test_seed_interval():
    # Stops 1.96 for three seeds (Student's t with 2 degrees of freedom is 4.303), and the population's standard deviation.
    assert seed_interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert seed_interval([0.2, 0.4]) == (pytest.approx(0.3), pytest.approx(12.71 * 0.1))
    assert seed_interval([0.5] * 20) == (0.5, 0.0) and seed_interval([0.0, 1.0] * 8)[1] == pytest.approx(1.96 * math.sqrt(4 / 15) / 4)
    mean, half = seed_interval([0.7])
    assert mean == 0.7 and math.isnan(half)


# ---- the experience model ----------------------------------------------------------------------------------------------------------------------

def share(n: int, value: float | None) -> dict:
    return {"n": n, "share": value}


def probes(near_miss: float = 0.0, refusals: float = 0.0, matching: float = 0.99, malformed: int = 0) -> dict:
    return {"near_miss_paid": {"none": share(100, matching), "noun": share(50, near_miss), "price": share(0, None)}, "refusals_accepted": share(40, refusals),
            "transitions": 50, "malformed": malformed}


def test_probes():
    # Stops a limit off by its edge, matching purchases taken for near misses, and cells without rows.
    assert probes_passed(probes(0.05, 0.10, 0.90, 4)) == [] == probes_passed({"near_miss_paid": {}, "refusals_accepted": share(0, None), "transitions": 0, "malformed": 0})
    [failed] = probes_passed(probes(near_miss=0.06))
    assert "'noun'" in failed and "6%" in failed
    [failed] = probes_passed(probes(refusals=0.11))
    assert "refuses" in failed and "11%" in failed
    assert len(probes_passed(probes(0.5, 0.5))) == 2
    [failed] = probes_passed(probes(matching=0.0))             # a model that never pays is no good judge either
    assert "meets every wish" in failed
    [failed] = probes_passed(probes(malformed=5))
    assert "5 of 200 answers are malformed" in failed


def test_experience_report():
    # Stops rewards that are counted from the wrong episodes, malformed answers that vanish, and refusals that count as accepted.
    steps = [Step(text.START, "search[vest]", RESULTS), Step(RESULTS, "click[9]", RESULTS), Step(RESULTS, "click[1]", RIGHT), Step(RIGHT, "click[buy now]", text.PLACED, 1.0, True)]
    for step in steps:
        step.grounded = text.ground(step.state, step.action)
    played = Episode("p", Task("t", TASK), steps, source="imperfect")
    near = [bought(WRONG, 0.0, f"n{i}", source="relabelled", broken="option") for i in range(4)]
    match = bought(RIGHT, 1.0, "m", source="relabelled", broken="none")
    answers = {"search[vest]": Prediction("", "results page 1 of 1\nclassic slim jacket $40 [1]", 0.0, False), "click[9] nothing": Prediction("", RIGHT, 0.0, False),
               "click[1] classic slim jacket $40": None}
    asked = []

    def predict(queries, keys):
        asked.extend(queries)
        return [(Prediction("", text.PLACED, float(q.episode_id in ("n0", "m")), True) if q.grounded == "click[buy now]" else answers[q.grounded], None) for q in queries]
    report = experience_report(SimpleNamespace(rules=text, predict=predict), [played, *near, match], batch=3)
    assert [len(q.history) for q in asked] == [0, 1, 2, 3, 0, 0, 0, 0, 0] and asked[3].history[2] == (RESULTS, "click[1] classic slim jacket $40")
    assert (report["transitions"], report["malformed"], report["exact"]["share"]) == (4, 1, 0.25)        # right page, wrong reward
    assert report["reward_confusion"] == {"TP": 0, "FP": 0, "FN": 1, "TN": 0}
    assert {k: v["share"] for k, v in report["near_miss_paid"].items()} == {"none": 1.0, "option": 0.25}
    assert report["refusals_accepted"]["n"] == 1 and report["refusals_accepted"]["share"] == 1.0
    assert {k: v["n"] for k, v in report["by_action"].items()} == {"search": 1, "refused": 1, "open": 1, "buy": 1}
    assert {k: v["n"] for k, v in report["by_knowledge"].items()} == {"determined": 2, "recalled or invented": 2}
    assert report["by_action"]["search"]["f1"] == pytest.approx(word_f1(answers["search[vest]"].next_state, RESULTS)) and report["by_action"]["open"]["f1"] == 0.0


def test_replayed_contradictions():
    # Stops consistency from being measured on real pages instead of the dream's own, or from going on after the dream has ended an episode.
    class Dream:
        rules = SimpleNamespace(contradictions=lambda steps: (len(steps), sum(next_state == "wrong" for _, _, next_state in steps)))

        def start(self, tasks):
            return [SimpleNamespace(state=task.start, steps=0) for task in tasks]

        def act(self, sessions, actions):
            for session, action in zip(sessions, actions):
                session.state = action
            return [StepResult(action, done=action == "end", info={"grounded": action}) for action in actions]
    episodes = [Episode(str(i), Task("t", TASK, start="s"), [Step("real", action, "real") for action in actions])
                for i, actions in enumerate((["a", "wrong", "b"], ["a", "end", "wrong"], ["wrong"]))]
    found = replayed_contradictions(Dream(), episodes)
    assert (found["n"], found["share"]) == (6, 2 / 6) and found["low"] < 2 / 6 < found["high"]
    assert replayed_contradictions(Dream(), [])["share"] is None


# ---- policies ----------------------------------------------------------------------------------------------------------------------------------

def test_policy_report_and_the_judges_confusion():
    # Stops a judge audited against itself: the rule check reads page and task, the reward is the dream's.
    episodes = [bought(RIGHT, 1.0), bought(RIGHT, 0.0), bought(WRONG, 1.0), bought(WRONG, 1.0), bought(WRONG, 0.0), bought(RIGHT, 1.0, task="such words: odd")]
    lost = Episode("l", Task("t", TASK), [Step(text.START, "buy it", text.START, valid=False), Step(text.START, "search[vest]", RESULTS)], "dream", stop="step_limit", score=0.5)
    report = policy_report([*episodes, lost], text)
    assert report["judge"] == {"TP": 1, "FP": 2, "FN": 1, "TN": 1}           # no row for what is no purchase or cannot be read
    assert (report["n"], report["success"], report["transitions"]) == (7, 4 / 7, 8)
    assert (report["low"], report["high"]) == interval(4, 7) and report["score"] == pytest.approx(4.5 / 7)
    assert report["stops"] == {"success": 4, "failure": 2, "step_limit": 1} and report["invalid"] == 1 / 8 and report["length"] == 8 / 7
    unknown = policy_report([*episodes, lost, bought(RIGHT, 0.0, stop="not_judged")], text)      # neither a failure nor a success
    assert (unknown["n"], unknown["success"], unknown["stops"]["not_judged"]) == (7, 4 / 7, 1)
    empty = policy_report([], text)
    assert (empty["n"], empty["success"], empty["low"], empty["high"]) == (0, 0.0, 0.0, 1.0)


def test_search_report():
    # Stops a dream whose searches always find the wanted product from looking like the world.
    def found(page: str) -> Episode:
        return Episode("s", Task("t", TASK), [Step(text.START, "search[slim jacket]", page)])
    dear = "results page 1 of 1\nclassic slim jacket $60 [1]"
    report = search_report([found(RESULTS), found(dear), found("results page 1 of 0\nnothing"), bought(RIGHT, 1.0)], text)
    assert (report["n"], report["share"]) == (3, 1 / 3)
    assert search_report([], text)["share"] is None


# ---- the gap alarm -----------------------------------------------------------------------------------------------------------------------------

def evaluation(iteration: int, dream: float, real: float, n: int = 500, fp: int = 0, tp: int = 90) -> dict:
    low, high = interval(real * n, n)
    return {"iteration": iteration, "dream_sampled": {"success": dream, "judge": {"TP": tp, "FP": fp, "FN": 0, "TN": 9}},
            "real_sampled": {"success": real, "low": low, "high": high}}


def test_alarm_names_the_hacked_reward():
    # Stops the hack of --naive-reward from passing for progress: the dream rises, the world falls, and the near-miss probe says why.
    naive = probes(near_miss=0.9)
    history = [evaluation(0, 0.35, 0.33), evaluation(5, 0.55, 0.34), evaluation(10, 0.9, 0.12, fp=60, tp=40)]
    assert gap_alarm(history[:2], naive) == ""
    alarm = gap_alarm(history, naive)
    assert "0.350 -> 0.900" in alarm and "0.330 -> 0.120" in alarm and "since iteration 0" in alarm
    assert "60% of those it rewarded fail the rule check" in alarm and "breaks 'noun' is paid 90%" in alarm
    assert "refuses is accepted 30%" in gap_alarm(history, probes(refusals=0.3))


def test_alarm_without_a_known_cause():
    alarm = gap_alarm([evaluation(0, 0.3, 0.3), evaluation(5, 0.6, 0.1)], probes())
    assert "dream success rose" in alarm and "probes are clean" in alarm and "pays for wrong" not in alarm


def test_no_alarm():
    # Stops a false alarm: both rise, both fall, real falls within its interval, or there is nothing to compare with.
    for history in ([], [evaluation(0, 0.3, 0.3)], [evaluation(0, 0.3, 0.3), evaluation(5, 0.6, 0.5)], [evaluation(0, 0.6, 0.5), evaluation(5, 0.3, 0.2)],
                    [evaluation(0, 0.3, 0.30), evaluation(5, 0.6, 0.28)], [evaluation(0, 0.3, 0.3, n=20), evaluation(5, 0.6, 0.15, n=20)]):
        assert gap_alarm(history, probes(0.5, 0.5)) == ""


def test_alarm_looks_back_to_every_evaluation():
    # Stops a slow decline, no two neighbours of which differ by more than the interval, from being missed.
    history = [evaluation(i, 0.3 + 0.1 * i, 0.40 - 0.03 * i) for i in range(6)]
    assert all(gap_alarm(history[i:i + 2], probes()) == "" for i in range(5))
    assert "since iteration 0" in gap_alarm(history, probes())
    before = copy.deepcopy(history)
    gap_alarm(history, probes())
    assert history == before


# ---- Theorem 1 ---------------------------------------------------------------------------------------------------------------------------------

def test_theorem_1():
    # Stops a bound with another power of 1 - gamma: 2 (0.1 / 0.1 + 2 * 0.9 * 0.2 / 0.01) = 74 for eps_R 0.1, eps_P 0.2, gamma 0.9.
    report = {"reward_confusion": {"TP": 40, "FP": 6, "FN": 4, "TN": 50}, "exact": {"share": 0.8}}
    said = theorem_1(report, 0.9)
    assert "eps_R 0.1000 (100 purchases)" in said and "eps_P 0.2000" in said and "term 74.00 of a largest return of 10" in said and "vacuous" in said
    perfect = {"reward_confusion": {"TP": 1, "FP": 0, "FN": 0, "TN": 1}, "exact": {"share": 1.0}}
    assert "term 0.00" in theorem_1(perfect, 0.9) and "informative" in theorem_1(perfect, 0.9)
    assert "term 146.00 of a largest return of 20" in theorem_1(report, 0.9, reward_max=2.0)
