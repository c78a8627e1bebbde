"""Real environment -> offline trajectories with reasoning: what the experience model learns from.

    python collect.py --env webshop --out out/data              # rule-based players and teacher; or --env alfworld
    python collect.py --env webshop --import-file my_logs.jsonl # your own logs (README, "Data formats")
    python collect.py --env webarena --import-file traces/ --import-format render     # WebArena's, BrowserGym's or accessibility-tree traces
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
from typing import Literal

from dreamgym import run, teacher
from dreamgym.envs import make_env, make_offline, make_rules
from dreamgym.episode import Episode, Task, read_episodes, to_json

FILES = ("train", "heldout", "tasks_train", "tasks_test")
URL = ("http://", "https://")
TEACHER_WORKERS = 8                                # requests to an endpoint at the same time
TRACE_CONTEXT_TOK, TRACE_TOK = 16_384, 4_096       # of a local teacher: an episode with its traces, and the traces alone


@dataclass
class Args:
    env: str = "webshop"               # environment: webshop | alfworld | webarena
    out: str = "out/data"              # folder to write
    data_dir: str = ""                 # official data (default: $WEBSHOP_DATA, $ALFWORLD_DATA; neither: an embedded shop, generated games, own sites)
    cache: str = ""                    # where those are generated (default: out/shop, out/games)
    env_seed: int = 7                  # their seed, and that of WebShop's draws
    human_goals: bool = False          # WebShop, official data: crowd instructions instead of synthetic ones
    admissible: bool = False           # ALFWorld: the admissible commands are part of the state
    transitions: int = 20_000          # offline transitions for training (as many as the paper)
    heldout: int = 1_500               # offline transitions of held-out tasks, for the report
    relabelled: int = 8_000            # judged steps (purchases) relabelled with matching and near-miss tasks (0: the naive reward)
    relabelled_heldout: int = 1_000    # the same, held out: the near-miss probe
    seed: int = 0                      # seed of players and relabelling
    import_file: str = ""              # use these logged episodes for training instead of playing
    import_format: Literal["episodes", "render", "acctree", "browsergym"] = "episodes"     # ours, or (WebArena) somebody else's traces
    import_drop: str = ""              # WebArena: a task file whose tasks are left out of an import (WebArena-Lite's: they are the test)
    teacher: str = "rules"             # rules | http(s) URL of an OpenAI-compatible endpoint | path or hub name of a local model
    teacher_model: str = ""            # model name at the endpoint
    teacher_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the endpoint's key
    fresh: bool = False                # collect again even when the folder already fits these flags

    def __post_init__(self):
        make_rules(self.env)           # raises ValueError for an unknown environment
        if self.transitions < 1 or min(self.heldout, self.relabelled, self.relabelled_heldout) < 0:
            raise ValueError(f"--transitions {self.transitions} --heldout {self.heldout} --relabelled {self.relabelled} --relabelled-heldout "
                             f"{self.relabelled_heldout}: expected at least 1 transition and nothing below 0")
        if self.env != "webarena" and (self.import_format != "episodes" or self.import_drop):
            raise ValueError(f"--import-format {self.import_format} --import-drop {self.import_drop!r}: only WebArena has traces in other formats")
        if self.teacher.startswith(URL) and not self.teacher_model:
            raise ValueError("--teacher is an endpoint: expected --teacher-model, the model's name there")


def collect(env, args: Args, tasks: list[Task], transitions: int, label: str) -> list[Episode]:
    """Real episodes of the players in the environment's MIX, until there are `transitions` steps."""
    rng, offline = run.rng(args.seed, "collect", label), make_offline(args.env)
    kinds, weights = list(offline.MIX), list(offline.MIX.values())
    episodes: list[Episode] = []
    with run.progress(transitions, f"{label} episodes") as bar:
        while bar.n < transitions:
            task = tasks[rng.integers(len(tasks))]
            episodes.append(offline.play(env, task, str(rng.choice(kinds, p=weights)), rng, f"{label}-{len(episodes)}"))
            bar.update(len(episodes[-1].steps))
    return episodes


# ---- imported logs -----------------------------------------------------------------------------------------------------------------------------

