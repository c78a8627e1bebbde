"""Experience replay buffer: transitions, and the search for the demonstrations d_j (DreamGym, Eq. 4).

    buffer = ReplayBuffer(dim=256, capacity=100_000)
    buffer.add(transitions, vectors_ND)                # offline ones first, then the dreamt ones of each step
    found = buffer.search(vectors_BD, 4, task_texts)   # per query [(transition, cosine), ...], best first

The caller makes the unit vectors phi(state, action). From `exact_below` transitions on an hnswlib index
answers first; what exclusions and copies leave open is searched exactly.
D dimensions, N rows added, R rows of the buffer, B queries, F candidates.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import hnswlib
import msgspec
import numpy as np

from dreamgym.episode import Step

SCHEMA = 2
TIE = 1e-6         # cosines closer than this are equal: those of equal texts differ by rounding
QUERY_CHUNK = 64   # queries per matrix product; bounds the scores to 26 MB at 100,000 transitions
M, EF_CONSTRUCTION = 16, 200   # hnswlib: links of a node, breadth of construction


class Transition(Step, kw_only=True, forbid_unknown_fields=False):     # saved ones may have more fields
    """One step of an environment, real or dreamt, as a demonstration shows it. Its action is grounded."""
    task: str                      # the task's text
    synthetic: bool = False        # written by an experience model


class ReplayBuffer:
    """Bounded list of transitions with one unit vector each. exact_below: no index while there are fewer (the
    default is measured, docs/scaling.md). seed: of the index's level generator."""

    def __init__(self, dim: int, capacity: int = 200_000, exact_below: int = 100_000, seed: int = 0) -> None:
        self.dim, self.capacity, self.exact_below, self.seed = dim, capacity, exact_below, seed
        self.records: list[Transition] = []                   # oldest first, as the rows of the arrays
        self._vectors_RD = np.zeros((0, dim), np.float32)
        self._uid_R = np.zeros(0, np.int64)                   # ascending; the labels of the index
        self._next_uid = 0
        self._index: hnswlib.Index | None = None       # all rows, and evicted ones marked deleted

    def __len__(self) -> int:
        return len(self.records)

    def share_synthetic(self) -> float:
        return sum(t.synthetic for t in self.records) / max(1, len(self))

    # ---- writing ----

    def add(self, transitions: Sequence[Transition], vectors_ND: np.ndarray) -> None:
        """Over capacity the oldest synthetic ones go first, then the oldest real ones. Each call copies the
        arrays, so add many at a time."""
        n = len(transitions)
        assert vectors_ND.shape == (n, self.dim) and np.isfinite(vectors_ND).all(), vectors_ND.shape
        records = self.records + list(transitions)
        uid_R = np.append(self._uid_R, self._next_uid + np.arange(n))
        vectors_RD, evicted = np.append(self._vectors_RD, np.float32(vectors_ND), axis=0), uid_R[:0]
        if len(records) > self.capacity:
            leaving_first = sorted(range(len(records)), key=lambda row: not records[row].synthetic)
            keep_R = np.ones(len(records), bool)
            keep_R[leaving_first[:len(records) - self.capacity]] = False
            evicted = uid_R[~keep_R & (uid_R < self._next_uid)]
            records = [record for record, keep in zip(records, keep_R) if keep]
            vectors_RD, uid_R = vectors_RD[keep_R], uid_R[keep_R]
        self.records, self._vectors_RD, self._uid_R = records, vectors_RD, uid_R
        self._update_index(evicted, first_new=int(np.searchsorted(uid_R, self._next_uid)))
        self._next_uid += n

    def _update_index(self, evicted: np.ndarray, first_new: int) -> None:
        """An index full of deleted rows is built anew."""
        index = self._index
        if index and index.get_current_count() + len(self) - first_new <= index.get_max_elements():
            for uid in evicted.tolist():
                index.mark_deleted(uid)
        elif index or len(self) >= self.exact_below:
            first_new, self._index = 0, hnswlib.Index("ip", self.dim)
            self._index.init_index(2 * self.capacity, M, EF_CONSTRUCTION, random_seed=self.seed)
        if self._index:                      # one thread: with more the graph would depend on their timing
            self._index.add_items(self._vectors_RD[first_new:], self._uid_R[first_new:], num_threads=1)

    # ---- reading ----

    def search(self, vectors_BD: np.ndarray, k: int, tasks: Sequence[str], min_score: float = -np.inf,
               exclude_recorded: bool = True) -> list[list[tuple[Transition, float]]]:
        """The k transitions of highest cosine for each query: B lists of (transition, cosine), best first.

        tasks: the text of each query's task. Its synthetic transitions are never returned, its recorded ones
        only with `exclude_recorded` off; "" excludes nothing. Equal (state, action, next state) come once.
        """
        vectors_BD = np.float32(vectors_BD)
        found: list[list] = [[] for _ in vectors_BD]
        open_queries = list(range(len(vectors_BD))) if len(self) else []
        fetch, use_index = max(72, 4 * k), self._index is not None
        while open_queries:                  # again where exclusions and copies used up the candidates
            fetch, unsettled = min(fetch, len(self)), []
            for b, row_F in zip(open_queries, self._nearest(vectors_BD[open_queries], fetch, use_index)):
                found[b], settled = self._pick(row_F, vectors_BD[b], k, tasks[b], min_score,
                                             exclude_recorded)
                if not settled and fetch < len(self):
                    unsettled.append(b)
            open_queries, fetch, use_index = unsettled, 16 * fetch, False
        return found

    def _nearest(self, vectors_BD: np.ndarray, fetch: int, use_index: bool) -> np.ndarray:
        """Rows [B, fetch] of the highest cosines, in any order."""
        if use_index:
            try:
                uid_BF, _ = self._index.knn_query(vectors_BD, k=fetch)
                return np.searchsorted(self._uid_R, uid_BF.astype(np.int64))
            except RuntimeError:             # hnswlib reached fewer nodes than asked for
                pass
        near = []
        for start in range(0, len(vectors_BD), QUERY_CHUNK):
            score_BR = vectors_BD[start:start + QUERY_CHUNK] @ self._vectors_RD.T
            near.append(np.argpartition(score_BR, len(self) - fetch, axis=1)[:, len(self) - fetch:])
        return np.concatenate(near)

    def _pick(self, row_F: np.ndarray, vector_D: np.ndarray, k: int, task: str, min_score: float,
              exclude_recorded: bool):
        """(the best k of the candidates, whether no row outside the candidates can be one of them). Of equal
        cosines those of the task come first, then real ones, then older ones."""
        rank = lambda row: (self.records[row].task != task, self.records[row].synthetic, row)
        excluded = lambda t: task and t.task == task and (t.synthetic or exclude_recorded)
        score_F = self._vectors_RD[row_F] @ vector_D
        order = np.argsort(-score_F)
        row_F, score_F = row_F[order], score_F[order]
        tier_F = np.cumsum(-np.diff(score_F, prepend=score_F[:1]) > TIE)      # equal cosines are one tier
        hits, seen = [], set()
        found = zip(tier_F.tolist(), row_F.tolist(), score_F.tolist())
        for tier, row, score in sorted(found, key=lambda candidate: (candidate[0], *rank(candidate[1]))):
            record = self.records[row]
            text = (record.state, record.action, record.next_state)
            if score >= min_score and text not in seen and not excluded(record):
                seen.add(text)
                hits.append((record, score))
                if len(hits) == k:
                    return hits, tier < tier_F[-1]
        return hits, score_F[-1] < min_score

    # ---- files ----

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "records.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(self.records))
        np.save(folder / "vectors.npy", self._vectors_RD)
        np.save(folder / "uids.npy", self._uid_R)
        if self._index:
            self._index.save_index(str(folder / "index.bin"))
            self.load_index(folder)
        settings = {name: getattr(self, name) for name in ("dim", "capacity", "exact_below", "seed")}
        meta = {"schema": SCHEMA, "settings": settings, "next_uid": self._next_uid}
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")

    def load_index(self, folder: str | Path) -> None:
        """Takes the index that `save` wrote, if any. It has no state of a level generator: a run that goes on
        takes it, too, and so inserts rows as a resumed one will."""
        path = Path(folder) / "index.bin"
        if path.exists():
            self._index = hnswlib.Index("ip", self.dim)
            self._index.load_index(str(path), max_elements=2 * self.capacity)

    @classmethod
    def load(cls, folder: str | Path) -> ReplayBuffer:
        """Raises ValueError for files that do not fit each other or this version."""
        folder = Path(folder)
        meta, path = json.loads((folder / "meta.json").read_text()), folder / "records.jsonl"
        if meta.get("schema") != SCHEMA:
            raise ValueError(f"{folder}: schema is {meta.get('schema')!r}, expected {SCHEMA}")
        buffer = cls(**meta["settings"])
        try:
            buffer.records = msgspec.json.Decoder(Transition).decode_lines(path.read_bytes())
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: {error}") from None
        buffer._vectors_RD, buffer._uid_R = np.load(folder / "vectors.npy"), np.load(folder / "uids.npy")
        buffer._next_uid = meta["next_uid"]
        if not len(buffer) == len(buffer._vectors_RD) == len(buffer._uid_R):
            raise ValueError(f"{folder}: records.jsonl, vectors.npy and uids.npy have other numbers of rows")
        buffer.load_index(folder)
        return buffer
