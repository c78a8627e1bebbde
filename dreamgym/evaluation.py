"""What the experience model and a policy are worth, measured: errors by action type, probes of the reward, success with intervals.

Used by train_expmodel.py (expmodel/report.json), train_policy.py (every few iterations) and evaluate.py. The paper never measures the two errors its
Theorem 1 rests on (eps_R, eps_P); here they are the reward confusion matrix and the next-state error on held-out real transitions.
"""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from types import ModuleType

from dreamgym.episode import Episode
from dreamgym.experience_model import ExperienceModel, Query
from dreamgym.prompts import Prediction

PROBE_LIMIT, REFUSAL_LIMIT = 0.05, 0.10          # a near-miss paid, a refusal accepted: training goes on above these
MATCH_LIMIT, MALFORMED_LIMIT = 0.90, 0.02        # ... and while fewer matching purchases are paid, or more answers are malformed


def interval(successes: float, n: int) -> tuple[float, float]:
    """Wilson 95 % interval of a share; (0, 1) for n = 0."""
    if not n:
        return 0.0, 1.0
    p, z2 = successes / n, 1.96 ** 2
    centre, half = (p + z2 / (2 * n)) / (1 + z2 / n), 1.96 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def seed_interval(values: list[float]) -> tuple[float, float]:
    """Mean and 95 % half-width over seeds (Student's t); half-width is nan for one seed."""
    n, mean = len(values), sum(values) / len(values)
    t = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
    sd = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else math.nan
    return mean, t.get(n, 1.96) * sd / math.sqrt(n)


def word_f1(predicted: str, true: str) -> float:
    """F1 of the two bags of words."""
    a, b = Counter(predicted.split()), Counter(true.split())
    common = sum((a & b).values())
    return 2 * common / (sum(a.values()) + sum(b.values())) if common else float(not a and not b)


def step_queries(episodes: list[Episode]) -> tuple[list[Query], list]:
    """Every step with its true history (teacher forcing), and (episode, step) beside it."""
    queries, steps = [], []
    for episode in episodes:
        history: list[tuple[str, str]] = []
        for step in episode.steps:
            queries.append(Query(episode.task.text, list(history), step.state, step.grounded, episode.id))
            steps.append((episode, step))
            history.append((step.state, step.grounded))
    return queries, steps


def _share(rows: list[bool]) -> dict:
    low, high = interval(sum(rows), len(rows))
    return {"n": len(rows), "share": sum(rows) / len(rows) if rows else None, "low": low, "high": high}


def experience_report(dream: ExperienceModel, episodes: list[Episode], on_batch: Callable[[int], None] = lambda n: None, batch: int = 256) -> dict:
    """Held-out errors of the experience model (see the module): exact and F1 of the next state by action type, apart for pages determined by what was
    seen and pages that must be recalled or invented; reward confusion; near-miss probe by broken constraint; refusal probe; malformed outputs."""
    queries, steps = step_queries(episodes)
    answers: list[Prediction | None] = []
    for start in range(0, len(queries), batch):
        part = queries[start:start + batch]
        answers += [answer for answer, _ in dream.predict(part, [f"probe-{start + i}" for i in range(len(part))])]
        on_batch(len(part))
    rules: ModuleType = dream.rules
    exact, f1, known, confusion = defaultdict(list), defaultdict(list), defaultdict(list), Counter()
    near_miss, refused, malformed, by_both = defaultdict(list), [], 0, defaultdict(list)
    for query, (episode, step), answer in zip(queries, steps, answers):
        malformed += answer is None
        kind = "refused" if not step.valid else rules.action_type(step.state, step.action)
        paid = bool(answer and answer.reward)
        if episode.source == "relabelled":
            near_miss[step.info["broken"]].append(paid)
            continue
        same = answer is not None and answer.next_state == step.next_state and answer.done == step.done
        exact[kind].append(same)
        f1[kind].append(word_f1(answer.next_state, step.next_state) if answer else 0.0)
        determined = rules.determined([s for s, _ in query.history], step.state, step.action)
        known["determined" if determined else "recalled or invented"].append(same)
        by_both[f"{kind}, {'determined' if determined else 'recalled or invented'}"].append(same)
        if kind == "refused":
            refused.append(answer is not None and rules.unnumbered(answer.next_state) != rules.unnumbered(step.state))
        if step.done or (rules.judged(step.state, step.action) and step.next_state != step.state):
            confusion[("T" if paid == bool(step.reward) else "F") + ("P" if paid else "N")] += 1
    every, scores = [e for rows in exact.values() for e in rows], [x for rows in f1.values() for x in rows]
    return {
        "transitions": len(every), "exact": _share(every), "f1": sum(scores) / max(1, len(scores)),
        "by_action": {k: {**_share(rows), "f1": sum(f1[k]) / len(rows)} for k, rows in sorted(exact.items())},
        "by_knowledge": {k: _share(rows) for k, rows in sorted(known.items())}, "by_action_and_knowledge": {k: _share(rows) for k, rows in sorted(by_both.items())},
        "reward_confusion": {k: confusion[k] for k in ("TP", "FP", "FN", "TN")},
        "near_miss_paid": {k: _share(rows) for k, rows in sorted(near_miss.items())},
        "refusals_accepted": _share(refused), "malformed": malformed,
    }


