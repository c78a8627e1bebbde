"""WebArena-Verified (ServiceNow; pip install webarena-verified): its own scorer judges an episode from two
files, in the folders that it reads:

    out/webarena-verified/STARTED/attempt-1/21/agent_response.json
    out/webarena-verified/STARTED/attempt-1/21/network.har

An answer that is a JSON object (`stop [{"task_type": ..}]`) is written as it is, any other as retrieved text.
An episode without `stop` leaves `null`, which is no success.
"""
import json
from itertools import count
from pathlib import Path

RESPONSE, NETWORK = "agent_response.json", "network.har"
# What the benchmark asks of every agent, for the end of a task's text
FORM = ('Answer with stop [JSON]: {"task_type": "RETRIEVE", "MUTATE" or "NAVIGATE", "status": "SUCCESS", '
        '"NOT_FOUND_ERROR", "ACTION_NOT_ALLOWED_ERROR", "PERMISSION_DENIED_ERROR", "DATA_VALIDATION_ERROR" '
        'or "UNKNOWN_ERROR", "retrieved_data": a list of what was asked for or null, "error_details": text '
        'or null}')


def start_attempt(run: Path, task_id: int) -> Path:
    """A new folder for an attempt at a task, without an answer yet."""
    for number in count(1):
        folder = run / f"attempt-{number}" / str(task_id)
        try:
            folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        (folder / RESPONSE).write_text("null\n", encoding="utf-8")
        return folder


def write_response(folder: Path, answer: str) -> None:
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        said = {"task_type": "RETRIEVE", "status": "SUCCESS", "retrieved_data": [answer] if answer else None,
                "error_details": None}
    (folder / RESPONSE).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
