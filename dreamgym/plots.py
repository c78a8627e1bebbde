"""Pictures from files: the learning curve of one run. Reads metrics.jsonl, never a live run."""
from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first: there may be no screen)

REAL, DREAM, GREY = "#c2410c", "#1d4ed8", "#6b7280"
LINES = (("real 0", REAL, "s--", "real, greedy"), ("real 0.4", REAL, "^--", "real, temperature 0.4"),
         ("real 1", REAL, "o-", "real, temperature 1"),
         ("dream 1", DREAM, "o-", "dream, temperature 1"))


def training_curve(folder: Path) -> Path:
    """Writes FOLDER/curve.png: success on validation tasks (bands: 95 % over tasks), by RL transitions."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations, steps = ([r for r in records if r["name"] == name] for name in ("evaluation", "rl"))
    used = lambda records: [r["dream_transitions"] + r["real_transitions"] for r in records]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for key, colour, style, label in LINES:
        if evaluations and f"{key}/success" in evaluations[0]:
            axes.plot(used(evaluations), [e[f"{key}/success"] for e in evaluations], style, color=colour,
                      label=label, markersize=4)
            low, high = ([e[f"{key}/{end}"] for e in evaluations] for end in ("low", "high"))
            axes.fill_between(used(evaluations), low, high, color=colour, alpha=0.12, linewidth=0)
    axes.plot(used(steps), [s["success"] for s in steps], color=GREY, linewidth=0.8, alpha=0.6,
              label="training episodes")
    switch = [e["dream_transitions"] for e in evaluations if e["real_transitions"] and e["dream_transitions"]]
    if switch:
        axes.axvline(switch[0], color=GREY, linestyle=":", linewidth=1)
        axes.text(switch[0], 0.02, " real RL", color=GREY)
    tasks = " to ".join(map(str, sorted({e["tasks"] for e in evaluations})))
    axes.set(xlabel="RL transitions", ylabel="success on validation tasks", ylim=(0, 1),
             title=f"{tasks} validation tasks, one seed")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(folder / "curve.png", dpi=130)
    plt.close(figure)
    return folder / "curve.png"
