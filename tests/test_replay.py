"""replay.py against a slow search over plain lists: each test says which bug it stops."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dreamgym import replay
from dreamgym.replay import ReplayBuffer, Transition


def make(n: int, rng: np.random.Generator, synthetic: float = 0.5, episodes: int = 20, texts: int = 10**9, first: int = 0) -> list[Transition]:
    """n transitions; `texts` is how many different (state, action, next state) there are."""
    result = []
    for i in range(first, first + n):
        text, episode = int(rng.integers(texts)), int(rng.integers(episodes))
        result.append(Transition(f"state {text}", f"act {text}", "because", f"next {text}", float(i % 2), False, f"e{episode}", f"t{episode}",
                                 bool(rng.random() < synthetic), i))
    return result


def embed(n: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    """Vectors in clusters around one large common offset, as the hidden states of a language model."""
    centres = np.random.default_rng(99).standard_normal((30, dim))
    return (20 + centres[rng.integers(30, size=n)] + 0.5 * rng.standard_normal((n, dim))).astype(np.float32)


def slow_search(entries, mean, query, k, excluded, min_score=None, bonus=0.0):
    """Cosine by a loop, everything sorted, first k that may be returned; entries are (transition, raw vector), oldest first."""
    query = (query - mean) / np.linalg.norm(query - mean)
    scored = []
    for age, (t, vector) in enumerate(entries):
        score = float(np.dot(query, (vector - mean) / np.linalg.norm(vector - mean)))
        scored.append((-(score + (0 if t.synthetic else bonus)), age, score, t))
    result, seen = [], set()
    for _, _, score, t in sorted(scored, key=lambda row: row[:2]):
        if t.episode_id not in excluded and (min_score is None or score >= min_score) and (t.state, t.action, t.next_state) not in seen:
            seen.add((t.state, t.action, t.next_state))
            result.append((t, score))
    return result[:k]


@pytest.mark.parametrize("exact_below", [10_000, 0])
@pytest.mark.parametrize("min_score,bonus,texts", [(None, 0.0, 10**9), (0.3, 0.0, 10**9), (None, 0.3, 10**9), (None, 0.0, 15), (0.2, 0.1, 60)])
def test_search_equals_a_slow_search(exact_below, min_score, bonus, texts):
    """Stops: exclusions or duplicates that eat up the k results, a lost bonus, index and exact tail merged wrongly."""
    rng = np.random.default_rng(1)
    transitions, vectors, queries = make(400, rng, texts=texts), embed(400, 24, rng), embed(25, 24, rng)
    buffer = ReplayBuffer(24, 1000, exact_below=exact_below, real_first=bonus > 0, real_bonus=bonus, ef=400)
    buffer.add(transitions[:250], vectors[:250])
    buffer.search(queries[:1], 3, [None])  # builds the index where there is one; what follows is the tail
    buffer.add(transitions[250:], vectors[250:])
    mean = vectors[:250].mean(0, dtype=np.float64)
    exclude = [None if i % 3 == 0 else "e3" if i % 3 == 1 else {f"e{j}" for j in range(12)} for i in range(25)]
    for k in (1, 4, 30):
        for query, own, got in zip(queries, exclude, buffer.search(queries, k, exclude, min_score)):
            want = slow_search(list(zip(transitions, vectors)), mean, query, k, {own} if isinstance(own, str) else own or set(), min_score, bonus)
            assert [score for _, score in got] == pytest.approx([score for _, score in want], abs=1e-5)
            assert [t.step for t, _ in got] == [t.step for t, _ in want]


def test_own_episode_is_never_returned():
    """Stops: the true next state leaking into the prompt as a demonstration of itself, also when the nearest thousand all are of that episode."""
    rng = np.random.default_rng(2)
    for exact_below in (10_000, 0):
        buffer = ReplayBuffer(8, 5000, exact_below=exact_below)
        own, others = make(1500, rng, episodes=1), [replace(t, episode_id="other") for t in make(20, rng, first=1500)]
        near = (20 + np.eye(8)[0] + 0.01 * rng.standard_normal((1500, 8))).astype(np.float32)
        buffer.add(own + others, np.concatenate([near, embed(20, 8, rng)]))
        for exclusion in ("e0", {"e0"}, {"e0", "unknown"}):
            (found,) = buffer.search(near[:1], 4, [exclusion])
            assert len(found) == 4 and {t.episode_id for t, _ in found} == {"other"}
        assert buffer.search(near[:1], 4, [{"e0", "other"}]) == [[]]


def test_eviction_takes_the_oldest_synthetic_then_the_oldest_real():
    """Stops: real data displaced by dreams, newest instead of oldest evicted, a buffer above its capacity; against a plain list."""
    rng = np.random.default_rng(3)
    buffer, kept = ReplayBuffer(4, 50), []
    for round_ in range(40):
        batch = make(int(rng.integers(0, 30)), rng, synthetic=float(rng.choice([0.9, 0.5])) if round_ < 25 else 0.2, first=1000 * round_)
        buffer.add(batch, embed(len(batch), 4, rng))
        kept += batch
        while len(kept) > 50:
            kept.remove(next((t for t in kept if t.synthetic), kept[0]))
        assert buffer.transitions() == kept and len(buffer) == len(kept) <= 50
        assert buffer.share_synthetic() == pytest.approx(sum(t.synthetic for t in kept) / max(1, len(kept)))
    assert not any(t.synthetic for t in kept)
    buffer.add([replace(t, synthetic=True) for t in make(5, rng)], embed(5, 4, rng))
    assert buffer.transitions() == kept
    buffer.add(make(200, rng, synthetic=0, first=50_000), embed(200, 4, rng))  # one batch larger than the buffer
    assert [t.step for t in buffer.transitions()] == list(range(50_150, 50_200))


def test_vectors_stay_with_their_records_through_eviction_and_index():
    """Stops: an index label that points at another record after rows moved; index and exact search compared at every step of a long run."""
    rng = np.random.default_rng(4)
    buffers = [ReplayBuffer(16, 300, exact_below=10_000), ReplayBuffer(16, 300, exact_below=60, ef=300)]
    hits = total = builds = 0
    seen_index = None
    for round_ in range(60):
        batch, queries = make(25, rng, synthetic=0.8, first=100 * round_), embed(5, 16, rng)
        vectors = embed(25, 16, rng)
        for buffer in buffers:
            buffer.add(batch, vectors)
        exact, fast = (buffer.search(queries, 4, ["e1", None, {"e2", "e3"}, None, "e5"]) for buffer in buffers)
        for want, got in zip(exact, fast):
            hits, total = hits + len({t.step for t, _ in want} & {t.step for t, _ in got}), total + len(want)
            assert len(got) == len(want) and all(t in buffers[0].transitions() for t, _ in got)
        builds += buffers[1]._index is not seen_index
        seen_index = buffers[1]._index
    assert 3 < builds < 60 and hits / total > 0.995


def test_index_recall_and_its_refusals(monkeypatch):
    """Stops: poor recall through ef below k, k above what the index holds, and a crash where hnswlib raises."""
    rng = np.random.default_rng(5)
    transitions, vectors, queries = make(3000, rng), embed(3000, 32, rng), embed(100, 32, rng)
    exact, fast = ReplayBuffer(32, 5000), ReplayBuffer(32, 5000, exact_below=1000)
    for buffer in (exact, fast):
        buffer.add(transitions, vectors)
    exclude = [f"e{i % 20}" for i in range(100)]
    want, got = exact.search(queries, 10, exclude), fast.search(queries, 10, exclude)
    recall = np.mean([len({t.step for t, _ in a} & {t.step for t, _ in b}) / 10 for a, b in zip(want, got)])
    print(f"recall@10 of the index against exact search: {recall:.4f}")
    assert recall > 0.99 and fast._index is not None and exact._index is None
    assert len(fast.search(queries[:1], 10_000, [None])[0]) == 3000

    class Refuses:
        def set_ef(self, ef): ...

        def knn_query(self, *args, **kwargs):
            raise RuntimeError("Cannot return the results in a contiguous 2D array")

    fast._index = Refuses()
    for a, b in zip(want, fast.search(queries, 10, exclude)):
        assert [t.step for t, _ in a] == [t.step for t, _ in b]
    monkeypatch.setattr(replay, "hnswlib", None)
    assert fast.search(queries, 10, exclude) == want


def test_many_equal_transitions_do_not_hide_the_others():
    """Stops: a deterministic environment filling the buffer with one transition until the search returns nothing else; duplicates come once."""
    rng = np.random.default_rng(6)
    for exact_below in (10_000, 0):
        buffer = ReplayBuffer(8, 10_000, exact_below=exact_below)
        twin = make(1, rng)[0]
        rest = make(40, rng, first=1)
        vectors = np.concatenate([np.tile(embed(1, 8, rng), (3000, 1)), embed(40, 8, rng)])
        buffer.add([replace(twin, episode_id=f"x{i}") for i in range(3000)] + rest, vectors)
        (found,) = buffer.search(vectors[:1], 5, [None])
        assert len(found) == 5 and found[0][1] == pytest.approx(1, abs=1e-5) and len({t.state for t, _ in found}) == 5
        assert buffer.search(vectors[:1], 5, ["x0"])[0][0][0].state == twin.state  # the same text from another episode may help


def test_centring_separates_what_raw_cosine_cannot():
    """Stops: a mean that is forgotten, recomputed at later adds, or not subtracted from the queries."""
    rng = np.random.default_rng(7)
    transitions, vectors = make(200, rng), embed(200, 16, rng)
    raw, centred = ReplayBuffer(16, 500, center=False), ReplayBuffer(16, 500)
    spread = {}
    for name, buffer in (("raw", raw), ("centred", centred)):
        buffer.add(transitions, vectors)
        scores = [score for _, score in buffer.search(vectors[:1], 200, [None])[0]]
        spread[name] = max(scores) - min(scores)
    assert spread["raw"] < 0.02 and spread["centred"] > 1
    assert np.allclose(centred.mean_D, vectors.mean(0), atol=1e-4)
    before, scores = centred.mean_D.copy(), centred.search(vectors[:1], 5, [None])
    centred.add(make(50, rng, first=500), -100 * embed(50, 16, rng))
    assert np.array_equal(centred.mean_D, before) and centred.search(vectors[:1], 5, [None]) == scores
    fitted = ReplayBuffer(16, 500)
    fitted.fit_center(vectors[:100])
    fitted.add(transitions[:1], vectors[:1])
    assert np.allclose(fitted.mean_D, vectors[:100].mean(0), atol=1e-4)
    with pytest.raises(ValueError, match="frozen"):
        fitted.fit_center(vectors)
    with pytest.raises(ValueError, match="one vector"):
        ReplayBuffer(16, 500).add(transitions[:1], vectors[:1])
    assert np.isfinite(centred.search(centred.mean_D[None], 1, [None])[0][0][1])  # a query at the mean has no direction, and no NaN


def test_real_bonus_prefers_real_only_within_its_size():
    """Stops: a bonus that is part of the returned score, given to synthetic entries, or active while real_first is off."""
    def at(cosine, synthetic, step):
        return Transition(f"s{step}", "a", "", "n", 0.0, False, "e", "t", synthetic, step), [cosine, (1 - cosine**2) ** 0.5]

    entries = [at(0.90, True, 0), at(0.88, False, 1), at(0.84, False, 2), at(0.95, True, 3)]
    order = {}
    for real_first, bonus in ((False, 0.05), (True, 0.0), (True, 0.05), (True, 0.2)):
        buffer = ReplayBuffer(2, 10, real_first=real_first, real_bonus=bonus, center=False)
        buffer.add([t for t, _ in entries], np.array([v for _, v in entries]))
        (found,) = buffer.search(np.array([[1.0, 0.0]]), 3, [None])
        order[real_first, bonus] = [t.step for t, _ in found]
        assert all(score == pytest.approx((0.90, 0.88, 0.84, 0.95)[t.step], abs=1e-6) for t, score in found)
    assert order == {(False, 0.05): [3, 0, 1], (True, 0.0): [3, 0, 1], (True, 0.05): [3, 1, 0], (True, 0.2): [1, 2, 3]}


def test_real_bonus_reaches_past_what_the_index_fetched():
    """Stops: real entries overlooked because hundreds of synthetic ones, each a little nearer, fill what the index returns."""
    rng = np.random.default_rng(11)
    angle = np.concatenate([np.linspace(0.1, 0.2, 300), np.full(5, 0.3)])[:, None]  # cosines 0.995 to 0.980, then 0.955
    side = rng.standard_normal((305, 7))
    vectors = np.concatenate([np.cos(angle), np.sin(angle) * side / np.linalg.norm(side, axis=1, keepdims=True)], axis=1)
    transitions = [replace(t, synthetic=i < 300) for i, t in enumerate(make(305, rng))]
    for bonus, real in ((0.06, 4), (0.03, 0)):
        buffer = ReplayBuffer(8, 1000, exact_below=0, real_first=True, real_bonus=bonus, center=False)
        buffer.add(transitions, vectors)
        (found,) = buffer.search(np.eye(8)[:1], 4, [None])
        assert sum(not t.synthetic for t, _ in found) == real


@pytest.mark.parametrize("exact_below", [10_000, 40])
def test_saved_and_loaded_buffer_goes_on_bit_equal(tmp_path, exact_below):
    """Stops: a resumed run that retrieves other demonstrations: lost mean, lost order of eviction, an index of other rows."""
    rng = np.random.default_rng(8)
    going = ReplayBuffer(12, 200, exact_below=exact_below, seed=3, real_first=True, ef=1, M=2, ef_construction=2)  # poor recall: the graph matters
    for round_ in range(12):
        going.add(make(30, rng, first=100 * round_), embed(30, 12, rng))
        going.search(embed(2, 12, rng), 3, [None, None])
    going.add(make(10, rng, first=50_000), embed(10, 12, rng))  # too few for a new index, enough to make another one if it were built now
    going.save(tmp_path / "replay")
    going.save(tmp_path / "replay")  # over an existing folder
    resumed = ReplayBuffer.load(tmp_path / "replay")
    assert resumed.transitions() == going.transitions() and len(resumed) == len(going) == 200
    for round_ in range(12, 30):
        batch, vectors, queries = make(30, rng, first=100 * round_), embed(30, 12, rng), embed(6, 12, rng)
        answers = [buffer.search(queries, 4, ["e1"] * 6) for buffer in (going, resumed)]
        assert answers[0] == answers[1]
        for buffer in (going, resumed):
            buffer.add(batch, vectors)
    assert resumed.transitions() == going.transitions()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replay"]


def test_empty_buffer_saves_loads_and_finds_nothing(tmp_path):
    """Stops: a crash of the first checkpoint, or of the first dream, before any transition came."""
    ReplayBuffer(3, 10).save(tmp_path / "empty")
    buffer = ReplayBuffer.load(tmp_path / "empty")
    assert len(buffer) == 0 and buffer.share_synthetic() == 0 and buffer.search(np.ones((2, 3)), 4, [None, "e"]) == [[], []]
    buffer.add([], np.zeros((0, 3)))
    assert buffer.search(np.zeros((0, 3)), 4, []) == []


def test_loader_names_file_line_and_field(tmp_path):
    """Stops: a damaged checkpoint that loads as something else, or fails with a bare KeyError."""
    rng = np.random.default_rng(9)
    buffer = ReplayBuffer(3, 10)
    buffer.add(make(3, rng), embed(3, 3, rng))
    records = tmp_path / "r" / "records.jsonl"

    def broken(change):
        buffer.save(tmp_path / "r")
        rows = [json.loads(line) for line in records.read_text().splitlines()]
        change(rows)
        records.write_text("".join(json.dumps(row) + "\n" for row in rows))

    for change, message in [
        (lambda rows: rows[1].update(reward="1"), r"records.jsonl, line 2, field reward: found '1', expected float"),
        (lambda rows: rows[2].update(done=1), r"records.jsonl, line 3, field done: found 1, expected bool"),
        (lambda rows: rows[0].update(schema=7), r"line 1, field schema"),
        (lambda rows: rows[0].pop("state"), r"line 1: missing fields \['state'\]"),
        (lambda rows: rows[1].update(uid=0), r"line 2, field uid"),
        (lambda rows: rows[1].update(reward=float("nan")), r"line 2, field reward: found nan"),
        (lambda rows: rows.pop(), r"records.jsonl has 2 lines, meta.json says 3"),
    ]:
        broken(change)
        with pytest.raises(ValueError, match=message):
            ReplayBuffer.load(tmp_path / "r")
    broken(lambda rows: None)
    assert ReplayBuffer.load(tmp_path / "r").transitions() == buffer.transitions()
    (tmp_path / "r" / "mean.npy").unlink()
    with pytest.raises(ValueError, match=r"mean.npy is missing"):
        ReplayBuffer.load(tmp_path / "r")
    with pytest.raises(ValueError, match="does not exist"):
        ReplayBuffer.load(tmp_path / "nothing")


def test_wrong_input_is_refused_at_the_boundary():
    """Stops: NaN vectors that match everything or nothing, transposed embeddings, numpy scalars that fail at the first checkpoint hours later."""
    rng = np.random.default_rng(10)
    buffer, transitions = ReplayBuffer(3, 10), make(3, rng)
    with pytest.raises(ValueError, match=r"shape \(3, 4\), expected \(rows, 3\)"):
        buffer.add(transitions, np.ones((3, 4)))
    with pytest.raises(ValueError, match="row 1 is not finite"):
        buffer.add(transitions, np.array([[1, 1, 1], [1, np.nan, 1], [0, 1, 0]]))
    with pytest.raises(ValueError, match="3 transitions and 2 vectors"):
        buffer.add(transitions, np.ones((2, 3)))
    with pytest.raises(ValueError, match="transition 0, field reward: found np.float32"):
        buffer.add([replace(transitions[0], reward=np.float32(1))], np.ones((1, 3)))
    with pytest.raises(ValueError, match="one exclusion per query"):
        buffer.search(np.ones((2, 3)), 1, [None])
    with pytest.raises(ValueError, match="capacity 0"):
        ReplayBuffer(3, 0)
    assert len(buffer) == 0 and buffer.mean_D is None
