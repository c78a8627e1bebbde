"""losses.py against slow loops: each test says which bug it stops."""

import math

import numpy as np
import pytest
import torch

from dreamgym import losses

torch.set_num_threads(1)


def random_tokens(n: int, seed: int = 0, spread: float = 0.5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    new = -3 * torch.rand(n, generator=gen)
    return new.requires_grad_(), new.detach() + spread * torch.randn(n, generator=gen), torch.randn(n, generator=gen)


def test_group_advantages_match_a_loop_over_interleaved_groups():
    """Stops: rewards of different tasks mixed in one mean when the episodes do not come sorted by task."""
    rng = np.random.default_rng(0)
    groups = [("a", "b", 7)[i] for i in rng.integers(3, size=40)]
    rewards = rng.random(40)
    for normalize in (True, False):
        got = losses.group_advantages(rewards, groups, normalize_std=normalize)
        for i in range(40):
            mine = [r for r, g in zip(rewards, groups) if g == groups[i]]
            mean = sum(mine) / len(mine)
            std = math.sqrt(sum((r - mean) ** 2 for r in mine) / len(mine))
            assert got[i].item() == pytest.approx((rewards[i] - mean) / (std + 1e-6 if normalize else 1), abs=1e-6)
    assert got.dtype == torch.float32


def test_equal_rewards_give_exactly_zero_advantage():
    """Stops: (0.1 - mean) / (std + eps) of rounding noise, which trains on groups that say nothing; 0.1 * 3 / 3 != 0.1 in floating point."""
    for reward in (0.1, 0.0, 1.0, 1 / 3, 1e-9):
        for n in (1, 3, 7):
            for normalize in (True, False):
                assert torch.equal(losses.group_advantages([reward] * n, ["t"] * n, normalize), torch.zeros(n))


def test_group_advantages_refuse_wrong_counts_and_nan():
    """Stops: a silently truncated zip, and a NaN reward that would wipe the weights."""
    with pytest.raises(ValueError, match="2 group keys"):
        losses.group_advantages([1.0, 0.0, 1.0], ["a", "a"])
    with pytest.raises(FloatingPointError, match="rewards of the groups: 1 of 2"):
        losses.group_advantages([1.0, math.nan], ["a", "a"])


@pytest.mark.parametrize("gamma,lam,bootstrap", [(1.0, 1.0, 0.0), (0.9, 0.7, 0.4), (0.95, 0.0, 1.0)])
def test_gae_equals_the_double_sum_of_eq_2(gamma, lam, bootstrap):
    """Stops: an off-by-one between V(s_t) and V(s_t+1), and a bootstrap value that is lost or undiscounted."""
    rng = np.random.default_rng(1)
    rewards, values = rng.random(6).tolist(), rng.standard_normal(6).tolist()
    adv, returns = losses.gae(rewards, values, gamma, lam, bootstrap)
    after = values[1:] + [bootstrap]
    for t in range(6):
        want = sum((gamma * lam) ** step * (rewards[t + step] + gamma * after[t + step] - values[t + step]) for step in range(6 - t))
        assert adv[t].item() == pytest.approx(want, abs=1e-6)
        assert returns[t].item() == pytest.approx(want + values[t], abs=1e-6)


def test_gae_with_lambda_one_returns_the_discounted_reward_sum():
    """Stops: returns that depend on the critic when they must not."""
    rewards = [0.0, 0.5, 0.0, 1.0]
    _, returns = losses.gae(rewards, [3.0, -2.0, 0.5, 9.0], 0.9, 1.0)
    assert returns.tolist() == pytest.approx([sum(0.9 ** (j - t) * rewards[j] for j in range(t, 4)) for t in range(4)])


def test_kl_estimates_agree_with_the_true_kl_of_two_small_distributions():
    """Stops: swapped arguments (KL(ref || new)) and a wrong sign: k1 and k3 are unbiased, so their exact expectation is the KL."""
    new = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    true = sum(p * math.log(p / q) for p, q in zip(new.tolist(), ref.tolist()))
    for kind in ("k1", "k3"):
        assert (new * losses.kl_estimate(new.log(), ref.log(), kind)).sum().item() == pytest.approx(true, abs=1e-12)
    k2 = [0.5 * math.log(p / q) ** 2 for p, q in zip(new.tolist(), ref.tolist())]
    assert losses.kl_estimate(new.log(), ref.log(), "k2").tolist() == pytest.approx(k2)
    assert losses.kl_estimate(torch.tensor([-200.0]), torch.tensor([-1.0]), "k3").isfinite().all()
    with pytest.raises(ValueError, match="k4"):
        losses.kl_estimate(new.log(), ref.log(), "k4")


def test_k1_as_a_loss_has_no_expected_gradient_and_k3_has():
    """Stops: somebody switching the KL loss to k1, which regularises nothing."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.5, 1.0, 0.1], dtype=torch.float64).log_softmax(0)
    size = {}
    for kind in ("k1", "k3"):
        logp = logits.log_softmax(0)
        (grad,) = torch.autograd.grad((logp.exp().detach() * losses.kl_estimate(logp, ref, kind)).sum(), logits)
        size[kind] = grad.abs().max().item()
    assert size["k1"] < 1e-12 and size["k3"] > 0.05


@pytest.mark.parametrize("low,high,dual", [(0.2, 0.2, 3.0), (0.2, 0.28, None), (0.1, 0.3, 1.5)])
def test_policy_loss_and_statistics_match_a_loop(low, high, dual):
    """Stops: min for max, clip bounds swapped, the dual clip put on positive advantages, statistics of another branch."""
    new, old, adv = random_tokens(200, spread=1.0)
    loss, stats = losses.policy_loss(new, old, adv, low, high, dual)
    clipped = dual_clipped = kl = biggest = 0.0
    for i in range(200):
        ratio, a = math.exp(new[i].item() - old[i].item()), adv[i].item()
        inside = min(max(ratio, 1 - low), 1 + high)
        want = -min(ratio * a, inside * a)
        clipped += inside * a < ratio * a
        if a < 0 and dual is not None and want > -dual * a:
            want, dual_clipped = -dual * a, dual_clipped + 1
        assert loss[i].item() == pytest.approx(want, rel=1e-4, abs=1e-6)
        kl += ratio - 1 - math.log(ratio)
        biggest = max(biggest, ratio)
    assert stats["clipped_sum"].item() == clipped and stats["dual_clipped_sum"].item() == dual_clipped
    assert 0 < clipped < 200 and (dual is None or dual_clipped > 0)
    assert stats["approx_kl_sum"].item() == pytest.approx(kl, rel=1e-4) and stats["ratio_max"].item() == pytest.approx(biggest, rel=1e-5)


def test_policy_gradient_on_policy_is_reinforce_and_clipped_tokens_get_none():
    """Stops: a detached ratio (no gradient at all), gradient through the advantage or the old policy, and gradient past a clip."""
    new, _, adv = random_tokens(50)
    old = new.detach().clone().requires_grad_()
    adv.requires_grad_()
    loss, _ = losses.policy_loss(new, old, adv)
    loss.sum().backward()
    assert torch.allclose(new.grad, -adv.detach()) and old.grad is None and adv.grad is None
    far = torch.tensor([0.5, -0.5, 5.0], requires_grad=True)  # ratio up with A > 0, down with A < 0, far up with A < 0
    losses.policy_loss(far, torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]))[0].sum().backward()
    assert far.grad.tolist() == [0.0, 0.0, 0.0]


def test_policy_loss_stays_finite_at_absurd_ratios_and_with_no_tokens():
    """Stops: inf * 0 = NaN at a token that the rollout thought impossible, and a crash on a rank that trained no token."""
    new = torch.tensor([-1.0, -500.0], requires_grad=True)
    loss, stats = losses.policy_loss(new, torch.tensor([-500.0, -1.0]), torch.tensor([-1.0, 0.0]))
    loss.sum().backward()
    assert loss.isfinite().all() and new.grad.isfinite().all() and all(v.isfinite() for v in stats.values())
    none = torch.zeros(0, requires_grad=True)
    loss, stats = losses.policy_loss(none, torch.zeros(0), torch.zeros(0))
    losses.aggregate(loss, 5.0).backward()
    assert stats["ratio_max"].item() == 0 and none.grad.shape == (0,)


@pytest.mark.parametrize("change", [{"clip_low": 1.0}, {"clip_high": -0.1}, {"dual_clip": 1.0}])
def test_policy_loss_refuses_impossible_clips(change):
    """Stops: a negative lower bound or a dual clip inside the clip range, both of which train the wrong way in silence."""
    new, old, adv = random_tokens(4)
    with pytest.raises(ValueError, match="policy_loss"):
        losses.policy_loss(new, old, adv, **change)
    with pytest.raises(ValueError, match="shapes"):
        losses.policy_loss(new, old[:1], adv)  # would broadcast


def test_value_loss_matches_a_loop_and_explained_variance_has_its_anchors():
    """Stops: min instead of max of the two errors, clipping around the return, explained variance with the roles swapped."""
    gen = torch.Generator().manual_seed(3)
    value, old, target = (torch.randn(100, generator=gen) for _ in range(3))
    loss, explained = losses.value_loss(value, old, target, clip=0.2)
    for v, o, r, got in zip(value.tolist(), old.tolist(), target.tolist(), loss.tolist()):
        near = o + min(max(v - o, -0.2), 0.2)
        assert got == pytest.approx(0.5 * max((v - r) ** 2, (near - r) ** 2), abs=1e-5)
    assert explained.item() == pytest.approx(1 - np.var((target - value).numpy()) / np.var(target.numpy()), abs=1e-5)
    assert torch.allclose(losses.value_loss(value, old, target, clip=None)[0], 0.5 * (value - target) ** 2)
    assert losses.explained_variance(target, target).item() == 1
    assert losses.explained_variance(torch.zeros(100), target).item() == pytest.approx(0, abs=1e-6)
    assert losses.explained_variance(torch.zeros(3), torch.ones(3)).isnan() and losses.explained_variance(torch.zeros(0), torch.zeros(0)).isnan()


def test_sft_loss_is_cross_entropy_of_the_flat_tokens():
    """Stops: a lost sign."""
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    target = torch.arange(9) % 5
    flat = logits.log_softmax(-1)[torch.arange(9), target]
    assert losses.aggregate(losses.sft_loss(flat), 9).item() == pytest.approx(torch.nn.functional.cross_entropy(logits, target).item(), abs=1e-6)


def test_dpo_loss_matches_a_loop_and_sequence_sums_group_by_row():
    """Stops: chosen and rejected swapped, the reference added instead of subtracted, token means where DPO needs sums."""
    gen = torch.Generator().manual_seed(5)
    logp, row = -torch.rand(30, generator=gen), torch.randint(0, 4, (30,), generator=gen)
    sums = losses.sequence_sums(logp, row, 5)
    assert sums.tolist() == pytest.approx([sum(x for x, r in zip(logp.tolist(), row.tolist()) if r == b) for b in range(5)], abs=1e-5)
    chosen, rejected, ref_chosen, ref_rejected = (10 * torch.randn(20, generator=gen) for _ in range(4))
    loss, margin = losses.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.3)
    for i in range(20):
        want = 0.3 * ((chosen[i] - ref_chosen[i]) - (rejected[i] - ref_rejected[i])).item()
        assert margin[i].item() == pytest.approx(want, abs=1e-4) and loss[i].item() == pytest.approx(math.log1p(math.exp(-want)), abs=1e-4)


def test_cutting_into_micro_batches_never_changes_the_gradient():
    """Stops: the mean of means, where a token in a short micro-batch weighs more than one in a long micro-batch."""
    new, old, adv = random_tokens(101)
    losses.aggregate(losses.policy_loss(new, old, adv)[0], 101).backward()
    whole, new.grad = new.grad.clone(), None
    sums = 0.0
    for part in torch.arange(101).split([1, 50, 7, 43]):
        loss, stats = losses.policy_loss(new[part], old[part], adv[part])
        losses.aggregate(loss, 101).backward()
        sums += stats["approx_kl_sum"]
    assert torch.equal(new.grad, whole)
    assert sums.item() == pytest.approx(losses.policy_loss(new, old, adv)[1]["approx_kl_sum"].item(), rel=1e-5)
    with pytest.raises(ValueError, match="total is 0"):
        losses.aggregate(old, 0)


def test_check_finite_names_the_value_and_the_first_bad_entry():
    """Stops: a NaN that is found hundreds of steps later, and a check that misses infinities."""
    losses.check_finite(torch.ones(3), "fine")
    losses.check_finite(1.5, "fine")
    with pytest.raises(FloatingPointError, match=r"loss of step 3: 2 of 4 .* first is nan at flat index 1"):
        losses.check_finite(torch.tensor([[1.0, math.nan], [2.0, math.inf]]), "loss of step 3")
    with pytest.raises(FloatingPointError, match="gradient norm"):
        losses.check_finite(math.inf, "gradient norm")
