"""What a policy and an experience model are worth: real success with intervals, readable episodes, the dream's errors, Theorem 1's bound.

    python evaluate.py --policy out/webshop/policy --play 10                 # ten episodes to read, then success on held-out tasks
    python evaluate.py --policy out/webshop/policy --world dream --play 3    # the same inside the experience model, with its reasoning
    python evaluate.py --expmodel out/webshop/expmodel                       # errors of the experience model, and the bound they give
    python evaluate.py --env webarena --backend chromium                     # WebArena's own sites in a real browser
    python evaluate.py --policy out/webshop/policy --world dream --judge http://127.0.0.1:8000/v1 --judge-model NAME   # the paper's four-rubric judge
"""
from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dreamgym import run
from dreamgym.envs import env_of, make_rules
from dreamgym.episode import Episode, read_episodes, to_json
from dreamgym.experience_model import load_dream
from dreamgym.model import SIZES, load_model
from dreamgym.report import experience_report, policy_report, probes_passed, theorem_1
from dreamgym.rollout import policy_for, rollout


@dataclass
class Args:
    policy: str = ""                   # folder of a policy (OUT/policy or OUT/imitation/model), or a hub name (default: out/ENV/policy, unless --expmodel)
    expmodel: str = ""                 # folder of an experience model (default: beside the policy)
    data: str = ""                     # folder of collect.py (default: beside the policy)
    env: str = "webshop"               # environment: webshop | alfworld | webarena
    cache: str = ""                    # where the embedded shop or the generated games are (default: out/shop, out/games)
    data_dir: str = ""                 # official data to play on (default: what the policy was trained on, or $WEBSHOP_DATA, $ALFWORLD_DATA, $WEBARENA_DATA)
    split: str = "test"                # tasks: test (held out), train; ALFWorld also valid_seen, valid_unseen; official WebShop also eval
    backend: Literal["direct", "chromium"] = "direct"      # WebArena: without a browser, or in a real one
    world: Literal["real", "dream"] = "real"   # where to play
    temperature: float = 1.0           # 0: greedy
    tasks: int = 500                   # so many of them (0: only --play)
    repeats: int = 1                   # episodes of each task
    play: int = 0                      # print this many episodes
    out: str = ""                      # write the episodes and the report here (JSONL, JSON)
    judge: str = ""                    # URL of an OpenAI-compatible endpoint: judges dreamt episodes by four rubrics, and WebArena's fuzzy answers
    judge_model: str = ""              # model name there
    judge_key_env: str = "OPENAI_API_KEY"      # environment variable that holds the key
    gamma: float = 0.95                # discount for the bound of Theorem 1 (it needs gamma < 1)
    seed: int = 0                      # sampling


def readable(episode: Episode) -> str:
    """One episode as a person reads it."""
    lines = [f"== {episode.id}  ({episode.world}, {episode.task.id})", f"task: {episode.task.text}"]
    for i, step in enumerate(episode.steps, 1):
        lines += ["   " + line for line in step.state.split("\n")]
        lines.append(f"{i:2d} > {step.action}" + ("" if step.valid else "    (refused)"))
        lines += [f"   think: {step.reasoning}"] if step.reasoning else []
    return "\n".join([*lines, f"   {episode.steps[-1].next_state}".replace("\n", "\n   "), f"   {episode.stop}, reward {episode.reward:.0f}, score {episode.score:.2f}"])


def find(args: Args) -> tuple[Path, Path, Path]:
    """Policy, experience model and data folders, the latter two by default beside the policy."""
    policy = Path(args.policy or ".")
    base = policy.parent.parent if policy.parent.name == "imitation" else policy.parent
    return policy, Path(args.expmodel or base / "expmodel"), Path(args.data or base / "data")


