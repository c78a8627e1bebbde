"""The hand-written GRPO and PPO: episodes -> batch with advantages -> optimizer steps (DreamGym, arXiv
2511.03773, Eq. 1 to 3).

    batch = make_batch(episodes, policy, value_head, args, dist)
    stats = update(run_state, batch, args, dist)

A turn is one action. The penalty of an invalid action is taken from its turn's reward, as in verl-agent,
where "invalid" means badly formed and a success pays 10. Its baseline is the mean of the group in GRPO, the
critic in PPO.
Log-probabilities of the old policy are the sampler's own, which equal the trainer's up to rounding
(`sampler_gap` in the log).
B rows, N trained tokens of all rows one after another.
"""
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dreamgym import losses, run
from dreamgym.episode import Episode, StopReason
from dreamgym.logprobs import TrainSample, even_micro_batches, reference_logprobs, token_logprobs
from dreamgym.model import optimizer_step
from dreamgym.sft import sft_step

GAMMA, GAE_LAMBDA = 1.0, 1.0          # as verl-agent
DUAL_CLIP, VALUE_CLIP, VALUE_COEF = 3.0, 0.2, 0.5
MEANS = ("kl_ref", "entropy", "kl_old", "clip_fraction", "dual_clip_fraction")   # of trained tokens, logged


@dataclass
class Batch:
    """The rows of one iteration; of each row a vector over its trained tokens."""
    samples: list[TrainSample]
    old: list[torch.Tensor]           # log-probs by the policy that sampled
    advantage: list[torch.Tensor]
    returns: list[torch.Tensor]       # PPO: the return of the token's turn
    value: list[torch.Tensor]         # PPO: the critic before the update
    first: list[torch.Tensor]         # 1 at the first token of a turn: where the critic is trained


def usable(episodes: list[Episode], drop_malformed: bool) -> list[Episode]:
    """Without episodes that nobody could judge, and, if asked, without dreams that broke off: nobody knows
    what their actions were worth (ours)."""
    dropped = [StopReason.NOT_JUDGED] + [StopReason.MALFORMED] * drop_malformed
    return [e for e in episodes if e.stop not in dropped]


def token_turns(episode: Episode) -> list[torch.Tensor]:
    """For each segment, which turn of the episode each trained token belongs to; a turn without room for an
    action has none."""
    found, done = [], 0
    for segment in episode.segments:
        sizes = torch.tensor([0, *segment.turn_ends]).diff()
        found.append(torch.arange(done, done + len(sizes)).repeat_interleave(sizes))
        done += len(sizes)
    return found


def group_turn_advantages(episodes: list[Episode], args) -> dict[str, tuple]:
    """GRPO (Eq. 3). Each turn gets its episode's advantage among those of its task, minus invalid_penalty *
    (invalid - share of invalid turns in the group) / divisor. The divisor is the deviation of the episodes'
    rewards, or 1 (losses.group_advantages). Returns (advantages, advantages) by episode id; the second stands
    in for PPO's returns."""
    groups = [e.task.id for e in episodes]
    advantages, divisors = losses.group_advantages([e.reward for e in episodes], groups, args.normalize_std)
    invalid: dict[str, list[bool]] = defaultdict(list)
    for e in episodes:
        invalid[e.task.id] += [not step.valid for step in e.steps]
    baseline = {group: sum(found) / len(found) for group, found in invalid.items() if found}
    penalty = lambda e, step: args.invalid_penalty * ((not step.valid) - baseline[e.task.id])
    return {e.id: ([advantage - penalty(e, step) / divisor for step in e.steps],) * 2
            for e, advantage, divisor in zip(episodes, advantages.tolist(), divisors.tolist())}


def gae_turn_advantages(episodes: list[Episode], starts: dict[str, torch.Tensor], args) -> dict[str, tuple]:
    """PPO (Eq. 2): (advantages, returns) of each episode's turns; `starts`: the critic at the start of each
    turn."""
    rewards = lambda e: [s.reward - args.invalid_penalty * (not s.valid) for s in e.steps]
    found = {e.id: losses.gae(rewards(e), starts[e.id].tolist(), GAMMA, GAE_LAMBDA) for e in episodes}
    return {name: (advantage.tolist(), returns.tolist()) for name, (advantage, returns) in found.items()}


