"""The main job: an agent learns by reinforcement learning inside the experience model (DreamGym, arXiv
2511.03773).

    python train_policy.py --env webshop   # everything, from nothing, minutes on a CPU
    python train_policy.py --env webshop --algo ppo                       # PPO instead of GRPO
    python train_policy.py --env webshop --real-transitions 5000          # dream, then real: S2R
    python train_policy.py --env webshop --world real --real-transitions 30000
    python train_policy.py --env logs --data my_episodes.jsonl            # recorded episodes and no world
    torchrun --nproc-per-node 8 train_policy.py --env webshop --model Qwen/Qwen2.5-1.5B-Instruct

What is missing is made first, by the other scripts, through files: data (collect.py), experience model
(train_expmodel.py), and a policy that imitates a few demonstrations. No reward of the real environment
reaches the dream phase.
"""
from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from dreamgym import plots, rl, run, tiny, viewer
from dreamgym.curriculum import Curriculum, cluster
from dreamgym.envs.base import Environment, out_folder
from dreamgym.episode import (Episode, StopReason, Task, from_json, read_episodes, read_tasks, rename_episode,
                              successes, to_json)
from dreamgym.evaluation import failed_probes, gap_alarm, policy_report
from dreamgym.experience_model import ExperienceModel, fill_buffer
from dreamgym.memory import budget, check_memory, measure
from dreamgym.model import (TrainSample, base_of, checkpoint_layers, load_frozen, load_model,
                            load_optimizer_states, optimizer_states, save_model, trainable_parameters,
                            unsharded)
from dreamgym.offline import environment_of
from dreamgym.rollout import Policy, PolicySettings, imitation_segments, rollout
from dreamgym.served_model import check_server, open_experience_model, reach_server
from dreamgym.sft import sft_step
from dreamgym.task_generation import known_words, problem, write_tasks
from dreamgym.teacher import is_url
from dreamgym.worlds import World, parse_options


@dataclass
class Args:
    env: str = "webshop"  # webshop | alfworld | webarena | logs | package.module:Class | path/to/file.py
    out: str = ""                      # folder of this run; what is missing is made there (default: out/ENV)
    expmodel: str = ""  # folder of a trained experience model (default: OUT/expmodel, made when missing)
                        # or URL of an OpenAI-compatible server
    expmodel_name: str = ""            # the model's name at that server
    expmodel_folder: str = ""          # the folder it was exported from ("": it is untrained)
    expmodel_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the server's key
    data: str = ""  # folder of collect.py, or a JSONL file of episodes (default: OUT/data, made when missing)
    imitation: str = ""  # folder of a policy to start from (default: OUT/imitation, made when missing)
    model: str = "scratch:64x3"        # path or hub name of a causal LM, or scratch:HIDDENxLAYERS
    quantize: Literal["none", "nf4"] = "none"      # nf4: 4-bit weights, trained through --lora-rank
    lora_rank: int = 0                 # rank of LoRA on all linear layers (0: full fine-tuning)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of computing (auto: bfloat16 on a GPU)
    gradient_checkpointing: bool = False  # compute activations again in the backward: less memory, slower
    slots: int = 128                   # rows decoded at once on a rank (memory of the KV cache)
    init: Literal["model", "expmodel"] = "model"  # weights before imitation: --model's or --expmodel's
    policy_format: Literal["tags", "action", "lines"] = "tags"  # <think>, <action> | action | element, action
    system_prompts: bool = True        # say in a system prompt what the agent is and which actions there are
    policy_context: int = 4608         # tokens of a policy's context (verl-agent: 4,096 + 512)
    max_action_tok: int = 512          # tokens of one answer (verl-agent: 512)
    imitation_episodes: int = 60       # demonstrations to imitate (0: none)
    imitation_epochs: int = 3          # passes over them
    imitation_lr: float = 1e-5         # learning rate of imitation
    imitation_muon_lr: float = 0.0     # ... of Muon on layer matrices (from-scratch models)
    imitation_rows: int = 16           # rows per optimizer step of imitation
    rename_share: float = 0.0          # share of demonstrations in which entities get other names
    algo: Literal["grpo", "ppo", "rft", "imitation"] = "grpo"  # rft: imitates own successes; imitation: no RL
    world: Literal["dream", "real"] = "dream"      # where RL happens first
    iterations: int = 150              # RL iterations in the dream (verl-agent: 150)
    real_transitions: int = 0  # real RL transitions: after the dream (S2R), or in all with --world real
    tasks: int = 16                    # tasks per iteration
    rollouts: int = 8                  # episodes per task (PPO: tasks x rollouts different tasks)
    updates: int = 4                   # optimizer steps per iteration
    lr: float = 1e-6                   # RL learning rate (verl-agent: 1e-6 for full fine-tuning)
    value_lr: float = 1e-5             # learning rate of PPO's value head
    kl_coef: float = 0.01              # weight of the KL to the starting policy (verl-agent: 0.01)
    kl: Literal["k2", "k3"] = "k3"     # its estimator
    clip_low: float = 0.2              # policy ratio clip below
    clip_high: float = 0.2             # and above
    engine_cap: float = 0.0  # where another engine samples: largest weight p_trainer / p_engine (0: off)
    entropy_coef: float = 0.001        # entropy bonus
    invalid_penalty: float = 0.1       # taken from the reward of an action that changes nothing
    normalize_std: bool = True         # GRPO: divide by the group's standard deviation (no: Dr. GRPO)
    loss_mean: Literal["token", "episode"] = "token"       # what weighs the same in the loss
    drop_malformed: bool = True  # dreams that broke off teach nothing (no: they count as failures; ours)
    max_malformed: float = 0.5         # a run stops where more dreamt episodes than this break off
    curriculum: bool = True            # draw tasks by reward variance (Eq. 7), not uniformly
    max_generated_fraction: float = 0.25  # lambda: largest share of generated tasks (0: none made; ours)
    generate_every: int = 5            # iterations between task generations
    enrich: bool = True                # add dreamt transitions to the replay buffer
    dream: list[str] = field(default_factory=list)  # experiments: name=value of worlds.Options, such as
                                       # pages=lookup rewards=rule, or pages=true false_positives=0.1
    naive_reward: bool = False         # the lesson: an experience model that never saw counterfactual rewards
    eval_every: int = 10               # iterations between evaluations on validation tasks
    eval_tasks: int = 100              # validation tasks of these
    eval_temperature: float = 0.4      # played there beside 1 (verl-agent: 0.4; 0: greedy)
    test_tasks: int = 300              # test tasks, played before and after
    save_every: int = 5                # iterations between checkpoints
    save_minutes: float = 20.0         # ... and at most so many minutes
    micro_batch_tok: int = 8192        # tokens per micro-batch: memory only, never changes the gradient
    seed: int = 0                      # everything: data, experience model, imitation, RL
    threads: int = 1                   # torch threads
    fresh: bool = False                # start over even where artifacts fit
    config: str = ""                   # preset: a flat JSON file of flags and values


