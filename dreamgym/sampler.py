"""Batched decoding for any full-attention Hugging Face causal LM, with a KV cache that is kept across the
turns of a conversation.

    sampler = Sampler(model, slots=128, context=4096, stop_ids=[eos], seed=0)
    samples = sampler.sample(prompts, keys, max_new_tok=512, temperature=1.0)   # ids -> ids and log-probs

A slot is a row of the cache and belongs to one conversation key. A later prompt of that key computes only
what differs from the cached ids, and a new one copies the longest prefix that another slot holds. Column c
of a slot is position c of its text. Behind a slot's length lies garbage, where no query looks. Left out on
purpose: the model's generation_config, beams, top-k and top-p (the sampled distribution is the one that is
trained).

B rows, T tokens, V vocabulary, H hidden, S slots, L columns. Cache tensors are [S, heads, columns, head_dim].
"""
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dreamgym.model import attends_fully, autocast, compute_dtype, without_adapters

CHUNK_TOK = 4096  # padded tokens per prefill forward; the allocator re-uses temporaries of this size
PIECE_TOK = 1024  # columns per forward; bounds the mask of a very long prompt
MIN_SHARE_TOK = 16  # copying a shorter prefix from another slot does not pay for the extra prefill wave


@dataclass
class Sample:
    """What was generated for one prompt."""
    ids: list[int]      # sampled tokens, the stop token included
    logps: list[float]  # under softmax(logits / temperature); under softmax(logits) when greedy
    stop: str           # "end" a stop id | "length" max_new_tok reached | "context" no room (left)


@dataclass
class _Job:
    """One prompt of the current call."""
    index: int
    key: Hashable
    prompt: np.ndarray
    limit: int                   # tokens that may be generated
    uniforms: np.ndarray | None  # one for each of them; None is greedy
    sample: Sample


class _Window:
    """Which part of the cache the current forward writes and reads, in all layers."""
    rows = 0     # allocated, of `slots`: as many as were in use at once
    columns = 0  # allocated
    rows_B1: torch.Tensor
    cols_BT: torch.Tensor
    into: torch.Tensor | None  # the forward's places [B * heads * T] among all [row, head, column]
    kv: int      # columns that can be visible to some query
    fresh: bool  # all rows begin at column 0: attention needs nothing but the new keys
    view: bool   # rows are 0, 1, ...: the cache is read without a copy


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, written in place; grows in rows and columns by need."""

    def __init__(self, window: _Window):
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states, value_states):
        def grown(old, states):
            # zeros and not empty: a masked column that holds NaN would still poison the row (0 * NaN)
            shape = self.window.rows, states.shape[1], self.window.columns, states.shape[3]
            new = torch.zeros(shape, dtype=value_states.dtype, device=states.device)
            if old is not None:
                new[: old.shape[0], :, : old.shape[2]] = old
            return new

        self.keys, self.values = grown(self.keys, key_states), grown(self.values, value_states)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        w = self.window
        if not self.is_initialized or self.keys.shape[2] < w.columns:
            self.lazy_initialization(key_states, value_states)
        key_states = key_states.to(self.keys.dtype)       # rotary embeddings leave autocast's bfloat16
        if w.into is None:                                # equal in all layers
            heads = torch.arange(self.keys.shape[1], device=self.keys.device)[:, None]
            rows_B11, cols_B1T = w.rows_B1[:, :, None], w.cols_BT[:, None]
            w.into = ((rows_B11 * len(heads) + heads) * w.columns + cols_B1T).flatten()
        for cached, states in ((self.keys, key_states), (self.values, value_states)):
            cached.view(-1, cached.shape[3]).index_copy_(0, w.into, states.reshape(-1, cached.shape[3]))
        if w.fresh:
            return key_states, value_states
        keys, values = self.keys[:, :, : w.kv], self.values[:, :, : w.kv]
        if w.view:
            return keys[: len(w.rows_B1)], values[: len(w.rows_B1)]
        return keys.index_select(0, w.rows_B1[:, 0]), values.index_select(0, w.rows_B1[:, 0])

    def get_mask_sizes(self, query_length):  # asked only without a ready mask: all rows are fresh
        return query_length, 0

    def get_seq_length(self):
        return 0

    def get_max_length(self):
        return -1


def draw(logits_BV: torch.Tensor, uniform_B: torch.Tensor | None, temperature: float,
         ) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one id per row by inverse CDF (float64), or takes the argmax when temperature is 0.

    Returns ids [B] (-1 where the logits hold NaN, +inf, or nothing finite) and log-probs [B] float64.
    Example: p = (.2, .5, .3), u = .2 -> id 1, the first with CDF > u.
    """
    logits_BV = logits_BV.float()
    z_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    if temperature == 0:
        total_B1, ids_B1 = z_BV.exp().sum(-1, keepdim=True, dtype=torch.float64), z_BV.argmax(-1, True)
    else:
        z_BV = z_BV if temperature == 1 else z_BV / temperature
        cdf_BV = z_BV.exp().cumsum(-1, dtype=torch.float64)
        total_B1 = cdf_BV[:, -1:]
        # right=True never lands on an id of probability 0; the clamp is for rows of NaN, reported below
        ids_B1 = torch.searchsorted(cdf_BV, uniform_B[:, None] * total_B1, right=True)
        ids_B1.clamp_(max=logits_BV.shape[1] - 1)
    logp_B1 = z_BV.gather(1, ids_B1).double() - total_B1.log()
    return ids_B1.masked_fill(~torch.isfinite(total_B1), -1)[:, 0], logp_B1[:, 0]


