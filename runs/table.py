"""Result files of several seeds -> one table: success on test tasks, mean and 95 % half-width over seeds (Student's t).

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
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    labels = set()
    for path in paths:
        result = json.loads(Path(path).read_text())
        labels.add(f"{result['environment']['env']}, {result['label']}")
        for entry in result["test"]:
            world = "real GRPO" if result["settings"]["world"] == "real" else "dream GRPO"
            name = "start (imitation)" if entry["policy"] == "before" else f"after {world}"
            for key, report in entry["reports"].items():
                cells[name, key].append(report["success"])
    print("; ".join(sorted(labels)))
    names = list(dict.fromkeys(name for name, _ in cells))
    keys = list(dict.fromkeys(key for _, key in cells))
    rows = []
    for name in names:
        row = {"policy": name}
        for key in keys:
            if values := cells.get((name, key)):
                mean, half = seed_interval(values)
                row[key] = f"{mean:.3f} ± {half:.3f} (n {len(values)})"
        rows.append(row)
    print(summary_table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