FREE = ("out", "expmodel", "expmodel_folder", "expmodel_key_env", "data", "imitation", "fresh", "config",
        "threads", "micro_batch_tok", "gradient_checkpointing", "slots", "iterations", "real_transitions",
        "eval_every", "eval_tasks", "test_tasks", "save_every", "save_minutes",
        "max_malformed")               # may differ at resume
TEMPERATURES = (0.0, 0.4, 1.0)         # greedy; verl-agent's validation; training's


def check(args: Args) -> None:
    """Refuses flags that contradict each other. Raises ValueError."""
    if args.world == "real" and args.algo != "imitation" and not args.real_transitions:
        raise ValueError("--world real needs --real-transitions N: how many real RL transitions it may use")
    if args.quantize != "none" and not args.lora_rank:
        raise ValueError(f"--quantize {args.quantize}: 4-bit weights cannot be trained themselves; expected "
                         "--lora-rank, too")
    if tiny.is_scratch(args.model) and (args.lora_rank or args.init == "model"):
        raise ValueError(f"--model {args.model}: a from-scratch policy is trained in full (no --lora-rank), "
                         "and starts with --init expmodel")
    parse_options(args.dream)
    if args.dream and (args.enrich or args.max_generated_fraction):
        raise ValueError("--dream: expected --no-enrich and --max-generated-fraction 0, too: such worlds "
                         "are compared on the same tasks and recorded transitions")
    check_server(args)
    if is_url(args.expmodel) and args.init == "expmodel" and not args.expmodel_folder:
        raise ValueError("--init expmodel: found a server's URL, which gives no weights; expected --init "
                         "model with --model NAME, or --expmodel-folder")
    least = {"tasks": 1, "rollouts": 1, "updates": 1, "slots": 1, "micro_batch_tok": 1,
             "eval_every": 1, "eval_tasks": 1, "test_tasks": 1, "save_every": 1,
             "generate_every": 1, "imitation_episodes": 0, "iterations": 0, "real_transitions": 0}
    if wrong := [f"--{name.replace('_', '-')} {getattr(args, name)}"
                 for name, low in least.items() if getattr(args, name) < low]:
        raise ValueError(f"{', '.join(wrong)}: too small")


# ---- what must exist before RL -----------------------------------------------------------------------------

