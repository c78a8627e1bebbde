"""Advantages and losses as pure functions of tensors. Every loss is a flat vector over the trained tokens of
all rows (no padding, so no mask); `aggregate` makes one number of it:

    loss_N, stats = policy_loss(logp_new_N, logp_old_N, adv_N)
    loss_N = loss_N + 0.01 * kl_estimate(logp_new_N, logp_ref_N, "k3")
    aggregate(loss_N, total_tok).backward()

Suffixes: N trained tokens, E episodes, K turns of one episode. old = the policy that sampled, new = being
trained, ref = frozen.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is outside every clip range, and finite in float32, squared too
MAX_K3 = 10.0


def check_finite(value: Tensor | float, what: str) -> None:
    """Raises FloatingPointError at a NaN or infinity: `what` it is, how many, and where the first one is."""
    flat = torch.as_tensor(value).detach().reshape(-1)
    bad = ~torch.isfinite(flat)
    if bad.any():
        first = int(bad.nonzero()[0])
        count = f"{int(bad.sum())} of {flat.numel()} values are not finite"
        raise FloatingPointError(f"{what}: {count}, the first is {flat[first].item()} at flat index {first}")


def aggregate(loss_N: Tensor, total: float) -> Tensor:
    """Sum of the token losses divided by `total`, the count of trained tokens of the WHOLE optimizer step
    (all micro-batches, all ranks). A micro-batch's own count would give a mean of means. FSDP averages
    gradients over ranks instead of adding them: pass `total / world_size` there."""
    if not total > 0:
        raise ValueError(f"aggregate: total is {total}, expected the positive global count of "
                         "trained tokens; skip a step that trains no token")
    return loss_N.sum() / total


def group_advantages(rewards_E: Sequence[float], groups_E: Sequence[Hashable],
                     normalize_std: bool = True) -> tuple[Tensor, Tensor]:
    """GRPO advantage of each episode within its group, (r - mean) / std, and what it was divided by: two
    float32 [E] (DreamGym, arXiv 2511.03773, Eq. 3).

    std is the population one, as in Eq. 7. `normalize_std=False` keeps r - mean (Dr. GRPO, arXiv 2503.20783).
    A group whose rewards are all equal gets exactly 0, and divisor 1. Example: rewards [1, 0, 0, 0] of one
    group -> [1.73, -0.58, -0.58, -0.58]; without std [0.75, -0.25, -0.25, -0.25].
    """
    reward_E = torch.tensor(rewards_E, dtype=torch.float64)
    assert reward_E.shape == (len(groups_E),), (reward_E.shape, len(groups_E))
    check_finite(reward_E, "rewards of the groups")
    adv_E, divisor_E = torch.zeros_like(reward_E), torch.ones_like(reward_E)
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups_E):
        members.setdefault(group, []).append(i)
    for index in members.values():
        reward = reward_E[index]
        if reward.max() > reward.min():
            divisor_E[index] = reward.std(correction=0) + 1e-6 if normalize_std else 1.0
            adv_E[index] = (reward - reward.mean()) / divisor_E[index]
    return adv_E.float(), divisor_E.float()


def gae(rewards_K: Sequence[float], values_K: Sequence[float], gamma: float,
        gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns of ONE episode, per turn or per token: two float32 [K]
    (DreamGym, Eq. 2; arXiv 1506.02438).

    values_K[t] is V of the state before reward t; V after the last reward is 0. Returns are advantage +
    value. Example: rewards [0, 1], values [0, 0], gamma 1, gae_lambda 1 -> advantages [1, 1].
    """
    reward_K, value_K = (torch.tensor(row, dtype=torch.float64) for row in (rewards_K, values_K))
    assert reward_K.shape == value_K.shape == (len(reward_K),), (reward_K.shape, value_K.shape)
    adv_K, running, next_value = torch.zeros_like(reward_K), 0.0, 0.0
    for t in reversed(range(len(reward_K))):
        delta = reward_K[t] + gamma * next_value - value_K[t]
        running = delta + gamma * gae_lambda * running
        adv_K[t], next_value = running, value_K[t]
    return adv_K.float(), (adv_K + value_K).float()


