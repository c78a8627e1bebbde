"""Real environment -> offline trajectories with reasoning: what the experience model learns from.

    python collect.py --env webshop --out out/data              # rule-based players and teacher
    python collect.py --env webshop --import-file my_logs.jsonl # your own logs (README, "Data formats")
    python collect.py --env webshop --teacher http://127.0.0.1:8000/v1 --teacher-model NAME   # the traces by a language model instead
    python collect.py --env webshop --teacher path/or/hub-name  # ... or by a local one

Writes train.jsonl and heldout.jsonl (episodes), tasks_train.jsonl and tasks_test.jsonl, and meta.json last: it says that the rest is there. Held-out
episodes come from held-out tasks, and in the embedded shop from held-out target products; held-out relabelled purchases from pages that training has
not relabelled. All transitions are real; no reward of the policy's training comes from here. The traces of relabelled purchases are always the rules'.
"""
from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from dreamgym import run, teacher
from dreamgym.envs import make_env, make_rules
from dreamgym.envs.webshop_players import make_player
from dreamgym.envs.webshop_teacher import BREAKABLE, explain, explain_recorded, relabelled_buy, verdict_rows
from dreamgym.episode import Episode, Step, Task, read_episodes, to_json

MIX = {"demonstrator": 0.30, "imperfect": 0.35, "random": 0.20, "prober": 0.15}   # shares of episodes; ours, the paper mixes demonstrations, oracle and random
FILES = ("train", "heldout", "tasks_train", "tasks_test")
URL = ("http://", "https://")
TEACHER_WORKERS = 8                                # requests to an endpoint at the same time
TRACE_CONTEXT_TOK, TRACE_TOK = 16_384, 4_096       # of a local teacher: an episode with its traces, and the traces alone


@dataclass
class Args:
    env: str = "webshop"               # environment: webshop
    out: str = "out/data"              # folder to write
    data_dir: str = ""                 # official catalogue (default: $WEBSHOP_DATA; neither: the embedded shop)
    cache: str = "out/shop"            # where the embedded shop is generated
    shop_seed: int = 7                 # seed of the embedded shop and of the engine's draws
    human_goals: bool = False          # official data: crowd instructions instead of synthetic ones
    transitions: int = 20_000          # offline transitions for training (as many as the paper)
    heldout: int = 1_500               # offline transitions of held-out tasks, for the report
    relabelled: int = 8_000            # purchases relabelled with matching and near-miss instructions (0: the naive reward)
    relabelled_heldout: int = 1_000    # the same, held out: the near-miss probe
    seed: int = 0                      # seed of players and relabelling
    import_file: str = ""              # use these logged episodes for training instead of playing
    teacher: str = "rules"             # rules | http(s) URL of an OpenAI-compatible endpoint | path or hub name of a local model
    teacher_model: str = ""            # model name at the endpoint
    teacher_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the endpoint's key
    fresh: bool = False                # collect again even when the folder already fits these flags

    def __post_init__(self):
        make_rules(self.env)           # raises ValueError for an unknown environment
        if self.transitions < 1 or min(self.heldout, self.relabelled, self.relabelled_heldout) < 0:
            raise ValueError(f"--transitions {self.transitions} --heldout {self.heldout} --relabelled {self.relabelled} --relabelled-heldout "
                             f"{self.relabelled_heldout}: expected at least 1 transition and nothing below 0")
        if self.teacher.startswith(URL) and not self.teacher_model:
            raise ValueError("--teacher is an endpoint: expected --teacher-model, the model's name there")