def prepare(args: Args, out: Path, dist) -> tuple[Path, Path | None]:
    """Runs collect.py and train_expmodel.py where their folders are missing or unfinished; each keeps a
    folder that fits its flags. Returns the folders of the data and of the experience model (None: it is
    untrained, at a server)."""
    is_file = args.data.endswith(".jsonl")
    data = out / "data" if is_file or not args.data else Path(args.data)
    expmodel = Path(args.expmodel or out / ("expmodel-naive" if args.naive_reward else "expmodel"))
    if is_url(args.expmodel):
        expmodel = Path(args.expmodel_folder) if args.expmodel_folder else None
    check_fit(args, expmodel, dist)
    common = ["--env", args.env, "--seed", args.seed, *(["--config", args.config] if args.config else []),
              *(["--fresh"] if args.fresh else [])]
    if is_file or not args.data:
        logs = ["--import-file", args.data] if is_file else []
        if dist.is_main:
            launch("collect.py", [*common, "--out", data, *logs])
        dist.barrier()
    if not args.expmodel:
        own = ["--model", args.model, "--quantize", args.quantize, "--lora-rank", args.lora_rank,
               "--dtype", args.dtype, "--slots", args.slots, "--micro-batch-tok", args.micro_batch_tok,
               *(["--gradient-checkpointing"] if args.gradient_checkpointing else []),
               "--no-report-variants", "--threads", args.threads]
        naive = ["--counterfactual-share", 0] if args.naive_reward else []
        launch("train_expmodel.py", [*common, "--data", data, "--out", expmodel, *own, *naive], dist)
        dist.barrier()
    return data, expmodel


