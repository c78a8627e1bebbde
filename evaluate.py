"""What a policy or an experience model is worth: success with intervals, episodes to read, errors.

    python evaluate.py --policy out/webshop/policy --play 10                # success on test tasks
    python evaluate.py --policy out/webshop/policy --world dream --play 3   # in the dream, with its reasoning
    python evaluate.py --expmodel out/webshop/expmodel                      # errors of the experience model
    python evaluate.py --policy out/webshop/policy --bound                  # how far the dream can mislead
    python evaluate.py --env webarena --env-options backend=chromium        # in a real browser
    python evaluate.py --env webarena --policy oracle --tasks 50            # no model: check an installation
"""
import contextlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from dreamgym import offline, run, teacher, viewer
from dreamgym.envs.base import (Environment, Player, env_of_data, environment_class, make_env,
                                out_folder)
from dreamgym.episode import Episode, Task, read_episodes, read_tasks, recorded, to_json
from dreamgym.evaluation import (coupling_bound, experience_report, experience_tables, never_won, outcomes,
                                 pass_at_k, policy_report, theorem_1, with_interval)
from dreamgym.experience_model import ExperienceModel
from dreamgym.flags import BelowOne, Count, Natural, Weight
from dreamgym.model import load_model
from dreamgym.rollout import Policy, PolicySettings, rollout
from dreamgym.served_model import check_server, open_experience_model, trained_folder
from dreamgym.teacher import is_url


DEFAULT_ENV = "webshop"


@dataclass
class Args:
    env: str = ""  # built-in name, package.module:Class, or path/to/file.py ("": the data's, else webshop)
    policy: str = ""                   # folder, hub name (with --data) or player ("": out/ENV/policy)
    expmodel: str = ""                 # folder of an experience model (default: beside the policy), or URL
    expmodel_name: str = ""            # the model's name at that URL, an OpenAI-compatible server
    expmodel_folder: str = ""          # the folder it was exported from ("": it is untrained)
    expmodel_key_env: str = "OPENAI_API_KEY"   # environment variable that holds the server's key
    data: str = ""                     # folder of collect.py (default: beside policy or experience model)
    split: Literal["valid", "test", "train"] = "test"      # whose tasks
    world: Literal["real", "dream"] = "real"   # where to play
    temperatures: list[Weight] = field(default_factory=lambda: [0.0, 0.4, 1.0])  # a table row each; 0: greedy
    tasks: Count = 300                 # at most so many tasks
    repeats: Count = 1                 # episodes of each task; more than one give pass@k (greedy: one)
    bound: bool = False                # play both worlds; bound their gap by the steps at which they differ
    play: Natural = 0                  # print so many episodes of each temperature
    env_options: list[str] = field(default_factory=list)   # name=value, instead of the data's own
    data_dir: str = ""                 # official data to play on, instead of the data's own
    out: str = ""                      # folder for episodes.jsonl and report.json
    html: str = ""                     # FILE.html: episodes of both worlds side by side, for a browser
    others: list[str] = field(default_factory=list)   # other policies' episodes.jsonl: which tasks none wins
    judge: str = ""                    # URL of an endpoint: scores dreamt steps, judges where env asks
    judge_model: str = ""              # the model's name there
    judge_key_env: str = "OPENAI_API_KEY"      # environment variable that holds the key
    slots: Count = 128                 # rows decoded at once (memory of the KV cache)
    gamma: BelowOne = 0.95             # discount in the bound of Theorem 1
    seed: int = 0                      # sampling

    def __post_init__(self):
        if not self.temperatures:
            raise ValueError("--temperatures: expected at least one")
        check_server(self)
        if self.bound and self.world == "dream":
            raise ValueError("--bound follows real episodes; expected --world real")
        if bool(self.judge) != bool(self.judge_model):
            raise ValueError("--judge URL and --judge-model NAME: expected both or none")
        if self.bound and (self.play or self.others):
            raise ValueError("--bound: expected neither --play nor --others, which it does not use")
        if self.html and not self.html.endswith(".html"):
            raise ValueError(f"--html {self.html}: expected the name of a file that ends in .html")


