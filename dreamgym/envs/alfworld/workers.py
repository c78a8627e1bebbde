"""ALFWorld games in play: in this process (`Local`) or over several (`Workers`), with the same results.

A worker is a plain child process that reads a line of JSON and answers with one: multiprocessing's spawned
child would import the script with torch, a forked one does not survive CUDA and threads. Plays of one game go
to one worker, which translates it once.
"""
import itertools
import json
import os
import subprocess
import sys
import weakref
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from dreamgym.envs.alfworld.engine import Engine, open_game
from dreamgym.envs.alfworld.text import ObservationMemory


class Play:
    """One game being played: the engine, and what the agent has observed."""

    def __init__(self, path: str, admissible: bool, cache: str):
        self.engine, self.admissible, self.memory = Engine(path, cache), admissible, ObservationMemory()
        self.memory.read(self.engine.reset())

    def state(self) -> str:
        return self.memory.state(self.engine.admissible if self.admissible else None)

    def step(self, action: str) -> tuple[str, bool]:
        """(next state, won)"""
        self.memory.read(self.engine.step(action))
        return self.state(), self.engine.won


class Local:
    def __init__(self, admissible: bool, cache: str):
        self.settings = admissible, cache

    def start(self, paths: list[str]) -> list[tuple[Play, str]]:
        plays = [Play(path, *self.settings) for path in paths]
        return [(play, play.state()) for play in plays]

    def step(self, plays: list[Play], actions: list[str]) -> list[tuple[str, bool]]:
        return [play.step(action) for play, action in zip(plays, actions)]

    def end(self, plays: list[Play]) -> None:
        pass

    def close(self) -> None:
        pass


class Workers:
    """Plays over `count` child processes, which end with this object or process: their pipe closes. A play is
    (its worker, its number). Raises ValueError as `Local` does, and RuntimeError when a worker has died."""

    def __init__(self, count: int, admissible: bool, cache: str):
        # `python -m` this module, in a session of its own: Ctrl-C is the parent's, whose end ends it, too
        self.children = [
            subprocess.Popen([sys.executable, "-m", __name__, json.dumps([admissible, cache])], text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
            for _ in range(count)]
        self.home: dict[str, int] = {}           # game -> its worker
        self.numbers = itertools.count()
        self.close = weakref.finalize(self, _stop, self.children)

    def start(self, paths: list[str]) -> list[tuple[tuple[int, int], str]]:
        homes = [self.home.setdefault(path, len(self.home) % len(self.children)) for path in paths]
        plays = [(home, next(self.numbers)) for home in homes]
        try:
            return list(zip(plays, self._ask("start", plays, paths)))
        except ValueError:
            self.end(plays)                      # the games of the batch that did start
            raise

    def step(self, plays: list[tuple[int, int]], actions: list[str]) -> list[tuple[str, bool]]:
        return [tuple(answer) for answer in self._ask("step", plays, actions)]

    def end(self, plays: list[tuple[int, int]]) -> None:
        self._ask("end", plays, [""] * len(plays))

    def prepare(self, paths: list[str]) -> None:
        """Has the first worker translate games, and waits for nothing."""
        for path in paths:
            self._tell(0, [["prepare", 0, path]])    # whoever plays the game meets its error

    def _tell(self, home: int, rows: list[list]) -> None:
        with suppress(OSError):                  # it has died: no line comes back
            print(json.dumps(rows), file=self.children[home].stdin, flush=True)

    def _ask(self, verb: str, plays: list[tuple[int, int]], texts: list[str]) -> list:
        """One message to each worker concerned; their answers in the order of `plays`."""
        asked = defaultdict(list)
        for (home, number), text in zip(plays, texts):
            asked[home].append([verb, number, text])
        for home, rows in asked.items():
            self._tell(home, rows)
        lines = {home: self.children[home].stdout.readline() for home in asked}
        answers = {}
        for home, line in lines.items():
            if not line:
                raise RuntimeError(
                    f"an ALFWorld worker process ended with status {self.children[home].wait()}; its own "
                    "message is above (out of memory?)")
            reply = json.loads(line)
            if isinstance(reply, str):
                raise ValueError(reply)
            answers[home] = iter(reply)
        return [next(answers[home]) for home, _ in plays]


def _stop(children: list[subprocess.Popen]) -> None:
    for child in children:
        child.kill()                             # it holds nothing that is kept
        child.stdout.close()
        with suppress(OSError):                  # what was not yet sent to a dead child
            child.stdin.close()
        child.wait()


def serve(admissible: bool, cache: str) -> None:
    """The child: one line in, one line out (answers, or an error's text), until the pipe is closed."""
    out, plays = os.fdopen(os.dup(1), "w"), {}
    # whatever a library prints goes to the log, not into an answer
    os.dup2(2, 1)

    def answer(verb: str, number: int, text: str):
        if verb == "start":
            plays[number] = Play(text, admissible, cache)
            return plays[number].state()
        if verb == "prepare":
            open_game(Path(text), cache)         # keeps the translation in `cache`
            return None
        return plays[number].step(text) if verb == "step" else plays.pop(number, None) is not None

    for line in sys.stdin:
        try:
            reply = [answer(*row) for row in json.loads(line)]
        except ValueError as error:
            reply = str(error)
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
