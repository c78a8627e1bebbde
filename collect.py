"""Real environment -> offline trajectories with reasoning: what the experience model learns from.

    python collect.py --env webshop --out out/data              # rule-based players and teacher
    python collect.py --env webshop --import-file my_logs.jsonl # your own logs (README, "Data formats")
    python collect.py --env webshop --teacher http://127.0.0.1:8000/v1 --teacher-model NAME   # the traces by a language model instead
    python collect.py --env webshop --teacher path/or/hub-name  # ... or by a local one

Writes train.jsonl and heldout.jsonl (episodes), tasks_train.jsonl and tasks_test.jsonl, meta.json. Held-out episodes come from held-out tasks, and in the
embedded shop from held-out target products. All transitions are real; no reward of the policy's training comes from here.
"""
from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dreamgym import run
from dreamgym.envs import make_env
from dreamgym.envs.webshop_players import make_player
from dreamgym.envs.webshop_teacher import BREAKABLE, explain, relabelled_buy, verdict_rows
from dreamgym.episode import Episode, Step, Task, read_episodes, to_json

MIX = {"demonstrator": 0.30, "imperfect": 0.35, "random": 0.20, "prober": 0.15}   # shares of episodes; ours, the paper mixes demonstrations, oracle and random


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


def relabel(env, pages: list, count: int, rng: np.random.Generator, prefix: str) -> list[Episode]:
    """`count` relabelled purchases of the given (product, chosen, state) pages: 45 % matching, the near misses even over the constraints."""
    episodes: list[Episode] = []
    attempts = 0
    while len(episodes) < count and attempts < 20 * count:
        attempts += 1
        product, chosen, state = pages[rng.integers(len(pages))]
        broken = None if rng.random() < 0.45 else str(rng.choice(BREAKABLE))
        episode = relabelled_buy(env.engine, product, chosen, state, broken, rng, f"{prefix}-{len(episodes)}")
        episodes += [episode] if episode else []
    return episodes


def buy_pages(env, episodes: list[Episode], rng: np.random.Generator) -> list:
    """(product, chosen options, state) of item pages in the episodes, bought or not, once each, with options as they were chosen."""
    by_title = {}
    for product in env.engine.products:
        by_title.setdefault(env.text.clean(product.title), []).append(product)
    pages = {}
    for episode in episodes:
        for step in episode.steps:
            item = env.text.read_item(step.state)
            for product in by_title.get(item.title, []) if item else []:
                if {k: list(v) for k, v in product.options.items()} == item.options:
                    chosen = {name: value for name, values in product.options.items() for value in values if value in item.chosen}
                    pages[step.state] = (product, chosen, step.state)
    return list(pages.values())


def collect(env, args: Args, tasks: list[Task], transitions: int, label: str) -> list[Episode]:
    rng = run.rng(args.seed, "collect", label)
    values = sorted({value for product in env.engine.products[:2000] for values in product.options.values() for value in values}) or ["red"]
    kinds, weights = list(MIX), list(MIX.values())
    episodes: list[Episode] = []
    with run.progress(transitions, f"{label} episodes") as bar:
        while (done := sum(len(e.steps) for e in episodes[-1:])) is not None and bar.n < transitions:
            task = tasks[rng.integers(len(tasks))]
            episodes.append(play(env, task, str(rng.choice(kinds, p=weights)), rng, values, f"{label}-{len(episodes)}"))
            bar.update(len(episodes[-1].steps))
    return episodes


def main() -> None:
    args = run.parse(Args)
    out = Path(args.out)
    settings = {k: v for k, v in asdict(args).items() if k not in ("out", "cache", "fresh")}
    if args.env == "webshop":
        settings["data_dir"] = args.data_dir or os.environ.get("WEBSHOP_DATA", "")
    if not args.fresh and (out / "meta.json").exists() and run.read_json(out / "meta.json")["settings"] == settings:
        print(f"{out}: fits these flags, kept (--fresh collects again)")
        return
    imported = read_episodes(args.import_file) if args.import_file else None      # refuse bad lines before any work
    env = make_env(args.env, data_dir=args.data_dir, cache=args.cache, seed=args.shop_seed, human_goals=args.human_goals)
    train_tasks, test_tasks = env.tasks("train"), env.tasks("test")
    out.mkdir(parents=True, exist_ok=True)
    train = imported or collect(env, args, train_tasks, args.transitions, "train")
    heldout = collect(env, args, test_tasks, args.heldout, "heldout")
    if args.teacher != "rules":
        train, heldout = (annotate_by_model(args, part, out / f"annotated_{i}.jsonl") for i, part in enumerate((train, heldout)))
    for episodes, count, label in ((train, args.relabelled, "train"), (heldout, args.relabelled_heldout, "heldout")):
        rng = run.rng(args.seed, "relabel", label)
        pages = buy_pages(env, episodes, rng)
        episodes += relabel(env, pages, count, rng, f"relabelled-{label}") if pages and count else []
    for name, records in (("train", map(to_json, train)), ("heldout", map(to_json, heldout)), ("tasks_train", map(asdict, train_tasks)), ("tasks_test", map(asdict, test_tasks))):
        run.write_jsonl(out / f"{name}.jsonl", records, append=False)
    rows = [{"source": kind, "episodes": len(part), "transitions": sum(len(e.steps) for e in part), "success": sum(e.success for e in part) / len(part)}
            for kind in [*MIX, "relabelled", "imported"] if (part := [e for e in train if e.source == kind])]
    run.write_json(out / "meta.json", {"schema": run.SCHEMA, "settings": settings, "environment": env.describe(), "sources": rows})
    print(f"{out}: {env.describe()['catalogue']}\n{run.summary_table(rows)}")


def annotate_by_model(args: Args, episodes: list[Episode], done_path: Path) -> list[Episode]:
    """Reasoning by a language model instead of the rules; resumable, and says how many episodes kept the rule-based traces."""
    from dreamgym import teacher
    if args.teacher.startswith(("http://", "https://")):
        ask = teacher.openai_ask(args.teacher, args.teacher_model, args.teacher_key_env, 120.0)
    else:
        ask = local_ask(args.teacher)
    report = teacher.annotate(episodes, ask, done_path)
    print(f"{done_path}: {report}")
    return read_episodes(done_path)


def local_ask(path: str):
    from dreamgym.model import chat_format, encode, encode_untrusted, load_model
    from dreamgym.sample import Sampler
    model, tokenizer = load_model(path)

    def ask(messages: list[dict]) -> str:
        fmt = chat_format(tokenizer, messages[0]["content"] if messages[0]["role"] == "system" else "")
        user = "\n".join(m["content"] for m in messages if m["role"] != "system")
        ids = encode(tokenizer, fmt.open) + encode_untrusted(tokenizer, user) + encode(tokenizer, fmt.ask)
        sample = Sampler(model, 1, 16_384, fmt.end_ids, args_seed := 0).sample([ids], ["ask"], 4096, 0.0)[0]
        return tokenizer.decode([i for i in sample.ids if i not in fmt.end_ids])
    return ask


if __name__ == "__main__":
    main()