def folders(args: Args) -> tuple[Path | None, Path | None, Path]:
    """(policy or None, experience model or None, data): what is not given lies beside the other."""
    expmodel = trained_folder(args)
    base = out_folder(args.env or DEFAULT_ENV)
    policy = None if args.expmodel and not args.policy else Path(args.policy or base / "policy")
    base = policy.parent if policy else expmodel.parent if expmodel else base
    base = base.parent if base.name == "imitation" else base         # OUT/imitation/model
    if not is_url(args.expmodel):
        expmodel = expmodel or base / "expmodel"
    return policy, expmodel, Path(args.data or base / "data")


def judge_option(args: Args) -> str:
    return f"{args.judge},{args.judge_model},{args.judge_key_env}" if args.judge else ""


def make_environment(args: Args, data: Path, dist) -> tuple[Environment, list[Task]]:
    """The data's environment with what the flags change, and its tasks."""
    meta = run.load_meta(data)
    changed = {name: value for name in ("data_dir", "env_options")
               if (value := getattr(args, name)) and value != meta["settings"][name]}
    env = env_of_data(args.env or meta["settings"]["env"], meta["settings"] | changed,
                      workers=run.spare_cores(dist), judge=judge_option(args))
    if not changed and run.fingerprint(env.describe()) == run.fingerprint(meta["environment"]):
        tasks = read_tasks(data / f"tasks_{args.split}.jsonl")
    else:
        print(f"trained in {meta['environment']}, evaluated in {env.describe()} {changed or ''}")
        tasks = offline.tasks_with_start(env, args.split)
    return env, run.sample(tasks, args.tasks, 0, args.split)


def load_policy(args: Args, folder: Path, env: Environment, device) -> Policy:
    """A policy with the prompts it was trained on; one of another maker gets the default ones."""
    meta = run.load_meta(folder) if (folder / "meta.json").exists() else {"policy": {}}
    if "policy" not in meta or (folder.is_dir() and not any(folder.glob("*config.json"))):
        raise ValueError(f"{folder}: holds no policy; expected OUT/policy of train_policy.py, or "
                         "OUT/imitation/model")
    quantize = meta.get("settings", {}).get("quantize", "none")
    model, tokenizer = load_model(str(folder), quantize=quantize, device=str(device), frozen=True)
    return Policy(model, tokenizer, env, PolicySettings(**meta["policy"]), args.slots, args.seed)


def play_player(args: Args, env: Environment, player: Player,
                tasks: list[Task]) -> tuple[dict, list[Episode]]:
    """A player of the environment in place of a policy."""
    wrong = [flag for flag, given in (("--world dream", args.world == "dream"), ("--bound", args.bound),
                                      ("--html", args.html), ("--others", args.others)) if given]
    if wrong:
        raise ValueError(f"{wrong[0]}: expected the folder of a policy; --policy {args.policy} is a player "
                         "of the real environment")
    played = []
    with run.progress(len(tasks) * args.repeats, args.policy) as bar:
        for i, task in enumerate(tasks * args.repeats):
            rng = run.rng(args.seed, "play", i)
            played.append(offline.play(env, task, player, rng, f"{args.policy}-{i}"))
            bar.update(1)
    return show_play(args, env, {args.policy: played}, "player")


def readable(episode: Episode) -> str:
    lines = [f"== {episode.id}  ({episode.world}, {episode.task.id})\n{episode.task.text}"]
    for i, step in enumerate(episode.steps, 1):
        lines += [step.state] + [f"thought: {step.thought}"] * bool(step.thought)
        lines += [f"{i} > {step.action}" + ("" if step.valid else "    (changes nothing)")]
        lines += [f"{k}: {v}" for k, v in (("think", step.reasoning), ("reward", step.reward_reasoning)) if v]
    lines += [episode.steps[-1].next_state] + [f"not readable: {episode.output!r}"] * bool(episode.output)
    end = f"{episode.stop.value}, reward {episode.reward:.0f}, score {episode.raw_score:.2f}"
    return "\n".join([*lines, end]).replace("\n", "\n   ")


def repeated(args: Args, tasks: list[Task], temperature: float) -> list[Task]:
    """One episode of each task where the policy is greedy."""
    return tasks * (args.repeats if temperature else 1)


