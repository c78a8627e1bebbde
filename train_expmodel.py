"""Offline transitions -> experience model: supervised learning of reasoning, next state and reward (DreamGym,
Eq. 5).

    python train_expmodel.py --env webshop   # from scratch, minutes on a CPU
    python train_expmodel.py --env webshop --model Qwen/Qwen2.5-1.5B-Instruct  # a language model
    python train_expmodel.py --env webshop --config configs/gpu24_qlora.json          # LoRA on 4-bit weights
    torchrun --nproc-per-node 8 train_expmodel.py --env webshop --model meta-llama/Llama-3.1-8B-Instruct \
        --config configs/gpu8x80.json

Rows of five kinds are mixed: next states, the same as short questions, rewards of recorded steps, rewards of
counterfactual steps, task variations (Eq. 6). From --steps on, training stops as soon as the probes pass on
validation data, at the latest at --max-steps. Writes the model, its replay buffer and report.json.
"""
from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from dreamgym import checkpoint, run, summary, tiny
from dreamgym.encoder import WORD
from dreamgym.envs.base import out_folder
from dreamgym.episode import (Episode, Source, Step, StopReason, read_episodes, read_tasks, recorded,
                              rename_step)
from dreamgym.evaluation import experience_report, failed_probes, probe_verdict, replayed_inconsistencies
from dreamgym.experience_model import ExperienceModel, ExperienceSettings, new_retrieval, save_settings
from dreamgym.flags import Count, Natural, Share, Weight
from dreamgym.logprobs import TrainSample
from dreamgym.memory import budget, check_memory, measure
from dreamgym.model import (checkpoint_layers, export_model, load_model, precision, save_model, shard,
                            unsharded)
from dreamgym.names import Names
from dreamgym.offline import environment_of
from dreamgym.page_diff import encode
from dreamgym.prepare import check_model
from dreamgym.prompts import Question, rename_question
from dreamgym.sft import make_optimizers, set_rate, sft_step
from dreamgym.task_generation import variation_samples
from dreamgym.word_tokenizer import build_tokenizer


