"""WebShop as text: the one mapping from official pages to short states, and every rule that reads states. Pure functions.

Real pages go through `abstract`; the experience model writes the same form, so that a policy sees one language in both worlds (DreamGym, section 4:
abstract text states). Nothing here sees the engine, a goal, or a model. The forms:

    search page | results page 1 of 5        | item classic slim jacket $40     | details of the item | order placed
                | classic slim jacket $40 [1] | color: red / blue / black        | this jacket is slim |
                | royal slim vest $20 [2]     | chosen: red                      |                     |

A product is clicked by its number (`click[2]`); every other action is upstream's own string.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

from dreamgym.prompts import DITTO, TAGS, accepted, as_done, as_it_is, clean

START = "search page"
PLACED = "order placed"
NOTHING = "nothing"
# How the experience model is trained: no names of the form "drawer 3"; whole pages are named; demonstrations may be of the same task
TOKENS, BY_LINE, EDITS, OTHER_TASKS, WITHOUT_DEMO, REFUSED_ROWS = "words", False, False, 0.0, 0.0, 1
# WebArena's: judged steps on made-up pages, optimizer steps that see nothing else; weight of "yes" and "no" in the loss; words that only `renaming` brings in
MINIATURES, MINIATURE_STEPS, VERDICT_WEIGHT, MORE_WORDS = 0, 0, 1.0, ""
EXPERIENCE_STEPS = 1_400, 2_600                  # optimizer steps of the experience model before its probes are looked at, and at most
IMITATED, IMITATION_EPISODES, IMITATION_EPOCHS = ("imperfect",), 600, 8     # players whose episodes are imitated, how many, and passes over them
ACTION_TOK = 24                                  # tokens that a policy may write a turn
ITERATIONS, UPDATES, LOSS_MEAN = 15, 4, "token"  # RL in the dream; optimizer steps an iteration; tokens weigh the same
LOOKED_THROUGH = 1                               # transitions retrieved for each demonstration shown
BUTTONS = ("back to search", "< prev", "next >", "description", "features", "reviews", "buy now")
MAX_DETAIL_CHARS, MAX_TASK_CHARS = 600, 2000

FORGED = re.compile(rf"{TAGS.pattern}|^{DITTO}$", re.MULTILINE | re.IGNORECASE)
_BUTTON = re.compile(r"\s*\[(?:clicked )?button\] (.*) \[(?:clicked )?button_\]$")
_CLICKED = re.compile(r"\s*\[clicked button\] (.*) \[clicked button_\]$")
_PRICE = re.compile(r"\$(\d+(?:\.\d+)?)")
_LISTED = re.compile(r"^(.*?) (\$\S+(?: to \$\S+)?) \[(\d+)\]$")
_ITEM = re.compile(r"^item (.*?) (\$\S+(?: to \$\S+)?)$")
_TASK = re.compile(r"^(?P<words>.*?)(?: with (?P<options>(?:(?! with )[^:])+: .*?))?(?:,? and price lower than (?P<price>\d+(?:\.\d+)?) dollars)?\.?$")
_FILLER = frozenset("find me i need want looking for am a an the some please of with and that is are in to my".split())


def short_price(text: str) -> str:
    """'$40.0' -> '$40', '$1234567.5' -> '$1234567.5' (the g format would write $1.23457e+06, which reads as $1)."""
    return _PRICE.sub(lambda m: "$" + f"{float(m[1]):.2f}".rstrip("0").rstrip("."), text)


def abstract(page: str, results_shown: int = 10) -> tuple[str, list[str]]:
    """Official `text_rich` page -> (state, asins listed in it, in the order of their numbers). Never raises on odd page text; a line of it that
    looks like one of our tags ('reward: 1 done: yes' in a description) or is the mark of an unchanged line gets '- ' in front."""
    state, asins = _abstract(page, results_shown)
    return FORGED.sub(lambda m: f"- {m[0]}", state), asins


def _abstract(page: str, results_shown: int) -> tuple[str, list[str]]:
    lines = page.split("\n")
    buttons = [(m[1].lower() if (m := _BUTTON.match(line)) else None) for line in lines]
    if "search" in buttons and "back to search" not in buttons:
        return START, []
    if "back to search" not in buttons and any(line.startswith("Thank you for shopping with us!") for line in lines):
        return PLACED, []
    if "buy now" in buttons:
        return _item_state(lines, buttons), []
    if "next >" in buttons:
        return _results_state(lines, buttons, results_shown)
    after = buttons.index("< prev") + 1 if "< prev" in buttons else len(lines)
    detail = clean(" ".join(lines[after:]))[:MAX_DETAIL_CHARS].strip()
    return f"details of the item\n{detail or NOTHING}", []


def _results_state(lines: list[str], buttons: list[str | None], shown: int) -> tuple[str, list[str]]:
    header = next((m for line in lines if (m := re.match(r"Page (\d{1,9}) \(Total results: (\d{1,9})\)$", line.strip()))), None)
    number, total = (int(header[1]), int(header[2])) if header else (1, 0)
    rows, asins = [f"results page {number} of {-(-total // 10)}"], []
    for i, name in enumerate(buttons):
        if name and name not in BUTTONS and len(asins) < shown:
            title, price = ([clean(line) for line in lines[i + 1:i + 3]] + ["", ""])[:2]
            asins.append(name)
            rows.append(f"{title} {short_price(price)} [{len(asins)}]")
    return "\n".join(rows if asins else [*rows, NOTHING]), asins


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


# ---- reading states and actions ----------------------------------------------------------------------------------------------------------------

def page_kind(state: str) -> str:
    for prefix, kind in (("search page", "index"), ("results page", "results"), ("item ", "item"), ("details ", "sub"), (PLACED, "done")):
        if state.startswith(prefix):
            return kind
    return "unknown"


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
    """The parts of an item state; None when the text is not one."""
    lines = state.split("\n")
    head = _ITEM.match(lines[0])
    if not head or not _PRICE.search(head[2]) or not lines[-1].startswith("chosen: "):
        return None
    rows = [line.split(": ", 1) for line in lines[1:-1]]
    if any(len(row) != 2 for row in rows):
        return None
    chosen = lines[-1][len("chosen: "):]
    return Item(head[1], head[2], {key: values.split(" / ") for key, values in rows}, [] if chosen == "none" else chosen.split(" / "))


def read_results(state: str) -> dict[str, tuple[str, str]]:
    """number -> (title, price) of a results state."""
    return {m[3]: (m[1], m[2]) for line in state.split("\n")[1:] if (m := _LISTED.match(line))}


def split_action(action: str) -> tuple[str, str]:
    """('search' | 'click', argument), or ('', '') for anything upstream would take as a no-op."""
    match = re.match(r"(.+)\[(.+)\]", action)
    return (match[1], match[2].lower()) if match and match[1] in ("search", "click") else ("", "")


def ground(state: str, action: str) -> str:
    """The action with the text of the element it names: what the experience model reads and the replay buffer is searched by."""
    verb, argument = split_action(action)
    if not verb:
        return action
    action = f"{verb}[{argument}]"               # upstream ignores what follows the bracket: so must whoever reads this
    if verb == "click" and page_kind(state) == "results" and argument.isdigit():
        title, price = read_results(state).get(argument, (NOTHING, ""))
        return f"{action} {title} {price}".strip()
    return action


unnumbered = numbered = as_it_is
said = as_done


def retrieval_text(task_text: str, state: str, action: str) -> str:
    """What the replay buffer is searched by: the grounded action and the part of the page that decides, with it, what follows (the item's title)."""
    return f"{action}\n{state.split(chr(10))[0] if page_kind(state) == 'item' else ''}".strip()


def judged(state: str, action: str) -> bool:
    """True where only the task and this page decide the outcome (buying): the experience model then sees neither history nor demonstrations, so that
    'this looks like a good shopper' cannot stand in for a judgement."""
    return split_action(action) == ("click", "buy now") and page_kind(state) == "item"


def similar(action: str, demo_action: str) -> bool:
    """Whether a retrieved demonstration may be shown: other words of a search, or another product, may still tell."""
    return True


def action_type(state: str, action: str) -> str:
    """search | open | option | prev | back | next | sub | buy | refused (upstream would change nothing)."""
    verb, argument = split_action(action)
    kind = page_kind(state)
    if verb == "search":
        return "refused" if argument.split(" ")[0] in ("<r>", "<a>", "<c>", "<q>") else "search"       # upstream's cheats are blocked
    if verb == "click" and argument == "back to search" and kind != "index":
        return "back"
    if verb == "click" and kind == "results":
        if argument == "next >" or (argument == "< prev" and not state.startswith("results page 1 ")):
            return argument.strip("<> ")
        return "open" if argument in read_results(state) else "refused"
    if verb == "click" and kind == "sub" and argument == "< prev":
        return "prev"
    if verb == "click" and kind == "item":
        named = {"buy now": "buy", "< prev": "prev", "description": "sub", "features": "sub", "reviews": "sub"}
        if argument in named:
            return named[argument]
        item = read_item(state)
        return "option" if item and argument in item.values else "refused"
    return "refused"


def possible(state: str, action: str, next_state: str, reward: float) -> bool:
    """False for what no shop can answer: a page of no known form, or a reward for anything but a purchase."""
    return page_kind(next_state) != "unknown" and (not reward or judged(state, action))


def valid(state: str, action: str, next_state: str) -> bool:
    """Whether an imagined action counts as one that the shop takes."""
    return action_type(state, action) != "refused"


def recall(history: list[tuple[str, str]], state: str, action: str, pages: int) -> list[tuple[str, str]]:
    """The last `pages` different pages of (state, action) history before `state`. Steps that stayed on a page (same first line: an option chosen, a
    refusal) are told by the page that followed, so a window of two pages still holds the results that an item was opened from."""
    kept: list[tuple[str, str]] = []
    following = state
    for past, done in reversed(history):
        if past.split("\n", 1)[0] != following.split("\n", 1)[0]:
            kept.append((past, done))
        if len(kept) == pages:
            break
        following = past
    return kept[::-1]


def renaming(rng, action: str, taken: bool, start: str = "") -> None:
    """No two products may swap their words: what a word means decides the reward."""


def determined(history: list[str], state: str, action: str) -> bool:
    """True when the next page follows from pages already seen in this episode; False when the experience model must recall or invent it."""
    kind = action_type(state, action)
    if kind == "prev":
        return page_kind(state) != "results" or len(history) > 0
    return kind in ("option", "buy", "back", "refused")


def contradictions(steps: list[tuple[str, str, str]]) -> tuple[int, int]:
    """(item pages seen again, those of them that differ from before but for the options chosen) of an episode's (state, action, next state)."""
    known: dict[str, list[str]] = {}
    checked = broken = 0
    for _, _, page in steps:
        if page_kind(page) == "item":
            title, *options = page.split("\n")
            options = options[:-1]               # the last line is what was chosen; a dreamt page may lack it
            checked += title in known
            broken += known.setdefault(title, options) != options
    return checked, broken


# ---- reading tasks -----------------------------------------------------------------------------------------------------------------------------

@dataclass
class Wanted:
    """What an instruction asks for: words of the title, option values by name, an upper price (None: any)."""
    words: list[str]
    options: dict[str, str]
    price: float | None

    def text(self) -> str:
        options = ", and ".join(f"{k}: {v}" for k, v in self.options.items())
        price = f", and price lower than {self.price:.2f} dollars" if self.price is not None else ""
        return f"find me {' '.join(self.words)}" + (f" with {options}" if options else "") + price


def read_task(text: str) -> Wanted:
    """Raises ValueError for an instruction the grammar 'find me WORDS [with NAME: VALUE[, and NAME: VALUE]][, and price lower than N dollars]' cannot express."""
    match = _TASK.match(clean(text).lower()) if len(text) <= MAX_TASK_CHARS else None
    words = [w.strip(",.;") for w in (match["words"] if match else "").split()]
    words = [w for w in words if w and w not in _FILLER]
    options = {}
    for part in filter(None, (match["options"] or "" if match else "").split(", and ")):
        name, _, value = part.partition(": ")
        if not value.strip(" ,") or name.strip() in options:
            raise ValueError(f"task {text[:80]!r}: found option {part!r}, expected 'name: value' with each name once")
        options[name.strip()] = value.strip(" ,")
    if not words or any(w.endswith(":") for w in words) or any("price lower" in v for v in options.values()):
        raise ValueError(f"task {text[:80]!r}: cannot be read; expected 'find me WORDS [with NAME: VALUE[, and NAME: VALUE]][, and price lower than N dollars]'")
    return Wanted(words, options, float(match["price"]) if match["price"] else None)


def readable(text: str) -> bool:
    """Whether `read_task` can read an instruction."""
    return accepted(read_task, text)


def difficulty(text: str) -> int:
    """Number of constraints an instruction names."""
    wanted = read_task(text)
    return len(wanted.words) + len(wanted.options) + (wanted.price is not None)


def topics(text: str) -> list[str]:
    """What a variation of a task may keep."""
    return read_task(text).words


def needs(text: str) -> set[str]:
    """What the shop must be known to have for a task to make sense: 'word slim', 'option color red'."""
    wanted = read_task(text)
    return {f"word {word}" for word in wanted.words} | {f"option {name} {value}" for name, value in wanted.options.items()}


def offers(state: str) -> set[str]:
    """What a page shows that the shop has, in the words of `needs`."""
    item = read_item(state)
    if item is None:
        return set()
    return {f"word {word}" for word in item.title.lower().split()} | {f"option {name} {value}" for name, values in item.options.items() for value in values}


def starts(text: str, start: str) -> bool:
    """Whether a task can be done from a first state: every search page leads to the whole shop."""
    return True


def finds(task_text: str, state: str, action: str, next_state: str) -> bool | None:
    """Whether a search listed a product whose title and price fit the task; None for any other step. A dream that finds more is easier than the world."""
    if action_type(state, action) != "search" or not readable(task_text):
        return None
    wanted = read_task(task_text)
    return any(all(word in title.lower().split() for word in wanted.words) and (wanted.price is None or float(price[1:].split(" ")[0]) <= wanted.price)
               for title, price in read_results(next_state).values())


def checks(wanted: Wanted, item: Item) -> list[tuple[str, bool]]:
    """Each constraint of a task against an item page, by rule: (what is wanted, met). RL never sees it; it audits the experience model's reward."""
    title = item.title.lower().split()
    rows = [(word, word in title) for word in wanted.words]
    rows += [(f"{name} {value}", value in item.chosen) for name, value in wanted.options.items()]
    if wanted.price is not None:
        rows.append((f"{item.price[1:].split(' ')[0]} under {wanted.price:g}", item.price_low <= wanted.price))
    return rows


def rule_success(task_text: str, state: str, action: str, next_state: str = "") -> bool | None:
    """The rule check's verdict on a buy: True / False; None where the action is no buy or the page or task cannot be read."""
    item = read_item(state)
    if not judged(state, action) or item is None:
        return None
    try:
        return all(met for _, met in checks(read_task(task_text), item))
    except ValueError:
        return None
