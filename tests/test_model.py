"""Log-probs, shared prefixes, adapters, references, the supervised step, two gloo ranks."""
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import dreamgym.model
import train_policy
from dreamgym.envs.base import make_env
from dreamgym.imitation import find_imitation, imitation_checkpoint
from dreamgym.logprobs import (TrainSample, even_micro_batches, micro_batches, prefix_packs,
                               reference_logprobs, token_logprobs)
from dreamgym.model import (adapter, base_of, checkpoint_layers, clip_grad_norm, load_frozen, load_model,
                            save_model, trainable_parameters, unsharded)
from dreamgym.run import Dist, init_dist, write_json
from dreamgym.sampler import Sampler
from dreamgym.sft import make_optimizers, set_rate, sft_step
from dreamgym.tiny import Muon
from dreamgym.word_tokenizer import build_tokenizer
from tests.conftest import EXAMPLE, on_two_ranks, random_model

CLOSE = {"atol": 2e-5, "rtol": 1e-5}


def tiny(kind="llama", vocab=50, **changes):
    return random_model(kind, vocab, **{"initializer_range": 0.3, "tie_word_embeddings": kind == "llama"} | changes)


def masked(rng, texts):
    return [TrainSample(x, [0] + [rng.randrange(2) for _ in x[1:]]) for x in texts]


def unrelated(seed=0):
    rng = random.Random(seed)
    return masked(rng, [[rng.randrange(50) for _ in range(rng.randrange(2, 30))] for _ in range(7)])


def sharing(seed=0):
    """A common prompt, growing prefixes with branches, equal samples, one that is a prefix, a lone one."""
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(50) for _ in range(n)]
    prompt, trunk = draw(20), draw(40)
    ids = [prompt + draw(rng.randrange(3, 12)) for _ in range(4)]
    ids += [trunk[:t] + draw(7) for t in (17, 25, 33, 40)]
    ids += [list(ids[0]), ids[1][:-1], draw(9)]
    rng.shuffle(ids)
    return masked(rng, ids)


def slow_logprobs(model, samples):
    """Sample by sample and position by position over the full logits."""
    logps, entropies = [], []
    for sample in samples:
        logits_TV = model(input_ids=torch.tensor([sample.ids])).logits[0].double()
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


# ---- log-probs ----

@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("make", [unrelated, sharing])
def test_logprobs_against_a_slow_loop(kind, make):
    """Off-by-one positions, padding or another branch that leaks into a sample."""
    model, samples = tiny(kind), make()
    assert (len(prefix_packs(samples)) < len(samples)) == (make is sharing)
    logp_N, entropy_N, hidden_NH = token_logprobs(model, samples)
    slow_N, slow_entropy_N = slow_logprobs(model, samples)
    torch.testing.assert_close(logp_N.double(), slow_N, **CLOSE)
    torch.testing.assert_close(entropy_N.double(), slow_entropy_N, **CLOSE)
    torch.testing.assert_close(token_logprobs(model, samples, with_entropy=False)[0], logp_N)
    target_N = torch.tensor([token for s in samples for token, trained in zip(s.ids, s.mask) if trained])
    own_N = model.lm_head(hidden_NH).log_softmax(-1).gather(1, target_N[:, None])[:, 0]
    torch.testing.assert_close(own_N, logp_N)
    weight_N = torch.randn(len(logp_N), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(gradients(model, logp_N @ weight_N),
                               gradients(model, slow_N @ weight_N.double()), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("entropy_coef", [0, 0.3])
def test_chunks_change_nothing(monkeypatch, dtype, tolerance, entropy_coef):
    """A token dropped at a chunk's border; a gradient of the head that is not autograd's."""
    model, samples, results = tiny("qwen3"), sharing(), []
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 50))
    model.compute_dtype = getattr(torch, dtype)
    weight_N = torch.linspace(-1, 2, count(samples))
    for chunk, kept in ((1000, 2**24), (3, 2**24), (3, 0)):
        monkeypatch.setattr("dreamgym.logprobs.CHUNK", chunk)
        monkeypatch.setattr("dreamgym.logprobs.MAX_KEPT_LOGITS", kept)
        logp_N, entropy_N, _ = token_logprobs(model, samples, with_entropy=entropy_coef > 0)
        loss = logp_N @ weight_N - (entropy_coef * entropy_N.sum() if entropy_coef else 0)
        results.append((logp_N.detach(), gradients(model, loss)))
    (first_N, first), *others = results
    for logp_N, grad in others:
        assert (logp_N - first_N).norm() < tolerance * first_N.norm()
        assert (grad - first).norm() < tolerance * first.norm()


