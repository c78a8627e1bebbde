"""Offline transitions -> experience model: supervised learning of reasoning, next state and reward (DreamGym, arXiv 2511.03773, Eq. 5).

    python train_expmodel.py --data out/data --out out/expmodel                      # tiny, from scratch, minutes on a CPU
    torchrun --nproc-per-node 8 train_expmodel.py --model Qwen/Qwen2.5-1.5B-Instruct # the same, larger
    python train_expmodel.py --model Qwen/Qwen2.5-1.5B-Instruct --quantize nf4 --lora-rank 16

Half of every batch are relabelled judged steps (WebShop: purchases). Training goes on until the probes pass (a near miss is not paid, a refused action is not accepted) or
--max-steps is reached, which is then said plainly. Writes the model, its replay buffer, phi, and report.json.
"""
from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from dreamgym import run
from dreamgym.envs import make_offline, make_rules
from dreamgym.episode import Step, read_episodes, read_tasks, renamed_step
from dreamgym.experience_model import DreamSettings, ExperienceModel, Query, fill_buffer, load_encoder, retrieve, settings_for, training_row
from dreamgym.losses import aggregate, check_finite, sft_loss
from dreamgym.model import SIZES, Row, build_tokenizer, chat_format, create_tiny, encode_untrusted, gathered, load_model, row_logps, save_model, shard
from dreamgym.optim import even_micro_batches, make_optimizers, set_rate, step_all
from dreamgym.prompts import VARY_SYSTEM, Demo, experience_answer, experience_prompt, vary_prompt
from dreamgym.replay import ReplayBuffer
from dreamgym.report import experience_report, probes_passed, replayed_contradictions, step_queries
from dreamgym.task_generation import variation_rows


REPLAYED = 60                                      # held-out episodes whose actions are played through in the dream, for the report


@dataclass
class Args:
    data: str = "out/data"             # folder written by collect.py
    out: str = "out/expmodel"          # folder to write
    model: str = "tiny"                # tiny | tiny128 (from scratch), or a path or hub name of a causal LM
    quantize: Literal["none", "nf4"] = "none"  # nf4: 4-bit weights, trained through --lora-rank
    lora_rank: int = 0                 # rank of LoRA on all linear layers (0: full fine-tuning)
    encoder: str = "self"              # phi: self (the untrained model) | path or hub name of an encoder
    k: int = 1                         # retrieved demonstrations (ours; the paper does not say)
    retrieval: bool = True             # ablation: without the replay buffer
    history: int = 1                   # pages of the episode so far that it reads (0: ablation without history; ours)
    reasoning: bool = True             # ablation: without reasoning traces
    judged: bool = True                # train on relabelled purchases (--no-judged: the naive reward)
    steps: int = 0                     # optimizer steps before the probes are first looked at (0: the environment's, 1,400 for WebShop)
    max_steps: int = 0                 # ... and at most (0: the environment's, 2,600 for WebShop)
    rows: int = 24                     # transitions per optimizer step
    lr: float = 0.0                    # peak learning rate (0: 1e-2 from scratch, 1e-5 full fine-tuning, 1e-4 LoRA)
    prompt_loss: float = -1.0          # share of prompt tokens that are predicted, too (-1: 0.3 from scratch, where it teaches copying; else 0)
    context: int = 1024                # tokens of prompt and answer
    micro_batch_tok: int = 2048        # tokens per micro-batch: memory only, never changes the gradient
    probe_rows: int = 600              # held-out episodes per probe during training (the final report uses all)
    report_variants: bool = True       # report also without history, retrieval, reasoning
    save_every: int = 200              # steps between checkpoints
    seed: int = 0                      # weights, batches
    threads: int = 1                   # torch threads
    fresh: bool = False                # start over even when the folder holds a fitting model or checkpoint

    def __post_init__(self):
        if self.quantize != "none" and not self.lora_rank:
            raise ValueError(f"--quantize {self.quantize}: 4-bit weights cannot be trained themselves; expected --lora-rank, too")
        if self.model in SIZES and self.lora_rank:
            raise ValueError(f"--lora-rank {self.lora_rank}: the {self.model} model is trained in full; expected --model with a path or hub name")
        if min(self.rows, self.save_every, self.micro_batch_tok) < 1 or min(self.steps, self.max_steps, self.k, self.history) < 0:
            raise ValueError("--rows, --save-every and --micro-batch-tok are at least 1, --steps, --max-steps, --k and --history at least 0")


