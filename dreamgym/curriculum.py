"""Curriculum over tasks by reward variance (DreamGym, arXiv 2511.03773, Eq. 7): which tasks to roll out, which to vary, which generated ones to drop.

    curriculum = Curriculum([task.id for task in tasks], lam=0.3)
    chosen = curriculum.pick(16, rng)                                   # no task twice, at most floor(0.3 * 16) generated ones
    curriculum.update(task_id, rewards, step)                           # per GRPO group; or update_clusters(...) for PPO
    for task_id in curriculum.seeds(4): curriculum.add_generated(new_id, parent=task_id)

A task whose rollouts all fail or all succeed has value 0 and gives GRPO no gradient, so it fades. With the time since its last visit its estimate
drifts back to the prior, because the policy changes meanwhile: it is tried again later. Unseen tasks stand at the prior, the largest value there is.

The paper gives the value (Eq. 7), the choice of high-value seeds and the bound lambda on generated tasks; draw, drift, prior and dropping are ours.
Left out on purpose: task texts (ids only), embeddings (`cluster` takes vectors), difficulty models.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

SCHEMA = 1


def task_value(rewards: Sequence[float]) -> float:
    """Population variance of the rewards of one task's rollouts (DreamGym, Eq. 7): for rewards 0 and 1 at most 0.25, where half of them succeed."""
    if not len(rewards) or not np.isfinite(rewards).all():
        raise ValueError(f"task_value: rewards are {list(rewards)}, expected at least one, all finite")
    if max(rewards) == min(rewards):
        return 0.0  # exactly: np.var([0.1] * 3) is not
    return float(np.var(np.asarray(rewards, np.float64)))


def cluster(vectors_ND: np.ndarray, k: int, rng: np.random.Generator, rounds: int = 50) -> np.ndarray:
    """Group N task embeddings into at most k clusters by direction: int64 labels [N] (k-means++ start, then Lloyd's rounds until nothing moves).

    Vectors are centred and normalised first, so the distance follows the cosine. Deterministic for a given state of `rng`.
    """
    vectors_ND = np.asarray(vectors_ND, np.float64)
    if vectors_ND.ndim != 2 or not len(vectors_ND) or k < 1 or not np.isfinite(vectors_ND).all():
        raise ValueError(f"cluster: vectors have shape {vectors_ND.shape} and k is {k}, expected finite (tasks, dim), at least one task and k >= 1")
    x_ND = vectors_ND - vectors_ND.mean(0)
    x_ND /= np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)
    centre_KD = x_ND[rng.integers(len(x_ND))][None]
    far_N = np.full(len(x_ND), np.inf)  # squared distance to the nearest centre
    while len(centre_KD) < k:
        far_N = np.minimum(far_N, ((x_ND - centre_KD[-1]) ** 2).sum(1))
        if far_N.max() < 1e-12:
            break  # fewer distinct vectors than clusters
        centre_KD = np.append(centre_KD, x_ND[rng.choice(len(x_ND), p=far_N / far_N.sum())][None], axis=0)
    label_N = np.full(len(x_ND), -1)
    for _ in range(rounds):
        distance_NK = (centre_KD**2).sum(1) - 2 * x_ND @ centre_KD.T  # less |x|^2, the same for all centres
        nearest_N = distance_NK.argmin(1)
        if (nearest_N == label_N).all():
            break
        label_N = nearest_N
        for j in range(len(centre_KD)):
            if (label_N == j).any():
                centre_KD[j] = x_ND[label_N == j].mean(0)
    return label_N


@dataclass
class TaskStats:
    """What is known of one task; `value` counts only after a visit that could measure it (last >= 0)."""

    generated: bool = False
    parent: str = ""
    value: float = 0.0
    visits: int = 0  # groups rolled out, or episodes with update_clusters
    last: int = -1  # iteration of the last measurement
    zeros: int = 0  # measurements of 0 in a row, up to the last one