def play(env, task: Task, kind: str, rng: np.random.Generator, values: list[str], name: str) -> Episode:
    """One real episode of a rule-based player, each step explained by the teacher, who sees the engine."""
    session = env.start([task])[0]
    act = make_player(kind, task.text, rng, values)
    episode = Episode(name, task, source=kind)
    while not episode.stop:
        state, action, engine = session.state, act(session.state), session.inner
        purchase = (engine.product(engine.asin), dict(engine.options)) if env.text.judged(state, action) else None
        result = env.act([session], [action])[0]
        verdict = None
        if purchase and result.done:
            product, chosen = purchase
            price = engine.price_of(product.asin)
            verdict = verdict_rows(engine.goal, engine.judge(engine.goal, product, price, chosen)[1], price)
        reasoning = explain(state, action, verdict, result.reward == 1)
        episode.steps.append(Step(state, action, result.state, result.reward, result.done, result.info["grounded"], reasoning, result.info["valid"]))
        if result.done:
            episode.stop, episode.score = result.info["stop"], result.info["score"]
        elif len(episode.steps) >= env.max_steps:
            episode.stop = "step_limit"
    return episode


def relabel(env, pages: list, count: int, rng: np.random.Generator, prefix: str, forbidden: set[str]) -> list[Episode]:
    """`count` relabelled purchases of the given (product, chosen, state) pages: 45 % matching, the near misses by BREAKABLE."""
    episodes: list[Episode] = []
    attempts = 0
    while len(episodes) < count and attempts < 20 * count:
        attempts += 1
        product, chosen, state = pages[rng.integers(len(pages))]
        broken = None if rng.random() < 0.45 else str(rng.choice(list(BREAKABLE), p=list(BREAKABLE.values())))
        episode = relabelled_buy(env.engine, product, chosen, state, broken, rng, f"{prefix}-{len(episodes)}")
        episodes += [episode] if episode and episode.task.text not in forbidden else []
    return episodes


def buy_pages(env, episodes: list[Episode]) -> list:
    """(product, chosen options, state) of item pages in the episodes, bought or not, once each, with options as they were chosen."""
    by_title = {}
    for product in env.engine.products:
        by_title.setdefault(env.text.clean(product.title), []).append(product)
    pages = {}
    for episode in episodes:
        for step in episode.steps:
            item = env.text.read_item(step.state)
            for product in by_title.get(item.title, []) if item else []:
                if {k: list(v) for k, v in product.options.items()} == item.options and env.text.short_price(product.price_tag) == item.price:
                    chosen = {name: value for name, values in product.options.items() for value in values if value in item.chosen}
                    pages[step.state] = (product, chosen, step.state)
    return list(pages.values())


def collect(env, args: Args, tasks: list[Task], transitions: int, label: str) -> list[Episode]:
    """Real episodes of the players in MIX, until there are `transitions` steps."""
    rng = run.rng(args.seed, "collect", label)
    values = sorted({value for product in env.engine.products[:2000] for values in product.options.values() for value in values}) or ["red"]
    kinds, weights = list(MIX), list(MIX.values())
    episodes: list[Episode] = []
    with run.progress(transitions, f"{label} episodes") as bar:
        while bar.n < transitions:
            task = tasks[rng.integers(len(tasks))]
            episodes.append(play(env, task, str(rng.choice(kinds, p=weights)), rng, values, f"{label}-{len(episodes)}"))
            bar.update(len(episodes[-1].steps))
    return episodes


# ---- imported logs -----------------------------------------------------------------------------------------------------------------------------

def read_import(path: str, env_name: str) -> list[Episode]:
    """The episodes of a log (README, "Data formats"). Raises ValueError naming file, line and field of whatever does not fit."""
    rules, episodes = make_rules(env_name), read_episodes(path)
    if not episodes:
        raise ValueError(f"--import-file {path}: holds no episode; expected JSONL, one episode a line")
    with open(path, "rb") as lines:
        numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    for number, episode in zip(numbers, episodes):
        if (episode.task.env, episode.world) != (env_name, "real"):
            raise ValueError(f"{path}:{number}: fields `task.env` and `world` are {episode.task.env!r} and {episode.world!r}, expected {env_name!r} and 'real'")
        for i, step in enumerate(episode.steps):
            for name in ("state", "next_state"):
                if rules.page_kind(getattr(step, name)) == "unknown":
                    raise ValueError(f"{path}:{number}, steps[{i}]: field `{name}` begins with {getattr(step, name)[:40]!r}, expected a page of {env_name} in its abstract form")
    return episodes


