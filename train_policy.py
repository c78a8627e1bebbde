"""The main job: an agent learns by reinforcement learning inside the experience model (DreamGym, arXiv
2511.03773).

    python train_policy.py --env webshop   # everything, from nothing, minutes on a CPU
    python train_policy.py --env webshop --real-transitions 5000          # dream, then real: S2R
    python train_policy.py --env webshop --algo ppo --out out/ppo         # PPO instead of GRPO
    python train_policy.py --env webshop --world real --real-transitions 30000 --out out/real
    python train_policy.py --env logs --data my_episodes.jsonl            # recorded episodes and no world
    torchrun --nproc-per-node 8 train_policy.py --env webshop --model Qwen/Qwen2.5-1.5B-Instruct --out out/q

`train` is the loop, `iterate` one step of it. What is missing is made first (dreamgym/prepare.py): data by
collect.py, the experience model by train_expmodel.py, and a policy that imitates a few demonstrations
(dreamgym/imitation.py). RL in the dream uses predicted rewards alone, but for --dream.
"""
import gc
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace

from dreamgym import checkpoint, rl, run, summary, tiny
from dreamgym.curriculum import Curriculum, cluster
from dreamgym.envs.base import Environment, environment_class, out_folder
from dreamgym.episode import Episode, StopReason, Task, read_episodes, read_tasks, recorded, to_json
from dreamgym.evaluation import alarm, failed_probes, policy_report, with_interval
from dreamgym.experience_model import ExperienceModel, fill_buffer
from dreamgym.flags import BelowOne, Count, Natural, Share, Weight
from dreamgym.imitation import (LEFT_DREAM, find_imitation, imitation_checkpoint, load_reference,
                                starting_policy)
from dreamgym.model import save_model, trainable_parameters, unsharded
from dreamgym.offline import environment_of
from dreamgym.prepare import check_model, prepare, read_splits, start_log
from dreamgym.prompts import Prompts
from dreamgym.rollout import Policy, rollout
from dreamgym.served_model import check_server, open_experience_model
from dreamgym.task_generation import Known, write_tasks
from dreamgym.teacher import is_url
from dreamgym.worlds import World, check_options, parse_options


