"""Experience replay buffer: transitions and a nearest-neighbour search over phi(state, action), for the demonstrations d_j of DreamGym, Eq. 4.

The caller embeds; no model lives here. The buffer is seeded with offline real transitions and enriched with synthetic ones once per training step:

    buffer = ReplayBuffer(dim=hidden_size, capacity=100_000)
    buffer.add(offline, vectors_ND)                                             # the first add also fits the centre
    found = buffer.search(vectors_BD, k=4, exclude_episodes=own_episode_ids)    # per query [(transition, cosine), ...], best first

Hidden states of a language model all point the same way, so their raw cosines are nearly constant: the mean of the first added vectors is
subtracted from every vector before it is normalised. It is then frozen and saved, for a moving mean would make old and new vectors incomparable.

Small buffers are searched exactly, by one matrix product. From `exact_below` live transitions on, an hnswlib index holds the older rows and never
changes until it is built anew; the newest rows are searched exactly beside it. So nothing is ever deleted from or added to a graph, search never
races with insertion, and with the saved index file a resumed run finds what the uninterrupted one would have found.
Left out on purpose: several indexes, threads, other distances.
"""

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

try:
    import hnswlib
except ImportError:  # it is compiled at installation; without it every search is exact, and slower above some 10k transitions
    hnswlib = None

SCHEMA = 1
MAX_FETCH = 2048  # past so many candidates from the index the exact product is no slower
QUERY_CHUNK = 64  # queries per matrix product; bounds the scores to 26 MB at 100k transitions
Picks = tuple[np.ndarray, np.ndarray]  # rows and their cosines, best first


@dataclass(frozen=True)
class Transition:
    """One step of an environment, real or dreamt; `action` is the grounded text that the environment got, `step` counts from 0."""

    state: str
    action: str
    reasoning: str
    next_state: str
    reward: float
    done: bool
    episode_id: str
    task_id: str
    synthetic: bool
    step: int


