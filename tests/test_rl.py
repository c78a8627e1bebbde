"""Batches and updates of rl.py against slow loops, on one rank and on two."""
import itertools
import math
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dreamgym.model
from dreamgym import rl, run, tiny
from dreamgym.episode import Episode, Step, StopReason, Task, TokenSegment
from dreamgym.logprobs import TrainSample, token_logprobs
from dreamgym.model import shard
from dreamgym.word_tokenizer import build_tokenizer
from tests.conftest import on_two_ranks

ALONE = run.Dist()


def settings(**changes):
    flags = {"invalid_penalty": 0.3, "normalize_std": True, "loss_mean": "token", "micro_batch_tok": 100,
             "kl_coef": 0.0, "kl": "k3", "updates": 1, "seed": 0, "clip_low": 0.2, "clip_high": 0.2,
             "entropy_coef": 0.0}
    return SimpleNamespace(**flags | changes)


def episode(name, task, reward, lengths, invalid=(), segments=1):
    """Turns of `lengths` trained tokens (0: no room), each after two prompt tokens, over `segments`."""
    last = len(lengths) - 1
    steps = [Step(state="s", action="a", next_state="s" if t in invalid else "t",
                  reward=float(reward * (t == last)),
                  done=t == last and reward > 0) for t in range(len(lengths))]
    found = Episode(id=name, task=Task(id=task, text="x"), steps=steps)
    seed = sum(map(ord, name))
    for part in np.array_split(np.arange(len(lengths)), segments):
        segment = TokenSegment()
        for t in part.tolist():
            segment.ids += [(seed + 3 * t + i) % 40 + 1 for i in range(2 + lengths[t])]
            segment.mask += [0, 0] + [1] * lengths[t]
            segment.logps += [-1.0 - 0.1 * i for i in range(lengths[t])]
            segment.turn_ends.append(len(segment.logps))
        found.segments.append(segment)
    return found


def some_episodes():
    return [episode("a", "t1", 1, [3, 1, 2], {1}), episode("b", "t1", 0, [2, 2], {0, 1}, segments=2),
            episode("c", "t2", 0, [4]), episode("d", "t1", 1, [1, 5, 1, 2], segments=2),
            episode("e", "t2", 0, [2, 0], {1}), episode("f", "t3", 1, [2, 3, 0], {0}, segments=3)]


def slow_rows(episodes, by_turn):
    """For each row: (ids, the turn's number for each trained token, whether it begins a turn), by loops."""
    rows = []
    for e in episodes:
        turn = 0
        for segment in e.segments:
            numbers, first, at = [], [], 0
            for end in segment.turn_ends:
                for i in range(at, end):
                    numbers.append(by_turn[e.id][turn])
                    first.append(float(i == at))
                at, turn = end, turn + 1
            if numbers:
                rows.append((segment.ids, numbers, first))
    return rows


@pytest.fixture(scope="module")
def model():
    return tiny.create("scratch:16x1", build_tokenizer(["a b c"]), 0)


# ---- batches ----

@pytest.mark.parametrize("normalize_std", [True, False])
def test_grpo_against_a_slow_loop(normalize_std):
    """Scores of the wrong group, episode or turn; a penalty outside the normalisation, or without its baseline."""
    episodes = some_episodes()
    batch = rl.make_batch(episodes, None, None, settings(normalize_std=normalize_std), ALONE)
    wanted = {}
    for e in episodes:
        returns = [o.reward for o in episodes if o.task.id == e.task.id]
        mean = sum(returns) / len(returns)
        spread = math.sqrt(sum((r - mean) ** 2 for r in returns) / len(returns))
        scale = spread + 1e-6 if normalize_std and spread > 0 else 1.0
        turns = [s for o in episodes if o.task.id == e.task.id for s in o.steps]
        mean -= 0.3 * sum(not s.valid for s in turns) / len(turns)
        wanted[e.id] = [(e.reward - 0.3 * (not s.valid) - mean) / scale for s in e.steps]
    rows = slow_rows(episodes, wanted)
    assert [s.ids for s in batch.samples] == [ids for ids, _, _ in rows]
    for k, (_, advantage, first) in enumerate(rows):
        assert sum(batch.samples[k].mask) == len(advantage) == len(batch.old[k]) == len(batch.value[k])
        torch.testing.assert_close(batch.advantage[k], torch.tensor(advantage), atol=1e-5, rtol=1e-5)
        assert batch.first[k].tolist() == first
    logps = [s.logps for e in episodes for s in e.segments if s.logps]
    assert [row.tolist() for row in batch.old] == [pytest.approx(row) for row in logps]