@pytest.mark.parametrize("kind, changes", [
    ("mistral", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1})])
def test_a_short_window_is_not_widened(kind, changes):
    model, samples = tiny(kind, sliding_window=6, **changes), sharing()
    slow_N = slow_logprobs(model, samples)[0]
    torch.testing.assert_close(token_logprobs(model, samples)[0].double(), slow_N, **CLOSE)


def test_prefixes_are_shared_where_that_saves_work():
    """Packs that share nothing, and packs whose attention costs more than they save."""
    group = lambda prompt, tail: [
        TrainSample(list(range(prompt)) + [1000 * r + t for t in range(tail)], [0] * (prompt + tail))
        for r in range(1, 9)]
    assert prefix_packs(group(400, 60)) == [(list(range(8)), 880)]
    assert len(prefix_packs(group(400, 60), max_tok=600)) == 3
    assert len(prefix_packs(group(20, 150))) == len(prefix_packs(group(100, 500))) == 8


def test_padded_rows_need_no_mask(monkeypatch):
    """Padding that transformers takes for several texts in a row. Its mask for them rules out flash attention."""
    masks, real = [], torch.nn.functional.scaled_dot_product_attention
    watched = lambda *args, **kwargs: masks.append(kwargs.get("attn_mask")) or real(*args, **kwargs)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    token_logprobs(tiny("llama"), unrelated())
    assert masks and all(mask is None for mask in masks)


def test_micro_batches_cover_and_keep_the_budget():
    """Lost samples, order that varies, and a batch larger in memory than the user allowed."""
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


@pytest.mark.parametrize("samples", [[], [TrainSample([1, 2, 3], [0, 0, 0])]])
def test_no_trained_tokens(samples):
    """Stops a rank without trained tokens from leaving the others waiting in the backward."""
    model = tiny()
    logp_N, entropy_N, _ = token_logprobs(model, samples)
    assert logp_N.shape == entropy_N.shape == (0,)
    assert gradients(model, logp_N.sum()).abs().sum() == 0


def test_clip_grad_norm():
    """Clipping per tensor instead of over all, and a step taken on nan."""
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 2, 1)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0, 0]), torch.tensor([0, 4.0])
    assert clip_grad_norm(iter(parameters), 10.0) == pytest.approx(5.0) and parameters[0].grad[0] == 3.0
    assert clip_grad_norm(parameters, 1.0) == pytest.approx(5.0)
    assert [p.grad.max().item() for p in parameters[:2]] == pytest.approx([0.6, 0.8], abs=1e-5)
    parameters[0].grad[0] = float("nan")
    with pytest.raises(FloatingPointError):
        clip_grad_norm(parameters, 1.0)
    assert parameters[1].grad[1].item() == pytest.approx(0.8, abs=1e-5)


# ---- the supervised step and optimizers ----

@pytest.mark.parametrize("by_row", [False, True])
def test_sft_step_divides_by_the_trained_tokens(by_row):
    """A loss divided by another count than what it sums, long rows that weigh more, and gradients left over."""
    samples = sharing() + unrelated(3)
    model, slow = tiny("qwen2"), tiny("qwen2")
    logp_N = slow_logprobs(slow, samples)[0]
    rows = [part.mean() for part in logp_N.split([sum(s.mask) for s in samples]) if len(part)]
    loss = -(torch.stack(rows) if by_row else logp_N).mean()
    norm = gradients(slow, loss).norm().item()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    values = sft_step(model, samples, [sgd], 64, Dist(), [max(1, sum(s.mask)) for s in samples] if by_row else None)
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert values["grad_norm"] == pytest.approx(norm, rel=1e-4) and values["tokens"] == count(samples)
    for ours, theirs in zip(model.parameters(), slow.parameters()):
        torch.testing.assert_close(ours, theirs - 0.1 * theirs.grad / max(1.0, norm), atol=1e-5, rtol=1e-4)
        assert ours.grad is None


