"""WebShop as text: the one mapping from official pages to short states, and everything that reads them.

The experience model writes the same form, so that a policy sees one language in both worlds (DreamGym,
section 4: abstract text states). Pure functions: nothing here sees the engine, a goal, or a model. The forms:

    search page | results page 1 of 5    | item classic jacket $40   | details of the item | order placed
                | classic jacket $40 [1] | color: red / blue / black | this jacket is slim |
                | royal vest $20 [2]     | chosen: red               |                     |

A product is clicked by its number (`click[2]`); every other action is upstream's own string. Lines that could
be taken for a tag of a prompt get "> " in front (`prompts.escape`); readers take it off again.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

from dreamgym.prompts import clean, escape

FORM = 2                                         # changes with the form of states; part of `describe()`
START = "search page"
PLACED = "order placed"
NOTHING = "nothing"
BUTTONS = ("back to search", "< prev", "next >", "description", "features", "reviews", "buy now")
CHEATS = ("<r>", "<a>", "<c>", "<q>")            # upstream's special queries: the engine refuses them here
MAX_DETAIL_CHARS = 600
MAX_TASK_CHARS = 2000

_BUTTON = re.compile(r"\s*\[(?:clicked )?button\] (.*) \[(?:clicked )?button_\]$")
_CLICKED = re.compile(r"\s*\[clicked button\] (.*) \[clicked button_\]$")
_HEADER = re.compile(r"Page (\d{1,9}) \(Total results: (\d{1,9})\)$")
_PRICE = re.compile(r"\$(\d+(?:\.\d+)?)")
_LISTED = re.compile(r"^(.*?) (\$\S+(?: to \$\S+)?) \[(\d+)\]$")
_ITEM = re.compile(r"^item (.*?) (\$\S+(?: to \$\S+)?)$")
_TASK = re.compile(r"^(?P<words>.*?)(?: with (?P<options>(?:(?! with )[^:])+: .*?))?"
                   r"(?:,? and price lower than (?P<price>\d+(?:\.\d+)?) dollars)?\.?$")
_FILLER = frozenset("find me i need want looking for am a an the some please of with and that is are in to my"
                    .split())


# ---- official pages -> states -----------------------------------------------------------------------------

def short_price(text: str) -> str:
    """'$40.0' -> '$40', '$1234567.5' -> '$1234567.5' (the g format would write $1.23457e+06)."""
    return _PRICE.sub(lambda m: "$" + f"{float(m[1]):.2f}".rstrip("0").rstrip("."), text)


def abstract(page: str, results_shown: int = 10) -> str:
    """Official `text_rich` page -> state. Never raises on odd page text."""
    return escape(_abstract(page, results_shown))


def _abstract(page: str, results_shown: int) -> str:
    lines = page.split("\n")
    buttons = [(m[1].lower() if (m := _BUTTON.match(line)) else None) for line in lines]
    if "back to search" not in buttons:
        if "search" in buttons:
            return START
        if any(line.startswith("Thank you for shopping with us!") for line in lines):
            return PLACED
    if "buy now" in buttons:
        return _item_state(lines, buttons)
    if "next >" in buttons:
        return _results_state(lines, buttons, results_shown)
    after = buttons.index("< prev") + 1 if "< prev" in buttons else len(lines)
    detail = clean(" ".join(lines[after:]))[:MAX_DETAIL_CHARS].strip()
    return f"details of the item\n{detail or NOTHING}"


def _results_state(lines: list[str], buttons: list[str | None], shown: int) -> str:
    header = next((m for line in lines if (m := _HEADER.match(line.strip()))), None)
    number, total = (int(header[1]), int(header[2])) if header else (1, 0)
    rows: list[str] = []
    for i, name in enumerate(buttons):
        if name and name not in BUTTONS and len(rows) < shown:
            title, price = ([clean(line) for line in lines[i + 1:i + 3]] + ["", ""])[:2]
            rows.append(f"{title} {short_price(price)} [{len(rows) + 1}]")
    return "\n".join([f"results page {number} of {-(-total // 10)}", *(rows or [NOTHING])])


def _item_state(lines: list[str], buttons: list[str | None]) -> str:
    options: dict[str, list[str]] = {}
    chosen, name, title, price = [], "", "", ""
    after = buttons.index("< prev") + 1 if "< prev" in buttons else 0
    for line, button in list(zip(lines, buttons))[after:]:
        if button in ("description", "features", "reviews", "attributes", "buy now") and price:
            break
        if button is not None:
            options.setdefault(name, []).append(clean(button))
            if clicked := _CLICKED.match(line):
                chosen.append(clean(clicked[1].lower()))
        elif line.startswith("Price: "):
            title, price = name, short_price(clean(line[len("Price: "):]))
        elif line.strip() and not price:
            name = clean(line)
    rows = [f"{key}: {' / '.join(values)}" for key, values in options.items()]
    return "\n".join([f"item {title} {price}", *rows, f"chosen: {' / '.join(chosen) or 'none'}"])


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
    pairs = [row.split(": ", 1) for row in rows[:-1]]
    if any(len(pair) != 2 for pair in pairs):
        return None
    chosen = rows[-1][len("chosen: "):]
    options = {key: values.split(" / ") for key, values in pairs}
    return Item(head[1], head[2], options, [] if chosen == "none" else chosen.split(" / "))


def read_results(state: str) -> dict[str, tuple[str, str]]:
    """number -> (title, price) of a results state."""
    return {m[3]: (m[1], m[2]) for line in _lines(state)[1:] if (m := _LISTED.match(line))}


def split_action(action: str) -> tuple[str, str]:
    """('search' | 'click', argument), or ('', '') for anything that upstream refuses."""
    match = re.match(r"(.+)\[(.+)\]", action)
    return (match[1], match[2].lower()) if match and match[1] in ("search", "click") else ("", "")


def ground(state: str, action: str) -> str:
    """The action with the title and price of the product whose number it names."""
    verb, argument = split_action(action)
    if not verb:
        return action
    action = f"{verb}[{argument}]"               # upstream ignores what follows the bracket
    if verb == "click" and page_kind(state) == "results" and argument.isdigit():
        title, price = read_results(state).get(argument, (NOTHING, ""))
        return f"{action} {title} {price}".strip()
    return action


def is_purchase(state: str, action: str) -> bool:
    return split_action(action) == ("click", "buy now") and page_kind(state) == "item"


def action_type(state: str, action: str) -> str:
    """search | open | option | prev | back | next | sub | buy | refused (upstream would change nothing)."""
    verb, argument = split_action(action)
    kind = page_kind(state)
    if verb == "search":
        return "refused" if argument.split(" ")[0] in CHEATS else "search"
    if verb == "click" and argument == "back to search" and kind != "index":
        return "back"
    if verb == "click" and kind == "results":
        if argument == "next >" or (argument == "< prev" and not state.startswith("results page 1 ")):
            return argument.strip("<> ")
        return "open" if argument in read_results(state) else "refused"
    if verb == "click" and kind == "sub" and argument == "< prev":
        return "prev"
    if verb == "click" and kind == "item":
        if argument in ("description", "features", "reviews"):
            return "sub"
        if argument in ("buy now", "< prev"):
            return "buy" if argument == "buy now" else "prev"
        item = read_item(state)
        return "option" if item and argument in item.values else "refused"
    return "refused"


# ---- reading tasks ----------------------------------------------------------------------------------------

@dataclass
class Wanted:
    """What an instruction asks for: words of the title, option values by name, an upper price (None: any)."""
    words: list[str]
    options: dict[str, str]
    price: float | None = None

    def text(self) -> str:
        options = ", and ".join(f"{k}: {v}" for k, v in self.options.items())
        price = f", and price lower than {self.price:.2f} dollars" if self.price is not None else ""
        return f"find me {' '.join(self.words)}" + (f" with {options}" if options else "") + price


def title_words(text: str) -> list[str]:
    """The words of an instruction that say something about the product."""
    words = [word.strip(",.;") for word in clean(text).lower().split()]
    return [word for word in words if word and word not in _FILLER]


def read_task(text: str) -> Wanted:
    """Reads 'find me WORDS [with NAME: VALUE[, and NAME: VALUE]][, and price lower than N dollars]'. Raises
    ValueError for any other instruction."""
    match = _TASK.match(clean(text).lower()) if len(text) <= MAX_TASK_CHARS else None
    words, options, readable = title_words(match["words"] if match else ""), {}, True
    for part in filter(None, (match["options"] or "" if match else "").split(", and ")):
        name, _, value = part.partition(": ")
        name, value = name.strip(), value.strip(" ,")
        readable &= bool(value) and name not in options and "price lower" not in value
        options[name] = value
    if not words or not readable or any(word.endswith(":") for word in words):
        raise ValueError(f"task {text[:80]!r}: cannot be read; expected 'find me WORDS [with NAME: VALUE[, "
                         "and NAME: VALUE]][, and price lower than N dollars]', each name once")
    return Wanted(words, options, float(match["price"]) if match["price"] else None)


def checks(wanted: Wanted, item: Item) -> list[tuple[str, str, bool]]:
    """(kind, what is wanted, met) for each constraint of a task against an item page. Kinds: title, option,
    price."""
    title = item.title.lower().split()
    rows = [("title", word, word in title) for word in wanted.words]
    rows += [("option", value, value in item.chosen) for value in wanted.options.values()]
    if wanted.price is not None:
        rows.append(("price", f"{item.price_low:g} under {wanted.price:g}", item.price_low <= wanted.price))
    return rows