def read_import(args: Args) -> list[Episode]:
    """The episodes of a log (README, "Data formats"). Raises ValueError naming file, line and field of whatever does not fit."""
    path, env_name = args.import_file, args.env
    if args.import_format != "episodes":
        return make_offline(env_name).read_traces(path, args.import_format, args.import_drop)
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


def fit_import(episodes: list[Episode], env, offline, train_tasks: list[Task], test_tasks: list[Task]) -> list[Episode]:
    """Episodes of held-out tasks are left out; grounded actions and, where the rules agree with what was recorded, missing traces are filled in.

    Ids get a prefix, so that they meet none of ours; a source of ours is kept, any other becomes 'imported'. Raises ValueError when nothing is left.
    """
    held_out = {task.text for task in test_tasks} - {task.text for task in train_tasks}

    def fit(episode: Episode) -> list:
        pages = [step.state for step in episode.steps]
        return [replace(step, grounded=step.grounded or env.text.ground(step.state, step.action),
                        reasoning=step.reasoning or offline.explain_recorded(episode.task.text, pages[:i], step)) for i, step in enumerate(episode.steps)]
    kept = [replace(episode, id=f"imported-{episode.id}", source=episode.source if episode.source in (*offline.MIX, "relabelled") else "imported",
                    steps=fit(episode))
            for episode in episodes if env.text.clean(episode.task.text) not in held_out]
    if not kept:
        raise ValueError(f"all {len(episodes)} imported episodes are of tasks held out for testing; expected some of tasks_train.jsonl, or of none of this environment's tasks")
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
    from dreamgym.sampler import Sampler
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
        raise ValueError(f"split {split!r} has {len(tasks)} tasks, and the players can read none of them. With WebShop's official data collect from the full catalogue "
                         "(the first 500 goals are the test split), or without --human-goals")
    return tasks, readable


def fits(out: Path, settings: dict) -> bool:
    """Whether `out` holds the finished data of these settings."""
    whole = all((out / f"{name}.jsonl").exists() for name in FILES) and (out / "meta.json").exists()
    return whole and run.read_json(out / "meta.json").get("settings") == settings


def main() -> None:
    args = run.parse(Args)
    out = Path(args.out)
    settings = {k: v for k, v in asdict(args).items() if k not in ("out", "cache", "fresh")}
    settings["data_dir"] = args.data_dir or os.environ.get(f"{args.env.upper()}_DATA", "")
    try:
        imported = read_import(args) if args.import_file else []
        if imported:
            settings["import_fingerprint"] = run.fingerprint([to_json(episode) for episode in imported])
        if not args.fresh and fits(out, settings):
            print(f"{out}: fits these flags, kept (--fresh collects again)")
            return
        env, offline = make_env(args.env, args.data_dir, args.cache, args.env_seed, args.human_goals, args.admissible), make_offline(args.env)
        (train_tasks, train_readable), (test_tasks, test_readable) = playable(env, "train"), playable(env, "test")
        imported = fit_import(imported, env, offline, train_tasks, test_tasks) if imported else []
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
    tests = {task.text for task in test_tasks} - {task.text for task in train_tasks}
    for episodes, count, label in ((train, args.relabelled, "train"), (heldout, args.relabelled_heldout, "heldout")):
        rng = run.rng(args.seed, "relabel", label)
        episodes += offline.relabelled(env, episodes, count, rng, f"relabelled-{label}", tests if label == "train" else set(), seen)
    for name, records in zip(FILES, (map(to_json, train), map(to_json, heldout), map(asdict, train_tasks), map(asdict, test_tasks))):
        run.write_jsonl(out / f"{name}.jsonl", records, append=False)
    rows = [{"source": kind, "episodes": len(part), "transitions": sum(len(e.steps) for e in part), "success": sum(e.success for e in part) / len(part)}
            for kind in [*offline.MIX, "relabelled", "imported"] if (part := [e for e in train if e.source == kind])]
    run.write_json(out / "meta.json", {"schema": run.SCHEMA, "settings": settings, "environment": env.describe(), "sources": rows})
    print(f"{out}: {env.label}\n{run.summary_table(rows)}")


if __name__ == "__main__":
    run.main(main)
