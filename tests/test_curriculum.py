"""curriculum.py: each test says which bug it stops."""
import json
import math

import numpy as np
import pytest

from dreamgym.curriculum import Curriculum, cluster
from dreamgym.episode import Episode, Task
from tests.conftest import one_step


def task(name: str) -> Task:
    generated = name.startswith("g")
    return Task(id=name, text=f"text of {name}", generated=generated, parent="t0" * generated)


def tasks(n: int, prefix: str = "t") -> list[Task]:
    return [task(f"{prefix}{i}") for i in range(n)]


def curriculum_of(names, *args, generated=0, **changed) -> Curriculum:
    """A curriculum of n tasks (or of these), with generated ones and other constants."""
    curriculum = Curriculum(tasks(names) if isinstance(names, int) else map(task, names), *args)
    vars(curriculum).update(changed)
    curriculum.add(tasks(generated, "g"))
    return curriculum


def played(**rewards: list[float]) -> list[Episode]:
    return [one_step(f"{name}-{i}", task(name), reward)
            for name, group in rewards.items() for i, reward in enumerate(group)]


def frequency(curriculum: Curriculum, n: int, draws: int = 400) -> dict[str, float]:
    rng, count = np.random.default_rng(0), dict.fromkeys(curriculum.stats, 0)
    for _ in range(draws):
        for chosen in curriculum.sample(n, rng, 0.25):
            count[chosen.id] += 1
    return {name: c / draws for name, c in count.items()}


@pytest.mark.parametrize("explore", [0.1, 1.0])
@pytest.mark.parametrize("fraction", [0.0, 0.29, 0.3, 1.0])
def test_generated_share_never_exceeds_lambda(fraction, explore):
    """A bound that holds on average only, rounds up."""
    rng, curriculum = np.random.default_rng(1), curriculum_of(40, explore, generated=60)
    most = 0.0
    for iteration in range(60):
        n = 100 if iteration == 0 and fraction == 1 else int(rng.integers(1, 31))
        chosen = curriculum.sample(n, rng, fraction)
        generated = sum(t.generated for t in chosen)
        assert len({t.id for t in chosen}) == n and generated <= math.floor(n * fraction + 1e-9)
        assert curriculum.summary()["share_generated"] == generated / n
        most = max(most, generated / n)
        curriculum.update(played(**{t.id: [0, 1] if t.generated else [0, 0] for t in chosen}), iteration)
    assert most >= (0.6 if explore == 1 or fraction == 1 else 0.9) * fraction          # the bound is reached
    assert not any(t.generated for t in curriculum.sample(40, rng, 0.0))
    large = curriculum_of(100, 0.0, generated=200)
    large.update(played(**{t.id: [0, int(t.generated)] for t in tasks(100) + tasks(200, "g")}), 0)
    assert sum(t.generated for t in large.sample(100, np.random.default_rng(0), 0.29)) == 29


def test_new_generated_tasks_are_played():
    """A bound that is never near: 2 % of the draws were generated, since 1,400 originals have the same prior."""
    curriculum = curriculum_of(1400, generated=10)
    assert sum(t.generated for t in curriculum.sample(16, np.random.default_rng(0), 0.25)) == 4
    curriculum.update(played(**{f"g{i}": [0, int(i == 9)] for i in range(8)} | {"g9": [1, 1]}), 0)
    for seed in range(5):
        drawn = {t.id for t in curriculum.sample(16, np.random.default_rng(seed), 0.25) if t.generated}
        assert "g8" in drawn and len(drawn) < 3                     # the only one that is not known to be worthless


def test_worthless_generated_tasks_fade():
    """Lambda as a quota: tasks measured 0 took a quarter of all draws for ever."""
    curriculum = curriculum_of(300, generated=40)
    for iteration in range(6):
        curriculum.update(played(**{t.id: [0, 0] for t in tasks(40, "g")}), iteration)
    now = frequency(curriculum, 16)
    assert sum(share for name, share in now.items() if name.startswith("g")) < 0.4  # the quota gave 4


def test_tasks_without_variance_fade_and_return():
    """Tasks that teach nothing drawn again and again, or never again after the policy has changed."""
    curriculum = curriculum_of(20, 0.0, decay=0.9)
    groups = {f"t{i}": [0, 1, 0, 1] if i < 10 else [0] * 4 if i < 15 else [1] * 4 for i in range(20)}
    curriculum.update(played(**groups), 0)
    now = frequency(curriculum, 5)
    assert all(now[f"t{i}"] == pytest.approx(0.5 * (i < 10), abs=0.12 * (i < 10)) for i in range(20))
    for iteration in range(1, 60):
        curriculum.update(played(**{f"t{i}": [0, 1] for i in range(10)}), iteration)
        assert curriculum.estimate(curriculum.stats["t12"]) == pytest.approx(0.25 * (1 - 0.9**iteration))
    assert all(share > 0.15 for share in frequency(curriculum, 5).values())


@pytest.mark.parametrize("explore", [0.0, 0.4, 1.0])
def test_draws_follow_the_values(explore):
    curriculum = curriculum_of(4, explore)
    curriculum.update(played(t0=[0, 1], t1=[0, 0, 0, 1], t2=[0, 0]), 0)
    weight = np.array([0.25, 3 / 16, 0.0, 0.25])                               # the unseen one has the prior
    want = (1 - explore) * weight / weight.sum() + explore / 4
    assert list(frequency(curriculum, 1, draws=6000).values()) == pytest.approx(want, abs=0.025)


