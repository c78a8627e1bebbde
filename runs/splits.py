"""What is disjoint between the splits of a data folder, counted: instructions, goals, and recorded pages,
those among them where a task was fulfilled ("paid pages": the targets).

    python -m runs.splits out/webshop/data
"""
import sys
from pathlib import Path

from dreamgym.episode import read_episodes, read_tasks, recorded
from dreamgym.run import summary_table


def contents(data: Path, split: str) -> dict[str, set[str]]:
    """What a split consists of, by kind."""
    tasks = read_tasks(data / f"tasks_{split}.jsonl")
    steps = [step for episode in recorded(read_episodes(data / f"{split}.jsonl"))
             for step in episode.steps]
    goals = {f"goal {key}": {repr(task.goal[key]) for task in tasks if key in task.goal}
             for key in sorted({key for task in tasks for key in task.goal})}
    return {"instructions": {task.text for task in tasks}, **goals,
            "first pages": {task.start for task in tasks}, "pages": {step.state for step in steps},
            "pages with action": {f"{step.state}\n> {step.shown_action}" for step in steps},
            "paid pages": {step.state for step in steps if step.reward}}


def main(data: str) -> None:
    found = {split: contents(Path(data), split) for split in ("train", "valid", "test")}
    rows = []
    for kind in found["train"]:
        row = {"different": kind, "train": f"{len(found['train'][kind]):,}"}
        for split in ("valid", "test"):
            mine = found[split].get(kind, set())
            row[split] = f"{len(mine):,}"
            row[f"{split} not in train"] = f"{len(mine - found['train'][kind]):,}"
        rows.append(row | {"test not in valid": f"{len(mine - found['valid'].get(kind, set())):,}"})
    print(summary_table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
