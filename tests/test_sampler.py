"""dreamgym.sampler: every figure is compared with a plain forward over the whole text, without a cache."""
import numpy as np
import pytest
import torch

from dreamgym.sampler import Sampler, draw, prefill_chunks
from tests.conftest import random_model

V, STOP = 61, 5


def tiny(kind="llama", seed=0, **changes):
    return random_model(kind, V, seed, **{"tie_word_embeddings": True} | changes)


def text(rng, low, high=None):
    return rng.integers(6, V, rng.integers(low, high or low + 1)).tolist()


def assert_full_forward(model, prompts, samples, temperature=0, atol=1e-4):
    for prompt, sample in zip(prompts, samples, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sample.ids])).logits[0, len(prompt) - 1:-1].double()
        logp = (logits / (temperature or 1)).log_softmax(-1)
        own = [logp[t, i].item() for t, i in enumerate(sample.ids)]
        assert np.allclose(sample.logps, own, atol=atol, rtol=0)
        if temperature == 0:
            assert sample.ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
@pytest.mark.parametrize("slots", [3, 40])
def test_turns_match_full_forward(kind, slots):
    """Wrong positions, leaking pads and mixed-up slots."""
    model, rng = tiny(kind).double(), np.random.default_rng(1)
    sampler = Sampler(model, slots, 300, [STOP], 0)
    keys, prompts = list("abcdef"), [text(rng, 1, 40) for _ in range(6)]
    for temperature in (0, 0.7, 1.3):
        samples = sampler.sample(prompts, keys, 12, temperature)
        assert_full_forward(model, prompts, samples, temperature, atol=1e-6)
        for s in samples:
            assert STOP not in s.ids[:-1] and (s.stop == "end") == (s.ids[-1] == STOP)
            assert s.stop == "end" or len(s.ids) == 12
        turn = [(k, p + s.ids + text(rng, 1, 30)) for k, p, s in zip(keys, prompts, samples)]
        rng.shuffle(turn)
        keys, prompts = [k for k, _ in turn], [p for _, p in turn]


def test_only_new_tokens_are_computed():
    """A cache that is silently not used, and attention to a branch that the new prompt has left."""
    model, rng = tiny("qwen3"), np.random.default_rng(2)
    sampler = Sampler(model, 4, 300, [], 0)
    prompts = [text(rng, 20, 40) for _ in range(3)]
    samples = sampler.sample(prompts, [0, 1, 2], 9, 1.0)
    sampler.sample([p + s.ids + [7, 8] for p, s in zip(prompts, samples)], [0, 1, 2], 1, 1.0)
    assert sampler.prefill_tok == sum(map(len, prompts)) + 3 * (1 + 2)
    base = text(rng, 50)
    sampler.sample([base], ["k"], 10, 1.0)
    for prompt, reused in ((base[:30] + [3] + base[31:45], 30), (base[:20], 19), (base[:20], 19),
                           ([4] + base[1:], 0), (base[:33] + text(rng, 60), 0)):
        before = sampler.prefill_tok
        assert_full_forward(model, [prompt], sampler.sample([prompt], ["k"], 6, 0))
        assert sampler.prefill_tok - before == len(prompt) - reused


def test_shared_prefixes_are_computed_once():
    """N-fold prefill of one task's rollouts, wrong copies between slots, and long chains of copies."""
    model, rng = tiny("qwen2"), np.random.default_rng(4)
    system, a, b = text(rng, 40), text(rng, 30), text(rng, 25)
    prompts = [system + b, system + a] * 4 + [system + a + [7, 7], system]
    sampler = Sampler(model, 16, 200, [], 0)
    samples = sampler.sample(prompts, list(range(10)), 8, 1.0)
    assert_full_forward(model, prompts, samples, 1.0)
    # `system`; a and b from there; one last token for each of 3 + 3 repeats, and two for the longer one
    assert sampler.prefill_tok == 40 + 30 + 25 + 6 + 2
    assert len({tuple(s.ids) for s in samples[1:8:2]}) == 4  # same prompt, other uniforms
    late = sampler.sample([system + a + [9]], ["late"], 3, 0)  # a new key copies from an old conversation
    assert_full_forward(model, [system + a + [9]], late)
    assert sampler.prefill_tok == 40 + 30 + 25 + 6 + 2 + 1
    prompts = sorted([1] * rng.integers(10, 30) + rng.integers(1, 3, rng.integers(1, 20)).tolist()
                     for _ in range(60))
    sampler = Sampler(model, 60, 200, [], 0)
    assert_full_forward(model, prompts, sampler.sample(prompts, list(range(60)), 1, 0))
    common = lambda x, y: sum(np.cumprod([a == b for a, b in zip(x, y)]))
    best = [max((common(p, q) for q in prompts[:i]), default=0) for i, p in enumerate(prompts)]
    assert sampler.prefill_tok == sum(len(p) - (min(n, len(p) - 1) if min(n, len(p) - 1) >= 16 else 0)
                                      for p, n in zip(prompts, best))
    sampler, forwards = Sampler(model, 8, 200, [], 0), []
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    sampler.sample([system] * 8, list(range(8)), 1, 0)
    assert len(forwards) == 2  # one source, then seven copies


