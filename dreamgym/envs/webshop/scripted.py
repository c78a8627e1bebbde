"""Who acts in WebShop when no model does: a demonstrator, an imperfect one, random exploration, and a prober of what the shop refuses.

All of them read abstract states only (never the engine), so that whatever they do can be imitated. Each player is `player(task_text, rng)` -> a
function `act(state) -> action` with its own memory of one episode. The mix of an offline set follows the paper's (demonstrations, oracle and
random policies); the shares are ours: see collect.py.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dreamgym.envs.webshop.text import Item, Wanted, page_kind, read_item, read_results, read_task

Act = Callable[[str], str]


class Shopper:
    """Searches for the wanted words, opens each fitting result, goes back when an option is absent, chooses the options, buys.

    `slip` is the chance, per step, of a mistake a hurried shopper makes: opening any result, buying at once, choosing another value, reading the
    details, leaving a good product. Mistakes are what gives imitation something to improve on (a clean imitation leaves GRPO no variance).
    """

    def __init__(self, task_text: str, rng: np.random.Generator, slip: float = 0.0):
        self.wanted: Wanted = read_task(task_text)
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
            if fits and f"{title} {price}" not in self.seen and (self.wanted.price is None or low <= self.wanted.price):
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
        others = [f"click[{value}]" for value in item.values]
        return str(self.rng.choice(["click[buy now]", "click[buy now]", "click[< prev]", "click[features]", *others[:2]]))


def _explorer(task_text: str, rng: np.random.Generator) -> Act:
    """Random but legal: every button of the page, searches made of the task's words, products by number."""
    words = read_task(task_text).words

    def act(state: str) -> str:
        kind = page_kind(state)
        if kind == "index":
            return f"search[{' '.join(rng.permutation(words)[:rng.integers(1, len(words) + 1)])}]"
        if kind == "results":
            choices = [f"click[{n}]" for n in read_results(state)] * 2 + ["click[next >]", "click[back to search]"]
            if not state.startswith("results page 1 "):
                choices.append("click[< prev]")
        elif kind == "item":
            item = read_item(state)
            choices = [f"click[{v}]" for v in (item.values if item else [])] + ["click[buy now]", "click[< prev]", "click[back to search]"]
            choices += ["click[description]", "click[features]"][rng.integers(2):][:1]
        else:
            choices = ["click[< prev]", "click[< prev]", "click[back to search]"]
        return str(rng.choice(choices))
    return act


def _prober(task_text: str, rng: np.random.Generator, values: list[str]) -> Act:
    """A shopper who keeps trying what the shop refuses: option values that are not on the page, numbers that are not listed, buttons of other pages."""
    shopper = Shopper(task_text, rng, slip=0.2)
    refused = 0

    def act(state: str) -> str:
        nonlocal refused
        kind, item = page_kind(state), read_item(state)
        if refused < 4 and rng.random() < 0.6:
            refused += 1
            if item:
                absent = [v for v in [*shopper.wanted.options.values(), *rng.choice(values, 6)] if v not in item.values]
                return str(rng.choice([f"click[{v}]" for v in absent[:4]] + ["click[next >]"])) if absent else "click[next >]"
            if kind == "results":
                return str(rng.choice(["click[9]", "click[buy now]", f"click[{rng.choice(values)}]", "buy it"]))
            return str(rng.choice(["click[buy now]", "click[1]", "click[next >]", "search[]"]))
        return shopper(state)
    return act


def make_player(kind: str, task_text: str, rng: np.random.Generator, values: list[str]) -> Act:
    """kind: demonstrator | imperfect | random | prober; `values`: option values known to exist somewhere in the shop (for probes)."""
    if kind == "demonstrator":
        return Shopper(task_text, rng)
    if kind == "imperfect":
        return Shopper(task_text, rng, slip=0.25)
    if kind == "random":
        return _explorer(task_text, rng)
    if kind == "prober":
        return _prober(task_text, rng, values)
    raise ValueError(f"player {kind!r}: expected demonstrator, imperfect, random or prober")
