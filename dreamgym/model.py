"""Models: made or loaded, sharded, saved, and the log-probs of training rows.

    model, tokenizer = load_model("Qwen/Qwen2.5-0.5B-Instruct", lora_rank=16)      # or create_tiny(build_tokenizer(texts), "tiny")
    reference = make_reference(model)                                              # before shard
    model, reference = shard(model), shard(reference)
    for indices in micro_batches(rows, micro_batch_tok=8192):
        logp_N, entropy_N, _ = row_logps(model, [rows[i] for i in indices])

B rows, T tokens, N trained tokens of all rows one after another, V vocabulary, H hidden. Dropout is always off: a log-prob must be the same twice.
Left out on purpose: tensor and pipeline parallelism, sharded 4-bit models, and mixed precision on one device (wrap the calls in `torch.autocast`).
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, prepare_model_for_kbit_training, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from transformers.utils import logging as transformers_logging

from dreamgym.tokenizer import ChatFormat, build_tokenizer, chat_format, check_tokenizer, encode, encode_untrusted

__all__ = [
    "ChatFormat", "Row", "build_tokenizer", "chat_format", "check_tokenizer", "clip_grad_norm", "create_tiny", "encode", "encode_untrusted",
    "gathered", "load_model", "load_weights", "make_reference", "micro_batches", "prefix_packs", "reference_logps", "row_logps", "save_model", "shard",
    "trainable_parameters",
]  # fmt: skip

SIZES = {"tiny": {"hidden_size": 64, "intermediate_size": 224}, "tiny128": {"hidden_size": 128, "intermediate_size": 448}}
LOGITS_KEPT = 2**24  # numbers (64 MiB) up to which a chunk's logits are kept for the backward: recomputing them would take longer
MIN_SHARED_TOK = 16  # rows sharing less than this keep separate packs: the longer attention would cost more than the tokens saved


# ---------------------------------------------------------------------------------------------------------------- make, load, save


def create_tiny(tokenizer: PreTrainedTokenizerBase, size: str, seed: int = 0) -> LlamaForCausalLM:
    """A Llama with 3 layers, 2 heads and tied embeddings in fp32: "tiny" has 178k parameters + 64 per token, "tiny128" 713k + 128 per token."""
    # A head matches words only by rotary pairs that turn slowly over a prompt: two wide heads and a large theta learn to copy sooner (README, lab notes).
    if size not in SIZES:
        raise ValueError(f"unknown model size {size!r}: choose one of {sorted(SIZES)}")
    quiet()
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, attn_implementation="sdpa",
        rope_theta=1e6, initializer_range=0.06, **SIZES[size],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


def load_model(
    name_or_path: str, dtype: str = "auto", quantize: str = "none", lora_rank: int = 0, gradient_checkpointing: bool = False,
    device: str = "cpu", seed: int = 0,
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:  # fmt: skip
    """Any Hugging Face causal LM with its tokenizer, from a folder (also one of `save_model`, with or without adapters) or the hub.

    `dtype` is "auto" or a torch name; `quantize` "nf4" stores linear weights in 4 bits (double quantization); `lora_rank` > 0 freezes the model
    and adds adapters (alpha = 2 rank) to all linear layers, drawn from `seed`; a folder with adapters continues those.
    Raises ValueError for a missing folder or hub name, no network, or an architecture whose logits are not its head's plain output.
    """
    quiet()
    if quantize not in ("none", "nf4"):
        raise ValueError(f"quantize is {quantize!r}: choose 'none' or 'nf4'")
    folder = Path(name_or_path)
    if folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ValueError(f"the folder {name_or_path!r} holds neither config.json nor adapter_config.json: give the model folder itself")
    adapters = json.loads((folder / "adapter_config.json").read_text()) if (folder / "adapter_config.json").is_file() else None
    base = adapters["base_model_name_or_path"] if adapters else name_or_path
    if adapters and lora_rank not in (0, adapters["r"]):
        raise ValueError(f"lora_rank is {lora_rank}, but the adapters in {name_or_path!r} have rank {adapters['r']}: leave it at 0 to continue them")
    dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        config = _without_dropout(AutoConfig.from_pretrained(base))
        compute = torch.float32 if device == "cpu" else torch.bfloat16
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute)
        placed = {"quantization_config": nf4, "device_map": {"": device}} if quantize == "nf4" else {}
        model = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=dtype, attn_implementation="sdpa", **placed)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except OSError as error:
        raise ValueError(
            f"no model at {base!r}{f' (the base of the adapters in {name_or_path!r})' if adapters else ''}: it is neither a model folder nor a hub "
            f"name that can be reached or is cached. Check the spelling, or download it where there is a network and give the folder. ({error})"
        ) from error
    model = model if quantize == "nf4" else model.to(device)
    if gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if quantize == "nf4" and (lora_rank or adapters):
        from bitsandbytes.nn import Linear4bit  # here, so that a machine without bitsandbytes can do all else

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        for module in model.modules():
            if isinstance(module, Linear4bit):  # on a CPU, bitsandbytes repacks weights for good at the first eval forward: gradients are then wrong
                module.support_avx512bf16_for_cpu = False
    if adapters:
        model = PeftModel.from_pretrained(model, name_or_path, is_trainable=True)
    elif lora_rank:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = get_peft_model(model, LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.train(gradient_checkpointing)  # transformers recomputes activations in training mode only; without dropout the modes are else the same
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    _check_head(model)
    return model, tokenizer


def quiet() -> None:
    """No progress bars for reading and writing files of a second."""
    transformers_logging.disable_progress_bar()


def _without_dropout(config: AutoConfig) -> AutoConfig:
    for key, value in config.to_dict().items():
        if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def _causal_lm(model: torch.nn.Module) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


@torch.no_grad()
def _check_head(model: PreTrainedModel | PeftModel) -> None:
    """Refuse an architecture that changes the logits after its head (soft cap, scale): sampler and trainer call the body and the head themselves."""
    causal_lm = _causal_lm(model)
    ids_BT = torch.arange(4, device=causal_lm.device)[None]
    own_BTV = causal_lm.get_output_embeddings()(causal_lm.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state)
    if not torch.allclose(model(input_ids=ids_BT, use_cache=False).logits.float(), own_BTV.float(), rtol=1e-2, atol=1e-2):
        name = type(causal_lm).__name__
        raise ValueError(f"{name} is not supported: its logits are not its head's plain output. Use a model of the Llama, Qwen or Mistral kind.")


def save_model(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write the weights (safetensors; only the adapters of a LoRA model) and the tokenizer; all ranks call it, rank 0 writes the gathered state."""
    state, lora = None, isinstance(model, PeftModel)
    if isinstance(model, FSDPModule):
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=lora))
    if not dist.is_initialized() or dist.get_rank() == 0:
        # peft would else ask the hub whether the vocabulary of the base was changed
        extra = {"selected_adapters": ["default"], "save_embedding_layers": False} if lora else {}
        model.save_pretrained(folder, state_dict=state, **extra)
        tokenizer.save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()


