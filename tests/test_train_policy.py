"""The pieces of train_policy.py: batches against slow loops, gradients, the value head, the curriculum's food, budgets, and what a resume cuts away."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_policy
from dreamgym import run
from dreamgym.curriculum import Curriculum
from dreamgym.episode import Episode, Step, Stream, Task
from dreamgym.model import Row, build_tokenizer, create_tiny, make_reference, row_logps
from train_policy import Args, Batch, State, cut_episodes, even_micro_batches, feed_curriculum, make_batch, next_world, turns, update, with_outcome

RANKS = run.Ranks()


def episode(name, task, reward, lengths, invalid=(), streams=1):
    """An episode with turns of the given lengths (trained tokens), spread over `streams` streams; each turn has two untrained tokens before it."""
    steps = [Step("s", "a", "s", float(reward and t == len(lengths) - 1), t == len(lengths) - 1, valid=t not in invalid) for t in range(len(lengths))]
    found = Episode(name, Task(task, "find me x"), steps)
    seed = sum(map(ord, name))
    for part in np.array_split(np.arange(len(lengths)), streams):
        stream = Stream()
        for t in part.tolist():
            n = lengths[t]
            stream.ids += [(seed + 3 * t + i) % 40 + 1 for i in range(2 + n)]
            stream.mask += [0, 0] + [1] * n
            stream.logps += [-1.0] * n
            stream.turn_ends.append(len(stream.logps))
        found.streams.append(stream)
    return found


def some_episodes():
    return [episode("a", "t1", 1, [3, 1, 2], {1}), episode("b", "t1", 0, [2, 2], {0, 1}, streams=2), episode("c", "t2", 0, [4]), episode("d", "t1", 1, [1, 5, 1, 2], streams=2),
            episode("e", "t2", 0, [2, 0], streams=1), episode("f", "t3", 1, [2, 3, 0], streams=3)]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return create_tiny(build_tokenizer(["a b c"]), "tiny", 0)


# ---------------------------------------------------------------------------------------------------------------- batches


def test_turns():
    """Stops the last token of a turn from being given to the next: ends 3, 4 are tokens 0-2 and 3."""
    assert turns(Stream(turn_ends=[3, 4, 4])) == [(0, 3), (3, 4), (4, 4)]
    assert turns(Stream()) == []


@pytest.mark.parametrize("normalize_std", [True, False])
def test_grpo_batch_against_a_slow_loop(normalize_std):
    """Stops advantages of the wrong group, episode or turn, and a penalty on a valid action; turns without a token and streams without one included."""
    episodes, args = some_episodes(), Args(invalid_penalty=0.3, normalize_std=normalize_std)
    batch = make_batch(args, None, None, episodes, [e.task.id for e in episodes], RANKS)
    k = 0
    for e in episodes:
        group = [o.reward for o in episodes if o.task.id == e.task.id]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / len(group))
        own = (e.reward - mean) / ((std + 1e-6) if normalize_std else 1) if std else 0.0
        t = 0
        for stream in e.streams:
            wanted, firsts, at = [], [], 0
            for end in stream.turn_ends:
                for i in range(at, end):
                    wanted.append(own - (0 if e.steps[t].valid else 0.3))
                    firsts.append(float(i == at))
                at, t = end, t + 1
            if wanted:
                assert batch.rows[k].ids == stream.ids
                torch.testing.assert_close(batch.advantage[k], torch.tensor(wanted))
                assert batch.first[k].tolist() == firsts
                k += 1
    assert k == len(batch.rows) == len(batch.advantage) == len(batch.returns) == len(batch.first)


def test_episodes_may_weigh_the_same():
    """Stops a long failure from weighing more than a short success in ALFWorld, and the loss from changing its scale."""
    episodes = some_episodes()
    token, whole = (make_batch(Args(env=env, invalid_penalty=0.0), None, None, episodes, [e.task.id for e in episodes], RANKS) for env in ("webshop", "alfworld"))
    rows = [e for e in episodes for s in e.streams if any(s.mask)]
    tokens = {e.id: sum(sum(s.mask) for s in e.streams) for e in episodes}
    mean = sum(tokens.values()) / len(tokens)
    for e, a, b in zip(rows, token.advantage, whole.advantage):
        torch.testing.assert_close(b, a * mean / tokens[e.id])
    assert [r.ids for r in token.rows] == [r.ids for r in whole.rows]


def test_ppo_batch_against_a_slow_loop(monkeypatch):
    """Stops GAE over tokens instead of turns, values of the wrong turn, rewards that are shifted by one, and whitening that is not over all tokens."""
    episodes, args = some_episodes(), Args(algo="ppo", invalid_penalty=0.3)
    value = lambda row, i: 0.1 * (sum(row.ids) % 7) + 0.05 * i
    monkeypatch.setattr(train_policy, "turn_values", lambda p, h, rows, tok, ranks: [torch.tensor([value(r, i) for i in range(sum(r.mask))]) for r in rows])
    batch = make_batch(args, None, None, episodes, [e.task.id for e in episodes], RANKS)
    raw, returns = [], []
    for e in episodes:
        values, ends = [], [(s, a, b) for s in e.streams for a, b in zip([0] + s.turn_ends, s.turn_ends)]
        for s, a, b in ends:
            values.append(value(Row(s.ids, s.mask), a) if b > a else 0.0)
        rewards = [step.reward - (0 if step.valid else 0.3) for step in e.steps]
        for t, (_, a, b) in enumerate(ends):  # gamma = lambda = 1: the advantage is the rest of the rewards less the value
            raw += [sum(rewards[t:]) - values[t]] * (b - a)
            returns += [sum(rewards[t:])] * (b - a)
    mean = sum(raw) / len(raw)
    std = math.sqrt(sum((x - mean) ** 2 for x in raw) / (len(raw) - 1))
    torch.testing.assert_close(torch.cat(batch.advantage), torch.tensor([(x - mean) / (std + 1e-6) for x in raw]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat(batch.returns), torch.tensor(returns), atol=1e-5, rtol=1e-5)


def test_the_values_of_a_row_are_the_head_at_its_trained_tokens(model):
    """Stops values that stand one token late: the head reads the state before the token is sampled."""
    head = torch.nn.Linear(64, 1)
    rows = [Row(s.ids, s.mask) for e in some_episodes() for s in e.streams if any(s.mask)]
    found = train_policy.turn_values(SimpleNamespace(model=model), head, rows, 30, RANKS)
    for row, value_N in zip(rows, found):
        hidden_TH = model.model(input_ids=torch.tensor([row.ids])).last_hidden_state[0]
        torch.testing.assert_close(value_N, torch.stack([head(hidden_TH[t - 1])[0] for t, m in enumerate(row.mask) if m]), atol=1e-5, rtol=1e-5)


def test_dreams_that_broke_off_teach_nothing():
    """Stops the experience model's slips from counting as the policy's: neither their tokens nor the mean of their group."""
    episodes = some_episodes()
    slips = [replace(e, id=f"{e.id}-slip", steps=[replace(s, reward=0.0) for s in e.steps], stop="malformed") for e in episodes]
    batches = [make_batch(Args(), None, None, part, [e.task.id for e in part], RANKS) for part in (episodes, with_outcome([*slips, *episodes]))]
    assert [r.ids for r in batches[0].rows] == [r.ids for r in batches[1].rows]
    assert all(torch.equal(a, b) for a, b in zip(batches[0].advantage, batches[1].advantage)) and with_outcome(slips) == []


def test_an_empty_share_of_episodes():
    """Stops a crash on the rank that got no task: both algorithms make an empty batch."""
    for algo in ("grpo", "ppo"):
        assert make_batch(Args(algo=algo), SimpleNamespace(model=None), None, [], [], RANKS).rows == []


# ---------------------------------------------------------------------------------------------------------------- updates


def updated(model, args, batch, head=None, optimizer=torch.optim.SGD, lr=1.0, times=1):
    """The weights after an update, and its statistics."""
    policy, head = SimpleNamespace(model=deepcopy(model)), deepcopy(head)
    parameters = [*policy.model.parameters(), *(head.parameters() if head is not None else [])]
    optimizer = optimizer(parameters, lr=lr)
    reference = make_reference(model)
    sampled = [row_logps(model, [r], with_entropy=False)[0].tolist() for r in batch.rows]
    stats = [update(args, policy, head, reference, optimizer, batch, sampled, i, RANKS) for i in range(times)]
    return torch.cat([p.detach().flatten() for p in parameters]), stats, policy.model, head


def a_batch(algo="grpo"):
    episodes = some_episodes()
    batch = make_batch(Args(), None, None, episodes, [e.task.id for e in episodes], RANKS)
    rng = torch.Generator().manual_seed(0)
    return Batch(batch.rows, [torch.randn(len(a), generator=rng) for a in batch.advantage], [torch.randn(len(a), generator=rng) for a in batch.returns], batch.first)


@pytest.mark.parametrize("with_head", [False, True])
def test_micro_batches_never_change_the_update(model, with_head):
    """Stops the mean of means: --micro-batch-tok is memory only, for policy, KL, entropy and value loss alike, over several updates."""
    head = torch.nn.Linear(64, 1) if with_head else None
    found = [updated(model, Args(micro_batch_tok=tok, updates=2, entropy_coef=0.05, kl_coef=0.1), a_batch(), head, times=2) for tok in (1, 25, 10_000)]
    for weights, stats, _, _ in found[1:]:
        torch.testing.assert_close(weights, found[0][0], atol=1e-5, rtol=1e-4)
        assert stats[1]["loss"] == pytest.approx(found[0][1][1]["loss"], abs=1e-5) and stats[1]["entropy"] == pytest.approx(found[0][1][1]["entropy"], abs=1e-5)


def test_the_first_update_is_the_policy_gradient(model):
    """Stops a wrong sign, a wrong divisor or a forgotten term: at ratio 1 the step is the gradient of -(advantage * log p) / tokens - coef * entropy."""
    batch, args = a_batch(), Args(updates=1, entropy_coef=0.01, kl_coef=0.5)
    weights, stats, _, _ = updated(model, args, batch)
    plain = deepcopy(model)
    logp_N, entropy_N, _ = row_logps(plain, batch.rows)
    loss = -(torch.cat(batch.advantage) * logp_N).sum() / len(logp_N) - 0.01 * entropy_N.sum() / len(logp_N)  # the gradient of k3 is 0 at the reference
    grads = torch.autograd.grad(loss, list(plain.parameters()))
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
    wanted = torch.cat([(p - g * min(1.0, 1.0 / norm)).detach().flatten() for p, g in zip(plain.parameters(), grads)])
    torch.testing.assert_close(weights, wanted, atol=2e-6, rtol=1e-4)
    assert stats[0]["grad_norm"] == pytest.approx(norm, rel=1e-3) and stats[0]["kl_ref"] == pytest.approx(0, abs=1e-6)
    assert stats[0]["clip_fraction"] == 0 and stats[0]["trained_tok"] == len(logp_N) and stats[0]["sampler_gap"] < 1e-3


def test_kl_pulls_back_to_the_reference(model):
    """Stops a KL term that is never felt: without advantages a policy that has moved comes nearer to its reference."""
    moved, batch = deepcopy(model), a_batch()
    with torch.no_grad():
        for p in moved.parameters():
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    batch.advantage = [torch.zeros_like(a) for a in batch.advantage]
    policy, optimizer = SimpleNamespace(model=moved), torch.optim.SGD(moved.parameters(), lr=0.1)
    stats = [update(Args(updates=1, entropy_coef=0, kl_coef=1.0), policy, None, model, optimizer, batch, [[] for _ in batch.rows], i, RANKS) for i in range(6)]
    assert stats[0]["kl_ref"] > 0.01 and stats[-1]["kl_ref"] < 0.7 * stats[0]["kl_ref"]


def test_the_value_head_learns(model):
    """Stops a critic without gradient or one that is trained on other targets: returns that differ by turn are explained after some updates."""
    batch = a_batch()
    batch.advantage = [torch.zeros_like(a) for a in batch.advantage]
    head = torch.nn.Linear(64, 1)
    torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
    _, stats, _, _ = updated(model, Args(algo="ppo", updates=1, kl_coef=0, entropy_coef=0), batch, head, torch.optim.AdamW, 3e-3, times=25)
    assert stats[-1]["value_loss"] < 0.3 * stats[0]["value_loss"] and stats[-1]["explained_variance"] > 0.6 > stats[0]["explained_variance"]


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_fewer_rows_than_updates(model, algo):
    """Stops a crash where an optimizer step has no row (small --tasks): it is skipped, the others are taken; and no rows at all."""
    batch = a_batch()
    small = Batch(batch.rows[:2], batch.advantage[:2], batch.returns[:2], batch.first[:2])
    head = torch.nn.Linear(64, 1) if algo == "ppo" else None
    weights, stats, _, _ = updated(model, Args(algo=algo, updates=5), small, head)
    assert math.isfinite(stats[0]["loss"]) and stats[0]["trained_tok"] == sum(sum(r.mask) for r in small.rows)
    assert updated(model, Args(algo=algo, updates=2), Batch([], [], [], []), head)[1][0]["trained_tok"] == 0


def test_even_micro_batches():
    """Stops the hang of sharded ranks that run different numbers of forwards: a rank with less work gets empty micro-batches at the end."""
    rows = [Row([1] * n, [0] * n) for n in (9, 8, 3)]
    assert even_micro_batches(rows, 9, RANKS) == [[0], [1], [2]]
    assert even_micro_batches(rows, 9, SimpleNamespace(gather=lambda items: items + [5])) == [[0], [1], [2], [], []]
    assert even_micro_batches([], 9, SimpleNamespace(gather=lambda items: items + [2])) == [[], []] and even_micro_batches([], 9, RANKS) == []


# ---------------------------------------------------------------------------------------------------------------- curriculum, budgets, files


def test_grpo_feeds_the_curriculum_by_task():
    """Stops values that mix tasks: each task gets the variance of its own rewards (Eq. 7), and the zero-variance share counts groups."""
    curriculum = Curriculum(["a", "b", "c"])
    share = feed_curriculum(Args(), curriculum, [["a", 1.0], ["b", 0.0], ["a", 0.0], ["b", 0.0]], 3, None, {})
    assert share == 0.5 and curriculum.stats["a"].value == 0.25 and curriculum.stats["b"].value == 0 and curriculum.stats["c"].visits == 0
    assert [curriculum.stats[t].last for t in "abc"] == [3, 3, -1]


def test_ppo_feeds_the_curriculum_by_cluster():
    """Stops single episodes (variance 0 each) from emptying the curriculum: similar tasks share one group."""
    tasks = {f"{kind}{i}": Task(f"{kind}{i}", f"find me {kind}") for kind in ("jacket", "belt") for i in range(4)}
    dream = SimpleNamespace(encoder=lambda texts: np.array([[1.0, 0.0] if "jacket" in t else [0.0, 1.0] for t in texts]))
    curriculum = Curriculum(list(tasks))
    outcomes = [[t, float(t in ("jacket0", "jacket1"))] for t in tasks]
    share = feed_curriculum(Args(algo="ppo", rollouts=4), curriculum, outcomes, 0, dream, tasks)
    assert share == 0.5
    assert {t: curriculum.stats[t].value for t in tasks} == {t: 0.25 if "jacket" in t else 0.0 for t in tasks}


@pytest.mark.parametrize(
    ("flags", "state", "world"),
    [({}, {}, "dream"), ({"iterations": 3}, {"iteration": 2}, "dream"), ({"iterations": 3}, {"iteration": 3}, ""), ({"iterations": 0}, {}, ""),
     ({"iterations": 3, "real_transitions": 500}, {"iteration": 3}, "real"), ({"iterations": 3, "real_transitions": 500}, {"iteration": 7, "real_transitions": 499}, "real"),
     ({"iterations": 3, "real_transitions": 500}, {"iteration": 9, "real_transitions": 500}, ""), ({"algo": "sft"}, {}, ""),
     ({"world": "real", "real_transitions": 500}, {}, "real"), ({"world": "real", "real_transitions": 500}, {"iteration": 50, "real_transitions": 400}, "real"),
     ({"world": "real", "real_transitions": 500}, {"iteration": 1, "real_transitions": 700}, "")],
)  # fmt: skip
def test_next_world(flags, state, world):
    """Stops real transitions in a dream run, a real phase that never ends, and dream iterations with --world real."""
    assert next_world(Args(**flags), State(**state)) == world


def test_flags_that_make_no_sense_are_refused():
    """Stops a long preparation before an error that the flags alone give away."""
    for flags, text in [({"env": "mars"}, "webshop"), ({"world": "real"}, "--real-transitions"), ({"quantize": "nf4", "model": "x"}, "--lora-rank"),
                        ({"lora_rank": 4}, "tiny"), ({"tasks": 0}, "--tasks"), ({"eval_every": 0}, "--eval-every")]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            Args(**flags)
    Args(world="real", algo="sft"), Args(model="some/model", quantize="nf4", lora_rank=8)


def test_cut_episodes(tmp_path):
    """Stops a resumed run from leaving episodes twice: those of iterations it plays again go, also the half line of a kill; a missing file is made."""
    path = tmp_path / "episodes.jsonl"
    cut_episodes(path, 3)
    assert path.read_text() == ""
    names = ["dream-0-r0-1", "dream-1-r0-0", "dream-1-r1-0", "real-2-r0-0", "dream-10-r0-0"]
    path.write_text("".join(json.dumps({"id": n, "text": "é\u2028"}) + "\n" for n in names) + '{"id": "dream-11')
    cut_episodes(path, 1)
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == names[:3]
    path.write_text("".join(json.dumps({"id": f"eval-{i}-real_greedy-r0-1"}) + "\n" for i in (0, 5, 10)))
    cut_episodes(path, 5)
    assert len(path.read_text().splitlines()) == 2
