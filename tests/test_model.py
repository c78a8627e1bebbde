"""Log-probs of samples, shared prefixes, adapters, references, the supervised step and two gloo ranks, on
tiny random models."""

import os
import random
import socket

import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, CONFIG_MAPPING

from dreamgym.model import (
    TrainSample,
    clip_grad_norm,
    even_micro_batches,
    load_model,
    load_weights,
    make_reference,
    micro_batches,
    prefix_packs,
    reference_logprobs,
    save_model,
    shard,
    token_logprobs,
    trainable_parameters,
    unsharded,
)
from dreamgym.run import Dist
from dreamgym.sft import sft_step
from dreamgym.tiny import build_tokenizer, check_tokenizer, make_optimizers, set_rate

torch.set_num_threads(1)
KINDS = ["llama", "qwen2", "qwen3", "mistral"]


def tiny(kind="llama", vocab=50, **changes):
    torch.manual_seed(0)
    size = dict(
        vocab_size=vocab,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.3,
        head_dim=8,
        tie_word_embeddings=kind == "llama",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**size | changes)).eval()


def unrelated(seed=0, n=7):
    rng, samples = random.Random(seed), []
    for _ in range(n):
        length = rng.randrange(2, 30)
        ids = [rng.randrange(50) for _ in range(length)]
        samples.append(TrainSample(ids, [0] + [rng.randrange(2) for _ in ids[1:]]))
    return samples


def sharing(seed=0):
    """A group with a common prompt, growing prefixes with branches, equal samples, one that is a prefix, a
    lone one."""
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(50) for _ in range(n)]
    prompt, trunk = draw(20), draw(40)
    ids = [prompt + draw(rng.randrange(3, 12)) for _ in range(4)] + [
        trunk[:t] + draw(7) for t in (17, 25, 33, 40)
    ]
    ids += [list(ids[0]), ids[1][:-1], draw(9)]
    rng.shuffle(ids)
    return [TrainSample(x, [0] + [rng.randrange(2) for _ in x[1:]]) for x in ids]


def slow_logprobs(model, samples, temperature):
    """Sample by sample and position by position over the full logits."""
    logps, entropies = [], []
    for sample in samples:
        logits_TV = model(input_ids=torch.tensor([sample.ids])).logits[0].double() / temperature
        for t, trained in enumerate(sample.mask):
            if trained:
                p_V = torch.softmax(logits_TV[t - 1], -1)
                logps.append(torch.log(p_V[sample.ids[t]]))
                entropies.append(sum(-p * torch.log(p) for p in p_V))
    return torch.stack(logps), torch.stack(entropies)


def gradients(model, loss=None):
    if loss is not None:
        model.zero_grad()
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def count(samples):
    return sum(sum(sample.mask) for sample in samples)


# ---- log-probs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [unrelated, sharing])
def test_logprobs_against_a_slow_loop(kind, make):
    """Stops off-by-one positions, a forgotten temperature, padding or another branch that leaks into a
    sample, and a gradient lost through a shared prefix."""
    model, samples = tiny(kind), make()
    assert (len(prefix_packs(samples)) < len(samples)) == (make is sharing)
    logp_N, entropy_N, hidden_NH = token_logprobs(model, samples, temperature=0.7, with_hidden=True)
    slow_N, slow_entropy_N = slow_logprobs(model, samples, 0.7)
    torch.testing.assert_close(logp_N.double(), slow_N, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N.double(), slow_entropy_N, atol=2e-5, rtol=1e-5)
    target_N = torch.tensor([token for s in samples for token, trained in zip(s.ids, s.mask) if trained])
    own_N = (model.lm_head(hidden_NH) / 0.7).log_softmax(-1).gather(1, target_N[:, None])[:, 0]
    torch.testing.assert_close(own_N, logp_N)
    weight_N = torch.randn(len(logp_N), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        gradients(model, logp_N @ weight_N),
        gradients(model, slow_N @ weight_N.double()),
        atol=1e-3,
        rtol=1e-3,
    )