def test_slots_change_no_result():
    model, rng = tiny(), np.random.default_rng(5)
    first = [text(rng, 1, 50) for _ in range(36)]
    runs = []
    for slots in (1, 5, 64):
        sampler = Sampler(model, slots, 200, [STOP, 11, 12], 7)
        one = sampler.sample(first, list(range(36)), 20, 1.0)
        second = [p + s.ids + [9, 10] for p, s in zip(first, one)][::3]
        runs.append(one + sampler.sample(second, list(range(0, 36, 3)), 20, 1.0))
    assert_full_forward(model, first + second, runs[-1], 1.0)
    assert len({len(s.ids) for s in runs[0]}) > 5  # rows really end at different times
    for run in runs[1:]:
        assert [(s.ids, s.stop) for s in run] == [(s.ids, s.stop) for s in runs[0]]


def test_least_recently_used_goes_first():
    """Eviction of a live conversation, and slots swapped without their ids."""
    model, rng = tiny(), np.random.default_rng(6)
    sampler = Sampler(model, 6, 300, [STOP], 0)
    prompts = {k: text(rng, 5, 30) for k in range(6)}
    for use in ([0, 1, 2, 3, 4, 5], [5, 4], [3, 5], [1, 0, 2], [5, 3, 1]):
        samples = sampler.sample([prompts[k] for k in use], use, 10, 1.0)
        assert_full_forward(model, [prompts[k] for k in use], samples, 1.0)
        for k, s in zip(use, samples):
            prompts[k] = prompts[k] + s.ids + [9]
    sampler.sample([text(rng, 3)], ["new"], 2, 1.0)
    assert set(sampler.slot_of) == {0, 1, 2, 3, 5, "new"}


def test_context_stop():
    """Exceptions and overruns at the end of the context, also with pads that would reach beyond it."""
    model, rng = tiny(), np.random.default_rng(7)
    sampler = Sampler(model, 4, 64, [], 0)
    prompts = [text(rng, n) for n in (64, 90, 63, 60, 4)]
    out = sampler.sample(prompts, list(range(5)), 6, 0)
    assert [(len(s.ids), s.stop) for s in out] == [
        (0, "context"), (0, "context"), (1, "context"), (4, "context"), (6, "length")]
    assert_full_forward(model, prompts[2:], out[2:])
    # pads of the first pass column 64
    turn = [prompts[3][:58] + [9] * 4, prompts[4] + out[4].ids + text(rng, 40)]
    assert_full_forward(model, turn, sampler.sample(turn, [3, 4], 6, 0))
    assert sampler.sample([text(rng, 58)], ["x"], 6, 0)[0].stop == "length"  # both limits at once
    assert sampler.sample([], [], 6, 1.0) == []