def build_rows(args: Args, tokenizer, rules, settings: DreamSettings, episodes, buffer, encoder) -> list[Row]:
    """One row per transition, with the demonstrations it would retrieve (never from its own episode; where the rules say so, some from other tasks only),
    and with things renamed where the rules know how."""
    fmt, rng = chat_format(tokenizer, settings.system), run.rng(args.seed, "rows")
    queries, steps = step_queries(episodes)
    of_task = defaultdict(set)
    for episode in episodes:
        of_task[episode.task.id].add(episode.id)
    if rules.OTHER_TASKS:
        queries = [replace(q, episode_id=of_task[e.task.id]) if rng.random() < rules.OTHER_TASKS else q for q, (e, _) in zip(queries, steps)]
    rows = []
    with run.progress(len(steps), "rows") as bar:
        for start in range(0, len(steps), 256):
            part = slice(start, start + 256)
            for query, (_, step), demos in zip(queries[part], steps[part], retrieve(buffer, encoder, rules, settings, queries[part])):
                demos = [] if rules.WITHOUT_DEMO and rng.random() < rules.WITHOUT_DEMO else demos
                for _ in range(1 if step.valid else rules.REFUSED_ROWS):
                    q, d, s = renamed(rules.renaming(rng, step.action, step.valid), rules, settings, query, demos, step)
                    rows.append(training_row(fmt, tokenizer, rules, settings, q.task_text, q.history, d, s))
            bar.update(len(steps[part]))
    return rows


def renamed(change, rules, settings: DreamSettings, query: Query, demos: list[Demo], step: Step) -> tuple[Query, list[Demo], Step]:
    """The parts of one training row with `change` (str -> str, or None) made in every text."""
    if change is None:
        return query, demos, step
    history = [(change(s), change(a)) for s, a in rules.recall(query.history, query.state, query.grounded, settings.history or 1)]
    return replace(query, task_text=change(query.task_text), history=history), [Demo(change(d.action), change(d.next_state)) for d in demos], renamed_step(step, change)


