"""One supervised step on token samples: what training the experience model and imitating demonstrations
share.

    values = sft_step(model, my_samples, optimizers, micro_batch_tok=8192, dist=dist)

Left out on purpose: which samples (the scripts draw them) and the learning rate (tiny.set_rate).
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from dreamgym.losses import aggregate, check_finite, sft_loss
from dreamgym.model import TrainSample, clip_grad_norm, even_micro_batches, token_logprobs

MAX_GRAD_NORM = 1.0


def sft_step(model: torch.nn.Module, samples: list[TrainSample], optimizers: list[torch.optim.Optimizer],
             micro_batch_tok: int, dist, weights: Sequence[Sequence[float]] | None = None) -> dict:
    """Minimizes sum(weight * -log p) / sum(weight) over the trained tokens of all ranks' samples (DreamGym,
    Eq. 5).

    Every rank calls it with its own share of `samples`, which may be empty. `weights` holds one number for
    each mask entry of each sample; without it every trained token weighs 1. `dist` is a run.Dist. Returns the
    loss, the gradient norm before clipping, and the trained tokens of all ranks. Raises ValueError where no
    token is trained, FloatingPointError where loss or gradient is not finite.
    """
    if weights is None:
        weights = [sample.mask for sample in samples]
    if [len(sample.mask) for sample in samples] != [len(weight) for weight in weights]:
        raise ValueError("sft_step: expected one weight for each mask entry; the lengths differ")
    trained = [[float(w) for w, m in zip(weight, s.mask) if m] for weight, s in zip(weights, samples)]
    total, tokens = dist.all_reduce_sum([float(sum(map(sum, trained))), float(sum(map(len, trained)))])
    loss_sum = 0.0
    for indices in even_micro_batches(samples, micro_batch_tok, dist):
        logp_N = token_logprobs(model, [samples[i] for i in indices], with_entropy=False)[0]
        weight_N = torch.tensor([w for i in indices for w in trained[i]], device=logp_N.device)
        loss = aggregate(weight_N * sft_loss(logp_N), total / dist.world_size)  # FSDP averages over ranks
        check_finite(loss, f"supervised loss of samples {indices}")
        loss.backward()
        loss_sum += loss.item() / dist.world_size
    norm = clip_grad_norm(model.parameters(), MAX_GRAD_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"loss": dist.all_reduce_sum(loss_sum), "grad_norm": norm, "tokens": tokens}
