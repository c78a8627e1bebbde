"""The main job: an agent learns by reinforcement learning inside the experience model (DreamGym, arXiv 2511.03773).

    python train_policy.py --env webshop                                  # everything, from nothing, minutes on a CPU
    python train_policy.py --env webshop --algo ppo                       # PPO instead of GRPO
    python train_policy.py --env webshop --real-transitions 5000          # dream, then real: S2R
    python train_policy.py --env webshop --world real --real-transitions 30000
    torchrun --nproc-per-node 8 train_policy.py --env webshop --model Qwen/Qwen2.5-1.5B-Instruct --config configs/webshop_large.json

What is missing is made first, by the other scripts, through files: data (collect.py) -> experience model (train_expmodel.py) -> imitation -> RL. One step:
tasks = curriculum.pick -> episodes = rollout(policy, world, tasks) -> advantages -> old and reference log-probs -> mini-batches of loss ->
curriculum.update, replay.add -> log -> save. Real success on held-out tasks is measured beside dream success; no real reward reaches the dream phase.
"""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from dreamgym import losses, plots, run
from dreamgym.curriculum import Curriculum, cluster
from dreamgym.envs import env_of, make_rules
from dreamgym.episode import Episode, Stream, Task, episode_from_json, read_episodes, read_tasks, renamed, to_json
from dreamgym.experience_model import fill_buffer, load_dream
from dreamgym.model import (SIZES, Row, check_tokenizer, clip_grad_norm, create_tiny, gathered, load_model, load_weights, make_reference, reference_logps, row_logps,
                            save_model, shard, trainable_parameters)
from dreamgym.optim import even_micro_batches, make_optimizers, set_rate, step_all
from dreamgym.report import experience_report, gap_alarm, policy_report, search_report
from dreamgym.rollout import Policy, imitation_streams, policy_for, rollout
from dreamgym.task_generation import TaskCheck, write_tasks


@dataclass
class Args:
    env: str = "webshop"               # environment: webshop | alfworld | webarena
    out: str = ""                      # folder of this run; what is missing is made there (default: out/ENV)
    expmodel: str = ""                 # folder of a trained experience model (default: OUT/expmodel, made when missing)
    data: str = ""                     # folder of collect.py (default: OUT/data, made when missing)
    imitation: str = ""                # folder of an imitation policy to start from (default: OUT/imitation, made when missing)
    algo: Literal["sft", "grpo", "ppo"] = "grpo"   # sft: imitation only
    world: Literal["dream", "real"] = "dream"      # where RL happens first
    real_transitions: int = 0          # real RL transitions: after the dream (S2R), or in all with --world real
    model: str = "tiny"                # tiny | path or hub name of a causal LM (the experience model's too, unless it exists)
    quantize: Literal["none", "nf4"] = "none"      # nf4: 4-bit weights, trained through --lora-rank
    lora_rank: int = 0                 # rank of LoRA on all linear layers (0: full fine-tuning)
    init: Literal["auto", "expmodel", "scratch", "model"] = "auto"  # policy weights before imitation (auto: expmodel for tiny, else --model)
    imitation_episodes: int = -1       # demonstrations to imitate, mistakes included (0: none, -1: as many as the environment's rules say)
    iterations: int = -1               # RL iterations in the dream (-1: the environment's, 15 for WebShop; verl-agent: 150)
    tasks: int = 16                    # tasks per iteration
    rollouts: int = 8                  # episodes per task (PPO: tasks x rollouts different tasks)
    updates: int = 0                   # optimizer steps per iteration (0: the environment's, 4 for WebShop)
    lr: float = 0.0                    # RL learning rate (0: 3e-4 tiny, 1e-6 full fine-tuning as verl-agent, 1e-5 LoRA); imitation takes ten times as much
    kl_coef: float = 0.03              # weight of KL to the imitation policy (verl-agent: 0.01)
    kl: Literal["k1", "k2", "k3"] = "k3"           # its estimator
    clip_low: float = 0.2              # policy ratio clip below
    clip_high: float = 0.2             # and above
    entropy_coef: float = 0.001        # entropy bonus
    invalid_penalty: float = 0.1       # taken from the advantage of a refused action
    normalize_std: bool = True         # GRPO: divide by the group's standard deviation (no: Dr. GRPO)
    lam_generated: float = 0.25        # lambda: largest share of generated tasks per iteration (0: no task generation; ours)
    curriculum: bool = True            # pick tasks by reward variance (Eq. 7), not uniformly
    enrich: bool = True                # add dreamt transitions to the replay buffer
    naive_reward: bool = False         # the lesson: train the experience model without relabelled purchases
    eval_every: int = 5                # iterations between evaluations in both worlds
    eval_tasks: int = 500              # held-out tasks of an evaluation
    micro_batch_tok: int = 4096        # tokens per micro-batch: memory only, never changes the gradient
    seed: int = 0                      # everything: data, experience model, imitation, RL
    fresh: bool = False                # start over even where artifacts fit

    def __post_init__(self):
        make_rules(self.env)           # raises ValueError for an unknown environment
        self.out = self.out or f"out/{self.env}"
        if self.world == "real" and self.algo != "sft" and not self.real_transitions:
            raise ValueError("--world real needs --real-transitions N (how many real RL transitions it may use)")
        if self.quantize != "none" and not self.lora_rank:
            raise ValueError(f"--quantize {self.quantize}: 4-bit weights cannot be trained themselves; expected --lora-rank, too")
        if self.model in SIZES and self.lora_rank:
            raise ValueError(f"--lora-rank {self.lora_rank}: the {self.model} model is trained in full; expected --model with a path or hub name")
        rules = make_rules(self.env)
        self.updates, self.iterations = self.updates or rules.UPDATES, rules.ITERATIONS if self.iterations == -1 else self.iterations
        if min(self.tasks, self.rollouts, self.updates, self.eval_every, self.eval_tasks) < 1 or min(self.imitation_episodes + 1, self.iterations, self.real_transitions) < 0:
            raise ValueError("--tasks, --rollouts, --updates, --eval-every and --eval-tasks are at least 1, "
                             "--iterations and --real-transitions at least 0, --imitation-episodes at least -1")
        if self.imitation_episodes < 0:
            self.imitation_episodes = rules.IMITATION_EPISODES