def load_weights(model: torch.nn.Module, folder: str | Path) -> None:
    """The weights of a checkpoint into a model of the same form that is not sharded yet; of LoRA only the adapters."""
    if isinstance(model, PeftModel):
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    else:
        model.load_state_dict(load_model(str(folder))[0].state_dict())


def trainable_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters to give to the optimizer.

    Raises ValueError if they are 16-bit: bfloat16 keeps 8 bits of a weight, so that the updates of a small learning rate (1e-6) round to nothing.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    half = {p.dtype for p in parameters} & {torch.bfloat16, torch.float16}
    if half:
        raise ValueError(f"trainable weights are {half}: small updates would be lost. Load with dtype='float32', or use lora_rank.")
    return parameters


# ---------------------------------------------------------------------------------------------------------------- distributed


def shard(model: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    """FSDP2 over all ranks, one unit per decoder layer; untouched with one process. Every rank must hold the same weights before.

    With `compute_dtype` (bfloat16) layers compute in it while the sharded weights and the gradient sums stay in fp32.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or isinstance(model, FSDPModule):
        return model
    causal_lm = _causal_lm(model)
    if causal_lm.config.to_dict().get("quantization_config"):
        raise ValueError("4-bit models are not sharded: run one process, or load with quantize='none' (LoRA works sharded)")
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
    # The root is resharded after its forward, too: a no_grad pass may else leave a stale full copy beside an updated shard.
    for module in causal_lm.modules():
        if type(module).__name__ in causal_lm._no_split_modules:
            fully_shard(module, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    model.flat_logps = MethodType(_flat_logps, model)  # a forward of its own, which FSDP must know to gather the root's weights
    register_fsdp_forward_method(model, "flat_logps")
    model.wake = MethodType(lambda self: None, model)  # FSDP sets itself up at the root's first forward: make it before a rollout calls inner modules
    register_fsdp_forward_method(model, "wake")
    model.wake()
    return model


@contextmanager
def gathered(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Full parameters on every rank inside the block, so that ranks may run different numbers of forwards (rollouts); no-op when not sharded."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield model
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scale the gradients to a joint norm of at most `max_norm` and return the norm before; sharded and plain parameters may be mixed.

    Raises FloatingPointError on nan or inf, with the gradients untouched.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    squares = 0.0
    for group in ([g for g in grads if isinstance(g, DTensor)], [g for g in grads if not isinstance(g, DTensor)]):
        if group:
            norm = torch.nn.utils.get_total_norm(group)
            squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm).item() ** 2
    total = squares**0.5
    if not torch.isfinite(torch.tensor(total)):
        raise FloatingPointError(f"the gradient norm is {total}: look at this step's loss, its learning rate and its longest row")
    if total > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (total + 1e-6))
    return total


# ---------------------------------------------------------------------------------------------------------------- rows to log-probs


@dataclass
class Row:
    """One training row: mask 1 = trained token, predicted from the tokens before it; mask[0] is 0."""

    ids: list[int]
    mask: list[int]


def prefix_packs(rows: list[Row], pack_tok: int = 1024) -> list[tuple[list[int], int]]:
    """Groups of rows to compute as one tree of prefixes: (row indices, number of tree nodes), each row in one group.

    Rows in lexicographic order are the tree's depth-first order, and what a row adds to it is what follows its common prefix with the row
    before. A pack closes at `pack_tok` nodes or where less than MIN_SHARED_TOK are shared; so taking whole packs away changes no other pack.
    """
    packs: list[tuple[list[int], int]] = []
    before: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: rows[i].ids):
        ids = rows[index].ids
        shared = _shared(before, ids)
        if packs and packs[-1][1] < pack_tok and shared >= MIN_SHARED_TOK:
            packs[-1] = (packs[-1][0] + [index], packs[-1][1] + len(ids) - shared)
        else:
            packs.append(([index], len(ids)))
        before = ids
    return packs


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def micro_batches(rows: list[Row], micro_batch_tok: int, share_prefix: bool = False, pack_tok: int = 1024) -> list[list[int]]:
    """Row indices in batches of at most `micro_batch_tok` padded tokens, longest first; a single longer row (or pack) is a batch of its own.

    With `share_prefix` the padded tokens are those of the prefix trees that `row_logps` will make with the same two arguments.
    """
    units = prefix_packs(rows, pack_tok) if share_prefix else [([i], len(row.ids)) for i, row in enumerate(rows)]
    batches: list[list[int]] = []
    count = width = 0
    for indices, length in sorted(units, key=lambda unit: -unit[1]):
        if not batches or (count + 1) * width > micro_batch_tok or 2 * length < width:  # much shorter ones would be mostly padding
            batches.append([])
            count, width = 0, length
        batches[-1] += indices
        count += 1
    return batches


@dataclass
class _Batch:
    ids_BT: torch.Tensor
    position_BT: torch.Tensor
    attention_B1TT: torch.Tensor | None  # additive; None = plain causal, for which right padding needs no mask
    before_N: torch.Tensor  # index into B*T of the position before each trained token
    target_N: torch.Tensor


def _padded(rows: list[Row], device: torch.device) -> _Batch:
    width = max(len(row.ids) for row in rows)
    ids_BT = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows], device=device)
    before = [b * width + t - 1 for b, row in enumerate(rows) for t, trained in enumerate(row.mask) if trained]
    target = [token for row in rows for token, trained in zip(row.ids, row.mask) if trained]
    position_BT = torch.arange(width, device=device).expand(len(rows), width)
    return _Batch(ids_BT, position_BT, None, *(torch.tensor(x, device=device, dtype=torch.long) for x in (before, target)))


def _packed(rows: list[Row], packs: list[tuple[list[int], int]], device: torch.device, dtype: torch.dtype) -> _Batch:
    """Each pack as one row of tree nodes in depth-first order: node i is seen by the nodes i <= j < end[i] of its own subtree."""
    width = max(nodes for _, nodes in packs)
    ids_BT, position_BT = torch.zeros(2, len(packs), width, dtype=torch.long)
    end_BT = torch.arange(1, width + 1).repeat(len(packs), 1)  # padding sees itself only: a row of the mask must not be empty
    paths: list[list[int]] = [[]] * len(rows)
    for b, (indices, _) in enumerate(packs):
        path, ids, nodes = [], [], 0
        for index in indices:
            shared = _shared(ids, rows[index].ids)
            ids = rows[index].ids
            ids_BT[b, nodes : nodes + len(ids) - shared] = torch.tensor(ids[shared:], dtype=torch.long)
            position_BT[b, nodes : nodes + len(ids) - shared] = torch.arange(shared, len(ids))
            path = path[:shared] + list(range(nodes, nodes + len(ids) - shared))
            nodes += len(ids) - shared
            end_BT[b, torch.tensor(path, dtype=torch.long)] = nodes  # the last row through a node ends its subtree
            paths[index] = [b * width + node for node in path]
    before = [paths[r][t - 1] for r, row in enumerate(rows) for t, trained in enumerate(row.mask) if trained]
    target = [token for row in rows for token, trained in zip(row.ids, row.mask) if trained]
    ids_BT, position_BT, end_BT = ids_BT.to(device), position_BT.to(device), end_BT.to(device)
    column_T = torch.arange(width, device=device)
    seen_BTT = (column_T[None, None, :] <= column_T[None, :, None]) & (column_T[None, :, None] < end_BT[:, None, :])
    attention_B1TT = torch.zeros(seen_BTT.shape, dtype=dtype, device=device).masked_fill_(~seen_BTT, float("-inf"))[:, None]
    return _Batch(ids_BT, position_BT, attention_B1TT, *(torch.tensor(x, device=device, dtype=torch.long) for x in (before, target)))


def _chunk_logps(head: torch.nn.Module, hidden_NH: torch.Tensor, target_N: torch.Tensor, temperature: float, with_entropy: bool):
    logits_NV = head(hidden_NH).float()
    logits_NV = logits_NV if temperature == 1 else logits_NV / temperature
    if not with_entropy:
        return -torch.nn.functional.cross_entropy(logits_NV, target_N, reduction="none"), None
    log_z_N = logits_NV.logsumexp(-1)
    logp_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - log_z_N
    return logp_N, log_z_N - ((logits_NV - log_z_N[:, None]).exp() * logits_NV).sum(-1)


def _flat_logps(model: torch.nn.Module, batch: _Batch, temperature: float, chunk: int, with_entropy: bool):
    """(logp_N, entropy_N or None, hidden_NH): the body once, then the head at trained positions only, chunk by chunk; large logits are recomputed in the backward."""
    causal_lm = _causal_lm(model)
    # With a cache, transformers ignores custom positions and masks in parts: use_cache must be off.
    body = causal_lm.base_model(input_ids=batch.ids_BT, attention_mask=batch.attention_B1TT, position_ids=batch.position_BT, use_cache=False)
    hidden_NH = body.last_hidden_state.flatten(0, 1)[batch.before_N]
    parts = []
    for start in range(0, max(len(hidden_NH), 1), chunk):  # at least one chunk, if empty: ranks without trained tokens still join the backward
        args = (causal_lm.get_output_embeddings(), hidden_NH[start : start + chunk], batch.target_N[start : start + chunk], temperature, with_entropy)
        recomputed = torch.is_grad_enabled() and chunk * causal_lm.config.vocab_size > LOGITS_KEPT    # not by this chunk's size: sharded ranks must agree
        parts.append(checkpoint(_chunk_logps, *args, use_reentrant=False) if recomputed else _chunk_logps(*args))
    return torch.cat([logp_N for logp_N, _ in parts]), torch.cat([entropy_N for _, entropy_N in parts]) if with_entropy else None, hidden_NH


def row_logps(
    model: torch.nn.Module, rows: list[Row], temperature: float = 1.0, chunk: int = 1024, with_entropy: bool = True, with_hidden: bool = False,
    share_prefix: bool = False, pack_tok: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Log-probs and entropies (nats, of logits / temperature) of all trained tokens, flat in row order, as (logp_N, entropy_N, hidden_NH).

    hidden_NH is the last hidden state at the position before each trained token (for a value head); what was not asked for is None. Gradients
    flow unless under no_grad. `share_prefix` computes the prefixes that rows share once: the same numbers and gradients. It needs full attention
    in all layers; other models get separate rows. Example: ids [5, 6, 7] with mask [0, 0, 1] give one entry, log p(7 | 5, 6), and the hidden state
    at token 6.
    """
    rows = rows or [Row([0], [0])]  # a rank that has run out of rows must still join the others' gathering of weights
    for index, row in enumerate(rows):
        if len(row.ids) != len(row.mask) or not row.ids or row.mask[0]:
            found = f"{len(row.ids)} ids, {len(row.mask)} mask entries, first mask {row.mask[:1]}"
            raise ValueError(f"row {index} has {found}: expected as many ids as mask entries, at least one, and first mask 0")
    causal_lm = _causal_lm(model)
    full_attention = set(getattr(causal_lm.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    packs = prefix_packs(rows, pack_tok) if share_prefix and full_attention else []
    if len(packs) < len(rows) and packs:
        batch = _packed(rows, packs, causal_lm.device, causal_lm.dtype)
    else:  # nothing is shared: without a mask of its own, attention is faster
        batch = _padded(rows, causal_lm.device)
    forward = model.flat_logps if isinstance(model, FSDPModule) else partial(_flat_logps, model)
    logp_N, entropy_N, hidden_NH = forward(batch, temperature, chunk, with_entropy)
    return logp_N, entropy_N, hidden_NH if with_hidden else None


# ---------------------------------------------------------------------------------------------------------------- reference policy


def make_reference(model: torch.nn.Module) -> torch.nn.Module:
    """The frozen policy of a KL term: a copy, or for LoRA the model itself with a second adapter "reference"; call it before `shard`."""
    if isinstance(model, FSDPModule):
        raise TypeError("make the reference before shard(): sharded modules cannot be copied; then shard both")
    if not isinstance(model, PeftModel):
        return deepcopy(model).requires_grad_(False).eval()
    model.add_adapter("reference", model.peft_config["default"])
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if ".reference." in name:
            parameter.data.copy_(parameters[name.replace(".reference.", ".default.")].data)
            parameter.requires_grad_(False)
    return model


@contextmanager
def _adapter(model: PeftModel, name: str) -> Iterator[None]:
    # Not peft's set_adapter: it also switches requires_grad, which FSDP reads only once per parameter.
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    before = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [name]
    try:
        yield
    finally:
        for layer, active in zip(layers, before):
            layer._active_adapter = active


@torch.no_grad()
def reference_logps(
    model: torch.nn.Module, reference: torch.nn.Module, rows: list[Row], temperature: float = 1.0, chunk: int = 1024,
    share_prefix: bool = False, pack_tok: int = 1024,
) -> torch.Tensor:  # fmt: skip
    """logp_N of the trained tokens under the reference of `make_reference`, without gradient; the arguments are those of `row_logps`."""
    if reference is not model:
        return row_logps(reference, rows, temperature, chunk, False, False, share_prefix, pack_tok)[0]
    with _adapter(model, "reference"):
        return row_logps(model, rows, temperature, chunk, False, False, share_prefix, pack_tok)[0]
