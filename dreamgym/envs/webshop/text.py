"""WebShop as text: the one mapping from the engine's pages to short states, and everything that reads them:

    search page | results page 1 of 5    | item classic jacket $40   | details of the item | order placed
                | classic jacket $40 [1] | color: red / blue / black | this jacket is slim |
                | royal vest $20 [2]     | chosen: red               |                     |

A product is clicked by its number (`click[2]`); every other action is upstream's own string. Lines that could
be taken for a tag of a prompt get "> " in front (`prompts.escape`); readers take it off again.
"""
import re
from dataclasses import dataclass

from dreamgym.prompts import clean, escape

FORM = 2                                         # changes with the form of states; part of `describe()`
START = "search page"
PLACED = "order placed"
NOTHING = "nothing"
BUTTONS = {                                      # and what kind of action they are
    "back to search": "back", "next >": "next", "< prev": "prev", "description": "sub", "features": "sub",
    "reviews": "sub", "buy now": "buy"}
MAX_DETAIL_CHARS = 4000
MAX_TASK_CHARS = 2000

_PRICE = re.compile(r"\$(\d+(?:\.\d+)?)")
_LISTED = re.compile(r"^(.*?) (\$\S+(?: to \$\S+)?) \[(\d+)\]$")
_ITEM = re.compile(r"^item (.*?) (\$\S+(?: to \$\S+)?)$")
_TASK = re.compile(r"^(?P<words>.*?)(?: with (?P<options>(?:(?! with )[^:])+: .*?))?"
                   r"(?:,? and price lower than (?P<price>\d+(?:\.\d+)?) dollars)?\.?$")
_FILLER = frozenset("find me i need want looking for am a an the some please of with and that is are in to my"
                    .split())


# ---- the engine's pages -> states -------------------------------------------------------------------------

def short_price(text: str) -> str:
    """'$40.0' -> '$40', '$1234567.5' -> '$1234567.5' (the g format would write $1.23457e+06)."""
    return _PRICE.sub(lambda m: "$" + f"{float(m[1]):.2f}".rstrip("0").rstrip("."), text)


def abstract(engine, results_shown: int = 10) -> str:
    """The state of a WebShopEngine's page."""
    if engine.page in ("index", "done"):
        return START if engine.page == "index" else PLACED
    if engine.page == "results":
        rows = [f"{clean(found.title)} {short_price(clean(found.price_tag))} [{number}]"
                for number, found in enumerate(engine.page_products[:results_shown], 1)]
        lines = [f"results page {engine.page_number} of {-(-len(engine.hits) // 10)}", *(rows or [NOTHING])]
    elif engine.page == "item":
        product = engine.product
        options = [f"{clean(name)}: {' / '.join(map(clean, values))}"
                   for name, values in product.options.items() if values]
        chosen = " / ".join(map(clean, engine.chosen)) or "none"
        lines = [f"item {clean(product.title)} {short_price(clean(product.price_tag))}", *options,
                 f"chosen: {chosen}"]
    else:                                        # below the instruction and two buttons
        detail = clean(" ".join(text for _, text in engine.nodes()[4:]))[:MAX_DETAIL_CHARS].strip()
        lines = ["details of the item", detail or NOTHING]
    return escape("\n".join(lines))


# ---- reading states and actions ---------------------------------------------------------------------------

def _lines(state: str) -> list[str]:
    """The lines of a state as they were before `escape`."""
    lines = state.split("\n")
    return [line[2:] if line.startswith("> ") and escape(line[2:]) == line else line for line in lines]


def page_kind(state: str) -> str:
    """index | results | item | sub | done | unknown."""
    kinds = {START: "index", "results page": "results", "item ": "item", "details ": "sub", PLACED: "done"}
    return next((kind for prefix, kind in kinds.items() if state.startswith(prefix)), "unknown")


@dataclass
class Item:
    title: str
    price: str
    options: dict[str, list[str]]
    chosen: list[str]

    @property
    def values(self) -> list[str]:
        return [value for values in self.options.values() for value in values]

    @property
    def price_low(self) -> float:
        return float(_PRICE.search(self.price)[1])


def read_item(state: str) -> Item | None:
    """The parts of an item state; None where the text is not one."""
    first, *rows = _lines(state)
    head = _ITEM.match(first)
    if not head or not _PRICE.search(head[2]) or not rows or not rows[-1].startswith("chosen: "):
        return None
    if not all(": " in row for row in rows):
        return None
    *options, (_, chosen) = (row.split(": ", 1) for row in rows)
    return Item(head[1], head[2], {name: values.split(" / ") for name, values in options},
                [] if chosen == "none" else chosen.split(" / "))


def read_results(state: str) -> dict[str, tuple[str, str]]:
    """number -> (title, price) of a results state."""
    return {m[3]: (m[1], m[2]) for line in _lines(state)[1:] if (m := _LISTED.match(line))}


def split_action(action: str) -> tuple[str, str]:
    """('search' | 'click', argument in lower case), or ('', '') for anything that upstream refuses."""
    match = re.match(r"(.+)\[(.+)\]", action)
    return (match[1], match[2].lower()) if match and match[1] in ("search", "click") else ("", "")


def ground(state: str, action: str) -> str:
    """The action with the title and price of the product whose number it names."""
    verb, argument = split_action(action)
    if verb == "click" and page_kind(state) == "results" and argument.isdigit():
        return " ".join([f"click[{argument}]", *read_results(state).get(argument, (NOTHING,))])
    return f"{verb}[{argument}]" if verb else action


def action_type(state: str, action: str) -> str:
    """search | open | option | prev | back | next | sub | buy, of an action that does something."""
    verb, argument = split_action(action)
    if verb == "search":
        return "search"
    return BUTTONS.get(argument, "open" if page_kind(state) == "results" else "option")


# ---- reading tasks ----------------------------------------------------------------------------------------

@dataclass
class Wanted:
    """What an instruction asks for: words of the title, option values by name, an upper price (None: any)."""
    words: list[str]
    options: dict[str, str]
    price: float | None = None


def title_words(text: str) -> list[str]:
    """The words of an instruction that say something about the product."""
    words = [word.strip(",.;") for word in clean(text).lower().split()]
    return [word for word in words if word and word not in _FILLER]


def read_task(text: str) -> Wanted | None:
    """None for an instruction of another form than 'find me WORDS [with NAME: VALUE[, and NAME: VALUE]][, and
    price lower than N dollars]', each name once."""
    if len(text) > MAX_TASK_CHARS:
        return None
    match = _TASK.match(clean(text).lower())
    words, options = title_words(match["words"]), {}
    for part in filter(None, (match["options"] or "").split(", and ")):
        name, _, value = part.partition(": ")
        name, value = name.strip(), value.strip(" ,")
        if not value or name in options or "price lower" in value:
            return None
        options[name] = value
    if not words or any(word.endswith(":") for word in words):
        return None
    return Wanted(words, options, float(match["price"]) if match["price"] else None)


def checks(wanted: Wanted, item: Item) -> list[tuple[str, bool]]:
    """(title | option | price, met) for each constraint of a task against an item page."""
    title = item.title.lower().split()
    rows = [("title", word in title) for word in wanted.words]
    rows += [("option", value in item.chosen) for value in wanted.options.values()]
    if wanted.price is not None:
        rows.append(("price", item.price_low <= wanted.price))
    return rows