GAMMA, LAM, DUAL_CLIP, VALUE_CLIP, VALUE_COEF, TEMPERATURE = 1.0, 1.0, 3.0, 0.2, 0.5, 1.0
IMITATION_LR_FACTOR, VALUE_LR_FACTOR, GENERATE_EVERY, SAVE_EVERY, EVAL_TASKS_ON_THE_WAY = 10.0, 10.0, 5, 5, 150


# ---- what must exist before RL --------------------------------------------------------------------------------------------------------------

def prepare(args: Args, ranks) -> tuple[Path, Path]:
    """Runs collect.py and train_expmodel.py where their folders are missing or unfinished; each keeps a folder that already fits its flags."""
    out = Path(args.out)
    data = Path(args.data or out / "data")
    expmodel = Path(args.expmodel or out / ("expmodel-naive" if args.naive_reward else "expmodel"))
    here = Path(__file__).parent
    fresh = ["--fresh"] if args.fresh else []
    if ranks.is_main:
        if not args.data:
            launch([here / "collect.py", "--env", args.env, "--out", data, "--seed", args.seed, *fresh])
        if not args.expmodel:
            flags = ["--model", args.model, "--quantize", args.quantize, "--lora-rank", args.lora_rank, "--no-report-variants", *(["--no-judged"] if args.naive_reward else [])]
            launch([here / "train_expmodel.py", "--data", data, "--out", expmodel, "--seed", args.seed, *flags, *fresh])
    ranks.barrier()
    return data, expmodel


def launch(command: list) -> None:
    """Another script in its own process, outside this torchrun; its failure or Ctrl-C ends this one too, after it has saved."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    running: list[subprocess.Popen] = []
    before = {signum: signal.signal(signum, lambda signum, _: [child.send_signal(signum) for child in running]) for signum in (signal.SIGINT, signal.SIGTERM)}
    running.append(subprocess.Popen([sys.executable, *map(str, command)], env=environment, start_new_session=True))   # else a terminal's Ctrl-C would reach it twice
    code = running[0].wait()
    for signum, handler in before.items():
        signal.signal(signum, handler)
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def first_weights(args: Args, expmodel: Path, ranks):
    """Policy and tokenizer before imitation. The tiny policy starts from the experience model's weights (pre-training on offline transitions)."""
    init = args.init if args.init != "auto" else ("expmodel" if args.model in SIZES else "model")
    if init == "model":
        return load_model(args.model, "auto" if args.lora_rank else "float32", args.quantize, args.lora_rank, device=str(ranks.device), seed=args.seed)
    model, tokenizer = load_model(expmodel / "model", quantize=args.quantize, device=str(ranks.device))
    if init == "scratch":
        model = create_tiny(tokenizer, args.model, args.seed)
    return model.to(ranks.device), tokenizer


def flat(tensors: list[torch.Tensor], device) -> torch.Tensor:
    return torch.cat(tensors).to(device) if tensors else torch.empty(0, device=device)


# ---- imitation ----------------------------------------------------------------------------------------------------------------------------------

def imitation_rows(args: Args, policy: Policy, demos: list[Episode], epoch: int) -> list[Row]:
    """The demonstrations as token rows; where the rules know how, things get other names in half of them, anew in each epoch, so that the policy of few
    homes learns to look for things, not where they were."""
    rules, rng = make_rules(args.env), run.rng(args.seed, "imitation names", epoch)

    changes = ((e, rules.renaming(rng, "", True, e.task.start)) for e in demos)
    return [Row(s.ids, s.mask) for e, change in changes for s in imitation_streams(policy, renamed(e, change) if change else e, rules.said)]