def test_the_example_of_the_docstring():
    """Stops the mask from being read one position off: the tiniest case, by hand."""
    model = tiny()
    logp_N, entropy_N, hidden_NH = token_logprobs(
        model, [TrainSample([5, 6, 7], [0, 0, 1])], with_entropy=False
    )
    torch.testing.assert_close(
        logp_N, model(input_ids=torch.tensor([[5, 6]])).logits[0, 1].log_softmax(-1)[7:8]
    )
    assert entropy_N is None and hidden_NH is None


def test_chunks_change_nothing(monkeypatch):
    """Stops chunk borders that drop or double a token, in values and gradients, with logits kept and
    recomputed."""
    model, samples, results = tiny("qwen3"), sharing(), []
    for chunk, kept in ((1000, 2**24), (3, 2**24), (3, 0)):
        monkeypatch.setattr("dreamgym.model.MAX_KEPT_LOGITS", kept)
        logp_N, entropy_N, _ = token_logprobs(model, samples, chunk=chunk)
        results.append((logp_N.detach(), gradients(model, logp_N.sum() - 0.3 * entropy_N.sum())))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-4, rtol=1e-4)


def test_a_short_window_is_not_widened():
    """Stops a tree mask from silently widening the window of a model that attends locally."""
    samples = sharing()
    for model in (
        tiny("mistral", sliding_window=6),
        tiny("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ):
        slow_N = slow_logprobs(model, samples, 1.0)[0]
        torch.testing.assert_close(token_logprobs(model, samples)[0].double(), slow_N, atol=2e-5, rtol=1e-5)


def test_prefixes_are_shared_where_that_saves_work():
    """Stops packs that share nothing, and packs whose longer attention costs more than the shared tokens
    save."""
    group = lambda prompt, tail, n: [
        TrainSample(list(range(prompt)) + [1000 * r + t for t in range(tail)], [0] * (prompt + tail))
        for r in range(1, n + 1)
    ]
    assert prefix_packs(group(400, 60, 8)) == [(list(range(8)), 880)]
    assert len(prefix_packs(group(400, 60, 8), max_tok=600)) == 3
    assert len(prefix_packs(group(20, 150, 8))) == 8
    assert len(prefix_packs(group(100, 500, 8))) == 8


def test_micro_batches_cover_and_keep_the_budget():
    """Stops lost samples, order that varies, a batch larger in memory than the user allowed, and mostly
    padding."""
    samples = [s for seed in range(8) for s in sharing(seed)]
    samples += [TrainSample(s.ids + [1], s.mask + [1]) for s in samples[::3]]
    for budget in (60, 100, 300, 5000):
        batches = micro_batches(samples, budget)
        assert sorted(i for batch in batches for i in batch) == list(range(len(samples)))
        assert batches == micro_batches(samples, budget)
        for batch in batches:
            nodes = [n for _, n in prefix_packs([samples[i] for i in batch])]
            assert len(nodes) * max(nodes) <= budget
    lone = [TrainSample([n] * n, [0] * n) for n in (3, 10, 2, 3)]
    assert micro_batches(lone, 9) == [[1], [0, 3, 2]]


def test_micro_batches_do_not_change_the_gradient():
    """Stops the mean of means: the sum over micro-batches with one global divisor is the gradient of one
    batch."""
    model, samples = tiny("qwen2"), sharing() + unrelated(3)
    whole = gradients(model, -slow_logprobs(model, samples, 1.0)[0].sum() / count(samples))
    model.zero_grad()
    for batch in micro_batches(samples, 64):
        (-token_logprobs(model, [samples[i] for i in batch])[0].sum() / count(samples)).backward()
    torch.testing.assert_close(gradients(model), whole, atol=1e-5, rtol=1e-3)


def test_samples_without_trained_tokens_and_malformed_ones():
    """Stops a rank without trained tokens from leaving the others waiting in the backward, and a trained
    first token, whose "position before" would be the end of the sample above."""
    model = tiny()
    for samples in ([TrainSample([1, 2, 3], [0, 0, 0])], []):
        logp_N, entropy_N, _ = token_logprobs(model, samples)
        assert logp_N.shape == entropy_N.shape == (0,)
        assert gradients(model, logp_N.sum()).abs().sum() == 0
    for sample in (TrainSample([1, 2], [1, 0]), TrainSample([1, 2], [0]), TrainSample([], [])):
        with pytest.raises(ValueError, match="sample 0 has"):
            token_logprobs(model, [sample])


def test_clip_grad_norm():
    """Stops clipping per tensor instead of over all, and a step taken on nan."""
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 2, 1)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0, 0]), torch.tensor([0, 4.0])
    assert clip_grad_norm(iter(parameters), 10.0) == pytest.approx(5.0) and parameters[0].grad[0] == 3.0
    assert clip_grad_norm(parameters, 1.0) == pytest.approx(5.0)
    assert [p.grad.max().item() for p in parameters[:2]] == pytest.approx([0.6, 0.8], abs=1e-5)
    parameters[0].grad[0] = float("nan")
    with pytest.raises(FloatingPointError):
        clip_grad_norm(parameters, 1.0)
    assert parameters[1].grad[1].item() == pytest.approx(0.8, abs=1e-5)


