"""curriculum.py: each test says which bug it stops."""
import json
import math

import numpy as np
import pytest

from dreamgym.curriculum import Curriculum, cluster, task_value
from dreamgym.episode import Episode, Step, Task


def task(name: str) -> Task:
    generated = name.startswith("g")
    return Task(id=name, text=f"text of {name}", generated=generated, parent="t0" * generated)


def tasks(n: int, prefix: str = "t") -> list[Task]:
    return [task(f"{prefix}{i}") for i in range(n)]


def played(**rewards: list[float]) -> list[Episode]:
    return [Episode(id=f"{name}-{i}", task=task(name),
                    steps=[Step(state="", action="", next_state="", reward=reward)])
            for name, group in rewards.items() for i, reward in enumerate(group)]


def frequency(curriculum: Curriculum, n: int, draws: int = 400) -> dict[str, float]:
    rng, count = np.random.default_rng(0), dict.fromkeys(curriculum.stats, 0)
    for _ in range(draws):
        for chosen in curriculum.sample(n, rng):
            count[chosen.id] += 1
    return {name: c / draws for name, c in count.items()}


def value(curriculum: Curriculum, names: str) -> list[float]:
    return [curriculum.stats[name].value for name in names]


def test_task_value_is_the_population_variance():
    """Stops: the sample variance (n - 1), which rises above 0.25; a solved task whose value is not exactly
    0."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        rewards = rng.integers(0, 2, size=int(rng.integers(1, 12))).tolist()
        mean = sum(rewards) / len(rewards)
        assert task_value(rewards) == pytest.approx(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    assert task_value([0, 1, 0, 1]) == 0.25 and task_value([0.1] * 3) == 0.0
    for wrong in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="task_value"):
            task_value(wrong)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.29, 0.3, 1.0])
def test_generated_share_never_exceeds_lambda(fraction, uniform):
    """Stops: a bound that holds on average only, rounds up, or is lost where generated tasks are the most
    valuable."""
    rng = np.random.default_rng(1)
    curriculum = Curriculum(tasks(40), fraction, explore=1.0 if uniform else 0.1)
    curriculum.add(tasks(60, "g"))
    most = 0.0
    for iteration in range(60):
        n = 100 if iteration == 0 and fraction == 1 else int(rng.integers(1, 31))
        chosen = curriculum.sample(n, rng)
        generated = sum(t.generated for t in chosen)
        assert len({t.id for t in chosen}) == n and generated <= math.floor(n * fraction + 1e-9)
        assert curriculum.summary()["share_generated"] == generated / n
        most = max(most, generated / n)
        curriculum.update(played(**{t.id: [0, 1] if t.generated else [0, 0] for t in chosen}), iteration)
    assert most >= (0.6 if uniform or fraction == 1 else 0.9) * fraction          # the bound is reached
    assert not any(t.generated for t in curriculum.sample(40, rng, max_generated_fraction=0.0))


def test_the_bound_rounds_down_once():
    """Stops: floor(0.29 * 100) = 28, because the product is 28.999... in floating point."""
    curriculum = Curriculum(tasks(100), 0.29, explore=0.0)
    curriculum.add(tasks(200, "g"))
    curriculum.update(played(**{t.id: [0, int(t.generated)] for t in tasks(100) + tasks(200, "g")}), 0)
    assert sum(t.generated for t in curriculum.sample(100, np.random.default_rng(0))) == 29


def test_worthless_generated_tasks_fade():
    """Stops: lambda as a quota, which gave tasks measured 0 six times in a row a quarter of all draws for
    ever."""
    curriculum = Curriculum(tasks(300), 0.25)
    curriculum.add(tasks(40, "g"))
    for iteration in range(6):
        curriculum.update(played(**{t.id: [0, 0] for t in tasks(40, "g")}), iteration)
    now = frequency(curriculum, 16)
    assert sum(share for name, share in now.items() if name.startswith("g")) < 0.4  # the quota gave 4


def test_tasks_without_variance_fade_and_return():
    """Stops: tasks that teach nothing drawn again and again, or never again after the policy has changed."""
    curriculum = Curriculum(tasks(20), explore=0.0, decay=0.9)
    groups = {f"t{i}": [0, 1, 0, 1] if i < 10 else [0] * 4 if i < 15 else [1] * 4 for i in range(20)}
    curriculum.update(played(**groups), 0)
    now = frequency(curriculum, 5)
    assert all(now[f"t{i}"] == pytest.approx(0.5 * (i < 10), abs=0.12 * (i < 10)) for i in range(20))
    for iteration in range(1, 60):
        curriculum.update(played(**{f"t{i}": [0, 1] for i in range(10)}), iteration)
        assert curriculum.estimate("t12") == pytest.approx(0.25 * (1 - 0.9**iteration))
    assert all(share > 0.15 for share in frequency(curriculum, 5).values())


@pytest.mark.parametrize("explore", [0.0, 0.4, 1.0])
def test_draws_follow_the_values(explore):
    """Stops: weights used as ranks, an exploration share left out: for one task a draw the frequency is the
    weight."""
    curriculum = Curriculum([*tasks(3), task("unseen")], explore=explore)
    curriculum.update(played(t0=[0, 1], t1=[0, 0, 0, 1], t2=[0, 0]), 0)
    weight = np.array([0.25, 3 / 16, 0.0, 0.25])                               # the unseen one has the prior
    want = (1 - explore) * weight / weight.sum() + explore / 4
    assert list(frequency(curriculum, 1, draws=6000).values()) == pytest.approx(want, abs=0.025)


def test_the_running_value_weighs_the_newest_group():
    """Stops: a first value averaged with the prior, one lucky group that erases what was known, a group of
    one episode taken for a group without variance."""
    curriculum = Curriculum(tasks(1), fresh=0.25)
    for iteration, group, want in ((3, [0, 1], 0.25), (4, [1, 1], 0.1875), (5, [1], 0.1875)):
        curriculum.update(played(t0=group), iteration)
        assert value(curriculum, ["t0"]) == pytest.approx([want])
    stats = curriculum.stats["t0"]
    assert (stats.zeros, stats.episodes, stats.last, curriculum.iteration) == (1, 5, 4, 5)


@pytest.mark.parametrize("labels,want,share", [
    (None, {"a": 0.0, "b": 0.25, "c": 0.0, "d": 0.0, "e": 0.0}, 2 / 3),
    (dict(zip("abcde", [0, 0, 0, 1, 2])), {"a": 0.1875, "b": 0.1875, "c": 0.1875, "d": 0.0, "e": 0.0}, 1 / 2),
])
def test_groups_are_tasks_or_clusters_of_tasks(labels, want, share):
    """Stops: PPO's few episodes per task taken as groups of their own, whose variance 0 fades every task."""
    curriculum = Curriculum([task(name) for name in "abcde"])
    episodes = played(a=[0, 0], b=[0, 1], d=[1])
    assert curriculum.update(episodes[::-1], 2, labels) == share
    assert {name: curriculum.stats[name].value for name in "abcde"} == pytest.approx(want)
    assert curriculum.estimate("d") == curriculum.estimate("e") == 0.25  # one reward, and none
    assert curriculum.update([], 3, labels) == 0.0