def launch(script: str, flags: list, dist=None) -> None:
    """Another script in its own process; its failure or Ctrl-C ends this one too, after it has saved. With
    `dist` every rank calls it, and the children are ranks like their parents; else the child is alone."""
    environment = {k: v for k, v in os.environ.items() if dist or k not in ("RANK", "WORLD_SIZE")}
    if dist and dist.world_size > 1:
        with socket.create_server(("", 0)) as server:      # a port of rank 0's machine that is free now
            port = dist.broadcast(server.getsockname()[1])
        environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    command = [sys.executable, str(Path(__file__).parent / script), *map(str, flags)]
    child = subprocess.Popen(command, env=environment,
                             start_new_session=True)      # else a terminal's Ctrl-C would reach it twice
    before = {s: signal.signal(s, lambda number, _: child.send_signal(number))
              for s in (signal.SIGINT, signal.SIGTERM)}
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def check_fit(args: Args, expmodel: Path | None, dist) -> None:
    """The budget of a language model, before anything is made. An experience model that is yet to be trained
    counts as another --model. Raises ValueError where the memory of a rank is too small."""
    if tiny.is_scratch(args.model):
        return
    size, dream = measure(args.model), None
    if not is_url(args.expmodel):
        dream, folder = (size, args.policy_context, bool(args.lora_rank)), expmodel / "model"
        if (folder / "experience.json").is_file():
            base, rank = base_of(str(folder))
            context = run.read_json(folder / "experience.json")["settings"]["context"]
            shares_base = bool(args.lora_rank and rank) and base == base_of(args.model)[0]
            dream = measure(str(folder)), context, shares_base
    episodes = max(args.tasks * args.rollouts, args.eval_tasks, args.test_tasks)
    check_memory(budget(args, size, args.policy_context, dist.world_size, dist.device.type, dream,
                        -(-episodes // dist.world_size)), dist)


def starting_policy(args: Args, env: Environment, folders: tuple[Path, Path | None],
                    episodes: list[Episode], resume: Path | None, dist,
                    log) -> tuple[Policy, torch.nn.Module | None]:
    """The policy with the weights of `resume`, or before RL, and the frozen one before RL for the KL term, if
    there is one: from --imitation or OUT/imitation, where it is made first if it is missing."""
    out, expmodel = folders
    settings = PolicySettings(args.policy_context, args.max_action_tok, args.policy_format,
                              args.system_prompts)
    seed, device = run.derive_seed(args.seed, "policy", dist.rank), str(dist.device)
    folder = Path(args.imitation or out / "imitation")
    names = ["env", "model", "quantize", "lora_rank", "init", "rename_share", "policy_format",
             "system_prompts", "policy_context", "max_action_tok"]
    names += [name for name in vars(args) if name.startswith("imitation_")] + ["seed"] * (not args.imitation)
    run_config = {name: getattr(args, name) for name in names}
    found = run.latest_checkpoint(folder, "model", dist)
    meta = run.load_meta(found) if found else {"finished": False}
    finished = meta.get("finished", True)
    if args.imitation and not finished:
        raise ValueError(f"--imitation {folder}: found no finished policy there; expected the folder "
                         "imitation/ of an earlier run")
    if found:
        run.check_meta(meta.get("imitation", {}), run_config, found)
    if not finished:
        if found or args.init == "expmodel":
            model, tokenizer = load_model(str(found or expmodel / "model"), args.dtype, args.quantize,
                                          device=device)
        else:
            model, tokenizer = load_model(args.model, args.dtype, args.quantize, args.lora_rank, device,
                                          args.seed)
        policy = Policy(trained(args, model), tokenizer, env, settings, seed=seed)

        def save(state: dict) -> Path:
            def write(path: Path) -> None:
                save_model(policy.model, tokenizer, path)
                run.save_state(path, state, {}, dist)
            meta = {"imitation": run_config, "policy": asdict(settings), "finished": not state}
            return run.save_checkpoint(folder, "model", write, meta, dist)
        imitate(args, policy, episodes, found, save, dist, log)
        found = save({})
        del model, policy                        # before the next one takes memory
    model, tokenizer = load_model(str(resume or found), args.dtype, args.quantize, device=device)
    reference = None
    if args.kl_coef and args.algo in ("grpo", "ppo"):
        reference, _ = load_frozen(str(found), "reference", model, args.dtype, args.quantize, device)
    return Policy(trained(args, model), tokenizer, env, settings, args.slots, seed), reference


def trained(args: Args, model: torch.nn.Module) -> torch.nn.Module:
    """The model, with what --gradient-checkpointing asks."""
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    return model


def imitate(args: Args, policy: Policy, episodes: list[Episode], resume: Path | None, save, dist,
            log) -> None:
    """Behaviour cloning of players that make mistakes: it must leave entropy for RL to work with.
    `save(state)` is called after each epoch and at Ctrl-C; `resume` is a folder that it wrote."""
    players = {name for name, player in policy.env.players().items() if player.imitate}
    demos = [e for e in episodes if e.source in players or e.source in ("imported", "player")]
    demos = [demos[i]
             for i in run.rng(args.seed, "imitation").permutation(len(demos))[:args.imitation_episodes]]
    if not demos:
        return
    optimizers = tiny.make_optimizers(policy.model, args.imitation_lr, args.imitation_muon_lr)
    done, resumed, steps = 0, 0, None
    if resume:
        state, _ = run.load_state(resume, dist)
        load_optimizer_states(optimizers, state["optimizers"])
        resumed = state["step"]
    save_step = lambda: save({"optimizers": optimizer_states(optimizers), "step": done})
    with run.graceful(log) as stop, run.progress(args.imitation_epochs, "imitation") as bar:
        for epoch in range(args.imitation_epochs):
            rows = demonstration_rows(args, policy, demos, epoch)
            steps = steps or args.imitation_epochs * -(-len(rows) // args.imitation_rows)
            for start in range(0, len(rows), args.imitation_rows):
                done += 1
                if done <= resumed:
                    continue
                tiny.set_rate(optimizers, done - 1, steps, warmup=20, floor=0.0)
                batch = rows[start:start + args.imitation_rows]
                sft_step(policy.model, batch[dist.rank::dist.world_size], optimizers, args.micro_batch_tok,
                         dist)
                if stop.agreed(dist):
                    save_step()
                    raise SystemExit(130)
            if done > resumed:
                save_step()
            bar.update(1)
    log.say(f"imitated {len(demos)} episodes of players that make mistakes ({successes(demos):.0%} of them "
            "successful)")


def demonstration_rows(args: Args, policy: Policy, demos: list[Episode], epoch: int) -> list[TrainSample]:
    """The demonstrations as shuffled rows. Randomizes entity names in --rename-share of them each epoch, so
    that the policy learns to search instead of memorizing where objects are."""
    rng, rows = run.rng(args.seed, "imitation rows", epoch), []
    for demo in demos:
        change = policy.env.renamer(rng) if rng.random() < args.rename_share else None
        segments = imitation_segments(policy, rename_episode(demo, change) if change else demo)
        rows += [TrainSample(s.ids, s.mask) for s in segments]
    return [rows[i] for i in rng.permutation(len(rows))]


# ---- the run -----------------------------------------------------------------------------------------------

@dataclass
class Run:
    """All that a checkpoint holds. The replay buffer is the experience model's."""
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
        """Writes everything into `path`; every rank calls it. Tensors are read back with weights_only."""
        save_model(self.policy.model, self.policy.tokenizer, path)
        head = self.value_head.state_dict() if self.value_head is not None else {}
        own = {"policy": self.policy.sampler.get_state(), "counts": self.policy.counts,
               "experience_model": self.experience_model.get_state()}
        run.save_state(path, {"optimizers": optimizer_states([self.optimizer]), "head": head}, own, dist)
        if dist.is_main:
            self.experience_model.buffer.save(path / "replay")
            run.write_json(path / "run.json",
                           {"curriculum": self.curriculum.get_state(), "step": self.step,
                            "evaluations": self.evaluations, **self.transitions()})

    def load(self, path: Path, dist) -> None:
        """Goes on from what `save` wrote, weights and replay buffer apart, with any number of ranks."""
        shared, own = run.load_state(path, dist)
        load_optimizer_states([self.optimizer], shared["optimizers"])
        if self.value_head is not None:
            self.value_head.load_state_dict(shared["head"])
        if own:
            self.policy.sampler.set_state(own["policy"])
            self.policy.counts = own["counts"]
            self.experience_model.set_state(own["experience_model"])
        values = run.read_json(path / "run.json")
        self.curriculum.set_state(values.pop("curriculum"))
        for name, value in values.items():
            setattr(self, name, value)

    def transitions(self) -> dict:
        return {"dream_transitions": self.dream_transitions, "real_transitions": self.real_transitions}

    def world(self, args: Args) -> str:
        """"dream", "real", or "" when the run is over: dream iterations first, then real transitions
        (S2R)."""
        if args.algo == "imitation":
            return ""
        if args.world == "dream" and self.step < args.iterations:
            return "dream"
        return "real" if self.real_transitions < args.real_transitions else ""


def make_run(args: Args, policy: Policy, reference: torch.nn.Module | None, experience_model: ExperienceModel,
             tasks: list[Task], resume: Path | None, dist) -> Run:
    """The run at its start, or where the checkpoint `resume` left it."""
    head = torch.nn.Linear(policy.model.config.hidden_size, 1).to(dist.device) if args.algo == "ppo" else None
    groups = [{"params": trainable_parameters(policy.model), "lr": args.lr}]
    if head is not None:
        torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
        groups.append({"params": list(head.parameters()), "lr": args.value_lr})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    curriculum = Curriculum(tasks, args.max_generated_fraction, explore=0.1 if args.curriculum else 1.0)
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
    known_words: set[str]                  # of training tasks and pages: a generated task has no others
    probes: dict                           # what the experience model's report found
    out: Path
    log: run.Log
    dist: run.Dist


def iterate(job: Job, state: Run, timer: run.Timer) -> tuple[dict, list[Episode]]:
    """One training step: generate tasks now and then, sample, roll out, update, feed curriculum and replay
    buffer. Returns what is logged, and the episodes of all ranks."""
    args, dist, model, world = job.args, job.dist, state.experience_model, state.world(job.args)
    model.clear_caches()  # rounding must not depend on what an uninterrupted run would still hold
    fraction, made = args.max_generated_fraction if world == "dream" else 0.0, {}
    if fraction and state.step % args.generate_every == args.generate_every - 1:
        with timer("tasks"), unsharded(model.model):
            made = generate(job, state)
    groups, size = (args.tasks * args.rollouts, 1) if args.algo == "ppo" else (args.tasks, args.rollouts)
    tasks = state.curriculum.sample(groups, run.rng(args.seed, "tasks", state.step), fraction)
    share = -(-groups // dist.world_size)        # whole groups stay on one rank
    mine = [task for task in tasks[dist.rank * share:(dist.rank + 1) * share] for _ in range(size)]
    budget = share_of(args.real_transitions - state.real_transitions, dist) if world == "real" else None
    before = state.policy.counts["turns"]
    with timer("rollout"):
        played = job.env if world == "real" else model
        episodes = play(job, state, played, mine, 1.0, f"{world}-{state.step}", budget)
    with timer("update"):
        known = rl.informative(episodes, args.drop_malformed)
        if args.algo == "rft":
            metrics = rl.imitate_successes(state, known, args, dist)
        else:
            batch = rl.make_batch(known, state.policy, state.value_head, args, dist)
            metrics = rl.update(state, batch, args, dist)
    episodes = gather(episodes, dist)
    metrics["zero_variance"] = feed_curriculum(args, state, episodes)
    if world == "dream" and args.enrich:
        with timer("replay"):                    # the same on every rank
            fill_buffer(model.buffer, model.encoder, episodes)
    used = round(dist.all_reduce_sum(float(state.policy.counts["turns"] - before)))
    state.step += 1
    state.dream_transitions += used * (world == "dream")
    state.real_transitions += used * (world == "real")
    return metrics | {f"tasks/{k}": v for k, v in made.items()} | timer.take() | {
        "world": world, "transitions": used}, episodes


def play(job: Job, state: Run, world, tasks: list[Task], temperature: float, name: str,
         budget: int | None = None) -> list[Episode]:
    """This rank's episodes. Each says which iteration played it: a resumed run plays the later ones again."""
    with unsharded(state.policy.model), unsharded(state.experience_model.model):
        episodes = rollout(state.policy, world, tasks, temperature, f"{name}-r{job.dist.rank}",
                           max_transitions=budget)
    for model in (state.policy, state.experience_model):
        if model.sampler:
            model.sampler.clear_caches()         # their memory is the update's now
    for episode in episodes:
        episode.iteration = state.step
    return episodes


def share_of(total: int, dist) -> int:
    """This rank's part of `total`: the parts add up, and rank 0 has one as long as anything is left."""
    return (total + dist.world_size - 1 - dist.rank) // dist.world_size


def gather(episodes: list[Episode], dist) -> list[Episode]:
    """The episodes of all ranks, without token segments where they come from another process."""
    if dist.world_size == 1:
        return episodes
    return [from_json(record, Episode, "episode of a rank")
            for record in dist.gather([to_json(e) for e in episodes])]


def feed_curriculum(args: Args, state: Run, episodes: list[Episode]) -> float:
    """Eq. 7 per group: GRPO's own groups, or for PPO clusters of tasks by phi of their texts. Returns the
    share of groups without variance."""
    episodes = [e for e in episodes if not (args.drop_malformed and e.stop == StopReason.MALFORMED)]
    labels = None
    if args.algo == "ppo" and episodes:
        tasks = {e.task.id: e.task.text for e in episodes}
        vectors = state.experience_model.encoder([""] * len(tasks), list(tasks.values()))
        found = cluster(vectors, max(2, len(tasks) // args.rollouts),
                        run.rng(args.seed, "cluster", state.step))
        labels = dict(zip(tasks, found.tolist()))
    return state.curriculum.update(episodes, state.step, labels) if episodes else 0.0


def generate(job: Job, state: Run) -> dict:
    """Tasks of high variance are seeds; M_task writes variations (Eq. 6). Rank 0 writes, all ranks take the
    same tasks. Returns counts of accepted and refused texts."""
    made, counts = [], {}
    if job.dist.is_main:
        texts = {task.text for part in job.splits.values() for task in part}
        texts |= {known.task.text for known in state.curriculum.stats.values()}
        check = partial(problem, known_texts=texts, known_words=job.known_words)
        made, counts = write_tasks(state.experience_model, state.curriculum.seeds(job.args.tasks), 4, check,
                                   f"generated-{state.step}", 0.8)
    state.curriculum.add([from_json(record, Task, "generated task")
                          for record in job.dist.broadcast([to_json(task) for task in made])])
    return counts


def evaluate(job: Job, state: Run, tasks: list[Task], temperatures: tuple,
             name: str) -> tuple[dict, list[dict]]:
    """One episode for each task in the real environment at each temperature, if there is one, and in the
    dream at 1; all ranks play a share. Returns reports by "real 0", "real 0.4", "dream 1", and the first 20
    episodes of each as records."""
    state.experience_model.clear_caches()
    plan = [("real", job.env, t) for t in temperatures] if job.env.is_real else []
    found, episodes = {}, []
    for kind, world, temperature in [*plan, ("dream", state.experience_model, 1.0)]:
        key, mine = f"{kind} {temperature:g}", tasks[job.dist.rank::job.dist.world_size]
        played = gather(play(job, state, world, mine, temperature, f"{name}-{key.replace(' ', '-')}"),
                        job.dist)
        found[key] = policy_report(played, job.env.audit)
        episodes += played[:20]
    return found, [to_json(e) for e in episodes]


def validate(job: Job, state: Run) -> None:
    """Validation on the way: real at two temperatures, dream at 1; the gap alarm."""
    tasks, log = job.splits["valid"], job.log
    found, episodes = evaluate(job, state, tasks, (job.args.eval_temperature, 1.0), f"valid-{state.step}")
    if job.dist.is_main:
        run.write_jsonl(job.out / "evaluations.jsonl", episodes, append=True)
    entry = {"iteration": state.step, "tasks": len(tasks), **state.transitions()}
    state.evaluations.append(entry | {key.split(" ")[0]: found[key]
                                      for key in ("real 1", "dream 1") if key in found})
    keys = ("success", "low", "high", "length", "invalid", "inconsistent", "stops", "reward_confusion")
    log.step("evaluation", state.step,
             entry | {f"{world}/{k}": report[k] for world, report in found.items() for k in keys}, show=[])
    log.say(f"validation at {state.step} ({len(tasks)} tasks; world and temperature): "
            + "  ".join(f"{key} {with_interval(report)}" for key, report in found.items()))
    if alarm := gap_alarm(state.evaluations, job.probes):
        log.say(f"GAP ALARM: {alarm}")
        log.step("alarm", state.step, {"alarm": alarm}, show=[])


def test(job: Job, state: Run, name: str) -> dict:
    """The test tasks, played once for the starting policy and once for the final one."""
    found, episodes = evaluate(job, state, job.splits["test"], TEMPERATURES, f"test-{name}")
    if job.dist.is_main:
        run.write_jsonl(job.out / f"test-{name}.jsonl", episodes, append=False)
    entry = {"policy": name, "tasks": len(job.splits["test"]), **state.transitions()}
    job.log.step("test", state.step + (name == "after"),     # killed before its end, it is cut and made again
                 entry | {f"{key}/success": report["success"] for key, report in found.items()}, show=[])
    return entry | {"reports": found}


def with_interval(report: dict) -> str:
    return f"{report['success']:.3f} [{report['low']:.3f}, {report['high']:.3f}]"


def train(job: Job, state: Run) -> list[dict]:
    """The loop. Returns the reports on the test tasks, before and after."""
    args, dist, timer, before = job.args, job.dist, run.Timer(), job.out / "before.json"
    meta = {"settings": run_config(args), "policy": asdict(state.policy.settings),
            "environment": job.env.describe()}
    save = lambda: run.save_checkpoint(job.out, "policy", lambda path: state.save(path, dist), meta, dist)
    total = args.iterations * (args.world == "dream") + round(args.real_transitions / 700)
    clock = run.Clock(args.save_minutes)
    with run.graceful(job.log) as stop, run.progress(total, "reinforcement learning") as bar:
        if not state.evaluations:
            save()                               # a save that cannot work fails in the first minute
            first = test(job, state, "before")
            if dist.is_main:
                run.write_json(before, first)
            validate(job, state)
            save()
        bar.update(state.step)
        asked = stop.agreed(dist)
        while not asked and (world := state.world(args)):
            values, episodes = iterate(job, state, timer)
            log_iteration(job, state, values, episodes)
            if values["malformed"] > args.max_malformed * len(episodes):
                raise ValueError(f"iteration {state.step}: {values['malformed']} of {len(episodes)} dreamt "
                                 f"episodes broke off in malformed answers (--max-malformed "
                                 f"{args.max_malformed}): train the experience model longer, and see "
                                 f"{job.out / 'episodes.jsonl'}")
            bar.update(1)
            over = state.world(args) != world
            if over or state.step % args.eval_every == 0:
                validate(job, state)
            asked = stop.agreed(dist)
            if asked or over or state.step % args.save_every == 0 or clock.rang(dist):
                save()
                clock.restart()
    if asked:
        raise SystemExit(130)
    first = dist.broadcast(run.read_json(before) if dist.is_main else None)
    return [first] + ([test(job, state, "after")] if state.step else [])


def log_iteration(job: Job, state: Run, values: dict, episodes: list[Episode]) -> None:
    """metrics.jsonl, the console line, and the episodes themselves."""
    report = policy_report(episodes, job.env.audit)
    values["malformed"] = report["stops"].get(StopReason.MALFORMED, 0)
    groups = {"stop": report["stops"], "reward": report["reward_confusion"],
              "dream": state.experience_model.counts, "policy": state.policy.counts}
    values |= {f"{group}/{k}": v for group, counts in groups.items() for k, v in counts.items()}
    values |= {k: report[k] for k in ("success", "length", "invalid")}
    values |= state.transitions() | state.curriculum.summary()
    values |= {"replay": len(state.experience_model.buffer),
               "synthetic_share": state.experience_model.buffer.share_synthetic()}
    job.log.step("rl", state.step, values, ["world", "success", "malformed", "entropy", "kl_ref",
                                            "zero_variance", "rollout_s", "update_s"])
    if job.dist.is_main:
        run.write_jsonl(job.out / "episodes.jsonl", map(to_json, episodes), append=True)


def finish(job: Job, state: Run, results: list[dict]) -> None:
    """The table and the picture a user ends with."""
    names = {"before": "start (imitation)", "after": "after RL"}
    rows = [{"policy": names[result["policy"]],
             **{key: with_interval(report) for key, report in result["reports"].items()},
             "RL transitions, dream / real": "{dream_transitions:,} / {real_transitions:,}".format(**result)}
            for result in results]
    env, out = job.env, job.out
    note = "" if env.is_real else ("no real environment (--env logs): success in the dream only, "
                                   "which says nothing about the real one")
    run.write_json(out / "result.json",
                   {"environment": env.describe(), "label": env.label, "settings": asdict(job.args),
                    "rows": rows, "test": results, "validation": state.evaluations, "note": note})
    picture = plots.training_curve(out)
    job.log.say(f"\n{env.name}, {env.label}: {results[0]['tasks']} test tasks, world and temperature, 95 % "
                f"Wilson intervals\n{run.summary_table(rows)}\n{note}")
    page = show_test(job, state, results[-1]["policy"])
    job.log.say(f"everything is in {out}: result.json, metrics.jsonl, episodes.jsonl, expmodel/report.json, "
                f"policy/; picture {picture}; page to read {page}\n"
                f"next: python evaluate.py --env {job.args.env} --policy {out / 'policy'} --play 10   |   "
                f"tensorboard --logdir {out}")


def show_test(job: Job, state: Run, name: str) -> Path:
    """Writes OUT/dream.html: the test episodes on file that were played at the dream's temperature."""
    episodes, cut = viewer.read_tail(job.out / f"test-{name}.jsonl", kind=Episode)
    alike = [e for e in episodes if e.id.startswith((f"test-{name}-real-1-", f"test-{name}-dream-1-"))]
    state.experience_model.clear_caches()
    about = f"test tasks at temperature 1, policy {name} RL"
    viewer.write_page(job.out / "dream.html", job.env, about, alike, state.experience_model, job.out, [cut])
    return job.out / "dream.html"


def run_config(args: Args) -> dict:
    """The settings that must be equal at resume."""
    return {k: v for k, v in asdict(args).items() if k not in FREE}


def read_splits(args: Args, data: Path) -> dict[str, list[Task]]:
    """All training tasks, and as many validation and test tasks as are played, the same ones in every run."""
    splits = {name: read_tasks(data / f"tasks_{name}.jsonl") for name in ("train", "valid", "test")}
    for name, count in (("valid", args.eval_tasks), ("test", args.test_tasks)):
        order = run.rng(0, name).permutation(len(splits[name]))[:count]
        splits[name] = [splits[name][i] for i in order]
    return splits


def start_log(out: Path, resume: Path | None, dist) -> run.Log:
    """The log at the step of `resume`; what was written after it is dropped, for it is made again."""
    saved = run.read_json(resume / "run.json") if resume else {"evaluations": []}
    step = saved["step"] if saved["evaluations"] else -1        # -1: not even evaluated, all is made again
    log = run.Log(out, dist, step)
    if dist.is_main:
        cut_episodes(out / "episodes.jsonl", step - 1)
        cut_episodes(out / "evaluations.jsonl", step)
        (out / "result.json").unlink(missing_ok=True)    # it says that the run is finished
    return log


def main() -> None:
    args = run.parse(Args)
    check(args)
    if is_url(args.expmodel):
        reach_server(args)                       # before anything that takes time
    dist = run.init_dist(args.seed, args.threads)
    out = Path(args.out or out_folder(args.env))
    run.check_ranks(args, out, dist)
    if args.fresh and dist.is_main:              # what an earlier run left must not be taken for this one's
        for folder in [out / "policy", *([] if args.imitation else [out / "imitation"])]:
            shutil.rmtree(folder, ignore_errors=True)
    data, expmodel = prepare(args, out, dist)
    env, _ = environment_of(args.env, data, dist, workers=run.spare_cores(dist))
    world = {"environment": env.describe()}
    if expmodel:
        run.check_meta(run.load_meta(expmodel / "model"), world | {"finished": True}, expmodel,
                       "train the experience model on this data to its end")
    resume = run.latest_checkpoint(out, "policy", dist)
    if resume:
        run.check_meta(run.load_meta(resume).get("settings", {}), run_config(args), resume)
        run.check_meta(run.load_meta(resume), world, resume)
    splits = read_splits(args, data)
    offline = [e for e in read_episodes(data / "train.jsonl") if e.source != "counterfactual"]
    log = start_log(out, resume, dist)
    log.say(f"{env.name} ({env.label}): {', '.join(f'{len(t)} {n}' for n, t in splits.items())} tasks; "
            f"{args.tasks} tasks x {args.rollouts} rollouts "
            f"= {args.tasks * args.rollouts} episodes an iteration, {args.updates} optimizer steps each")
    probes = run.read_json(expmodel / "report.json")["full"] if expmodel else {}
    if failed := failed_probes(probes):
        log.say(f"probes of the experience model that did not pass: {'; '.join(failed)}")
    policy, reference = starting_policy(args, env, (out, expmodel), offline, resume, dist, log)
    model = open_experience_model(args, expmodel, env, data / "train.jsonl", dist.device, resume,
                                  beside=policy.model, dtype=args.dtype, slots=args.slots,
                                  seed=run.derive_seed(args.seed, "dream", dist.rank))
    if args.dream:
        model = World(model, env, parse_options(args.dream), args.seed, dist.rank)
    if args.init == "expmodel" and model.model:
        tiny.check_tokenizer(policy.tokenizer, model.tokenizer)
    state = make_run(args, policy, reference, model, splits["train"], resume, dist)
    words = known_words([t.text for t in splits["train"]] + [s.state for e in offline for s in e.steps])
    job = Job(args, env, splits, words, probes, out, log, dist)
    results = train(job, state)
    with unsharded(model.model):                 # all ranks gather what rank 0 asks for the page
        if dist.is_main:
            finish(job, state, results)
    env.close()
    log.close()
    dist.close()


def cut_episodes(path: Path, last: int) -> None:
    """Drops the episodes of iterations after `last`, which a resumed run plays again, and half a line that a
    kill left."""
    run.mend_jsonl(path)
    kept = [to_json(e) for e in read_episodes(path) if e.iteration <= last] if path.is_file() else []
    run.write_jsonl(path, kept, append=False)


if __name__ == "__main__":
    run.main(main)