def imitate(args: Args, policy: Policy, episodes: list[Episode], ranks, log) -> None:
    """Behaviour cloning of the imperfect demonstrator, mistakes included: it must leave entropy for RL to work with. Interrupted, it begins again."""
    demos = [e for e in episodes if e.source in (*make_rules(args.env).IMITATED, "imported")]
    rng = run.rng(args.seed, "imitation")
    demos = [demos[i] for i in rng.permutation(len(demos))[:args.imitation_episodes]]
    rows = imitation_rows(args, policy, demos, 0)
    if not rows:
        return
    optimizers = make_optimizers(policy.model, args.lr * IMITATION_LR_FACTOR, from_scratch=args.model in SIZES)
    per_step, done, epochs = 16, 0, make_rules(args.env).IMITATION_EPOCHS
    steps = epochs * -(-len(rows) // per_step)
    with run.graceful(log) as stop, run.progress(epochs * len(rows), "imitation") as bar:
        for epoch in range(epochs):
            rows = imitation_rows(args, policy, demos, epoch) if epoch else rows
            order = run.rng(args.seed, "imitation", epoch).permutation(len(rows))
            for start in range(0, len(rows), per_step):
                batch = [rows[i] for i in order[start:start + per_step]][ranks.rank::ranks.world]
                total = ranks.all_reduce_sum(float(sum(sum(r.mask) for r in batch)))
                for indices in even_micro_batches(batch, args.micro_batch_tok, ranks):
                    logp_N, _, _ = row_logps(policy.model, [batch[i] for i in indices], with_entropy=False)
                    loss = losses.aggregate(losses.sft_loss(logp_N), total / ranks.world)
                    losses.check_finite(loss, f"imitation loss of epoch {epoch}, rows from {start}")
                    loss.backward()
                set_rate(optimizers, done, steps, warmup=20, floor=0.0)
                step_all(policy.model, optimizers)
                done += 1
                bar.update(per_step)
                if stop.agreed(ranks):
                    raise SystemExit(130)
    log.say(f"imitated {len(demos)} episodes of players that make mistakes ({sum(e.success for e in demos) / len(demos):.0%} of them successful)")


# ---- reinforcement learning ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Batch:
    """The rows of one iteration, flat over trained tokens (suffix _N), with what the losses need."""
    rows: list[Row]
    advantage: list[torch.Tensor]      # per row, over its trained tokens
    returns: list[torch.Tensor]        # PPO: return of the turn each token belongs to
    first: list[torch.Tensor]          # 1 at the first token of a turn: where the value head is trained


def with_outcome(episodes: list[Episode]) -> list[Episode]:
    """The episodes that teach: where a dream broke off by an answer that cannot be read, nobody knows what the actions were worth (ours). Counted as a failure, they
    would teach the policy to keep away from what the experience model cannot write, such as a button's page."""
    return [e for e in episodes if e.stop != "malformed"]


def turns(stream: Stream) -> list[tuple[int, int]]:
    """(first, end) of each turn among the trained tokens of a stream; equal where the context left no room for an action."""
    return list(zip([0, *stream.turn_ends[:-1]], stream.turn_ends))


def turn_values(policy: Policy, head, rows: list[Row], micro_batch_tok: int, ranks) -> list[torch.Tensor]:
    """V at every trained token of every row."""
    values: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    with torch.no_grad():
        for indices in even_micro_batches(rows, micro_batch_tok, ranks):
            part = [rows[i] for i in indices]
            hidden_NH = row_logps(policy.model, part, with_entropy=False, with_hidden=True)[2]
            for i, value_N in zip(indices, head(hidden_NH.float())[:, 0].split([sum(r.mask) for r in part])):
                values[i] = value_N
    return values


def make_batch(args: Args, policy: Policy, head, episodes: list[Episode], groups: list[str], ranks) -> Batch:
    """Episodes -> rows with a per-token advantage: GRPO's group-normalised return (Eq. 3), or PPO's GAE over turns (Eq. 2); minus the invalid penalty."""
    streams = [(e, s) for e in episodes for s in e.streams if any(s.mask)]
    rows = [Row(s.ids, s.mask) for _, s in streams]
    of_episode = dict(zip((e.id for e in episodes), losses.group_advantages([e.reward for e in episodes], groups, args.normalize_std).tolist()))
    advantage, returns, first = [], [], []
    gae: dict[str, tuple] = {}
    if args.algo == "ppo":
        values = {id(s): value_N for (_, s), value_N in zip(streams, turn_values(policy, head, rows, args.micro_batch_tok, ranks))}
        for episode in episodes:
            starts = [float(values[id(s)][a]) if b > a else 0.0 for s in episode.streams for a, b in turns(s)]
            reward = [step.reward - args.invalid_penalty * (not step.valid) for step in episode.steps]
            gae[episode.id] = losses.gae(reward, starts, GAMMA, LAM)
    for episode in episodes:
        turn = 0
        for stream in episode.streams:
            per_token, per_return, at_first = [], [], []
            for start, end in turns(stream):
                penalty = args.invalid_penalty * (not episode.steps[turn].valid)
                value = float(gae[episode.id][0][turn]) if gae else of_episode[episode.id] - penalty
                per_token += [value] * (end - start)
                per_return += [float(gae[episode.id][1][turn]) if gae else 0.0] * (end - start)
                at_first += ([1.0] + [0.0] * (end - start))[:end - start]
                turn += 1
            if any(stream.mask):
                advantage.append(torch.tensor(per_token))
                returns.append(torch.tensor(per_return))
                first.append(torch.tensor(at_first))
    if args.algo == "grpo" and make_rules(args.env).LOSS_MEAN == "episode":      # each episode weighs the same: failures are several times as long as successes
        tokens = defaultdict(int)
        for (episode, _), row in zip(streams, rows):
            tokens[episode.id] += sum(row.mask)
        mean = sum(tokens.values()) / max(1, len(tokens))
        advantage = [a * mean / tokens[episode.id] for (episode, _), a in zip(streams, advantage)]
    if args.algo == "ppo":                       # PPO whitens the advantages of the whole batch
        every = torch.tensor(ranks.gather(flat(advantage, "cpu").tolist()))
        advantage = [(a - every.mean()) / (every.std() + 1e-6) for a in advantage]
    return Batch(rows, advantage, returns, first)


def old_and_reference(policy: Policy, reference, rows: list[Row], micro_batch_tok: int, ranks) -> tuple[list, list]:
    """Log-probs of the sampled tokens by the trainer (not the sampler: their difference is rounding, and is logged) and by the reference."""
    old: list = [None] * len(rows)
    ref: list = [None] * len(rows)
    with torch.no_grad():
        for indices in even_micro_batches(rows, micro_batch_tok, ranks):
            part = [rows[i] for i in indices]
            sizes = [sum(r.mask) for r in part]
            for kept, logp_N in ((old, row_logps(policy.model, part, TEMPERATURE, with_entropy=False)[0]), (ref, reference_logps(policy.model, reference, part, TEMPERATURE))):
                for i, piece in zip(indices, logp_N.split(sizes)):
                    kept[i] = piece
    return old, ref


def update(args: Args, policy: Policy, head, reference, optimizer, batch: Batch, sampled: list[list[float]], iteration: int, ranks) -> dict:
    """--updates optimizer steps over the rows. The divisor of each loss is the global count of its trained tokens."""
    device = ranks.device
    old, ref = old_and_reference(policy, reference, batch.rows, args.micro_batch_tok, ranks)
    sums = ["loss", "kl_ref_sum", "entropy_sum", "clipped_sum", "tokens"] + ["value_loss"] * (head is not None)
    stats: dict[str, float] = defaultdict(float, {"grad_norm": 0.0} | dict.fromkeys(sums, 0.0))
    stats["sampler_gap"] = max((float((o.cpu() - torch.tensor(s)).abs().max()) for o, s in zip(old, sampled) if len(s)), default=0.0)
    order = run.rng(args.seed, "minibatch", iteration, ranks.rank).permutation(len(batch.rows))
    old_value = turn_values(policy, head, batch.rows, args.micro_batch_tok, ranks) if head is not None else None
    for mb in np.array_split(order, args.updates):
        total = ranks.all_reduce_sum(float(sum(sum(batch.rows[i].mask) for i in mb))) / ranks.world
        turns = ranks.all_reduce_sum(float(sum(batch.first[i].sum() for i in mb))) / ranks.world
        if not total:                            # fewer rows than --updates
            continue
        for local in even_micro_batches([batch.rows[i] for i in mb], args.micro_batch_tok, ranks):
            chosen = [mb[i] for i in local]
            logp_N, entropy_N, hidden_NH = row_logps(policy.model, [batch.rows[i] for i in chosen], TEMPERATURE, with_hidden=head is not None)
            adv_N = flat([batch.advantage[i] for i in chosen], device)
            old_N, ref_N = flat([old[i] for i in chosen], device), flat([ref[i] for i in chosen], device)
            loss_N, seen = losses.policy_loss(logp_N, old_N, adv_N, args.clip_low, args.clip_high, DUAL_CLIP)
            kl_N = losses.kl_estimate(logp_N, ref_N, args.kl)
            loss = losses.aggregate(loss_N + args.kl_coef * kl_N - args.entropy_coef * entropy_N, total)
            if head is not None:
                first_N, return_N = flat([batch.first[i] for i in chosen], device), flat([batch.returns[i] for i in chosen], device)
                value_N, _ = losses.value_loss(head(hidden_NH.float())[:, 0], flat([old_value[i] for i in chosen], device), return_N, VALUE_CLIP)
                loss = loss + VALUE_COEF * losses.aggregate(value_N * first_N, turns)
                stats["value_loss"] += float((value_N * first_N).sum().detach()) / max(1.0, turns * args.updates)
            losses.check_finite(loss, f"policy loss of iteration {iteration}, rows {chosen[:8]}")
            loss.backward()
            stats["loss"] += float(loss.detach()) / args.updates
            stats["kl_ref_sum"] += float(kl_N.detach().sum())
            stats["entropy_sum"] += float(entropy_N.detach().sum())
            stats["clipped_sum"] += float(seen["clipped_sum"])
            stats["tokens"] += len(logp_N)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if head is not None and ranks.world > 1:
            for p in head.parameters():
                torch.distributed.all_reduce(p.grad, op=torch.distributed.ReduceOp.AVG if device.type == "cuda" else torch.distributed.ReduceOp.SUM)
                p.grad /= 1 if device.type == "cuda" else ranks.world
        stats["grad_norm"] += clip_grad_norm(parameters, 1.0) / args.updates
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if head is not None:
        values, returns, firsts = flat(old_value, device), flat(batch.returns, device), flat(batch.first, device) > 0
        stats["explained_variance"] = float(losses.explained_variance(values[firsts], returns[firsts]))
    total = dict(zip(sums, ranks.all_reduce_sum([stats.pop(n) for n in sums])))
    per_token = {name: total[f"{name}_sum"] / max(1.0, total["tokens"]) for name in ("kl_ref", "entropy", "clipped")}
    return {**stats, **{n: total[n] / ranks.world for n in ("loss", "value_loss") if n in total}, "kl_ref": per_token["kl_ref"], "entropy": per_token["entropy"],
            "clip_fraction": per_token["clipped"], "trained_tok": total["tokens"]}


# ---- evaluation ---------------------------------------------------------------------------------------------------------------------------------

def evaluate(policy: Policy, world, world_name: str, tasks: list[Task], max_steps: int, temperature: float, rules, ranks, name: str) -> tuple[dict, list[Episode]]:
    """All ranks play a share of the tasks; the report is over all of them."""
    policy.sampler.reset()
    with gathered(policy.model):
        episodes = rollout(policy, world, tasks[ranks.rank::ranks.world], max_steps, temperature, f"{name}-r{ranks.rank}", world_name)
    every = everyones(episodes, ranks)
    return policy_report(every, rules), every


def everyones(episodes: list[Episode], ranks) -> list[Episode]:
    """The episodes of all ranks, without their token streams where they come from another process."""
    return [episode_from_json(record) for record in ranks.gather([to_json(e) for e in episodes])] if ranks.world > 1 else episodes


def both_worlds(policy: Policy, env, dream, tasks: list[Task], rules, ranks, name: str) -> tuple[dict, dict]:
    """Success on held-out tasks: real greedy, real sampled, dream sampled; the reports and the episodes by these names."""
    found, episodes = {}, {}
    for key, world, temperature in (("real_greedy", env, 0.0), ("real_sampled", env, TEMPERATURE), ("dream_sampled", dream, TEMPERATURE)):
        found[key], episodes[key] = evaluate(policy, world, key.split("_")[0], tasks, env.max_steps, temperature, rules, ranks, f"{name}-{key}")
    return found, episodes


# ---- the run --------------------------------------------------------------------------------------------------------------------------------------

def starting_policy(args: Args, ranks, out: Path, expmodel: Path, episodes: list[Episode], log) -> Policy:
    """The imitation policy: from --imitation or OUT/imitation, where it is made first if it is missing. Loaded in either case, not sharded yet."""
    form = args.env, args.model in SIZES, run.derive_seed(args.seed, "policy", ranks.rank)
    folder = Path(args.imitation or out / "imitation")
    kept = {k: v for k, v in asdict(args).items() if k in ("env", "model", "quantize", "lora_rank", "init", "imitation_episodes", "seed")}
    found = run.latest_checkpoint(folder, "model", ranks)
    if args.imitation and not found:
        raise ValueError(f"--imitation {folder}: found no policy there; expected the folder imitation/ of an earlier run")
    if found:
        run.check_meta(run.load_meta(found).get("imitation", {}), {k: v for k, v in kept.items() if k != "seed" or not args.imitation}, found)
    else:
        model, tokenizer = first_weights(args, expmodel, ranks)
        policy = policy_for(shard(model), tokenizer, *form)
        if args.imitation_episodes:
            imitate(args, policy, episodes, ranks, log)
        found = run.save_checkpoint(folder, "model", lambda path: save_model(policy.model, tokenizer, path), {"imitation": kept}, ranks)
    model, tokenizer = load_model(found, quantize=args.quantize, device=str(ranks.device))
    return policy_for(model, tokenizer, *form)


@dataclass
class State:
    """Where the run is: what a checkpoint holds beside weights, optimizer, curriculum and replay buffer."""
    iteration: int = 0
    dream_transitions: int = 0
    real_transitions: int = 0
    evaluations: list = None           # [{iteration, dream_transitions, real_transitions, real_greedy, real_sampled, dream_sampled}]


def next_world(args: Args, state: State) -> str:
    """'dream', 'real', or '' when the run is over: dream iterations first, then real transitions (S2R); --world real has only the latter."""
    if args.algo == "sft":
        return ""
    if args.world == "dream" and state.iteration < args.iterations:
        return "dream"
    return "real" if state.real_transitions < args.real_transitions else ""


def start_over(args: Args, out: Path, ranks) -> None:
    """--fresh: what an earlier run left must not be taken for this one's. A folder given by --imitation is kept."""
    for folder, name in ((out, "policy"), *([] if args.imitation else [(out / "imitation", "model")])):
        found = run.latest_checkpoint(folder, name, ranks)
        if found and ranks.is_main:
            shutil.rmtree(found)
    ranks.barrier()


def cut_episodes(path: Path, last: int) -> None:
    """Drop the episodes of iterations after `last`, which a resumed run plays again; their ids begin with world and iteration, 'dream-12-...'."""
    run.write_jsonl(path, [], append=True)       # makes the file, and mends a half line that a kill left
    records = [json.loads(line) for line in path.read_text().splitlines()]
    run.write_jsonl(path, [r for r in records if int(r["id"].split("-")[1]) <= last], append=False)


def main() -> None:
    args = run.parse(Args)
    args.lr = args.lr or (3e-4 if args.model in SIZES else 1e-5 if args.lora_rank else 1e-6)
    ranks, out = run.start(args.seed), Path(args.out)
    if args.fresh:
        start_over(args, out, ranks)
    data, expmodel = prepare(args, ranks)
    rules, data_meta = make_rules(args.env), run.data_meta(data)
    collected = data_meta["settings"]
    env = env_of(collected, run.spare_cores(ranks))
    run.check_meta(data_meta["environment"], env.describe(), data / "meta.json", f"collect again, or set ${args.env.upper()}_DATA as it was")
    run.check_meta(run.load_meta(expmodel / "model"), {"environment": env.describe(), "finished": True}, expmodel, "train the experience model on this data to its end")
    offline, train_tasks, test_tasks = read_episodes(data / "train.jsonl"), read_tasks(data / "tasks_train.jsonl"), read_tasks(data / "tasks_test.jsonl")
    eval_tasks = [test_tasks[i] for i in run.rng(0, "evaluation").permutation(len(test_tasks))[:args.eval_tasks]]
    heldout = [e for e in read_episodes(data / "heldout.jsonl") if e.source != "relabelled"][:40]

    kept = {k: v for k, v in asdict(args).items() if k not in ("out", "fresh", "micro_batch_tok", "iterations", "real_transitions", "eval_every")}
    resume = run.latest_checkpoint(out, "policy", ranks)
    if resume:
        run.check_meta(run.load_meta(resume).get("settings", {}), kept, resume)
        run.check_meta(run.load_meta(resume), {"environment": env.describe()}, resume)
    state = State(**run.load_meta(resume)["state"]) if resume else State(evaluations=[])
    log = run.Log(out, ranks, resume_step=state.iteration if state.evaluations else -1)
    if ranks.is_main:
        cut_episodes(out / "episodes.jsonl", state.iteration - 1)
        cut_episodes(out / "evaluations.jsonl", state.iteration if state.evaluations else -1)
        (out / "result.json").unlink(missing_ok=True)    # it says that the run is finished
    log.say(f"{env.label}; {len(train_tasks)} training tasks, {len(eval_tasks)} held-out tasks for evaluation; "
            f"{args.tasks} tasks x {args.rollouts} rollouts = {args.tasks * args.rollouts} episodes an iteration, {args.updates} optimizer steps each")
    policy = starting_policy(args, ranks, out, expmodel, offline, log)
    dream = load_dream(expmodel, rules, ranks.device, seed=run.derive_seed(args.seed, "dream", ranks.rank), replay=resume / "replay" if resume else None)
    if args.model in SIZES:
        check_tokenizer(policy.tokenizer, dream.tokenizer)
    reference = make_reference(policy.model)
    if resume:
        load_weights(policy.model, resume)
    policy.model, reference = shard(policy.model), shard(reference)
    head = torch.nn.Linear(policy.model.config.hidden_size, 1).to(ranks.device) if args.algo == "ppo" else None
    groups = [{"params": trainable_parameters(policy.model), "lr": args.lr}]
    if head is not None:
        torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
        groups.append({"params": list(head.parameters()), "lr": args.lr * VALUE_LR_FACTOR})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    tasks_by_id = {t.id: t for t in train_tasks}
    curriculum = Curriculum(list(tasks_by_id), lam=args.lam_generated, uniform=not args.curriculum)
    check = TaskCheck(rules, train_tasks, [s.state for e in offline for s in e.steps])
    if resume:
        load_run(resume, ranks, optimizer, head, curriculum, tasks_by_id, policy, dream)
        check.known |= {t.text for t in tasks_by_id.values()}
    timer = run.Timer()

    def save() -> None:
        def write(path: Path) -> None:
            save_model(policy.model, policy.tokenizer, path)
            save_run(path, ranks, optimizer, head, curriculum, tasks_by_id, policy, dream)
        run.save_checkpoint(out, "policy", write, {"settings": kept, "state": asdict(state), "environment": env.describe()}, ranks)

    def evaluate_now(final: bool = False) -> None:
        dream.forget()
        whole = final or (not state.evaluations and not args.imitation)      # a policy that was handed in has been evaluated where it was made
        tasks = eval_tasks if whole else eval_tasks[:EVAL_TASKS_ON_THE_WAY]
        if not state.evaluations and not args.imitation:         # on the tasks RL will use: a dream that is easier than the world teaches the wrong thing
            order = run.rng(0, "calibration").permutation(len(train_tasks))[:min(EVAL_TASKS_ON_THE_WAY, args.eval_tasks)]
            known = [train_tasks[i] for i in order]
            same = [evaluate(policy, w, n, known, env.max_steps, TEMPERATURE, rules, ranks, f"calibration-{n}")[0] for n, w in (("real", env), ("dream", dream))]
            log.step("calibration", state.iteration, {f"{n}/{k}": r[k] for n, r in zip(("real", "dream"), same) for k in ("n", "success", "low", "high")}, show=[])
            log.say(f"calibration: the same policy on {same[0]['n']} training tasks, sampled: real {same[0]['success']:.3f}, dream {same[1]['success']:.3f}")
        found, episodes = both_worlds(policy, env, dream, tasks, rules, ranks, f"eval-{state.iteration}")
        errors = experience_report(dream, heldout) if ranks.is_main else {}
        searches = {k: search_report(episodes[k], rules) for k in ("real_sampled", "dream_sampled")}
        state.evaluations.append({"iteration": state.iteration, "dream_transitions": state.dream_transitions, "real_transitions": state.real_transitions, **found})
        flat = {f"{world}/{k}": v for world, report in found.items() for k, v in report.items() if k not in ("n", "transitions", "stops", "judge")}
        log.step("evaluation", state.iteration, {**flat, "real_stops": found["real_sampled"]["stops"], "dream_stops": found["dream_sampled"]["stops"],
                 "judge": found["dream_sampled"]["judge"], "searches_with_a_fit": searches, "tasks": len(tasks), "dream_transitions": state.dream_transitions,
                 "real_transitions": state.real_transitions, "dream_exact": errors.get("exact", {}).get("share"), "synthetic_share": dream.buffer.share_synthetic()}, show=[])
        real, imagined = found["real_sampled"], found["dream_sampled"]
        log.say(f"evaluation at {state.iteration}: real sampled {real['success']:.3f} [{real['low']:.3f}, {real['high']:.3f}]  greedy {found['real_greedy']['success']:.3f}  "
                f"dream sampled {imagined['success']:.3f}  judge FP {imagined['judge']['FP']} FN {imagined['judge']['FN']}  ({len(tasks)} held-out tasks)")
        if alarm := gap_alarm(state.evaluations, run.read_json(expmodel / "report.json")["full"]):
            log.say(f"GAP ALARM: {alarm}")
            log.step("alarm", state.iteration, {"alarm": alarm}, show=[])
        if ranks.is_main:
            run.write_jsonl(out / "evaluations.jsonl", [to_json(e) for part in episodes.values() for e in part[:20]], append=True)

    total = args.iterations * (args.world == "dream") * (args.algo != "sft")
    with run.graceful(log) as stop, run.progress(total + round(args.real_transitions / 700), "reinforcement learning") as bar:
        if not resume:
            save()                               # a save that cannot work fails in the first minute
        if not state.evaluations:
            evaluate_now()
            save()
        bar.update(state.iteration)
        asked = stop.agreed(ranks)
        while not asked and (world := next_world(args, state)):
            values = iterate(args, state, world, ranks, policy, head, reference, optimizer, env, dream, curriculum, tasks_by_id, check, rules, timer, out)
            log.step("rl", state.iteration, values, show=["world", "success", "entropy", "kl_ref", "zero_variance", "rollout_s", "update_s"])
            bar.update(1)
            over = not next_world(args, state)
            if over or state.iteration % args.eval_every == 0 or next_world(args, state) != world:
                evaluate_now(final=over or next_world(args, state) != world)
            asked = stop.agreed(ranks)
            if asked or over or state.iteration % SAVE_EVERY == 0:
                save()
    if next_world(args, state):
        raise SystemExit(130)
    if ranks.is_main:
        finish(args, state, out, data, expmodel, env, log)
    log.close()
    ranks.close()


def iterate(args: Args, state: State, world: str, ranks, policy: Policy, head, reference, optimizer, env, dream, curriculum: Curriculum,
            tasks_by_id: dict[str, Task], check: TaskCheck, rules, timer, out: Path) -> dict:
    """One RL iteration: generate tasks now and then, pick, roll out, update, and feed curriculum and replay buffer. Returns the values to log."""
    made = {}
    dream.forget()                               # rounding must not depend on what an uninterrupted run would still hold in memory
    if world == "dream" and args.lam_generated and state.iteration % GENERATE_EVERY == GENERATE_EVERY - 1:
        with timer("tasks"), gathered(dream.model):
            made = generate(args, state, ranks, dream, curriculum, tasks_by_id, check)
    n = args.tasks * (1 if args.algo == "grpo" else args.rollouts)
    ids = curriculum.pick(n, run.rng(args.seed, "pick", state.iteration), lam=args.lam_generated if world == "dream" else 0.0)
    repeated = [tasks_by_id[i] for i in ids for _ in range(args.rollouts if args.algo == "grpo" else 1)]
    policy.sampler.reset(), policy.model.eval()
    per_rank = -(-len(ids) // ranks.world) * (args.rollouts if args.algo == "grpo" else 1)
    mine = repeated[ranks.rank * per_rank:(ranks.rank + 1) * per_rank]     # whole groups stay on one rank
    before = policy.sampler.decode_tok, policy.sampler.prefill_tok, dream.sampler.decode_tok
    with timer("rollout"), gathered(policy.model):
        episodes = rollout(policy, env if world == "real" else dream, mine, env.max_steps, TEMPERATURE, f"{world}-{state.iteration}-r{ranks.rank}", world)
    with timer("update"):
        policy.model.train()
        known = with_outcome(episodes)
        batch = make_batch(args, policy, head, known, [e.task.id for e in known], ranks)
        sampled = [s.logps for e in known for s in e.streams if any(s.mask)]
        stats = update(args, policy, head, reference, optimizer, batch, sampled, state.iteration, ranks)
    every = everyones(episodes, ranks)
    zero_variance = feed_curriculum(args, curriculum, [[e.task.id, e.reward] for e in with_outcome(every)], state.iteration, dream, tasks_by_id)
    if world == "dream" and args.enrich:
        with timer("replay"):                    # the same on every rank
            fill_buffer(dream.buffer, dream.encoder, rules, [replace(e, steps=e.steps[:-1] if e.stop == "malformed" else e.steps) for e in every])
    if ranks.is_main:
        run.write_jsonl(out / "episodes.jsonl", [to_json(e) for e in every], append=True)
    report = policy_report(every, rules)
    used = report["transitions"]
    state.iteration += 1
    state.dream_transitions += used * (world == "dream")
    state.real_transitions += used * (world == "real")
    seconds = timer.take()
    decoded = policy.sampler.decode_tok - before[0], dream.sampler.decode_tok - before[2]
    return {"world": world, "success": report["success"], "zero_variance": zero_variance, **stats, **{f"stop/{k}": v for k, v in report["stops"].items()},
            **{f"judge/{k}": v for k, v in report["judge"].items()}, "length": report["length"], "invalid": report["invalid"], "transitions": used,
            "dream_transitions": state.dream_transitions, "real_transitions": state.real_transitions, "malformed": dream.counts["malformed"],
            "retried": dream.counts["retried"], "refuted": dream.counts["refuted"],
            "cut_streams": policy.counts["cut_streams"], "unfinished_actions": policy.counts["unfinished_actions"], **curriculum.summary(),
            **{f"tasks/{k}": v for k, v in made.items()}, **seconds,
            "rollout_tok_per_s": sum(decoded) / max(1e-9, seconds.get("rollout_s", 0)), "update_tok_per_s": stats["trained_tok"] / max(1e-9, seconds.get("update_s", 0)),
            "replay": len(dream.buffer), "synthetic_share": dream.buffer.share_synthetic()}


def feed_curriculum(args: Args, curriculum: Curriculum, outcomes: list, iteration: int, dream, tasks_by_id: dict[str, Task]) -> float:
    """Eq. 7 per group: GRPO's own groups, or for PPO clusters of tasks by the embedding of their texts. Returns the share of groups without variance."""
    if not outcomes:                             # every dream broke off
        return 0.0
    groups: dict = defaultdict(list)
    if args.algo == "grpo":
        for task_id, reward in outcomes:
            groups[task_id].append(reward)
        for task_id, rewards in groups.items():
            curriculum.update(task_id, rewards, iteration)
    else:
        labels = cluster(dream.encoder([tasks_by_id[i].text for i, _ in outcomes]), max(2, len(outcomes) // args.rollouts), run.rng(args.seed, "cluster", iteration))
        curriculum.update_clusters([i for i, _ in outcomes], [r for _, r in outcomes], dict(zip((i for i, _ in outcomes), labels.tolist())), iteration)
        for (_, reward), label in zip(outcomes, labels):
            groups[int(label)].append(reward)
    return sum(len(set(rewards)) == 1 for rewards in groups.values()) / len(groups)


def generate(args: Args, state: State, ranks, dream, curriculum: Curriculum, tasks_by_id: dict[str, Task], check: TaskCheck) -> dict:
    """High-variance tasks become seeds; M_task writes variations (Eq. 6). Rank 0 writes, all ranks take the same tasks."""
    made, counts = [], {}
    if ranks.is_main:
        seeds = [tasks_by_id[i] for i in curriculum.seeds(args.tasks)]
        made, counts = write_tasks(dream, args.env, seeds, 4, check, f"generated-{state.iteration}")
    for record in ranks.broadcast_json([asdict(t) for t in made]):
        task = Task(**record)
        tasks_by_id[task.id] = task
        curriculum.add_generated(task.id, task.parent)
    return counts


def save_run(path: Path, ranks, optimizer, head, curriculum, tasks_by_id, policy: Policy, dream) -> None:
    """Everything but the weights; tensors with torch.save, read back with weights_only."""
    state = {"optimizer": optimizer.state_dict(), "head": head.state_dict() if head is not None else {}, "random": run.get_random_state()}
    torch.save(state, path / f"training-{ranks.rank}.pt")
    samplers = {"policy": policy.sampler.get_state(), "dream": dream.sampler.get_state(), "dream_started": dream.started, "counts": policy.counts, "dream_counts": dream.counts}
    run.write_json(path / f"samplers-{ranks.rank}.json", samplers)
    if ranks.is_main:
        dream.buffer.save(path / "replay")
        run.write_json(path / "curriculum.json", {"curriculum": curriculum.get_state(), "generated": [asdict(t) for t in tasks_by_id.values() if t.generated]})


def load_run(path: Path, ranks, optimizer, head, curriculum, tasks_by_id, policy: Policy, dream) -> None:
    saved = len(list(path.glob("training-*.pt")))
    if saved != ranks.world:
        raise ValueError(f"{path}: found the state of {saved} ranks, expected {ranks.world}; continue with as many, or use --fresh or --out another folder")
    state = torch.load(path / f"training-{ranks.rank}.pt", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    run.set_random_state(state["random"])
    if head is not None:
        head.load_state_dict(state["head"])
    samplers, kept = run.read_json(path / f"samplers-{ranks.rank}.json"), run.read_json(path / "curriculum.json")
    policy.sampler.set_state(samplers["policy"]), dream.sampler.set_state(samplers["dream"])
    dream.started, policy.counts = samplers["dream_started"], samplers["counts"]
    dream.counts.update(samplers["dream_counts"])
    tasks_by_id.update({t["id"]: Task(**t) for t in kept["generated"]})
    curriculum.set_state(kept["curriculum"])


def finish(args: Args, state: State, out: Path, data: Path, expmodel: Path, env, log) -> None:
    """The table and the picture a user ends with."""
    def row(name: str, found: dict) -> dict:
        cells = {k: f"{found[k]['success']:.3f} [{found[k]['low']:.3f}, {found[k]['high']:.3f}]" for k in ("real_greedy", "real_sampled", "dream_sampled")}
        return {"policy": name, **cells, "RL transitions dream / real": f"{found['dream_transitions']:,} / {found['real_transitions']:,}", "tasks": found["real_sampled"]["n"]}
    last_dream = [e for e in state.evaluations if e["dream_transitions"] and not e["real_transitions"]][-1:]
    rows = [row("imitation (before)", state.evaluations[0]), *(row("after the dream", e) for e in last_dream)]
    rows += [row("after real RL", e) for e in state.evaluations[-1:] if e["real_transitions"]]
    run.write_json(out / "result.json", {"environment": env.describe(), "settings": asdict(args), "evaluations": state.evaluations, "rows": rows})
    picture = plots.training_curve(out)
    log.say(f"\n{env.label}, held-out tasks, 95 % Wilson intervals\n{run.summary_table(rows)}\n")
    log.say(f"data {data}   experience model {expmodel} (report.json)   imitation {args.imitation or out / 'imitation'}   policy {out / 'policy'}\n"
            f"metrics {out / 'metrics.jsonl'}   episodes {out / 'episodes.jsonl'}   picture {picture}\n"
            f"next: python evaluate.py --env {args.env} --policy {out / 'policy'} --play 10\n"
            f"      tensorboard --logdir {out}   |   python train_policy.py --env {args.env} --real-transitions 5000")


if __name__ == "__main__":
    run.main(main)
