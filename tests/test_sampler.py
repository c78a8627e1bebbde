"""Tests of dreamgym.sampler: every figure is compared with a plain forward over the whole text, without a cache."""

import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dreamgym.sampler import Sampler, draw, prefill_chunks, share_tree

torch.set_num_threads(1)
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
V, STOP = 61, 5


def tiny(kind="llama", seed=0, **changes):
    """Random weights, large enough that logits are sharp and a wrong position or a leaked column shows."""
    torch.manual_seed(seed)
    size = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config_class, model_class = KINDS[kind]
    config = config_class(**{**size, "initializer_range": 0.25, "max_position_embeddings": 512, "tie_word_embeddings": True, **changes})
    return model_class(config).eval()


def text(rng, low, high):
    return rng.integers(6, V, rng.integers(low, high)).tolist()


def assert_matches_full_forward(model, prompts, samples, temperature, atol=1e-4):
    for prompt, sample in zip(prompts, samples):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sample.ids])).logits[0, len(prompt) - 1 : -1].double()
        logp = (logits / (temperature or 1)).log_softmax(-1)
        wanted = [logp[t, i].item() for t, i in enumerate(sample.ids)]
        assert np.allclose(sample.logps, wanted, atol=atol), (sample.logps, wanted)
        if temperature == 0:
            assert sample.ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [3, 6, 40])
def test_turns_match_full_forward(kind, slots):
    """Stops wrong positions, leaking pads, and mixed-up slots, for ragged rows over several turns with kept, queued and too many slots."""
    model, rng = tiny(kind), np.random.default_rng(1)
    sampler = Sampler(model, slots, 300, [STOP], 0)
    keys, prompts = list("abcdef"), [text(rng, 1, 40) for _ in range(6)]
    for temperature in (0, 0.7, 0, 1.3):
        samples = sampler.sample(prompts, keys, 15, temperature)
        assert_matches_full_forward(model, prompts, samples, temperature)
        for s in samples:
            assert STOP not in s.ids[:-1] and (s.stop == "end") == (s.ids[-1] == STOP) and (s.stop == "end" or len(s.ids) == 15)
        turn = [(k, p + s.ids + text(rng, 1, 30)) for k, p, s in zip(keys, prompts, samples)]
        rng.shuffle(turn)  # conversations come in another order each turn
        keys, prompts = [k for k, _ in turn], [p for _, p in turn]


def test_kept_cache_computes_only_the_new_tokens():
    """Stops a cache that is silently not used: prefill must be the last sampled token plus the observation."""
    model, rng = tiny(), np.random.default_rng(2)
    sampler = Sampler(model, 4, 300, [], 0)
    prompts = [text(rng, 20, 40) for _ in range(3)]
    samples = sampler.sample(prompts, [0, 1, 2], 9, 1.0)
    assert (sampler.prefill_tok, sampler.decode_tok, sampler.reused_tok) == (sum(map(len, prompts)), 27, 0)
    longer = [p + s.ids + [7, 8] for p, s in zip(prompts, samples)]
    before = sampler.prefill_tok
    sampler.sample(longer, [0, 1, 2], 1, 1.0)
    assert sampler.prefill_tok - before == 3 * (1 + 2) and sampler.reused_tok == sum(map(len, longer)) - 9


def test_diverging_prompt_drops_the_branch():
    """Stops attending to a dropped branch: the new prompt leaves the cached ids in the middle, is shorter, or is only a prefix of them."""
    model, rng = tiny("qwen3"), np.random.default_rng(3)
    sampler = Sampler(model, 2, 200, [], 0)
    base = text(rng, 50, 51)
    sampler.sample([base], ["k"], 10, 1.0)
    for prompt in (base[:30] + [9] + base[31:45], base[:20], base[:20], [8] + base[1:], base[:33] + text(rng, 60, 61)):
        assert_matches_full_forward(model, [prompt], sampler.sample([prompt], ["k"], 6, 0), 0)
    assert sampler.reused_tok == 30 + 19 + 19 + 0 + 0


