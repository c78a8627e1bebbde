"""A real environment, or logs of one -> offline trajectories with reasoning, for the experience model.

    python collect.py --env webshop                           # scripted players
    python collect.py --env webshop --config configs/tiny/webshop.json           # the data of the main job
    python collect.py --env examples/files.py                 # your own environment: docs/your-environment.md
    python collect.py --env logs --import-file FILE.jsonl     # recorded episodes alone: docs/data.md
    python collect.py --player http://127.0.0.1:8000/v1 --player-model NAME      # a language model plays
    python collect.py --teacher http://127.0.0.1:8000/v1 --teacher-model NAME    # a language model explains

Writes SPLIT.jsonl (episodes) and tasks_SPLIT.jsonl of train, valid and test and, last, meta.json: it says
that the rest is there. No reward of the policy's training comes from here.
"""
import contextlib
import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from dreamgym import hindsight, offline, reasoning, run, teacher
from dreamgym.envs.base import Environment, Player, data_folder, make_env, out_folder
from dreamgym.episode import Episode, Source, recorded, successes, to_json
from dreamgym.flags import BelowOne, Count, Natural
from dreamgym.names import Names
from dreamgym.offline import SPLITS
from dreamgym.teacher import Endpoint, is_url

PLAYER_ANSWER_TOK = 2_048              # of a language model that plays, its thoughts included
FILES = (*(f"{split}.jsonl" for split in SPLITS), *(f"tasks_{split}.jsonl" for split in SPLITS), "meta.json")


@dataclass
class Args:
    env: str = "webshop"               # built-in name, package.module:Class, or path/to/file.py
    out: str = ""                      # folder to write ("": out/ENV/data)
    data_dir: str = ""                 # the environment's official data, where it has some
    env_seed: int = 7                  # seed of an environment that makes its own data
    env_options: list[str] = field(default_factory=list)  # options of the environment, as name=value
    transitions: Count = 20_000        # offline transitions for training (as many as the paper)
    heldout: Natural = 1_500           # transitions of validation tasks, and as many of test tasks
    counterfactuals: Natural = 8_000   # recorded steps judged under other tasks, for training (ours; 0: none)
    counterfactuals_heldout: Natural = 1_000  # the same for each of validation and test
    seed: int = 0                      # seed of players and counterfactuals
    import_file: str = ""              # take these recorded episodes for training instead of playing
    import_format: str = ""            # "": ours (docs/data.md); other formats are the environment's own
    player: str = ""                   # URL of an OpenAI-compatible endpoint whose model plays
    player_model: str = ""             # the model's name there
    player_temperature: float = 1.0    # its sampling temperature (ours)
    player_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the endpoint's key
    player_share: float = 1.0          # its share of the episodes; the rest is the scripted players'
    # share of episodes that replay an earlier task and try wrong actions before the right ones; of recorded
    # episodes, of copies with actions put in that would probably be refused (ours)
    probe_share: BelowOne = 0.4
    probe_forms: bool = True           # the prober also says the wanted names in other recorded forms (ours)
    teacher: str = ""                  # a model that explains: URL of an endpoint, path, hub name
    teacher_model: str = ""            # the model's name at the endpoint
    teacher_key_env: str = "OPENAI_API_KEY"  # environment variable that holds the endpoint's key
    fresh: bool = False                # collect again even where the folder fits, or a language model made it
    config: str = ""                   # preset: a flat JSON file of flags and values; a tiny model's has some

    def __post_init__(self):
        if self.player and not (is_url(self.player) and self.player_model):
            raise ValueError("--player: expected an endpoint's URL, and --player-model, its name there")
        if not 0 < self.player_share <= 1:
            raise ValueError(f"--player-share {self.player_share}: expected a number above 0 and at most 1")
        if is_url(self.teacher) and not self.teacher_model:
            raise ValueError("--teacher is an endpoint: expected --teacher-model, the model's name there")
        if self.import_format and not self.import_file:
            raise ValueError(f"--import-format {self.import_format}: expected --import-file, too")


def make_players(env: Environment, args: Args) -> dict[str, Player]:
    """Who plays: the environment's scripted players, a language model ("player"), or both."""
    players = env.players()
    for name, player in players.items():
        if not isinstance(player, Player):
            raise ValueError(f"{env.name}.players: {name!r} is a {type(player).__name__}; expected "
                             "Player(make, share, imitate) of dreamgym.envs.base")
    players = {name: player for name, player in players.items() if player.share}
    if args.player:
        ask = partial(Endpoint(args.player, args.player_model, args.player_key_env).complete,
                      max_tokens=PLAYER_ANSWER_TOK, temperature=args.player_temperature)
        rest = (1 - args.player_share) / (sum(player.share for player in players.values()) or 1)
        players = {name: replace(player, share=player.share * rest) for name, player in players.items()}
        players[Source.LANGUAGE_MODEL] = offline.language_model_player(env, ask, args.player_share)
    return players


def settings_of(args: Args) -> dict:
    """What decides the data: the flags, and the contents of the files that they name."""
    settings = {name: value for name, value in asdict(args).items() if name not in ("out", "fresh", "config")}
    settings["data_dir"] = data_folder(args.env, args.data_dir)
    return settings | {f"{name}_fingerprint": run.file_fingerprint(settings[name])
                       for name in ("env", "import_file") if Path(settings[name]).is_file()}


