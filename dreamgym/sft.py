"""One supervised step on token samples, of the experience model or of imitation.

    optimizers = make_optimizers(model, lr=1e-5)
    set_rate(optimizers, step, steps, warmup=20)
    values = sft_step(model, my_samples, optimizers, micro_batch_tok=8192, dist=dist)
"""
import math

import torch

from dreamgym.losses import aggregate, check_finite
from dreamgym.logprobs import TrainSample, even_micro_batches, token_logprobs
from dreamgym.model import optimizer_step, trainable_parameters
from dreamgym.tiny import Muon


def sft_step(model: torch.nn.Module, samples: list[TrainSample], optimizers: list[torch.optim.Optimizer],
             micro_batch_tok: int, dist, divisors: list[int] | None = None) -> dict:
    """Minimizes the mean of -log p over the trained tokens of all ranks' samples (DreamGym, Eq. 5). With
    `divisors`, one a sample, a token weighs 1 / divisor: a sample's own trained tokens give the mean over
    samples of each one's mean. Every rank calls it with its own share of `samples`, which may be empty.
    Returns the loss, the gradient norm before clipping, and the trained tokens of all ranks. Raises
    FloatingPointError where loss or gradient is not finite."""
    sizes = [sum(sample.mask) for sample in samples]
    divisors = divisors or [1] * len(samples)
    tokens, total = dist.all_reduce_sum([float(sum(sizes)), sum(n / d for n, d in zip(sizes, divisors) if n)])
    loss_sum = 0.0
    for indices in even_micro_batches(samples, micro_batch_tok, dist):
        logp_N = token_logprobs(model, [samples[i] for i in indices], with_entropy=False)[0]
        divisor_N = torch.tensor([divisors[i] for i in indices for _ in range(sizes[i])]).to(logp_N.device)
        # gradients are averaged over ranks
        loss = aggregate(-logp_N / divisor_N, total / dist.world_size)
        check_finite(loss, f"supervised loss of samples {indices}")
        loss.backward()
        loss_sum += loss.item() / dist.world_size
    norm = optimizer_step(model.parameters(), optimizers, dist)
    return {"loss": dist.all_reduce_sum(loss_sum), "grad_norm": norm, "tokens": tokens}


def make_optimizers(model: torch.nn.Module, lr: float, muon_lr: float = 0.0, weight_decay: float = 0.01,
                    epsilon: float = 1e-8) -> list[torch.optim.Optimizer]:
    """AdamW. With `muon_lr` the layers' matrices take Muon instead, and `weight_decay` is theirs alone: a
    model from scratch learns to copy and compare words several times sooner. With a small `epsilon` of AdamW,
    each step moves all words that a batch does not contain equally far in the same direction. Embeddings of
    rare words become alike. With one of the size of these gradients (5e-4) they stay apart."""
    inner = {p for name, p in model.named_parameters() if muon_lr and p.ndim == 2 and ".layers." in name}
    trained = trainable_parameters(model)
    matrices, others = [p for p in trained if p in inner], [p for p in trained if p not in inner]
    optimizers: list[torch.optim.Optimizer] = []
    if others:                                   # none with LoRA, whose adapters are all matrices of layers
        decay = 0.0 if muon_lr else weight_decay
        optimizers.append(torch.optim.AdamW(others, lr, (0.9, 0.95), epsilon, decay))
    if matrices:
        optimizers.append(Muon(matrices, lr=muon_lr, weight_decay=weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], step: int, steps: int, warmup: int,
             floor: float = 0.0) -> None:
    """Linear warm-up over `warmup` steps, cosine from the peak to `floor` x peak at `steps`, constant
    after."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    share = min(1.0, (step + 1) / warmup) * (floor + (1 - floor) * cosine)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