def fit_import(episodes: list[Episode], env, train_tasks: list[Task], test_tasks: list[Task]) -> list[Episode]:
    """Episodes of held-out tasks are left out; grounded actions and, where the rules agree with what was recorded, missing traces are filled in.

    Ids get a prefix, so that they meet none of ours; a source of ours is kept, any other becomes 'imported'. Raises ValueError when nothing is left.
    """
    held_out = {task.text for task in test_tasks} - {task.text for task in train_tasks}
    fit = lambda task, step: replace(step, grounded=step.grounded or env.text.ground(step.state, step.action), reasoning=step.reasoning or explain_recorded(task.text, step))
    kept = [replace(episode, id=f"imported-{episode.id}", source=episode.source if episode.source in (*MIX, "relabelled") else "imported",
                    steps=[fit(episode.task, step) for step in episode.steps])
            for episode in episodes if env.text.clean(episode.task.text) not in held_out]
    if not kept:
        raise ValueError(f"all {len(episodes)} imported episodes are of tasks held out for testing; expected some of tasks_train.jsonl, or of none of this shop's tasks")
    if len(kept) < len(episodes):
        print(f"{len(episodes) - len(kept)} of {len(episodes)} imported episodes left out: their tasks are held out for testing")
    return kept


# ---- traces by a language model ----------------------------------------------------------------------------------------------------------------

def make_ask(args: Args) -> teacher.Ask:
    """Raises ValueError for a URL, key or model that cannot be used."""
    if args.teacher.startswith(URL):
        return teacher.openai_ask(args.teacher, args.teacher_model, args.teacher_key_env)
    return local_ask(args.teacher)


def local_ask(name_or_path: str) -> teacher.Ask:
    """A local model as the teacher: greedy, one episode at a time, on the GPU where there is one."""
    import torch

    from dreamgym.model import chat_format, encode, encode_untrusted, load_model
    from dreamgym.sample import Sampler
    model, tokenizer = load_model(name_or_path)
    fmt = chat_format(tokenizer)
    context = min(TRACE_CONTEXT_TOK, getattr(model.config, "max_position_embeddings", TRACE_CONTEXT_TOK))
    sampler = Sampler(model.to("cuda" if torch.cuda.is_available() else "cpu"), 1, context, fmt.end_ids, 0)

    def generate(prompt: str) -> str:
        ids = encode(tokenizer, fmt.open) + encode_untrusted(tokenizer, prompt) + encode(tokenizer, fmt.ask)
        sample = sampler.sample([ids], ["teacher"], TRACE_TOK, 0.0)[0]
        return tokenizer.decode([i for i in sample.ids if i not in fmt.end_ids])
    return teacher.local_ask(generate)


def annotate(episodes: list[Episode], ask: teacher.Ask, done_path: Path, args: Args) -> list[Episode]:
    """The episodes with a language model's traces, in the same order; where it failed the old traces stay, and how often is printed."""
    if args.fresh:
        done_path.unlink(missing_ok=True)
    workers = TEACHER_WORKERS if args.teacher.startswith(URL) else 1
    with run.progress(len(episodes), "episodes explained") as bar:
        try:
            report = teacher.annotate(episodes, ask, done_path, workers=workers, progress=lambda done, total: bar.update(done - bar.n))
        except (ValueError, teacher.EndpointError) as error:
            raise SystemExit(f"collect.py: {error}") from None
    reasons = f" (the first: {next(iter(report.failed.values()))})" if report.failed else ""
    print(f"{done_path}: {report.annotated} episodes explained, {report.resumed} found there, {report.requests} requests, {len(report.failed)} keep their old traces{reasons}")
    return report.episodes


