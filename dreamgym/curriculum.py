"""Curriculum over tasks by reward variance (DreamGym, arXiv 2511.03773, Eq. 7): what to play, what to vary,
what to drop.

    curriculum = Curriculum(tasks)
    tasks = curriculum.sample(16, rng, max_generated_fraction=0.25)   # no task twice, at most 4 generated
    curriculum.update(episodes, iteration)        # GRPO; PPO gives clusters of tasks as well
    curriculum.add(write_tasks(experience_model, curriculum.seeds(4), ...))

A task whose episodes all fail or all succeed has value 0 and gives no gradient, so it fades. Its estimate
drifts back to the prior, because the policy changes: it is tried again later. The paper gives the value, the
high-value seeds and the bound lambda; draw, drift, prior and dropping are ours.
"""
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from scipy.cluster.vq import kmeans2

from dreamgym.episode import Episode, Task


def task_value(rewards: Sequence[float]) -> float:
    """Population variance of a group's rewards (Eq. 7)."""
    return float(np.var(rewards)) if max(rewards) > min(rewards) else 0.0    # np.var([0.1] * 3) is not 0


def cluster(vectors_ND: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Labels [N] of at most k clusters of vectors by direction, after their mean is subtracted (k-means++,
    Lloyd)."""
    x_ND = np.asarray(vectors_ND, np.float64)
    x_ND = x_ND - x_ND.mean(0)
    x_ND /= np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)
    k = min(k, len(np.unique(x_ND.round(9), axis=0)))          # k-means++ needs k different vectors
    return kmeans2(x_ND, k, iter=50, minit="++", rng=rng)[1]


class TaskStats(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A task and what is known of it. `value` counts only once it was measured (last >= 0)."""
    task: Task
    value: float = 0.0
    episodes: int = 0
    last: int = -1                 # iteration of the last measurement
    zeros: int = 0                 # measurements of 0 in a row, up to the last one


class Curriculum:
    """The tasks of a run and their values. `explore`: share of the draw that ignores values (1: ablation)."""
    decay = 0.95          # what an iteration leaves of the distance between value and prior
    prior = 0.25          # value of an unseen task: the largest for rewards 0 and 1
    newest_weight = 0.5   # weight of the newest group in the running value
    max_generated = 1000  # most generated tasks kept

    def __init__(self, tasks: Iterable[Task], explore: float = 0.1):
        tasks = list(tasks)
        self.stats = {task.id: TaskStats(task=task) for task in tasks}
        if not tasks or len(self.stats) != len(tasks):
            raise ValueError(f"Curriculum: {len(tasks)} tasks, {len(self.stats)} ids; expected no id twice")
        self.explore, self.iteration = explore, 0
        self.share_generated = 0.0                             # of the last sample

    # ---- choosing ----

    def _age_decay(self, stats: TaskStats) -> float:
        return self.decay ** (self.iteration - stats.last)

    def estimate(self, stats: TaskStats) -> float:
        if stats.last < 0:
            return self.prior
        return self.prior + (stats.value - self.prior) * self._age_decay(stats)

    def sample(self, n: int, rng: np.random.Generator, max_generated_fraction: float) -> list[Task]:
        """n different tasks, drawn in proportion to (1 - explore) * estimate + explore * mean estimate. At
        most floor(max_generated_fraction * n) are generated; those that are new or have variance come first.
        n original tasks must be there (prepare.py refuses less)."""
        room = math.floor(max_generated_fraction * n + 1e-9)   # 0.29 * 100 is 28.999...
        known = list(self.stats.values())
        value = np.array([self.estimate(stats) for stats in known])
        weight = (1 - self.explore) * value + self.explore * value.mean() + 1e-12
        # The order of Gumbel-perturbed log weights is a draw without replacement in proportion to them.
        key = np.log(weight) + rng.gumbel(size=len(known))
        # Few among many originals, new ones would hardly be drawn: those that may teach come first.
        fresh = [stats.task.generated and (stats.last < 0 or stats.value > 0) for stats in known]
        order = [known[i].task for i in np.lexsort((-key, np.logical_not(fresh)))]
        over = {task.id for task in [task for task in order if task.generated][room:]}
        chosen = [task for task in order if task.id not in over][:n]
        assert len(chosen) == n, (len(chosen), n)
        self.share_generated = sum(task.generated for task in chosen) / n
        return chosen

    def seeds(self, m: int) -> list[Task]:
        """At most m measured tasks of highest variance, as seeds of task generation (Eq. 6). A value decays
        to 0 with its age here."""
        measured = [stats for stats in self.stats.values() if stats.last >= 0 and stats.value > 0]
        measured.sort(key=lambda stats: -stats.value * self._age_decay(stats))
        return [stats.task for stats in measured[:m]]

    # ---- learning ----

    def update(self, episodes: Sequence[Episode], iteration: int,
               labels: Mapping[str, int] | None = None) -> float:
        """Measures the groups of an iteration's episodes (Eq. 7); returns the share of groups without
        variance. A group is the episodes of one task (GRPO), or, with `labels` (task id -> cluster), those of
        one cluster (PPO), whose tasks share the value. A group of one episode changes no value."""
        labels = labels or {episode.task.id: episode.task.id for episode in episodes}
        groups: dict[object, list[float]] = defaultdict(list)
        for episode in episodes:
            groups[labels[episode.task.id]].append(episode.reward)
            self.stats[episode.task.id].episodes += 1
        values = {name: task_value(rewards) for name, rewards in groups.items()}
        self.iteration = iteration
        for task_id, name in labels.items():
            stats = self.stats[task_id]
            if len(groups[name]) > 1:
                stats.value += (self.newest_weight if stats.last >= 0 else 1.0) * (values[name] - stats.value)
                stats.last, stats.zeros = iteration, stats.zeros + 1 if values[name] == 0 else 0
        return sum(value == 0 for value in values.values()) / max(1, len(values))

    def fade(self, task_ids: Iterable[str], iteration: int) -> None:
        """Tasks that were played without an episode to learn from: as if measured without variance."""
        self.iteration = iteration
        for task_id in task_ids:
            self.stats[task_id].value, self.stats[task_id].last = 0.0, iteration

    def add(self, tasks: Sequence[Task]) -> None:
        """Over `max_generated` the least valuable measured ones go, among zeros the longest run of them."""
        for task in tasks:
            assert task.generated and task.id not in self.stats, task.id
            self.stats[task.id] = TaskStats(task=task)

        def worth(stats: TaskStats) -> tuple[float, int]:
            measured = stats.value * self._age_decay(stats), -stats.zeros
            return measured if stats.last >= 0 else (self.prior, 0)

        generated = sorted((stats for stats in self.stats.values() if stats.task.generated), key=worth)
        for stats in generated[:max(0, len(generated) - self.max_generated)]:
            del self.stats[stats.task.id]

    # ---- state and log ----

    def summary(self) -> dict[str, float]:
        """For the log; value_mean and share_zero are of the measured tasks."""
        measured = [stats for stats in self.stats.values() if stats.last >= 0]
        return {"value_mean": sum(s.value for s in measured) / max(1, len(measured)),
                "share_zero": sum(s.zeros > 0 for s in measured) / max(1, len(measured)),
                "share_generated": self.share_generated, "tasks": len(self.stats),
                "visited": sum(s.episodes > 0 for s in self.stats.values()),
                "generated": sum(s.task.generated for s in self.stats.values())}

    def get_state(self) -> dict:
        """All that changes, as JSON values."""
        return {"iteration": self.iteration, "tasks": msgspec.to_builtins(list(self.stats.values()))}

    def set_state(self, state: dict) -> None:
        """Raises ValueError where the original tasks differ."""
        saved = msgspec.convert(state["tasks"], list[TaskStats])
        mine = {stats.task.id for stats in self.stats.values() if not stats.task.generated}
        theirs = {stats.task.id for stats in saved if not stats.task.generated}
        if mine != theirs:
            raise ValueError(f"Curriculum.set_state: other original tasks than in the saved run; it also had "
                             f"{sorted(theirs - mine)[:3]}, it did not have {sorted(mine - theirs)[:3]}")
        self.stats = {stats.task.id: stats for stats in saved}     # in the saved order, for draws go by it
        self.iteration = state["iteration"]