@dataclass
class Args:
    env: str = "webshop"  # webshop | alfworld | webarena | logs | package.module:Class | path/to/file.py
    data: str = ""                     # folder that collect.py wrote (default: out/ENV/data)
    out: str = ""                      # folder to write (default: out/ENV/expmodel)
    model: str = "scratch:64x3"        # path or hub name of a causal LM, or scratch:HIDDENxLAYERS
    numbered_names: bool = False       # a from-scratch tokenizer: "drawer 3" is one token
    quantize: Literal["none", "nf4"] = "none"  # nf4: 4-bit weights, trained through --lora-rank
    lora_rank: Natural = 0  # rank of LoRA on all linear layers, which wants 10 times the --lr (0: full)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of computing (auto: bfloat16 on a GPU)
    gradient_checkpointing: bool = False  # compute activations again in the backward: less memory, slower
    slots: Count = 128                 # rows decoded at once on a rank (memory of the KV cache)
    encoder: str = "words"             # phi: words (tf-idf, no model) | path or hub name of an encoder
    k: Natural = 1  # retrieved demonstrations (0: ablation without the replay buffer; ours)
    history: Natural = 2  # last changing steps shown, and as many earlier ones (0: ablation; ours)
    min_similarity: float = 0.3        # demonstrations of a lower cosine are not shown (ours)
    reasoning: bool = True             # a reasoning trace before each answer (no: ablation)
    show_first: bool = False           # the first step of an episode, too: it often says what there is (ours)
    # next states whole, or as differences to known pages, which are named by tags, or by their first lines
    page_format: Literal["full", "diff", "titles"] = "full"
    next_temperature: Weight = 0.0     # of answers whose likeliest page is new; 0: the likeliest page (ours)
    context: Count = 4096              # tokens of prompt and answer
    max_next_tok: Count = 1024         # tokens of an answer about the next state
    max_reward_tok: Count = 256        # tokens of an answer about the reward
    max_resamples: Natural = 2         # times that a malformed answer is drawn again (ours)
    confirmations: Natural = 0  # times that a paying verdict is drawn again; one dissent counts (ours)
    system_prompts: bool = True        # say in a system prompt what the model is
    steps: Count = 1000                # optimizer steps before the probes are first looked at
    max_steps: Count = 2000            # optimizer steps at most
    epochs: Weight = 0.0  # passes over the recorded transitions, in place of both numbers of steps (0: those)
    rows: Count = 32                   # rows per optimizer step
    lr: Weight = 1e-5                  # peak learning rate of AdamW
    muon_lr: Weight = 0.0  # learning rate of Muon on layer matrices (0: AdamW on all; from-scratch models)
    weight_decay: Weight = 0.01        # of both
    epsilon: Weight = 1e-8             # of AdamW; 5e-4: rare words stay apart (from-scratch models)
    warmup: Count = 50                 # steps of linear warm-up
    lr_floor: Share = 0.1              # the cosine falls to this share of the peak
    reward_share: Share = 0.15         # share of rows: rewards of recorded steps
    counterfactual_share: Share = 0.25  # share of rows: rewards of counterfactual steps (0: the naive reward)
    variation_share: Share = 0.05      # share of rows: task variations
    short_first_steps: Natural = 0     # first steps with short questions alone, to learn to compare words
    short_share: Share = 0.0  # share of rows after these: next states as short questions (ours)
    loss_mean: Literal["token", "row"] = "token"   # what weighs the same in the loss
    prompt_loss: Share = 0.0  # share of prompt tokens that are predicted, too (teaches copying)
    reward_prompt_loss: Share = 0.0  # the same in reward rows: it drowns the words that decide
    short_prompt_loss: Share = 0.0  # ... and in next states as short questions
    rename_share: Share = 0.0  # share of rows in which entities get other names (names.py)
    coded_words: Share = 0.0  # share of a row's rarer words that get codes, as unknown ones have (scratch)
    demo_dropout: Share = 0.0          # share of rows without demonstrations
    other_task: Share = 0.0  # share of rows under another task, of next states that do not need theirs (ours)
    invalid_weight: Weight = 1.0       # how much more often steps that changed nothing are drawn
    micro_batch_tok: Count = 8192      # tokens per micro-batch: memory; the gradient only through rounding
    probe_every: Count = 200           # steps between looks at the probes
    probe_rows: int = 600              # validation episodes per look
    report_variants: bool = True       # report also without history, retrieval, reasoning
    save_every: Count = 200            # steps between checkpoints
    save_minutes: float = 20.0         # ... and at most so many minutes
    export: str = ""                   # folder: write the finished model for a server, adapters merged
    seed: int = 0                      # weights, batches
    threads: Count = 1                 # torch threads
    fresh: bool = False                # start over even where the folder holds a fitting model or checkpoint
    config: str = ""                   # preset: a flat JSON file of flags and values


FREE = ("data", "out", "fresh", "threads", "micro_batch_tok", "gradient_checkpointing", "slots", "save_every",
        "save_minutes", "config", "report_variants", "export")   # may differ at resume


def check(args: Args) -> None:
    """Refuses flags that contradict each other. Raises ValueError."""
    check_model(args)
    if args.coded_words and not tiny.is_scratch(args.model):
        raise ValueError(f"--coded-words {args.coded_words}: only a from-scratch model has a word tokenizer")
    if args.reward_share + args.counterfactual_share + args.variation_share + args.short_share > 1:
        raise ValueError("--reward-share, --counterfactual-share, --variation-share and --short-share add up "
                         "to more than 1")
    answer = max(args.max_next_tok, args.max_reward_tok)
    if answer >= args.context:
        raise ValueError(f"--max-next-tok or --max-reward-tok {answer}: expected fewer than --context "
                         f"{args.context}, which holds the question, too")
    if args.lr_floor == 0 and args.max_steps > args.steps and not args.epochs:
        raise ValueError(f"--lr-floor 0: nothing is learnt after --steps {args.steps}, where the rate is 0; "
                         f"expected --max-steps {args.steps}, too, or a floor above 0")
    if args.max_steps < args.steps and not args.epochs:
        raise ValueError(f"--max-steps {args.max_steps}: expected at least --steps {args.steps}")
    if not args.epochs and args.short_first_steps >= args.steps:
        raise ValueError(f"--short-first-steps {args.short_first_steps}: expected fewer than --steps "
                         f"{args.steps}; lower it: the other steps show whole questions")


