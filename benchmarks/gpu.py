"""Memory and speed of a model of real size on one GPU, beside the budget that the scripts print.

    python -m benchmarks.gpu --config configs/gpu24_qlora.json

The weights are random and have the shapes of the preset's model: nothing is downloaded. As in RL in the
dream, policy, reference and experience model are in memory. A rollout fills all slots of policy and
experience model up to their contexts. An update is two micro-batches and a step of AdamW.
"""
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import tyro
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import train_expmodel
import train_policy
from benchmarks.timing import PUBLISHED, cpu_s
from dreamgym import run
from dreamgym.flags import read_preset
from dreamgym.logprobs import TrainSample, token_logprobs
from dreamgym.memory import OTHER, budget, measure
from dreamgym.model import (adapter, checkpoint_layers, load_frozen, load_model, optimizer_step, save_model,
                            trainable_parameters)
from dreamgym.sampler import Sampler
from dreamgym.word_tokenizer import build_tokenizer

NEW_TOK = 64              # decoded in the timed part of a rollout
PEAK_FLOPS = 990e12       # of an H100 in bfloat16, dense


@dataclass
class Args:
    config: str = "configs/gpu24_qlora.json"     # preset of train_policy.py


def random_checkpoint(name: str, folder: Path) -> None:
    """A model folder with the shapes of `name`, random bfloat16 weights and a small tokenizer."""
    kind, values, _ = PUBLISHED[name]
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values), dtype=torch.bfloat16)
    save_model(model, build_tokenizer(["red blue"]), folder)


def rows(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids [count][length] without shared prefixes."""
    return torch.randint(5, 1000, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def decode(sampler: Sampler) -> None:
    """Fills all slots. Prints the time of a decoded token, of all slots together."""
    prompts = rows(sampler.slots, sampler.context - NEW_TOK - 1, sampler.slots)
    keys = list(range(sampler.slots))
    first_s, rest_s = (cpu_s(sampler.sample, prompts, keys, new_tok, 1.0, device="cuda")[0]
                       for new_tok in (1, NEW_TOK))   # the second finds its prompts in the cache
    print(f"  {sampler.slots} slots x {sampler.context} tokens: prefill and one token {first_s:.1f} s, "
          f"{NEW_TOK} tokens {rest_s:.2f} s: {1000 * rest_s / NEW_TOK:.1f} ms each")


def update(model, args, optimizer, parameters: int) -> None:
    """Two micro-batches and a step, twice; the second is timed."""
    count = -(-args.micro_batch_tok // args.policy_context)
    width = args.micro_batch_tok // count
    mask = [0] * (width // 2) + [1] * (width - width // 2)
    samples = [TrainSample(ids, mask) for ids in rows(count, width, 0)]

    def step() -> None:
        for _ in range(2):
            (-token_logprobs(model, samples)[0].mean()).backward()
        optimizer_step(trainable_parameters(model), [optimizer], run.Dist(device=torch.device("cuda")))
    step()
    seconds, _ = cpu_s(step, device="cuda")
    tokens = 2 * len(samples) * width
    print(f"  update: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} a second, "
          f"{100 * 6 * parameters * tokens / seconds / PEAK_FLOPS:.0f} % of {PEAK_FLOPS / 1e12:.0f} TFLOP/s")


def main(flags: Args) -> None:
    args = read_preset(flags.config, "train_policy", train_policy.Args)
    dream_context = read_preset(flags.config, "train_expmodel", train_expmodel.Args).context
    run.init_dist(0)
    with TemporaryDirectory() as folder:
        print(f"{args.model}, {Path(flags.config).stem}, {torch.cuda.get_device_name()}", flush=True)
        random_checkpoint(args.model, Path(folder))
        model, tokenizer = load_model(folder, args.dtype, args.quantize, args.lora_rank, "cuda")
        frozen = f"{folder}/adapters" if args.lora_rank else folder
        if args.lora_rank:
            save_model(model, tokenizer, frozen)
        others = {name: load_frozen(frozen, name, model, args.dtype, args.quantize, "cuda")[0]
                  for name in ("reference", "experience")}
    size = measure(model.config)
    dream = size, dream_context, args.quantize, bool(args.lora_rank)
    said = budget(args, size, args.policy_context, 1, dream=dream)
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-6)
    update(model, args, optimizer, size.total)   # from here on with the optimizer's state
    for phase in ("rollout", "update"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if phase == "rollout":
            policy = Sampler(model, args.slots, args.policy_context, [], 0)
            dream = Sampler(others["experience"], args.slots, dream_context, [], 0)
            decode(policy)
            with adapter(others["experience"], "experience"):
                decode(dream)
            policy.clear_caches(), dream.clear_caches()
        else:
            update(model, args, optimizer, size.total)
        need, held = sum(said[phase].values()) - OTHER, torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
        print(f"{phase}: tensors {held / 1e9:.1f} GB, {held / need:.2f} of the budget of {need / 1e9:.1f} "
              f"(without {OTHER / 1e9:.0f} for what is no tensor); reserved {reserved / 1e9:.1f}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
