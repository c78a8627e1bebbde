"""curriculum.py: each test says which bug it stops."""

import json

import numpy as np
import pytest

from dreamgym.curriculum import Curriculum, cluster, task_value


def names(n: int, prefix: str = "t") -> list[str]:
    return [f"{prefix}{i}" for i in range(n)]


def frequency(curriculum: Curriculum, n: int, draws: int = 400, seed: int = 0) -> dict[str, float]:
    rng, count = np.random.default_rng(seed), dict.fromkeys(curriculum.stats, 0)
    for _ in range(draws):
        for task in curriculum.pick(n, rng):
            count[task] += 1
    return {task: c / draws for task, c in count.items()}


def test_task_value_is_the_population_variance_with_its_maximum_at_half():
    """Stops: the sample variance (n - 1), which rises above 0.25; a value of a solved or a hopeless task that is not exactly 0."""
    values = [task_value([1.0] * s + [0.0] * (8 - s)) for s in range(9)]
    assert max(values) == values[4] == 0.25 and values[0] == values[8] == 0.0 and values == values[::-1]
    rng = np.random.default_rng(0)
    for _ in range(200):
        rewards = rng.integers(0, 2, size=int(rng.integers(1, 12))).tolist()
        mean = sum(rewards) / len(rewards)
        assert task_value(rewards) == pytest.approx(sum((r - mean) ** 2 for r in rewards) / len(rewards)) and task_value(rewards) <= 0.25
    assert task_value([0.1] * 3) == 0.0
    for wrong in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="task_value"):
            task_value(wrong)


def test_generated_share_never_exceeds_lambda():
    """Stops: a bound that holds only on average, rounds up, or is lost when the generated tasks are the most valuable; and a task picked twice."""
    rng = np.random.default_rng(1)
    for lam in (0.0, 0.29, 0.3, 1.0):
        for uniform in (False, True):
            curriculum = Curriculum(names(40), lam=lam, uniform=uniform)
            for i in range(60):
                curriculum.add_generated(f"g{i}", parent=f"t{i % 40}")
            most = 0.0
            for iteration in range(250):
                n = int(rng.integers(1, 31))
                chosen = curriculum.pick(n, rng)
                share = sum(curriculum.stats[task].generated for task in chosen) / n
                assert len(set(chosen)) == len(chosen) == n and share <= lam + 1e-12 and share == curriculum.last_share_generated
                most = max(most, share)
                for task in chosen:
                    curriculum.update(task, [0, 1, 0, 1] if task.startswith("g") else [0, 0, 0, 0], iteration)
            assert most >= 0.9 * lam  # the bound is used, too
    many = Curriculum(names(100), lam=0.29)
    for i in range(200):
        many.add_generated(f"g{i}", "t0")
        many.update(f"g{i}", [0, 1], 0)
    for task in names(100):
        many.update(task, [0, 0], 0)
    assert sum(task.startswith("g") for task in many.pick(100, rng)) == 29  # 0.29 * 100 is 28.999... in floating point
    assert not any(task.startswith("g") for task in many.pick(100, rng, lam=0.0)) and len(many.pick(150, rng, lam=0.5)) == 150


def test_tasks_without_variance_fade_and_return():
    """Stops: a curriculum that goes on with tasks that teach nothing, and one that never looks at a task again after the policy has changed."""
    curriculum = Curriculum(names(20), explore=0.0, decay=0.9)
    for task in names(20):
        curriculum.update(task, [0, 1, 0, 1] if task in names(10) else [0, 0, 0, 0] if task in names(15) else [1, 1, 1, 1], 0)
    now = frequency(curriculum, 5)
    assert all(now[f"t{i}"] == pytest.approx(0.5, abs=0.12) for i in range(10)) and all(now[f"t{i}"] == 0 for i in range(10, 20))
    estimates = []
    for iteration in range(1, 60):
        for task in names(10):
            curriculum.update(task, [0, 1], iteration)
        estimates.append(curriculum.estimate("t12"))
        assert curriculum.estimate("t12") == pytest.approx(0.25 * (1 - 0.9**iteration))
    later = frequency(curriculum, 5)
    assert estimates == sorted(estimates) and all(later[f"t{i}"] > 0.15 for i in range(20))
    curriculum.update("t12", [0, 0, 0], 60)
    assert curriculum.estimate("t12") == 0.0


