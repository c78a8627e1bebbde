"""Rebuilds the official ALFWorld games of ../shared/data/alfworld in the official folder layout, for tests and benchmarks."""
from __future__ import annotations

import ast
import gzip
import json
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "shared" / "data" / "alfworld" / "official_games.jsonl.gz"


def rebuild(folder: str | Path, split: str | None = None, limit: int | None = None) -> list[Path]:
    """Writes json_2.1.1/<path>/{game.tw-pddl,traj_data.json} under `folder` and returns the game files in the order of the source, at most `limit`
    of one `split` (train | valid_seen | valid_unseen; None: all). Needs the alfworld package (its domain and grammar) and SOURCE.

    With a limit the games are spread evenly over the source, so that a few of them cover the task types.
    """
    import alfworld

    shipped = Path(alfworld.__file__).parent / "data"
    domain, grammar = (shipped / "alfred.pddl").read_text(encoding="utf-8"), (shipped / "alfred.twl2").read_text(encoding="utf-8")
    with gzip.open(SOURCE, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    records = [record for record in records if split is None or record["path"].startswith(f"{split}/")]
    if limit is not None and limit < len(records):
        records = [records[i * len(records) // limit] for i in range(limit)]
    return [_write(Path(folder) / "json_2.1.1" / record["path"], record, domain, grammar) for record in records]


def _write(path: Path, record: dict, domain: str, grammar: str) -> Path:
    game = {"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", record["task"]), "pddl_problem": record["pddl_problem"],
            "solvable": True, "walkthrough": []}
    traj = {"task_type": record["task_type"], "pddl_params": _read(record["pddl_params"]), "scene": _read(record["scene"])}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(game), encoding="utf-8")
    (path.parent / "traj_data.json").write_text(json.dumps(traj), encoding="utf-8")
    return path


def _read(value):
    """The shared file keeps nested records as the text of a Python literal."""
    return ast.literal_eval(value) if isinstance(value, str) else value