def prefill_chunks(length_B: np.ndarray, budget_tok: int = CHUNK_TOK) -> list[np.ndarray]:
    """Splits rows, given their tokens to prefill, into batches of similar length, longest first; at most 1/8
    of one (or 128 tokens) is padding."""
    chunks, current, width, waste = [], [], 0, 0
    for i in np.argsort(-length_B, kind="stable"):
        gap, size = width - int(length_B[i]), (len(current) + 1) * width
        if not current or size > budget_tok or waste + gap > max(128, size // 8):
            current, width, waste, gap = [], int(length_B[i]), 0, 0
            chunks.append(current)
        current.append(i)
        waste += gap
    return [np.array(c) for c in chunks]


class Sampler:
    """Decodes with one model in eval mode. Call `clear_caches` whenever the weights change.

    slots: most rows decoded at once and conversations remembered. context: longest prompt plus answer in
    tokens. FSDP2 models must be unsharded around `sample`. Raises ValueError for an attention window shorter
    than the context.
    """

    def __init__(self, model, slots: int, context: int, stop_ids: Sequence[int], seed: int):
        # PEFT keeps its adapters inside the modules of the base model
        self.inner = without_adapters(model)
        config = self.inner.config
        if not attends_fully(config, context):
            raise ValueError(f"The sampler cannot decode {type(self.inner).__name__} with sliding_window = "
                             f"{getattr(config, 'sliding_window', None)} at context = {context}: expected "
                             "attention over the whole context.")
        self.slots, self.context, self.stop_ids = slots, context, set(stop_ids)
        self.generator = np.random.default_rng(seed)
        self.prefill_tok = 0  # prompt tokens computed, for tests and benchmarks
        self.ids_SL = np.zeros((slots, context), np.int32)  # untouched pages of a long context cost no memory
        self.step_2L = torch.zeros(2 * context, dtype=compute_dtype(self.inner), device=self.inner.device)
        self.step_2L[context:] = float("-inf")  # each row of a mask is a part of it
        self.clear_caches()

    def clear_caches(self) -> None:
        """Forgets every conversation, and frees the cache's memory."""
        self.window, depth = _Window(), self.inner.config.num_hidden_layers
        self.layers = [_SlotLayer(self.window) for _ in range(depth)]
        self.cache = Cache(layers=self.layers)
        self.slot_of: dict[Hashable, int] = {}
        self.length_S = np.zeros(self.slots, np.int64)  # ids whose keys and values are in the cache
        self.used_S = np.full(self.slots, -1)  # call that used the slot last, -1 free
        self.job_S: list[_Job | None] = [None] * self.slots
        self.calls = 0

    def get_state(self) -> dict:
        """The random generator as JSON values; the cache changes speed only."""
        return self.generator.bit_generator.state

    def set_state(self, state: dict) -> None:
        self.generator.bit_generator.state = state

    def sample(self, prompts: list[list[int]], keys: list | None, max_new_tok: int, temperature: float,
               ) -> list[Sample]:
        """Generates up to max_new_tok tokens after each prompt; one Sample per prompt, in order.

        keys: hashable and unique, each names a conversation. None: these prompts are no conversations, and
        their slots are the next to be used. temperature 0 is greedy. More prompts than slots are queued. The
        uniforms depend only on the generator, the prompt's index and the token's index, so neither slots nor
        neighbours change a result (up to rounding). Raises FloatingPointError naming the prompt when logits
        are not finite.
        """
        jobs = self._begin(prompts, keys or [object() for _ in prompts], max_new_tok, temperature)
        # inference mode is faster, but in it autocast casts all weights again for each token
        half = compute_dtype(self.inner) == torch.bfloat16
        with torch.no_grad() if half else torch.inference_mode(), autocast(self.inner):
            self._run(jobs, temperature)
        for job in jobs if keys is None else ():
            self.used_S[self.slot_of.pop(job.key, [])] = -1
        return [job.sample for job in jobs]

    def _run(self, jobs: list[_Job], temperature: float) -> None:
        # those with a cache first: nobody may evict them
        queue = deque(sorted((j for j in jobs if j.limit), key=lambda job: job.key not in self.slot_of))
        refill_at = max(1, self.slots // 16)  # a refill costs a forward of its own
        try:
            while True:
                live = [row for row, job in enumerate(self.job_S) if job]
                if queue and (not live or self.slots - len(live) >= refill_at):
                    self._emit(*self._admit(queue), temperature)
                elif live:
                    self._emit(*self._decode(np.array(live)), temperature)
                else:
                    return
        except BaseException:
            self.clear_caches()  # rows may be half written, or hold NaN
            raise

    def _begin(self, prompts, keys, max_new_tok, temperature) -> list[_Job]:
        assert len(prompts) == len(keys) == len(set(keys)), f"keys are not unique: {keys}"
        shape = len(prompts), max_new_tok
        # scaled down by 2**-40 so that u * total never rounds up to total
        uniform_PT = self.generator.random(shape) * (1 - 2.0**-40) if temperature > 0 else None
        self.calls += 1
        jobs = []
        for i, (key, prompt) in enumerate(zip(keys, prompts)):
            assert len(prompt), f"prompt {i} (key {key!r}) has no tokens"
            limit = max(0, min(max_new_tok, self.context - len(prompt)))
            jobs.append(_Job(i, key, np.asarray(prompt), limit,
                             None if uniform_PT is None else uniform_PT[i],
                             Sample([], [], "length" if limit == max_new_tok else "context")))
        return jobs

    def _admit(self, queue: deque[_Job]) -> tuple[list[int], torch.Tensor]:
        """Gives queued prompts their slots and computes them. Returns the slots, and the hidden state of each
        one's last token [B, H]."""
        kept = {self.slot_of.get(job.key) for job in queue}
        idle = deque(row for row in np.argsort(self.used_S, kind="stable").tolist()  # longest unused first
                     if self.job_S[row] is None and row not in kept)
        rows, fresh = [], []
        while queue and (queue[0].key in self.slot_of or idle):
            job = queue.popleft()
            if job.key not in self.slot_of:
                row = idle.popleft()
                self.slot_of = {key: r for key, r in self.slot_of.items() if r != row} | {job.key: row}
                fresh.append(row)
            row = self.slot_of[job.key]
            cached = self._common_prefix([row], self.length_S[row], job.prompt)[0]
            self.length_S[row] = min(cached, len(job.prompt) - 1)
            self.ids_SL[row, : len(job.prompt)] = job.prompt
            self.job_S[row], self.used_S[row] = job, self.calls
            rows.append(row)
        if max(rows) >= self.window.rows:
            self.window.rows = max(rows) + 1
            for layer in self.layers:
                if layer.is_initialized:
                    layer.lazy_initialization(layer.keys, layer.values)
        last_H = {}
        for wave, copies in self._waves(rows, fresh):
            if copies:
                dst, src, n = (np.array(x) for x in zip(*copies))
                self._copy_rows(dst, src, int(n.max()))
                self.length_S[dst] = n
            todo_B = np.array([len(self.job_S[row].prompt) for row in wave]) - self.length_S[wave]
            self.prefill_tok += int(todo_B.sum())
            for chunk in prefill_chunks(todo_B):
                last_H |= self._prefill(wave[chunk])
        return list(last_H), torch.stack(list(last_H.values()))

    def _common_prefix(self, rows: list[int], length, prompt: np.ndarray) -> np.ndarray:
        """How many of the first `length` ids of these slots are those of the prompt."""
        equal = self.ids_SL[rows, : len(prompt)] == prompt
        return np.minimum(np.where(equal.all(1), len(prompt), equal.argmin(1)), length)

    def _waves(self, rows: list[int], fresh: list[int]) -> list[tuple[np.ndarray, list]]:
        """Orders admitted slots so that each comes after the one it copies from: [(slots, [(to, from,
        tokens)])]. Each fresh slot copies from the one that will hold most of its prompt, the earliest of
        equal ones. In lexicographic order the best source always comes before."""
        sources = np.flatnonzero(self.length_S >= MIN_SHARE_TOK).tolist()  # cached before this prefill
        length, wave_of, copies = self.length_S[sources].tolist(), [0] * len(sources), {}
        depth = dict.fromkeys(rows, 0)
        for row in sorted(fresh, key=lambda row: self.job_S[row].prompt.tolist()):
            prompt = self.job_S[row].prompt
            if sources:
                held = self._common_prefix(sources, length, prompt)
                best, n = int(held.argmax()), min(int(held.max()), len(prompt) - 1)
                if sources[best] != row and n >= self.length_S[row] + MIN_SHARE_TOK:
                    copies[row], depth[row] = (row, sources[best], n), wave_of[best]
            sources, length, wave_of = sources + [row], length + [len(prompt)], wave_of + [depth[row] + 1]
        waves = [[row for row in rows if depth[row] == d] for d in range(max(depth.values()) + 1)]
        return [(np.array(wave), [copies[row] for row in wave if row in copies]) for wave in waves]

    def _copy_rows(self, dst: np.ndarray, src: np.ndarray, columns: int) -> None:
        """The first `columns` columns of rows `src` over those of rows `dst`."""
        to, source = (torch.from_numpy(rows).to(self.inner.device) for rows in (dst, src))
        for layer in self.layers:
            for x in (layer.keys, layer.values):
                x[:, :, :columns][to] = x[:, :, :columns].index_select(0, source)   # a copy, so swaps work

    def _prefill(self, rows: np.ndarray) -> dict[int, torch.Tensor]:
        """Computes the rest of each slot's prompt (longest first): the hidden state of its last token."""
        last_H = {}
        end_B = np.array([len(self.job_S[row].prompt) for row in rows])
        while len(rows):
            start_B = self.length_S[rows]
            T = int(min((end_B - start_B).max(), PIECE_TOK))
            upto_B = np.minimum(end_B, start_B + T)
            # pads of rows near the end of the context all land on its last column, which no row ever needs
            cols_BT = np.minimum(start_B[:, None] + np.arange(T), self.context - 1)
            hidden_BTH = self._forward(rows, cols_BT, int(upto_B.max()), fresh=not start_B.any())
            last_H |= zip(rows.tolist(), hidden_BTH[list(range(len(rows))), (upto_B - start_B - 1).tolist()])
            self.length_S[rows] = upto_B
            rows, end_B = rows[upto_B < end_B], end_B[upto_B < end_B]
        return last_H

    def _decode(self, live: np.ndarray) -> tuple[list[int], torch.Tensor]:
        """One forward of every live slot's newest token. Idle rows among them compute along, on the column
        behind their text."""
        if live[-1] + 1 > 1.25 * len(live):
            live = self._compact(live)
        n = int(live[-1]) + 1
        kv = int(self.length_S[live].max()) + 1
        hidden_BH = self._forward(np.arange(n), self.length_S[:n, None], kv, view=True)[:, 0]
        self.length_S[live] += 1
        return live.tolist(), hidden_BH if len(live) == n else hidden_BH[live]

    def _compact(self, live: np.ndarray) -> np.ndarray:
        """Swaps live rows from the back with idle rows in front: the live ones are then rows 0, 1, ..."""
        n = len(live)
        back, hole = live[live >= n], np.setdiff1d(np.arange(n), live)
        dst, src = np.concatenate([back, hole]), np.concatenate([hole, back])
        self._copy_rows(dst, src, int(self.length_S[dst].max()))
        for x in (self.ids_SL, self.length_S, self.used_S):
            x[dst] = x[src]
        moved = dict(zip(src.tolist(), dst.tolist()))
        self.slot_of = {key: moved.get(row, row) for key, row in self.slot_of.items()}
        self.job_S = [self.job_S[moved.get(row, row)] for row in range(self.slots)]
        return np.arange(n)

    def _forward(self, rows: np.ndarray, cols_BT: np.ndarray, kv: int, fresh: bool = False,
                 view: bool = False) -> torch.Tensor:
        device, w = self.inner.device, self.window
        need = int(cols_BT.max()) + 1
        if need > w.columns:
            w.columns = min(self.context, max(need, w.columns * 3 // 2) + 63 & ~63)
        ids_BT = torch.from_numpy(self.ids_SL[rows[:, None], cols_BT].astype(np.int64)).to(device)
        pos_BT = torch.from_numpy(cols_BT).to(device)
        w.rows_B1, w.cols_BT = torch.from_numpy(rows[:, None]).to(device), pos_BT
        w.into, w.kv, w.fresh, w.view = None, kv, fresh, view
        mask = None
        if not fresh:
            q_BT = pos_BT[:1] if (cols_BT[:, 0] == cols_BT[0, 0]).all() else pos_BT
            start_N = self.context - 1 - q_BT.flatten()  # position p sees the columns up to p
            mask = self.step_2L.unfold(0, kv, 1).index_select(0, start_N).view(len(q_BT), 1, -1, kv)
        out = self.inner.base_model(input_ids=ids_BT, attention_mask=mask, position_ids=pos_BT,
                                    past_key_values=self.cache, use_cache=True)
        return out.last_hidden_state

    def _emit(self, rows: list[int], hidden_BH: torch.Tensor, temperature: float) -> None:
        """Samples the next token of each row, and frees the rows that end here."""
        logits_BV = self.inner.get_output_embeddings()(hidden_BH)
        jobs = [self.job_S[row] for row in rows]
        uniform_B = None
        if temperature > 0:
            uniform_B = torch.tensor([job.uniforms[len(job.sample.ids)] for job in jobs], dtype=torch.float64,
                                     device=logits_BV.device)
        # float64 holds ids exactly, so that one transfer is enough
        ids, logps = torch.stack(draw(logits_BV, uniform_B, temperature)).tolist()
        for row, job, token, logp in zip(rows, jobs, map(int, ids), logps):
            if token < 0:
                raise FloatingPointError(f"logits of prompt {job.index} (key {job.key!r}) at new token "
                                         f"{len(job.sample.ids)} are NaN or infinite: check the weights.")
            job.sample.ids.append(token)
            job.sample.logps.append(logp)
            self.ids_SL[row, self.length_S[row]] = token  # not yet in the cache
            if ended := token in self.stop_ids:
                job.sample.stop = "end"
            if ended or len(job.sample.ids) == job.limit:
                self.job_S[row] = None