# ---- everything, in order ----------------------------------------------------------------------------------------------------------------------

def playable(env, split: str) -> tuple[list[Task], list[Task]]:
    """All tasks of a split, and those whose instruction the players can read. Raises ValueError when there is none."""
    tasks = env.tasks(split)
    readable = [task for task in tasks if env.text.readable(task.text)]
    if not readable:
        raise ValueError(f"split {split!r} has {len(tasks)} tasks, and the players can read none of them; found {len(env.engine.goals)} goals in the catalogue "
                         "(its first 500 are the test split). Collect from the full catalogue, or without --human-goals")
    return tasks, readable


def fits(out: Path, settings: dict) -> bool:
    """Whether `out` holds the finished data of these settings."""
    whole = all((out / f"{name}.jsonl").exists() for name in FILES) and (out / "meta.json").exists()
    return whole and run.read_json(out / "meta.json").get("settings") == settings


def main() -> None:
    args = run.parse(Args)
    out = Path(args.out)
    settings = {k: v for k, v in asdict(args).items() if k not in ("out", "cache", "fresh")}
    settings["data_dir"] = args.data_dir or os.environ.get("WEBSHOP_DATA", "")
    try:
        imported = read_import(args.import_file, args.env) if args.import_file else []
        if imported:
            settings["import_fingerprint"] = run.fingerprint([to_json(episode) for episode in imported])
        if not args.fresh and fits(out, settings):
            print(f"{out}: fits these flags, kept (--fresh collects again)")
            return
        env = make_env(args.env, data_dir=args.data_dir, cache=args.cache, seed=args.shop_seed, human_goals=args.human_goals)
        (train_tasks, train_readable), (test_tasks, test_readable) = playable(env, "train"), playable(env, "test")
        imported = fit_import(imported, env, train_tasks, test_tasks) if imported else []
        ask = make_ask(args) if args.teacher != "rules" else None
    except ValueError as error:                    # flags, files and the catalogue: refused before any work
        raise SystemExit(f"collect.py: {error}") from None
    out.mkdir(parents=True, exist_ok=True)
    (out / "meta.json").unlink(missing_ok=True)    # until all of it is there again
    train = imported or collect(env, args, train_readable, args.transitions, "train")
    heldout = collect(env, args, test_readable, args.heldout, "heldout")
    if ask:
        train, heldout = (annotate(part, ask, out / f"traces-{label}-{run.fingerprint(settings)}.jsonl", args) for label, part in (("train", train), ("heldout", heldout)))
    seen: set[str] = set()
    tests = {task.text for task in test_tasks}
    for episodes, count, label in ((train, args.relabelled, "train"), (heldout, args.relabelled_heldout, "heldout")):
        rng = run.rng(args.seed, "relabel", label)
        pages = [page for page in buy_pages(env, episodes) if page[2] not in seen]
        seen = {state for _, _, state in pages}
        episodes += relabel(env, pages, count, rng, f"relabelled-{label}", tests if label == "train" else set()) if pages and count else []
    for name, records in zip(FILES, (map(to_json, train), map(to_json, heldout), map(asdict, train_tasks), map(asdict, test_tasks))):
        run.write_jsonl(out / f"{name}.jsonl", records, append=False)
    rows = [{"source": kind, "episodes": len(part), "transitions": sum(len(e.steps) for e in part), "success": sum(e.success for e in part) / len(part)}
            for kind in [*MIX, "relabelled", "imported"] if (part := [e for e in train if e.source == kind])]
    run.write_json(out / "meta.json", {"schema": run.SCHEMA, "settings": settings, "environment": env.describe(), "sources": rows})
    print(f"{out}: {env.describe()['catalogue']}\n{run.summary_table(rows)}")


if __name__ == "__main__":
    main()