class ReplayBuffer:
    """Bounded set of transitions with one unit vector each. Deterministic: the same calls give the same answers.

    dim: length of the vectors. capacity: most transitions kept. exact_below: search exactly while fewer are live. seed: of the index's level draws.
    real_first: rank real transitions as if their cosine were `real_bonus` higher, so that a synthetic one is returned only where it beats the k-th
    real one by that much; 0 = off. ef, M, ef_construction: hnswlib's breadth of search, links per node and breadth of construction.
    center: subtract the mean of the first added vectors.
    """

    def __init__(
        self, dim: int, capacity: int, exact_below: int = 10_000, seed: int = 0, real_first: bool = False, ef: int = 64, M: int = 16,
        ef_construction: int = 200, *, real_bonus: float = 0.05, center: bool = True,
    ) -> None:
        if dim < 1 or capacity < 1 or real_bonus < 0:
            raise ValueError(f"ReplayBuffer: dim {dim}, capacity {capacity}, real_bonus {real_bonus}; expected dim, capacity >= 1, real_bonus >= 0")
        self.dim, self.capacity, self.exact_below, self.seed = dim, capacity, exact_below, seed
        self.ef, self.M, self.ef_construction = ef, M, ef_construction
        self.real_first, self.real_bonus, self.center = real_first, real_bonus, center
        self.mean_D: np.ndarray | None = None if center else np.zeros(dim, np.float32)
        # Rows are in order of arrival, so uids ascend along them. An evicted row stays, not alive, until the arrays are full and get compacted.
        self._rows, self._next_uid = 0, 0
        self._records: list[Transition | None] = []
        self._unit_RD = np.zeros((0, dim), np.float32)
        self._uid_R, self._alive_R, self._synthetic_R = np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, bool)
        self._index, self._index_size, self._index_end = None, 0, 0  # the index holds `_index_size` rows, all with uid < `_index_end`

    def __len__(self) -> int:
        return int(self._alive_R[: self._rows].sum())

    def share_synthetic(self) -> float:
        """Share of the live transitions that an experience model wrote; 0 for an empty buffer."""
        alive_R = self._alive_R[: self._rows]
        return float((alive_R & self._synthetic_R[: self._rows]).sum() / max(1, alive_R.sum()))

    def transitions(self) -> list[Transition]:
        """The live transitions, oldest first."""
        return [record for record in self._records if record is not None]

    # ---- vectors

    def fit_center(self, vectors_ND: np.ndarray) -> None:
        """Set the mean that is subtracted from every vector, before anything is added; without this call the first `add` does it."""
        vectors_ND = self._checked(vectors_ND)
        if self._next_uid or not self.center:
            raise ValueError("fit_center: the buffer already took vectors, or was made with center=False; its mean is frozen")
        if len(vectors_ND) < 2:
            raise ValueError("fit_center: one vector minus its own mean is nothing; seed the buffer with more transitions or use center=False")
        self.mean_D = vectors_ND.mean(axis=0, dtype=np.float64).astype(np.float32)

    def _checked(self, vectors: np.ndarray) -> np.ndarray:
        vectors = np.asarray(vectors, np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise ValueError(f"ReplayBuffer: vectors have shape {vectors.shape}, expected (rows, {self.dim})")
        bad = ~np.isfinite(vectors).all(axis=1)
        if bad.any():
            raise ValueError(f"ReplayBuffer: the vector of row {int(bad.argmax())} is not finite ({int(bad.sum())} of {len(vectors)} rows)")
        return vectors

    def _unit(self, vectors_ND: np.ndarray) -> np.ndarray:
        centred_ND = vectors_ND - self.mean_D
        norm_N1 = np.linalg.norm(centred_ND, axis=1, keepdims=True)
        return np.divide(centred_ND, norm_N1, out=np.zeros_like(centred_ND), where=norm_N1 > 1e-12)  # a vector at the mean is similar to nothing

    # ---- writing

    def add(self, transitions: list[Transition], vectors_ND: np.ndarray) -> None:
        """Append transitions with their raw embeddings [N, dim]; over capacity the oldest synthetic ones go first, then the oldest real ones.

        So a synthetic transition never displaces a real one: where `capacity` real ones are inside, new synthetic ones are dropped at once.
        """
        vectors_ND = self._checked(vectors_ND)
        n = len(transitions)
        if n != len(vectors_ND):
            raise ValueError(f"ReplayBuffer.add: {n} transitions and {len(vectors_ND)} vectors, expected one vector each")
        for i, transition in enumerate(transitions):
            _check_fields(vars(transition), f"ReplayBuffer.add, transition {i}")
        if not n:
            return
        if self.mean_D is None:
            self.fit_center(vectors_ND)
        if self._rows + n > len(self._uid_R):
            self._compact()
            self._grow(max(self._rows + n, min(2 * self._rows, self.capacity + self.capacity // 4)))
        new = slice(self._rows, self._rows + n)
        self._unit_RD[new] = self._unit(vectors_ND)
        self._uid_R[new] = np.arange(self._next_uid, self._next_uid + n)
        self._alive_R[new] = True
        self._synthetic_R[new] = [transition.synthetic for transition in transitions]
        self._records += transitions
        self._rows, self._next_uid = self._rows + n, self._next_uid + n
        self._evict(max(0, len(self) - self.capacity))

    def _evict(self, count: int) -> None:
        alive_R, synthetic_R = self._alive_R[: self._rows], self._synthetic_R[: self._rows]
        for row in np.concatenate([np.flatnonzero(alive_R & synthetic_R), np.flatnonzero(alive_R & ~synthetic_R)])[:count]:
            self._alive_R[row], self._records[row] = False, None

    def _compact(self) -> None:
        """Keep the live rows only, in arrays of exactly their size: the state that `load` makes, too."""
        keep = np.flatnonzero(self._alive_R[: self._rows])
        self._unit_RD, self._uid_R = self._unit_RD[keep], self._uid_R[keep]
        self._synthetic_R, self._alive_R = self._synthetic_R[keep], self._alive_R[keep]
        self._records, self._rows = self.transitions(), len(keep)

    def _grow(self, size: int) -> None:
        more = size - len(self._uid_R)
        self._unit_RD = np.concatenate([self._unit_RD, np.zeros((more, self.dim), np.float32)])
        self._uid_R = np.append(self._uid_R, np.zeros(more, np.int64))
        self._alive_R, self._synthetic_R = np.append(self._alive_R, np.zeros(more, bool)), np.append(self._synthetic_R, np.zeros(more, bool))

    # ---- reading

    def search(
        self, vectors_BD: np.ndarray, k: int, exclude_episodes: Sequence[set[str] | str | None], min_score: float | None = None
    ) -> list[list[tuple[Transition, float]]]:
        """The k live transitions of highest cosine to each raw embedding (DreamGym, Eq. 4): B lists of (transition, cosine), best first.

        exclude_episodes: per query the episode id, or a set of ids, whose transitions are never returned (its own: the answer would leak), or None.
        min_score: lowest cosine returned. Cosines are those of centred vectors; the bonus of `real_first` orders the list but is not in them.
        Transitions of equal state, action and next state are returned once. A list is shorter than k only where no more transitions qualify.
        """
        vectors_BD = self._checked(vectors_BD)
        if k < 1 or len(exclude_episodes) != len(vectors_BD):
            counts = f"{len(exclude_episodes)} exclusions for {len(vectors_BD)} queries"
            raise ValueError(f"ReplayBuffer.search: k is {k}, with {counts}; expected k >= 1 and one exclusion per query")
        live = len(self)
        if not live:
            return [[] for _ in vectors_BD]
        excluded = [{e} if isinstance(e, str) else set(e or ()) for e in exclude_episodes]
        use_index = hnswlib is not None and live >= self.exact_below
        if use_index:
            self._refresh_index(live)
        first = int(np.searchsorted(self._uid_R[: self._rows], self._index_end)) if use_index else 0  # the index has the rows before it
        unit_BD, found = self._unit(vectors_BD), []
        for start in range(0, len(unit_BD), QUERY_CHUNK):
            part = slice(start, start + QUERY_CHUNK)
            score_BR = unit_BD[part] @ self._unit_RD[first : self._rows].T
            near = [self._best(score_R, first, k, own, min_score) for score_R, own in zip(score_BR, excluded[part])]
            found += self._with_index(unit_BD[part], near, first, k, excluded[part], min_score) if use_index else near
        return [[(self._records[row], score) for row, score in zip(rows.tolist(), scores.tolist())] for rows, scores in found]

    def _ranked(self, rows: np.ndarray | slice, score: np.ndarray) -> np.ndarray:
        return score + np.where(self._synthetic_R[rows], np.float32(0), np.float32(self.real_bonus)) if self.real_first else score

    def _pick(self, rows: np.ndarray, score: np.ndarray, k: int, excluded: set[str], min_score: float | None) -> Picks:
        """The best k of the candidate rows that may be returned; ties go to the older row."""
        kept, seen = [], set()
        for i in np.lexsort((rows, -self._ranked(rows, score))):
            record = self._records[rows[i]]
            if record is None or record.episode_id in excluded or (min_score is not None and score[i] < min_score):
                continue
            text = (record.state, record.action, record.next_state)
            if text not in seen:
                seen.add(text)
                kept.append(i)
            if len(kept) == k:
                break
        return rows[kept], score[kept]

    def _best(self, score_R: np.ndarray, first: int, k: int, excluded: set[str], min_score: float | None) -> Picks:
        """Exact picks from the scores of all rows from `first` on. Sorts only the best few, and widens when exclusions and duplicates eat them up."""
        rows, fetch = slice(first, first + len(score_R)), 4 * k + 16
        ranked_R = self._ranked(rows, score_R)
        while True:
            top = np.argpartition(-ranked_R, fetch)[:fetch] if fetch < len(ranked_R) else np.arange(len(ranked_R))
            picks = self._pick(first + top, score_R[top], k, excluded, min_score)
            if len(picks[0]) == k or fetch >= len(ranked_R):
                return picks
            fetch *= 8

    # ---- the index

    def _refresh_index(self, live: int) -> None:
        """Build the index anew once the rows it lacks and the dead rows it holds are half of the buffer and at least `exact_below`.

        Seldom, because a build costs as much as some 20,000 exact queries (benchmarks/replay_search.py) and a dream asks one query per new transition.
        """
        first = int(np.searchsorted(self._uid_R[: self._rows], self._index_end))
        stale = (self._rows - first) + self._index_size - int(self._alive_R[:first].sum())
        if self._index is not None and stale < max(self.exact_below, live // 2):
            return
        rows = np.flatnonzero(self._alive_R[: self._rows])
        index = hnswlib.Index("ip", self.dim)
        index.init_index(len(rows), M=self.M, ef_construction=self.ef_construction, random_seed=self.seed)
        index.add_items(self._unit_RD[rows], self._uid_R[rows], num_threads=1)  # with more threads the graph would depend on their timing
        self._index, self._index_size, self._index_end = index, len(rows), self._next_uid

    def _with_index(
        self, unit_BD: np.ndarray, near: list[Picks], first: int, k: int, excluded: list[set[str]], min_score: float | None
    ) -> list[Picks]:
        """Merge the picks `near` of the rows from `first` on with those of the index; fetch more for the queries that need it, at last all rows."""

        def merged(b: int, rows: np.ndarray, score: np.ndarray) -> Picks:
            return self._pick(np.append(near[b][0], rows), np.append(near[b][1], score), k, excluded[b], min_score)

        uid_R = np.append(self._uid_R[:first], -1)  # -1: what a search past the end meets
        bonus = self.real_bonus if self.real_first else 0.0
        found, left, fetch = list(near), list(range(len(unit_BD))), 4 * k + 16
        while left and fetch <= MAX_FETCH:
            fetch = min(fetch, self._index_size)
            self._index.set_ef(max(self.ef, fetch))
            try:
                uid_BF, distance_BF = self._index.knn_query(unit_BD[left], k=fetch)
            except RuntimeError:  # hnswlib reached fewer nodes than asked for
                break
            retry = []
            for b, uid_F, distance_F in zip(left, uid_BF.astype(np.int64), distance_BF):
                row_F = np.searchsorted(uid_R[:-1], uid_F)
                row_F = row_F[uid_R[row_F] == uid_F]  # the others were evicted and compacted away
                found[b] = rows, score = merged(b, row_F, self._unit_RD[row_F] @ unit_BD[b])
                floor = 1.0 - float(distance_F[-1])  # whatever was not fetched has at most this cosine
                enough = len(rows) == k and self._ranked(rows, score)[-1] >= floor + bonus
                if not enough and fetch < self._index_size and (min_score is None or floor >= min_score):
                    retry.append(b)
            left, fetch = retry, 4 * fetch
        for b in left:
            found[b] = merged(b, *self._best(self._unit_RD[:first] @ unit_BD[b], 0, k, excluded[b], min_score))
        return found

    # ---- files

    def save(self, folder: str | Path) -> None:
        """Write records.jsonl, vectors.npy, mean.npy, meta.json and, where there is one, index.bin: under a temporary name, then renamed."""
        self._compact()  # so that this run goes on from the very arrays that a resumed one will load
        folder = Path(folder)
        temporary, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
        for stray in (temporary, old):
            shutil.rmtree(stray, ignore_errors=True)
        temporary.mkdir(parents=True)
        with open(temporary / "records.jsonl", "w", encoding="utf-8") as file:
            rows = ({"schema": SCHEMA, "uid": uid, **asdict(record)} for uid, record in zip(self._uid_R.tolist(), self._records))
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        np.save(temporary / "vectors.npy", self._unit_RD, allow_pickle=False)
        if self.mean_D is not None:
            np.save(temporary / "mean.npy", self.mean_D, allow_pickle=False)
        if self._index is not None:
            self._index.save_index(str(temporary / "index.bin"))
        meta = {"schema": SCHEMA, **{name: getattr(self, name) for name in SETTINGS}, "records": self._rows}
        meta |= {"next_uid": self._next_uid, "index_size": self._index_size, "index_end": self._index_end}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)

    @classmethod
    def load(cls, folder: str | Path) -> "ReplayBuffer":
        """Read what `save` wrote, settings included; a ValueError names the file, line and field that cannot be taken."""
        folder = Path(folder)
        meta = _read_meta(folder / "meta.json")
        buffer = cls(**{name: meta[name] for name in SETTINGS})
        uids, records = _read_records(folder / "records.jsonl")
        unit_RD = np.load(folder / "vectors.npy", allow_pickle=False)
        if unit_RD.dtype != np.float32 or unit_RD.shape != (meta["records"], buffer.dim) or len(records) != meta["records"]:
            raise ValueError(
                f"{folder}: vectors.npy is {unit_RD.dtype} {unit_RD.shape}, records.jsonl has {len(records)} lines, meta.json says {meta['records']} "
                f"records of dim {buffer.dim}; expected them to agree: the folder was edited or copied in part"
            )
        if (folder / "mean.npy").exists():
            buffer.mean_D = buffer._checked(np.load(folder / "mean.npy", allow_pickle=False)[None])[0]
        elif records:
            raise ValueError(f"{folder / 'mean.npy'} is missing, expected the frozen mean of the {len(records)} vectors")
        buffer._rows, buffer._records, buffer._unit_RD, buffer._next_uid = len(records), records, unit_RD, meta["next_uid"]
        buffer._uid_R, buffer._alive_R = np.array(uids, np.int64), np.ones(len(records), bool)
        buffer._synthetic_R = np.array([record.synthetic for record in records], bool)
        if (folder / "index.bin").exists() and hnswlib is not None:
            buffer._index = hnswlib.Index("ip", buffer.dim)
            buffer._index.load_index(str(folder / "index.bin"))
            buffer._index_size, buffer._index_end = meta["index_size"], meta["index_end"]
        return buffer


SETTINGS = ("dim", "capacity", "exact_below", "seed", "real_first", "ef", "M", "ef_construction", "real_bonus", "center")
FIELD_TYPES = {field.name: field.type for field in fields(Transition)}


def _check_fields(values: dict, where: str) -> None:
    """Refuse what would not survive JSON (numpy scalars, NaN) when it is added, not at the first checkpoint."""
    if values.keys() != FIELD_TYPES.keys():
        missing, unknown = sorted(FIELD_TYPES.keys() - values.keys()), sorted(values.keys() - FIELD_TYPES.keys())
        raise ValueError(f"{where}: missing fields {missing}, unknown fields {unknown}")
    for name, kind in FIELD_TYPES.items():
        if type(values[name]) is not kind and not (kind is float and type(values[name]) is int):
            raise ValueError(f"{where}, field {name}: found {values[name]!r}, expected {kind.__name__}")
    if not math.isfinite(values["reward"]):
        raise ValueError(f"{where}, field reward: found {values['reward']}, expected a finite number")


def _read_meta(path: Path) -> dict:
    if not path.exists():
        raise ValueError(f"{path} does not exist, expected the folder of a saved replay buffer")
    meta = json.loads(path.read_text())
    if meta.get("schema") != SCHEMA:
        raise ValueError(f"{path}, field schema: found {meta.get('schema')!r}, expected {SCHEMA}")
    missing = [name for name in (*SETTINGS, "records", "next_uid", "index_size", "index_end") if name not in meta]
    if missing:
        raise ValueError(f"{path}: fields {missing} are missing")
    return meta


def _read_records(path: Path) -> tuple[list[int], list[Transition]]:
    uids, records = [], []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON ({error}), expected one object per line") from None
            if not isinstance(row, dict) or row.pop("schema", None) != SCHEMA:
                raise ValueError(f"{where}, field schema: expected an object with schema {SCHEMA}")
            uid = row.pop("uid", None)
            if type(uid) is not int or (uids and uid <= uids[-1]):
                raise ValueError(f"{where}, field uid: found {uid!r}, expected a whole number above that of the line before")
            _check_fields(row, where)
            uids.append(uid)
            records.append(Transition(**row))
    return uids, records