def test_group_prompt_is_computed_once():
    """Stops n-fold prefill of one task's rollouts, and wrong copies: two groups share a system text, one prompt is a prefix of another."""
    model, rng = tiny("qwen2"), np.random.default_rng(4)
    system, a, b = text(rng, 40, 41), text(rng, 30, 31), text(rng, 25, 26)
    prompts = [system + b, system + a] * 4 + [system + a + [7, 7], system]
    sampler = Sampler(model, 16, 200, [], 0)
    samples = sampler.sample(prompts, list(range(10)), 8, 1.0)
    assert_matches_full_forward(model, prompts, samples, 1.0)
    # `system` first; then a and b from there; then one last token for each of 3 + 3 repeats, and two for the longer one
    assert sampler.prefill_tok == 40 + 30 + 25 + 6 + 2
    assert len({tuple(s.ids) for s in samples[1:8:2]}) == 4  # same prompt, other uniforms
    late = sampler.sample([system + a + [9]], ["late"], 3, 0)  # a new key copies from an old conversation
    assert_matches_full_forward(model, [system + a + [9]], late, 0)
    assert sampler.prefill_tok == 40 + 30 + 25 + 6 + 2 + 1


def test_slots_change_no_result():
    """Stops results that depend on batching: queueing, refills, compaction and order of slots must not change ids."""
    model, rng = tiny(), np.random.default_rng(5)
    first = [text(rng, 1, 50) for _ in range(40)]
    runs = []
    for slots in (1, 4, 33, 64):
        sampler = Sampler(model, slots, 200, [STOP, 11, 12], 7)
        one = sampler.sample(first, list(range(40)), 25, 1.0)
        second = [p + s.ids + [9, 10] for p, s in zip(first, one)][::3]
        runs.append(one + sampler.sample(second, list(range(0, 40, 3)), 25, 1.0))
        assert_matches_full_forward(model, first + second, runs[-1], 1.0)
    assert len({len(s.ids) for s in runs[0]}) > 5  # rows really end at different times
    for run in runs[1:]:
        assert [(s.ids, s.stop) for s in run] == [(s.ids, s.stop) for s in runs[0]]
        assert np.allclose([x for s in run for x in s.logps], [x for s in runs[0] for x in s.logps], atol=1e-4)


def test_conversations_outlive_others_and_lru_goes_first():
    """Stops eviction of a live conversation, and slots swapped without their ids."""
    model, rng = tiny(), np.random.default_rng(6)
    sampler = Sampler(model, 6, 300, [STOP], 0)
    prompts = {k: text(rng, 5, 30) for k in range(6)}
    for use in ([0, 1, 2, 3, 4, 5], [5, 4], [3, 5], [1, 0, 2], [5, 3, 1]):
        samples = sampler.sample([prompts[k] for k in use], use, 10, 1.0)
        assert_matches_full_forward(model, [prompts[k] for k in use], samples, 1.0)
        for k, s in zip(use, samples):
            prompts[k] = prompts[k] + s.ids + [9]
    sampler.sample([text(rng, 3, 4)], ["new"], 2, 1.0)
    assert 4 not in sampler.slot_of and set(sampler.slot_of) == {0, 1, 2, 3, 5, "new"}


def test_context_stop():
    """Stops exceptions and overruns at the end of the context, also with pads that would reach beyond it."""
    model, rng = tiny(), np.random.default_rng(7)
    sampler = Sampler(model, 4, 64, [], 0)
    prompts = [text(rng, n, n + 1) for n in (64, 90, 63, 60, 4)]
    out = sampler.sample(prompts, list(range(5)), 6, 0)
    assert [(len(s.ids), s.stop) for s in out] == [(0, "context"), (0, "context"), (1, "context"), (4, "context"), (6, "length")]
    assert_matches_full_forward(model, prompts[2:], out[2:], 0)
    turn = [prompts[3][:58] + [9] * 4, prompts[4] + out[4].ids + text(rng, 40, 41)]  # 4 and 41 tokens in one chunk: pads of the first pass column 64
    assert_matches_full_forward(model, turn, sampler.sample(turn, [3, 4], 6, 0), 0)
    assert sampler.sample([text(rng, 58, 59)], ["x"], 6, 0)[0].stop == "length"  # both limits at once: nothing was cut
    assert sampler.sample([], [], 6, 1.0) == []


def test_frequencies_equal_softmax():
    """Stops a biased draw: 200k draws against softmax, and never an id of probability 0; log-probs must be those of the drawn ids."""
    logits = torch.tensor([[1.0, float("-inf"), 0.3, -1.0, 2.0, 0.0, float("-inf")]])
    for temperature in (0.5, 1.0, 2.0):
        u = torch.from_numpy(np.random.default_rng(0).random(200_000))
        ids, logp = draw(logits.expand(200_000, -1), u, temperature)
        p = (logits[0].double() / temperature).softmax(-1)
        assert np.abs(np.bincount(ids, minlength=7) / 200_000 - p.numpy()).max() < 4e-3
        assert torch.allclose(logp, p.log()[ids], atol=1e-6) and not {1, 6} & set(ids.tolist())
    ids, _ = draw(logits[:, 1:].expand(2, -1), torch.tensor([0.0, 1 - 2.0**-40], dtype=torch.float64), 1.0)
    assert ids.tolist() == [1, 4]  # both ends of the interval, beside ids of probability 0


