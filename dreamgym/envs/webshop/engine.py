"""WebShop in plain Python: pages, actions, sessions and rewards exactly as the upstream text environment has
them, quirks included.

    engine = WebShopEngine(catalogue, "text_rich")     # one session; the catalogue is shared
    page = engine.reset(catalogue.goals[0])
    page, reward, done = engine.step("search[red shoes]")

Yao et al. (arXiv 2207.01206), repository at commit 64fa2a5c; tests/test_webshop_engine.py compares it with
recordings of that code. Left out: HTML and pictures, reviews (upstream never loads any), weighted random
goals, earlier observations, a step limit. Queries in CHEATS, which upstream answers specially or
crashes on, are invalid."""
import json
from collections.abc import Sequence

from dreamgym.envs.webshop.catalogue import Catalogue, Goal, Product
from dreamgym.envs.webshop.reward import score
from dreamgym.envs.webshop.text import split_action

PAGE_SIZE = 10
CHEATS = ("<r>", "<a>", "<c>", "<q>")            # upstream's special queries: invalid here
SUB_PAGES = ("description", "features", "reviews", "attributes")
DONE = ("Thank you for shopping with us!|Your code: |None| (Paste it in your MTurk interface.)"
        "|Purchased|asin|{asin}|options|{options}|attrs|None|category|None|query|None|product category|None"
        "|Target|asin|options|attrs|price upper|instuction text|category|product category|query|Goal |None"
        "|Reward|Your score (min 0.0, max 1.0)|{score}|Reward Details |None").split("|")


