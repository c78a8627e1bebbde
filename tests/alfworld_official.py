"""What the ALFWorld tests share: official games rebuilt from ../shared/data/alfworld, the stock engine,
skips."""
from __future__ import annotations

import ast
import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dreamgym.envs.alfworld.engine import require
from dreamgym.envs.alfworld.scripted import Oracle
from dreamgym.envs.alfworld.workers import Play
from dreamgym.envs.base import Session
from dreamgym.episode import Task

SOURCE = Path(__file__).resolve().parents[2] / "shared" / "data" / "alfworld" / "official_games.jsonl.gz"
KINDS = {
    "pick_and_place_simple": "pick", "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean", "pick_heat_then_place_in_recep": "hot",
    "pick_cool_then_place_in_recep": "cool", "pick_two_obj_and_place": "two"}


def packages_missing() -> str:
    try:
        require()
    except ValueError as error:
        return str(error)
    return ""


needs_packages = pytest.mark.skipif(bool(packages_missing()), reason=packages_missing() or "-")
needs_official = pytest.mark.skipif(not SOURCE.exists(), reason=f"no official games: {SOURCE} is not there")


class StockEngine:
    """The methods of Engine on TextWorld's unchanged PddlEnv under alfworld's demangler."""

    def __init__(self, path: str | Path):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", sys.argv)                       # the translator overwrites them
            patch.setenv("ALFWORLD_DATA", str(Path(path).parent))      # the package sets it
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
            from textworld import EnvInfos
            from textworld.envs.pddl import PddlEnv
            self._env = AlfredDemangler(PddlEnv(EnvInfos(won=True, admissible_commands=True)))
            self._env.load(str(path))

    def reset(self) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", sys.argv)
            self._state = self._env.reset()
        scene, _, task = self._state.feedback.partition("Your task is to: ")
        self.task = task.strip().removesuffix(".")
        return scene.replace("-= Welcome to TextWorld, ALFRED! =-", "").strip()

    def step(self, command: str) -> str:
        self._state, _, _ = self._env.step(command)
        return self._state.feedback.strip()

    @property
    def won(self) -> bool:
        return self._state["won"]

    @property
    def admissible(self) -> list[str]:
        return [command for command in self._state["admissible_commands"] if command != "help"]

    @property
    def facts(self) -> set[tuple[str, ...]]:
        env = self._env.unwrapped
        named = [(fact.name, *[env._entity_infos[variable.name].name.strip() for variable in fact.arguments])
                 for fact in env._pddl_state.facts]
        return {fact for fact in named if not fact[0].startswith(("not_", "new-axiom")) and fact[0] != "ison"}


def random_command(rng: random.Random, commands: list[str]) -> str:
    """Every verb is as likely as the next, so that things are taken, heated, moved and examined."""
    verb = rng.choice(sorted({command.split()[0] for command in commands}))
    return rng.choice([command for command in commands if command.split()[0] == verb])


def oracle_commands(path: str | Path) -> Iterator[str]:
    """What the oracle does in a session of its own, until the game is won."""
    play = Play(str(path), False, "")
    act = Oracle(Session(Task(id="t", text=play.engine.task), "", inner=play), np.random.default_rng(0))
    while not play.engine.won:
        command = act(play.state())
        yield command
        play.step(command)


def page(short: str) -> str:
    """'at desk 1: | mug 1 | holding: nothing' as a state."""
    return short.replace(" | ", "\n")


def records() -> list[dict]:
    with gzip.open(SOURCE, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def rebuild(folder: Path, split: str = "", limit: int = 10_000) -> list[Path]:
    """Writes json_2.1.1/<path>/{game.tw-pddl,traj_data.json} under `folder` and returns the game files in the
    order of the source: at most `limit` of one `split` (train | valid_seen | valid_unseen; "": all), spread
    evenly over the source, so that a few of them cover the task types."""
    from dreamgym.envs.alfworld.rooms import shipped
    domain, grammar = ((shipped()[0] / "data" / name).read_text() for name in ("alfred.pddl", "alfred.twl2"))
    found, paths = [record for record in records() if record["path"].startswith(split)], []
    limit = min(limit, len(found))
    for record in [found[i * len(found) // limit] for i in range(limit)]:
        # the shared file keeps nested records as the text of a Python literal
        traj = {key: ast.literal_eval(str(record[key])) for key in ("pddl_params", "scene")}
        game = {"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", record["task"]),
                "pddl_problem": record["pddl_problem"], "solvable": True}
        paths.append(Path(folder) / "json_2.1.1" / record["path"])
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        paths[-1].write_text(json.dumps(game))
        traj["task_type"] = record["task_type"]
        paths[-1].with_name("traj_data.json").write_text(json.dumps(traj))
    return paths
