"""The offline baseline: DPO (arXiv 2305.18290) on recorded episodes of one task, a success and a failure.

    python -m runs.dpo --env webshop --data out/webshop/data --policy out/webshop/imitation --out out/dpo

It starts from a policy's folder and writes one of the same kind: `--imitation OUT` of train_policy.py reads
it, and so does `--policy OUT/model` of evaluate.py. Actions that changed nothing count, too.
"""
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dreamgym import checkpoint, run
from dreamgym.envs.base import env_of_data
from dreamgym.episode import Episode, read_episodes, recorded
from dreamgym.logprobs import token_logprobs
from dreamgym.losses import aggregate, check_finite, dpo_loss
from dreamgym.model import load_model, optimizer_step, save_model, trainable_parameters
from dreamgym.rollout import Policy, PolicySettings, imitation_segments


@dataclass
class Args:
    env: str = "webshop"               # of the data
    data: str = "out/webshop/data"     # folder of collect.py
    policy: str = "out/webshop/imitation"  # folder imitation/ of train_policy.py: start and reference
    out: str = "out/webshop/dpo"       # the folder that is written
    beta: float = 0.1                  # strength of the reference (the DPO paper's)
    lr: float = 3e-5                   # learning rate (ours)
    epochs: int = 1                    # passes over the pairs
    pairs: int = 16                    # pairs per optimizer step
    seed: int = 0                      # order of the pairs


def make_pairs(episodes: list[Episode], seed: int) -> list[tuple[Episode, Episode]]:
    """(success, failure) of one task text. Each episode of the rarer outcome is taken once."""
    by_task = defaultdict(lambda: ([], []))
    for episode in episodes:
        by_task[episode.task.text][not episode.success].append(episode)
    pairs = [pair for won, lost in by_task.values() for pair in zip(won, lost)]
    return run.sample(pairs, None, seed, "pairs")


def log_prob(policy: Policy, episode: Episode) -> torch.Tensor:
    """log p of all actions of an episode, a scalar."""
    segments = imitation_segments(policy, episode, all_actions=True)
    return token_logprobs(policy.model, segments, with_entropy=False)[0].sum()


def train(args: Args, policy: Policy, pairs: list[tuple[Episode, Episode]], dist) -> None:
    with torch.no_grad():
        reference = [[float(log_prob(policy, e)) for e in pair] for pair in pairs]
    parameters = trainable_parameters(policy.model)
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.0)
    for epoch in range(args.epochs):
        order = run.rng(args.seed, "dpo", epoch).permutation(len(pairs)).tolist()
        for start in range(0, len(order), args.pairs):
            chosen, ranked, total = order[start:start + args.pairs], 0, 0.0
            for i in chosen:
                won, lost = (log_prob(policy, e) - ref for e, ref in zip(pairs[i], reference[i]))
                loss = aggregate(dpo_loss(won[None], lost[None], args.beta), len(chosen))
                check_finite(loss, f"DPO loss of pair {i}")
                loss.backward()
                ranked, total = ranked + int(won > lost), total + loss.item()
            optimizer_step(parameters, [optimizer], dist)
            print(f"epoch {epoch + 1}, pair {start + len(chosen)} of {len(order)}: loss {total:.3f}, "
                  f"{ranked / len(chosen):.2f} ranked right", flush=True)


def main() -> None:
    args = run.parse(Args)
    dist, data, start = run.one_process(args.seed), Path(args.data), Path(args.policy) / "model"
    env, meta = env_of_data(args.env, run.load_meta(data)["settings"]), run.load_meta(start)
    model, tokenizer = load_model(str(start), quantize=meta["settings"]["quantize"], device=str(dist.device))
    policy = Policy(model, tokenizer, env, PolicySettings(**meta["policy"]))
    episodes = recorded(read_episodes(data / "train.jsonl"))
    pairs = make_pairs(episodes, args.seed)
    if not pairs:
        raise ValueError(f"{data}: found no task with a success and a failure among {len(episodes)} recorded "
                         "episodes; expected some (collect.py --transitions N records more)")
    print(f"{len(pairs)} pairs of {len({won.task.text for won, _ in pairs})} tasks")
    train(args, policy, pairs, dist)
    checkpoint.save(args.out, "model", lambda path: save_model(model, tokenizer, path),
                        meta | {"dpo": asdict(args)}, dist)
    env.close()


if __name__ == "__main__":
    run.main(main)
