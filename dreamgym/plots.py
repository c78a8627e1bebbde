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
    for key, colour, label in (("real_sampled", REAL, "real shop, sampled"), ("dream_sampled", DREAM, "dream, sampled")):
        y = [e[f"{key}/success"] for e in evaluations]
        axes.plot(x, y, "o-", color=colour, label=label, markersize=4)
        axes.fill_between(x, [e[f"{key}/low"] for e in evaluations], [e[f"{key}/high"] for e in evaluations], color=colour, alpha=0.15, linewidth=0)
    axes.plot(x, [e["real_greedy/success"] for e in evaluations], "s--", color=REAL, label="real shop, greedy", markersize=4, alpha=0.7)
    axes.plot([s["dream_transitions"] + s["real_transitions"] for s in steps], [s["success"] for s in steps], color=GREY, linewidth=0.8, alpha=0.6, label="training episodes")
    switch = [e["dream_transitions"] for e in evaluations if e["real_transitions"] and e["dream_transitions"]]
    if switch:
        axes.axvline(switch[0], color=GREY, linestyle=":", linewidth=1)
        axes.text(switch[0], 0.02, " real RL", color=GREY)
    axes.set(xlabel="RL transitions", ylabel="success on held-out tasks", ylim=(0, 1), title=f"{evaluations[-1]['tasks']} held-out tasks, bands: 95 % over tasks, one seed")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(folder / "curve.png", dpi=130)
    plt.close(figure)
    return folder / "curve.png"
