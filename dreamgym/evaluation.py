"""What an experience model and a policy are worth, measured: errors by action type, probes of the reward,
success with intervals.

Used by train_expmodel.py (on validation data while it trains), train_policy.py and evaluate.py. Truth comes
from recorded steps and from the environment's `audit`; training never sees it. Beside the experience model
stands its null: the nearest recorded transition.
"""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from scipy import stats

from dreamgym.envs.base import Audit
from dreamgym.episode import Episode, Step, StopReason
from dreamgym.experience_model import ExperienceModel, Prediction

NEAR_MISS_LIMIT = 0.05      # share of near misses paid
FITS_LIMIT = 0.90           # share of fulfilled tasks paid, at least
REFUSAL_LIMIT = 0.10        # share of refused actions that change the imagined page
MALFORMED_LIMIT = 0.02      # share of answers that cannot be read


def interval(successes: float, n: int) -> tuple[float, float]:
    """Wilson 95 % interval of a share; (0, 1) for n = 0."""
    if not n:
        return 0.0, 1.0
    found = stats.binomtest(round(successes), n).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def seed_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and 95 % half-width over seeds (Student's t); the half-width is nan for one seed."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)


def share(rows: Sequence[bool]) -> dict:
    """Count, share and Wilson interval of a list of outcomes."""
    low, high = interval(sum(rows), len(rows))
    return {"n": len(rows), "share": sum(rows) / len(rows) if rows else None, "low": low, "high": high}


def word_f1(predicted: str, true: str) -> float:
    """F1 of the two bags of words."""
    a, b = Counter(predicted.split()), Counter(true.split())
    common = sum((a & b).values())
    return 2 * common / (sum(a.values()) + sum(b.values())) if common else float(not a and not b)


# ---- the experience model ----------------------------------------------------------------------------------

def experience_report(model: ExperienceModel, episodes: list[Episode], batch: int = 256,
                      on_batch: Callable[[int], None] = lambda n: None) -> dict:
    """Errors on recorded steps with their true history: next states exact and word F1, by action type; the
    reward's confusion; near misses paid, by the constraint that a counterfactual breaks; refused actions
    accepted; malformed answers; the lookup null."""
    rows = [(e, i) for e in episodes for i in range(len(e.steps))]
    predictions: list[Prediction] = []
    nearest: list[str] = []
    for start in range(0, len(rows), batch):
        part = rows[start:start + batch]
        steps = [e.steps[i] for e, i in part]
        questions = model.questions([e.task.text for e, _ in part], [e.steps[:i] for e, i in part],
                                    [s.state for s in steps], [s.grounded or s.action for s in steps])
        nearest += [q.demos[-1].next_state if q.demos else q.state for q in questions]
        predictions += model.predict(questions)
        on_batch(len(part))
    audit, exact, f1, null = model.env.audit, defaultdict(list), defaultdict(list), []
    confusion, paid_by_label, refused = Counter(), defaultdict(list), []
    for (episode, i), prediction, lookup in zip(rows, predictions, nearest):
        step, paid = episode.steps[i], bool(prediction.reward)
        if episode.source == "counterfactual":
            paid_by_label[episode.label].append(paid)
            continue
        kind = audit.action_type(step.state, step.action) if step.valid else "refused"
        right = not prediction.malformed and prediction.next_state == step.next_state
        exact[kind].append(right)
        f1[kind].append(word_f1(prediction.next_state, step.next_state))
        null.append(lookup == step.next_state)
        if kind == "refused":
            refused.append(not prediction.malformed and prediction.next_state != step.state)
        if step.done or paid:
            confusion[("T" if paid == bool(step.reward) else "F") + ("P" if paid else "N")] += 1
    flat, scores = [x for part in exact.values() for x in part], [x for part in f1.values() for x in part]
    return {
        "transitions": len(flat), "answers": len(rows), "exact": share(flat),
        "f1": sum(scores) / max(1, len(scores)),
        "exact_of_lookup": share(null),
        "by_action": {k: {**share(part), "f1": sum(f1[k]) / len(part)} for k, part in sorted(exact.items())},
        "reward_confusion": {k: confusion[k] for k in ("TP", "FP", "FN", "TN")},
        "near_miss_paid": {k: share(part) for k, part in sorted(paid_by_label.items())},
        "refusals_accepted": share(refused), "malformed": share([p.malformed for p in predictions]),
    }


def replayed_inconsistencies(model: ExperienceModel, episodes: list[Episode]) -> dict:
    """Consistency over whole episodes: recorded actions are played in the dream, which builds on its own
    pages; pages that contradict earlier pages of the same dreamt episode are counted by the audit (none in
    the real environment)."""
    sessions, steps = model.reset([e.task for e in episodes]), [[] for _ in episodes]
    running = list(range(len(episodes)))
    for t in range(max((len(e.steps) for e in episodes), default=0)):
        running = [i for i in running if t < len(episodes[i].steps)]
        if not running:
            break
        before = [sessions[i].state for i in running]
        actions = [episodes[i].steps[t].action for i in running]
        results = model.step([sessions[i] for i in running], actions)
        for i, state, action, result in zip(running, before, actions, results):
            grounded = model.env.ground(state, action)
            steps[i].append(Step(state=state, action=action, grounded=grounded, next_state=result.state))
        running = [i for i, result in zip(running, results) if not result.done]
    pairs = [model.env.audit.inconsistencies(part) for part in steps]
    checked, broken = sum(c for c, _ in pairs), sum(b for _, b in pairs)
    return share([True] * broken + [False] * (checked - broken))


def failed_probes(report: dict) -> list[str]:
    """The probes that did not pass, in words; [] when all did."""
    failed = [f"what breaks '{k}' is paid {v['share']:.0%} of the time (limit {NEAR_MISS_LIMIT:.0%})"
              for k, v in report["near_miss_paid"].items() if k != "none" and v["n"]
              and v["share"] > NEAR_MISS_LIMIT]
    fits = report["near_miss_paid"].get("none", {"n": 0})
    if fits["n"] and fits["share"] < FITS_LIMIT:
        failed.append(f"what fulfils the task is paid {fits['share']:.0%} of the time (limit "
                      f"{FITS_LIMIT:.0%})")
    malformed, refusals = report["malformed"], report["refusals_accepted"]
    if malformed["n"] and malformed["share"] > MALFORMED_LIMIT:
        failed.append(f"{malformed['share']:.1%} of {malformed['n']} answers are malformed (limit "
                      f"{MALFORMED_LIMIT:.0%})")
    if refusals["n"] and refusals["share"] > REFUSAL_LIMIT:
        failed.append(f"a refused action changes the page {refusals['share']:.0%} of the time (limit "
                      f"{REFUSAL_LIMIT:.0%})")
    return failed


def theorem_1(report: dict, gamma: float, reward_max: float = 1.0) -> str:
    """The model-error term of DreamGym's Theorem 1, 2 (eps_R / (1 - gamma) + 2 gamma R_max eps_P / (1 -
    gamma)^2), from recorded data.

    The theorem takes suprema over all states and actions; the means measured here are a lower bound on that
    term.
    """
    confusion = report["reward_confusion"]
    judged = sum(confusion.values())
    if report["exact"]["share"] is None:
        return "Theorem 1: no recorded transitions, so nothing to estimate its errors from"
    eps_r, eps_p = (confusion["FP"] + confusion["FN"]) / max(1, judged), 1 - report["exact"]["share"]
    term = 2 * (eps_r / (1 - gamma) + 2 * gamma * reward_max * eps_p / (1 - gamma) ** 2)
    verdict = "vacuous: more than the largest return" if term > reward_max / (1 - gamma) else "informative"
    return (f"Theorem 1 at gamma {gamma:g}: mean eps_R {eps_r:.4f} ({judged} judged steps), mean eps_P "
            f"{eps_p:.4f}, "
            f"model-error term {term:.2f} of a largest return of {reward_max / (1 - gamma):.0f} ({verdict})")


# ---- policies ----------------------------------------------------------------------------------------------

def policy_report(episodes: list[Episode], audit: Audit) -> dict:
    """Success with its interval, also by groups of tasks; raw score, lengths, stop reasons, shares of invalid
    actions and inconsistent pages; of dreamt episodes the reward's confusion with the audit. Episodes that
    nobody could judge count in the stop reasons only."""
    stops = Counter(e.stop.value for e in episodes)
    episodes = [e for e in episodes if e.stop != StopReason.NOT_JUDGED]
    confusion, groups = Counter(), defaultdict(list)
    for episode in episodes:
        for step in episode.steps:
            truth = audit.success(episode.task, step.state, step.action, step.next_state)
            if truth is not None and step.valid and episode.stop != StopReason.MALFORMED:
                confusion[("T" if bool(step.reward) == truth else "F") + ("P" if step.reward else "N")] += 1
        for name in episode.task.groups:
            groups[name].append(episode.success)
    transitions = sum(len(e.steps) for e in episodes)
    pairs = [audit.inconsistencies(e.steps) for e in episodes]
    outcome = share([e.success for e in episodes])
    return {
        "n": outcome["n"], "success": outcome["share"] or 0.0, "low": outcome["low"], "high": outcome["high"],
        "raw_score": sum(e.raw_score for e in episodes) / max(1, len(episodes)), "transitions": transitions,
        "length": transitions / max(1, len(episodes)), "stops": dict(stops),
        "invalid": sum(not s.valid for e in episodes for s in e.steps) / max(1, transitions),
        "inconsistent": sum(b for _, b in pairs) / max(1, sum(c for c, _ in pairs)),
        "reward_confusion": {k: confusion[k] for k in ("TP", "FP", "FN", "TN")},
        "groups": {name: share(rows) for name, rows in sorted(groups.items())},
    }


def pass_at_k(episodes: list[Episode], ks: Sequence[int] = (1, 2, 4, 8, 16)) -> dict[int, float]:
    """Unbiased pass@k over tasks (arXiv 2107.03374, Eq. 1) from equally many episodes of each task; only k up
    to that number."""
    wins = defaultdict(list)
    for episode in episodes:
        wins[episode.task.id].append(episode.success)
    n = min(map(len, wins.values()), default=0)
    value = lambda c, k: 1.0 - math.comb(n - c, k) / math.comb(n, k)
    return {k: sum(value(sum(rows[:n]), k) for rows in wins.values()) / len(wins) for k in ks if k <= n}


def gap_alarm(evaluations: list[dict], probes: dict) -> str:
    """A sentence when dream success has risen while real success has fallen below an earlier interval (""
    otherwise), with the likely cause: wrong payments in the policy's own dreamt episodes, or a probe of the
    experience model that did not pass."""
    if len(evaluations) < 2 or "real" not in evaluations[-1]:
        return ""
    now = evaluations[-1]
    fell = [e for e in evaluations[:-1]
            if now["dream"]["success"] > e["dream"]["success"] and now["real"]["success"] < e["real"]["low"]]
    if not fell:
        return ""
    confusion = now["dream"]["reward_confusion"]
    wrong = confusion["FP"] / max(1, confusion["FP"] + confusion["TP"])
    paid = f"{wrong:.0%} of what the experience model paid for is wrong by the audit"
    causes = [paid] if wrong > 0.1 else []
    clean = "the probes are clean, so read dreamt episodes (evaluate.py --play 10)"
    cause = "; ".join(causes + failed_probes(probes)) or clean
    return (f"dream success rose {fell[0]['dream']['success']:.3f} -> {now['dream']['success']:.3f} while "
            "real success fell "
            f"{fell[0]['real']['success']:.3f} -> {now['real']['success']:.3f} since iteration "
            f"{fell[0]['iteration']}. Likely cause: {cause}")
