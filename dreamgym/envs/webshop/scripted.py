"""Who acts in WebShop when no model does: a demonstrator, an imperfect one, random exploration, and a prober.

All of them read abstract states only (never the engine), so that whatever they do can be imitated. A player
is a function `act(state) -> action` with its own memory of one episode. The mix of an offline set follows the
paper's (demonstrations, oracle and random policies); the shares are ours: see `players`.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dreamgym.envs.base import Player
from dreamgym.envs.webshop.text import (
    Item, Wanted, page_kind, read_item, read_results, read_task, title_words,
)

Act = Callable[[str], str]
MAX_PROBES = 4                                   # of a prober in one episode


def wishes(task_text: str) -> Wanted:
    """What an instruction asks for; where its options cannot be read, the words alone."""
    try:
        return read_task(task_text)
    except ValueError:
        return Wanted(title_words(task_text) or task_text.split(), {})


class Shopper:
    """Searches for the wanted words, opens each fitting result, goes back when an option is absent, chooses
    the options, buys.

    `slip` is the chance, per step, of a mistake: opening any result, buying at once, choosing another value,
    reading the details, leaving a good product. Mistakes leave imitation something to improve on: a clean
    imitation gives GRPO no variance.
    """

    def __init__(self, task_text: str, rng: np.random.Generator, slip: float = 0.0):
        self.wanted = wishes(task_text)
        self.rng, self.slip = rng, slip
        self.seen: set[str] = set()              # titles and prices of products that were opened
        self.pages = 0

    def __call__(self, state: str) -> str:
        kind = page_kind(state)
        if kind == "index":
            return f"search[{' '.join(self.wanted.words)}]"
        if kind == "results":
            return self._choose_product(state)
        if kind == "item" and (item := read_item(state)):
            slipped = self.rng.random() < self.slip
            return self._slip(item) if slipped else self._choose_option(item)
        return "click[< prev]" if kind in ("sub", "item") else "click[back to search]"

    def _choose_product(self, state: str) -> str:
        listed = read_results(state)
        if listed and self.rng.random() < self.slip:
            return f"click[{self.rng.choice(list(listed))}]"
        for number, (title, price) in listed.items():
            low = float(price[1:].split(" ")[0])
            fits = all(word in title.lower().split() for word in self.wanted.words)
            cheap = self.wanted.price is None or low <= self.wanted.price
            if fits and cheap and f"{title} {price}" not in self.seen:
                self.seen.add(f"{title} {price}")
                return f"click[{number}]"
        if listed and self.pages < 1:
            self.pages += 1
            return "click[next >]"
        return f"click[{self.rng.choice(list(listed))}]" if listed else "click[back to search]"

    def _choose_option(self, item: Item) -> str:
        for name, value in self.wanted.options.items():
            if value not in item.options.get(name, []):
                return "click[< prev]" if self.pages < 1 else "click[buy now]"
        missing = [value for value in self.wanted.options.values() if value not in item.chosen]
        return f"click[{missing[0]}]" if missing else "click[buy now]"

    def _slip(self, item: Item) -> str:
        buttons = ["click[buy now]", "click[buy now]", "click[< prev]", "click[features]"]
        return str(self.rng.choice(buttons + [f"click[{value}]" for value in item.values[:2]]))


def explorer(task_text: str, rng: np.random.Generator) -> Act:
    """Random valid actions: buttons of the page, searches made of the task's words, products by number."""
    words = wishes(task_text).words

    def act(state: str) -> str:
        kind = page_kind(state)
        if kind == "index":
            return f"search[{' '.join(rng.permutation(words)[:rng.integers(1, len(words) + 1)])}]"
        if kind == "results":
            choices = [f"click[{n}]" for n in read_results(state)] * 2
            choices += ["click[next >]", "click[back to search]"]
            if not state.startswith("results page 1 "):
                choices.append("click[< prev]")
        elif kind == "item":
            item = read_item(state)
            choices = [f"click[{value}]" for value in (item.values if item else [])]
            choices += ["click[buy now]", "click[< prev]", "click[back to search]"]
            choices += ["click[description]", "click[features]"][rng.integers(2):][:1]
        else:
            choices = ["click[< prev]", "click[< prev]", "click[back to search]"]
        return str(rng.choice(choices))
    return act


def prober(task_text: str, rng: np.random.Generator, values: list[str]) -> Act:
    """A shopper who keeps trying what the shop refuses: option values that are not on the page (some of
    `values`, which exist somewhere in the shop), numbers that are not listed, buttons of other pages."""
    shopper, probes = Shopper(task_text, rng, slip=0.2), 0

    def act(state: str) -> str:
        nonlocal probes
        kind, item = page_kind(state), read_item(state)
        if probes >= MAX_PROBES or rng.random() >= 0.6:
            return shopper(state)
        probes += 1
        if item:
            tried = [*shopper.wanted.options.values(), *rng.choice(values, 6)]
            absent = [f"click[{value}]" for value in tried if value not in item.values]
            return str(rng.choice([*absent[:4], "click[next >]"])) if absent else "click[next >]"
        if kind == "results":
            return str(rng.choice(["click[9]", "click[buy now]", f"click[{rng.choice(values)}]", "buy it"]))
        return str(rng.choice(["click[buy now]", "click[1]", "click[next >]", "search[]"]))
    return act


def players(values: list[str]) -> dict[str, Player]:
    """The players of an offline set. `values`: option values that exist somewhere in the shop."""
    return {
        "demonstrator": Player(lambda session, rng: Shopper(session.task.text, rng), share=0.30),
        "imperfect": Player(lambda session, rng: Shopper(session.task.text, rng, slip=0.25), share=0.35,
                            imitate=True),
        "random": Player(lambda session, rng: explorer(session.task.text, rng), share=0.20),
        "prober": Player(lambda session, rng: prober(session.task.text, rng, values), share=0.15),
    }
