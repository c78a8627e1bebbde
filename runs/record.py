"""One run of runs/cell.sh -> runs/results/NAME.json: settings, transitions, commit, and for each temperature
the outcome of each test episode ("0110" of a task). Tables are made of these files alone (runs/table.py).

    python -m runs.record out/study/webshop-0/dream webshop-0-dream
"""
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def main(folder: str, name: str) -> None:
    read = lambda file: json.loads((Path(folder) / file).read_text())
    trained, played = read("result.json"), read("test/report.json")
    outcomes = {t: {task: "".join(str(int(won)) for won in row) for task, row in report["outcomes"].items()}
                for t, report in played["report"].items()}
    used = {k: v for k, v in trained["test"][-1].items() if k.endswith("_transitions")}
    record = {"policy": Path(folder).name, "environment": trained["environment"], "label": trained["label"],
              "commit": trained["commit"], "settings": trained["settings"], **used,
              "split": played["settings"]["split"], "outcomes": outcomes}
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