def test_picks_follow_the_values_and_explore_lifts_the_least():
    """Stops: weights used as ranks, or the exploration share left out: for one task per pick the frequency is the weight."""
    rewards = {"t0": [0, 1], "t1": [0, 0, 0, 1], "t2": [0, 0], "t3": None}
    for explore in (0.0, 0.4):
        curriculum = Curriculum(names(4), explore=explore)
        for task, group in rewards.items():
            if group:
                curriculum.update(task, group, 0)
        value = np.array([0.25, 3 / 16, 0.0, 0.25])  # the unseen task stands at the prior
        want = (1 - explore) * value / value.sum() + explore / 4
        got = frequency(curriculum, 1, draws=6000)
        assert [got[task] for task in names(4)] == pytest.approx(want, abs=0.025)
        flat = Curriculum(names(4), explore=explore, uniform=True)
        flat.update("t2", [0, 0], 0)
        assert list(frequency(flat, 1, draws=6000).values()) == pytest.approx([0.25] * 4, abs=0.025)


def test_running_value_weighs_the_newest_group():
    """Stops: a first visit averaged with the prior, and one lucky group that erases what was known."""
    curriculum = Curriculum(["a"], fresh=0.25)
    curriculum.update("a", [0, 1], 3)
    assert curriculum.stats["a"].value == 0.25
    curriculum.update("a", [1, 1], 4)
    assert curriculum.stats["a"].value == pytest.approx(0.75 * 0.25) and curriculum.stats["a"].zeros == 1
    curriculum.update("a", [1], 5)  # nothing to measure
    assert curriculum.stats["a"].value == pytest.approx(0.75 * 0.25) and curriculum.stats["a"].visits == 3 and curriculum.stats["a"].last == 4


def test_update_clusters_shares_one_value_per_cluster():
    """Stops: PPO's single rollout per task taken as a group of one, whose variance 0 fades every task."""
    curriculum = Curriculum(["a", "b", "c", "d", "e"])
    cluster_of = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 2}
    curriculum.update_clusters(["a", "b", "d", "b"], [1.0, 0.0, 1.0, 0.0], cluster_of, iteration=2)
    shared = task_value([1.0, 0.0, 0.0])
    assert [curriculum.stats[task].value for task in "abc"] == pytest.approx([shared] * 3)
    assert [curriculum.stats[task].visits for task in "abcde"] == [1, 2, 0, 1, 0]
    assert curriculum.estimate("d") == curriculum.estimate("e") == 0.25  # one reward, and no reward
    with pytest.raises(ValueError, match="no cluster"):
        curriculum.update_clusters(["a"], [1.0], {}, 3)
    with pytest.raises(ValueError, match="one reward per episode"):
        curriculum.update_clusters(["a"], [1.0, 0.0], cluster_of, 3)


def test_cluster_finds_groups_behind_a_common_offset_and_repeats_itself():
    """Stops: embeddings of one language model all landing in one cluster, labels that change between runs, a crash on equal vectors."""
    rng = np.random.default_rng(3)
    truth = np.arange(120) % 4
    directions = np.concatenate([np.eye(8)[:2], -np.eye(8)[:2]])[truth]
    vectors = 50 + rng.uniform(1, 20, size=(120, 1)) * (directions + 0.05 * rng.standard_normal((120, 8)))
    labels = cluster(vectors, 4, np.random.default_rng(0))
    assert len({(a, b) for a, b in zip(truth, labels)}) == 4 == len(set(labels.tolist()))
    assert np.array_equal(labels, cluster(vectors, 4, np.random.default_rng(0)))
    assert set(cluster(np.ones((5, 4)), 3, rng).tolist()) == {0}
    assert len(set(cluster(vectors[:2], 5, rng).tolist())) == 2
    with pytest.raises(ValueError, match="cluster"):
        cluster(np.ones(4), 2, rng)


