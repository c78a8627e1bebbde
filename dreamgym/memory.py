"""Does a run fit? A budget of each rank's memory, by arithmetic on models that hold none (meta device).

    size = measure("Qwen/Qwen2.5-1.5B-Instruct")
    phases = budget(args, size, args.policy_context, ranks=8, device="cuda", dream=(size, 4096, "nf4", True))
    print(table(phases)); refuse(phases, torch.cuda.get_device_properties(0).total_memory)

Bytes; b is the number of bytes of the computing precision. Activations, logits and `other` are estimates;
fragmentation and the temporaries of kernels are left out.
"""
import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import AutoConfig, PreTrainedConfig

from dreamgym.logprobs import CHUNK
from dreamgym.model import REPLICATED_BELOW, base_of, explain_load_errors, meta_model, precision

NF4 = 0.5 + (1 + 4 / 256) / 64   # bytes a weight: 4 bits, 8 for each 64 weights, 32 for each 256 of these
OTHER = 2e9                      # on a GPU: the CUDA context, cuBLAS, the collectives' buffers (a guess)


@dataclass
class Size:
    """Counts of numbers in a model."""
    total: int         # parameters
    linear: int        # of them in linear maps of layers: nf4 and adapters are for these
    lora: int          # of its adapters of rank 1
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    kv: int            # of the KV cache for one token
    positions: int     # tokens it can read


def measure(model: str | PreTrainedConfig) -> Size:
    """Of a folder, a hub name (of adapters: their base) or a configuration."""
    with explain_load_errors(model) if isinstance(model, str) else nullcontext():
        config = AutoConfig.from_pretrained(base_of(model)[0]) if isinstance(model, str) else model
        empty = meta_model(config)
        head = empty.get_output_embeddings()
        linear = [m for m in empty.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Size(sum(p.numel() for p in empty.parameters()), sum(m.weight.numel() for m in linear),
                    sum(m.in_features + m.out_features for m in linear), config.num_hidden_layers,
                    config.hidden_size, config.intermediate_size, config.vocab_size,
                    2 * config.num_hidden_layers * config.num_key_value_heads * head_dim,
                    config.max_position_embeddings)


def frozen_weights(size: Size, quantize: str, b: int) -> float:
    linear = NF4 if quantize == "nf4" else b
    return size.linear * linear + (size.total - size.linear) * b


def activations(size: Size, tokens: int, checkpointing: bool, b: int, frozen: bool = False) -> float:
    """What a forward keeps for its backward, counted by saved_tensors_hooks on a Llama. In each layer: 34
    bytes a hidden number (22 where weights are `frozen`, under LoRA); in the computing precision four times
    the intermediate size, keys and values."""
    hidden = 22 if frozen else 34
    layer = tokens * (hidden * size.hidden + b * (4 * size.intermediate + size.kv / size.layers))
    kept = tokens * 4 * size.hidden              # a layer's input
    return layer + size.layers * kept if checkpointing else size.layers * layer


def budget(args, size: Size, context: int, ranks: int, device: str = "cuda",
           dream: tuple[Size, int, str, bool] | None = None,
           episodes: int = 0) -> dict[str, dict[str, float]]:
    """{phase: {part: bytes of a rank}} of training with the flags `args` of a script. `dream`: size, context
    and quantization of the experience model, and whether it shares the policy's base. `episodes`: most that a
    rank plays at once, if that is less than --slots. Raises ValueError where a context is longer than a model
    reads."""
    for tokens, model in [(context, size)] + ([(dream[1], dream[0])] if dream else []):
        if tokens > model.positions:
            raise ValueError(f"a context of {tokens} tokens: this model reads {model.positions}; expected "
                             "fewer by --policy-context or --context, or another --model")
    dtype = precision(args.dtype, size.total, device)
    b = torch.empty(0, dtype=dtype).element_size()
    shards = ranks if size.total >= REPLICATED_BELOW and args.quantize == "none" else 1
    slots = min(args.slots, episodes or args.slots)
    lora = size.lora * args.lora_rank
    weights = frozen_weights(size, args.quantize, b) / shards + 4 * lora if lora else 4 * size.total / shards
    trained = lora or size.total / shards
    always = {"weights": weights, "optimizer": 8 * trained, "other": OTHER * (device != "cpu")}
    cast = 0.0 if lora or b == 4 else 2 * (size.linear + size.vocab * size.hidden)    # autocast's copy
    gathered = b * size.total if shards > 1 else cast
    kv = slots * context * size.kv * b
    if getattr(args, "kl_coef", 0) and getattr(args, "algo", "grpo") in ("grpo", "ppo"):
        always["reference"] = b * lora if lora else b * size.total / shards
    if dream:
        dream_size, dream_context, dream_quantize, shares_base = dream
        own = ranks if dream_size.total >= REPLICATED_BELOW and dream_quantize == "none" else 1
        always["experience model"] = b * lora if shares_base else frozen_weights(
            dream_size, dream_quantize, b) / own
        gathered += b * dream_size.total if shards > 1 and not shares_base else 0
        kv += slots * dream_context * dream_size.kv * b
    outside_layers = size.total - size.linear
    row_tok = max(args.micro_batch_tok, context)             # a row is never split
    two_layers = b * (outside_layers + 2 * size.linear / size.layers) if shards > 1 else cast
    return {"rollout": always | {"gathered": gathered, "KV cache": kv,
                                 "logits": slots * size.vocab * (b + 4 + 8 + 8)},
            "update": always | {"gradients": 4 * trained, "gathered": two_layers,
                                "activations": activations(size, row_tok, args.gradient_checkpointing, b,
                                                           bool(lora)),
                                # of a chunk, with entropy and gradient: five times in float32
                                "logits": min(CHUNK, row_tok) * size.vocab * 5 * 4}}


def table(phases: dict[str, dict[str, float]]) -> str:
    """One line a phase, in GB (1e9 bytes)."""
    lines = [f"{phase}: {sum(parts.values()) / 1e9:.1f} GB = "
             + " + ".join(f"{part} {value / 1e9:.1f}" for part, value in parts.items() if value >= 5e7)
             for phase, parts in phases.items()]
    return "memory of a rank by arithmetic\n  " + "\n  ".join(lines)


def refuse(phases: dict[str, dict[str, float]], available: float) -> None:
    """Raises ValueError where a phase needs more than `available` bytes, with what makes it smaller."""
    phase, parts = max(phases.items(), key=lambda item: sum(item[1].values()))
    need = sum(parts.values())
    if need > available:
        raise ValueError(f"{phase} needs {need / 1e9:.1f} GB on each rank, which has {available / 1e9:.1f}. "
                         "What makes its parts smaller: --lora-rank, --quantize nf4, more ranks; --kl-coef 0 "
                         "(reference); --expmodel URL; fewer --slots (KV cache); --gradient-checkpointing or "
                         "fewer --micro-batch-tok (activations)")


def check_memory(phases: dict[str, dict[str, float]], dist) -> None:
    """Prints the budget. Raises ValueError where a rank's GPU, or its share of a machine without one, cannot
    hold it."""
    if dist.is_main:
        print(table(phases), flush=True)
    if dist.device.type == "cuda":
        available = torch.cuda.get_device_properties(dist.device).total_memory
    else:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.world_size))
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / here
    refuse(phases, available)
