"""WebShop in plain Python: pages, actions, sessions and rewards exactly as the upstream text environment has
them, quirks included.

    engine = WebShopEngine("data/webshop", observation_mode="text_rich")     # loads the catalogue
    page = engine.reset(goal_index=0)
    page, reward, done = engine.step("search[red shoes]")
    other = engine.fork()            # another session on the same catalogue: costs next to nothing

Yao et al., WebShop (arXiv 2207.01206); the behaviour is that of its repository at commit 64fa2a5c, and
tests/test_webshop_engine.py compares it with recordings of that code. Left out on purpose: HTML and pictures,
reviews (upstream never loads any), weighted random goals, earlier observations prefixed to later ones, a step
limit.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from dreamgym.envs.webshop.catalogue import Catalogue, Goal, Product, make_goal
from dreamgym.envs.webshop.reward import reward

__all__ = ["Catalogue", "Goal", "Product", "WebShopEngine", "make_goal", "reward"]

MODES = ("text", "text_rich")
PAGE_SIZE = 10
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
CHEATS = ("<r>", "<a>", "<c>", "<q>")
_ACTION = re.compile(r"(.+)\[(.+)\]")  # the last '[' that a ']' follows; text after that ']' is ignored


class WebShopEngine:
    """One shopping session on a catalogue that many sessions may share.

    observation_mode: "text" (segments joined by [SEP]; a chosen option does not show) or "text_rich" (a line
    each, buttons and choices marked). cheats: upstream gives queries that begin with <r>, <c> or <q> a
    special answer (random products, all of a category, all of a query) and crashes on <a>; False, the
    default, makes such a query an invalid action. Other arguments: see `Catalogue`.

    State to read: page ("index" | "results" | "item" | "sub" | "done", or "" before a reset), page_number,
    keywords, page_asins, total_results, asin, options (name -> chosen value), sub_page, goal, visited
    (asins), valid (the last action did something), and after a purchase score, R, and details (see
    `reward.reward`).
    """

    def __init__(self, data_dir: str | Path, observation_mode: str = "text", human_goals: bool = False,
                 seed: int = 7, nouns: Callable[[str], list[str]] | None = None,
                 size: str = "auto", cheats: bool = False):
        self._open(Catalogue(data_dir, human_goals, seed, nouns, size), observation_mode, cheats)

    @classmethod
    def from_catalogue(
        cls, catalogue: Catalogue, observation_mode: str = "text", cheats: bool = False
    ) -> "WebShopEngine":
        """A new session on a catalogue already loaded."""
        engine = cls.__new__(cls)
        engine._open(catalogue, observation_mode, cheats)
        return engine

    def fork(self) -> "WebShopEngine":
        """A new session that shares this one's catalogue and settings and nothing else; call `reset` on
        it."""
        return self.from_catalogue(self.catalogue, self.observation_mode, self.cheats)

    def _open(self, catalogue: Catalogue, observation_mode: str, cheats: bool) -> None:
        if observation_mode not in MODES:
            raise ValueError(f"observation_mode {observation_mode!r}: expected one of {', '.join(MODES)}")
        self.catalogue, self.observation_mode, self.cheats = catalogue, observation_mode, cheats
        self.goal: Goal | None = None
        self.page, self.score, self.details, self.valid = "", 0.0, {}, True
        self._rng = random.Random(catalogue.seed)  # for the <r> cheat alone
        self._forget()

    def _forget(self) -> None:
        self.keywords: list[str] | None = None
        self.page_number, self.asin, self.sub_page = 1, None, None
        self.visited: set[str] = set()
        self.options: dict[str, str] = {}
        self._hits: Sequence[Product] = ()

    # What the catalogue knows

    @property
    def products(self) -> list[Product]:
        return self.catalogue.products

    @property
    def goals(self) -> Sequence[Goal]:
        return self.catalogue.goals

    @property
    def noun_tagger(self) -> str:
        return self.catalogue.noun_tagger

    def product(self, asin: str) -> Product:
        return self.catalogue.product(asin)

    def price_of(self, asin: str) -> float:
        return self.catalogue.price_of(asin)

    def same_category(self, product: Product) -> list[Product]:
        return self.catalogue.by_category[product.category]

    def option_values(self, name: str) -> list[str]:
        """All values that an option of this name has anywhere in the catalogue."""
        return self.catalogue.option_values.get(name, [])

    def judge(self, goal: Goal, product: Product, price: float, chosen: dict[str, str]) -> tuple[float, dict]:
        """`reward.reward` with this catalogue's noun tagger."""
        return reward(goal, product, price, chosen, self.catalogue.nouns)

    # Acting

    def reset(self, goal: int | Goal) -> str:
        """Start anew on a goal, given by its index or made by hand; returns the first page."""
        if not isinstance(goal, Goal):
            if not 0 <= goal < len(self.goals):
                raise ValueError(f"goal {goal}: expected an index from 0 to {len(self.goals) - 1}")
            goal = self.goals[goal]
        self.goal, self.page, self.score, self.details, self.valid = goal, "index", 0.0, {}, True
        self._forget()
        return self.observation

    def step(self, action: str) -> tuple[str, float, bool]:
        """(page, reward, done). Anything but `search[words]` or `click[an available target]` changes nothing
        and sets `valid` to False.

        The argument is read in lower case. Reward comes with `click[buy now]` alone, the only action that is
        done. As upstream, a search is accepted on every page, also after the end, where it goes on shopping:
        the caller stops.
        """
        if self.goal is None:
            raise ValueError("step before reset: call reset(goal_index) first")
        match = _ACTION.match(action)
        verb, argument = (match[1], match[2].lower()) if match else ("", "")
        self.valid, done = True, False
        if verb == "search" and self._may_search(argument.split(" ")):
            self._show_results(argument.split(" "), 1)
        elif verb == "click" and argument != "search" and argument in self.clickables:
            done = self._click(argument)
        else:
            self.valid = False
        return self.observation, self.score if done else 0.0, done

    def _may_search(self, keywords: list[str]) -> bool:
        if keywords[0] not in CHEATS:
            return True
        return self.cheats and keywords[0] != "<a>" and (keywords[0] != "<c>" or len(keywords) > 1)

    def _click(self, target: str) -> bool:
        """Follow a click; True for the purchase. Upstream goes by the target's text first: an option value
        that reads like a button is one."""
        place = self._place()
        if target == "buy now":
            self._buy()
        elif target == "back to search":
            self.page = "index"
            self._forget()
        elif target == "next >" and place == "search_results":
            self._show_results(self.keywords, self.page_number + 1)
        elif target == "< prev" and place == "search_results":
            self._show_results(self.keywords, self.page_number - 1)
        elif target == "< prev" and place == "item_page":
            self._show_results(self.keywords, self.page_number)
        elif target in (name.lower() for name in SUB_PAGES):
            self.page, self.sub_page = "sub", target.capitalize()
        else:
            self._open_item(target)
        return target == "buy now"

    def _place(self) -> str:
        """Which page upstream believes it is on: it looks for a page's name anywhere in the address, and the
        keywords are part of that."""
        names, address = ("search_results", "item_page", "item_sub_page"), self._address()
        return next((name for name in names if name in address), "")

    def _address(self) -> str:
        keywords = "+".join(self.keywords or ())
        if self.page == "results":
            return f"/search_results/{keywords}/{self.page_number}"
        if self.page == "item":
            return f"/item_page/{self.asin}/{keywords}/{self.page_number}/{json.dumps(self.options)}"
        if self.page == "sub":
            return f"/item_sub_page/{self.asin}/{keywords}/{self.page_number}/{self.sub_page}/{self.options}"
        return ""

    def _show_results(self, keywords: list[str], page_number: int) -> None:
        self.page, self.keywords, self.page_number = "results", keywords, page_number
        self.asin, self.sub_page, self.options = None, None, {}
        if keywords[0] == "<r>":
            self._hits = self._rng.sample(self.products, min(50, len(self.products)))
        elif keywords[0] == "<c>":
            self._hits = [p for p in self.products if p.category == keywords[1].strip()]
        elif keywords[0] == "<q>":
            query = " ".join(keywords[1:]).strip()
            self._hits = [p for p in self.products if p.query == query]
        else:
            self._hits = self.catalogue.search(" ".join(keywords))

    def _open_item(self, target: str) -> None:
        """A product's page, with `target` visited or chosen if it is a product or an option value (the last
        option with this value is meant)."""
        if self.page == "results":
            self.asin = next(asin for asin in self.page_asins if asin.lower() == target)
            self.visited.add(self.asin)
        elif self.page == "item":
            for name, values in self.product(self.asin).options.items():
                if target in values:
                    chosen = name
            self.options[chosen] = target
        self.page, self.sub_page = "item", None

    def _buy(self) -> None:
        product, price = self.product(self.asin), self.price_of(self.asin)
        self.score, self.details = self.judge(self.goal, product, price, self.options)
        self.page, self.sub_page = "done", None

    # What is shown

    @property
    def page_products(self) -> Sequence[Product]:
        """The at most ten products of the current results page, best first; empty on other pages."""
        end = self.page_number * PAGE_SIZE
        return self._hits[end - PAGE_SIZE:end] if self.page == "results" else ()

    @property
    def page_asins(self) -> list[str]:
        return [product.asin for product in self.page_products]

    @property
    def total_results(self) -> int:
        """How many products the last search found, at most 50."""
        return len(self._hits)

    @property
    def has_search_bar(self) -> bool:
        return self.page == "index"

    @property
    def clickables(self) -> list[str]:
        """What can be clicked, in upstream's order: buttons, products, option values, in lower case and each
        once."""
        nodes = self._nodes()
        buttons = [text.lower() for kind, text in nodes if kind == "button"]
        products = [text.lower() for kind, text in nodes if kind == "product"]
        return list(dict.fromkeys(buttons + products + [text for kind, text in nodes if kind == "option"]))

    @property
    def observation(self) -> str:
        shown = [(kind, visible) for kind, text in self._nodes() if (visible := _parsed(text))]
        if self.observation_mode == "text":
            return " [SEP] ".join(text.strip() for _, text in shown)
        address, page, choices = self._address(), "", ""
        for kind, text in shown:
            if kind == "button":
                text = f"[button] {text} [button_]"
            elif kind == "product":
                mark = "clicked button" if text in self.visited else "button"
                text = f"\n[{mark}] {text} [{mark}_]"
            elif kind == "option":
                mark = "clicked button" if f'"{text}"' in address else "button"
                choices = f"You have clicked {text}.\n{choices}" if mark == "clicked button" else choices
                text = f"  [{mark}] {text} [{mark}_]"
            page += text + "\n"
        return choices + page

    def _nodes(self) -> list[tuple[str, str]]:
        """The page as (kind, text) in order of appearance; kind: text, button, product or option."""
        if self.page == "":
            return []
        if self.page == "done":
            return self._done_nodes()
        search = "Search" if self.page == "index" else "Back to Search"
        instruction = [("text", self.goal.instruction), ("button", search)]
        if self.page == "index":
            return [("text", "WebShop"), ("text", "Instruction: "), *instruction]
        body = {"results": self._result_nodes, "item": self._item_nodes, "sub": self._sub_nodes}[self.page]()
        return [("text", "Instruction:"), *instruction, *body]

    def _result_nodes(self) -> list[tuple[str, str]]:
        nodes = [("text", f"Page {self.page_number} (Total results: {self.total_results})")]
        nodes += [("button", "< Prev")] * (self.page_number > 1) + [("button", "Next >")]
        for product in self.page_products:
            nodes += [("product", product.asin), ("text", product.title), ("text", product.price_tag)]
        return nodes

    def _item_nodes(self) -> list[tuple[str, str]]:
        product, nodes = self.product(self.asin), [("button", "< Prev")]
        for name, values in product.options.items():
            nodes += [("text", name), *(("option", value) for value in values)]
        nodes += [("text", product.title), ("text", f"Price: {product.price_tag}"), ("text", "Rating: N.A.")]
        return nodes + [("button", text) for text in (*SUB_PAGES[:3], "Buy Now")]

    def _sub_nodes(self) -> list[tuple[str, str]]:
        product = self.product(self.asin)
        if self.sub_page == "Attributes":  # no button leads here, but an option value of that name does
            texts = [f" {a}" for a in product.attributes]
            texts += [product.category, product.query, product.product_category]
        elif self.sub_page == "Features":
            texts = [f" {b}" for b in product.bullets]
        else:
            texts = [product.description] if self.sub_page == "Description" else []
        return [("button", "< Prev"), *(("text", text) for text in texts)]

    def _done_nodes(self) -> list[tuple[str, str]]:
        options = json.dumps(self.options, sort_keys=True)
        for sign in "<>&'":  # Flask's tojson writes these as escapes even inside a page
            options = options.replace(sign, f"\\u{ord(sign):04x}")
        bought = ["Purchased", "asin", self.asin, "options", options]
        bought += ["attrs", "None", "category", "None", "query", "None", "product category", "None"]
        target = ["Target", "asin", "options", "attrs", "price upper", "instuction text", "category"]
        target += ["product category", "query", "Goal ", "None"]
        score = ["Reward", "Your score (min 0.0, max 1.0)", str(self.score), "Reward Details ", "None"]
        code = " (Paste it in your MTurk interface.)"
        thanks = ["Thank you for shopping with us!", "Your code: ", "None", code]
        return [("text", text) for text in (*thanks, *bought, *target, *score)]


def _parsed(text: str) -> str:
    """What is left of a text after upstream's HTML parser: white space alone becomes one blank, or nothing if
    a line break is in it."""
    if text.strip(" \t\n\f\r"):
        return text
    return "" if "\n" in text or not text else " "