def test_muon_is_that_of_torch():
    """A Muon of our own that learns otherwise: another scale of wide and tall matrices, momentum, decay."""
    torch.manual_seed(0)
    start = [torch.randn(8, 8), torch.randn(24, 8), torch.randn(8, 24)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimizers = (Muon(ours, 0.02, 0.1),
                  torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.1))
    for _ in range(3):
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other, before in zip(ours, theirs, start):
        assert (mine - other).abs().max() < 0.05 * (mine - before).abs().max()    # bfloat16


def test_optimizers_and_rate():
    """Embeddings trained by Muon, a matrix trained twice or never."""
    model = tiny()
    assert len(make_optimizers(model, 1e-3)) == 1
    adam, muon = make_optimizers(model, 1e-3, muon_lr=0.02, weight_decay=0.01)
    ids = lambda parameters: sorted(map(id, parameters))
    given = [p for o in (adam, muon) for g in o.param_groups for p in g["params"]]
    assert ids(given) == ids(model.parameters())
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    assert ids(muon.param_groups[0]["params"]) == ids(matrices)
    assert (adam.param_groups[0]["weight_decay"], muon.param_groups[0]["weight_decay"]) == (0.0, 0.01)
    rates = []
    for step in (0, 9, 50, 100, 150):
        set_rate([adam, muon], step, 100, warmup=10, floor=0.1)
        rates.append(adam.param_groups[0]["lr"] / 1e-3)
        assert muon.param_groups[0]["lr"] / 0.02 == pytest.approx(rates[-1])
    assert rates == pytest.approx([0.1, 0.982, 0.55, 0.1, 0.1], abs=1e-3)


def test_unseen_words_stay_apart():
    """Embeddings of unseen words that the shared output layer pushes together, until all are one word."""
    def alike(epsilon: float) -> float:
        """Mean cosine of unseen words' embeddings."""
        torch.manual_seed(0)
        model = tiny(vocab=200)
        optimizers = make_optimizers(model, 1e-2, muon_lr=0.02, epsilon=epsilon)
        for _ in range(60):
            row = TrainSample(torch.randint(100, (32,)).tolist(), [0] + [1] * 31)
            sft_step(model, [row], optimizers, 1000, Dist())
        unseen = torch.nn.functional.normalize(model.get_input_embeddings().weight[100:], dim=-1)
        return (unseen @ unseen.T).mean().item()
    assert alike(5e-4) < 0.25 < 0.4 < alike(1e-8)


# ---- load, save, reference ----

@pytest.fixture
def folder(tmp_path):
    tokenizer = build_tokenizer(["red blue"])
    save_model(tiny(vocab=len(tokenizer)), tokenizer, tmp_path / "m")
    return str(tmp_path / "m")


def train(model, steps=2):
    """A few steps towards some samples; returns the losses."""
    optimizers = [torch.optim.AdamW(trainable_parameters(model), lr=1e-2, weight_decay=0.0)]
    return [sft_step(model, unrelated(5), optimizers, 10_000, Dist())["loss"] for _ in range(steps)]


def logprobs(model):
    return token_logprobs(model, sharing())[0].detach()


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_weights_and_reference(folder, tmp_path, lora_rank):
    """Checkpoints that lose weights (tied ones first of all). A new reference that is still the old one."""
    model, tokenizer = load_model(folder, dtype="float32", lora_rank=lora_rank)
    train(model)                                       # from here on adapters are no longer zero
    trainable, initial_N = len(trainable_parameters(model)), logprobs(model)
    save_model(model, tokenizer, tmp_path / "start")
    reference, _ = load_frozen(str(tmp_path / "start"), "reference", model)
    assert (reference is model) == bool(lora_rank)
    for steps in (0, 3):
        train(model, steps)
        torch.testing.assert_close(reference_logprobs(reference, sharing()), initial_N)
    assert len(trainable_parameters(model)) == trainable
    assert not torch.allclose(logprobs(model), initial_N)
    save_model(model, tokenizer, tmp_path / "a")
    newer, _ = load_frozen(str(tmp_path / "a"), "reference", model)      # S2R: the policy that left the dream
    torch.testing.assert_close(reference_logprobs(newer, sharing()), logprobs(model))
    loaded, loaded_tokenizer = load_model(str(tmp_path / "a"))
    torch.testing.assert_close(logprobs(loaded), logprobs(model))
    assert loaded_tokenizer.get_vocab() == tokenizer.get_vocab()
    trained = [name for name, p in loaded.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained) == bool(lora_rank)
    assert not any("reference" in name for name, _ in loaded.named_parameters())
    if lora_rank:
        with pytest.raises(ValueError, match="lora_rank is 8"):
            load_model(str(tmp_path / "a"), lora_rank=8)