def test_the_running_value_weighs_the_newest_group():
    """The sample variance in place of the population's; one lucky group that erases what was known."""
    curriculum = curriculum_of(1, newest_weight=0.25)
    stats = curriculum.stats["t0"]
    for iteration, group, want in ((3, [0, 1], 0.25), (4, [1, 1], 0.1875), (5, [1], 0.1875)):
        curriculum.update(played(t0=group), iteration)
        assert stats.value == pytest.approx(want)
    assert (stats.zeros, stats.episodes, stats.last, curriculum.iteration) == (1, 5, 4, 5)


@pytest.mark.parametrize("labels,want,share", [
    (None, [0.0, 0.25, 0.0, 0.0, 0.0], 2 / 3),
    (dict(zip("abcde", [0, 0, 0, 1, 2])), [0.1875, 0.1875, 0.1875, 0.0, 0.0], 1 / 2),
])
def test_groups_are_tasks_or_clusters_of_tasks(labels, want, share):
    """PPO's few episodes per task taken as groups of their own, whose variance 0 fades every task."""
    curriculum = curriculum_of("abcde")
    episodes = played(a=[0, 0], b=[0, 1], d=[1])
    assert curriculum.update(episodes[::-1], 2, labels) == share
    assert [stats.value for stats in curriculum.stats.values()] == pytest.approx(want)
    assert all(curriculum.estimate(curriculum.stats[name]) == 0.25 for name in "de")  # one reward, and none
    assert curriculum.update([], 3, labels) == 0.0


def test_cluster_finds_directions_and_repeats_itself():
    """Embeddings with a common offset all in one cluster, and labels that change between runs."""
    rng = np.random.default_rng(3)
    truth = np.arange(120) % 4
    directions = np.concatenate([np.eye(8)[:2], -np.eye(8)[:2]])[truth]
    vectors = 50 + rng.uniform(1, 20, size=(120, 1)) * (directions + 0.05 * rng.standard_normal((120, 8)))
    labels = cluster(vectors, 4, np.random.default_rng(0))
    assert len(set(zip(truth.tolist(), labels.tolist()))) == 4 == len(set(labels.tolist()))
    assert np.array_equal(labels, cluster(vectors, 4, np.random.default_rng(0)))
    assert set(cluster(np.ones((5, 4)), 3, rng).tolist()) == {0}
    assert len(set(cluster(vectors[:2], 5, rng).tolist())) == 2


def test_seeds_are_the_most_valuable_known_tasks():
    curriculum = curriculum_of(6, decay=0.5)
    assert curriculum.seeds(3) == []
    curriculum.update(played(t0=[0, 1]), 0)
    curriculum.update(played(t1=[0, 0, 0, 1], t2=[0, 0], t3=[0, 0, 1, 1]), 5)
    assert curriculum.seeds(2) == [task("t3"), task("t1")] and curriculum.seeds(9)[2:] == [task("t0")]


def test_generated_tasks_are_bounded_and_the_worthless_go_first():
    curriculum, gone = curriculum_of(3, generated=4, max_generated=4), []
    for iteration in range(3):
        curriculum.update(played(t0=[0, 0], g0=[0, 1], g2=[0, 0]), iteration)
    curriculum.update(played(g1=[1, 1]), 3)
    for i in range(4):
        before = set(curriculum.stats)
        curriculum.add([task(f"gg{i}")])
        gone += before - set(curriculum.stats)
    assert gone == ["g2", "g1", "g0", "g3"] and {"t0", "t1", "t2"} <= set(curriculum.stats)


def run(curriculum: Curriculum, start: int, end: int) -> list:
    log = []
    for iteration in range(start, end):
        rng = np.random.default_rng([7, iteration])
        chosen = curriculum.sample(5, rng, 0.25)
        curriculum.update(played(**{t.id: rng.integers(0, 2, size=3).tolist() for t in chosen}), iteration)
        curriculum.add([task(f"g{iteration}_{i}") for i, _ in enumerate(curriculum.seeds(2))])
        log += [chosen, curriculum.summary()]
    return log


def test_a_resumed_run_goes_on_as_if_nothing_had_happened():
    whole, first = curriculum_of(12, max_generated=10), curriculum_of(12, max_generated=10)
    resumed = curriculum_of([f"t{i}" for i in range(11, -1, -1)], max_generated=10)
    want, begun = run(whole, 0, 60), run(first, 0, 25)
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    assert begun + run(resumed, 25, 60) == want and resumed.get_state() == whole.get_state()


@pytest.mark.parametrize("call, message", [
    (lambda c, state: curriculum_of(["t0", "x"]).set_state(state), r"also had \['t1'\], .*not have \['x'\]"),
    (lambda c, state: curriculum_of(["t0", "t0"]), "no id twice"),
])
def test_what_does_not_fit_is_refused(call, message):
    curriculum = curriculum_of(2, generated=9)
    assert len(curriculum.sample(2, np.random.default_rng(0), 0.3)) == 2
    with pytest.raises(ValueError, match=message):
        call(curriculum, curriculum_of(2).get_state())