def kl_estimate(logp_new_N: Tensor, logp_ref_N: Tensor, kind: Literal["k2", "k3"] = "k3") -> Tensor:
    """Per-token estimate of KL(new || ref) from tokens of the new policy: [N], with gradient to new (Schulman
    2020, "Approximating KL divergence").

    k2 = half the squared log ratio: biased, >= 0. k3 = exp(-log ratio) - 1 + log ratio: unbiased, >= 0, low
    variance (GRPO, arXiv 2402.03300, Eq. 4), cut off at 10 as in verl: one token that has become 10,000 times
    rarer would else decide the optimizer step. k1, the log ratio itself, is not offered: as a loss its
    expected gradient is 0.
    """
    log_ratio_N = logp_new_N - logp_ref_N.detach()
    if kind == "k2":
        return 0.5 * log_ratio_N.square()
    log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(-log_ratio_N) + log_ratio_N).clamp(max=MAX_K3)


def policy_loss(logp_new_N: Tensor, logp_old_N: Tensor, adv_N: Tensor, clip_low: float = 0.2,
                clip_high: float = 0.2, dual_clip: float = 3.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy-gradient loss per token, [N], and statistics (PPO, arXiv 1707.06347, Eq. 7; dual clip:
    arXiv 1912.09729).

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), and for A < 0 never above -dual_clip
    * A (dual_clip > 1): without that bound one token with a huge ratio and a bad outcome decides the step.
    Statistics are detached 0-d tensors with the log's names: sums over the tokens (those at a clip, k3 of
    KL(old || new)), which the caller divides, and the largest ratio.
    """
    shapes = logp_new_N.shape, logp_old_N.shape, adv_N.shape
    assert len(set(shapes)) == 1, shapes         # else they would be broadcast
    adv_N = adv_N.detach()
    log_ratio_N = (logp_new_N - logp_old_N.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    plain_N = -ratio_N * adv_N
    clip_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * adv_N
    loss_N, bound_N = torch.maximum(plain_N, clip_N), -dual_clip * adv_N
    dual_N = (adv_N < 0) & (loss_N > bound_N)
    loss_N = torch.where(dual_N, bound_N, loss_N)
    with torch.no_grad():
        stats = {
            "clip_fraction": (clip_N > plain_N).float().sum(),
            "dual_clip_fraction": dual_N.float().sum(),
            "kl_old": (torch.expm1(log_ratio_N) - log_ratio_N).sum(),
            "ratio_max": ratio_N.max() if len(ratio_N) else ratio_N.new_zeros(()),
        }
    return loss_N, stats


def explained_variance(value_N: Tensor, return_N: Tensor) -> Tensor:
    """1 - Var(return - value) / Var(return), detached 0-d: 1 = perfect critic, 0 = no better than the mean;
    NaN where the returns do not vary."""
    return_N = return_N.detach().double()
    if not len(return_N):
        return return_N.new_tensor(math.nan)
    spread = return_N.var(correction=0)
    left = (return_N - value_N.detach().double()).var(correction=0)
    return torch.where(spread > 0, 1 - left / spread, math.nan)


def value_loss(value_N: Tensor, value_old_N: Tensor, return_N: Tensor, clip: float = 0.2) -> Tensor:
    """Half squared error of the critic, [N]: the larger of those of the value and of the value held within
    value_old +- clip (arXiv 2005.12729, section 3)."""
    return_N, value_old_N = return_N.detach(), value_old_N.detach()
    near_N = value_old_N + (value_N - value_old_N).clamp(-clip, clip)
    return 0.5 * torch.maximum((value_N - return_N).square(), (near_N - return_N).square())


def dpo_loss(chosen_P: Tensor, rejected_P: Tensor, beta: float) -> Tensor:
    """DPO for each pair of episodes, [P] (arXiv 2305.18290, Eq. 7), of log p - log p_ref, summed over the
    trained tokens of an episode."""
    return -torch.nn.functional.logsigmoid(beta * (chosen_P - rejected_P))