@dataclass
class Args:
    env: str = "webshop"  # webshop | alfworld | webarena | logs | package.module:Class | path/to/file.py
    out: str = ""                      # folder of this run; what is missing is made there (default: out/ENV)
    expmodel: str = ""                 # experience model: folder, or URL ("": OUT/expmodel, made if missing)
    expmodel_name: str = ""            # the model's name at that server
    expmodel_folder: str = ""          # the folder it was exported from ("": it is untrained)
    expmodel_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the server's key
    data: str = ""  # folder of collect.py, or a JSONL file of episodes (default: OUT/data, made when missing)
    imitation: str = ""  # folder of a policy to start from (default: OUT/imitation, made when missing)
    model: str = "scratch:64x3"        # path or hub name of a causal LM, or scratch:HIDDENxLAYERS
    quantize: Literal["none", "nf4"] = "none"      # nf4: 4-bit weights, trained through --lora-rank
    lora_rank: Natural = 0  # rank of LoRA on all linear layers, which wants 10 times the rates (0: full)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of computing (auto: bfloat16 on a GPU)
    gradient_checkpointing: bool = False  # compute activations again in the backward: less memory, slower
    slots: Count = 128                 # rows decoded at once on a rank (memory of the KV cache)
    init: Literal["model", "expmodel"] = "model"  # weights before imitation: --model's or --expmodel's
    # <think> and <action> | a line of thought, action | the words of its element, action | action
    policy_format: Literal["tags", "thought", "element", "action"] = "tags"
    system_prompts: bool = True        # say in a system prompt what the agent is and which actions there are
    policy_context: Count = 4608       # tokens of a policy's context (verl-agent: 4,096 + 512)
    max_action_tok: Count = 512        # tokens of one answer (verl-agent: 512)
    task_last: bool = False            # a turn shows the task after the state, not before it (ours)
    tried_actions: Natural = 8         # most actions listed as tried before in this state (0: none; ours)
    imitation_episodes: Natural = 0    # successful demonstrations (0: none, as in the paper)
    imitation_epochs: Natural = 3      # passes over them
    imitation_lr: Weight = 1e-5        # learning rate of imitation
    imitation_muon_lr: Weight = 0.0    # ... of Muon on layer matrices (from-scratch models)
    imitation_epsilon: Weight = 1e-8   # ... epsilon of AdamW
    imitation_rows: Count = 16         # rows per optimizer step of imitation
    rename_share: Share = 0.0          # share of demonstrations in which entities get other names
    algo: Literal["grpo", "ppo", "rft", "imitation"] = "grpo"  # rft: imitates own successes; imitation: no RL
    world: Literal["dream", "real"] = "dream"      # where RL happens first
    iterations: Natural = 150          # RL iterations in the dream (verl-agent: 150)
    real_transitions: Natural = 0  # real RL transitions: after the dream (S2R), or in all with --world real
    train_tasks: Natural = 0           # training tasks that RL knows (0: all)
    tasks: Count = 16                  # tasks per iteration
    rollouts: Count = 8                # episodes per task (PPO: tasks x rollouts different tasks)
    updates: Count = 4                 # optimizer steps per iteration
    lr: Weight = 1e-6                  # RL learning rate (verl-agent: 1e-6 for full fine-tuning)
    value_lr: Weight = 1e-5            # learning rate of PPO's value head
    kl_coef: Weight = 0.01             # weight of the KL to the starting policy (S2R: to the dream's last)
    kl: Literal["k2", "k3"] = "k3"     # estimator of that KL
    clip_low: BelowOne = 0.2           # policy ratio clip below
    clip_high: Weight = 0.2            # policy ratio clip above
    entropy_coef: Weight = 0.001       # entropy bonus
    invalid_penalty: Weight = 0.1      # taken from the reward of an action that changes nothing
    normalize_std: bool = True         # GRPO: divide by the group's standard deviation (no: Dr. GRPO)
    loss_mean: Literal["token", "episode"] = "token"       # what weighs the same in the gain (KL: tokens)
    # leave dreams that ended in a malformed answer out of training (no: count them as failures; ours)
    drop_malformed: bool = True
    max_malformed: Share = 0.5         # a run stops where more dreamt episodes than this break off
    curriculum: bool = True            # draw tasks by reward variance (Eq. 7), not uniformly
    max_generated_fraction: Share = 0.25  # lambda: largest share of generated tasks (0: none made; ours)
    generate_every: Count = 5          # iterations between task generations (ours)
    generated_tasks: str = ""          # JSONL of generate_tasks.py: the dream plays these from the start
    enrich: bool = True                # add dreamt transitions to the replay buffer
    dream: list[str] = field(default_factory=list)  # experiments: worlds.Options, as in pages=lookup
    eval_every: Count = 10             # iterations between evaluations on validation tasks
    eval_tasks: Count = 100            # validation tasks of these
    eval_temperature: Weight = 0.4     # played there beside 1 (verl-agent: 0.4; 0: greedy)
    test_tasks: Count = 300            # test tasks, played before and after
    save_every: Count = 5              # iterations between checkpoints
    save_minutes: float = 20.0         # most minutes between checkpoints
    micro_batch_tok: Count = 8192      # tokens per micro-batch: memory; the gradient only through rounding
    seed: int = 0                      # everything: data, experience model, imitation, RL
    threads: Count = 1                 # torch threads
    fresh: bool = False                # start over even where artifacts fit
    config: str = ""                   # preset: a flat JSON file of flags and values


FREE = ("out", "expmodel", "expmodel_folder", "expmodel_key_env", "data", "imitation", "fresh", "config",
        "threads", "micro_batch_tok", "gradient_checkpointing", "slots", "iterations", "real_transitions",
        "eval_every", "eval_tasks", "save_every", "save_minutes",
        "max_malformed")               # may differ at resume
TEMPERATURES = (0.0, 0.4, 1.0)         # greedy; verl-agent's validation; training's
CLUSTER_TASKS = 8                      # tasks of a cluster, on average and at least (Eq. 7 of PPO)


