"""What an experience model and a policy are worth. Truth comes from recorded steps and from the environment's
`audit`.
"""
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from scipy import stats

from dreamgym import run
from dreamgym.envs.base import Audit, StepResult
from dreamgym.episode import Episode, Source, Step, StopReason, Task
from dreamgym.experience_model import ExperienceModel

NEAR_MISS_LIMIT, REFUSAL_LIMIT, MALFORMED_LIMIT = 0.05, 0.10, 0.02     # most that pass (`failed_probes`)
FITS_LIMIT = 0.90           # share of fulfilled tasks paid, at least


def interval(mean: float, n: float) -> tuple[float, float]:
    """Wilson 95 % interval of a share `mean` of n outcomes; (0, 1) for n = 0."""
    if not n:
        return 0.0, 1.0
    z2 = 1.959964 ** 2
    middle, half = mean + z2 / (2 * n), (z2 * (mean * (1 - mean) / n + z2 / (4 * n * n))) ** 0.5
    return max(0.0, (middle - half) / (1 + z2 / n)), min(1.0, (middle + half) / (1 + z2 / n))


def share(rows: Sequence[bool] = (), tasks: Sequence[str] = ()) -> dict:
    """Count, share and Wilson 95 % interval of outcomes. With the task of each, the interval is that of the
    effective sample size, at least the number of tasks (Korn and Graubard, 1998)."""
    size = n = len(rows)
    mean = sum(rows) / n if rows else None
    if len(set(tasks)) < len(tasks):
        by_task = defaultdict(list)
        for task, row in zip(tasks, rows):
            by_task[task].append(row)
        means, fewest = [np.mean(part) for part in by_task.values()], len(by_task)
        variance = np.var(means, ddof=1) / fewest if fewest > 1 else 0.0       # of the mean over tasks
        size = float(np.clip(mean * (1 - mean) / variance, fewest, n)) if variance else fewest
    low, high = interval(mean, size)
    return {"n": n, "share": mean, "low": low, "high": high}


def with_interval(cell: dict, sign: str = "") -> str:
    """A value and its interval, of `policy_report`, `bootstrap` or `share`: "0.500 [0.402, 0.598]"; "-" where
    nothing was counted. `sign`: "+" writes it."""
    value = next(cell[name] for name in ("success", "mean", "share") if name in cell)
    form = f"{sign}.3f"
    return "-" if value is None else f"{value:{form}} [{cell['low']:{form}}, {cell['high']:{form}}]"


def word_f1(predicted: str, true: str) -> float:
    """F1 of the two bags of words."""
    a, b = Counter(predicted.split()), Counter(true.split())
    common = (a & b).total()
    return 2 * common / (a.total() + b.total()) if common else float(not a and not b)


def confusion(pairs: Iterable[tuple[bool, bool]]) -> dict[str, int]:
    """Counts of (paid, should be paid)."""
    counts = Counter(("T" if paid == truth else "F") + ("P" if paid else "N") for paid, truth in pairs)
    return {k: counts[k] for k in ("TP", "FP", "FN", "TN")}


# ---- the experience model ----