class WebShopEngine:
    """One shopping session. observation_mode: "text" (segments joined by [SEP]) or "text_rich" (a line each,
    buttons and choices marked). `page`: "index", "results", "item", one of SUB_PAGES, or "done"; `valid`: the
    last action did something; `options`: name -> chosen value."""

    def __init__(self, catalogue: Catalogue, observation_mode: str = "text"):
        self.catalogue, self.observation_mode = catalogue, observation_mode

    def reset(self, goal: Goal) -> str:
        self.goal, self.score, self.valid = goal, 0.0, True
        self._show_index()
        return self.observation

    def step(self, action: str) -> tuple[str, float, bool]:
        """(page, reward, done), as upstream."""
        reward, done = self.act(action)
        return self.observation, reward, done

    def act(self, action: str) -> tuple[float, bool]:
        """(reward, done). As upstream, a search is accepted on every page, also after the end."""
        verb, argument = split_action(action)
        self.valid, done = True, False
        keywords = argument.split(" ")
        if verb == "search" and keywords[0] not in CHEATS:
            self.keywords, self.hits = keywords, self.catalogue.search(argument)
            self._show_results(1)
        elif verb == "click" and argument != "search" and argument in self.clickables:
            done = self._click(argument)
        else:
            self.valid = False
        return self.score if done else 0.0, done

    def _click(self, target: str) -> bool:
        """Follows a click; True for the purchase. Upstream goes by the target's text: an option value that
        reads like a button is one. It looks for its pages' names in the whole address, keywords and options
        too."""
        on_results, on_item = (name in self._address for name in ("search_results", "item_page"))
        if target == "buy now":
            self.score = score(self.goal, self.product, self.options, self.catalogue.nouns)
            self.page = "done"
        elif target == "back to search":
            self._show_index()
        elif target == "next >" and on_results:
            self._show_results(self.page_number + 1)
        elif target == "< prev" and (on_results or on_item):
            self._show_results(self.page_number - on_results)
        elif target in SUB_PAGES:
            self.page = target
        else:
            if self.page == "results":
                self.asin = next(asin for asin in self.page_asins if asin.lower() == target)
                self.visited.add(self.asin)
            elif self.page == "item":            # the last option with this value is meant
                names = [name for name, values in self.product.options.items() if target in values]
                self.options[names[-1]] = target
            self.page = "item"
        return target == "buy now"

    def _show_index(self) -> None:
        self.page, self.page_number, self.asin = "index", 1, ""
        self.keywords, self.options, self.visited = [], {}, set()
        self.hits: Sequence[Product] = ()

    def _show_results(self, page_number: int) -> None:
        self.page, self.page_number, self.asin, self.options = "results", page_number, "", {}

    @property
    def _address(self) -> str:
        """As much of upstream's address as matters for what it looks up in it."""
        route = "search_results" if self.page == "results" else "item_page" if self.page == "item" else ""
        return f"{route}/{'+'.join(self.keywords)}/{json.dumps(self.options)}"

    @property
    def product(self) -> Product:
        return self.catalogue.by_asin[self.asin]

    @property
    def chosen(self) -> list[str]:
        """The chosen values in the order of the page. Upstream's marks in the page leave out values that JSON
        writes with an escape (quotes, accents)."""
        return [self.options[name] for name in self.product.options if name in self.options]

    @property
    def page_products(self) -> Sequence[Product]:
        """The at most ten products of the results page, best first; empty on other pages."""
        end = self.page_number * PAGE_SIZE
        return self.hits[end - PAGE_SIZE:end] if self.page == "results" else ()

    @property
    def page_asins(self) -> list[str]:
        return [product.asin for product in self.page_products]

    @property
    def clickables(self) -> list[str]:
        """What can be clicked, in upstream's order, in lower case and each once."""
        nodes = self.nodes()
        return list(dict.fromkeys(text.lower() for wanted in ("button", "product", "option")
                                  for kind, text in nodes if kind == wanted))

    @property
    def observation(self) -> str:
        shown = [(kind, visible) for kind, text in self.nodes() if (visible := _parsed(text))]
        if self.observation_mode == "text":
            return " [SEP] ".join(text.strip() for _, text in shown)
        address, page, choices = self._address, "", ""
        for kind, text in shown:
            clicked = text in self.visited if kind == "product" else f'"{text}"' in address
            mark = "clicked button" if clicked and kind != "button" else "button"
            if kind == "option" and clicked:
                choices = f"You have clicked {text}.\n{choices}"
            if kind != "text":
                before = {"button": "", "product": "\n", "option": "  "}[kind]
                text = f"{before}[{mark}] {text} [{mark}_]"
            page += text + "\n"
        return choices + page

    def nodes(self) -> list[tuple[str, str]]:
        """The page as (kind, text) in order of appearance; kind: text, button, product or option."""
        if self.page == "done":
            options = json.dumps(self.options, sort_keys=True)
            for sign in "<>&'":                  # Flask's tojson writes these as escapes even inside a page
                options = options.replace(sign, f"\\u{ord(sign):04x}")
            return [("text", part.format(asin=self.asin, options=options, score=self.score)) for part in DONE]
        instruction = ("text", self.goal.instruction)
        if self.page == "index":
            return [("text", "WebShop"), ("text", "Instruction: "), instruction, ("button", "Search")]
        nodes = [("text", "Instruction:"), instruction, ("button", "Back to Search")]
        if self.page == "results":
            nodes += [("text", f"Page {self.page_number} (Total results: {len(self.hits)})")]
            nodes += [("button", "< Prev")] * (self.page_number > 1) + [("button", "Next >")]
            for found in self.page_products:
                nodes += [("product", found.asin), ("text", found.title), ("text", found.price_tag)]
            return nodes
        nodes, product = [*nodes, ("button", "< Prev")], self.product
        if self.page == "item":
            for name, values in product.options.items():
                nodes += [("text", name), *(("option", value) for value in values)]
            nodes += [("text", product.title), ("text", f"Price: {product.price_tag}"),
                      ("text", "Rating: N.A.")]
            return nodes + [("button", text) for text in ("Description", "Features", "Reviews", "Buy Now")]
        texts = {"description": [product.description],
                 "features": [f" {bullet}" for bullet in product.bullets],
                 "reviews": [],
                 # No button leads to this page, but an option value of its name does.
                 "attributes": [*(f" {a}" for a in product.attributes),
                                product.category, product.query, product.product_category]}
        return nodes + [("text", text) for text in texts[self.page]]


def _parsed(text: str) -> str:
    """A text after upstream's HTML parser: white space alone is one blank, or nothing with a line break."""
    if text.strip(" \t\n\f\r"):
        return text
    return "" if "\n" in text or not text else " "