def play_policy(args: Args, policy: Policy, world, tasks: list[Task]) -> tuple[dict, list[Episode]]:
    """The report at each temperature, and all episodes."""
    played = {}
    for temperature in dict.fromkeys(args.temperatures):
        name, plan = f"{args.world}-{temperature:g}", repeated(args, tasks, temperature)
        with run.progress(len(plan), name) as bar:
            played[f"{temperature:g}"] = rollout(policy, world, plan, temperature, name, on_turn=bar.update)
    return show_play(args, policy.env, played, "temperature")


def bound_gap(args: Args, policy: Policy, model: ExperienceModel, env: Environment, tasks: list[Task],
              dist) -> tuple[dict, list[Episode]]:
    """The `coupling_bound` at each temperature, and the real episodes."""
    found, real = {}, []
    for temperature in dict.fromkeys(args.temperatures):
        plan = repeated(args, tasks, temperature)
        part, dreamt = (rollout(policy, world, plan, temperature, f"{name}-{temperature:g}")
                        for name, world in (("real", env), ("dream", model)))
        found[f"{temperature:g}"] = coupling_bound(model, part, dreamt, dist)
        real += part
    rows = [{"temperature": t} | {k: with_interval(cell) for k, cell in cells.items()}
            for t, cells in found.items()]
    print(f"{env.label}, {args.split} tasks; gap = dream - real, at most the bound in size; 95 % intervals\n"
          + run.summary_table(rows))
    return found, real


def show_play(args: Args, env: Environment, played: dict[str, list[Episode]],
              by: str) -> tuple[dict, list[Episode]]:
    """Prints a row for each temperature or player (`by`). Returns reports and episodes."""
    reports = {}
    for name, episodes in played.items():
        report = reports[name] = policy_report(episodes, env.audit) | {"outcomes": outcomes(episodes)}
        if args.repeats > 1:
            report["pass_at_k"] = pass_at_k(report["outcomes"])
        print("".join(f"{readable(episode)}\n\n" for episode in episodes[:args.play]), end="")
    print(f"{env.label}, {args.world} world, {args.split} tasks, 95 % Wilson intervals (of repeated tasks by "
          "the effective sample size)")
    columns = ("n", "success", "low", "high", "raw_score", "length", "invalid", "inconsistent")
    print(run.summary_table([{by: t} | {c: r[c] for c in columns} for t, r in reports.items()]))
    for name, report in reports.items():
        rest = {k: v for k, v in report.items() if isinstance(v, dict) and k not in ("groups", "outcomes")}
        rest |= {k: f"{v['share']:.3f} (n {v['n']})" for k, v in report["groups"].items()}
        print(f"{by} {name}: " + ", ".join(f"{k} {v}" for k, v in rest.items()))
    return reports, [episode for episodes in played.values() for episode in episodes]


def write_html(args: Args, policy: Policy | None, env: Environment, model: ExperienceModel | None,
               episodes: list[Episode]) -> None:
    """The page of --html: the first episodes, and the same tasks played in the other world, if any."""
    (folder, expmodel, data), temperature = folders(args), args.temperatures[0]
    shown, about = episodes[:viewer.SHOWN], [f"{args.split} tasks", "recorded episodes"]
    if policy:
        about[1:] = [f"policy {folder} at temperature {temperature:g}"]
        kind, other = ("dream", model) if args.world == "real" else ("real", env if env.is_real else None)
        tasks, name = [e.task for e in shown], f"{kind}-{temperature:g}"
        shown += rollout(policy, other, tasks, temperature, name) if other else []
    where = expmodel or args.expmodel            # an untrained model at a server has no folder
    about.append(f"experience model {where}" if model else f"no experience model in {where}")
    base = folder.parent if policy else expmodel or data
    viewer.write_page(Path(args.html), env, "; ".join(about), shown, model, base)
    print(f"page {args.html}")


def show_never_won(args: Args, episodes: list[Episode], tasks: list[Task]) -> dict:
    """Of this policy at all temperatures and of the `--others`."""
    ids = {task.id for task in tasks}
    others = [e for file in args.others for e in read_episodes(Path(file)) if e.task.id in ids]
    found = never_won(episodes + others)
    rows = {"all": found["tasks"]} | found["groups"]
    print(f"tasks that were never won, in at least {found['episodes_each']} episodes each; the other tasks: "
          f"success {found['success_of_others']['share'] or 0:.3f}\n"
          + run.summary_table([{"tasks": name, **cells} for name, cells in rows.items()
                             if cells["share"] or name == "all"]))
    return found


