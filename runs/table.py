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
    cells: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)     # by seed: two runs share one start
    labels, used = set(), defaultdict(list)
    for path in paths:
        result = json.loads(Path(path).read_text())
        labels.add(f"{result['environment']['env']}, {result['label']}")
        for entry in result["test"]:
            world = "real GRPO" if result["settings"]["world"] == "real" else "dream GRPO"
            name = "start (imitation)" if entry["policy"] == "before" else f"after {world}"
            for key, report in entry["reports"].items():
                cells[name, key].setdefault(result["settings"]["seed"], report["success"])
            used[name].append((entry["dream_transitions"], entry["real_transitions"]))
    print("; ".join(sorted(labels)))
    names = list(dict.fromkeys(name for name, _ in cells))
    keys = list(dict.fromkeys(key for _, key in cells))
    rows = []
    for name in names:
        dream, real = (round(sum(column) / len(column)) for column in zip(*used[name]))
        row = {"policy": name, "RL transitions, dream / real": f"{dream:,} / {real:,}"}
        for key in keys:
            if values := cells.get((name, key)):
                mean, half = seed_interval(list(values.values()))
                row[key] = f"{mean:.3f} ± {half:.3f} (n {len(values)})"
        rows.append(row)
    print(summary_table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
