"""Result files of several seeds -> one table: test success, mean and 95 % half-width over seeds (t).

    python runs/table.py out/study/webshop-*/result.json out/study/webshop-*/real/result.json
"""
import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from dreamgym.evaluation import seed_interval  # noqa: E402
from dreamgym.run import summary_table  # noqa: E402


def main(paths: list[str]) -> None:
    cells, used = defaultdict(lambda: defaultdict(dict)), defaultdict(list)
    labels = set()
    for result in (json.loads(Path(path).read_text()) for path in paths):
        labels.add(f"{result['environment']['env']}, {result['label']}")
        for entry in result["test"]:
            name = ("start (imitation)" if entry["policy"] == "before"
                    else f"after {result['settings']['world']} GRPO")
            for key, report in entry["reports"].items():         # by seed: two runs share one start
                cells[name][key].setdefault(result["settings"]["seed"], report["success"])
            used[name].append((entry["dream_transitions"], entry["real_transitions"]))
    print("; ".join(sorted(labels)))
    rows = []
    for name, columns in cells.items():
        dream, real = (round(sum(column) / len(column)) for column in zip(*used[name]))
        row = {"policy": name, "RL transitions, dream / real": f"{dream:,} / {real:,}"}
        for key, values in columns.items():
            mean, half = seed_interval(list(values.values()))
            row[key] = f"{mean:.3f} ± {half:.3f} (n {len(values)})"
        rows.append(row)
    print(summary_table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