def test_a_start_from_the_experience_model_takes_adapters(folder, tmp_path):
    """--lora-rank that is forgotten with --init expmodel: all weights are trained."""
    shutil.copytree(folder, tmp_path / "e/model")
    write_json(tmp_path / "e/model/meta.json", {})
    args = train_policy.Args(env=EXAMPLE, init="expmodel", lora_rank=2, policy_context=64, max_action_tok=8)
    log = SimpleNamespace(say=print)
    begun = find_imitation(args, (tmp_path, tmp_path / "e"), Dist())
    found = imitation_checkpoint(args, make_env(EXAMPLE), begun, [], Dist(), log)
    assert base_of(str(found)) == (str(tmp_path / "e/model"), 2)


def test_load_errors_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tiny("cohere", logit_scale=0.5).save_pretrained(tmp_path / "scaled")
    build_tokenizer(["red"]).save_pretrained(tmp_path / "scaled")
    for name in ("half", "layers", "bare"):
        build_tokenizer(["red", "blue"]).save_pretrained(tmp_path / name)
        random_model("llama", 999).save_pretrained(tmp_path / name)
    (tmp_path / "bare/tokenizer.json").unlink()
    weights, config = tmp_path / "half/model.safetensors", tmp_path / "layers/config.json"
    weights.write_bytes(weights.read_bytes()[:-999])
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    for name, message in (
            ("nobody/no-such-model", "neither a model folder nor a hub name"),
            (tmp_path / "missing", "neither a model folder nor a hub name"),
            (tmp_path, "Unrecognized model in .*config.json"),
            (tmp_path / "half", "file not fully covered"),
            (tmp_path / "layers", "its files lack 9 weights"),
            (tmp_path / "bare", "with its tokenizer .*tokenizer"),
            (tmp_path / "scaled", "CohereForCausalLM is not supported")):
        with pytest.raises(ValueError, match=message):
            load_model(str(name))


def test_nf4_with_adapters_learns(folder):
    """4-bit loading that freezes everything."""
    found = []
    for warm in (False, True):
        model, _ = load_model(folder, quantize="nf4", lora_rank=4)
        assert any("4bit" in type(module).__name__ for module in model.modules())
        if warm:
            with torch.no_grad():
                logprobs(model)
        found.append(gradients(model.train(not warm), token_logprobs(model, unrelated())[0].sum()))
    torch.testing.assert_close(*found)
    losses = train(model, steps=3)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("lora_rank, frozen", [(0, False), (2, False), (0, True), (2, True)])
def test_precision_of_weights(folder, lora_rank, frozen):
    """Trained 16-bit weights, in which a rate of 1e-6 rounds to nothing; frozen 32-bit ones."""
    model, _ = load_model(folder, "bfloat16", lora_rank=lora_rank, frozen=frozen)
    base = torch.float32 if not (lora_rank or frozen) else torch.bfloat16
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if "lora_" in name else base), name
    if not frozen:
        assert {p.dtype for p in trainable_parameters(model)} == {torch.float32}


