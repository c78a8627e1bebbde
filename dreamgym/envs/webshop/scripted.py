"""Scripted policies of WebShop. All but the oracle read abstract states only, so that whatever they do can be
imitated. The mix follows the paper's (demonstrations, oracle and random policies); the shares are ours."""
from collections.abc import Callable
from functools import partial

import numpy as np

from dreamgym.envs.base import Act, Player, Session
from dreamgym.envs.webshop.text import (
    Item, Wanted, clean, page_kind, read_item, read_results, read_task, title_words,
)


def wishes(session: Session) -> Wanted:
    """What the instruction asks for; where its options cannot be read, the words alone."""
    task_text = session.task.text
    return read_task(task_text) or Wanted(title_words(task_text) or task_text.split(), {})


class Shopper:
    """Searches for the wanted words, opens each fitting result, goes back when an option is absent, chooses
    the options, buys. `slip`: the chance of a mistake in a step."""

    def __init__(self, session: Session, rng: np.random.Generator, slip: float = 0.0):
        self.wanted = wishes(session)
        self.rng, self.slip = rng, slip
        self.seen: set[tuple[str, str]] = set()  # title and price of products that were opened
        self.paged = False                       # looked at a second page of results

    def __call__(self, state: str) -> Act:
        thought = self.think(state)              # before a product counts as seen
        return Act(self.choose(state), thought)

    def think(self, state: str) -> str:
        """What speaks against each result up to the one that fits; of each wanted option, whether it is
        there, and chosen."""
        if item := read_item(state):
            here = lambda name, value: ("chosen" if value in item.chosen else
                                        "offered" if value in item.options.get(name, ()) else "none")
            return " ; ".join(f"{name} {value} : {here(name, value)}"
                              for name, value in self.wanted.options.items())
        if page_kind(state) != "results":
            return ""
        looked = []
        for number, (title, price) in read_results(state).items():
            lack = self._lack(title, price)
            looked.append(f"{number} {lack} no" if lack else f"{number} yes")
            if not lack:
                break
        return f"look for {' '.join(self.wanted.words)} : {' '.join(looked) or 'none'}"

    def choose(self, state: str) -> str:
        kind, item = page_kind(state), read_item(state)
        if kind == "index":
            return f"search[{' '.join(self.wanted.words)}]"
        if kind == "results":
            return f"click[{self._choose_product(read_results(state))}]"
        if item:
            choose = self._slip if self.rng.random() < self.slip else self._choose_option
            return f"click[{choose(item)}]"
        return "click[< prev]" if kind in ("sub", "item") else "click[back to search]"

    def _lack(self, title: str, price: str) -> str:
        """What speaks against a result: a wanted word that its title lacks, its price, that it was opened;
        "" for nothing."""
        low = float(price[1:].split(" ")[0])
        dear = self.wanted.price is not None and low > self.wanted.price
        seen = (title, price) in self.seen
        lacks = [word for word in self.wanted.words if word not in title.lower().split()]
        return next(iter([*lacks, *[price] * dear, *["seen"] * seen]), "")

    def _choose_product(self, listed: dict[str, tuple[str, str]]) -> str:
        if not listed:
            return "back to search"
        if self.rng.random() < self.slip:
            return self.rng.choice(list(listed))
        for number, found in listed.items():
            if not self._lack(*found):
                self.seen.add(found)
                return number
        if not self.paged:
            self.paged = True
            return "next >"
        return self.rng.choice(list(listed))

    def _choose_option(self, item: Item) -> str:
        wanted = self.wanted.options.items()
        if any(value not in item.options.get(name, []) for name, value in wanted):
            return "buy now" if self.paged else "< prev"
        return next((value for _, value in wanted if value not in item.chosen), "buy now")

    def _slip(self, item: Item) -> str:
        return self.rng.choice(["buy now", "buy now", "< prev", "features", *item.values[:2]])


def explorer(session: Session, rng: np.random.Generator) -> Callable[[str], str]:
    """Random valid actions: buttons of the page, searches made of the task's words, products by number."""
    words = wishes(session).words

    def act(state: str) -> str:
        kind, item = page_kind(state), read_item(state)
        if kind == "index":
            return f"search[{' '.join(rng.permutation(words)[:rng.integers(1, len(words) + 1)])}]"
        choices = ["< prev", "< prev", "back to search"]
        if kind == "results":
            back = [] if state.startswith("results page 1 ") else ["< prev"]
            choices = [*list(read_results(state)) * 2, "next >", "back to search", *back]
        elif kind == "item":
            choices = [*(item.values if item else []), "buy now", "< prev", "back to search",
                       ("description", "features")[rng.integers(2)]]
        return f"click[{rng.choice(choices)}]"
    return act


class Oracle:
    """Knows the goal: searches for the target's own title, opens it, chooses its options, buys."""

    def __init__(self, session: Session, rng: np.random.Generator):
        self.engine, self.goal = session.inner, session.inner.goal

    def __call__(self, state: str) -> str:
        kind, item, asin = page_kind(state), read_item(state), self.goal.product.asin
        if kind == "index":
            return f"search[{self.goal.product.title}]"
        if kind == "results":
            asins = self.engine.page_asins
            return f"click[{asins.index(asin) + 1}]" if asin in asins else "click[next >]"
        options = self.goal.options
        wanted = map(clean, options.values() if isinstance(options, dict) else options)
        return f"click[{next((v for v in wanted if v in item.values and v not in item.chosen), 'buy now')}]"


PLAYERS = {
    "oracle": Player(Oracle, share=0),       # for checks of an installation: evaluate.py --policy oracle
    "demonstrator": Player(Shopper, share=0.35),
    "imperfect": Player(partial(Shopper, slip=0.25), share=0.40, imitate=True),
    "random": Player(explorer, share=0.25),
}
