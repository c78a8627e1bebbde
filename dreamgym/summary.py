"""The end of a training: tables on the console, and of a policy's also a picture and a page to read.

    show_experience(log, report)          # what train_expmodel.py has measured
    finish(job, state, results)           # OUT/result.json, OUT/curve.png, OUT/dream.html

`job` and `state` are a Job and a Run of train_policy.py, `results` its reports on the test tasks.
"""
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure             # not pyplot, which looks for a screen

from dreamgym import run, viewer
from dreamgym.evaluation import experience_tables, with_interval

FOLDERS = "data", "expmodel", "expmodel_name", "expmodel_folder"   # flags that evaluate.py needs, too
LAST_VALIDATION = 60    # most of its episodes on file: 20 of each world and temperature
COLOURS, GREY = {"real": "#c2410c", "dream": "#1d4ed8"}, "#6b7280"


def show_experience(log: run.Log, report: dict) -> None:
    """The report of train_expmodel.py as tables on the console."""
    worst = lambda r: max([v["share"] for k, v in r["near_miss_paid"].items() if k != "none"],
                          default=float("nan"))
    log.say(run.summary_table([
        {"experience model": name, "exact": r["exact"]["share"], "lookup": r["exact_of_lookup"]["share"],
         "F1": r["f1"], "worst near miss paid": worst(r),
         "refusals accepted": r["refusals_accepted"]["share"], "malformed": r["malformed"]["share"],
         "inconsistent": r["inconsistent"]["share"]}
        for name, r in report.items() if name == "full" or name.startswith("without ")]))
    log.say(f"\n{experience_tables(report['full'])}")


def finish(job, state, results: list[dict]) -> None:
    names = {"before": "start (imitation)", "after": "after RL"}
    rows = [{"policy": names[result["policy"]],
             **{key: with_interval(report) for key, report in result["reports"].items()},
             "RL transitions, dream / real": "{dream_transitions:,} / {real_transitions:,}".format(**result)}
            for result in results]
    env, out = job.env, job.out
    note = "" if env.is_real else ("no real environment (--env logs): success in the dream only, "
                                   "which says nothing about the real one")
    run.write_json(out / "result.json",
                   {"environment": env.describe(), "label": env.label, "commit": run.commit(),
                    "settings": asdict(job.args), "rows": rows, "test": results,
                    "validation": state.evaluations, "note": note})
    picture, page = training_curve(out), out / "dream.html"
    job.log.say(f"\n{env.name}, {env.label}: {results[0]['tasks']} test tasks, world and temperature, 95 % "
                f"Wilson intervals\n{run.summary_table(rows)}\n{note}")
    episodes, cut = viewer.read_tail(out / "evaluations.jsonl", LAST_VALIDATION)
    kinds = tuple(f"valid-{state.step}-{world}-1-" for world in ("real", "dream"))     # alike in temperature
    alike = [e for e in episodes if e.id.startswith(kinds)]
    state.experience_model.clear_caches()
    where = "".join(f" --{name.replace('_', '-')} {value}" for name in FOLDERS
                    if (value := getattr(job.args, name)) and not value.endswith(".jsonl"))
    where += "" if env.is_real else " --world dream"
    where += f" --slots {job.args.slots}" if job.args.slots < 128 else ""      # evaluate.py's own number
    about = f"validation tasks at temperature 1, after {state.step} iterations"
    viewer.write_page(page, env, about, alike, state.experience_model, out, [cut])
    job.log.say(f"everything is in {out}: result.json, metrics.jsonl, episodes.jsonl, expmodel/report.json, "
                f"policy/; picture {picture}; page to read {page}\n"
                f"next: python evaluate.py --env {job.args.env} --policy {out / 'policy'}{where} --play 10"
                f"   |   tensorboard --logdir {out}")


def training_curve(folder: Path) -> Path:
    """Writes FOLDER/curve.png: success by RL transitions, on validation tasks for each world and temperature
    (bands: 95 % over tasks), and of the training episodes."""
    records = run.read_metrics(folder)
    evaluations, steps = ([r for r in records if r["name"] == name] for name in ("evaluation", "rl"))
    used = lambda found: [r["dream_transitions"] + r["real_transitions"] for r in found]
    figure = Figure(figsize=(7, 4.2), layout="tight")
    axes = figure.subplots()
    for key in sorted({key for r in evaluations for key in r if key.endswith("/success")}, reverse=True):
        world, temperature = key.removesuffix("/success").split()
        seen = [r for r in evaluations if r.get(key) is not None]
        low, high = ([r[key.replace("success", end)] for r in seen] for end in ("low", "high"))
        name = f"{world}, " + (f"temperature {temperature}" if float(temperature) else "greedy")
        axes.plot(used(seen), [r[key] for r in seen], "s--" if float(temperature) < 1 else "o-", label=name,
                  color=COLOURS[world], markersize=4)
        axes.fill_between(used(seen), low, high, color=COLOURS[world], alpha=0.12, linewidth=0)
    steps = [r for r in steps if r["length"]]         # else an iteration without a whole episode
    axes.plot(used(steps), [r["success"] for r in steps], "-", color=GREY, label="training episodes", lw=0.8)
    switch = [e["dream_transitions"] for e in evaluations if e["real_transitions"] and e["dream_transitions"]]
    if switch:
        axes.axvline(switch[0], color=GREY, linestyle=":", linewidth=1)
        axes.text(switch[0], 0.02, " real RL", color=GREY)
    tasks = " to ".join(map(str, sorted({e["tasks"] for e in evaluations})))
    axes.set(xlabel="RL transitions", ylabel="success on validation tasks", ylim=(0, 1),
             title=f"{tasks} validation tasks, one seed")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.2)
    figure.savefig(folder / "curve.png", dpi=130)
    return folder / "curve.png"
