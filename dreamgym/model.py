"""Models: loaded, sharded and saved.

    model, tokenizer = load_model("Qwen/Qwen2.5-0.5B-Instruct", lora_rank=16)  # or shard(tiny.create(...))
    reference, _ = load_frozen(folder, "reference", beside=model)              # adapters where they can be

Models stay in eval mode, also in training: without dropout a log-prob is the same twice. Weights that
are trained are float32; computing in bfloat16 casts them for each product (autocast), or as FSDP2 gathers
them. Frozen weights are then bfloat16.
"""
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (FSDPModule, MixedPrecisionPolicy, fully_shard,
                                    register_fsdp_forward_method)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig,
                          GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from dreamgym.chat import chat_format
from dreamgym.word_tokenizer import load_tokenizer

MAX_GRAD_NORM = 1.0
REPLICATED_BELOW = 20_000_000  # parameters: gathering layers of a smaller model takes longer than computing

transformers_logging.disable_progress_bar()


# ---- load and save ----

def load_model(name_or_path: str, dtype: str = "auto", quantize: str = "none", lora_rank: int = 0,
               device: str = "cpu", seed: int = 0, frozen: bool = False,
               ) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Any Hugging Face causal LM with its tokenizer, from a folder (also one of `save_model`) or the hub.

    `dtype`: see `precision`. `lora_rank` > 0 freezes the model and adds adapters (alpha = 2 rank), drawn from
    `seed`, to all linear layers; a folder with adapters continues those. With several ranks each one reads
    its own shard of a model of at least REPLICATED_BELOW parameters. Raises ValueError for a model that
    cannot be loaded or is not supported.
    """
    base, saved_rank = base_of(name_or_path)
    if saved_rank and lora_rank not in (0, saved_rank):
        raise ValueError(f"lora_rank is {lora_rank}, but the adapters in {name_or_path!r} have rank "
                         f"{saved_rank}: leave it at 0 to continue them")
    trained = not (frozen or lora_rank or saved_rank or quantize != "none")
    with explain_load_errors(name_or_path):
        model = _load_base(base, dtype, quantize, device, trained)
        tokenizer = load_tokenizer(name_or_path)
    if saved_rank:
        model = PeftModel.from_pretrained(model, name_or_path, is_trainable=not frozen, torch_device=device)
    elif lora_rank:
        config = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear",
                            task_type="CAUSAL_LM")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = get_peft_model(model, config)
    return model.eval(), tokenizer


def load_frozen(folder: str, name: str, beside: torch.nn.Module | None = None, dtype: str = "auto",
                quantize: str = "none", device: str = "cpu",
                ) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """A model that is not trained. Adapters on the base of `beside` become adapters `name` of `beside`, so
    that one base is in memory; `adapter(model, name)` switches them on."""
    base, rank = base_of(folder)
    if rank and isinstance(beside, PeftModel):
        quantized = bool(without_adapters(beside).config.to_dict().get("quantization_config"))
        same_base = beside.peft_config["default"].base_model_name_or_path == base
        if same_base and quantized == (quantize != "none"):
            beside.load_adapter(folder, name, torch_device=device)
            for key, weight in beside.named_parameters():
                if f".{name}." in key:           # else autocast would cast them again for each token
                    weight.data = weight.data.to(compute_dtype(beside))
            return beside, load_tokenizer(folder)
    return load_model(folder, dtype, quantize, device=device, frozen=True)


@contextmanager
def adapter(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Computes with the adapters `name`, where the model has such."""
    # Not peft's set_adapter: it also switches requires_grad.
    has_it = isinstance(model, PeftModel) and name in model.peft_config
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)] if has_it else []
    for layer in layers:
        layer._active_adapter = [name]
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter = ["default"]


@contextmanager
def explain_load_errors(name_or_path: str) -> Iterator[None]:
    """Says in one line (ValueError) what is wrong with a model that transformers refuses."""
    base, rank = base_of(name_or_path)
    of = f" (the base of the adapters in {name_or_path!r})" if rank else ""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"no model at {base!r}{of}: it is neither a model folder nor a hub name that can be "
                         f"reached or is cached ({error})") from error
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, AttributeError) as error:   # another kind of model, other shapes
        raise ValueError(f"the model at {base!r}{of} is not supported: expected a causal language model of "
                         "the Llama, Qwen or Mistral kind with its tokenizer "
                         f"({' '.join(str(error).split())[:200]})") from error


def base_of(name_or_path: str) -> tuple[str, int]:
    """(the model itself, 0), or of a folder with adapters (their base, their rank)."""
    adapters = Path(name_or_path) / "adapter_config.json"
    if not adapters.is_file():
        return str(name_or_path), 0
    config = json.loads(adapters.read_text())
    return config["base_model_name_or_path"], config["r"]


def meta_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model without memory for its weights; buffers are real."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    return model.eval()


def precision(dtype: str, parameters: int, device: str) -> torch.dtype:
    """In which precision a model of so many parameters computes. "auto": bfloat16 on a GPU, unless it is
    small."""
    if dtype == "auto":
        small = parameters < REPLICATED_BELOW or torch.device(device).type == "cpu"
        dtype = "float32" if small else "bfloat16"
    return getattr(torch, dtype)