def test_sampler_frequencies_equal_softmax():
    """Stops uniforms that are re-used or correlated between rows: first and second tokens of many rows against the exact distribution."""
    model = tiny(initializer_range=0.15)
    sampler = Sampler(model, 256, 16, [], 3)
    prompt = [7, 8, 9]
    pairs = np.array([s.ids for _ in range(24) for s in sampler.sample([prompt] * 256, list(range(256)), 2, 1.0)])
    with torch.no_grad():
        p = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        q = model(torch.tensor([prompt + [i] for i in range(V)])).logits[:, -1].softmax(-1)
    for seen, exact in ((pairs[:, 0], p), (pairs[:, 1], p @ q)):
        exact = exact.double().numpy()
        chi2 = ((np.bincount(seen, minlength=V) - len(pairs) * exact) ** 2 / (len(pairs) * exact)).sum()
        assert chi2 < 2 * V, chi2  # mean V - 1, standard deviation 11


def test_reset_after_weight_change():
    """Stops a stale cache: without reset the old keys and values must show (so the test can see them), with reset all is as new."""
    model, rng = tiny(), np.random.default_rng(8)
    prompts = [text(rng, 30, 40) for _ in range(3)]
    sampler = Sampler(model, 4, 100, [], 0)
    sampler.sample(prompts, [0, 1, 2], 5, 0)
    model.load_state_dict(tiny(seed=9).state_dict())
    stale = sampler.sample(prompts, [0, 1, 2], 5, 0)
    sampler.reset()
    renewed = sampler.sample(prompts, [0, 1, 2], 5, 0)
    fresh = Sampler(model, 4, 100, [], 0).sample(prompts, [0, 1, 2], 5, 0)
    assert renewed == fresh and abs(stale[0].logps[0] - fresh[0].logps[0]) > 1e-3
    assert_matches_full_forward(model, prompts, renewed, 0)


def test_state_resumes_the_draws():
    """Stops resume from repeating or skipping draws; the state must survive JSON."""
    model = tiny()
    a, b = Sampler(model, 4, 50, [], 1), Sampler(model, 4, 50, [], 2)
    a.sample([[7, 8]], [0], 9, 1.0)
    b.set_state(json.loads(json.dumps(a.get_state())))
    assert a.sample([[9, 8]], [1], 9, 1.0) == b.sample([[9, 8]], [1], 9, 1.0)
    assert a.sample([[9, 8]], [2], 9, 1.0) != b.sample([[9, 7]], [2], 9, 1.0)


def test_suppressed_ids_and_generation_config_are_respected_or_ignored():
    """Stops a suppressed id from being sampled, and a checkpoint's top_k, temperature or eos from changing the distribution."""
    model = tiny()
    plain = Sampler(model, 4, 60, [], 1).sample([[7, 8]], [0], 20, 1.0)
    model.generation_config.update(do_sample=True, top_k=1, temperature=0.1, repetition_penalty=3.0, eos_token_id=plain[0].ids[2])
    assert Sampler(model, 4, 60, [], 1).sample([[7, 8]], [0], 20, 1.0) == plain
    banned = sorted(set(plain[0].ids))[:5]
    s = Sampler(model, 4, 60, [], 1, suppress_ids=banned).sample([[7, 8]], [0], 40, 1.0)[0]
    with torch.no_grad():
        logits = model(torch.tensor([[7, 8] + s.ids])).logits[0, 1:-1]
    logits[:, banned] = float("-inf")
    assert not set(banned) & set(s.ids) and np.allclose(s.logps, logits.log_softmax(-1)[range(40), s.ids], atol=1e-4)


