"""Batched decoding for any full-attention Hugging Face causal LM, with a KV cache that is kept across the
turns of a conversation.

Ids in, ids and log-probs out: `Sampler(model, slots, context, stop_ids, seed).sample(prompts, keys,
max_new_tok, temperature)`. Each cache row ("slot") belongs to one conversation key; a later prompt of that
key computes only what differs from the cached ids. Column c of a slot is position c of its text: no left
padding, no holes. Pads at the right end of a prefill chunk leave garbage behind the row's length, where no
query looks and which later tokens overwrite. Left out on purpose: the model's generation_config, beams, top-k
and top-p (the sampled distribution is the one that is trained), sliding windows shorter than the context.

Legend: B rows, T tokens, V vocabulary, H hidden, S slots, P prompts of a call. Slot s is row s of the cache
tensors [S, heads, columns, head_dim].
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

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
class _Window:
    """Which part of the cache the current forward writes and reads; one object shared by all layers."""

    rows_B1: torch.Tensor | None = None
    cols_BT: torch.Tensor | None = None
    kv: int = 0  # columns that can be visible to some query
    fresh: bool = False  # all rows begin at column 0: attention needs nothing but the new keys
    view: int = 0  # > 0: rows are exactly 0..view-1, so the cache is read without a copy


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, preallocated and written in place; grows in columns by need."""

    def __init__(self, slots: int, window: _Window):
        super().__init__()
        self.slots, self.window, self.columns = slots, window, 0

    def lazy_initialization(self, key_states, value_states):
        # zeros and not empty: a masked column that holds NaN would still poison the row (0 * NaN)
        shapes = [(self.slots, x.shape[1], self.columns, x.shape[3]) for x in (key_states, value_states)]
        grown = [key_states.new_zeros(shape) for shape in shapes]
        if self.is_initialized:
            for new, old in zip(grown, (self.keys, self.values)):
                new[:, :, : old.shape[2]] = old
        self.keys, self.values = grown
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized or self.keys.shape[2] < self.columns:
            self.lazy_initialization(key_states, value_states)
        w = self.window
        self.keys[w.rows_B1, :, w.cols_BT] = key_states.transpose(1, 2)
        self.values[w.rows_B1, :, w.cols_BT] = value_states.transpose(1, 2)
        if w.fresh:
            return key_states, value_states
        if w.view:
            return self.keys[: w.view, :, : w.kv], self.values[: w.view, :, : w.kv]
        rows_B = w.rows_B1[:, 0]
        keys, values = self.keys[:, :, : w.kv], self.values[:, :, : w.kv]
        return keys.index_select(0, rows_B), values.index_select(0, rows_B)

    def copy_rows(self, dst, src, columns: int):
        """Copies the first `columns` columns of rows `src` over those of rows `dst`; right for a swap too,
        since the source is gathered first."""
        for x in (self.keys, self.values):
            x[:, :, :columns][dst] = x[:, :, :columns].index_select(0, src)

    def drop(self):
        self.keys = self.values = None
        self.is_initialized, self.columns = False, 0

    def get_mask_sizes(self, query_length):  # asked only without a ready mask: all rows are fresh
        return query_length, 0

    def get_seq_length(self):
        return 0

    def get_max_length(self):
        return -1


@dataclass
class _Call:
    """State of one `sample` call; arrays are indexed by prompt."""

    prompts: list
    arrays: list
    keys: list
    temperature: float
    uniform_PT: np.ndarray | None
    limit_P: np.ndarray  # tokens each prompt may still generate
    queue: deque
    ids_PT: np.ndarray
    logp_PT: np.ndarray
    count_P: np.ndarray
    ended_P: np.ndarray


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of equal leading entries of two id arrays."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    at = int(differ.argmax()) if n else 0
    return at if n and differ[at] else n


