"""The learning curve of one run, from its metrics.jsonl."""
from pathlib import Path

from matplotlib.figure import Figure             # not pyplot, which looks for a screen

from dreamgym.run import read_metrics
from dreamgym.viewer import success_lines

REAL, DREAM, GREY = "#c2410c", "#1d4ed8", "#6b7280"
STYLES = {"real dashed": (REAL, "s--"), "real": (REAL, "o-"), "dream": (DREAM, "o-"), "": (GREY, "-")}


def training_curve(folder: Path) -> Path:
    """Writes FOLDER/curve.png: success on validation tasks (bands: 95 % over tasks), by RL transitions."""
    records = read_metrics(folder)
    figure = Figure(figsize=(7, 4.2), layout="tight")
    axes = figure.subplots()
    for line in success_lines(records):
        if line["points"]:
            colour, style = STYLES[line["kind"]]
            x, y, *band = zip(*line["points"])
            axes.plot(x, y, style, color=colour, label=line["name"], markersize=4,
                      linewidth=1.5 if band else 0.8)
            if band:
                axes.fill_between(x, *band, color=colour, alpha=0.12, linewidth=0)
    evaluations = [r for r in records if r["name"] == "evaluation"]
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