def test_seeds_are_the_most_valuable_known_tasks():
    """Stops: variations of tasks that nobody tried, that are solved, or whose value is old."""
    curriculum = Curriculum(names(6), decay=0.5)
    curriculum.update("t0", [0, 1], 0)
    for task, group in (("t1", [0, 0, 0, 1]), ("t2", [0, 0]), ("t3", [0, 0, 1, 1])):
        curriculum.update(task, group, 5)
    assert curriculum.seeds(2) == ["t3", "t1"] and curriculum.seeds(10) == ["t3", "t1", "t0"] and Curriculum(["a"]).seeds(3) == []


def test_generated_tasks_are_bounded_and_the_useless_go_first():
    """Stops: a task list that grows for ever, an original task dropped, a fresh variation dropped before it was tried."""
    curriculum = Curriculum(names(3), max_generated=4)
    for i in range(4):
        assert curriculum.add_generated(f"g{i}", "t0") is None
    for iteration in range(3):
        curriculum.update("t0", [0, 0], iteration)
        curriculum.update("g0", [0, 1], iteration)
        curriculum.update("g2", [0, 0], iteration)
    curriculum.update("g1", [1, 1], 3)
    assert [curriculum.add_generated(f"h{i}", "g0") for i in range(6)] == ["g2", "g1", "g0", "g3", "h0", "h1"]
    assert curriculum.summary()["generated"] == 4 and set(names(3)) <= set(curriculum.stats)
    with pytest.raises(ValueError, match="exists already"):
        curriculum.add_generated("h5", "t0")


def run(curriculum: Curriculum, start: int, end: int) -> list:
    log = []
    for iteration in range(start, end):
        rng = np.random.default_rng([7, iteration])
        chosen = curriculum.pick(5, rng)
        for task in chosen:
            curriculum.update(task, rng.integers(0, 2, size=3).tolist(), iteration)
        for i, seed in enumerate(curriculum.seeds(2)):
            log.append(curriculum.add_generated(f"g{iteration}.{i}", seed))  # the first may drop the task that the second came from
        log += [chosen, curriculum.summary()]
    return log


def test_resume_goes_on_as_if_nothing_had_happened():
    """Stops: state that is lost or reordered on its way through JSON: draws depend on the order of the tasks."""
    whole, first = Curriculum(names(12), max_generated=10), Curriculum(names(12), max_generated=10)
    want = run(whole, 0, 60)
    begun = run(first, 0, 25)
    state = json.loads(json.dumps(first.get_state()))
    resumed = Curriculum(reversed(names(12)), max_generated=10)
    resumed.set_state(state)
    assert resumed.get_state() == first.get_state()
    assert begun + run(resumed, 25, 60) == want and resumed.get_state() == whole.get_state()
    json.dumps(whole.summary())


def test_set_state_refuses_another_run():
    """Stops: resuming with another task file, whose statistics would be those of other tasks."""
    state = Curriculum(names(3)).get_state()
    with pytest.raises(ValueError, match=r"also had \['t2'\], it did not have \['x'\]"):
        Curriculum(["t0", "t1", "x"]).set_state(state)
    with pytest.raises(ValueError, match="schema is 9"):
        Curriculum(names(3)).set_state({**state, "schema": 9})
    del state["tasks"]["t1"]["zeros"]
    with pytest.raises(ValueError, match="task 't1' has fields"):
        Curriculum(names(3)).set_state(state)


def test_impossible_requests_are_refused():
    """Stops: fewer tasks than asked for without a word, which changes the batch size."""
    curriculum = Curriculum(names(5), lam=0.3)
    for i in range(9):
        curriculum.add_generated(f"g{i}", "t0")
    rng = np.random.default_rng(0)
    assert len(curriculum.pick(7, rng)) == 7
    for n in (0, 8):
        with pytest.raises(ValueError, match=f"n is {n}, expected 1 to"):
            curriculum.pick(n, rng)
    with pytest.raises(ValueError, match="no id twice"):
        Curriculum(["a", "a"])
    with pytest.raises(ValueError, match="lam is 1.5"):
        Curriculum(["a"], lam=1.5)
    with pytest.raises(ValueError, match="unknown task 'zz'"):
        curriculum.update("zz", [0, 1], 0)