# ---- rows ----

class Rows:
    """Training rows, made when they are drawn. Draws depend on seed and step only.

    A short question shows no history and no demonstrations, of a step that changed little: its answer seldom
    needs either. Short rows keep their names. A model from scratch learns to compare words in them: first
    alone (--short-first-steps), where two thirds are rewards of counterfactual steps without prompt loss,
    and later in --short-share of the rows."""

    def __init__(self, args: Args, model: ExperienceModel, episodes: list[Episode], tasks: list):
        self.args, self.model = args, model
        self.names = Names((task.text for task in tasks), episodes)
        self.tasks = [task.text for task in tasks]
        steps = [(e, i) for e in recorded(episodes) for i in range(len(e.steps))]
        if not steps:
            raise ValueError("the data hold no recorded step for training; expected some in train.jsonl")
        shorter = lambda step: encode(step.next_state, {"state": step.state}) != step.next_state
        short = ([(e, i) for e, i in steps if shorter(e.steps[i])]
                 if args.short_first_steps or args.short_share else [])
        counterfactual = [(e, 0) for e in episodes
                          if e.source == Source.COUNTERFACTUAL] if args.counterfactual_share else []
        weight = np.array([1.0 if e.steps[i].valid else args.invalid_weight for e, i in steps])
        known = [not (e.steps[i].done and e.stop == StopReason.NOT_JUDGED) for e, i in steps]
        variations = variation_samples(tasks, 2_000,
                                       run.rng(args.seed, "variations")) if args.variation_share else []
        judged = weight * known
        self.kinds = {"next": steps, "short": short, "reward": steps, "counterfactual": counterfactual,
                      "variation": variations}
        self.chances = {"next": weight / weight.sum(), "reward": judged / judged.sum()}     # others: equal
        self.short_steps = args.short_first_steps * bool(short)
        self.coder = tiny.WordCoder(model.tokenizer)
        self.too_long = self.drawn = 0

    def counts(self, step: int) -> dict[str, int]:
        """How many rows of each kind an optimizer step has: a part of a row comes in a later step. A kind
        without rows leaves its share to next states."""
        a, rest = self.args, "next"
        shares = {"short": a.short_share, "reward": a.reward_share, "counterfactual": a.counterfactual_share,
                  "variation": a.variation_share}
        if step < self.short_steps:
            shares, rest = {"counterfactual": 2 / 3}, "short"
        until = lambda share, steps: math.floor(a.rows * share * steps + 1e-6)     # rows of a kind
        counts = {kind: until(share, step + 1) - until(share, step)
                  for kind, share in shares.items() if self.kinds[kind]}
        return {rest: max(0, a.rows - sum(counts.values()))} | counts

    def draw(self, step: int, share: slice = slice(None)) -> list[TrainSample]:
        """The rows of one optimizer step, or a rank's `share` of them."""
        a, draws, picked = self.args, run.rng(self.args.seed, "rows", step), []
        for kind, n in self.counts(step).items():
            rows = self.kinds[kind]
            picked += [(kind, rows[i]) for i in draws.choice(len(rows), n, p=self.chances.get(kind))]
        mine = [(*part, run.rng(a.seed, "row", step, i)) for i, part in list(enumerate(picked))[share]]
        questions = iter(self.questions([part for part in mine if part[0] in ("next", "short")]))
        rows = []
        for kind, row, rng in mine:
            first = step < self.short_steps
            if kind == "variation":
                sample, loss = self.model.variation_sample(*row), a.prompt_loss
            else:
                episode, i = row
                change = self.names.draw(0.0 if first or kind == "short" else a.rename_share, rng)
                changed = rename_step(episode.steps[i], change)
                if kind in ("next", "short"):
                    sample = self.model.next_sample(rename_question(next(questions), change), changed)
                    loss = a.short_prompt_loss if kind == "short" else a.prompt_loss
                else:
                    sample = self.model.reward_sample(change(episode.task.text), changed)
                    loss = 0.0 if first else a.reward_prompt_loss
            self.drawn += 1
            self.too_long += sample is None
            if sample is not None:
                rows.append(self.with_prompt_loss(self.coder.draw(sample, a.context, rng), loss, rng))
        return rows

    def questions(self, rows: list[tuple[str, tuple[Episode, int], np.random.Generator]]) -> list[Question]:
        """About next states: some without demonstrations, some under another task."""
        whole = [(e.task.text, e.steps[:i], e.steps[i].state, e.steps[i].shown_action)
                 for kind, (e, i), _ in rows if kind == "next"]
        asked, questions = iter(self.model.questions(whole) if whole else []), []
        for kind, (e, i), rng in rows:
            step = e.steps[i]
            question = (next(asked) if kind == "next" else
                        Question(e.task.text, step.state, step.shown_action, [], [], []))
            if rng.random() < self.args.demo_dropout:
                question = replace(question, demos=[])
            if rng.random() < self.args.other_task:
                other = self.tasks[rng.integers(len(self.tasks))]
                if not needs_task(question, step, other):
                    question = replace(question, task=other)
            questions.append(question)
        return questions

    @staticmethod
    def with_prompt_loss(sample: TrainSample, share: float, rng) -> TrainSample:
        """A prompt token is predicted, too, with probability `share`: the expected gradient of that weight on
        all of them, at less cost."""
        chosen = rng.random(len(sample.ids) - 1) < share
        return TrainSample(sample.ids, [0, *(np.array(sample.mask[1:], bool) | chosen).astype(int).tolist()])