def main() -> None:
    args = run.parse(Args)
    rules = make_rules(args.env)
    args.policy = args.policy or ("" if args.expmodel else f"out/{args.env}/policy")
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: expected at least 1 episode of each task")
    ranks = run.start(args.seed)
    if ranks.world > 1:
        raise ValueError(f"found {ranks.world} ranks; evaluate.py plays in one process: start it without torchrun")
    policy_folder, expmodel, data = find(args)
    if not args.policy:
        data = Path(args.data or expmodel.parent / "data")
        return report_experience_model(args, expmodel, data, rules, ranks)
    collected, trained_on = (run.data_meta(data)[key] for key in ("settings", "environment"))
    env = env_of(collected, run.spare_cores(ranks), cache=args.cache, backend=args.backend, **({"data_dir": args.data_dir} if args.data_dir else {}))
    everything = env.tasks(args.split)
    if env.describe() != trained_on:
        print(f"the policy was trained in {trained_on}; it is evaluated in {env.describe()}")
    meta = run.load_meta(policy_folder) if (policy_folder / "meta.json").exists() else {}
    made = meta.get("settings") or meta.get("imitation") or {"model": "", "quantize": "none"}
    model, tokenizer = load_model(str(args.policy), quantize=made["quantize"], device=str(ranks.device))
    policy = policy_for(model, tokenizer, args.env, made["model"] in SIZES, args.seed)
    world = env if args.world == "real" else load_dream(expmodel, rules, ranks.device, seed=args.seed)
    tasks = [everything[i] for i in run.rng(0, "evaluation").permutation(len(everything))[:max(args.tasks, args.play)]]
    if args.env == "webarena" and args.judge:
        from dreamgym.envs.webarena.evaluators import Judge
        env.judge = Judge(args.judge, args.judge_model, args.judge_key_env)
    try:
        with run.progress(args.repeats * len(tasks), "episodes") as bar:
            episodes = rollout(policy, world, args.repeats * tasks, env.max_steps, args.temperature, "eval", args.world, bar.update)
    finally:
        getattr(env, "close", lambda: None)()    # WebArena: browsers and servers
    print("\n\n".join(readable(e) for e in episodes[:args.play]))
    report = {"environment": env.describe(), "world": args.world, "temperature": args.temperature, **policy_report(episodes, rules)}
    print(f"\n{env.label}, {args.world} world, temperature {args.temperature:g}: success {report['success']:.3f} "
          f"[{report['low']:.3f}, {report['high']:.3f}] (95 % Wilson) in {report['n']} episodes on tasks of {args.split}, score {report['score']:.3f}, stops {report['stops']}; "
          f"pages that contradict earlier ones {report['contradictions']:.3f}")
    if "groups" in report:
        print(run.summary_table([{"group": name, "n": g["n"], "success": g["share"], "low": g["low"], "high": g["high"]} for name, g in report["groups"].items()]))
    if args.judge and args.world == "dream":
        from dreamgym import teacher
        report["judge_rubrics"] = asdict(teacher.judge(episodes, teacher.openai_ask(args.judge, args.judge_model, args.judge_key_env, 120.0)))
        print(f"judge: {report['judge_rubrics']}")
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        run.write_jsonl(Path(args.out) / "episodes.jsonl", map(to_json, episodes), append=False)
        run.write_json(Path(args.out) / "report.json", report)


def report_experience_model(args: Args, expmodel: Path, data: Path, rules, ranks) -> None:
    heldout = read_episodes(data / "heldout.jsonl")
    report = experience_report(load_dream(expmodel, rules, ranks.device, seed=args.seed), heldout)
    rows = [{"action": k, "n": v["n"], "exact": v["share"], "low": v["low"], "high": v["high"], "F1": v["f1"]} for k, v in report["by_action"].items()]
    every = report["exact"]
    rows.append({"action": "all", "n": report["transitions"], "exact": every["share"], "low": every["low"], "high": every["high"], "F1": report["f1"]})
    probes = [{"probe": f"near miss: {k}" if k != "none" else "matching purchase", "n": v["n"], "paid": v["share"], "low": v["low"], "high": v["high"]}
              for k, v in report["near_miss_paid"].items()]
    print(f"{run.summary_table(rows)}\n\n{run.summary_table(probes)}")
    print(f"\nreward confusion {report['reward_confusion']}   refusals accepted {report['refusals_accepted']}   malformed {report['malformed']}")
    print("probes passed" if not probes_passed(report) else "PROBES NOT PASSED: " + "; ".join(probes_passed(report)))
    print(theorem_1(report, args.gamma))
    if args.out:
        run.write_json(args.out, report)


if __name__ == "__main__":
    run.main(main)