def facts(env: Environment) -> dict:
    """What meta.json says of the environment. Raises ValueError for what is no JSON."""
    about = {"environment": env.describe(), "label": env.label, "max_steps": env.max_steps}
    for name, value in about.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(f"--env {env.name}: its `{name}` cannot be saved ({error}); expected JSON "
                             "values, such as int(n) for a number of numpy") from None
    return about


def gather(env: Environment, args: Args, out: Path, settings: dict) -> None:
    """Plays or imports, adds counterfactuals, has all explained, writes."""
    about = facts(env)                             # refused now, rather than when all is played
    players, ask = make_players(env, args), None
    if not players and not args.import_file:
        raise ValueError(f"--env {args.env} has no players: give recorded episodes (--import-file) or "
                         "a model that plays (--player)")
    tasks = {split: offline.tasks_with_start(env, split) for split in SPLITS}
    offline.warn_of_shared_texts(tasks)
    if is_url(args.teacher):
        ask = Endpoint(args.teacher, args.teacher_model, args.teacher_key_env).complete
    elif args.teacher:
        ask = offline.local_teacher(args.teacher)
    parts: dict[str, list[Episode]] = {split: [] for split in SPLITS}
    if args.import_file:
        logs = offline.read_logs(env, args.import_file, args.import_format)
        parts = offline.by_split(env, logs, tasks)
        print(f"{len(parts['train'])} of {len(logs)} recorded episodes are for training; the tasks of "
              "the others are held out")
        if not parts["valid"] and not players:
            print("warning: no recorded episode has a validation task: nothing measures the experience model")
    out.mkdir(parents=True, exist_ok=True)
    (out / "meta.json").unlink(missing_ok=True)    # until all of it is there again
    mine = run.fingerprint(settings)
    if others := [str(path) for path in sorted(out.glob("played-*.jsonl")) if mine not in path.name]:
        print(f"note: not used: {', '.join(others)}, episodes of a collection with other flags or with "
              "another version of the environment's file")

    def unfinished(name: str) -> Path:
        """The file from which a killed collection with these settings goes on."""
        path = out / f"{name}-{mine}.jsonl"
        if args.fresh:
            path.unlink(missing_ok=True)
        return path

    for split in SPLITS:
        if players and not (split == "train" and args.import_file):
            count = args.transitions if split == "train" else args.heldout
            path = unfinished(f"played-{split}")
            parts[split] = offline.play_many(env, players, tasks[split], count, args, split, path)
        count = args.counterfactuals if split == "train" else args.counterfactuals_heldout
        rng = run.rng(args.seed, "counterfactuals", split)
        parts[split] += offline.counterfactuals(env, parts, tasks, split, count, rng)
        if split == "train":
            played = recorded(parts[split])
            offline.warn_of_episodes(played, bool(args.import_file), tasks["train"])
            if args.import_file:
                parts[split] += hindsight.refused_actions(played, args.probe_share, rng)
            texts = [task.text for task in (*tasks[split], *(episode.task for episode in played))]
            reason = reasoning.CompareWords(Names(texts), parts[split])
        parts[split] = [offline.explained(env, episode, reason) for episode in parts[split]]
        if ask:
            path = unfinished(f"reasoning-{split}")
            workers = teacher.REQUESTS if is_url(args.teacher) else 1
            parts[split], failed = teacher.annotate(parts[split], ask, env.prompts, path, workers)
            print(f"{path}: {len(failed)} of {len(parts[split])} episodes keep their old reasoning",
                  *list(failed.values())[:1])
        run.write_jsonl(out / f"{split}.jsonl", map(to_json, parts[split]), append=False)
        run.write_jsonl(out / f"tasks_{split}.jsonl", map(to_json, tasks[split]), append=False)
    sources = defaultdict(list)
    for episode in parts["train"]:
        sources[episode.source].append(episode)
    rows = [{"source": source, "episodes": len(part), "success": successes(part),
             "transitions": sum(len(episode.steps) for episode in part)} for source, part in sources.items()]
    run.write_json(out / "meta.json", {
        "schema": run.SCHEMA, "settings": settings, **about, "sources": rows})
    for split in SPLITS:                           # those of other settings may be a language model's
        unfinished(f"played-{split}").unlink(missing_ok=True)
    print(f"{out}: {env.label or env.name}\n{run.summary_table(rows)}")


def main() -> None:
    args = run.parse(Args)
    out, settings = Path(args.out or out_folder(args.env) / "data"), settings_of(args)
    if all((out / name).exists() for name in FILES) and not args.fresh:
        run.check_meta(run.load_meta(out)["settings"], settings, out,
                       "use --fresh to replace these data, another --out, or train_policy.py --data "
                       f"{out} to train on them as they are")
        print(f"{out}: fits these flags, kept (--fresh collects again)")
        return
    env = make_env(args.env, args.data_dir, args.env_seed, args.env_options, file=args.import_file)
    with contextlib.closing(env):
        gather(env, args, out, settings)


if __name__ == "__main__":
    run.main(main)