def compute_dtype(model: torch.nn.Module) -> torch.dtype:
    causal_lm = without_adapters(model)
    return getattr(causal_lm, "compute_dtype", causal_lm.dtype)


def autocast(model: torch.nn.Module):
    """The context in which the model computes."""
    device = without_adapters(model).device.type
    half = compute_dtype(model) == torch.bfloat16
    return torch.autocast(device, torch.bfloat16) if half else nullcontext()


def attends_fully(config, tokens: int) -> bool:
    """Whether every layer attends to all of `tokens` tokens."""
    types, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if types == {"full_attention"}:
        return True
    return types <= {"full_attention", "sliding_attention"} and (window is None or window >= tokens)


def _load_base(base: str, dtype: str, quantize: str, device: str, trained: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(base)
    meta = meta_model(config)
    compute = precision(dtype, meta.num_parameters(), device)
    options = {"dtype": torch.float32 if trained else compute, "attn_implementation": "sdpa"}
    if quantize == "none" and _should_shard(meta):
        empty = meta_model(config, options["dtype"]).requires_grad_(trained)
        model = _read_shards(empty, base, compute, device)
    elif quantize == "none":
        model, found = AutoModelForCausalLM.from_pretrained(base, output_loading_info=True, **options)
        if found["missing_keys"]:                # they would be random
            raise ValueError(f"its files lack {len(found['missing_keys'])} weights, such as "
                             f"{min(found['missing_keys'])}")
        model = model.to(device)
    else:
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                 bnb_4bit_compute_dtype=compute)
        model = AutoModelForCausalLM.from_pretrained(base, quantization_config=nf4, device_map={"": device},
                                                     **options)
        for module in model.modules():  # on a CPU, bitsandbytes repacks weights at the first eval forward:
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False  # gradients would then be wrong
    model.compute_dtype = compute
    in_forward(model, _check_supported)          # FSDP sets itself up at the root's first forward, too
    return model.requires_grad_(trained)