def main() -> None:
    args = run.parse(Args)
    ranks = run.start(args.seed, args.threads)
    data, out = Path(args.data), Path(args.out)
    data_meta = run.data_meta(data)
    env_name = data_meta["environment"]["env"]
    rules, tiny = make_rules(env_name), args.model in SIZES
    args.steps, args.max_steps = args.steps or rules.EXPERIENCE_STEPS[0], args.max_steps or max(args.steps, rules.EXPERIENCE_STEPS[1])
    args.lr = args.lr or (1e-2 if tiny else 1e-4 if args.lora_rank else 1e-5)
    args.prompt_loss = args.prompt_loss if args.prompt_loss >= 0 else 0.3 if tiny else 0.0
    kept = {k: v for k, v in asdict(args).items() if k not in ("data", "out", "fresh", "threads", "micro_batch_tok", "save_every")}
    made_from = {"environment": data_meta["environment"], "data": data_meta["settings"]}
    resume = run.latest_checkpoint(out, "model", ranks)
    if resume and args.fresh:                    # nothing of an earlier model may be taken for this one's
        if ranks.is_main:
            shutil.rmtree(resume)
        ranks.barrier()
        resume = None
    if resume:
        meta = run.load_meta(resume)
        run.check_meta(meta.get("settings", {}), kept, resume)
        run.check_meta(meta, made_from, resume)
        if meta["finished"]:
            if ranks.is_main:
                print(f"{out}: finished and fits these flags, kept (--fresh starts over)")
            return ranks.close()
    if ranks.is_main:
        (out / "report.json").unlink(missing_ok=True)    # it says that the model is finished
    episodes, heldout = read_episodes(data / "train.jsonl"), read_episodes(data / "heldout.jsonl")
    tasks = read_tasks(data / "tasks_train.jsonl")
    offline = [e for e in episodes if e.source != "relabelled"]
    judged = [e for e in episodes if e.source == "relabelled"] if args.judged else []
    little = []
    if tiny and judged and rules.MINIATURES:
        little = make_offline(env_name).miniatures(data_meta["settings"]["env_seed"], rules.MINIATURES, run.rng(args.seed, "miniatures"))

    if resume:
        model, tokenizer = load_model(resume, quantize=args.quantize, device=str(ranks.device))
    elif tiny:
        tokenizer = build_tokenizer(chain(corpus(episodes, tasks), [rules.MORE_WORDS]), rules.TOKENS)
        model = create_tiny(tokenizer, args.model, args.seed)
    else:
        model, tokenizer = load_model(args.model, "auto" if args.lora_rank else "float32", args.quantize, args.lora_rank, device=str(ranks.device), seed=args.seed)
    model.to(ranks.device)
    settings = settings_for(env_name, tiny, k=args.k if args.retrieval else 0, history=args.history, reasoning=args.reasoning, context=args.context)
    if data_meta["environment"].get("admissible"):       # a page with its commands is some 120 to 370 words long
        settings = replace(settings, max_new_tok=512, context=max(2048, args.context))
    if args.encoder == "self" and not resume:
        save_model(model, tokenizer, out / "phi")        # phi, frozen beside the model: the untrained model itself
    encoder = load_encoder(args.encoder, out, ranks.device, args.quantize)
    buffer = ReplayBuffer(encoder.dim, capacity=200_000, exact_below=50_000, seed=args.seed)   # exact search is faster up to there (benchmarks/replay_search.py)
    fill_buffer(buffer, encoder, rules, offline)
    rows = build_rows(args, tokenizer, rules, settings, offline, buffer, encoder)
    judged_rows, little_rows = (build_rows(args, tokenizer, rules, settings, part, None, encoder) for part in (judged, little))
    vary_rows = variation_rows(tokenizer, rules, tasks, 2_000, run.rng(args.seed, "vary"), "" if tiny else VARY_SYSTEM[env_name])
    pools = {"transitions": rows, "judged": judged_rows, "little": little_rows, "vary": vary_rows}
    model = shard(model)
    optimizers = make_optimizers(model, args.lr, from_scratch=tiny)
    verdicts = {encode_untrusted(tokenizer, f"so {word}")[-1]: rules.VERDICT_WEIGHT for word in ("yes", "no")}
    step = 0
    if resume:
        step = load_training(resume, optimizers, ranks)
    log = run.Log(out, ranks, resume_step=step if resume else -1)
    parameters = sum(p.numel() for p in model.parameters())
    mean_tok = np.mean([len(r.ids) for r in rows])
    log.say(f"experience model {args.model}: {parameters:,} parameters, vocabulary {len(tokenizer)}; {len(rows)} transitions of {mean_tok:.0f} tokens, "
            f"{len(judged_rows)} relabelled judged steps, {len(little_rows)} miniatures, {len(vary_rows)} task variations; {args.rows} rows a step over {ranks.world} rank(s)")

    def save(finished: bool, report: dict | None = None) -> None:
        def write(path: Path) -> None:
            save_model(model, tokenizer, path)
            save_training(path, optimizers, step, ranks)
            if ranks.is_main:
                buffer.save(path / "replay")
        if report and ranks.is_main:
            run.write_json(out / "report.json", report)
        run.save_checkpoint(out, "model", write, {"settings": kept, **made_from, "finished": finished, "step": step, "dream": asdict(settings), "tokens": len(tokenizer)}, ranks)

    refused = [e for e in heldout if e.source != "relabelled" and any(rules.action_type(s.state, s.action) == "refused" for s in e.steps)]
    probe = [e for e in heldout if e.source == "relabelled"][:args.probe_rows] + refused[:args.probe_rows // 6]
    if not resume:
        save(False)                              # a save that cannot work fails in the first minute
    with run.graceful(log) as stop, run.progress(args.max_steps, "experience model") as bar:
        bar.update(step)
        failed: list[str] = ["not looked at yet"]
        while step < args.max_steps:
            if step >= args.steps and (step - args.steps) % 200 == 0:
                failed = probes_passed(report_on(model, tokenizer, rules, settings, buffer, encoder, probe))
                log.say(f"step {step}: probes {'passed' if not failed else 'not passed: ' + '; '.join(failed)}")
                if not failed or not args.judged:
                    break
            values = train_step(args, model, optimizers, step, pools, verdicts, rules.MINIATURE_STEPS, ranks)
            step += 1
            bar.update(1)
            if step % 50 == 0:
                log.step("expmodel", step, values, ["loss", "lr"])
            if stop.agreed(ranks):
                save(False)
                raise SystemExit(130)
            if step % args.save_every == 0:
                save(False)
        save(False)                              # the report takes a while
    with run.graceful(log) as stop, run.progress(4 if args.report_variants else 1, "report") as bar:
        report = {"data": data_meta["environment"], "parameters": parameters, "steps": step, "full": report_on(model, tokenizer, rules, settings, buffer, encoder, heldout, True)}
        bar.update(1)
        failed = probes_passed(report["full"])
        report["probes_failed"] = failed
        for name, change in {"history": {"history": 0}, "retrieval": {"k": 0}, "reasoning": {"reasoning": False}}.items() if args.report_variants else []:
            if stop.agreed(ranks):
                raise SystemExit(130)
            report[f"without {name}"] = report_on(model, tokenizer, rules, replace(settings, **change), buffer, encoder, heldout, True)
            bar.update(1)
    save(True, report)
    show(log, report, failed)
    log.close()
    ranks.close()


def corpus(episodes, tasks):
    """Every text the tokenizer must know, in the form the model will see it."""
    for task in tasks:
        yield vary_prompt(task.text)
    for episode in episodes:
        for step in episode.steps:
            yield experience_prompt(episode.task.text, [], [], step.state, step.grounded)
            yield experience_answer(step.reasoning, step.state, step.next_state, step.reward, step.done)


def train_step(args: Args, model, optimizers, step: int, pools: dict[str, list[Row]], weights: dict[int, float], little_steps: int, ranks) -> dict:
    """One optimizer step on --rows rows, drawn by step (so that a resumed run draws the same): half are judged steps (half of these miniatures, where there are any), 5 %
    task variations, the rest transitions; the first `little_steps` have miniatures only. `weights`: of tokens in answers that weigh more than others."""
    rng = run.rng(args.seed, "batch", step)

    def pool(x: float) -> list[Row]:
        kind = "little" if pools["little"] and (x < 0.25 or step < little_steps) else "judged" if x < 0.50 else "vary" if x > 0.95 else "transitions"
        return pools[kind] or pools["transitions"]
    source = [pool(x) for x in rng.random(args.rows)]
    batch = [rows[rng.integers(len(rows))] for rows in source]
    # A prompt token is predicted with probability --prompt-loss: the expected gradient of that weight on all of them, for two thirds of the time
    predicted = [Row(r.ids, [0, *(np.array(r.mask[1:], int) | (rng.random(len(r.ids) - 1) < args.prompt_loss)).tolist()]) for r in batch]
    batch, predicted = batch[ranks.rank::ranks.world], predicted[ranks.rank::ranks.world]
    total = ranks.all_reduce_sum(float(sum(sum(r.mask) for r in batch)))
    set_rate(optimizers, step, args.steps, warmup=50, floor=0.1)
    loss_sum = 0.0
    for indices in even_micro_batches(batch, args.micro_batch_tok, ranks):
        loss_N = sft_loss(row_logps(model, [predicted[i] for i in indices], with_entropy=False)[0])
        learnt = [(token, answer) for i in indices for token, answer, p in zip(batch[i].ids, batch[i].mask, predicted[i].mask) if p]
        weight_N = torch.tensor([weights.get(token, 1.0) if answer else 1.0 for token, answer in learnt], device=ranks.device)
        loss = aggregate(loss_N * weight_N, total / ranks.world)
        check_finite(loss, f"experience model loss of step {step}, rows {indices}")
        loss.backward()
        loss_sum += float(loss_N.detach().float() @ torch.tensor([float(answer) for _, answer in learnt], device=ranks.device)) / total
    norm = step_all(model, optimizers)
    return {"loss": ranks.all_reduce_sum(loss_sum), "lr": optimizers[0].param_groups[0]["lr"], "grad_norm": norm, "tokens": total}


def report_on(model, tokenizer, rules, settings, buffer, encoder, episodes, whole: bool = False) -> dict:
    """`whole`: the recorded actions are played through in the dream, too."""
    dream = ExperienceModel(model.eval(), tokenizer, rules, settings, buffer, encoder)
    dream.forget()                               # rounding must not depend on what an uninterrupted run would still hold in memory
    with gathered(model):
        report = experience_report(dream, episodes)
        if whole:
            report["contradictions"] = replayed_contradictions(dream, [e for e in episodes if e.source != "relabelled"][:REPLAYED])
    model.train()
    return report


def save_training(path: Path, optimizers, step: int, ranks) -> None:
    torch.save({"optimizers": [o.state_dict() for o in optimizers], "step": step, "random": run.get_random_state()}, path / f"training-{ranks.rank}.pt")


def load_training(path: Path, optimizers, ranks) -> int:
    saved = len(list(path.glob("training-*.pt")))
    if saved != ranks.world:
        raise ValueError(f"{path}: found the state of {saved} ranks, expected {ranks.world}; continue with as many, or use --fresh or --out another folder")
    state = torch.load(path / f"training-{ranks.rank}.pt", weights_only=True)
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    run.set_random_state(state["random"])
    return state["step"]


def show(log, report: dict, failed: list[str]) -> None:
    names = [n for n in ("full", "without history", "without retrieval", "without reasoning") if n in report]
    table = [{"model": n, "exact": report[n]["exact"]["share"], "F1": report[n]["f1"], **{k: v["share"] for k, v in report[n]["by_knowledge"].items()},
              "near miss paid (max)": max([v["share"] for k, v in report[n]["near_miss_paid"].items() if k != "none"], default=float("nan")),
              "refusals accepted": report[n]["refusals_accepted"]["share"], "malformed": report[n]["malformed"],
              "contradictions": report[n]["contradictions"]["share"]} for n in names]
    log.say(run.summary_table(table))
    log.say("by action: " + "  ".join(f"{k} {v['share']:.3f} (n {v['n']})" for k, v in report["full"]["by_action"].items()))
    log.say("near misses paid: " + "  ".join(f"{k} {v['share']:.3f} (n {v['n']})" for k, v in report["full"]["near_miss_paid"].items()))
    log.say("probes passed" if not failed else "PROBES NOT PASSED: " + "; ".join(failed))


if __name__ == "__main__":
    run.main(main)
