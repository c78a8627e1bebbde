"""What the benchmarks share: a clock that other processes do not disturb, resident memory, models."""
import os
import time
from collections.abc import Callable
from pathlib import Path

QWEN = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "max_position_embeddings": 32768}
# kind, config.json and number of parameters of published models
PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
        "max_position_embeddings": 131072}, 8_030_261_248),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", QWEN | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
        1_543_714_304),
    "Qwen/Qwen2.5-3B-Instruct": ("qwen2", QWEN | {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
        3_085_938_688)}


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