def replayed_contradictions(dream: ExperienceModel, episodes: list[Episode]) -> dict:
    """Consistency over whole episodes: recorded actions are played in the dream, which builds on its own pages, and pages that contradict earlier ones of the
    same dreamt episode are counted (`contradictions` of the rules; none in the real world)."""
    sessions, steps = dream.start([e.task for e in episodes]), [[] for _ in episodes]
    running = list(range(len(episodes)))
    for t in range(max((len(e.steps) for e in episodes), default=0)):
        running = [i for i in running if t < len(episodes[i].steps)]
        before = [sessions[i].state for i in running]
        results = dream.act([sessions[i] for i in running], [episodes[i].steps[t].action for i in running]) if running else []
        for i, state, result in zip(running, before, results):
            steps[i].append((state, result.info["grounded"], result.state))
        running = [i for i, result in zip(running, results) if not result.done]
    checked, broken = map(sum, zip(*map(dream.rules.contradictions, steps))) if steps else (0, 0)
    low, high = interval(broken, checked)
    return {"n": checked, "share": broken / checked if checked else None, "low": low, "high": high}


def probes_passed(report: dict) -> list[str]:
    """The probes that did not pass, in words; [] when all did."""
    failed = [f"what breaks '{k}' is paid {v['share']:.0%} of the time (limit {PROBE_LIMIT:.0%})"
              for k, v in report["near_miss_paid"].items() if k != "none" and v["n"] and v["share"] > PROBE_LIMIT]
    matching = report["near_miss_paid"].get("none", {"n": 0})
    if matching["n"] and matching["share"] < MATCH_LIMIT:
        failed.append(f"what meets every wish is paid {matching['share']:.0%} of the time (limit {MATCH_LIMIT:.0%})")
    asked = report["transitions"] + sum(v["n"] for v in report["near_miss_paid"].values())
    if report["malformed"] > MALFORMED_LIMIT * asked:
        failed.append(f"{report['malformed']} of {asked} answers are malformed (limit {MALFORMED_LIMIT:.0%})")
    refusals = report["refusals_accepted"]
    if refusals["n"] and refusals["share"] > REFUSAL_LIMIT:
        failed.append(f"an action the world refuses is accepted {refusals['share']:.0%} of the time (limit {REFUSAL_LIMIT:.0%})")
    return failed