def make_batch(episodes: list[Episode], policy, value_head, args, dist) -> Batch:
    """Rows with one advantage for each trained token. Whole groups must be on one rank."""
    rows = [(e.id, s, turn_N) for e in episodes
            for s, turn_N in zip(e.segments, token_turns(e)) if len(turn_N)]
    names, samples, turns = map(list, zip(*rows)) if rows else ([], [], [])
    first = [turn_N.diff(prepend=torch.tensor([-1])) > 0 for turn_N in turns]
    if value_head is not None:
        values = token_values(policy, value_head, samples, args, dist)
        starts = {e.id: torch.zeros(len(e.steps)) for e in episodes}
        for name, turn_N, value_N, first_N in zip(names, turns, values, first):
            starts[name][turn_N[first_N]] = value_N[first_N]
        by_turn = gae_turn_advantages(episodes, starts, args)
    else:
        values = [torch.zeros(len(turn_N)) for turn_N in turns]
        by_turn = group_turn_advantages(episodes, args)
    spread = lambda which: [torch.tensor(by_turn[name][which])[turn_N] for name, turn_N in zip(names, turns)]
    batch = Batch(samples, [torch.tensor(s.logps) for s in samples], spread(0), spread(1), values,
                  [first_N.float() for first_N in first])
    if value_head is not None:
        whiten(batch, dist)
    if args.loss_mean == "episode":
        weigh_episodes(batch, names, dist)
    return batch


def whiten(batch: Batch, dist) -> None:
    """PPO: the advantages of the whole batch get mean 0 and standard deviation 1."""
    flat = torch.cat(batch.advantage) if batch.advantage else torch.zeros(0)
    n, total, squares = dist.all_reduce_sum([float(len(flat)), float(flat.double().sum()),
                                             float(flat.double().square().sum())])
    mean = total / max(1.0, n)
    deviation = max(0.0, squares / max(1.0, n) - mean * mean) ** 0.5
    batch.advantage = [(a - mean) / (deviation + 1e-6) for a in batch.advantage]


def tokens_of_episodes(episode_ids: list[str], samples: list) -> Counter:
    """Trained tokens of each episode, over all its context segments."""
    tokens: Counter = Counter()
    for name, sample in zip(episode_ids, samples):
        tokens[name] += sum(sample.mask)
    return tokens


def weigh_episodes(batch: Batch, episode_ids: list[str], dist) -> None:
    """Each episode weighs the same, not each token: failures are often several times as long."""
    tokens = tokens_of_episodes(episode_ids, batch.samples)
    total, count = dist.all_reduce_sum([float(sum(tokens.values())), float(len(tokens))])
    batch.advantage = [a * (total / max(1.0, count) / tokens[name])
                       for a, name in zip(batch.advantage, episode_ids)]


@torch.no_grad()
def by_row(samples: list[TrainSample], compute: Callable, args, dist) -> list[torch.Tensor]:
    """compute(samples of a micro-batch) -> [N], split into a vector for each row."""
    rows: list[torch.Tensor] = [torch.zeros(0)] * len(samples)
    for indices in even_micro_batches(samples, args.micro_batch_tok, dist):
        part = [samples[i] for i in indices]
        for i, row_N in zip(indices, compute(part).split([sum(s.mask) for s in part])):
            rows[i] = row_N.cpu()
    return rows


def token_values(policy, value_head, samples: list[TrainSample], args, dist) -> list[torch.Tensor]:
    """The critic at every trained token of every row."""
    hidden_NH = lambda part: token_logprobs(policy.model, part, with_entropy=False)[2]
    return by_row(samples, lambda part: value_head(hidden_NH(part).float())[:, 0], args, dist)


def update(run_state, batch: Batch, args, dist) -> dict:
    """--updates optimizer steps of a Run of train_policy.py. The divisor of each loss is the global count of
    its trained tokens. Returns what is logged."""
    policy, value_head, optimizer = run_state.policy, run_state.value_head, run_state.optimizer
    frozen = lambda part: reference_logprobs(run_state.reference, part)
    ref = by_row(batch.samples, frozen, args, dist) if args.kl_coef else None
    sums: dict[str, float] = defaultdict(float)
    stats = {"grad_norm": 0.0, "ratio_max": 0.0, "sampler_gap": 0.0}
    order = run.rng(args.seed, "minibatch", run_state.step, dist.rank).permutation(len(batch.samples))
    for number, rows in enumerate(np.array_split(order, args.updates)):
        tokens = dist.all_reduce_sum(float(sum(sum(batch.samples[i].mask) for i in rows))) / dist.world_size
        starts = dist.all_reduce_sum(float(sum(batch.first[i].sum() for i in rows))) / dist.world_size
        if not tokens:                           # fewer rows than --updates
            continue
        for local in even_micro_batches([batch.samples[i] for i in rows], args.micro_batch_tok, dist):
            chosen = [int(rows[i]) for i in local]
            loss, seen = micro_batch_loss(policy, value_head, batch, ref, chosen, (tokens, starts), args)
            stats["ratio_max"] = max(stats["ratio_max"], seen.pop("ratio_max"))
            gap = seen.pop("sampler_gap")        # of the first step: later the policy has moved
            stats["sampler_gap"] = max(stats["sampler_gap"], gap if number == 0 else 0.0)
            for name, value in seen.items():
                sums[name] += value
            losses.check_finite(loss, f"policy loss, rows {chosen[:8]}")
            loss.backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        stats["grad_norm"] += optimizer_step(parameters, [optimizer], dist) / args.updates
    return summary(batch, sums, stats, value_head is not None, dist)