def evaluate_model(args: Args, dist) -> None:
    """A policy in a world, or an experience model on recorded episodes."""
    folder, expmodel, data = folders(args)
    if missing := [file for file in args.others if not Path(file).is_file()]:
        raise ValueError(f"--others {missing[0]}: no such file; expected another policy's episodes.jsonl")
    if folder and not folder.exists() and not args.data:
        raise ValueError(f"--policy {folder}: no such folder; expected OUT/policy of train_policy.py, or a "
                         "hub name with --data")
    env, tasks = make_environment(args, data, dist)
    with contextlib.closing(env):
        in_dream = args.world == "dream" or not folder
        if not in_dream and not env.is_real:
            raise ValueError(f"--world real: {env.name} is no world to play in; use --world dream")
        judge = teacher.Endpoint(args.judge, args.judge_model, args.judge_key_env) if args.judge else None
        policy, model = load_policy(args, folder, env, dist.device) if folder else None, None
        if in_dream or args.bound or (args.html and (is_url(args.expmodel) or (expmodel / "model").is_dir())):
            model = open_experience_model(args, expmodel, env, data / "train.jsonl", dist.device,
                                          beside=policy and policy.model, slots=args.slots, seed=args.seed)
        if policy and args.bound:
            (report, episodes), found = bound_gap(args, policy, model, env, tasks, dist), {}
        elif policy:
            report, episodes = play_policy(args, policy, model if in_dream else env, tasks)
            found = {"never_won": show_never_won(args, episodes, tasks)}
        else:
            on_file = read_episodes(data / f"{args.split}.jsonl")
            report, episodes, found = experience_report(model, on_file, dist), [], {}
            print(f"{experience_tables(report)}\nreward confusion {report['reward_confusion']}\n"
                  f"{theorem_1(report, args.gamma)}")
        save(args, report, episodes, found)      # what follows takes a while, or fails
        if judge and policy and in_dream:
            found["judge_rubrics"] = teacher.judge(episodes, judge.complete, teacher.REQUESTS)
            print(f"judge of the dreamt steps: {found['judge_rubrics']}")
            save(args, report, episodes, found)
        if args.html:                            # of several temperatures the first
            played = episodes[:len(repeated(args, tasks, args.temperatures[0]))] if policy else on_file
            write_html(args, policy, env, model, recorded(played))


def save(args: Args, report: dict, episodes: list[Episode], more: dict) -> None:
    if args.out:
        out = Path(args.out)
        run.write_jsonl(out / "episodes.jsonl", map(to_json, episodes), append=False)
        run.write_json(out / "report.json", {"commit": run.commit(), "settings": asdict(args),
                                           "report": report, **more})


def main() -> None:
    args = run.parse(Args)
    for folder in (args.out, args.html and Path(args.html).parent):
        if folder:                               # refused now, rather than when all is played
            Path(folder).mkdir(parents=True, exist_ok=True)
    dist = run.one_process(args.seed)
    name = args.env or DEFAULT_ENV
    is_player = args.policy and "/" not in args.policy and not Path(args.policy).exists()
    if not is_player or not environment_class(name).is_real:
        return evaluate_model(args, dist)
    data = Path(args.data or out_folder(name) / "data")
    if args.data or (data / "meta.json").exists():
        env, tasks = make_environment(args, data, dist)
    else:
        env, tasks = make_env(name, args.data_dir, options=args.env_options, judge=judge_option(args)), None
    with contextlib.closing(env):
        players = {"null": Player(lambda session, rng: lambda state: "")} | env.players()
        if args.policy in players:
            tasks = tasks or run.sample(env.tasks(args.split), args.tasks, 0, args.split)
            return save(args, *play_player(args, env, players[args.policy], tasks), {})
    try:
        evaluate_model(args, dist)               # a name of the hub may be a word, such as gpt2
    except ValueError as error:
        raise ValueError(f"{error} (--policy {args.policy}: {env.name} has no such player; it has "
                         f"{', '.join(players)})") from error


if __name__ == "__main__":
    run.main(main)