# ---- the supervised step and optimizers ----------------------------------------------------------------------


def test_sft_step_divides_by_the_sum_of_weights():
    """Stops a loss divided by another count than what it sums, weights read one token off, and gradients left
    over."""
    samples = sharing() + unrelated(3)
    rng = random.Random(1)
    weights = [[rng.choice([0.3, 1.0, 8.0]) for _ in s.mask] for s in samples]
    model, slow = tiny("qwen2"), tiny("qwen2")
    flat = [w for s, row in zip(samples, weights) for w, m in zip(row, s.mask) if m]
    loss = -(slow_logprobs(slow, samples, 1.0)[0] @ torch.tensor(flat).double()) / sum(flat)
    loss.backward()
    norm = gradients(slow).norm().item()
    for p in slow.parameters():
        p.data -= 0.1 * p.grad / max(1.0, norm)
    values = sft_step(model, samples, [torch.optim.SGD(model.parameters(), lr=0.1)], 64, Dist(), weights)
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert values["grad_norm"] == pytest.approx(norm, rel=1e-4) and values["tokens"] == count(samples)
    for ours, theirs in zip(model.parameters(), slow.parameters()):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        assert ours.grad is None
    equal = [
        sft_step(tiny(), samples, [], 64, Dist(), w)["loss"]
        for w in (None, [[2.0] * len(s.mask) for s in samples])
    ]
    assert equal[0] == pytest.approx(equal[1], rel=1e-5)
    with pytest.raises(ValueError, match="one weight for each mask entry"):
        sft_step(model, samples, [], 64, Dist(), weights[:-1])


def test_optimizers_and_rate():
    """Stops embeddings trained by Muon, a matrix trained twice or never, and a schedule that forgets the
    peak."""
    model = tiny()
    assert len(make_optimizers(model, 1e-3)) == 1
    adam, muon = make_optimizers(model, 1e-3, muon_lr=0.02, weight_decay=0.01)
    given = [p for o in (adam, muon) for g in o.param_groups for p in g["params"]]
    assert sorted(map(id, given)) == sorted(map(id, model.parameters()))
    assert {id(p) for p in muon.param_groups[0]["params"]} == {
        id(p) for p in model.model.layers.parameters() if p.ndim == 2
    }
    assert (adam.param_groups[0]["weight_decay"], muon.param_groups[0]["weight_decay"]) == (0.0, 0.01)
    rates = []
    for step in (0, 9, 50, 100, 150):
        set_rate([adam, muon], step, 100, warmup=10, floor=0.1)
        rates.append(adam.param_groups[0]["lr"] / 1e-3)
        assert muon.param_groups[0]["lr"] / 0.02 == pytest.approx(rates[-1])
    assert rates == pytest.approx([0.1, 0.982, 0.55, 0.1, 0.1], abs=1e-3)


