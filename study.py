"""The README's results: three seeds of everything on the embedded shop or the generated games, the ablations, and the figures.

    python study.py --workers 2                        # WebShop; hours of CPU; can be stopped and started again
    python study.py --figures-only                     # the tables and pictures from what is there
    python study.py --env alfworld --out out/study-alfworld --skip "ppo,no ,naive,grpo-real-5k"

Each job is one of the project's own commands with its own folder; a finished job (result.json) is not run again. Seeds vary the offline data, the
experience model, the imitation and the RL; the environment and the evaluation tasks are the same for all. Results are written to OUT/results.json.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from dreamgym import plots, run
from dreamgym.report import seed_interval


@dataclass
class Args:
    env: str = "webshop"               # environment: webshop | alfworld | webarena
    out: str = "out/study"             # folder of the study
    seeds: int = 3                     # seeds 0 .. seeds-1
    workers: int = 2                   # jobs at once, one thread each
    iterations: int = 20               # dream iterations
    steps: int = 1400                  # optimizer steps of the experience model before its probes are looked at
    max_steps: int = 2200              # ... and at most, if they do not pass; the ablated ones too
    real_transitions: int = 30_000     # budget of the large real run
    s2r_transitions: int = 5_000       # budget of S2R and of the small real run
    naive_seeds: int = 3               # seeds of the naive-reward lesson
    repeats: int = 0                   # the policies play every held-out task again, so many times, and every training task once
    only: str = ""                     # run only jobs whose name holds this text
    official: str = ""                 # ALFWorld: folder of official games; the policies play their valid_seen games, too
    skip: str = ""                     # leave out jobs whose name holds one of these texts, separated by commas
    figures_only: bool = False         # no runs


ABLATIONS = {"no replay": ["--no-retrieval"], "no reasoning": ["--no-reasoning"], "no history": ["--history", "0"]}


def script(name: str, *flags) -> list[str]:
    return [sys.executable, str(Path(__file__).parent / name), *map(str, flags)]


def names(args: Args) -> tuple[str, str, str]:
    """The jobs named after their budgets: real RL with that of S2R, with the large one, and S2R."""
    small, large = f"{args.s2r_transitions // 1000}k", f"{args.real_transitions // 1000}k"
    if small == large:
        raise ValueError(f"--s2r-transitions {args.s2r_transitions} and --real-transitions {args.real_transitions}: their runs would share a folder; expected other thousands")
    return f"grpo-real-{small}", f"grpo-real-{large}", f"grpo-s2r-{small}"


def played(args: Args) -> list[str]:
    """The policies that are played once more when all are trained."""
    return ["imitation", "grpo-dream", *names(args)[1:]]


def jobs(args: Args, seed: int) -> list[tuple[str, list[str], list[str], str]]:
    """(name, command, names it waits for, folder copied first) of one seed, in order."""
    base = Path(args.out) / f"seed{seed}"
    data, full = base / "data", base / "expmodel"
    train = ["--steps", args.steps, "--seed", seed, "--data", data]
    policy = ["--env", args.env, "--data", data, "--seed", seed, "--iterations", args.iterations, "--eval-every", 10]
    shared = [*policy, "--expmodel", full, "--imitation", base / "imitation"]
    budget = args.s2r_transitions
    real_small, real_large, s2r = names(args)
    rows = [
        ("data", script("collect.py", "--env", args.env, "--out", data, "--seed", seed), [], ""),
        ("expmodel", script("train_expmodel.py", "--out", full, *train, "--max-steps", args.max_steps), ["data"], ""),
        ("imitation", script("train_policy.py", "--out", base, *policy, "--expmodel", full, "--algo", "sft"), ["expmodel"], ""),
        ("grpo-dream", script("train_policy.py", "--out", base / "grpo-dream", *shared), ["imitation"], ""),
        ("ppo-dream", script("train_policy.py", "--out", base / "ppo-dream", *shared, "--algo", "ppo"), ["imitation"], ""),
        (real_small, script("train_policy.py", "--out", base / real_small, *shared, "--world", "real", "--real-transitions", budget), ["imitation"], ""),
        (real_large, script("train_policy.py", "--out", base / real_large, *shared, "--world", "real", "--real-transitions", args.real_transitions), ["imitation"], ""),
        (s2r, script("train_policy.py", "--out", base / s2r, *shared, "--real-transitions", budget), ["grpo-dream"], "grpo-dream"),
        ("no task generation", script("train_policy.py", "--out", base / "no task generation", *shared, "--lam-generated", 0), ["imitation"], ""),
    ]
    for name, flags in ABLATIONS.items():
        model = base / f"expmodel {name}"
        rows.append((f"expmodel {name}", script("train_expmodel.py", "--out", model, *train, "--max-steps", args.max_steps, *flags, "--no-report-variants"), ["data"], ""))
        flags = [*policy, "--expmodel", model, "--imitation", base / "imitation", *(["--no-enrich"] if name == "no replay" else [])]
        rows.append((name, script("train_policy.py", "--out", base / name, *flags), ["imitation", f"expmodel {name}"], ""))
    again = [("official", ["--data-dir", args.official, "--split", "valid_seen"])] if args.official else []
    again += [("again test", ["--split", "test", "--repeats", args.repeats]), ("again train", ["--split", "train"])] if args.repeats else []
    for name, (what, flags) in product(played(args), again):
        folder = base / "imitation" / "model" if name == "imitation" else base / name / "policy"
        flags = ["--env", args.env, "--policy", folder, "--data", data, *flags, "--seed", seed, "--out", base / f"{what} {name}"]
        rows.append((f"{what} {name}", script("evaluate.py", *flags), [name], ""))
    if seed < args.naive_seeds:
        model = base / "expmodel naive"
        rows.append(("expmodel naive", script("train_expmodel.py", "--out", model, *train, "--max-steps", args.max_steps, "--no-judged", "--no-report-variants"), ["data"], ""))
        flags = [*policy, "--expmodel", model, "--imitation", base / "imitation", "--naive-reward"]
        rows.append(("naive reward", script("train_policy.py", "--out", base / "naive reward", *flags), ["imitation", "expmodel naive"], ""))
    return rows


def finished(out: Path, seed: int, name: str) -> bool:
    base = out / f"seed{seed}"
    if name == "data":
        return (base / "data" / "meta.json").exists()
    if name.startswith(("expmodel", "official", "again")):
        return (base / name / "report.json").exists()
    folder = base if name == "imitation" else base / name
    if not (folder / "result.json").exists():
        return False
    return not name.startswith("grpo-s2r") or run.read_json(folder / "result.json")["evaluations"][-1]["real_transitions"] > 0


def run_job(out: Path, seed: int, name: str, command: list[str], copied: str) -> None:
    """Runs one job with its log beside it; raises RuntimeError with the log's last lines if it fails."""
    base = out / f"seed{seed}"
    base.mkdir(parents=True, exist_ok=True)
    if copied and not (base / name).exists():
        shutil.copytree(base / copied, base / f".{name}.part", dirs_exist_ok=True)
        (base / f".{name}.part").rename(base / name)
    start = time.perf_counter()
    with (base / f"{name}.log").open("ab") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    print(f"seed {seed}  {name}: {'done' if not code else f'exit code {code}'} in {time.perf_counter() - start:.0f} s", flush=True)
    if code:
        tail = (base / f"{name}.log").read_text(errors="replace").splitlines()[-5:]
        raise RuntimeError(f"seed {seed} {name} failed: {' | '.join(tail)}")


