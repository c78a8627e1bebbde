"""What the ALFWorld tests share: official games rebuilt from ../shared/data/alfworld, skips, and one played
episode."""
from __future__ import annotations

import ast
import gzip
import json
from pathlib import Path

import pytest

from dreamgym.envs.alfworld.engine import require
from dreamgym.episode import Episode, Step, StopReason

SOURCE = Path(__file__).resolve().parents[2] / "shared" / "data" / "alfworld" / "official_games.jsonl.gz"


def packages_missing() -> str:
    try:
        require()
    except ValueError as error:
        return str(error)
    return ""


needs_packages = pytest.mark.skipif(bool(packages_missing()), reason=packages_missing() or "-")
needs_official = pytest.mark.skipif(not SOURCE.exists(), reason=f"no official games: {SOURCE} is not there")


def records() -> list[dict]:
    with gzip.open(SOURCE, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def rebuild(folder: str | Path, split: str | None = None, limit: int | None = None) -> list[Path]:
    """Writes json_2.1.1/<path>/{game.tw-pddl,traj_data.json} under `folder` and returns the game files in the
    order of the source, at most `limit` of one `split` (train | valid_seen | valid_unseen; None: all). Needs
    the alfworld package.

    With a limit the games are spread evenly over the source, so that a few of them cover the task types.
    """
    import alfworld

    shipped = Path(alfworld.__file__).parent / "data"
    domain, grammar = (
        (shipped / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2")
    )
    found = [record for record in records() if split is None or record["path"].startswith(f"{split}/")]
    if limit is not None and limit < len(found):
        found = [found[i * len(found) // limit] for i in range(limit)]
    return [_write(Path(folder) / "json_2.1.1" / record["path"], record, domain, grammar) for record in found]


def _write(path: Path, record: dict, domain: str, grammar: str) -> Path:
    game = {"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", record["task"]),
            "pddl_problem": record["pddl_problem"], "solvable": True, "walkthrough": []}
    traj = {
        "task_type": record["task_type"], "pddl_params": _read(record["pddl_params"]),
        "scene": _read(record["scene"]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(game), encoding="utf-8")
    (path.parent / "traj_data.json").write_text(json.dumps(traj), encoding="utf-8")
    return path


def _read(value):
    """The shared file keeps nested records as the text of a Python literal."""
    return ast.literal_eval(value) if isinstance(value, str) else value


def play(env, task, name: str, rng, act=None) -> Episode:
    """An episode of the player `name`, or of `act`, with reasoning."""
    [session] = env.reset([task])
    act, steps, result = act or env.players()[name].make(session, rng), [], None
    while len(steps) < env.max_steps and not (result and result.done):
        state = session.state
        action = act(state)
        [result] = env.step([session], [action])
        step = Step(
            state=state, action=action, next_state=result.state, reward=result.reward, done=result.done
        )
        step.reasoning, step.reward_reasoning = env.explain(task, steps, step)
        steps.append(step)
    env.end([session])
    return Episode(
        id=f"{task.id}-{name}", task=task, steps=steps, source=name, stop=result.stop or StopReason.STEP_LIMIT
    )