def test_ppo_against_a_slow_loop(monkeypatch):
    """GAE over tokens instead of turns, values of another turn, rewards shifted by one, whitening by row."""
    episodes, seen = some_episodes(), lambda sample, i: 0.1 * (sum(sample.ids) % 7) + 0.05 * i
    monkeypatch.setattr(rl, "token_values", lambda policy, head, samples, args, dist: [
        torch.tensor([seen(s, i) for i in range(sum(s.mask))]) for s in samples])
    monkeypatch.setattr(rl, "GAMMA", 0.9)
    monkeypatch.setattr(rl, "GAE_LAMBDA", 0.8)
    batch = rl.make_batch(episodes, None, object(), settings(), ALONE)
    advantages, returns = {}, {}
    for e in episodes:
        values = [seen(TrainSample(s.ids, s.mask), a) if b > a else 0.0
                  for s in e.segments for a, b in zip([0, *s.turn_ends], s.turn_ends)] + [0.0]
        rewards = [s.reward - 0.3 * (not s.valid) for s in e.steps]
        deltas = [r + 0.9 * values[t + 1] - values[t] for t, r in enumerate(rewards)]
        advantages[e.id] = [sum(0.72 ** (u - t) * deltas[u] for u in range(t, len(deltas)))
                            for t in range(len(deltas))]
        returns[e.id] = [a + v for a, v in zip(advantages[e.id], values)]
    raw = [x for _, row, _ in slow_rows(episodes, advantages) for x in row]
    mean = sum(raw) / len(raw)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in raw) / len(raw))
    white = torch.tensor([(x - mean) / deviation for x in raw])
    torch.testing.assert_close(torch.cat(batch.advantage), white, atol=1e-4, rtol=1e-4)
    wanted = torch.tensor([x for _, row, _ in slow_rows(episodes, returns) for x in row])
    torch.testing.assert_close(torch.cat(batch.returns), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", [None, object()])
def test_episodes_may_weigh_the_same(monkeypatch, head):
    """A long failure that weighs more than a short success, a loss of another scale; PPO that ignores the flag."""
    monkeypatch.setattr(rl, "token_values", lambda *a: [torch.zeros(sum(s.mask)) for s in a[2]])
    episodes = some_episodes()
    token, whole = (rl.make_batch(episodes, None, head, settings(loss_mean=kind), ALONE)
                    for kind in ("token", "episode"))
    owners = [e for e in episodes for s in e.segments if s.logps]
    tokens = {e.id: sum(len(s.logps) for s in e.segments) for e in episodes}
    weight = {e.id: 0.0 for e in episodes}
    for e, a, b in zip(owners, token.advantage, whole.advantage):
        scale = sum(tokens.values()) / len(tokens) / tokens[e.id]
        torch.testing.assert_close(b, a * scale)
        weight[e.id] += scale * len(a)
    assert len({round(w, 6) for w in weight.values()}) == 1
    assert sum(weight.values()) == pytest.approx(sum(tokens.values()))


def test_what_teaches_nothing():
    """The experience model's slips, or a judge's absence, that count as the policy's failures; a flag that does nothing."""
    slip, away, *rest = some_episodes()
    slip.stop, away.stop = StopReason.MALFORMED, StopReason.NOT_JUDGED
    assert rl.usable([slip, away, *rest], True) == rest
    assert rl.usable([slip, away, *rest], False) == [slip, *rest]


@pytest.mark.parametrize("with_head", [False, True])
def test_no_episodes_at_all(model, with_head):
    head = torch.nn.Linear(16, 1) if with_head else None
    before = deepcopy(model.state_dict())
    args = settings(kl_coef=0.1, updates=2)
    batch = rl.make_batch([], SimpleNamespace(model=model), head, args, ALONE)
    state = run_state(model, head)
    assert rl.update(state, batch, args, ALONE)["trained_tok"] == 0
    assert all(torch.equal(before[k], v) for k, v in state.policy.model.state_dict().items())


# ---- updates ----

def run_state(model, head=None, optimizer=torch.optim.SGD, lr=1.0):
    policy, head = SimpleNamespace(model=deepcopy(model)), deepcopy(head)
    parameters = [*policy.model.parameters(), *(head.parameters() if head is not None else [])]
    return SimpleNamespace(policy=policy, reference=deepcopy(model).requires_grad_(False), value_head=head, step=0,
                           optimizer=optimizer(parameters, lr=lr), parameters=parameters)


def a_batch(model):
    """Rows that `model` itself sampled, with random advantages, returns and old values."""
    batch = rl.make_batch(some_episodes(), None, None, settings(), ALONE)
    noise = torch.Generator().manual_seed(0)
    random = lambda: [torch.randn(len(a), generator=noise) for a in batch.advantage]
    with torch.no_grad():
        batch.old = [token_logprobs(model, [s], with_entropy=False)[0] for s in batch.samples]
    batch.advantage, batch.returns, batch.value = random(), random(), random()
    return batch


def update(state, batch, **flags):
    return rl.update(state, batch, settings(**flags), ALONE)


def weights(state):
    return torch.cat([p.detach().flatten() for p in state.parameters])


def shifted(model):
    moved = deepcopy(model)
    with torch.no_grad():
        for p in moved.parameters():
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    return moved


def test_the_first_update_is_the_policy_gradient(model):
    batch, plain = a_batch(model), deepcopy(model)
    state = run_state(model)
    stats = update(state, batch, entropy_coef=0.01, kl_coef=0.5)
    total, loss = sum(sum(s.mask) for s in batch.samples), 0.0
    for sample, advantage in zip(batch.samples, batch.advantage):
        logp_TV = plain(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
        trained = [t for t, m in enumerate(sample.mask) if m]
        for t, a in zip(trained, advantage.tolist()):
            entropy = -(logp_TV[t - 1].exp() * logp_TV[t - 1]).sum()
            loss = loss - (a * logp_TV[t - 1, sample.ids[t]] + 0.01 * entropy) / total
    gradients = torch.autograd.grad(loss, list(plain.parameters()))
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    wanted = [(p - g * min(1.0, 1.0 / norm)).detach().flatten()
              for p, g in zip(plain.parameters(), gradients)]
    torch.testing.assert_close(weights(state), torch.cat(wanted), atol=2e-5, rtol=1e-4)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-3) and stats["trained_tok"] == total
    assert stats["clip_fraction"] == 0 and stats["sampler_gap"] < 1e-4 and abs(stats["kl_ref"]) < 1e-5


def test_the_gap_between_sampler_and_trainer_is_seen(model):
    """A sampler whose log-probabilities are another model's, unnoticed; the policy's own steps taken for a gap."""
    batch = a_batch(model)
    clean = update(run_state(model, lr=3.0), batch, updates=3)
    assert clean["sampler_gap"] < 1e-4 and clean["ratio_max"] > 1.01
    batch.old[1][0] += 0.25
    assert update(run_state(model), batch)["sampler_gap"] == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize("with_head", [False, True])
def test_micro_batches_never_change_the_update(model, with_head):
    """The mean of means: --micro-batch-tok is memory only, for policy, KL, entropy and critic alike."""
    torch.manual_seed(3)
    head, found = torch.nn.Linear(16, 1) if with_head else None, []
    for size in (1, 25, 10_000):
        state = run_state(model, head)
        state.reference = shifted(model)
        stats = update(state, a_batch(model), micro_batch_tok=size, updates=2, entropy_coef=0.05, kl_coef=0.1)
        found.append((stats, weights(state)))
    for stats, vector in found[1:]:
        torch.testing.assert_close(vector, found[0][1], atol=2e-5, rtol=1e-4)
        assert stats == pytest.approx(found[0][0], abs=1e-4, nan_ok=True)
    assert found[0][0]["kl_ref"] > 0.001


def test_the_reference_is_asked_only_for_a_kl(model):
    """A third of the update's time for a term of weight 0, and a KL that is never felt."""
    batch, state = a_batch(model), run_state(shifted(model), lr=0.1)
    state.reference = None
    update(state, batch, kl_coef=0.0)
    batch.advantage, state.reference = [torch.zeros_like(a) for a in batch.advantage], model
    stats = [update(state, batch, kl_coef=1.0)["kl_ref"] for _ in range(6)]
    assert stats[-1] < 0.9 * stats[0]


def test_the_critic(model):
    """Values that stand one token late, a critic without gradient or with other targets."""
    torch.manual_seed(4)
    head, batch, args = torch.nn.Linear(16, 1), a_batch(model), settings()
    batch.advantage = [torch.zeros_like(a) for a in batch.advantage]
    found = rl.token_values(SimpleNamespace(model=model), head, batch.samples, args, ALONE)
    for sample, value_N in zip(batch.samples, found):
        hidden_TH = model.model(input_ids=torch.tensor([sample.ids])).last_hidden_state[0]
        wanted = torch.stack([head(hidden_TH[t - 1])[0] for t, m in enumerate(sample.mask) if m])
        torch.testing.assert_close(value_N, wanted.detach(), atol=1e-5, rtol=1e-5)
    batch.value = found
    error = [(v - r).square() * f for v, r, f in zip(found, batch.returns, batch.first)]
    starts = sum(float(f.sum()) for f in batch.first)
    state = run_state(model, head, torch.optim.AdamW, 3e-3)
    stats = []
    for _ in range(25):
        batch.value = rl.token_values(state.policy, state.value_head, batch.samples, args, ALONE)
        stats.append(update(state, batch))
    assert stats[0]["value_loss"] == pytest.approx(0.5 * float(torch.cat(error).sum()) / starts, rel=1e-3)
    assert stats[-1]["value_loss"] < 0.5 * stats[0]["value_loss"]
    assert stats[-1]["explained_variance"] > stats[0]["explained_variance"] + 0.3


def test_fewer_rows_than_updates(model):
    """An optimizer that moves on without rows; a norm that is a sum."""
    batch, after = a_batch(model), []
    small = rl.Batch(*(getattr(batch, name)[:2]
                       for name in ("samples", "old", "advantage", "returns", "value", "first")))
    for updates in (2, 5):
        state = run_state(model, optimizer=torch.optim.Adam, lr=0.001)
        stats = update(state, small, updates=updates)
        assert stats["trained_tok"] == sum(sum(s.mask) for s in small.samples)
        after.append((weights(state), stats["grad_norm"] * updates))
    assert torch.equal(after[0][0], after[1][0]) and after[0][1] == pytest.approx(after[1][1])


def test_nan_stops_and_names_rows(model):
    """A policy that becomes NaN and goes on for hours: the loss stops the run, weights are as before."""
    batch, state = a_batch(model), run_state(model)
    batch.advantage[2][0] = float("nan")
    before = weights(state)
    with pytest.raises(FloatingPointError, match=r"policy loss, rows \[.*2.*\]"):
        update(state, batch, micro_batch_tok=10_000)
    assert torch.equal(weights(state), before)


# ---- two ranks ----

FORMS = (0, 10**9)                    # REPLICATED_BELOW: no model is replicated, all are


def rank_update(rank, folder):
    """Trains on every second episode group; both ranks write what they end with."""
    dist = run.init_dist(0)
    for below in FORMS:
        dreamgym.model.REPLICATED_BELOW = below
        torch.save(one_update(dist), f"{folder}/{rank}-{below}.pt")
    dist.close()


def one_update(dist):
    """PPO with a KL, an uneven share of rows on each of the ranks, one optimizer step."""
    model = tiny.create("scratch:16x1", build_tokenizer(["a b c"]), 0)
    torch.manual_seed(5)
    head, reference = torch.nn.Linear(16, 1), shard(shifted(model))
    policy = SimpleNamespace(model=shard(model))
    mine = [e for e in some_episodes() if dist.world_size == 1 or (e.task.id == "t1") == (dist.rank == 0)]
    optimizer = torch.optim.SGD([*policy.model.parameters(), *head.parameters()], lr=1.0)
    state = SimpleNamespace(policy=policy, reference=reference, value_head=head, optimizer=optimizer, step=0)
    args = settings(kl_coef=0.1, entropy_coef=0.01, micro_batch_tok=12)
    stats = rl.update(state, rl.make_batch(mine, policy, head, args, dist), args, dist)
    full = lambda p: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten()
    stats = {k: stats[k] for k in ("loss", "kl_ref", "entropy", "grad_norm", "trained_tok", "value_loss")}
    return torch.cat([full(p) for group in optimizer.param_groups for p in group["params"]]), stats


def test_two_ranks_are_one_process(tmp_path):
    """Gradients that are averaged over unequal shares, whitening by rank, a critic that drifts apart."""
    on_two_ranks(rank_update, str(tmp_path))
    vector, stats = one_update(ALONE)
    for rank, below in itertools.product(range(2), FORMS):
        found, seen = torch.load(tmp_path / f"{rank}-{below}.pt", weights_only=True)
        torch.testing.assert_close(found, vector, atol=1e-5, rtol=1e-4)
        assert seen == pytest.approx(stats, abs=1e-4)


def test_own_successes_are_imitated(monkeypatch):
    """--algo rft that learns from failures, or in no step; with --loss-mean episode each context segment as a whole."""
    model = tiny.create("scratch:8x1", build_tokenizer(["a b c d e f g h"]))
    episodes = [e for e in some_episodes() if e.id in "abc"]
    for e in episodes:
        for segment in e.segments:
            segment.ids = [i % 8 + 1 for i in segment.ids]
    total = lambda e: sum(token_logprobs(model, [TrainSample(s.ids, s.mask)])[0].sum().item() for s in e.segments)
    before = list(map(total, episodes))
    state = SimpleNamespace(policy=SimpleNamespace(model=model), step=0,
                            optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(20):
        stats = rl.imitate_successes(state, episodes, settings(updates=2), ALONE)
    gains = [total(e) - b for e, b in zip(episodes, before)]
    assert stats["trained_samples"] == 1 and gains[0] > 1 and gains[0] > max(gains[1:])
    weights = deepcopy(model.state_dict())
    assert rl.imitate_successes(state, episodes[1:], settings(updates=2), ALONE) == {"trained_samples": 0.0}
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    seen = {}
    monkeypatch.setattr(rl, "sft_step", lambda model, samples, optimizers, tok, dist, divisors: seen.update(
        zip([len(s.ids) for s in samples], divisors)) or {})
    won = [episode("a", "t1", 1, [3, 1, 2]), episode("d", "t1", 1, [1, 5, 1, 2, 4], segments=2)]
    for kind, divisors in (("episode", [6, 13, 13]), ("token", [1, 1, 1])):
        rl.imitate_successes(state, won, settings(loss_mean=kind), ALONE)
        assert seen == dict(zip([12, 13, 10], divisors))