def test_frequencies_equal_softmax():
    """A biased draw, an id of probability 0."""
    logits = torch.tensor([[1.0, float("-inf"), 0.3, -1.0, 2.0, 0.0, float("-inf")]])
    for temperature in (0.5, 1.0):
        u = torch.from_numpy(np.random.default_rng(0).random(200_000))
        ids, logp = draw(logits.expand(200_000, -1), u, temperature)
        p = (logits[0].double() / temperature).softmax(-1)
        assert np.abs(np.bincount(ids, minlength=7) / 200_000 - p.numpy()).max() < 4e-3
        assert torch.allclose(logp, p.log()[ids], atol=1e-6) and not {1, 6} & set(ids.tolist())
    ends = torch.tensor([0.0, 1 - 2.0**-40], dtype=torch.float64)
    assert draw(logits[:, 1:].expand(2, -1), ends, 1.0)[0].tolist() == [1, 4]  # beside ids of probability 0
    model, prompt = tiny(initializer_range=0.15), [7, 8, 9]
    sampler = Sampler(model, 256, 16, [], 3)
    draws = [sampler.sample([prompt] * 256, list(range(256)), 2, 1.0) for _ in range(16)]
    pairs = np.array([s.ids for samples in draws for s in samples])
    with torch.no_grad():
        p = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        q = model(torch.tensor([prompt + [i] for i in range(V)])).logits[:, -1].softmax(-1)
    for seen, exact in ((pairs[:, 0], p), (pairs[:, 1], p @ q)):
        exact = len(pairs) * exact.double().numpy()
        chi_square = ((np.bincount(seen, minlength=V) - exact) ** 2 / exact).sum()
        assert chi_square < 2 * V  # mean V - 1, deviation 11


def test_clear_caches_after_a_weight_change():
    """A stale cache: without clearing the old values must show (so the test can see them)."""
    model, rng = tiny(), np.random.default_rng(8)
    prompts = [text(rng, 30, 40) for _ in range(3)]
    sampler = Sampler(model, 4, 100, [], 0)
    sampler.sample(prompts, [0, 1, 2], 5, 0)
    model.load_state_dict(tiny(seed=9).state_dict())
    stale = sampler.sample(prompts, [0, 1, 2], 5, 0)
    sampler.clear_caches()
    fresh = Sampler(model, 4, 100, [], 0).sample(prompts, [0, 1, 2], 5, 0)
    assert sampler.sample(prompts, [0, 1, 2], 5, 0) == fresh
    assert abs(stale[0].logps[0] - fresh[0].logps[0]) > 1e-3


def test_bfloat16_and_prompts_longer_than_one_forward():
    """A mask of the wrong form or dtype, and pieces of a prompt that do not see the ones before."""
    rng, half, model = np.random.default_rng(9), tiny().bfloat16(), tiny()
    prompts, long = [text(rng, 3, 40) for _ in range(5)], [text(rng, 2500), text(rng, 1100)]
    out = Sampler(half, 3, 100, [], 0).sample(prompts, list(range(5)), 9, 1.0)
    assert_full_forward(half, prompts, out, 1.0, atol=0.3)
    out = Sampler(model, 2, 3000, [], 0).sample(long, [0, 1], 3, 0)
    assert_full_forward(model, long, out, atol=1e-3)


def test_nan_logits_name_the_prompt():
    model = tiny(tie_word_embeddings=False)  # so that only prompts that hold id 30 break
    sampler, weight = Sampler(model, 4, 60, [], 0), model.model.embed_tokens.weight
    good, saved = sampler.sample([[7, 8], [9, 10]], ["a", "b"], 4, 0), weight[30].detach().clone()
    weight.data[30] = float("nan")
    for temperature in (0, 1.0):
        with pytest.raises(FloatingPointError, match="prompt 1 .key 'b'."):
            sampler.sample([[7, 8], [9, 30]], ["a", "b"], 4, temperature)
    weight.data[30] = saved
    assert sampler.sample([[7, 8], [9, 10]], ["a", "b"], 4, 0) == good


def test_what_cannot_be_decoded_is_refused():
    """Two conversations in one slot, and a window shorter than the context."""
    with pytest.raises(AssertionError, match="unique"):
        Sampler(tiny(), 2, 50, [], 0).sample([[7], [8]], [0, 0], 5, 1.0)
    window = tiny("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding_window = 16"):
        Sampler(window, 2, 50, [], 0)
    assert_full_forward(window, [[7, 8]], Sampler(window, 2, 16, [], 0).sample([[7, 8]], [0], 10, 0))


def test_prefill_chunks():
    length = np.random.default_rng(10).integers(1, 300, 128)
    chunks = prefill_chunks(length, 4096)
    assert sorted(np.concatenate(chunks)) == list(range(128))
    assert sum(length[c].max() * len(c) for c in chunks) <= 1.3 * length.sum()
    assert all(length[c].max() * len(c) <= 4096 and (np.diff(length[c]) <= 0).all() for c in chunks)