def policy_report(episodes: list[Episode], rules: ModuleType) -> dict:
    """Success (also by groups of tasks), score, stop reasons, lengths, pages that contradict earlier ones; for dreamt episodes
    the reward's confusion with the rule check that RL never sees. Episodes that nobody could judge ("not_judged", WebArena without a judge) count only in
    the stop reasons."""
    stops = Counter(e.stop for e in episodes)
    episodes = [e for e in episodes if e.stop != "not_judged"]
    n, wins = len(episodes), sum(e.success for e in episodes)
    low, high = interval(wins, n)
    confusion: Counter = Counter()
    for episode in episodes:
        for i, step in enumerate(episode.steps, 1):
            broken = episode.stop == "malformed" and i == len(episode.steps)
            truth = rules.rule_success(episode.task.text, step.state, step.action, step.next_state)
            if truth is not None and (step.next_state != step.state or broken):      # an action that was refused is not judged
                confusion[("T" if bool(step.reward) == truth else "F") + ("P" if step.reward else "N")] += 1
    invalid = sum(not s.valid for e in episodes for s in e.steps)
    transitions = sum(len(e.steps) for e in episodes)
    pages = [rules.contradictions([(s.state, s.action, s.next_state) for s in e.steps]) for e in episodes]
    groups: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:                     # ALFWorld: by split and by task type
        for key in ("split", "type"):
            if key in episode.task.goal:
                groups[f"{key} {episode.task.goal[key]}"].append(episode.success)
    return {**({"groups": {k: _share(rows) for k, rows in sorted(groups.items())}} if groups else {}), "n": n, "success": wins / max(1, n),
            "low": low, "high": high, "score": sum(e.score for e in episodes) / max(1, n), "transitions": transitions,
            "length": transitions / max(1, n), "invalid": invalid / max(1, transitions), "stops": dict(stops),
            "contradictions": sum(broken for _, broken in pages) / max(1, sum(checked for checked, _ in pages)),
             "judge": {k: confusion[k] for k in ("TP", "FP", "FN", "TN")}}


def search_report(episodes: list[Episode], rules: ModuleType) -> dict:
    """Share of searching steps that showed what the task wants: a dream that finds more than the world is easier than it."""
    found = [rules.finds(e.task.text, s.state, s.action, s.next_state) for e in episodes for s in e.steps]
    return _share([fits for fits in found if fits is not None])


def gap_alarm(evaluations: list[dict], probes: dict) -> str:
    """A sentence when dream success has risen while real success has fallen below the interval of an earlier evaluation ('' otherwise), with the likely cause.

    The cause is named from what audits the dream: the judge's false positives on the policy's own episodes, the near-miss probe, the refusal probe.
    """
    if len(evaluations) < 2:
        return ""
    now = evaluations[-1]
    dream, real = now["dream_sampled"], now["real_sampled"]
    fell = [e for e in evaluations[:-1] if dream["success"] > e["dream_sampled"]["success"] and real["success"] < e["real_sampled"]["low"]]
    if not fell:
        return ""
    earlier = fell[0]
    judge = dream["judge"]
    wrong = judge["FP"] / max(1, judge["FP"] + judge["TP"])
    causes = [f"the experience model pays for wrong purchases: {wrong:.0%} of those it rewarded fail the rule check"] if wrong > 0.1 else []
    causes += probes_passed(probes)
    cause = "; ".join(causes) or "the probes are clean, so look at the dreamt pages themselves (evaluate.py --play 10)"
    return (f"dream success rose {earlier['dream_sampled']['success']:.3f} -> {dream['success']:.3f} while real success fell {earlier['real_sampled']['success']:.3f} -> "
            f"{real['success']:.3f} since iteration {earlier['iteration']}. Likely cause: {cause}")


def theorem_1(report: dict, gamma: float, reward_max: float = 1.0) -> str:
    """The model-error term of DreamGym's Theorem 1, 2 (eps_R / (1 - gamma) + 2 gamma R_max eps_P / (1 - gamma)^2), from held-out data.

    The theorem takes suprema over all states and actions; the means measured here are estimates under the offline distribution, hence a lower bound on
    that term. The text says what follows from it (as a rule: the bound is vacuous, and the errors themselves are what to look at).
    """
    confusion = report["reward_confusion"]
    buys = sum(confusion.values())
    eps_r = (confusion["FP"] + confusion["FN"]) / max(1, buys)
    if report["exact"]["share"] is None:
        return "Theorem 1: no held-out transitions, so nothing to estimate its errors from"
    eps_p = 1 - report["exact"]["share"]
    term = 2 * (eps_r / (1 - gamma) + 2 * gamma * reward_max * eps_p / (1 - gamma) ** 2)
    verdict = "vacuous: more than the largest return" if term > reward_max / (1 - gamma) else "informative"
    return (f"Theorem 1 at gamma {gamma:g}: mean eps_R {eps_r:.4f} ({buys} purchases), mean eps_P {eps_p:.4f}, "
            f"model-error term {term:.2f} of a largest return of {reward_max / (1 - gamma):.0f} ({verdict})")