def needs_task(question: Question, step: Step, other: str) -> bool:
    """Whether the answer has a word of the task that neither the `other` task has, nor the question but for
    its demonstrations. If not, the task only helps to guess what the state says. Recorded agents mostly act
    on what their task wants, so a model that guesses shows the wanted thing to a policy that acts on another
    one."""
    words = lambda *texts: set(WORD.findall(" ".join(texts).lower()))
    pages = [question.state, question.action, *(text for pair in question.recent for text in pair)]
    pages += [text for s in question.earlier for text in (s.state, s.shown_action, s.next_state)]
    own = words(question.task) - words(other, *pages)
    return not own.isdisjoint(words(step.reasoning, step.next_state))


# ---- the run ----

def make_model(args: Args, episodes: list[Episode], tasks: list, resume: Path | None, device):
    if resume:
        return load_model(str(resume), args.dtype, args.quantize, device=str(device))
    if tiny.is_scratch(args.model):
        tokenizer = build_tokenizer(tiny.corpus(episodes, tasks), args.numbered_names,
                                    coded_words=args.coded_words)
        model = tiny.create(args.model, tokenizer, args.seed).to(device)
        model.compute_dtype = precision(args.dtype, model.num_parameters(), device)
        return shard(model), tokenizer
    return load_model(args.model, args.dtype, args.quantize, args.lora_rank, str(device), args.seed)


def report_on(training: Training, episodes: list[Episode], dist, inconsistencies: bool = False,
              **changes) -> dict:
    """The experience report, with other settings by `changes` (ablations at prediction time)."""
    model, settings = training.experience, training.experience.settings
    model.settings = replace(settings, **changes)
    model.clear_caches()  # neither rounding nor draws depend on what an uninterrupted run would still hold
    draws = run.rng(training.rows.args.seed, "report", training.step, dist.rank)
    model.sampler.set_state(draws.bit_generator.state)
    with unsharded(model.model):
        report = experience_report(model, episodes, dist)
        if inconsistencies:
            report["inconsistent"] = replayed_inconsistencies(model, recorded(episodes)[:60], dist)
    model.settings = settings
    model.clear_caches()               # their memory is the training's now
    return report


@dataclass
class Training:
    """All that a checkpoint holds, and what it was made with. `meta` identifies it."""
    experience: ExperienceModel
    optimizers: list
    rows: Rows
    meta: dict
    step: int = 0

    def save(self, out: Path, dist, finished: bool = False) -> None:
        model, args = self.experience, self.rows.args

        def write(path: Path) -> None:
            save_model(model.model, model.tokenizer, path)
            checkpoint.save_state(path, self.optimizers, {"step": self.step}, {}, dist)
            if dist.is_main:
                model.buffer.save(path / "replay")
                save_settings(path, model.settings, args.encoder, model.encoder)
        checkpoint.save(out, "model", write, {**self.meta, "finished": finished, "step": self.step}, dist)