def check(args: Args) -> None:
    """Refuses flags that contradict each other. Raises ValueError."""
    if args.world == "real" and args.algo != "imitation" and not args.real_transitions:
        raise ValueError("--world real needs --real-transitions N: how many real RL transitions it may use")
    if args.real_transitions and not environment_class(args.env).is_real:
        raise ValueError(f"--real-transitions {args.real_transitions}: --env {args.env} is no world to play "
                         "in")
    check_model(args)
    if args.algo == "grpo" and args.rollouts < 2:
        raise ValueError(f"--rollouts {args.rollouts}: GRPO compares episodes of the same task; expected "
                         "2 or more, or --algo ppo")
    if args.max_action_tok >= args.policy_context:
        raise ValueError(f"--max-action-tok {args.max_action_tok}: expected fewer than --policy-context "
                         f"{args.policy_context}, which holds the prompt, too")
    if tiny.is_scratch(args.model) and args.init == "model":
        raise ValueError(f"--model {args.model}: a from-scratch policy starts with --init expmodel, whose "
                         "vocabulary it has")
    parse_options(args.dream)
    if args.dream and (args.enrich or args.max_generated_fraction):
        raise ValueError("--dream: expected --no-enrich and --max-generated-fraction 0, too: such worlds "
                         "are compared on the same tasks and recorded transitions")
    if args.generated_tasks and not args.max_generated_fraction:
        raise ValueError("--generated-tasks: expected --max-generated-fraction above 0, which bounds them")
    generated = read_tasks(args.generated_tasks) if args.generated_tasks else []
    if not all(task.generated for task in generated) or len({task.id for task in generated}) < len(generated):
        raise ValueError(f"--generated-tasks {args.generated_tasks}: found a task with `generated` false, or "
                         "an id twice; expected a file of generate_tasks.py")
    check_server(args)
    if is_url(args.expmodel) and args.init == "expmodel" and not args.expmodel_folder:
        raise ValueError("--init expmodel: found a server's URL, which gives no weights; expected --init "
                         "model with --model NAME, or --expmodel-folder")


# ---- what a run holds ----

@dataclass
class Run:
    """What changes during a run. `save` writes it, but for the frozen reference (`leave_dream`)."""
    policy: Policy
    reference: torch.nn.Module | None  # none without a KL term
    value_head: torch.nn.Module | None
    optimizer: torch.optim.Optimizer
    curriculum: Curriculum
    experience_model: ExperienceModel
    step: int = 0
    dream_transitions: int = 0
    real_transitions: int = 0
    evaluations: list = field(default_factory=list)

    def save(self, path: Path, dist) -> None:
        save_model(self.policy.model, self.policy.tokenizer, path)
        head = self.value_head.state_dict() if self.value_head is not None else {}
        own = {"policy": self.policy.sampler.get_state(), "counts": self.policy.counts,
               "experience_model": self.experience_model.get_state()}
        checkpoint.save_state(path, [self.optimizer], {"head": head}, own, dist)
        buffer = self.experience_model.buffer
        if dist.is_main:
            buffer.save(path / "replay")
            run.write_json(path / "run.json",
                           {"curriculum": self.curriculum.get_state(), "step": self.step,
                            "evaluations": self.evaluations, **self.transitions()})
        dist.barrier()
        if not dist.is_main:
            buffer.load_index(path / "replay")   # as `buffer.save` does on rank 0

    def load(self, path: Path, dist) -> None:
        """Goes on from what `save` wrote, weights and replay buffer apart, with any number of ranks."""
        shared, own = checkpoint.load_state(path, [self.optimizer], dist)
        if self.value_head is not None:
            self.value_head.load_state_dict(shared["head"])
        if own:
            self.policy.sampler.set_state(own["policy"])
            self.policy.counts = own["counts"]
            self.experience_model.set_state(own["experience_model"])
        values = run.read_json(path / "run.json")
        self.curriculum.set_state(values.pop("curriculum"))
        vars(self).update(values)

    def transitions(self) -> dict:
        return {"dream_transitions": self.dream_transitions, "real_transitions": self.real_transitions}

    def phase(self, args: Args) -> Literal["dream", "real", ""]:
        """What the next iteration plays; "" when the run is over. After the first real transition (S2R) no
        more --iterations make a run dream again."""
        if args.algo == "imitation":
            return ""
        if args.world == "dream" and self.step < args.iterations and not self.real_transitions:
            return "dream"
        return "real" if self.real_transitions < args.real_transitions else ""