def test_cluster_finds_directions_and_repeats_itself():
    """Stops: embeddings with a common offset all in one cluster, labels that change between runs, a crash on
    equal vectors."""
    rng = np.random.default_rng(3)
    truth = np.arange(120) % 4
    directions = np.concatenate([np.eye(8)[:2], -np.eye(8)[:2]])[truth]
    vectors = 50 + rng.uniform(1, 20, size=(120, 1)) * (directions + 0.05 * rng.standard_normal((120, 8)))
    labels = cluster(vectors, 4, np.random.default_rng(0))
    assert len(set(zip(truth.tolist(), labels.tolist()))) == 4 == len(set(labels.tolist()))
    assert np.array_equal(labels, cluster(vectors, 4, np.random.default_rng(0)))
    assert set(cluster(np.ones((5, 4)), 3, rng).tolist()) == {0}
    assert len(set(cluster(vectors[:2], 5, rng).tolist())) == 2
    with pytest.raises(ValueError, match="cluster"):
        cluster(np.ones(4), 2, rng)


def test_seeds_are_the_most_valuable_known_tasks():
    """Stops: variations of tasks that nobody tried, that are solved, or whose value is old."""
    curriculum = Curriculum(tasks(6), decay=0.5)
    assert curriculum.seeds(3) == []
    curriculum.update(played(t0=[0, 1]), 0)
    curriculum.update(played(t1=[0, 0, 0, 1], t2=[0, 0], t3=[0, 0, 1, 1]), 5)
    assert curriculum.seeds(2) == [task("t3"), task("t1")] and curriculum.seeds(9)[2:] == [task("t0")]