def make_training(args: Args, env, data: Path, meta: dict, resume: Path | None, dist) -> Training:
    episodes, tasks = read_episodes(data / "train.jsonl"), read_tasks(data / "tasks_train.jsonl")
    model, tokenizer = make_model(args, episodes, tasks, resume, dist.device)
    settings = ExperienceSettings(**{f.name: getattr(args, f.name) for f in fields(ExperienceSettings)})
    retrieval = new_retrieval(args.encoder, recorded(episodes), args.seed, dist.device)
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    experience = ExperienceModel(model, tokenizer, env, settings, retrieval, slots=args.slots)
    optimizers = make_optimizers(experience.model, args.lr, args.muon_lr, args.weight_decay, args.epsilon)
    training = Training(experience, optimizers, Rows(args, experience, episodes, tasks), meta)
    if resume:
        training.step = checkpoint.load_state(resume, optimizers, dist)[0]["step"]
    return training


def train(args: Args, training: Training, valid: list[Episode], out: Path, log, dist) -> None:
    """Until the probes pass on validation data, or --max-steps."""
    refused = [e for e in recorded(valid) if any(not s.valid for s in e.steps)]
    judged = [e for e in valid if e.source == Source.COUNTERFACTUAL]
    probe = judged[:args.probe_rows] + refused[:args.probe_rows // 6]
    clock = run.Clock(args.save_minutes)
    bar = run.progress(args.max_steps, "experience model", training.step)
    with run.graceful(log) as stop, bar:
        while training.step < args.max_steps:
            if training.step >= args.steps and (training.step - args.steps) % args.probe_every == 0:
                found = report_on(training, probe, dist)
                log.say(f"step {training.step}: {probe_verdict(found)}")
                if not failed_probes(found):
                    break
            values = train_step(args, training, dist)
            training.step += 1
            bar.update(1)
            if training.step % 50 == 0:
                log.step("expmodel", training.step, values, ["loss", "lr"])
            if stop.agreed(dist):
                break
            if training.step % args.save_every == 0 or clock.rang(dist):
                training.save(out, dist)
                clock.restart()
        if stop.agreed(dist):                    # also where it was asked while the probes were looked at
            training.save(out, dist)
            raise SystemExit(130)


def final_report(args: Args, training: Training, valid: list[Episode], dist) -> dict:
    """Everything that is measured on validation data. Raises ValueError for a model that answers nothing."""
    env = training.experience.env
    report = {"data": env.describe(), "label": env.label, "steps": training.step, "split": "valid",
              "full": report_on(training, valid, dist, True)}
    if report["full"]["malformed"]["share"] == 1.0:
        raise ValueError(f"every answer of this experience model is malformed after {training.step} steps: "
                         "it is not finished; train it longer (--steps, --max-steps) or with another --lr")
    report["failed_probes"] = failed_probes(report["full"])
    changes = {"history": {"history": 0}, "retrieval": {"k": 0}, "reasoning": {"reasoning": False}}
    for name, change in changes.items() if args.report_variants else []:
        report[f"without {name}"] = report_on(training, valid, dist, True, **change)
    return report


def steps_of_epochs(args: Args, sources: list[dict]) -> int:
    """Until --epochs times as many next states were drawn as `sources` (of the data's meta.json) hold."""
    count = {source["source"]: source["transitions"] for source in sources}
    counterfactual = args.counterfactual_share * bool(count.pop(Source.COUNTERFACTUAL, 0))
    others = args.reward_share + counterfactual + args.variation_share + args.short_share
    drawn = args.rows * (1 - others)
    return args.short_first_steps + max(1, math.ceil(args.epochs * sum(count.values()) / max(1.0, drawn)))


def main() -> None:
    args = run.parse(Args)
    check(args)
    dist = run.init_dist(args.seed, args.threads)
    base = out_folder(args.env)
    data, out = Path(args.data or base / "data"), Path(args.out or base / "expmodel")
    run.check_ranks(args, out, dist)
    env, data_meta = environment_of(args.env, data, dist)
    if args.epochs:
        args.steps = args.max_steps = steps_of_epochs(args, data_meta["sources"])
    meta = {"settings": {k: v for k, v in asdict(args).items() if k not in FREE},
            "environment": data_meta["environment"], "data": data_meta["settings"]}
    advice = f"{run.ADVICE}; train_policy.py --expmodel {out} uses it as it is"
    resume = None if args.fresh else checkpoint.find(out, "model", meta, dist, advice)
    if resume and run.load_meta(resume)["finished"]:
        if dist.is_main:
            print(f"{out}: finished and fits these flags, kept (--fresh starts over)")
        return export(args, out, dist)
    if not tiny.is_scratch(args.model):
        check_memory(budget(args, measure(args.model), args.context, dist.world_size, dist.device.type), dist)
    training = make_training(args, env, data, meta, resume, dist)
    log = run.Log(out, dist, resume_step=training.step if resume else -1)
    introduce(args, training, log, dist)
    if not resume:
        training.save(out, dist)                 # a save that cannot work fails in the first minute
    valid = read_episodes(data / "valid.jsonl")
    train(args, training, valid, out, log, dist)
    training.save(out, dist)                     # the report takes a while
    report = final_report(args, training, valid, dist)
    if dist.is_main:
        run.write_json(out / "report.json", report)
    training.save(out, dist, finished=True)
    summary.show_experience(log, report)
    log.close()
    env.close()
    export(args, out, dist)


def export(args: Args, out: Path, dist) -> None:
    """Ends the ranks. The first one writes the finished model as a plain Hugging Face folder."""
    dist.close()                                 # one rank alone can load no weights that ranks share
    if args.export and dist.is_main:
        to = Path(args.export)
        write = partial(export_model, out / "model", dtype=args.dtype, device=str(dist.device))
        checkpoint.save(to.parent, to.name, write, {}, run.Dist())
        print(f"{args.export}: serve it, then: train_policy.py --expmodel URL --expmodel-name NAME "
              f"--expmodel-folder {out}")


def introduce(args: Args, training: Training, log, dist) -> None:
    """Says what is trained on what. Raises ValueError where most rows are longer than may be generated."""
    rows, model = training.rows, training.experience
    first = rows.draw(rows.short_steps)
    limits = (f"--context {args.context}, --max-next-tok {args.max_next_tok} or --max-reward-tok "
              f"{args.max_reward_tok}")
    if rows.too_long > rows.drawn / 2:
        raise ValueError(f"{rows.too_long} of {rows.drawn} rows are longer than {limits} allow; raise them, "
                         "or use --page-format diff")
    if rows.too_long:
        log.say(f"{rows.too_long} of the first {rows.drawn} rows are left out: too long for {limits}")
    if short := model.counts["shortened"]:
        log.say(f"{short} of the first {rows.drawn} rows lost history or demonstrations: --context "
                f"{args.context} minus --max-next-tok {args.max_next_tok} is too short for them")
    length = np.mean([len(s.ids) for s in first])
    log.say(f"experience model {args.model}: {model.model.num_parameters():,} parameters, "
            f"vocabulary {len(model.tokenizer)}; "
            f"{len(rows.kinds['next'])} transitions, "
            f"{len(rows.kinds['counterfactual'])} counterfactual steps; "
            f"{args.rows} rows of {length:.0f} tokens a step over {dist.world_size} rank(s); "
            f"{len(rows.names.words)} names are exchanged")


def train_step(args: Args, training: Training, dist) -> dict:
    rows, step, optimizers = training.rows, training.step, training.optimizers
    start, end = (0, rows.short_steps) if step < rows.short_steps else (rows.short_steps, args.steps)
    set_rate(optimizers, step - start, end - start, args.warmup, args.lr_floor)     # a cosine for each part
    mine = rows.draw(step, slice(dist.rank, None, dist.world_size))
    divisors = [max(1, sum(row.mask)) for row in mine] if args.loss_mean == "row" else None
    values = sft_step(training.experience.model, mine, optimizers, args.micro_batch_tok, dist, divisors)
    return {**values, "lr": optimizers[0].param_groups[0]["lr"], "too_long": rows.too_long / rows.drawn}


if __name__ == "__main__":
    run.main(main)
