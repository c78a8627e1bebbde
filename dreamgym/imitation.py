"""The policy that RL starts from: it imitates a few demonstrations.

    begun = find_imitation(args, (out, expmodel), dist)
    start = imitation_checkpoint(args, env, begun, episodes, dist, log)
    policy, reference = starting_policy(args, env, start, resume, out, dist)

The players of the demonstrations make mistakes: imitation must leave entropy for RL to work with.
`args` are the flags of train_policy.py.
"""
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from dreamgym import checkpoint, run, tiny
from dreamgym.envs.base import Environment
from dreamgym.episode import Episode, rename_episode, successes
from dreamgym.logprobs import TrainSample
from dreamgym.model import checkpoint_layers, load_frozen, load_model, save_model
from dreamgym.names import Names
from dreamgym.rollout import Policy, PolicySettings, imitation_segments
from dreamgym.sft import make_optimizers, set_rate, sft_step

LEFT_DREAM = "dream-policy"            # the policy with which real RL began after the dream


def starting_policy(args, env: Environment, start: Path, resume: Path | None, out: Path,
                    dist) -> tuple[Policy, torch.nn.Module | None]:
    """(policy, reference). The policy has the weights of `resume`, else those of imitation, `start`. The
    reference has those of `start`, or of the policy that left the dream, if `resume` is later."""
    policy = make_policy(args, env, str(resume or start), dist)
    saved = run.read_json(resume / "run.json") if resume else {}
    if saved.get("dream_transitions") and saved["real_transitions"]:
        start = out / LEFT_DREAM
    return policy, load_reference(args, start, policy, dist)


def load_reference(args, folder: Path, policy: Policy, dist) -> torch.nn.Module | None:
    """The frozen policy in `folder` for the KL term, if there is one."""
    if not args.kl_coef or args.algo not in ("grpo", "ppo"):
        return None
    return load_frozen(str(folder), "reference", policy.model, args.dtype, args.quantize, str(dist.device))[0]


def make_policy(args, env: Environment, name: str, dist, lora_rank: int = 0) -> Policy:
    """The policy with the weights in the folder, or of the hub's model, `name`; with `lora_rank`, under new
    adapters."""
    model, tokenizer = load_model(name, args.dtype, args.quantize, lora_rank, str(dist.device), args.seed)
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    settings = PolicySettings(args.policy_context, args.max_action_tok, args.policy_format,
                              args.system_prompts, args.tried_actions, args.task_last)
    return Policy(model, tokenizer, env, settings, args.slots,
                  run.derive_seed(args.seed, "policy", dist.rank))


class Begun(NamedTuple):
    """What is there of the imitation of a run."""
    folder: Path
    settings: dict
    start: str | Path                            # the weights that it begins with
    found: Path | None                           # its checkpoint
    finished: bool


def find_imitation(args, folders: tuple[Path, Path | None], dist) -> Begun:
    """In --imitation or OUT/imitation; `folders`: OUT, and the experience model. Raises ValueError where the
    one that --imitation names is not finished, or one has other settings."""
    out, expmodel = folders
    folder = Path(args.imitation or out / "imitation")
    names = ["env", "model", "quantize", "lora_rank", "init", "rename_share",
             "policy_format", "system_prompts", "policy_context", "max_action_tok", "tried_actions",
             "task_last"]
    names += [name for name in vars(args) if name.startswith("imitation_")]
    run_config = {name: getattr(args, name) for name in names}
    if not args.imitation:                       # another run's policy may have another seed, and model
        run_config |= {"seed": args.seed, "expmodel": ""}
        if args.init == "expmodel":
            run_config["expmodel"] = run.fingerprint(run.load_meta(expmodel / "model"))
    anew = args.fresh and not args.imitation
    found = None if anew else checkpoint.find(folder, "model", {"settings": run_config}, dist)
    finished = found is not None and run.load_meta(found)["finished"]
    if args.imitation and not finished:
        raise ValueError(f"--imitation {folder}: found no finished policy there; expected the folder "
                         "imitation/ of an earlier run")
    start = expmodel / "model" if args.init == "expmodel" else args.model
    return Begun(folder, run_config, start, found, finished)


