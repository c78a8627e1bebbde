"""Pictures from files: the learning curve of one run, and the study's figures. Reads metrics.jsonl and result.json, never a live run."""
from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first: there may be no screen)

REAL, DREAM, GREY = "#c2410c", "#1d4ed8", "#6b7280"


def read_metrics(folder: Path | str, name: str) -> list[dict]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["name"] == name]


def training_curve(folder: Path | str) -> Path:
    """OUT/curve.png: real and dream success of one run against RL transitions, with 95 % intervals over tasks. Returns its path."""
    folder = Path(folder)
    evaluations, steps = read_metrics(folder, "evaluation"), read_metrics(folder, "rl")
    figure, axes = plt.subplots(figsize=(7, 4.2))
    x = [e["dream_transitions"] + e["real_transitions"] for e in evaluations]
    for key, colour, label in (("real_sampled", REAL, "real, sampled"), ("dream_sampled", DREAM, "dream, sampled")):
        y = [e[f"{key}/success"] for e in evaluations]
        axes.plot(x, y, "o-", color=colour, label=label, markersize=4)
        axes.fill_between(x, [e[f"{key}/low"] for e in evaluations], [e[f"{key}/high"] for e in evaluations], color=colour, alpha=0.15, linewidth=0)
    axes.plot(x, [e["real_greedy/success"] for e in evaluations], "s--", color=REAL, label="real, greedy", markersize=4, alpha=0.7)
    axes.plot([s["dream_transitions"] + s["real_transitions"] for s in steps], [s["success"] for s in steps], color=GREY, linewidth=0.8, alpha=0.6, label="training episodes")
    switch = [e["dream_transitions"] for e in evaluations if e["real_transitions"] and e["dream_transitions"]]
    if switch:
        axes.axvline(switch[0], color=GREY, linestyle=":", linewidth=1)
        axes.text(switch[0], 0.02, " real RL", color=GREY)
    sizes = " to ".join(map(str, sorted({e["tasks"] for e in evaluations})))
    axes.set(xlabel="RL transitions", ylabel="success on held-out tasks", ylim=(0, 1), title=f"{sizes} held-out tasks, bands: 95 % over tasks, one seed")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(folder / "curve.png", dpi=130)
    plt.close(figure)
    return folder / "curve.png"


def _curve(axes, folders: list[Path], key: str, colour: str, label: str, budget: str) -> None:
    """Mean over seeds at each evaluation, a thin line per seed."""
    curves = [[(e[budget], e[f"{key}/success"]) for e in read_metrics(f, "evaluation")] for f in folders]
    for curve in curves:
        axes.plot(*zip(*curve), color=colour, linewidth=0.6, alpha=0.35)
    shortest = min(map(len, curves))
    mean = [(sum(c[i][0] for c in curves) / len(curves), sum(c[i][1] for c in curves) / len(curves)) for i in range(shortest)]
    axes.plot(*zip(*mean), "o-", color=colour, label=label, markersize=4)


def study_figures(out: Path, results: dict, seeds: int, real: str, s2r: str) -> list[Path]:
    """OUT/success.png (real and dream success against transitions) and OUT/ablations.png (bars over seeds), from finished runs only; `real` and `s2r`: the
    names of the large real run and of S2R."""
    paths = []
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for name, label, colour in (("grpo-dream", "GRPO", REAL), ("ppo-dream", "PPO", "#15803d")):
        folders = [out / f"seed{s}" / name for s in range(seeds) if (out / f"seed{s}" / name / "result.json").exists()]
        if folders:
            _curve(left, folders, "real_sampled", colour, f"{label}: real", "dream_transitions")
            _curve(left, folders, "dream_sampled", DREAM if name == "grpo-dream" else "#0891b2", f"{label}: dream", "dream_transitions")
    folders = [out / f"seed{s}" / real for s in range(seeds) if (out / f"seed{s}" / real / "result.json").exists()]
    if folders:
        _curve(right, folders, "real_sampled", REAL, "GRPO, real environment", "real_transitions")
    for name, colour, label in (("grpo-dream", DREAM, "dream, 0 real transitions"), (s2r, "#7c3aed", f"dream, then {s2r.split('-')[-1]} real (S2R)")):
        if name in results["runs"]:
            right.axhline(results["runs"][name]["real_sampled"]["mean"], color=colour, linestyle="--", linewidth=1.2, label=label)
    left.set(xlabel="RL transitions in the dream (0 real)", ylabel="success, held-out tasks, sampled", ylim=(0, 1), title="inside the experience model")
    right.set(xlabel="real RL transitions", title="in the real environment")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8), axes.grid(alpha=0.2)
    environment = results.get("environment", {})
    played = next((environment[key] for key in ("catalogue", "games", "sites") if environment.get(key)), "")
    figure.suptitle(f"{environment.get('env')}, {played}; mean of {seeds} seeds, thin lines: seeds", fontsize=9)
    figure.tight_layout()
    figure.savefig(out / "success.png", dpi=130)
    paths.append(out / "success.png")
    if not any(name.startswith("no ") for name in results["runs"]):
        return paths
    names = [n for n in ("imitation", "grpo-dream", "no replay", "no reasoning", "no history", "no task generation") if n in results["runs"]]
    figure, axes = plt.subplots(figsize=(7.5, 4))
    for offset, (key, colour) in enumerate((("real_sampled", REAL), ("real_greedy", "#fdba74"), ("dream_sampled", DREAM))):
        entries = [results["runs"][n][key] for n in names]
        x = [i + (offset - 1) * 0.26 for i in range(len(names))]
        axes.bar(x, [e["mean"] for e in entries], 0.24, color=colour, label=key.replace("_", ", "), yerr=[e["half_width"] or 0 for e in entries], ecolor=GREY, capsize=2)
        for i, e in zip(x, entries):
            axes.plot([i] * len(e["values"]), e["values"], ".", color="black", markersize=3)
    axes.set_xticks(range(len(names)), [n.replace("grpo-dream", "full\n(GRPO, dream)").replace(" ", "\n", 1) for n in names], fontsize=8)
    axes.set(ylabel="success, held-out tasks", ylim=(0, 1), title="ablations at equal budget; bars: mean, whiskers: 95 % over seeds, dots: seeds")
    axes.title.set_fontsize(9)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "ablations.png", dpi=130)
    return [*paths, out / "ablations.png"]