def draw(logits_BV: torch.Tensor, uniform_B: torch.Tensor | None, temperature: float,
         ) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one id per row by inverse CDF (float64), or takes the argmax when temperature is 0.

    Returns ids [B] (-1 where the logits hold NaN, +inf, or nothing finite) and log-probs [B] float64 of
    softmax(logits / temperature), or of softmax(logits) when greedy. One uniform in [0, 1) per row instead of
    V random numbers: p = (.2, .5, .3), u = .2 -> id 1, the first with CDF > u.
    """
    logits_BV = logits_BV.float()
    top_B1, argmax_B1 = logits_BV.max(-1, keepdim=True)
    z_BV = logits_BV - top_B1 if temperature in (0, 1) else (logits_BV - top_B1) / temperature
    if temperature == 0:
        total_B1, ids_B1 = z_BV.exp().sum(-1, keepdim=True, dtype=torch.float64), argmax_B1
    else:
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


def share_tree(prompts: list) -> tuple[list[int], list[int], list[int]]:
    """Lexicographic order, then for each prompt which one before it in that order to copy a computed prefix
    from (-1: none) and how many tokens.

    In that order no earlier prompt shares more with a prompt than its neighbour does. Where the neighbour
    itself copies at least as much from its own parent, that parent is as good, which keeps the tree as
    shallow as the real branching: 8 equal prompts are one parent and 7 children.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    parent, shared = [-1] * len(prompts), [0] * len(prompts)
    for before, here in itertools.pairwise(order):
        n = _common_prefix(np.asarray(prompts[before]), np.asarray(prompts[here]))
        if n < MIN_SHARE_TOK:
            continue
        while parent[before] >= 0 and shared[before] >= n:
            before = parent[before]
        parent[here], shared[here] = before, n
    return order, parent, shared