def test_lora_in_training_mode():
    """Stops adapters from being skipped, dropout from being on while sampling, gradient checkpointing from dropping the cache, and a changed mode."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny("qwen3"), peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False))
    model.gradient_checkpointing_enable()
    model.train()
    sampler = Sampler(model, 4, 100, [], 0)
    prompts = [[7, 8, 9, 10], [11, 12]]
    samples = sampler.sample(prompts, [0, 1], 12, 0)
    assert model.training and sampler.decode_tok == 24
    model(torch.tensor([prompts[0]])).logits.sum().backward()  # nothing of inference mode is left in the model
    model.eval()
    assert_matches_full_forward(model, prompts, samples, 0)
    with model.disable_adapter(), torch.no_grad():
        assert model(torch.tensor([prompts[0] + samples[0].ids])).logits[0, 3:-1].argmax(-1).tolist() != samples[0].ids


def test_attention_and_dtype_variants():
    """Stops a mask of the wrong form or dtype: eager attention, bfloat16, and a prompt longer than one forward."""
    rng = np.random.default_rng(9)
    eager = tiny("qwen2", attn_implementation="eager")
    prompts = [text(rng, 3, 40) for _ in range(5)]
    assert_matches_full_forward(eager, prompts, Sampler(eager, 3, 100, [], 0).sample(prompts, list(range(5)), 9, 0), 0)
    half = tiny().bfloat16()
    out = Sampler(half, 3, 100, [], 0).sample(prompts, list(range(5)), 9, 1.0)
    assert_matches_full_forward(half, prompts, out, 1.0, atol=0.3)
    model, long = tiny(), [text(rng, 2500, 2501), text(rng, 1100, 1101)]
    sampler = Sampler(model, 2, 3000, [], 0)
    assert_matches_full_forward(model, long, sampler.sample(long, [0, 1], 3, 0), 0, atol=1e-3)


def test_nan_logits_name_the_row():
    """Stops sampling from NaN, and NaN left in the cache from poisoning later calls."""
    model = tiny(tie_word_embeddings=False)  # so that only rows that read id 30 break
    sampler = Sampler(model, 4, 60, [], 0)
    good = sampler.sample([[7, 8], [9, 10]], ["a", "b"], 4, 0)
    sampler.reset()
    saved = model.model.embed_tokens.weight[30].detach().clone()
    model.model.embed_tokens.weight.data[30] = float("nan")
    for temperature in (0, 1.0):
        with pytest.raises(FloatingPointError, match="prompt 1 .key 'b'."):
            sampler.sample([[7, 8], [9, 30]], ["a", "b"], 4, temperature)
    model.model.embed_tokens.weight.data[30] = saved
    assert sampler.sample([[7, 8], [9, 10]], ["a", "b"], 4, 0) == good


def test_bad_input_is_refused():
    """Stops silent nonsense at the boundary."""
    sampler = Sampler(tiny(), 2, 50, [], 0)
    bad = ([[]], [0], 5, 1.0), ([[V]], [0], 5, 1.0), ([[7], [8]], [0, 0], 5, 1.0), ([[7]], [0], 0, 1.0), ([[7]], [0], 5, -1.0)
    for prompts, keys, n, temperature in bad:
        with pytest.raises(ValueError, match="expected|unique"):
            sampler.sample(prompts, keys, n, temperature)
    window = tiny("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding_window = 16"):
        Sampler(window, 2, 50, [], 0)
    assert_matches_full_forward(window, [[7, 8]], Sampler(window, 2, 16, [], 0).sample([[7, 8]], [0], 10, 0), 0)


def test_prefill_chunks_and_share_tree():
    """Stops rows lost or padded without limit in prefill, copies from a prompt not computed yet or sharing less, and long chains of copies."""
    rng = np.random.default_rng(10)
    length = rng.integers(1, 300, 128)
    chunks = prefill_chunks(length, 4096)
    assert sorted(np.concatenate(chunks)) == list(range(128))
    padded = sum(length[c].max() * len(c) for c in chunks)
    assert padded <= 1.3 * length.sum() and all(length[c].max() * len(c) <= 4096 and (np.diff(length[c]) <= 0).all() for c in chunks)
    prompts = [[1] * rng.integers(10, 30) + rng.integers(1, 3, rng.integers(1, 20)).tolist() for _ in range(60)]
    order, parent, shared = share_tree(prompts)
    for at, i in enumerate(order):
        best = max((sum(np.cumprod([x == y for x, y in zip(prompts[i], prompts[j])])) for j in order[:at]), default=0)
        assert (parent[i] == -1 and best < 16) or (parent[i] in order[:at] and shared[i] == best)
        assert parent[i] == -1 or prompts[parent[i]][: shared[i]] == prompts[i][: shared[i]]
    order, parent, _ = share_tree([[1] * 40] * 8)
    assert sorted(parent) == [-1] + [order[0]] * 7