def imitation_checkpoint(args, env: Environment, begun: Begun, episodes: list[Episode], dist, log) -> Path:
    """The checkpoint of the policy before RL, made or finished where needed."""
    folder, run_config, start, found, finished = begun
    if finished:
        return found
    policy = make_policy(args, env, str(found or start), dist, 0 if found else args.lora_rank)

    def save(optimizers: list, state: dict, finished: bool = False) -> Path:
        def write(path: Path) -> None:
            save_model(policy.model, policy.tokenizer, path)
            checkpoint.save_state(path, optimizers, state, {}, dist)
        saved = {"settings": run_config, "policy": asdict(policy.settings), "finished": finished}
        return checkpoint.save(folder, "model", write, saved, dist)
    imitate(args, policy, episodes, found, save, dist, log)
    return save([], {}, finished=True)


def demonstrations(episodes: list[Episode]) -> list[Episode]:
    """The successful episodes with steps to imitate; all of these, where none is successful. Probes that
    changed nothing are left out: a policy would copy what resembles the right action (docs/lab-notes.md)."""
    found = [replace(episode, steps=[step for step in episode.steps if step.imitate or step.valid])
             for episode in episodes if any(step.imitate for step in episode.steps)]
    return [episode for episode in found if episode.success] or found


def imitate(args, policy: Policy, episodes: list[Episode], resume: Path | None,
            save: Callable[[list, dict], Path], dist, log) -> None:
    """Behaviour cloning. `save(optimizers, state)` is called after each epoch and at Ctrl-C; `resume`: what
    it wrote."""
    demos = run.sample(demonstrations(episodes), args.imitation_episodes, args.seed, "imitation")
    if not demos:
        log.say("no demonstrations: the policy starts from the model as it is" if not args.imitation_episodes
                else "found no demonstrations (of logs, a language model, or players with imitate=True): the "
                     "policy starts from the model as it is")
        return
    names = Names((episode.task.text for episode in episodes), episodes)
    coder = tiny.WordCoder(policy.tokenizer)
    optimizers = make_optimizers(policy.model, args.imitation_lr, args.imitation_muon_lr,
                                 epsilon=args.imitation_epsilon)
    step = resume_step = total_steps = 0
    if resume:
        resume_step = checkpoint.load_state(resume, optimizers, dist)[0]["step"]
    save_step = lambda: save(optimizers, {"step": step})
    with run.graceful(log) as stop, run.progress(args.imitation_epochs, "imitation") as bar:
        for epoch in range(args.imitation_epochs):
            rows = demonstration_rows(args, policy, demos, names, coder, epoch)
            total_steps = total_steps or args.imitation_epochs * -(-len(rows) // args.imitation_rows)
            for start in range(0, len(rows), args.imitation_rows):
                step += 1
                if step <= resume_step:
                    continue
                set_rate(optimizers, step - 1, total_steps, warmup=min(20, max(1, total_steps // 3)))
                batch = rows[start:start + args.imitation_rows]
                sft_step(policy.model, batch[dist.rank::dist.world_size], optimizers, args.micro_batch_tok,
                         dist)
                if stop.agreed(dist):
                    save_step()
                    raise SystemExit(130)
            if step > resume_step:
                save_step()
            bar.update(1)
    log.say(f"imitated {len(demos)} episodes ({successes(demos):.0%} of them successful)")
    if cut := policy.counts["cut_demonstrations"]:
        log.say(f"in {cut / args.imitation_epochs:.0f} of them a turn is longer than --max-action-tok "
                f"{args.max_action_tok} or --policy-context {args.policy_context}: it and what follows was "
                "left out")


def demonstration_rows(args, policy: Policy, demos: list[Episode], names: Names,
                       coder: tiny.WordCoder, epoch: int) -> list[TrainSample]:
    """The demonstrations as shuffled rows. Randomizes entity names in --rename-share of them each epoch, so
    that the policy learns to search instead of memorizing where objects are."""
    rng, rows = run.rng(args.seed, "imitation rows", epoch), []
    for demo in demos:
        rows += imitation_segments(policy, rename_episode(demo, names.draw(args.rename_share, rng)))
    rows = [coder.draw(row, args.policy_context, rng) for row in rows]
    return [rows[i] for i in rng.permutation(len(rows))]