def run_all(args: Args) -> None:
    """All jobs, at most --workers at once, each as soon as what it waits for is finished; earlier seeds and earlier jobs first."""
    out = Path(args.out)
    waiting = [(seed, *job) for job_index in range(30) for seed in range(args.seeds) for job in jobs(args, seed)[job_index:job_index + 1]]
    skipped = [text for text in args.skip.split(",") if text]
    waiting = [job for job in waiting if args.only in job[1] and not any(text in job[1] for text in skipped) and not finished(out, job[0], job[1])]
    running: dict = {}
    with ThreadPoolExecutor(args.workers) as pool:
        while waiting or running:
            for job in list(waiting):
                seed, name, command, needs, copied = job
                if len(running) < args.workers and all(finished(out, seed, need) for need in needs):
                    waiting.remove(job)
                    running[pool.submit(run_job, out, seed, name, command, copied)] = job
            if not running:
                raise SystemExit(f"study.py: nothing can run; waiting for {sorted({need for job in waiting for need in job[3]})} (a job failed, or --only is too narrow)")
            time.sleep(1)
            for future in [f for f in running if f.done()]:
                del running[future]
                future.result()


def summarize(args: Args) -> dict:
    """results.json: for every job the final numbers of each seed, and mean with 95 % interval over seeds."""
    out, results = Path(args.out), {"runs": {}, "expmodels": {}}
    for name in ["imitation", "grpo-dream", "ppo-dream", *names(args), "no task generation", *ABLATIONS, "naive reward"]:
        found = [run.read_json((out / f"seed{s}" if name == "imitation" else out / f"seed{s}" / name) / "result.json") for s in range(args.seeds) if finished(out, s, name)]
        if not found:
            continue
        last = [f["evaluations"][-1] for f in found]
        results["environment"] = found[0]["environment"]
        entry = {"seeds": len(found), "dream_transitions": [e["dream_transitions"] for e in last], "real_transitions": [e["real_transitions"] for e in last]}
        for key in ("real_greedy", "real_sampled", "dream_sampled"):
            values = [e[key]["success"] for e in last]
            mean, half = seed_interval(values)
            entry[key] = {"values": values, "mean": mean, "half_width": half if half == half else None}
        if "groups" in last[0]["real_sampled"]:      # ALFWorld: by split and by task type
            entry["groups"] = {group: [e["real_sampled"]["groups"][group]["share"] for e in last] for group in last[0]["real_sampled"]["groups"]}
        results["runs"][name] = entry
    for name, what in [(name, what) for name in played(args) for what in ("official", "again test", "again train")]:
        reports = [run.read_json(out / f"seed{s}" / f"{what} {name}" / "report.json") for s in range(args.seeds) if finished(out, s, f"{what} {name}")]
        if reports:
            shown = {k: [r["groups"][k]["share"] for r in reports] for k in reports[0].get("groups", {}) if k.startswith("type") or what == "again test"}
            results.setdefault(what, {})[name] = {"n": reports[0]["n"], "success": [r["success"] for r in reports], **shown}
    for name in ["expmodel", *(f"expmodel {a}" for a in ABLATIONS), "expmodel naive"]:
        found = [run.read_json(out / f"seed{s}" / name / "report.json") for s in range(args.seeds) if (out / f"seed{s}" / name / "report.json").exists()]
        if found:
            results["expmodels"][name] = found
    run.write_json(out / "results.json", results)
    return results