@torch.no_grad()
def _read_shards(model: PreTrainedModel, base: str, compute: torch.dtype, device: str) -> PreTrainedModel:
    """Shards `model`, which has no memory yet; each rank reads its own rows of each weight."""
    model.compute_dtype = compute
    _fully_shard(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    is_folder, world_size = Path(base).is_dir(), torch.distributed.get_world_size()
    folder = Path(base if is_folder else snapshot_download(base, allow_patterns="model*.safetensors"))
    missing = dict(model.named_parameters())
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:      # a file at a time: what is mapped counts as memory
            for name in missing.keys() & set(file.keys()):
                weight = missing.pop(name)
                local = weight.to_local()
                start = torch.distributed.get_rank() * -(-len(weight) // world_size)
                if len(local):
                    local.copy_(file.get_slice(name)[start:start + len(local)])
    if missing:
        raise ValueError(f"{base}: found no {min(missing)!r} in its model*.safetensors files ({len(missing)} "
                         "weights are missing); expected the model's own names. Save it anew with "
                         "save_pretrained, or run one process")
    return model


def without_adapters(model: torch.nn.Module) -> PreTrainedModel:
    """The causal language model itself, whose layers hold the adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@torch.no_grad()
def _check_supported(causal_lm: PreTrainedModel) -> None:
    """Sampler and trainer call body and head themselves: refuses what would differ from the model's own
    forward."""
    name, rope = type(causal_lm).__name__, getattr(causal_lm.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(f"{name} is not supported: with rope_type {rope['rope_type']!r} positions change "
                         "with the longest row of the batch")
    ids_BT = torch.arange(4, device=causal_lm.device)[None]
    with autocast(causal_lm):
        hidden_BTH = causal_lm.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        own_BTV = causal_lm.get_output_embeddings()(hidden_BTH)
        logits_BTV = causal_lm.forward(input_ids=ids_BT, use_cache=False).logits
    if not torch.allclose(logits_BTV.float(), own_BTV.float(), rtol=1e-2, atol=1e-2):  # soft cap, scale
        raise ValueError(f"{name} is not supported: its logits are not its head's plain output. Use a model "
                         "of the Llama, Qwen or Mistral kind.")


def save_model(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Writes the weights (only the adapters of a LoRA model) and the tokenizer. Every rank calls it."""
    state, lora = None, isinstance(model, PeftModel)
    if isinstance(model, FSDPModule):            # adapters are whole on every rank
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    distributed = torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == 0:
        # peft would else ask the hub whether the vocabulary of the base was changed
        extra = {"selected_adapters": ["default"], "save_embedding_layers": False} if lora else {}
        model.save_pretrained(folder, state_dict=state, **extra)
        tokenizer.save_pretrained(folder)
    if distributed:
        torch.distributed.barrier()


def export_model(folder: str | Path, to: str | Path, dtype: str = "auto", device: str = "cpu") -> None:
    """A model of ours as a plain Hugging Face folder for a server, adapters merged into their base, in the
    precision that it computed in: a server takes that of the file. Date and
    thinking in the template, the taught end of a turn, and the sampling settings are fixed: a server would
    take the checkpoint's (Qwen's have a repetition penalty)."""
    model, tokenizer = load_model(str(folder))
    model = model.merge_and_unload() if isinstance(model, PeftModel) else model
    chat = chat_format(tokenizer, "system")
    tokenizer.chat_template = chat.template
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=chat.end_ids,
                                               pad_token_id=tokenizer.pad_token_id)
    model.to(precision(dtype, model.num_parameters(), device)).save_pretrained(to)
    tokenizer.save_pretrained(to)


def trainable_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# ---- distributed ----

def shard(model: torch.nn.Module) -> torch.nn.Module:
    """A model made in memory (equal on all ranks), sharded as `load_model` shards one that it reads."""
    if _should_shard(model):
        _fully_shard(model)
        in_forward(model, _check_supported)      # FSDP sets itself up at the root's first forward
    return model


def _should_shard(model: torch.nn.Module) -> bool:
    """Whether FSDP shards this model: with several ranks, from REPLICATED_BELOW parameters on. Of others, of
    adapters and of 4-bit models ranks exchange only gradients (`optimizer_step`)."""
    alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    return not alone and model.num_parameters() >= REPLICATED_BELOW


def _fully_shard(causal_lm: PreTrainedModel) -> None:
    """FSDP2 over all ranks, one unit per decoder layer."""
    dtype = compute_dtype(causal_lm)
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = [m for m in causal_lm.modules() if type(m).__name__ in causal_lm._no_split_modules]
    # The root is resharded, too: else a no_grad pass may leave a stale full copy beside an updated shard.
    for module in (*layers, causal_lm):
        fully_shard(module, reshard_after_forward=True, mp_policy=policy)
    causal_lm.in_forward = lambda function, *arguments: function(causal_lm, *arguments)
    register_fsdp_forward_method(causal_lm, "in_forward")  # FSDP gathers the root's weights for it


def in_forward(causal_lm: PreTrainedModel, function: Callable, *arguments: Any):
    """function(causal_lm, *arguments), with the weights of a sharded model gathered."""
    if isinstance(causal_lm, FSDPModule):
        return causal_lm.in_forward(function, *arguments)
    return function(causal_lm, *arguments)


def checkpoint_layers(model: torch.nn.Module) -> None:
    """Gradient checkpointing: of a layer only the input is kept, the backward computes the rest again."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"--gradient-checkpointing: {type(without_adapters(model)).__name__} has no layers "
                         "that support it; expected a model of the Llama, Qwen or Mistral kind")
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


@contextmanager
def checkpointing_enabled(causal_lm: PreTrainedModel) -> Iterator[None]:
    """With gradients on, sets `training` on the layers that `checkpoint_layers` marked: then transformers
    checkpoints a layer, and refuses the KV cache that a sampler needs."""
    layers = [m for m in causal_lm.modules() if getattr(m, "gradient_checkpointing", False)
              and isinstance(m, GradientCheckpointingLayer)] if torch.is_grad_enabled() else []
    for layer in layers:
        layer.training = True                    # of the layer alone: no dropout inside it
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@contextmanager
def unsharded(model: torch.nn.Module | None) -> Iterator[torch.nn.Module]:
    """Full parameters on every rank, so that ranks may run different numbers of forwards (rollouts)."""
    units = [unit for unit in (model.modules() if model is not None else ()) if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield model
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
        if units:    # else the next backward prefetches in the order of these forwards, which differs by rank
            units[0].reset_iter_state()


def optimizer_step(parameters: Iterable[torch.nn.Parameter], optimizers: Iterable[torch.optim.Optimizer],
                   dist) -> float:
    """Averages over ranks the gradients that FSDP does not average (of parameters that are whole on every
    rank), clips all gradients and steps. Returns the norm before."""
    parameters = list(parameters)
    whole = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
    if whole and dist.world_size > 1:
        vector = torch.nn.utils.parameters_to_vector(whole)
        torch.distributed.all_reduce(vector)
        torch.nn.utils.vector_to_parameters(vector / dist.world_size, whole)
    norm = clip_grad_norm(parameters, MAX_GRAD_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm


def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scales the gradients, sharded and plain ones together, to a norm of at most `max_norm`. Returns the
    norm before. Raises FloatingPointError where it is not finite."""
    grads = [p.grad for p in parameters if p.grad is not None]
    groups = [[g for g in grads if isinstance(g, DTensor) == is_sharded] for is_sharded in (True, False)]
    norms = [torch.nn.utils.get_total_norm(group) for group in groups if group]
    total = sum((n.full_tensor() if isinstance(n, DTensor) else n).item() ** 2 for n in norms) ** 0.5
    if not total < float("inf"):
        raise FloatingPointError(f"the gradient norm is {total}: look at this step's loss, its learning rate "
                                 "and its longest sample")
    if total > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (total + 1e-6))
    return total
