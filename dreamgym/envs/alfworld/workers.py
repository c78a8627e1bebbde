"""ALFWorld games in play: in this process (`Here`) or over several (`Workers`), with the same results.

Both have `start(paths) -> [(play, state)]` and `act(plays, actions) -> [(state, won, valid)]`. A worker is a plain child process that reads a line of JSON
and answers with one. A play belongs to the worker that began it, and plays of one game go to one worker, which then translates it once.
"""
from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path

from dreamgym.envs.alfworld.engine import Engine
from dreamgym.envs.alfworld.text import Notes
from dreamgym.envs.alfworld.child_process import Child, answer_channel, send_all


class Play:
    """One game being played: the engine, and what the agent has noticed."""

    def __init__(self, path: str, admissible: bool, cache: str | Path):
        self.engine, self.admissible, self.notes = Engine(path, cache), admissible, Notes()
        self.notes.read(self.engine.reset())

    def state(self) -> str:
        return self.notes.state(self.engine.admissible if self.admissible else None)

    def act(self, action: str) -> tuple[str, bool, bool]:
        """-> (next state, won, whether the action was admissible)."""
        valid = action in self.engine.admissible
        self.notes.read(self.engine.step(action))
        won = self.engine.won
        return self.state(), won, valid


class Here:
    """Plays in this process."""

    def __init__(self, admissible: bool, cache: str | Path):
        self.admissible, self.cache = admissible, cache

    def start(self, paths: list[str]) -> list[tuple[Play, str]]:
        plays = [Play(path, self.admissible, self.cache) for path in paths]
        return [(play, play.state()) for play in plays]

    def act(self, plays: list[Play], actions: list[str]) -> list[tuple[str, bool, bool]]:
        return [play.act(action) for play, action in zip(plays, actions)]


class Workers:
    """Plays over `count` child processes, which end with this object. A game stays with one worker; one that has seen GAMES_PER_WORKER games takes no new
    game, ends with its last play, and is replaced, so that memory stays flat. Raises ValueError as `Here` does, RuntimeError when a worker has died."""

    GAMES_PER_WORKER = 400

    def __init__(self, count: int, admissible: bool, cache: str | Path):
        self.settings = [admissible, str(cache)]
        self.workers, self.home = [_Worker(self.settings) for _ in range(count)], {}

    def start(self, paths: list[str]) -> list[tuple[FarPlay, str]]:
        plays = [FarPlay(self._worker(path)) for path in paths]
        return list(zip(plays, _exchange(plays, "start", paths)))

    def act(self, plays: list[FarPlay], actions: list[str]) -> list[tuple[str, bool, bool]]:
        return [tuple(answer) for answer in _exchange(plays, "act", actions)]

    def _worker(self, path: str) -> _Worker:
        index = self.home.setdefault(path, len(self.home) % len(self.workers))
        worker = self.workers[index]
        if path not in worker.games and len(worker.games) >= self.GAMES_PER_WORKER:
            worker = self.workers[index] = _Worker(self.settings)
        worker.games.add(path)
        return worker


class FarPlay:
    """A play in a worker: its number there."""

    def __init__(self, worker: _Worker):
        self.worker, self.number = worker, worker.begun
        worker.begun += 1
        weakref.finalize(self, worker.dropped.append, self.number).atexit = False


class _Worker(Child):
    """A child with its games, and the numbers of plays that it may forget."""

    def __init__(self, settings: list):
        super().__init__(__name__, settings, "an ALFWorld worker process")
        self.games, self.dropped = set(), []

    def send(self, rows: list) -> None:
        forget, self.dropped[:] = [["drop", number, ""] for number in self.dropped], []
        super().send(forget + rows)


def _exchange(plays: list[FarPlay], verb: str, texts: list[str]) -> list:
    """One message to each worker concerned, and their answers in the order of `plays`. All work at once."""
    answers, replies = {}, [(rows, worker.receive()) for worker, rows in send_all(plays, verb, texts).items()]
    for rows, reply in replies:
        if "error" in reply:
            raise ValueError(reply["error"])
        answers.update(zip(rows, reply["answers"]))
    return [answers[i] for i in range(len(plays))]


def _serve(admissible: bool, cache: str) -> None:
    """The child: one line in, one line out, until the parent closes the pipe."""
    out = answer_channel()
    plays: dict[int, Play] = {}
    for line in sys.stdin:
        answers = []
        try:
            for verb, number, text in json.loads(line):
                if verb == "drop":
                    plays.pop(number, None)
                elif verb == "start":
                    plays[number] = Play(text, admissible, cache)
                    answers.append(plays[number].state())
                else:
                    answers.append(plays[number].act(text))
            reply = {"answers": answers}
        except ValueError as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