# ---- load, save, reference -----------------------------------------------------------------------------------


def saved(folder, kind="llama"):
    tokenizer = build_tokenizer(["red blue"])
    model = tiny(kind, vocab=len(tokenizer))
    save_model(model, tokenizer, folder)
    return model, tokenizer


def train(model, steps=2):
    """A few steps towards some samples; returns the losses."""
    optimizers = [torch.optim.AdamW(trainable_parameters(model), lr=1e-2, weight_decay=0.0)]
    return [sft_step(model, unrelated(5), optimizers, 10_000, Dist())["loss"] for _ in range(steps)]


def logprobs(model):
    return token_logprobs(model, sharing())[0].detach()


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_weights_survive_saving(tmp_path, lora_rank):
    """Stops checkpoints that lose weights (tied ones first of all), and adapters that come back empty or
    frozen."""
    _, tokenizer = saved(tmp_path / "m")
    model, _ = load_model(str(tmp_path / "m"), dtype="float32", lora_rank=lora_rank)
    before = logprobs(model)
    train(model)
    make_reference(model)
    save_model(model, tokenizer, tmp_path / "a")
    loaded, loaded_tokenizer = load_model(str(tmp_path / "a"))
    check_tokenizer(tokenizer, loaded_tokenizer)
    other, _ = load_model(str(tmp_path / "m"), lora_rank=lora_rank)
    load_weights(other, tmp_path / "a")
    for again in (loaded, other):
        torch.testing.assert_close(logprobs(again), logprobs(model))
    assert not torch.allclose(logprobs(loaded), before)
    trained = [name for name, p in loaded.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained) == bool(lora_rank)
    assert not any("reference" in name for name, _ in loaded.named_parameters())
    if lora_rank:
        with pytest.raises(ValueError, match="lora_rank is 8"):
            load_model(str(tmp_path / "a"), lora_rank=8)