def test_generated_tasks_are_bounded_and_the_worthless_go_first():
    """Stops: tasks that grow for ever, an original task dropped, a fresh variation dropped before it was
    tried."""
    curriculum, gone = Curriculum(tasks(3), max_generated=4), []
    curriculum.add(tasks(4, "g"))
    for iteration in range(3):
        curriculum.update(played(t0=[0, 0], g0=[0, 1], g2=[0, 0]), iteration)
    curriculum.update(played(g1=[1, 1]), 3)
    for i in range(4):
        before = set(curriculum.stats)
        curriculum.add([task(f"gg{i}")])
        gone += before - set(curriculum.stats)
    assert gone == ["g2", "g1", "g0", "g3"] and {"t0", "t1", "t2"} <= set(curriculum.stats)
    for wrong in ("gg3", "t9"):
        with pytest.raises(ValueError, match=f"'{wrong}' exists already or is not a generated one"):
            curriculum.add([task(wrong)])


def run(curriculum: Curriculum, start: int, end: int) -> list:
    log = []
    for iteration in range(start, end):
        rng = np.random.default_rng([7, iteration])
        chosen = curriculum.sample(5, rng)
        curriculum.update(played(**{t.id: rng.integers(0, 2, size=3).tolist() for t in chosen}), iteration)
        curriculum.add([task(f"g{iteration}_{i}") for i, _ in enumerate(curriculum.seeds(2))])
        log += [chosen, curriculum.summary()]
    return log


def test_a_resumed_run_goes_on_as_if_nothing_had_happened():
    """Stops: state or generated tasks lost or reordered on their way through JSON: draws depend on the
    order."""
    whole, first = Curriculum(tasks(12), max_generated=10), Curriculum(tasks(12), max_generated=10)
    resumed = Curriculum(tasks(12)[::-1], max_generated=10)
    want, begun = run(whole, 0, 60), run(first, 0, 25)
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    assert begun + run(resumed, 25, 60) == want and resumed.get_state() == whole.get_state()


def test_what_does_not_fit_is_refused():
    """Stops: a resume with another task file, a smaller batch than asked for, an episode of an unknown
    task."""
    curriculum, rng = Curriculum(tasks(5), 0.3), np.random.default_rng(0)
    state = json.loads(json.dumps(curriculum.get_state()))
    other = Curriculum([*tasks(4), task("x")])
    broken = state | {"tasks": [{**state["tasks"][0], "zeros": "1"}]}
    curriculum.add(tasks(9, "g"))
    assert len(curriculum.sample(7, rng)) == 7
    for call, message in (
        (lambda: other.set_state(state), r"also had \['t4'\], it did not have \['x'\]"),
        (lambda: curriculum.set_state(state | {"schema": 9}), "schema is 9"),
        (lambda: curriculum.set_state(broken), "int.*zeros"),
        (lambda: curriculum.sample(0, rng), "n is 0, expected 1 to"),
        (lambda: curriculum.sample(8, rng), "n is 8, expected 1 to 7"),
        (lambda: Curriculum(tasks(2) * 2), "no id twice"),
        (lambda: Curriculum(tasks(1), 1.5), "max_generated_fraction is 1.5"),
        (lambda: curriculum.update(played(zz=[0, 1]), 0), "'zz' is not one of the 14 tasks"),
        (lambda: curriculum.update(played(t0=[0, 1]), 0, {}), "has no cluster"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert curriculum.stats["t0"].episodes == 0
