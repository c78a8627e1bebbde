"""A plain child process that reads a line of JSON and answers with one: ALFWorld's games and WebArena's browsers play in several of them side by side."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """`python -m module SETTINGS` (as JSON), called `name` in messages. It ends with this object (or with `stop`) or with this process: its pipe closes.
    `begun` counts what was begun in it."""

    def __init__(self, module: str, settings: Any, name: str):
        self.name, self.begun = name, 0
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.child = subprocess.Popen([sys.executable, "-m", module, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                      env={**os.environ, "PYTHONPATH": path}, start_new_session=True)      # Ctrl-C is the parent's, whose end is theirs
        self.stop = weakref.finalize(self, _stop, self.child)

    def send(self, rows: list) -> None:
        try:
            print(json.dumps(rows), file=self.child.stdin, flush=True)
        except OSError:
            pass                                 # it has died: `receive` says so

    def receive(self) -> Any:
        """Raises RuntimeError when the child has died."""
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.child.wait()}; its own message is above (out of memory?)")
        return json.loads(line)


def _stop(child: subprocess.Popen) -> None:
    child.stdin.close()
    child.stdout.close()                         # first, or a child that is still answering would wait for a reader for ever
    child.wait()


def send_all(players: Sequence, verb: str, contents: Sequence) -> dict[Child, list[int]]:
    """One message of [verb, number, content] rows to each worker concerned, so that all work at once; -> the indices of the players asked, by worker."""
    asked: dict[Child, list[int]] = {}
    for i, player in enumerate(players):
        asked.setdefault(player.worker, []).append(i)
    for worker, indices in asked.items():
        worker.send([[verb, players[i].number, contents[i]] for i in indices])
    return asked


def answer_channel() -> TextIO:
    """In the child: where answers go. Whatever else a library prints goes to the log, not into an answer."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out