class Curriculum:
    """Values of tasks, and the choice of the next ones.

    lam: largest share of generated tasks in one `pick` (lambda of the paper, which gives no number). explore: share of the draw that ignores values.
    decay: what an iteration leaves of the distance between a value and the prior. prior: value of an unseen task; 0.25 = the maximum for rewards 0
    and 1, and it scales with the square of the reward. fresh: weight of the newest group in a task's running value. max_generated: most of them kept.
    uniform: draw without regard to the values (the ablation "no curriculum"); lam holds all the same.
    """

    def __init__(
        self, tasks: Iterable[str], lam: float = 0.3, explore: float = 0.1, decay: float = 0.95, prior: float = 0.25, fresh: float = 0.5,
        max_generated: int = 1000, uniform: bool = False,
    ) -> None:
        ids = list(tasks)
        self.stats = {task_id: TaskStats() for task_id in ids}
        if not ids or len(self.stats) != len(ids):
            raise ValueError(f"Curriculum: {len(ids)} task ids, {len(self.stats)} of them different; expected at least one and no id twice")
        for name, number in (("lam", lam), ("explore", explore), ("decay", decay)):
            if not 0 <= number <= 1:
                raise ValueError(f"Curriculum: {name} is {number}, expected 0 to 1")
        if not (prior > 0 and 0 < fresh <= 1 and max_generated >= 1):
            found = f"prior {prior}, fresh {fresh}, max_generated {max_generated}"
            raise ValueError(f"Curriculum: {found}; expected prior > 0, 0 < fresh <= 1 and max_generated >= 1")
        self.lam, self.explore, self.decay, self.prior, self.fresh = lam, explore, decay, prior, fresh
        self.max_generated, self.uniform = max_generated, uniform
        self.iteration = 0
        self.last_share_generated = 0.0

    # ---- choosing

    def estimate(self, task_id: str) -> float:
        """Optimistic value for picking: the measured one, drifting to the prior with the iterations since; the prior if there is none."""
        stats = self.stats[task_id]
        return self.prior + (stats.value - self.prior) * self._kept(stats) if stats.last >= 0 else self.prior

    def _kept(self, stats: TaskStats) -> float:
        return self.decay ** (self.iteration - stats.last)

    def pick(self, n: int, rng: np.random.Generator, lam: float | None = None) -> list[str]:
        """n different task ids, drawn in proportion to (1 - explore) * estimate + explore * mean estimate; at most floor(lam * n) of them generated.

        lam (default: the curriculum's): the bound holds for every single call, so with lam * n < 1 no generated task is ever picked; what is generated
        is used at once, because the policy it was made for changes. Raises ValueError when the tasks do not suffice.
        """
        lam = self.lam if lam is None else lam
        ids = list(self.stats)
        is_generated = np.array([self.stats[task_id].generated for task_id in ids])
        generated = min(math.floor(lam * n + 1e-9), int(is_generated.sum()))  # 0.29 * 100 is 28.999...
        originals = int((~is_generated).sum())
        if not 1 <= n <= originals + generated:
            supply = f"{originals} original tasks and at most {generated} of {len(ids) - originals} generated ones"
            raise ValueError(f"Curriculum.pick: n is {n}, expected 1 to {originals + generated}: there are {supply}; lower n or raise lam")
        value = np.ones(len(ids)) if self.uniform else np.array([self.estimate(task_id) for task_id in ids])
        weight = (1 - self.explore) * value + self.explore * value.mean() + 1e-12
        # The largest Gumbel-perturbed log weights are a draw without replacement in proportion to the weights.
        order = np.argsort(-(np.log(weight) + rng.gumbel(size=len(ids))), kind="stable")
        chosen = np.concatenate([order[is_generated[order]][:generated], order[~is_generated[order]][:n - generated]])
        self.last_share_generated = generated / n
        return [ids[i] for i in rng.permutation(chosen)]

    def seeds(self, m: int) -> list[str]:
        """The tasks of highest measured value, at most m, as seeds of task generation (DreamGym, Eq. 6).

        Here a value decays to 0 with its age, unlike in `pick`: a seed should be known to be of use. Unseen tasks and zero values are never seeds.
        """
        scored = [(stats.value * self._kept(stats), task_id) for task_id, stats in self.stats.items() if stats.last >= 0 and stats.value > 0]
        return [task_id for _, task_id in sorted(scored, key=lambda row: -row[0])[:m]]

    # ---- learning

    def update(self, task_id: str, rewards: Sequence[float], iteration: int) -> None:
        """Record the rewards of one group of rollouts of a task. A single reward has no variance to measure: the visit counts, the value stays."""
        stats = self._known(task_id)
        self._measure([task_id], rewards, iteration)
        stats.visits += 1

    def update_clusters(self, task_ids: Sequence[str], rewards: Sequence[float], cluster_of: Mapping[str, int], iteration: int) -> None:
        """Record one reward per episode where tasks have no group of their own (PPO): a cluster's rewards are one group, its tasks share the value.

        cluster_of: cluster of every task, see `cluster`; tasks that were not rolled out get the value, too. A single reward leaves it as it is.
        """
        if len(task_ids) != len(rewards):
            raise ValueError(f"Curriculum.update_clusters: {len(task_ids)} task ids and {len(rewards)} rewards, expected one reward per episode")
        groups: dict[int, list[float]] = {}
        for task_id, reward in zip(task_ids, rewards):
            self._known(task_id).visits += 1
            if task_id not in cluster_of:
                raise ValueError(f"Curriculum.update_clusters: task {task_id!r} has no cluster")
            groups.setdefault(cluster_of[task_id], []).append(reward)
        for label, group in groups.items():
            self._measure([task_id for task_id in self.stats if cluster_of.get(task_id) == label], group, iteration)

    def _known(self, task_id: str) -> TaskStats:
        if task_id not in self.stats:
            raise ValueError(f"Curriculum: unknown task {task_id!r}, expected one of its {len(self.stats)} tasks, original or from add_generated")
        return self.stats[task_id]

    def _measure(self, task_ids: list[str], rewards: Sequence[float], iteration: int) -> None:
        value = task_value(rewards)
        assert iteration >= 0, iteration
        self.iteration = max(self.iteration, iteration)
        if len(rewards) < 2:
            return
        for task_id in task_ids:
            stats = self.stats[task_id]
            weight = self.fresh if stats.last >= 0 else 1.0
            stats.value += weight * (value - stats.value)
            stats.last, stats.zeros = iteration, stats.zeros + 1 if value == 0 else 0

    def add_generated(self, task_id: str, parent: str) -> str | None:
        """Take a generated task in. Over `max_generated` one is dropped and its id returned, so that the caller can forget its text.

        Dropped is the one of lowest measured value, decayed as in `seeds`; among zeros the longest run of them; a task not yet measured goes last.
        `parent` is a label: the task of that name may have been dropped since it was a seed.
        """
        if task_id in self.stats:
            raise ValueError(f"Curriculum.add_generated: task {task_id!r} exists already, expected a new id")
        self.stats[task_id] = TaskStats(generated=True, parent=parent)
        generated = [(task_id, stats) for task_id, stats in self.stats.items() if stats.generated]
        if len(generated) <= self.max_generated:
            return None
        dropped, _ = min(generated, key=lambda row: (row[1].value * self._kept(row[1]), -row[1].zeros) if row[1].last >= 0 else (self.prior, 0))
        del self.stats[dropped]
        return dropped

    # ---- state and log

    def summary(self) -> dict[str, float]:
        """For the log: mean value of the measured tasks, share of them last measured 0, share of generated tasks in the last pick, and counts."""
        measured = [stats for stats in self.stats.values() if stats.last >= 0]
        return {
            "value_mean": float(np.mean([stats.value for stats in measured])) if measured else 0.0,
            "share_zero": float(np.mean([stats.zeros > 0 for stats in measured])) if measured else 0.0,
            "share_generated": self.last_share_generated,
            "visited": sum(stats.visits > 0 for stats in self.stats.values()),
            "tasks": len(self.stats),
            "generated": sum(stats.generated for stats in self.stats.values()),
        }

    def get_state(self) -> dict:
        """All that changes, ready for JSON; settings are not in it."""
        return {"schema": SCHEMA, "iteration": self.iteration, "tasks": {task_id: asdict(stats) for task_id, stats in self.stats.items()}}

    def set_state(self, state: dict) -> None:
        """Go on from `get_state`, in a curriculum made with the same original tasks; ValueError where they differ."""
        if state.get("schema") != SCHEMA:
            raise ValueError(f"Curriculum.set_state: schema is {state.get('schema')!r}, expected {SCHEMA}")
        names = {field.name for field in fields(TaskStats)}
        for task_id, row in state["tasks"].items():
            if row.keys() != names:
                raise ValueError(f"Curriculum.set_state: task {task_id!r} has fields {sorted(row)}, expected {sorted(names)}")
        mine = {task_id for task_id, stats in self.stats.items() if not stats.generated}
        theirs = {task_id for task_id, row in state["tasks"].items() if not row["generated"]}
        if mine != theirs:
            missing, extra = sorted(theirs - mine)[:3], sorted(mine - theirs)[:3]
            raise ValueError(f"Curriculum.set_state: other original tasks than in the saved run; it also had {missing}, it did not have {extra}")
        # The saved order, for draws are made by position.
        self.stats = {task_id: TaskStats(**row) for task_id, row in state["tasks"].items()}
        self.iteration = state["iteration"]
