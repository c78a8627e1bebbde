"""losses.py against slow loops. In test_rl.py, through its batches: group advantages, GAE, the divisor, gradients,
the correction of another engine."""

import math

import numpy as np
import pytest
import torch

from dreamgym import losses


def tokens(n: int, spread: float = 0.5):
    gen = torch.Generator().manual_seed(0)
    new = -3 * torch.rand(n, generator=gen)
    old = new + spread * torch.randn(n, generator=gen)
    return new.requires_grad_(), old, torch.randn(n, generator=gen)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reward", [0.1, 0.0, 1 / 3, 1e-9])
def test_equal_rewards_teach_nothing(reward, normalize):
    """Rounding noise divided by rounding noise."""
    for n in (1, 3, 7):
        advantage, divisor = losses.group_advantages([reward] * n, ["t"] * n, normalize)
        assert torch.equal(advantage, torch.zeros(n)) and torch.equal(divisor, torch.ones(n))


def test_wrong_counts_and_nan_are_refused():
    """A silently truncated zip or broadcast, a divisor of 0, and a NaN reward that would wipe the weights."""
    with pytest.raises(AssertionError, match="2"):
        losses.group_advantages([1.0, 0.0, 1.0], ["a", "a"])
    with pytest.raises(AssertionError):
        losses.policy_loss(torch.zeros(4), torch.zeros(4), torch.ones(1))
    with pytest.raises(ValueError, match="total is 0"):
        losses.aggregate(torch.zeros(0), 0)
    with pytest.raises(FloatingPointError, match="rewards of the groups: 1 of 2 .* first is nan at flat index 1"):
        losses.group_advantages([1.0, math.nan], ["a", "a"])


def test_kl_estimates_agree_with_the_true_kl():
    """Swapped arguments (KL(ref || new)) and a wrong sign."""
    new, ref = (torch.tensor(p, dtype=torch.float64) for p in ([0.6, 0.3, 0.1], [0.2, 0.5, 0.3]))
    ratios = [math.log(p / q) for p, q in zip(new.tolist(), ref.tolist())]
    k3 = (new * losses.kl_estimate(new.log(), ref.log(), "k3")).sum().item()
    assert k3 == pytest.approx(sum(p * x for p, x in zip(new.tolist(), ratios)), abs=1e-12)
    assert losses.kl_estimate(new.log(), ref.log(), "k2").tolist() == pytest.approx([x * x / 2 for x in ratios])
    assert losses.kl_estimate(torch.tensor([-200.0]), torch.tensor([-1.0]), "k3").isfinite().all()
    rare = torch.tensor([-200.0, -10.0, -2.0], requires_grad=True)      # one token must not decide a step
    losses.kl_estimate(rare, torch.tensor([-1.0, -1.0, -1.0]), "k3").sum().backward()
    assert rare.grad.tolist() == pytest.approx([0.0, 0.0, 1 - math.e])


@pytest.mark.parametrize("low,high,dual", [(0.2, 0.2, 3.0), (0.2, 0.28, 2.0), (0.1, 0.3, 1.5)])
def test_policy_loss_and_statistics_match_a_loop(low, high, dual):
    """Min for max, swapped clip bounds, and the dual clip on positive advantages."""
    new, old, adv = tokens(200, spread=1.0)
    loss, stats = losses.policy_loss(new, old, adv, low, high, dual)
    clipped = dual_clipped = kl = biggest = 0.0
    for i in range(200):
        ratio, a = math.exp(new[i].item() - old[i].item()), adv[i].item()
        inside = min(max(ratio, 1 - low), 1 + high)
        want = -min(ratio * a, inside * a)
        clipped += inside * a < ratio * a
        if a < 0 and want > -dual * a:
            want, dual_clipped = -dual * a, dual_clipped + 1
        assert loss[i].item() == pytest.approx(want, rel=1e-4, abs=1e-6)
        kl, biggest = kl + ratio - 1 - math.log(ratio), max(biggest, ratio)
    assert (stats["clip_fraction"].item(), stats["dual_clip_fraction"].item()) == (clipped, dual_clipped)
    assert 0 < clipped < 200 and dual_clipped > 0
    assert stats["kl_old"].item() == pytest.approx(kl, rel=1e-4)
    assert stats["ratio_max"].item() == pytest.approx(biggest, rel=1e-5)


def test_policy_loss_at_absurd_ratios_and_without_tokens():
    """Inf * 0 = NaN at a token that the rollout thought impossible."""
    new = torch.tensor([-1.0, -500.0], requires_grad=True)
    loss, stats = losses.policy_loss(new, torch.tensor([-500.0, -1.0]), torch.tensor([-1.0, 0.0]))
    loss.sum().backward()
    assert loss.isfinite().all() and new.grad.isfinite().all() and all(v.isfinite() for v in stats.values())
    none = torch.zeros(0, requires_grad=True)
    loss, stats = losses.policy_loss(none, torch.zeros(0), torch.zeros(0))
    losses.aggregate(loss, 5.0).backward()
    assert stats["ratio_max"].item() == 0 and none.grad.shape == (0,)


def test_value_loss_matches_a_loop():
    """Min instead of max of the two errors, and clipping around the return."""
    gen = torch.Generator().manual_seed(3)
    value, old, target = (torch.randn(100, generator=gen) for _ in range(3))
    loss = losses.value_loss(value, old, target, clip=0.2)
    for v, o, r, got in zip(value.tolist(), old.tolist(), target.tolist(), loss.tolist()):
        near = o + min(max(v - o, -0.2), 0.2)
        assert got == pytest.approx(0.5 * max((v - r) ** 2, (near - r) ** 2), abs=1e-5)
    expected = 1 - np.var((target - value).numpy()) / np.var(target.numpy())
    assert losses.explained_variance(value, target).item() == pytest.approx(expected, abs=1e-5)
    assert losses.explained_variance(torch.zeros(100), target).item() == pytest.approx(0, abs=1e-6)
    for n in (0, 3):
        assert losses.explained_variance(torch.zeros(n), torch.ones(n)).isnan()


def test_dpo_loss():
    """A swapped pair, a lost beta."""
    won, lost = [0.5, -2.0, 0.0], [-1.0, 1.0, 0.0]
    found = losses.dpo_loss(torch.tensor(won), torch.tensor(lost), 0.3).tolist()
    assert found == pytest.approx([-math.log(1 / (1 + math.exp(-0.3 * (a - b)))) for a, b in zip(won, lost)])
