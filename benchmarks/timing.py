"""What the benchmarks share: a clock that other processes do not disturb, resident memory, a model."""
import os
import time
from collections.abc import Callable
from pathlib import Path


def clock(device: str = "cpu") -> float:
    """CPU seconds of this process; wall seconds after a synchronise on a GPU."""
    if device == "cpu":
        return time.process_time()
    import torch
    torch.cuda.synchronize()
    return time.perf_counter()


def cpu_s(call: Callable, *args, device: str = "cpu") -> tuple[float, object]:
    """(seconds on `clock`, result) of a call."""
    start = clock(device)
    result = call(*args)
    return clock(device) - start, result


def memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def tiny_llama(vocab: int, hidden: int, layers: int):
    """Random weights, 4 heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=4096, tie_word_embeddings=True)).eval()
