"""Speed of the ALFWorld engine against the stock one: TextWorld's PddlEnv under alfworld's demangler, on the
same games and the same random actions.

    python -m benchmarks.alfworld_speed               # official games rebuilt from ../shared/data/alfworld
    python -m benchmarks.alfworld_speed --data DIR                 # any folder in the layout of json_2.1.1

CPU seconds of one process. Text, `won` and commands are compared on every observation: the run ends at the
first difference. Only ratios are worth quoting from a busy machine.
"""
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from benchmarks.timing import cpu_s
from dreamgym.envs.alfworld.engine import Engine
from tests.alfworld_official import SOURCE, StockEngine, rebuild


GAMES, STEPS = 8, 30       # of the comparison, and random actions in each


@dataclass
class Args:
    data: str = ""  # folder with game.tw-pddl files below it; empty: the official games of ../shared/data


def observe(engine, command: str | None = None) -> tuple[str, bool, list[str]]:
    text = engine.reset() if command is None else engine.step(command)
    return text, engine.won, engine.admissible


def compare(paths: list[Path]) -> None:
    spent = {what: [] for what in ("load", "reset", "step")}      # (stock, ours)
    for number, path in enumerate(paths):
        seconds, engines = zip(cpu_s(StockEngine, path), cpu_s(Engine, path))
        spent["load"].append(seconds)
        commands, rng = [None], random.Random(number)
        for _ in range(STEPS + 1):
            seconds, (stock, ours) = zip(*(cpu_s(observe, engine, commands[-1]) for engine in engines))
            assert ours == stock, f"{path}: answers differ after {commands[1:]}"
            spent["step" if commands[1:] else "reset"].append(seconds)
            commands.append(rng.choice(stock[2]))
    print(f"{len(paths)} games, {STEPS} random actions each; text, won and commands equal on all "
          f"{len(paths) * (STEPS + 1)} observations")
    print(f"{'CPU seconds, mean':24}{'stock':>12}{'ours':>12}{'ratio':>9}")
    for what, seconds in spent.items():
        stock, ours = np.mean(seconds, 0)
        print(f"{what:24}{stock:12.5f}{ours:12.6f}{stock / ours:9.0f}")


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not args.data and not SOURCE.exists():
            sys.exit(f"{SOURCE}: not there; give --data, a folder with game.tw-pddl files")
        paths = sorted(Path(args.data).rglob("game.tw-pddl")) if args.data else rebuild(Path(folder))
        if len(paths) < 2:
            sys.exit(f"--data {args.data}: found {len(paths)} game.tw-pddl files, expected at least 2")
        random.Random(0).shuffle(paths)
        # imports and the parse of the grammar, once a process, are no part of a game
        Engine(paths[0]), StockEngine(paths[0]).reset()
        compare(paths[1:GAMES + 1])


if __name__ == "__main__":
    main(tyro.cli(Args))
