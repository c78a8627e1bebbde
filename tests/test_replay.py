"""replay.py against a slow search over plain lists: each test says which bug it stops."""
import json

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from dreamgym.replay import ReplayBuffer, Transition

EXACT, INDEX = 10**9, 1        # exact_below: never and always an index
both = pytest.mark.parametrize("exact_below", [EXACT, INDEX])


def make(n: int, rng: np.random.Generator, synthetic: float = 0.5, texts: int = 10**9, first: int = 0):
    """n transitions of 20 tasks; `texts` is how many different (state, action, next state) there are."""
    return [Transition(state=f"state {text}", action="act", next_state=f"next {text}", reward=float(i % 2),
                       reasoning=str(i), task=f"task {rng.integers(20)}", synthetic=bool(rng.random() < synthetic))
            for i, text in enumerate(rng.integers(texts, size=n), first)]


def embed(n: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    """Unit vectors in 30 clusters."""
    vectors = np.random.default_rng(99).standard_normal((30, dim))[rng.integers(30, size=n)]
    vectors = vectors + 0.5 * rng.standard_normal((n, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def steps(found) -> list[list[int]]:
    return [[int(transition.reasoning) for transition, _ in hits] for hits in found]


def slow_search(entries, query, k, task, min_score, exclude_recorded):
    """Cosines by a loop, in tiers of equal ones; entries are (transition, vector), oldest first."""
    rows = [(float(np.dot(query, vector)), age, t) for age, (t, vector) in enumerate(entries)]
    rows.sort(key=lambda row: -row[0])
    tier, tiers = 0, []
    for i, (score, age, t) in enumerate(rows):
        tier += i > 0 and rows[i - 1][0] - score > 1e-6
        tiers.append((tier, t.task != task, t.synthetic, age, score, t))
    result, seen = [], set()
    for *_, score, t in sorted(tiers, key=lambda r: r[:4]):
        text = (t.state, t.action, t.next_state)
        hidden = t.task == task and (t.synthetic or exclude_recorded)
        if not hidden and text not in seen and score >= min_score:
            seen.add(text)
            result.append((t, score))
    return result[:k]


@both
@pytest.mark.parametrize("exclude_recorded", [True, False])
@pytest.mark.parametrize("min_score,texts,vectors_differ", [
    (-1.1, 10**9, True), (0.3, 10**9, True), (-1.1, 15, True), (0.2, 60, True), (-1.1, 10**9, False)])
def test_search_equals_a_slow_search(exact_below, min_score, texts, vectors_differ, exclude_recorded):
    """Exclusions, copies or ties that eat up the k results; a task's own dreamt steps that are returned."""
    rng = np.random.default_rng(1)
    transitions, vectors, queries = make(400, rng, texts=texts), embed(400, 24, rng), embed(24, 24, rng)
    if not vectors_differ:
        vectors = vectors[rng.integers(8, size=400)]
    buffer = ReplayBuffer(24, 1000, exact_below)
    for part in (slice(0, 250), slice(250, 400)):
        buffer.add(transitions[part], vectors[part])
    tasks = ["" if i % 3 == 0 else f"task {i % 20}" for i in range(24)]
    for k in (1, 4, 30, 500):
        found = buffer.search(queries, k, tasks, min_score, exclude_recorded)
        for query, task, got in zip(queries, tasks, found):
            want = slow_search(list(zip(transitions, vectors)), query, k, task, min_score, exclude_recorded)
            assert [score for _, score in got] == pytest.approx([score for _, score in want], abs=1e-5)
            assert steps([got]) == steps([want])


@both
def test_the_own_task_and_copies_do_not_hide_the_others(exact_below):
    """A search that gives up where the nearest thousands are of the excluded task."""
    rng = np.random.default_rng(2)
    own = [replace(t, task="own") for t in make(1500, rng)]
    copies = [replace(own[0], task="copied", reasoning=str(i)) for i in range(2000, 3500)]
    others = [replace(t, task="other") for t in make(20, rng, first=5000)]
    near = np.eye(8)[0] + 0.01 * rng.standard_normal((3000, 8))
    buffer = ReplayBuffer(8, 5000, exact_below)
    buffer.add(own + copies + others, np.concatenate([near, embed(20, 8, rng)]))
    (found,) = buffer.search(np.eye(8)[:1], 4, ["own"])
    assert [t.task for t, _ in found] == ["copied"] + ["other"] * 3
    assert len({t.state for t, _ in buffer.search(np.eye(8)[:1], 4, [""])[0]}) == 4


def test_eviction_takes_the_oldest_synthetic_then_the_oldest_real():
    rng = np.random.default_rng(3)
    buffer, kept = ReplayBuffer(4, 50), []
    for round_ in range(40):
        synthetic = float(rng.choice([0.9, 0.5])) if round_ < 25 else 0.2
        batch = make(int(rng.integers(0, 30)), rng, synthetic, first=1000 * round_)
        buffer.add(batch, embed(len(batch), 4, rng))
        kept += batch
        while len(kept) > 50:
            kept.remove(next((t for t in kept if t.synthetic), kept[0]))
        assert buffer.records == kept and len(buffer) == len(kept) <= 50
        assert buffer.share_synthetic() == pytest.approx(sum(t.synthetic for t in kept) / max(1, len(kept)))
    assert not any(t.synthetic for t in kept)
    buffer.add(make(5, rng, synthetic=1), embed(5, 4, rng))
    assert buffer.records == kept
    buffer.add(make(200, rng, synthetic=0, first=50_000), embed(200, 4, rng))   # more than the buffer
    assert [int(t.reasoning) for t in buffer.records] == list(range(50_150, 50_200))


def test_the_index_follows_eviction_and_refuses():
    """A label that points at another record after rows moved, and an evicted row that is found."""
    rng = np.random.default_rng(4)
    exact, fast = ReplayBuffer(16, 300, EXACT), ReplayBuffer(16, 300, exact_below=60)
    hits = total = 0
    indices = {}
    for round_ in range(60):
        batch, vectors = make(25, rng, 0.8, first=100 * round_), embed(25, 16, rng)
        for buffer in (exact, fast):
            buffer.add(batch, vectors)
        indices[id(fast._index)] = fast._index
        queries, tasks = embed(5, 16, rng), ["", "task 1", "task 2", "", "task 3"]
        want, got = (buffer.search(queries, 4, tasks) for buffer in (exact, fast))
        hits += sum(len(set(a) & set(b)) for a, b in zip(steps(want), steps(got)))
        total += sum(map(len, want))
        if fast._index:
            assert set(fast._index.knn_query(queries, k=50)[0].ravel()) <= set(fast._uid_R)
        assert all(t in exact.records for found in got for t, _ in found)
    assert exact._index is None and 3 < len(indices) < 10 and hits / total > 0.99
    assert len(fast.search(queries[:1], 10_000, [""])[0]) == 300

    class Refuses:
        def knn_query(self, *args, **kwargs):
            raise RuntimeError("Cannot return the results in a contiguous 2D array")

    fast._index = Refuses()
    assert fast.search(queries, 4, tasks) == want


@pytest.mark.parametrize("exact_below", [EXACT, 40])
def test_a_resumed_run_finds_what_the_uninterrupted_one_finds(tmp_path, exact_below, monkeypatch):
    monkeypatch.setattr("dreamgym.replay.M", 2)
    monkeypatch.setattr("dreamgym.replay.EF_CONSTRUCTION", 2)   # poor recall: the graph matters
    rng = np.random.default_rng(8)
    going = ReplayBuffer(12, 300, exact_below, seed=3)
    for round_ in range(12):
        going.add(make(30, rng, first=100 * round_), embed(30, 12, rng))
    going.save(tmp_path)
    resumed = ReplayBuffer.load(tmp_path)
    for round_ in range(12, 40):
        assert resumed.records == going.records and len(going) == 300
        batch, vectors, queries = make(30, rng, first=100 * round_), embed(30, 12, rng), embed(6, 12, rng)
        assert going.search(queries, 4, ["task 1"] * 6) == resumed.search(queries, 4, ["task 1"] * 6)
        if going._index:                                        # so few candidates that levels and links show
            labels = [buffer._index.knn_query(queries, k=2)[0].tolist() for buffer in (going, resumed)]
            assert labels[0] == labels[1]
        for buffer in (going, resumed):
            buffer.add(batch, vectors)


def test_an_empty_buffer(tmp_path):
    ReplayBuffer(3, 10, INDEX).save(tmp_path)
    buffer = ReplayBuffer.load(tmp_path)
    assert len(buffer) == 0 == buffer.share_synthetic() and buffer._index is None
    assert buffer.search(np.ones((2, 3)), 4, ["", "t"]) == [[], []]
    buffer.add([], np.zeros((0, 3)))
    assert buffer.search(np.zeros((0, 3)), 4, []) == []
    with pytest.raises(AssertionError):
        buffer.add(make(1, np.random.default_rng(10)), np.array([[1, np.nan, 1]]))


@pytest.mark.parametrize("name,change,message", [
    ("records.jsonl", lambda rows: rows[1].update(reward="1"), "float.*reward"),
    ("records.jsonl", lambda rows: rows[0].pop("state"), "missing.*state"),
    ("records.jsonl", lambda rows: rows.pop(), "other numbers of rows"),
    ("meta.json", lambda rows: rows[0].update(schema=1), "schema is 1"),
    ("records.jsonl", lambda rows: rows[0].update(episode_id="e1"), ""),       # a field of another version
])
def test_a_changed_buffer(tmp_path, name, change, message):
    rng = np.random.default_rng(9)
    buffer = ReplayBuffer(3, 10)
    buffer.add(make(3, rng), embed(3, 3, rng))
    buffer.save(tmp_path)
    path = tmp_path / name
    rows = [asdict(t) for t in buffer.records] if name != "meta.json" else [json.loads(path.read_text())]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not message:
        assert ReplayBuffer.load(tmp_path).records == buffer.records
        return
    with pytest.raises(ValueError, match=message):
        ReplayBuffer.load(tmp_path)
