"""Reports of evaluate.py --bound -> one table, and the rank correlation of the gap's size with the bounds.

    python -m runs.bounds runs/results/bounds/*.json
"""
import json
import sys
from pathlib import Path

from scipy import stats

from dreamgym.run import summary_table


def main(files: list[str]) -> None:
    rows = []
    for file in files:
        for temperature, cells in json.loads(Path(file).read_text())["report"].items():
            number = {k: cell.get("share", cell.get("mean")) for k, cell in cells.items()}
            gap, bound = cells["gap"], cells["bound"]
            above = max(gap["low"], -gap["high"]) > bound["high"]            # by both intervals
            rows.append({"pair": Path(file).stem, "T": temperature, **number, "above its bound": str(above)})
    print(summary_table(rows))
    sizes = [abs(row["gap"]) for row in rows]
    if len(rows) > 2:
        for name in ("bound", "bound_page", "bound_reward", "wrong_page", "wrong_reward"):
            values = [row[name] for row in rows]
            if min(values) == max(values):
                continue
            rho, p = stats.spearmanr(sizes, values)
            print(f"rank correlation of |gap| with {name}: {rho:+.2f} (p {p:.3f}, {len(rows)} points)")


if __name__ == "__main__":
    main(sys.argv[1:])