@pytest.mark.parametrize("form", [{}, {"lora_rank": 4}, {"lora_rank": 4, "quantize": "nf4"}])
def test_bfloat16_computes_what_float32_does(folder, form):
    """A model that says bfloat16 and computes in float32; a sampler that is not the trainer's model."""
    exact, model = load_model(folder, "float32", **form)[0], load_model(folder, "bfloat16", **form)[0]
    hidden_NH = token_logprobs(model, sharing())[2]
    assert not torch.equal(hidden_NH.float(), token_logprobs(exact, sharing())[2])
    error_N = (logprobs(model) - logprobs(exact)).abs()
    bound = 0.5 if "quantize" in form else 0.05      # 4-bit codes of rounded weights differ here and there
    assert 0 < error_N.mean() < bound and logprobs(model).dtype == torch.float32
    losses = train(model, steps=3)
    assert losses[-1] < losses[0]
    sampler = Sampler(model, 4, 64, [], 0)
    prompt, sample = [3, 1, 4, 1, 5], sampler.sample([[3, 1, 4, 1, 5]], ["a"], 12, 1.0)[0]
    assert {layer.keys.dtype for layer in sampler.layers} == {torch.bfloat16}
    logp_N = token_logprobs(model, [TrainSample(prompt + sample.ids, [0] * 5 + [1] * 12)])[0]
    torch.testing.assert_close(torch.tensor(sample.logps).float(), logp_N.detach(), atol=0.1, rtol=0)


class Casts(TorchDispatchMode):
    """Counts the casts of some weights; sees none in inference mode."""
    def __init__(self, weights):
        super().__init__()
        self.pointers, self.count = {weight.data_ptr() for weight in weights}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.pointers
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_decoding_casts_a_weight_once(folder, tmp_path, lora_rank):
    """Stops a sampler that reads all float32 weights and writes them in bfloat16 for each token."""
    model, tokenizer = load_model(folder, "bfloat16", lora_rank=lora_rank)
    save_model(model, tokenizer, tmp_path / "start")
    load_frozen(str(tmp_path / "start"), "experience", model, "bfloat16")
    for name in ("default", "experience") if lora_rank else ("default",):
        with adapter(model, name), Casts(model.parameters()) as casts:
            Sampler(model, 1, 64, [], 0).sample([[3, 1, 4]], None, 9, 1.0)
        assert (name == "default") == (casts.count > 0) and casts.count <= len(trainable_parameters(model))


@pytest.mark.parametrize("dtype, form", [("float32", {}), ("bfloat16", {}), ("float32", {"lora_rank": 4})])
def test_gradient_checkpointing(folder, dtype, form):
    """Gradients that differ, activations kept all the same, a sampler without its cache afterwards."""
    found = []
    for checkpointed in (False, True):
        model, _ = load_model(folder, dtype, **form)
        if checkpointed:
            checkpoint_layers(model)
        kept = []
        pack = lambda x, kept=kept: kept.append(x.numel()) or x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            logp_N = token_logprobs(model, sharing())[0]
        found.append((logp_N.detach(), gradients(model, logp_N.sum()), sum(kept)))
        sampler = Sampler(model, 2, 64, [], 0)
        sampler.sample([[3, 1, 4]], ["a"], 8, 1.0)
        assert sampler.layers[0].is_initialized
    torch.testing.assert_close(found[0][:2], found[1][:2], atol=0, rtol=0)
    assert found[1][2] < 0.6 * found[0][2]


def storages(model):
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


@pytest.mark.parametrize("quantize", ["nf4", "none"])
def test_one_base_for_policy_reference_and_experience_model(folder, tmp_path, quantize):
    """A second copy of a frozen base, adapters that answer for each other, a base shared wrongly."""
    made = {}
    for i, name in enumerate(("policy", "experience")):
        model, tokenizer = load_model(folder, "bfloat16", quantize, lora_rank=4, seed=i)
        train(model, 2 + i)
        made[name] = logprobs(model)
        save_model(model, tokenizer, tmp_path / name)
    assert not torch.allclose(made["policy"], made["experience"])
    policy, _ = load_model(str(tmp_path / "policy"), "bfloat16", quantize)
    alone = storages(policy)
    given = (policy, "bfloat16", quantize)
    reference, _ = load_frozen(str(tmp_path / "policy"), "reference", *given)
    experience, _ = load_frozen(str(tmp_path / "experience"), "experience", *given)
    base = {pointer for name, p in policy.named_parameters() if "lora_" not in name
            for pointer in [p.untyped_storage().data_ptr()]}
    assert reference is experience is policy and base <= alone.keys() <= storages(policy).keys()
    adapters = sum(p.numel() * 4 for p in trainable_parameters(policy))
    assert sum(storages(policy).values()) == sum(alone.values()) + adapters    # two, in bfloat16
    train(policy, 2)
    with adapter(experience, "experience"):
        torch.testing.assert_close(logprobs(experience), made["experience"])
    torch.testing.assert_close(reference_logprobs(reference, sharing()), made["policy"])
    assert not torch.allclose(logprobs(policy), made["policy"])
    other, _ = load_frozen(folder, "experience", *given[:2])
    assert other is not policy and not storages(other).keys() & storages(policy).keys()