class Sampler:
    """Decodes with one model; see the module text. Call `clear_caches` whenever the weights change.

    slots: rows decoded at once and conversations remembered. context: longest prompt plus answer in tokens.
    stop_ids: ids that end a row. seed_or_generator: int or numpy Generator. FSDP2 models must be unsharded by
    the caller around `sample`. Raises ValueError for models whose decoding would differ from their forward.
    """

    def __init__(self, model, slots: int, context: int, stop_ids: Sequence[int], seed_or_generator):
        self.model = model
        # PEFT keeps its adapters inside the modules of the base model
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.inner, self.body, self.head = inner, inner.base_model, inner.get_output_embeddings()
        _check_model(model, inner, context)
        if slots < 1 or context < 2:
            raise ValueError(f"slots = {slots}, context = {context}: expected at least 1 and at least 2.")
        self.slots, self.context, self.vocab = slots, context, inner.config.vocab_size
        self.stop_ids = np.array(list(stop_ids), np.int64)
        self.generator = np.random.default_rng(seed_or_generator)
        self.window = _Window()
        self.layers = [_SlotLayer(slots, self.window) for _ in range(inner.config.num_hidden_layers)]
        self.cache = Cache(layers=self.layers)
        self.prefill_tok = self.reused_tok = 0  # prompt tokens computed | found in the cache or copied there
        self.decode_tok = 0                     # tokens sampled
        self.calls = 0
        self.ids_SL = np.zeros((slots, context), np.int32)  # untouched pages of a long context cost no memory
        self.length_S = np.zeros(slots, np.int64)  # ids whose keys and values are in the cache
        self.used_S = np.full(slots, -1)  # call that used the slot last, -1 free
        self.job_S = np.full(slots, -1)  # prompt being decoded there, -1 idle
        self.token_S = np.zeros(slots, np.int64)  # sampled, not yet in the cache
        self.key_S = [None] * slots
        self.slot_of = {}

    def clear_caches(self) -> None:
        """Drops all cached ids, keys and values, and frees their memory; needed after the weights change."""
        for layer in self.layers:
            layer.drop()
        self.length_S[:], self.used_S[:], self.job_S[:] = 0, -1, -1
        self.key_S, self.slot_of = [None] * self.slots, {}

    def get_state(self) -> dict:
        """State of the random generator as plain JSON values; the cache is no part of it (it changes speed
        only)."""
        return self.generator.bit_generator.state

    def set_state(self, state: dict) -> None:
        self.generator.bit_generator.state = state

    @torch.inference_mode()
    def sample(self, prompts: list[list[int]], keys: list, max_new_tok: int, temperature: float,
               ) -> list[Sample]:
        """Generates up to max_new_tok tokens after each prompt; one Sample per prompt, in order.

        keys: hashable, unique within the call; each names a conversation whose cache is re-used as far as the
        ids agree. temperature 0 is greedy. More prompts than slots are queued. The uniforms depend only on
        the generator, the prompt's index and the token's index, so neither slots nor neighbours change a
        result (up to rounding). Raises ValueError for bad input and FloatingPointError naming the row when
        logits are not finite.
        """
        call = self._begin(prompts, keys, max_new_tok, temperature)
        was_training = self.model.training
        self.model.eval()  # no dropout; in training mode gradient checkpointing would ignore the cache
        try:
            self._run(call)
        except BaseException:
            self.clear_caches()  # rows may be half written, or hold NaN
            raise
        finally:
            self.model.train(was_training)
        return [_sample_of(call, i, max_new_tok) for i in range(len(prompts))]

    def _begin(self, prompts, keys, max_new_tok, temperature) -> _Call:
        if len(keys) != len(prompts) or len(set(keys)) != len(keys):
            raise ValueError(f"{len(prompts)} prompts, {len(keys)} keys, {len(set(keys))} of them different: "
                             "give one unique key per prompt.")
        if max_new_tok < 1 or not temperature >= 0:
            raise ValueError(f"max_new_tok = {max_new_tok}, temperature = {temperature}: "
                             "expected at least 1 and at least 0.")
        arrays = [np.asarray(p, np.int64) for p in prompts]
        for i, a in enumerate(arrays):
            if not len(a) or a.min() < 0 or a.max() >= self.vocab:
                found = f"ids {a.min()}..{a.max()}" if len(a) else "no tokens"
                raise ValueError(f"prompt {i} (key {keys[i]!r}) has {found}: expected at least one token, "
                                 f"ids in 0..{self.vocab - 1}.")
        self.device, self.dtype = self.inner.device, self.inner.dtype
        self.is_sdpa = self.inner.config._attn_implementation == "sdpa"
        P = len(prompts)
        limit_P = np.clip([self.context - len(a) for a in arrays], 0, max_new_tok).astype(np.int64)
        # scaled down by 2**-40 so that u * total never rounds up to total
        uniform_PT = self.generator.random((P, max_new_tok)) * (1 - 2.0**-40) if temperature > 0 else None
        self.calls += 1
        todo = [i for i in range(P) if limit_P[i]]
        # those with a cache first: nobody may evict them
        queue = deque(sorted(todo, key=lambda i: keys[i] not in self.slot_of))
        width = min(max_new_tok, self.context)
        ids_PT, logp_PT = np.zeros((P, width), np.int64), np.zeros((P, width))
        return _Call(prompts, arrays, keys, temperature, uniform_PT, limit_P, queue, ids_PT, logp_PT,
                     count_P=np.zeros(P, np.int64), ended_P=np.zeros(P, bool))

    def _run(self, call: _Call) -> None:
        # a refill costs a forward of its own, so wide batches wait until 1/16 of the slots is idle
        refill_at = max(1, self.slots // 16)
        while True:
            live = np.flatnonzero(self.job_S >= 0)
            if call.queue and (not len(live) or self.slots - len(live) >= refill_at):
                self._admit(call)
                continue
            if not len(live):
                return
            if live[-1] + 1 > 1.25 * len(live):
                live = self._compact(live)
            self._decode(call, live)

    def _admit(self, call: _Call) -> None:
        """Gives queued prompts their slots, copies shared prefixes, prefills the rest and samples each row's
        first token."""
        rows, fresh = [], []
        is_idle = self.job_S < 0
        age_S = np.where(is_idle, self.used_S, np.iinfo(np.int64).max)
        idle = iter(np.argsort(age_S, kind="stable")[: int(is_idle.sum())])  # the longest unused first
        mine = {self.slot_of[call.keys[i]] for i in call.queue if call.keys[i] in self.slot_of}
        while call.queue:
            i = call.queue[0]
            row = self.slot_of.get(call.keys[i])
            if row is None:
                row = next((r for r in idle if r not in mine), None)
                if row is None:
                    break
                if self.used_S[row] >= 0:
                    del self.slot_of[self.key_S[row]]
                self.slot_of[call.keys[i]], self.key_S[row] = row, call.keys[i]
                fresh.append(row)
            call.queue.popleft()
            prompt = call.arrays[i]
            cached = _common_prefix(self.ids_SL[row, : self.length_S[row]], prompt)
            self.length_S[row] = min(cached, len(prompt) - 1)
            self.ids_SL[row, self.length_S[row] : len(prompt)] = prompt[self.length_S[row] :]
            self.job_S[row], self.used_S[row] = i, self.calls
            rows.append(row)
        hidden, order = [], []
        for wave, copies in self._waves(call, rows, fresh):
            if copies:
                dst, src, n = (np.array(x) for x in zip(*copies))
                self._copy_rows(dst, src, int(n.max()))
                self.length_S[dst] = n
            end_B = np.array([len(call.arrays[i]) for i in self.job_S[wave]])
            self.reused_tok += int(self.length_S[wave].sum())
            self.prefill_tok += int((end_B - self.length_S[wave]).sum())
            for chunk in prefill_chunks(end_B - self.length_S[wave]):
                hidden.append(self._prefill(wave[chunk], end_B[chunk]))
                order.append(wave[chunk])
        self._emit(call, np.concatenate(order), torch.cat(hidden))

    def _waves(self, call: _Call, rows: list, fresh: list) -> list:
        """Orders admitted rows so that each comes after the row it copies from: [(rows, [(to, from,
        tokens)])]. Only rows new to their key copy."""
        prompts = [call.arrays[self.job_S[r]] for r in fresh]
        order, parent, shared = share_tree([call.prompts[self.job_S[r]] for r in fresh])
        depth, copies = dict.fromkeys(rows, 0), {}
        known = np.flatnonzero(self.length_S >= MIN_SHARE_TOK)  # cached before these rows are prefilled
        for i in order:  # parents come before their children
            row, source, n, wave = fresh[i], -1, shared[i], 0
            if parent[i] >= 0:
                source, wave = fresh[parent[i]], depth[fresh[parent[i]]] + 1
            if len(known):
                equal = self.ids_SL[known, : len(prompts[i])] == prompts[i]
                same = np.where(equal.all(1), len(prompts[i]), equal.argmin(1))
                cached = np.minimum(same, self.length_S[known])
                if cached.max() >= n:
                    source, n, wave = int(known[cached.argmax()]), int(cached.max()), 0
            n = min(n, len(prompts[i]) - 1)
            if source != row and n >= self.length_S[row] + MIN_SHARE_TOK:
                copies[row], depth[row] = (row, source, n), wave
        waves = [[r for r in rows if depth[r] == d] for d in range(max(depth.values()) + 1)]
        return [(np.array(wave), [copies[r] for r in wave if r in copies]) for wave in waves]

    def _copy_rows(self, dst: np.ndarray, src: np.ndarray, columns: int) -> None:
        to, source = torch.from_numpy(dst).to(self.device), torch.from_numpy(src).to(self.device)
        for layer in self.layers:
            layer.copy_rows(to, source, columns)

    def _compact(self, live: np.ndarray) -> np.ndarray:
        """Swaps live rows from the back with idle rows in front: rows 0..n-1 are then read as a view of the
        cache."""
        n = len(live)
        back, hole = live[live >= n], np.setdiff1d(np.arange(n), live)
        dst, src = np.concatenate([back, hole]), np.concatenate([hole, back])
        self._copy_rows(dst, src, int(self.length_S[dst].max()))
        for x in (self.ids_SL, self.length_S, self.used_S, self.job_S, self.token_S):
            x[dst] = x[src]
        for a, b in zip(back, hole):
            self.key_S[a], self.key_S[b] = self.key_S[b], self.key_S[a]
        self.slot_of = {key: row for row, key in enumerate(self.key_S) if self.used_S[row] >= 0}
        return np.arange(n)

    def _prefill(self, rows: np.ndarray, end_B: np.ndarray) -> torch.Tensor:
        """Computes columns length..end of each row (longest first); returns the hidden state of each row's
        last token [B, H]."""
        start_B, last_BH = self.length_S[rows], None
        todo_B = end_B - start_B
        for at in range(0, int(todo_B[0]), PIECE_TOK):
            B = int((todo_B > at).sum())
            T = int(min(todo_B[0] - at, PIECE_TOK))
            # pads of rows near the end of the context all land on its last column, which no row ever needs
            cols_BT = np.minimum(start_B[:B, None] + np.arange(at, at + T), self.context - 1)
            kv = int(np.minimum(end_B[:B], start_B[:B] + at + T).max())
            fresh = self.is_sdpa and at == 0 and not start_B.any()
            hidden_BTH = self._forward(rows[:B], cols_BT, kv, fresh)
            if last_BH is None:
                last_BH = hidden_BTH.new_empty(len(rows), hidden_BTH.shape[2])
            ending = torch.from_numpy(np.flatnonzero((todo_B > at) & (todo_B <= at + T)))
            last_BH[ending] = hidden_BTH[ending, torch.from_numpy(todo_B)[ending] - 1 - at]
        self.length_S[rows] = end_B
        return last_BH

    def _decode(self, call: _Call, live: np.ndarray) -> None:
        """One token for every live row. Idle rows among them compute along on the column behind their text,
        where it does no harm."""
        n = int(live[-1]) + 1
        length = self.length_S[live]
        self.ids_SL[live, length] = self.token_S[live]
        hidden_BTH = self._forward(np.arange(n), self.length_S[:n, None], int(length.max()) + 1, view=n)
        self.length_S[live] += 1
        hidden_BH = hidden_BTH[:, 0]
        if len(live) < n:
            hidden_BH = hidden_BH[torch.from_numpy(live).to(self.device)]
        self._emit(call, live, hidden_BH)

    def _forward(self, rows: np.ndarray, cols_BT: np.ndarray, kv: int, fresh: bool = False, view: int = 0,
                 ) -> torch.Tensor:
        need = int(cols_BT.max()) + 1
        if need > self.layers[0].columns:
            columns = min(self.context, max(need, self.layers[0].columns * 5 // 4) + 63 & ~63)
            for layer in self.layers:
                layer.columns = columns
        ids_BT = torch.from_numpy(self.ids_SL[rows[:, None], cols_BT].astype(np.int64)).to(self.device)
        rows_B1 = torch.from_numpy(rows[:, None]).to(self.device)
        pos_BT = torch.from_numpy(cols_BT).to(self.device)
        w = self.window
        w.rows_B1, w.cols_BT, w.kv, w.fresh, w.view = rows_B1, pos_BT, kv, fresh, view
        mask = None
        if not fresh:
            q_BT = pos_BT[:1] if (cols_BT[:, 0] == cols_BT[0, 0]).all() else pos_BT
            hidden = torch.arange(kv, device=self.device) > q_BT[:, None, :, None]
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            mask.masked_fill_(hidden, float("-inf"))
        out = self.body(input_ids=ids_BT, attention_mask=mask, position_ids=pos_BT,
                        past_key_values=self.cache, use_cache=True)
        return out.last_hidden_state

    def _emit(self, call: _Call, rows: np.ndarray, hidden_BH: torch.Tensor) -> None:
        """Samples the next token of each row, stores it, and frees the rows that end here."""
        logits_BV = self.head(hidden_BH)
        jobs = self.job_S[rows]
        at = call.count_P[jobs]
        uniform_B = None
        if call.uniform_PT is not None:
            uniform_B = torch.from_numpy(call.uniform_PT[jobs, at]).to(self.device)
        # float64 holds ids exactly, so that one transfer is enough
        ids, logp = torch.stack(draw(logits_BV, uniform_B, call.temperature)).cpu().numpy()
        ids = ids.astype(np.int64)
        if ids.min() < 0:
            i = int(jobs[ids.argmin()])
            where = f"prompt {i} (key {call.keys[i]!r}) at new token {call.count_P[i]}"
            raise FloatingPointError(f"logits of {where} are NaN or infinite: check the weights.")
        call.ids_PT[jobs, at], call.logp_PT[jobs, at] = ids, logp
        call.count_P[jobs] += 1
        self.token_S[rows] = ids
        self.decode_tok += len(rows)
        ended = np.isin(ids, self.stop_ids)
        call.ended_P[jobs] = ended
        self.job_S[rows[ended | (at + 1 >= call.limit_P[jobs])]] = -1


def _sample_of(call: _Call, i: int, max_new_tok: int) -> Sample:
    n = int(call.count_P[i])
    stop = "end" if call.ended_P[i] else "context" if n < max_new_tok else "length"
    return Sample(call.ids_PT[i, :n].tolist(), call.logp_PT[i, :n].tolist(), stop)


def _check_model(model, inner, context: int) -> None:
    """Refuses models whose cached decoding here would not equal their own forward."""
    config = inner.config
    found = [] if inner.get_output_embeddings() is not None else ["a model without a language-model head"]
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        found.append("a PEFT prompt-learning adapter (it prepends virtual tokens)")
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):  # applied after the head
        if getattr(config, name, None) not in (None, 1):
            found.append(f"{name} = {getattr(config, name)}")
    if config._attn_implementation.startswith(("flash", "flex", "paged")):
        found.append(f"attention {config._attn_implementation!r} (load with attn_implementation='sdpa')")
    types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if "sliding_attention" in types or not types else None
    too_short = window and getattr(config, "use_sliding_window", True) and window < context
    if types - {"full_attention", "sliding_attention"} or too_short:
        found.append(f"layers {sorted(types)} with sliding_window = {window} at context = {context} "
                     "(expected attention over the whole context)")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        found.append(f"rope_type {rope!r} (positions change with the longest row of the batch)")
    if found:
        raise ValueError(f"The sampler cannot decode {type(inner).__name__}: {'; '.join(found)}.")
