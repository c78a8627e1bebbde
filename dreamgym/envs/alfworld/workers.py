"""ALFWorld games in play: in this process (`Local`) or over several (`Workers`), with the same results.

Both have `start(paths) -> [(play, state)]`, `step(plays, actions) -> [(state, won)]` and `end(plays)`. A
worker is a plain child process that reads a line of JSON and answers with one. It is not multiprocessing's: a
spawned child would import the whole script with torch again, and a forked one does not survive CUDA and
threads. Plays of one game go to one worker, which translates it once.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

from dreamgym.envs.alfworld.engine import Engine
from dreamgym.envs.alfworld.text import ObservationMemory

ROOT = Path(__file__).resolve().parents[3]


class Play:
    """One game being played: the engine, and what the agent has observed."""

    def __init__(self, path: str, admissible: bool, cache: str | Path):
        self.engine, self.admissible, self.memory = Engine(path, cache), admissible, ObservationMemory()
        self.memory.read(self.engine.reset())

    def state(self) -> str:
        return self.memory.state(self.engine.admissible if self.admissible else None)

    def step(self, action: str) -> tuple[str, bool]:
        """(next state, won)"""
        self.memory.read(self.engine.step(action))
        return self.state(), self.engine.won


class Local:
    """Plays in this process."""

    def __init__(self, admissible: bool, cache: str | Path):
        self.admissible, self.cache = admissible, cache

    def start(self, paths: list[str]) -> list[tuple[Play, str]]:
        plays = [Play(path, self.admissible, self.cache) for path in paths]
        return [(play, play.state()) for play in plays]

    def step(self, plays: list[Play], actions: list[str]) -> list[tuple[str, bool]]:
        return [play.step(action) for play, action in zip(plays, actions)]

    def end(self, plays: list[Play]) -> None:
        for play in plays:
            play.engine.close()

    def close(self) -> None:
        pass


class Workers:
    """Plays over `count` child processes, which end with this object or with this process, however that ends:
    their pipe closes. Raises ValueError as `Local` does, and RuntimeError when a worker has died."""

    def __init__(self, count: int, admissible: bool, cache: str | Path):
        self.workers = [_Worker(admissible, str(cache)) for _ in range(count)]
        self.home: dict[str, int] = {}           # game -> its worker
        self.begun = 0

    def start(self, paths: list[str]) -> list[tuple[tuple[int, int], str]]:
        """A play is (its worker, its number)."""
        homes = [self.home.setdefault(path, len(self.home) % len(self.workers)) for path in paths]
        plays = [(home, self.begun + i) for i, home in enumerate(homes)]
        self.begun += len(plays)
        return list(zip(plays, self._exchange("start", plays, paths)))

    def step(self, plays: list[tuple[int, int]], actions: list[str]) -> list[tuple[str, bool]]:
        return [tuple(answer) for answer in self._exchange("step", plays, actions)]

    def end(self, plays: list[tuple[int, int]]) -> None:
        self._exchange("end", plays, [""] * len(plays))

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()

    def _exchange(self, verb: str, plays: list[tuple[int, int]], texts: list[str]) -> list[Any]:
        """One message to each worker concerned, so that all work at once, and their answers in the order of
        `plays`."""
        asked: dict[int, list[int]] = {}
        for i, (home, _) in enumerate(plays):
            asked.setdefault(home, []).append(i)
        for home, indices in asked.items():
            self.workers[home].send([[verb, plays[i][1], texts[i]] for i in indices])
        replies = [(indices, self.workers[home].receive()) for home, indices in asked.items()]
        answers = {}
        # after all are received: an error costs no other worker its answer
        for indices, reply in replies:
            if "error" in reply:
                raise ValueError(reply["error"])
            answers.update(zip(indices, reply["answers"]))
        return [answers[i] for i in range(len(plays))]


class _Worker:
    """`python -m` this module. It starts a session of its own, because Ctrl-C is the parent's, whose end ends
    it, too."""

    def __init__(self, *settings: Any):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.child = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(settings)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self.stop = weakref.finalize(self, _stop, self.child)

    def send(self, rows: list) -> None:
        try:
            print(json.dumps(rows), file=self.child.stdin, flush=True)
        except OSError:
            pass                                 # it has died: `receive` says so

    def receive(self) -> dict:
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(
                f"an ALFWorld worker process ended with status {self.child.wait()}; its own message is above "
                "(out of memory?)"
            )
        return json.loads(line)


def _stop(child: subprocess.Popen) -> None:
    # first, or a child that is still answering would wait for a reader for ever
    child.stdout.close()
    try:
        child.stdin.close()
    except OSError:
        pass                                     # what was not yet sent to a dead child
    child.wait()


def serve(admissible: bool, cache: str) -> None:
    """The child: one line in, one line out, until the parent closes the pipe."""
    out = os.fdopen(os.dup(1), "w")
    # whatever a library prints goes to the log, not into an answer
    os.dup2(2, 1)
    local, plays = Local(admissible, cache), {}
    for line in sys.stdin:
        answers = []
        try:
            for verb, number, text in json.loads(line):
                if verb == "start":
                    [(plays[number], state)] = local.start([text])
                    answers.append(state)
                elif verb == "step":
                    answers += local.step([plays[number]], [text])
                else:
                    local.end([plays.pop(number)])
                    answers.append(None)
            reply = {"answers": answers}
        except ValueError as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
