"""Optimizers and micro-batches of the supervised trainings: what train_expmodel.py and the imitation of train_policy.py share."""
from __future__ import annotations

import math

import torch

from dreamgym.model import Row, clip_grad_norm, micro_batches, trainable_parameters


MUON_LR = 0.02                    # its steps have unit spectral norm, so that one rate serves pre-training and imitation


def make_optimizers(model, lr: float, from_scratch: bool) -> list[torch.optim.Optimizer]:
    """AdamW; a tiny model's layer matrices take Muon (arXiv 2502.16982) instead, which learns to copy and compare words several times sooner (README, lab
    notes). Every parameter group remembers its peak rate. Raises ValueError for 16-bit weights."""
    trainable_parameters(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if from_scratch and p.ndim == 2 and ".layers." in name]
    others = [p for name, p in trained if not (from_scratch and p.ndim == 2 and ".layers." in name)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0 if from_scratch else 0.01)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.01))
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], step: int, steps: int, warmup: int, floor: float) -> None:
    """Linear warm-up over `warmup` steps, cosine from the peak to `floor` x peak at `steps`, constant after."""
    share = min(1.0, (step + 1) / warmup) * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["lr"] = group["peak_lr"] * share


def step_all(model, optimizers: list[torch.optim.Optimizer], max_norm: float = 1.0) -> float:
    """Clip, step, clear; returns the gradient norm before clipping. Raises FloatingPointError when it is not finite."""
    norm = clip_grad_norm(model.parameters(), max_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm


def even_micro_batches(rows: list[Row], micro_batch_tok: int, ranks) -> list[list[int]]:
    """micro_batches, with empty ones at the end until every rank has as many: sharded weights are gathered by all ranks together or not at all."""
    mine = micro_batches(rows, micro_batch_tok)
    return mine + [[]] * (max(ranks.gather([len(mine)])) - len(mine))