def tables(results: dict) -> str:
    """The README's tables."""
    def cell(value: dict) -> str:
        half = f" ± {value['half_width']:.3f}" if value["half_width"] is not None else ""
        return f"{value['mean']:.3f}{half} ({', '.join(f'{v:.3f}' for v in value['values'])})"
    def short(values: list[float]) -> str:
        average, half = seed_interval(values)
        return f"{average:.2f}" + (f" ± {half:.2f}" if half == half else "")
    mean = lambda e, key: f"{sum(e[key]) // e['seeds']:,}"
    rows = [{"policy": name, "RL transitions dream / real (mean)": f"{mean(e, 'dream_transitions')} / {mean(e, 'real_transitions')}", "real sampled": cell(e["real_sampled"]),
             "real greedy": cell(e["real_greedy"]), "dream sampled": cell(e["dream_sampled"])} for name, e in results["runs"].items()]
    groups = [{"policy, real sampled": name, **{group.split(" ", 1)[1]: short(v) for group, v in e["groups"].items()}} for name, e in results["runs"].items() if "groups" in e]
    again = [[{f"policy, {title}, sampled": name, **{key.split(" ", 1)[-1]: short(v) for key, v in e.items() if key != "n"}, "episodes": e["n"]}
              for name, e in results.get(what, {}).items()]
             for what, title in (("official", "official valid_seen games"), ("again test", "held-out tasks"), ("again train", "training tasks"))]
    models = []
    for name, reports in results["expmodels"].items():
        for variant in ("full", "without history", "without retrieval", "without reasoning"):
            if all(variant in r for r in reports):
                part = [r[variant] for r in reports]
                near = [max(v["share"] for k, v in r["near_miss_paid"].items() if k != "none") for r in part]
                models.append({"experience model": name if variant == "full" else f"{name}, {variant} when asked", "steps": "/".join(str(r["steps"]) for r in reports),
                               **{label: " ".join(f"{x:.3f}" for x in values) for label, values in {
                                   "exact": [r["exact"]["share"] for r in part], "F1": [r["f1"] for r in part],
                                   **{k: [r["by_knowledge"][k]["share"] for r in part] for k in part[0]["by_knowledge"]},
                                   **({"pages that contradict": [r["contradictions"]["share"] for r in part]} if all("contradictions" in r for r in part) else {}),
                                   "worst near miss paid": near, "refusals accepted": [r["refusals_accepted"]["share"] for r in part]}.items()}})
    return "\n\n".join("\n".join(markdown(rows)) for rows in (rows, groups, *again, models) if rows)


def markdown(rows: list[dict]) -> list[str]:
    columns = list(rows[0])
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *("| " + " | ".join(str(row[c]) for c in columns) + " |" for row in rows)]


def main() -> None:
    args = run.parse(Args)
    if not args.figures_only:
        run_all(args)
    results = summarize(args)
    print(tables(results))
    for path in plots.study_figures(Path(args.out), results, args.seeds, *names(args)[1:]):
        print(f"figure {path}")


if __name__ == "__main__":
    run.main(main)
