"""Speed and memory of the ALFWorld engine against the stock one: TextWorld's PddlEnv under alfworld's
demangler, on the same games and the same actions.

    python -m benchmarks.alfworld_speed               # official games rebuilt from ../shared/data/alfworld
    python -m benchmarks.alfworld_speed --data DIR                 # any folder in the layout of json_2.1.1
    python -m benchmarks.alfworld_speed --memory 400  # resident memory over that many distinct games

CPU seconds of one process. Actions are random admissible ones; both engines answer each of them, in turns,
and text, `won` and commands are compared on every observation: the run ends at the first difference. Only
ratios are worth quoting from a busy machine.
"""

import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from dreamgym.envs.alfworld.engine import Engine, StockEngine


@dataclass
class Args:
    # folder with game.tw-pddl files below it; empty: the official games of ../shared/data/alfworld
    data: str = ""
    games: int = 8  # games of the comparison
    steps: int = 30  # random actions in each of them
    groups: int = 16  # games of the last table ...
    sessions: int = 8  # ... with this many sessions each, as a GRPO step has them
    memory: int = 0  # if above 0: play this many distinct games for 10 steps and report resident memory


def timed(spent: list[float], call, *args):
    start = time.process_time()
    result = call(*args)
    spent.append(time.process_time() - start)
    return result


def observe(engine) -> tuple[bool, list[str]]:
    return engine.won, engine.admissible


def step(engine, command: str) -> tuple[str, bool, list[str]]:
    return engine.step(command), *observe(engine)


def compare(paths: list[Path], steps: int) -> dict[str, list[float]]:
    """CPU seconds of each load, reset and step of both engines, in lists."""
    spent = {f"{who} {what}": [] for who in ("stock", "ours") for what in ("load", "reset", "step")}
    for number, path in enumerate(paths):
        stock, ours = timed(spent["stock load"], StockEngine, path), timed(spent["ours load"], Engine, path)
        commands, rng = [], random.Random(number)
        text = timed(spent["stock reset"], stock.reset)
        assert timed(spent["ours reset"], ours.reset) == text and observe(ours) == observe(stock), (
            f"{path}: the first observations differ"
        )
        for _ in range(steps):
            commands.append(rng.choice(stock.admissible))
            expected = timed(spent["stock step"], step, stock, commands[-1])
            assert timed(spent["ours step"], step, ours, commands[-1]) == expected, (
                f"{path}: answers differ after {commands}"
            )
    return spent


def play(sessions: list[Engine], steps: int, seed: int) -> float:
    """CPU seconds of `steps` random admissible actions in every session, in turns."""
    rng, start = random.Random(seed), time.process_time()
    for _ in range(steps):
        for session in sessions:
            step(session, rng.choice(session.admissible))
    return time.process_time() - start


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def report_speed(paths: list[Path], args: Args) -> None:
    # imports and the parse of the grammar, once a process, are no part of a game
    Engine(paths[0]), StockEngine(paths[0]).reset()
    chosen = paths[1 : args.games + 1]
    spent = compare(chosen, args.steps)
    print(
        f"{len(chosen)} games, {args.steps} random actions each; text, won and commands equal on all "
        f"{len(chosen) * (args.steps + 1)} observations"
    )
    print(f"{'CPU seconds, mean':24}{'stock':>12}{'ours':>12}{'ratio':>9}")
    for what in ("load", "reset", "step"):
        stock, ours = (sum(spent[f"{who} {what}"]) / len(spent[f"{who} {what}"]) for who in ("stock", "ours"))
        print(f"{what:24}{stock:12.5f}{ours:12.6f}{stock / ours:9.0f}")
    totals = [
        sum(sum(spent[f"{who} {what}"]) for what in ("load", "reset", "step")) for who in ("stock", "ours")
    ]
    rates = [len(spent[f"{who} step"]) / sum(spent[f"{who} step"]) for who in ("stock", "ours")]
    print(f"{'steps a second':24}{rates[0]:12.0f}{rates[1]:12.0f}{rates[1] / rates[0]:9.0f}")
    print(f"{'everything together':24}{totals[0]:12.2f}{totals[1]:12.2f}{totals[0] / totals[1]:9.0f}")

    with tempfile.TemporaryDirectory() as cache:
        games, cold, again = paths[-args.groups :], [], []
        first = [timed(cold, Engine, path, cache) for path in games]
        sessions = [
            timed(again, Engine, path, cache) for path in games for _ in range(args.sessions - 1)
        ] + first
        for session in sessions:
            session.reset()
        seconds = play(sessions, args.steps, 0)
    print(
        f"\n{len(games)} games x {args.sessions} sessions in turns: "
        f"{len(sessions) * args.steps / seconds:.0f} steps a second, {resident_mb():.0f} MB resident; "
        f"a new game {sum(cold) / len(cold):.3f} s, "
        f"a further session on it {sum(again) / len(again) * 1e6:.0f} us"
    )


def report_memory(paths: list[Path], args: Args) -> None:
    for number in range(args.memory):
        session = Engine(paths[number % len(paths)])
        session.reset()
        play([session], 10, number)
        if (number + 1) % 50 == 0 or number == 0:
            print(
                f"{number + 1:4} games ({min(number + 1, len(paths))} distinct): "
                f"{resident_mb():.0f} MB resident",
                flush=True,
            )


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if args.data:
            paths = sorted(Path(args.data).rglob("game.tw-pddl"))
        else:
            from tests.alfworld_official import SOURCE, rebuild

            if not SOURCE.exists():
                sys.exit(f"{SOURCE}: not there; give --data, a folder with game.tw-pddl files")
            paths = rebuild(folder)
        if len(paths) < 2:
            sys.exit(f"--data {args.data}: found {len(paths)} game.tw-pddl files, expected at least 2")
        random.Random(0).shuffle(paths)
        (report_memory if args.memory else report_speed)(paths, args)


if __name__ == "__main__":
    main(tyro.cli(Args))