# ---- two ranks ----

# LoRA rank, the size below which a model is replicated, precision, quantization
FORMS = ((0, 0, "float32", "none"), (4, 0, "float32", "none"), (4, 0, "bfloat16", "none"),
         (0, 10**9, "float32", "none"), (4, 10**9, "float32", "nf4"))


def two_ranks(rank, folder):
    dist, samples = init_dist(0), sharing()
    assert len(even_micro_batches(samples[: 1 + 8 * rank], 30, dist)) == len(micro_batches(samples[:9], 30))
    mine = slice(rank * 3, 3 + rank * 99)  # unequal shares: the ranks have other numbers of micro-batches
    for number, (lora_rank, below, *form) in enumerate(FORMS):
        dreamgym.model.REPLICATED_BELOW, out = below, f"{folder}-{number}"
        model, tokenizer = load_model(folder, *form, lora_rank)
        assert any(isinstance(p, DTensor) for p in model.parameters()) == (not below)
        save_model(model, tokenizer, f"{out}-start")
        reference, _ = load_frozen(f"{out}-start", "reference", model, *form)
        initial_N = reference_logprobs(reference, samples)
        sgd = torch.optim.SGD(trainable_parameters(model), lr=0.5)
        values = sft_step(model, samples[mine], [sgd], 60, dist)
        torch.testing.assert_close(reference_logprobs(reference, samples), initial_N)
        with unsharded(model), torch.no_grad():
            inside_N = token_logprobs(model, samples)[0] if rank == 0 else None
            if rank == 0:
                Sampler(model, 2, 64, [], 0).sample([[3, 1, 4]], None, 9, 1.0)
        still = torch.optim.SGD(trainable_parameters(model), lr=0.0)
        sft_step(model, samples[mine], [still], 60, dist)      # a rank that played nothing must not hang it
        outside_N = logprobs(model)
        torch.testing.assert_close(outside_N if inside_N is None else inside_N, outside_N)
        save_model(model, tokenizer, out)
        if rank == 0:
            torch.save(values | {"logp_N": inside_N}, f"{out}/values.pt")
    dist.close()


def test_two_ranks_equal_one_process(folder, monkeypatch):
    """Stops wrong gradient averaging, a stale unsharded copy, ranks that wait for each other, and checkpoints
    that hold one rank's shard. A gradient in bfloat16 is rounded once a micro-batch: those must be the same."""
    on_two_ranks(two_ranks, folder)
    samples = sharing()
    for number, (lora_rank, _, *form) in enumerate(FORMS):
        out = f"{folder}-{number}"
        model, _ = load_model(folder, *form, lora_rank)
        sgd = torch.optim.SGD(trainable_parameters(model), lr=0.5)
        with monkeypatch.context() as patch:
            if "bfloat16" in form:
                theirs = [[start + i for i in rows] for start, part in ((0, samples[:3]), (3, samples[3:]))
                          for rows in micro_batches(part, 60)]
                patch.setattr("dreamgym.sft.even_micro_batches", lambda *_, theirs=theirs: theirs)
            values = sft_step(model, samples, [sgd], 10_000, Dist())
        theirs = torch.load(f"{out}/values.pt", weights_only=True)
        torch.testing.assert_close(theirs.pop("logp_N"), logprobs(model), atol=1e-4, rtol=1e-4)
        assert theirs == pytest.approx(values, rel=1e-4)
        loaded, _ = load_model(out, *form)
        theirs = dict(loaded.named_parameters())
        assert theirs.keys() == dict(model.named_parameters()).keys()
        for name, ours in model.named_parameters():
            torch.testing.assert_close(theirs[name], ours, atol=1e-5, rtol=1e-4, msg=name)