def test_load_errors_say_what_to_do(tmp_path, monkeypatch):
    """Stops a stack trace from deep inside a library where a path was misspelt."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nobody/no-such-model", str(tmp_path / "missing")):
        with pytest.raises(ValueError, match="neither a model folder nor a hub name"):
            load_model(name)
    with pytest.raises(ValueError, match="holds neither config.json"):
        load_model(str(tmp_path))
    with pytest.raises(ValueError, match="quantize is 'int3'"):
        load_model(str(tmp_path), quantize="int3")


def test_a_head_that_is_not_plain_is_refused(tmp_path):
    """Stops log-probs without the soft cap that the model's own forward has."""
    tiny("gemma2", final_logit_softcapping=1.0).save_pretrained(tmp_path)
    build_tokenizer(["red"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM is not supported"):
        load_model(str(tmp_path))


def test_nf4_with_adapters_learns(tmp_path):
    """Stops 4-bit loading that freezes everything, and wrong gradients after an eval forward (repacked
    weights)."""
    saved(tmp_path / "m")
    found = []
    for recompute, mode in ((False, True), (False, False), (True, True)):
        model, _ = load_model(
            str(tmp_path / "m"), quantize="nf4", lora_rank=4, gradient_checkpointing=recompute
        )
        assert any("4bit" in type(module).__name__ for module in model.modules())
        model.train(mode)
        with torch.no_grad():
            logprobs(model)
        found.append(gradients(model, token_logprobs(model, unrelated())[0].sum()))
        torch.testing.assert_close(found[-1], found[0])
        model.zero_grad()
        losses = train(model, steps=3)
        assert losses[-1] < losses[0]


def test_gradient_checkpointing_and_16_bit(tmp_path):
    """Stops recomputation that is silently off or changes the numbers, and a rate of 1e-6 rounding to
    nothing."""
    saved(tmp_path / "m", "qwen2")
    results = []
    for flag in (False, True):
        model, _ = load_model(str(tmp_path / "m"), gradient_checkpointing=flag)
        calls = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        results.append(gradients(model, token_logprobs(model, unrelated())[0].sum()))
        assert len(calls) == (2 if flag else 1)
    torch.testing.assert_close(results[0], results[1])
    with pytest.raises(ValueError, match="dtype='float32'"):
        trainable_parameters(load_model(str(tmp_path / "m"), dtype="bfloat16")[0])
    adapters = trainable_parameters(load_model(str(tmp_path / "m"), dtype="bfloat16", lora_rank=2)[0])
    assert adapters[0].dtype == torch.float32


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_reference_stays_the_initial_model(tmp_path, lora_rank):
    """Stops a reference that shares weights with the policy, and a LoRA reference that switches training
    off."""
    _, tokenizer = saved(tmp_path / "m")
    if lora_rank:  # adapters that are no longer zero: the base model alone would be the wrong reference
        start, _ = load_model(str(tmp_path / "m"), lora_rank=lora_rank)
        train(start)
        save_model(start, tokenizer, tmp_path / "m4")
    model, _ = load_model(str(tmp_path / ("m4" if lora_rank else "m")))
    initial_N = logprobs(model)
    reference, trainable = make_reference(model), len(trainable_parameters(model))
    for steps in (0, 3):
        train(model, steps)
        torch.testing.assert_close(reference_logprobs(model, reference, sharing()), initial_N)
    assert len(trainable_parameters(model)) == trainable
    assert not torch.allclose(logprobs(model), initial_N)


# ---- two ranks -----------------------------------------------------------------------------------------------


def weighted(samples):
    return [[1.0 + (i + t) % 3 for t in range(len(s.mask))] for i, s in enumerate(samples)]


def two_ranks(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    dist, samples = Dist(rank=rank, world_size=2), sharing()
    assert len(even_micro_batches(samples[: 1 + 8 * rank], 30, dist)) == len(micro_batches(samples[:9], 30))
    mine = slice(rank * 3, 3 + rank * 99)  # unequal shares: the ranks have other numbers of micro-batches
    for kind in ("full", "lora"):
        model, tokenizer = load_model(f"{folder}/m", lora_rank=4 * (kind == "lora"))
        reference = make_reference(model)
        model, reference = shard(model), shard(reference)
        initial_N = reference_logprobs(model, reference, samples)
        sgd = torch.optim.SGD(trainable_parameters(model), lr=0.5)
        values = sft_step(model, samples[mine], [sgd], 60, dist, weighted(samples)[mine])
        torch.testing.assert_close(reference_logprobs(model, reference, samples), initial_N)
        with unsharded(model), torch.no_grad():
            for _ in range(rank + 1):  # unequal numbers of forwards must not hang
                inside_N = token_logprobs(model, samples)[0]
        torch.testing.assert_close(inside_N, token_logprobs(model, samples)[0].detach())
        save_model(model, tokenizer, f"{folder}/two_{kind}")
        if rank == 0:
            torch.save(values | {"logp_N": inside_N}, f"{folder}/{kind}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_one_process(tmp_path):
    """Stops wrong gradient averaging, a stale unsharded copy, ranks that wait for each other, and checkpoints
    that hold one rank's shard."""
    saved(tmp_path / "m")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(two_ranks, args=(port, str(tmp_path)), nprocs=2)
    samples = sharing()
    for kind in ("full", "lora"):
        model, _ = load_model(str(tmp_path / "m"), lora_rank=4 * (kind == "lora"))
        sgd = torch.optim.SGD(trainable_parameters(model), lr=0.5)
        values = sft_step(model, samples, [sgd], 10_000, Dist(), weighted(samples))
        theirs = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        logp_N = theirs.pop("logp_N")
        assert theirs == pytest.approx(values, rel=1e-4)
        torch.testing.assert_close(logp_N, logprobs(model), atol=1e-4, rtol=1e-4)
        loaded, _ = load_model(str(tmp_path / f"two_{kind}"))
        for (name, ours), (other, theirs) in zip(
            model.named_parameters(), loaded.named_parameters(), strict=True
        ):
            assert name == other
            torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-4, msg=name)