def make_run(args: Args, policy: Policy, reference: torch.nn.Module | None, experience_model: ExperienceModel,
             tasks: list[Task], resume: Path | None, dist) -> Run:
    head = torch.nn.Linear(policy.model.config.hidden_size, 1).to(dist.device) if args.algo == "ppo" else None
    groups = [{"params": trainable_parameters(policy.model), "lr": args.lr}]
    if head is not None:
        torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
        groups.append({"params": list(head.parameters()), "lr": args.value_lr})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    curriculum = Curriculum(tasks, explore=0.1 if args.curriculum else 1.0)
    curriculum.add(read_tasks(args.generated_tasks) if args.generated_tasks else [])
    state = Run(policy, reference, head, optimizer, curriculum, experience_model)
    if resume:
        state.load(resume, dist)
    return state


@dataclass
class Job:
    """What stays the same during a run."""
    args: Args
    env: Environment
    splits: dict[str, list[Task]]
    held_out: set[str]                     # texts of all validation and test tasks: none is generated
    known: Known                           # from training tasks and pages: what a generated task may say
    probes: dict                           # what the experience model's report found
    meta: dict                             # settings and environment, which must be equal at resume; "policy"
    out: Path
    log: run.Log
    dist: run.Dist


# ---- the loop ----

def train(job: Job, state: Run) -> list[dict]:
    """Writes the report on the test tasks before RL. Returns the one after, if there was any."""
    args, dist, timer = job.args, job.dist, run.Timer()
    save = lambda: checkpoint.save(job.out, "policy", lambda path: state.save(path, dist), job.meta, dist)
    most = args.tasks * args.rollouts * job.env.max_steps        # transitions of an iteration
    total = args.iterations * (args.world == "dream") + math.ceil(args.real_transitions / most)
    clock = run.Clock(args.save_minutes)
    with run.graceful(job.log) as stop, run.progress(total, "reinforcement learning", state.step) as bar:
        if not state.evaluations:
            save()                               # a save that cannot work fails in the first minute
            first = test(job, state, "before")
            if dist.is_main:
                run.write_json(job.out / "before.json", first)
            validate(job, state)
            save()
        asked = stop.agreed(dist)
        while not asked and (phase := state.phase(args)):
            if phase == "real" and state.dream_transitions and not state.real_transitions:
                leave_dream(job, state)
            values, episodes = iterate(job, state, timer)
            log_iteration(job, state, values, episodes)
            malformed = sum(e.stop == StopReason.MALFORMED for e in episodes)
            if malformed > args.max_malformed * len(episodes):
                raise ValueError(
                    f"iteration {state.step}: {malformed} of {len(episodes)} dreamt episodes broke off in "
                    f"malformed answers (--max-malformed {args.max_malformed}): train the experience model "
                    f"longer, and see {job.out / 'episodes.jsonl'}")
            bar.update(1)
            if phase == "real":
                left = args.real_transitions - state.real_transitions
                bar.total = state.step + math.ceil(left / max(1, values["transitions"]))
            over = state.phase(args) != phase
            if over or state.step % args.eval_every == 0:
                validate(job, state)
            asked = stop.agreed(dist)
            if asked or over or state.step % args.save_every == 0 or clock.rang(dist):
                save()
                clock.restart()
    if asked:
        raise SystemExit(130)
    return [test(job, state, "after")] if state.step else []


def leave_dream(job: Job, state: Run) -> None:
    """S2R begins: from here on the KL term is to the policy that the dream made."""
    write = lambda path: save_model(state.policy.model, state.policy.tokenizer, path)
    folder = checkpoint.save(job.out, LEFT_DREAM, write, job.meta, job.dist)
    state.reference = None
    gc.collect()                       # its memory is for the new one, and sharded models hold cycles
    state.reference = load_reference(job.args, folder, state.policy, job.dist)