def ask_recorded(model: ExperienceModel, episodes: list[Episode], dist, batch: int = 256,
                 dreaming: bool = False) -> list[list[StepResult]]:
    """The predictions of each episode's steps, asked with their true history. `dreaming`: retrieval and draws
    are a dream's, not those of reports. Ranks share the work."""
    rows = [(e.task.text, e.steps[:i], step.state, step.shown_action)
            for e in episodes for i, step in enumerate(e.steps)]
    first, end = (len(rows) * rank // dist.world_size for rank in (dist.rank, dist.rank + 1))
    mine, predictions = rows[first:end], []
    with run.progress(len(mine), "experience model on recorded steps") as bar:
        for start in range(0, len(mine), batch):
            questions = model.questions(mine[start:start + batch], dreaming)
            predictions += model.predict(questions, dreaming)
            bar.update(len(questions))
    found = iter(dist.gather(predictions))
    return [list(islice(found, len(e.steps))) for e in episodes]


def granted(prediction: StepResult, state: str) -> bool:
    """Whether the imagined step of a refused action leaves the page `state`."""
    return not prediction.malformed and prediction.state != state


def experience_report(model: ExperienceModel, episodes: list[Episode], dist, batch: int = 256) -> dict:
    """Errors on recorded steps with their true history, beside the null, the nearest recorded transition.
    `near_miss_paid`: by the constraint that a counterfactual breaks."""
    asked = [(e, *row) for e, found in zip(episodes, ask_recorded(model, episodes, dist, batch))
             for row in zip([None, *e.steps], e.steps, found)]
    exact, f1, paid_by_label = defaultdict(list), defaultdict(list), defaultdict(list)
    played, refused, after_refusal, verdicts = [], [], [], []
    for episode, before, step, prediction in asked:
        paid = bool(prediction.reward)
        if episode.source == Source.COUNTERFACTUAL:
            paid_by_label[episode.label].append(paid)
            continue
        played.append(step)
        kind = model.env.audit.action_type(step.state, step.action) if step.valid else "refused"
        exact[kind].append(not prediction.malformed and prediction.state == step.next_state)
        f1[kind].append(word_f1(prediction.state, step.next_state))
        if kind == "refused":
            refused.append(granted(prediction, step.state))
        elif before and not before.valid:
            after_refusal.append(exact[kind][-1])
        if (step.done or paid) and not (step.done and episode.stop == StopReason.NOT_JUDGED):
            verdicts.append((paid, bool(step.reward)))
    flat, scores = sum(exact.values(), []), sum(f1.values(), [])
    mine = played[dist.rank::dist.world_size]
    near = model.lookup([s.state for s in mine], [s.shown_action for s in mine])
    null = dist.gather([(t.next_state if t else s.state) == s.next_state for t, s in zip(near, mine)])
    return {
        "transitions": len(flat), "answers": len(asked), "exact": share(flat),
        "f1": sum(scores) / max(1, len(scores)),
        "exact_of_lookup": share(null), "after_refusal": share(after_refusal),
        "by_action": {k: {**share(part), "f1": sum(f1[k]) / len(part)} for k, part in sorted(exact.items())},
        "reward_confusion": confusion(verdicts),
        "near_miss_paid": {k: share(part) for k, part in sorted(paid_by_label.items())},
        "refusals_accepted": share(refused), "malformed": share([p.malformed for *_, p in asked]),
    }


def replayed_inconsistencies(model: ExperienceModel, episodes: list[Episode], dist) -> dict:
    """Share of pages that contradict earlier ones of their episode, where the dream plays recorded actions
    and builds on its own pages. Ranks share the work."""
    episodes = episodes[dist.rank::dist.world_size]
    sessions, t = model.reset([e.task for e in episodes]), 0
    running = list(zip(sessions, episodes))
    while running := [(session, e) for session, e in running if t < len(e.steps)]:
        results = model.step([session for session, _ in running], [e.steps[t].action for _, e in running])
        running, t = [pair for pair, result in zip(running, results) if not result.done], t + 1
    pairs = dist.gather([model.env.audit.inconsistencies(session.inner) for session in sessions])
    checked, broken = sum(c for c, _ in pairs), sum(b for _, b in pairs)
    return share([True] * broken + [False] * (checked - broken))


def failed_probes(report: dict) -> list[str]:
    """The probes that did not pass, in words. A kind of near miss, which may have only twenty steps, fails
    where its whole interval is above the limit of all kinds."""
    if not report:
        return []
    paid = dict(report["near_miss_paid"])
    fits, n = paid.pop("none", {"n": 0}), sum(cell["n"] for cell in paid.values())
    near = {"n": n, "share": sum(cell["n"] * (cell["share"] or 0) for cell in paid.values()) / max(1, n)}
    probes = [("near misses are paid", near, NEAR_MISS_LIMIT, 1)]
    probes += [(f"what breaks '{k}' is paid", cell, NEAR_MISS_LIMIT, 1) for k, cell in paid.items()
               if cell["low"] > NEAR_MISS_LIMIT]
    probes += [("what fulfils the task is paid", fits, FITS_LIMIT, -1),
               ("answers are malformed", report["malformed"], MALFORMED_LIMIT, 1),
               ("a refused action changes the page", report["refusals_accepted"], REFUSAL_LIMIT, 1)]
    return [f"{text} in {cell['share']:.1%} of {cell['n']} (limit {limit:.0%})"
            for text, cell, limit, sign in probes if cell["n"] and sign * cell["share"] > sign * limit]


def probe_verdict(report: dict) -> str:
    """Which probes did not pass, and which there were no recorded steps for, in a line."""
    failed, paid = failed_probes(report), report["near_miss_paid"]
    recorded = {"near misses": paid.keys() - {"none"}, "what fulfils the task": "none" in paid,
                "refused actions": report["refusals_accepted"]["n"]}
    missing = [name for name, found in recorded.items() if not found]
    verdict = "PROBES NOT PASSED: " + "; ".join(failed) if failed else "probes passed"
    return verdict + f"; not probed, for the data hold none: {', '.join(missing)}" * bool(missing)


def experience_tables(report: dict) -> str:
    rows = report["by_action"] | {"all": report["exact"] | {"f1": report["f1"]}}
    rows["after a refused action"] = report["after_refusal"]
    rows["null: the nearest recorded step"] = report["exact_of_lookup"]
    probes = {f"paid: {k}": v for k, v in report["near_miss_paid"].items()}
    probes |= {"refused action accepted": report["refusals_accepted"], "malformed": report["malformed"]}
    tables = [run.summary_table([{name: key, **cells} for key, cells in table.items()])
              for name, table in {"exact next state": rows, "probe": probes}.items()]
    return "\n\n".join([*tables, probe_verdict(report)])


def theorem_1(report: dict, gamma: float) -> str:
    """The model-error term of DreamGym's Theorem 1 with R_max 1: a lower bound, for means on recorded data
    stand for its suprema."""
    if report["exact"]["share"] is None:
        return "Theorem 1: no recorded transitions, so nothing to estimate its errors from"
    wrong, judged = report["reward_confusion"], sum(report["reward_confusion"].values())
    eps_r, eps_p = (wrong["FP"] + wrong["FN"]) / max(1, judged), 1 - report["exact"]["share"]
    term, largest = 2 * (eps_r / (1 - gamma) + 2 * gamma * eps_p / (1 - gamma) ** 2), 1 / (1 - gamma)
    verdict = "vacuous: more than the largest return" if term > largest else "informative"
    return (f"Theorem 1 at gamma {gamma:g}: mean eps_R {eps_r:.4f} ({judged} judged steps), mean eps_P "
            f"{eps_p:.4f}, model-error term {term:.2f} of a largest return of {largest:.0f} ({verdict})")


# ---- policies ----

def policy_report(episodes: list[Episode], audit: Audit) -> dict:
    """Success with its interval, and more. `reward_confusion` is with the audit. Unjudged episodes count in
    `stops` only."""
    stops = Counter(e.stop.value for e in episodes)
    episodes = [e for e in episodes if e.stop != StopReason.NOT_JUDGED]
    verdicts = [(bool(s.reward), truth) for e in episodes for s in e.steps
                if s.valid and e.stop != StopReason.MALFORMED
                and (truth := audit.success(e.task, s.state, s.action, s.next_state)) is not None]
    n, transitions = max(1, len(episodes)), sum(len(e.steps) for e in episodes)
    pairs = [audit.inconsistencies(e.steps) for e in episodes]
    outcome = share([e.success for e in episodes], [e.task.id for e in episodes])
    return {
        "n": outcome["n"], "success": outcome["share"] or 0.0, "low": outcome["low"], "high": outcome["high"],
        "raw_score": sum(e.raw_score for e in episodes) / n, "transitions": transitions,
        "length": transitions / n, "stops": dict(stops),
        "invalid": sum(not s.valid for e in episodes for s in e.steps) / max(1, transitions),
        "inconsistent": sum(b for _, b in pairs) / max(1, sum(c for c, _ in pairs)),
        "reward_confusion": confusion(verdicts),
        "groups": by_group((e.task, e.success) for e in episodes),
    }


def by_group(results: Iterable[tuple[Task, bool]]) -> dict[str, dict]:
    groups = defaultdict(list)
    for task, result in results:
        for name in task.groups:
            groups[name].append((result, task.id))
    return {name: share(*zip(*rows)) for name, rows in sorted(groups.items())}


# ---- dream against world ----

def differences(step: Step, p: StepResult) -> tuple[bool, bool]:
    """Whether the dream's page differs from the recorded one, and its reward or end."""
    return (p.malformed or p.state != step.next_state,
            p.malformed or (p.reward, p.done) != (step.reward, step.done))


def first_difference(episode: Episode, predictions: Sequence[StepResult]) -> str:
    """What differs first where the dream is asked about each step of a real episode: "page", "reward" (or
    end, of the right page) or "". Of the last step the verdict alone counts."""
    if episode.steps[0].state != episode.task.start:
        return "page"
    for i, pair in enumerate(zip(episode.steps, predictions)):
        page, verdict = differences(*pair)
        if verdict or page and i + 1 < len(episode.steps):
            return "page" if page else "reward"
    return ""


def coupling_bound(model: ExperienceModel, real: list[Episode], dreamt: list[Episode], dist) -> dict:
    """|J_dream - J_real| <= P(the dream differs at some step of a real episode of this policy).

    Until the first difference both worlds play the same, so only episodes with a difference can end with
    another reward. Holds for rewards of 0 and 1, a deterministic world and a fixed replay buffer. `real` and
    `dreamt`: one policy, one temperature, the same tasks. The bound is split by what differs first;
    `wrong_page` and `wrong_reward` are shares of steps, `granted` of refused actions."""
    real = [e for e in real if e.stop != StopReason.NOT_JUDGED]
    asked = list(zip(real, ask_recorded(model, real, dist, dreaming=True)))
    found = [(e.task.id, first_difference(e, predictions)) for e, predictions in asked]
    pairs = [(e.task.id, *pair) for e, predictions in asked for pair in zip(e.steps, predictions)]
    wrong = [(task, *differences(step, p)) for task, step, p in pairs]
    of = lambda rows: share(*zip(*rows))
    return {"real": of([(e.success, e.task.id) for e in real]),
            "dream": of([(e.success, e.task.id) for e in dreamt]),
            "gap": bootstrap([outcomes(dreamt)], [outcomes(real)]),
            "bound": of([(bool(what), task) for task, what in found]),
            "bound_page": of([(what == "page", task) for task, what in found]),
            "bound_reward": of([(what == "reward", task) for task, what in found]),
            "wrong_page": of([(page, task) for task, page, _ in wrong]),
            "wrong_reward": of([(verdict, task) for task, _, verdict in wrong]),
            "granted": of([(granted(p, step.state), task) for task, step, p in pairs if not step.valid])}


# ---- tables over seeds ----

def outcomes(episodes: list[Episode]) -> dict[str, list[bool]]:
    """Success of each judged episode, by task."""
    found = defaultdict(list)
    for episode in episodes:
        if episode.stop != StopReason.NOT_JUDGED:
            found[episode.task.id].append(episode.success)
    return dict(found)


def bootstrap(seeds: Sequence[dict[str, Sequence[bool]]],
              base: Sequence[dict[str, Sequence[bool]]] = ()) -> dict:
    """Mean success and its 95 % interval from the `outcomes` of each seed; with `base` the difference to
    another policy, paired by seed and task. Draws seeds, and tasks that are the same for all drawn seeds,
    since all seeds have one set of tasks. Of three seeds this is too narrow: "t_low" and "t_high" are the t
    interval over the seeds' means. Raises ValueError where a seed's policies have no task in common."""
    names = sorted(set().union(*seeds))
    mean = lambda rows: np.mean(rows) if rows is not None else np.nan      # nan: a seed lacks this task
    against = base or [dict.fromkeys(names, [0])] * len(seeds)
    value_ST = np.array([[mean(tasks.get(k)) - mean(others.get(k)) for k in names]
                         for tasks, others in zip(seeds, against, strict=True)])
    if not value_ST.size or np.isnan(value_ST).all(1).any():
        raise ValueError("bootstrap: a seed has no task; expected the same test tasks of both policies")
    rng, (n_seeds, n_tasks) = np.random.default_rng(0), value_ST.shape
    pick = lambda n: rng.integers(n, size=n)
    drawn = [np.nanmean(value_ST[np.ix_(pick(n_seeds), pick(n_tasks))]) for _ in range(2000)]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    means = np.nanmean(value_ST, 1)
    found = {"mean": float(means.mean()), "low": float(low), "high": float(high),
             "seeds": n_seeds, "tasks": int((~np.isnan(value_ST)).sum())}
    if len(means) > 1:
        half = stats.t.ppf(0.975, len(means) - 1) * stats.sem(means)
        found |= {"t_low": found["mean"] - half, "t_high": found["mean"] + half}
    return found


def pass_at_k(wins: dict[str, Sequence[bool]]) -> dict[int, float]:
    """Unbiased pass@k over tasks (arXiv 2107.03374, Eq. 1) of `outcomes`, for k up to 16."""
    n = min(map(len, wins.values()), default=0)
    value = lambda c, k: 1.0 - math.comb(n - c, k) / math.comb(n, k)
    return {k: sum(value(sum(rows[:n]), k) for rows in wins.values()) / len(wins)
            for k in range(1, min(n, 16) + 1)}


def never_won(episodes: list[Episode]) -> dict:
    """Which tasks no episode won, and the success on the others. `episodes_each`: of the task with fewest."""
    wins = outcomes(episodes)
    tasks = {e.task.id: e.task for e in episodes if e.task.id in wins}
    return {
        "tasks": share([not any(rows) for rows in wins.values()]),
        "episodes_each": min(map(len, wins.values()), default=0),
        "groups": by_group((task, not any(wins[name])) for name, task in tasks.items()),
        "ids": sorted(name for name, rows in wins.items() if not any(rows)),
        "success_of_others": share([win for rows in wins.values() if any(rows) for win in rows]),
    }


def alarm(evaluations: list[dict], probes: dict) -> str:
    """A sentence with the likely cause where success in the real environment (else in the dream) has fallen
    below an earlier interval, else ""."""
    *earlier, now = evaluations or [{}]
    world = "real" if "real" in now else "dream"
    fell = [e for e in earlier if now[world]["success"] < e[world]["low"]]
    if not fell:
        return ""
    paid, causes = now["dream"]["reward_confusion"], failed_probes(probes)
    wrong = paid["FP"] / max(1, paid["FP"] + paid["TP"])
    if wrong > 0.1:
        causes.insert(0, f"{wrong:.0%} of what the experience model paid for is wrong by the audit")
    clean = "the probes are clean, so read dreamt episodes (evaluate.py --play 10)"
    moves = [f"{kind} success {fell[0][kind]['success']:.3f} -> {now[kind]['success']:.3f}"
             for kind in dict.fromkeys((world, "dream"))]
    return (f"since iteration {fell[0]['iteration']} RL has done harm: {', '.join(moves)}. "
            f"Likely cause: {'; '.join(causes) or clean}")