def imitate_successes(run_state, episodes: list[Episode], args, dist) -> dict:
    """--algo rft: --updates supervised steps on the policy's own successful episodes of this iteration
    (rejection sampling fine-tuning, arXiv 2308.01825)."""
    won = [(e, s) for e in episodes if e.success for s in e.segments if any(s.mask)]
    samples = [s for _, s in won]
    tokens = tokens_of_episodes([e.id for e, _ in won], samples)
    divisors = [tokens[e.id] if args.loss_mean == "episode" else 1 for e, _ in won]
    order = run.rng(args.seed, "minibatch", run_state.step, dist.rank).permutation(len(samples))
    stats = {"trained_samples": dist.all_reduce_sum(float(len(samples)))}
    for rows in np.array_split(order, args.updates):
        if dist.all_reduce_sum(float(len(rows))):
            stats |= sft_step(run_state.policy.model, [samples[i] for i in rows], [run_state.optimizer],
                              args.micro_batch_tok, dist, [divisors[i] for i in rows])
    return stats


def micro_batch_loss(policy, value_head, batch: Batch, ref, rows: list[int], divisors: tuple[float, float],
                     args):
    """(loss, sums for the log) of these rows; `divisors`: trained tokens and turns of the optimizer step."""
    device = next(policy.model.parameters()).device
    flat = lambda part: torch.cat([torch.empty(0), *(part[i] for i in rows)]).to(device)
    samples = [batch.samples[i] for i in rows]
    logp_N, entropy_N, hidden_NH = token_logprobs(policy.model, samples)
    if not args.entropy_coef:
        entropy_N = entropy_N.detach()           # its gradient would cost more than that of the log-probs
    old_N = flat(batch.old)
    loss_N, seen = losses.policy_loss(logp_N, old_N, flat(batch.advantage), args.clip_low, args.clip_high,
                                      DUAL_CLIP)
    kl_N = losses.kl_estimate(logp_N, flat(ref), args.kl) if ref is not None else torch.zeros_like(logp_N)
    loss = losses.aggregate(loss_N + args.kl_coef * kl_N - args.entropy_coef * entropy_N, divisors[0])
    sums = {name: float(value) for name, value in seen.items()}
    sums |= {"trained_tok": float(len(logp_N)), "loss": float(loss.detach()) / args.updates,
             "kl_ref": float(kl_N.detach().sum()), "entropy": float(entropy_N.detach().sum()),
             "sampler_gap": float((logp_N.detach() - old_N).abs().max()) if len(logp_N) else 0.0}
    if value_head is not None:
        value_N = losses.value_loss(value_head(hidden_NH.float())[:, 0], flat(batch.value),
                                    flat(batch.returns), VALUE_CLIP)
        critic = losses.aggregate(value_N * flat(batch.first), max(1.0, divisors[1]))
        loss, sums["value_loss"] = loss + VALUE_COEF * critic, float(critic.detach()) / args.updates
    return loss, sums


def summary(batch: Batch, sums: dict[str, float], stats: dict[str, float], with_critic: bool, dist) -> dict:
    """The log's values, over all ranks."""
    losses_seen = ["loss", "value_loss"] if with_critic else ["loss"]
    names = [*MEANS, *losses_seen, "trained_tok"]
    found = dict(zip(names, dist.all_reduce_sum([sums.get(name, 0.0) for name in names])))
    found |= {name: found[name] / max(1.0, found["trained_tok"]) for name in MEANS} | stats
    found |= {name: found[name] / dist.world_size for name in losses_seen}
    for name in ("ratio_max", "sampler_gap"):
        found[name] = max(dist.gather([stats[name]]))
    if with_critic:
        at_start = [(value_N[first_N.bool()], return_N[first_N.bool()])
                    for value_N, return_N, first_N in zip(batch.value, batch.returns, batch.first)]
        value_T, return_T = map(torch.cat, zip(*dist.gather(at_start) or [(torch.zeros(0),) * 2]))
        found["explained_variance"] = float(losses.explained_variance(value_T, return_T))
    return found