def iterate(job: Job, state: Run, timer: run.Timer) -> tuple[dict, list[Episode]]:
    """One training step. Returns what is logged, and the episodes of all ranks."""
    args, dist, model, phase = job.args, job.dist, state.experience_model, state.phase(job.args)
    model.clear_caches()  # rounding must not depend on what an uninterrupted run would still hold
    fraction, made = args.max_generated_fraction if phase == "dream" else 0.0, {}
    if fraction and state.step % args.generate_every == args.generate_every - 1:
        with timer("tasks"), unsharded(model.model):
            made = generate(job, state)
    groups, size = (args.tasks * args.rollouts, 1) if args.algo == "ppo" else (args.tasks, args.rollouts)
    tasks = state.curriculum.sample(groups, run.rng(args.seed, "tasks", state.step), fraction)
    share = -(-groups // dist.world_size)        # whole groups stay on one rank
    mine = [task for task in tasks[dist.rank * share:(dist.rank + 1) * share] for _ in range(size)]
    budget = dist.share(args.real_transitions - state.real_transitions) if phase == "real" else None
    before = state.policy.counts["turns"]
    with timer("rollout"):
        world = job.env if phase == "real" else model
        episodes = play(job, state, world, mine, 1.0, f"{phase}-{state.step}", budget)
        episodes = whole_groups(episodes, size, len(mine))
    with timer("update"):
        usable = rl.usable(episodes, args.drop_malformed)
        if args.algo == "rft":
            metrics = rl.imitate_successes(state, usable, args, dist)
        else:
            batch = rl.make_batch(usable, state.policy, state.value_head, args, dist)
            metrics = rl.update(state, batch, args, dist)
    episodes = gather(episodes, dist)
    metrics["zero_variance"] = feed_curriculum(args, state, episodes)
    if phase == "dream" and args.enrich:
        with timer("replay"):                    # the same on every rank
            fill_buffer(model.buffer, model.encoder, episodes)
    # turns, not recorded steps: episodes that the budget cut off count, too
    used = round(dist.all_reduce_sum(float(state.policy.counts["turns"] - before)))
    state.step += 1
    state.dream_transitions += used * (phase == "dream")
    state.real_transitions += used * (phase == "real")
    return metrics | {f"tasks/{k}": v for k, v in made.items()} | timer.take() | {
        "world": phase, "transitions": used}, episodes


def log_iteration(job: Job, state: Run, values: dict, episodes: list[Episode]) -> None:
    report, model = policy_report(episodes, job.env.audit), state.experience_model
    values = values | {"malformed": report["stops"].get(StopReason.MALFORMED, 0)}
    ranks = job.dist.gather([{"dream": model.counts, "policy": state.policy.counts}])
    groups = {"stop": report["stops"], "reward": report["reward_confusion"]}
    groups |= {name: {key: sum(counts[name].get(key, 0) for counts in ranks) for key in own}
               for name, own in ranks[0].items()}
    values |= {f"{group}/{k}": v for group, counts in groups.items() for k, v in counts.items()}
    values |= {k: report[k] for k in ("success", "length", "invalid")}
    values |= state.transitions() | state.curriculum.summary()
    values |= {"replay": len(model.buffer), "synthetic_share": model.buffer.share_synthetic()}
    job.log.step("rl", state.step, values, ["world", "success", "malformed", "entropy", "kl_ref",
                                            "zero_variance", "rollout_s", "update_s"])
    if job.dist.is_main:
        run.write_jsonl(job.out / "episodes.jsonl", map(to_json, episodes), append=True)


# ---- parts of an iteration ----

def play(job: Job, state: Run, world, tasks: list[Task], temperature: float, name: str,
         budget: int | None = None) -> list[Episode]:
    """This rank's episodes."""
    with unsharded(state.policy.model), unsharded(state.experience_model.model):
        episodes = rollout(state.policy, world, tasks, temperature, f"{name}-r{job.dist.rank}",
                           max_transitions=budget)
    for model in (state.policy, state.experience_model):
        if model.sampler:
            model.sampler.clear_caches()         # their memory is the update's now
    for episode in episodes:                     # a resumed run plays the later ones again
        episode.iteration = state.step
    return episodes


def whole_groups(episodes: list[Episode], size: int, count: int) -> list[Episode]:
    """Without the groups that a budget of transitions cut: what finished in time is short, and mostly won.
    Where groups have one episode (PPO), all `count` episodes are one."""
    if size == 1:
        return episodes if len(episodes) == count else []
    finished = Counter(episode.task.id for episode in episodes)
    return [episode for episode in episodes if finished[episode.task.id] == size]


def gather(episodes: list[Episode], dist) -> list[Episode]:
    """The episodes of all ranks, without their token segments."""
    return dist.gather([replace(episode, segments=[]) for episode in episodes])


def feed_curriculum(args: Args, state: Run, episodes: list[Episode]) -> float:
    """Eq. 7 per group; where each task has one episode, as in PPO, clusters of tasks by phi of their texts.
    Returns the share of groups without variance."""
    played, labels, clustered = {e.task.id for e in episodes}, None, args.algo == "ppo" or args.rollouts == 1
    episodes = rl.usable(episodes, args.drop_malformed)
    left = Counter(e.task.id for e in episodes)
    state.curriculum.fade([name for name in played if left[name] < 2 - clustered], state.step)
    if clustered and episodes:
        tasks = {e.task.id: e.task.text for e in episodes}
        vectors = state.experience_model.encoder([""] * len(tasks), list(tasks.values()))
        found = cluster(vectors, max(2, len(tasks) // max(CLUSTER_TASKS, args.rollouts)),
                        run.rng(args.seed, "cluster", state.step))
        labels = dict(zip(tasks, found.tolist()))
    return state.curriculum.update(episodes, state.step, labels)


def generate(job: Job, state: Run) -> dict:
    """Rank 0 writes variations of tasks of high variance (Eq. 6), all ranks take them. Returns counts of
    accepted and refused texts."""
    made, counts = [], {}
    if job.dist.is_main:
        texts = job.held_out | {known.task.text for known in state.curriculum.stats.values()}
        made, counts = write_tasks(state.experience_model, state.curriculum.seeds(job.args.tasks), texts,
                                   job.known, f"generated-{state.step}")
    state.curriculum.add(job.dist.broadcast(made))
    return counts


# ---- evaluation on the way, and at both ends ----

def evaluate(job: Job, state: Run, tasks: list[Task], temperatures: tuple, name: str,
             in_dream: bool) -> tuple[dict, list[dict]]:
    """Plays each task once in the real environment, if there is one, at each temperature, and once in the
    dream at 1, if asked or if there is no other world. Returns reports by "real 0", "real 0.4", "dream 1",
    and the first 20 episodes of each as records."""
    state.experience_model.clear_caches()
    plan = [("real", job.env, t) for t in dict.fromkeys(temperatures)] if job.env.is_real else []
    if in_dream or not plan:
        plan.append(("dream", state.experience_model, 1.0))
    found, episodes = {}, []
    for kind, world, temperature in plan:
        key, mine = f"{kind} {temperature:g}", tasks[job.dist.rank::job.dist.world_size]
        played = gather(play(job, state, world, mine, temperature, f"{name}-{key.replace(' ', '-')}"),
                        job.dist)
        found[key] = policy_report(played, job.env.audit)
        episodes += played[:20]
    return found, [to_json(e) for e in episodes]


def validate(job: Job, state: Run) -> None:
    """Validation on the way: real at two temperatures, dream at 1; the alarm."""
    tasks, log = job.splits["valid"], job.log
    found, episodes = evaluate(job, state, tasks, (job.args.eval_temperature, 1.0), f"valid-{state.step}",
                               in_dream=True)
    if job.dist.is_main:
        run.write_jsonl(job.out / "evaluations.jsonl", episodes, append=True)
    entry = {"iteration": state.step, "tasks": len(tasks), **state.transitions()}
    state.evaluations.append(entry | {kind: found[f"{kind} 1"] for kind in ("real", "dream")
                                      if f"{kind} 1" in found})
    keys = ("success", "low", "high", "length", "invalid", "inconsistent", "stops", "reward_confusion")
    log.step("evaluation", state.step,
             entry | {f"{key}/{k}": report[k] for key, report in found.items() for k in keys})
    log.say(f"validation at {state.step} ({len(tasks)} tasks; world and temperature): "
            + "  ".join(f"{key} {with_interval(values)}" for key, values in found.items()))
    if harm := alarm(state.evaluations, job.probes):
        log.say(f"ALARM: {harm}")
        log.step("alarm", state.step, {"alarm": harm})


def test(job: Job, state: Run, name: str) -> dict:
    """The test tasks, played by the starting or the final policy. Not in the dream: success there says
    nothing about the real world."""
    found, episodes = evaluate(job, state, job.splits["test"], TEMPERATURES, f"test-{name}", in_dream=False)
    if job.dist.is_main:
        run.write_jsonl(job.out / f"test-{name}.jsonl", episodes, append=False)
    entry = {"policy": name, "tasks": len(job.splits["test"]), **state.transitions()}
    # step + 1: a run that goes on from the last checkpoint drops this record (start_log) and tests again
    job.log.step("test", state.step + (name == "after"),
                 entry | {f"{key}/success": report["success"] for key, report in found.items()})
    return entry | {"reports": found}


def main() -> None:
    args = run.parse(Args)
    check(args)
    dist = run.init_dist(args.seed, args.threads)
    out = Path(args.out or out_folder(args.env))
    run.check_ranks(args, out, dist)
    data, expmodel = prepare(args, out, dist)
    env, _ = environment_of(args.env, data, dist, workers=run.spare_cores(dist))
    meta = {"environment": env.describe(),
            "settings": {k: v for k, v in asdict(args).items() if k not in FREE}}
    if expmodel:
        trained = run.load_meta(expmodel / "model")
        run.check_meta(trained, {"environment": meta["environment"], "finished": True}, expmodel,
                       "train the experience model on this data to its end")
        meta["expmodel"] = run.fingerprint(trained)
    resume = None if args.fresh else checkpoint.find(out, "policy", meta, dist)
    begun = find_imitation(args, (out, expmodel), dist)
    from_it = lambda start: run.check_meta(    # else the KL term would be to another policy from here on
        run.load_meta(resume), {"imitation": run.fingerprint(run.load_meta(start))}, resume,
        "name the --imitation that this run began with")
    if resume and begun.finished:
        from_it(begun.found)                     # refused before anything of this run is dropped
    check_options(options := parse_options(args.dream), env)
    splits = read_splits(args, data)
    offline = recorded(read_episodes(data / "train.jsonl"))
    log = start_log(out, resume, dist)
    log.say(f"{env.name} ({env.label}): {', '.join(f'{len(t)} {n}' for n, t in splits.items())} tasks; "
            f"{args.tasks} tasks x {args.rollouts} rollouts "
            f"= {args.tasks * args.rollouts} episodes an iteration, {args.updates} optimizer steps each")
    if env.prompts.policy == Prompts.policy and not args.imitation_episodes and not args.imitation:
        log.say(f"note: the prompts of {env.name} name no actions, and nothing is imitated: a language model "
                "has to guess them; expected `prompts` (docs/your-environment.md) or --imitation-episodes N")
    probes = run.read_json(expmodel / "report.json")["full"] if expmodel else {}
    if failed := failed_probes(probes):
        log.say(f"probes of the experience model that did not pass: {'; '.join(failed)}")
    start = imitation_checkpoint(args, env, begun, offline, dist, log)
    meta["imitation"] = run.fingerprint(run.load_meta(start))
    if resume:
        from_it(start)
    gc.collect()                                 # the model that imitated: sharded ones hold cycles
    policy, reference = starting_policy(args, env, start, resume, out, dist)
    model = open_experience_model(args, expmodel, env, data / "train.jsonl", dist.device, resume,
                                  beside=policy.model, dtype=args.dtype, slots=args.slots,
                                  seed=run.derive_seed(args.seed, "dream", dist.rank))
    if args.dream:
        model = World(model, env, options, args.seed, dist.rank)
    state = make_run(args, policy, reference, model, splits["train"], resume, dist)
    del reference                                # `state` alone holds it, and lets it go
    held_out = {task.text for name in ("valid", "test") for task in read_tasks(data / f"tasks_{name}.jsonl")}
    known = Known(splits["train"], offline)
    meta["policy"] = asdict(policy.settings)
    job = Job(args, env, splits, held_out, known, probes, meta, out, log, dist)
    after = train(job, state)
    with unsharded(model.model):                 # all ranks gather what rank 0 asks for the page
        if dist.is_main:
            summary.finish(job, state, [run.read_json(out / "before.json"), *after])
    env.close()
    log.close()
    dist.close()


if __name__ == "__main__":
    run.main(main)
