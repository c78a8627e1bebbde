"""WebShop's catalogue: products, prices, goals and the search index, read from upstream's JSON files; loaded
once, then shared by all sessions.

The folder holds items_shuffle_1000.json and items_ins_v2_1000.json (the small set) or items_shuffle.json and
items_ins_v2.json (the full one, 1.18 M products), and for human goals items_human_ins.json. Products are read
one at a time and keep only what pages, search and reward need; the search index is built at the first search,
synthetic goals are put together when asked for. Left out: images, reviews, upstream's goal filters.
"""

import json
import math
import random
import re
import sys
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from dreamgym.envs.webshop.bm25 import BM25Index
from dreamgym.envs.webshop.reward import noun_tagger

FILES = {
    "small": ("items_shuffle_1000.json", "items_ins_v2_1000.json"),
    "full": ("items_shuffle.json", "items_ins_v2.json"),
}
HUMAN_FILE = "items_human_ins.json"
SHUFFLE_SEED = 233  # upstream's, for the order of goals whatever the other seed is
NO_LIMIT = 1_000_000  # price_upper of a goal that names no price
TOP_K = 50
READ_CHARS = 1 << 22
MAX_PRODUCT_CHARS = 1 << 26
_BETWEEN = re.compile(r"[\s,]*")


class Product(NamedTuple):
    """One product. options: name -> values, lower case. prices: one, or the two ends of a range. price_tag:
    as pages show it. query: lower case."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    prices: tuple[float, ...]
    price_tag: str
    category: str
    query: str
    product_category: str


@dataclass(frozen=True)
class Goal:
    """What is to be bought. `goal_options` is name -> value in synthetic goals, a list of values in human
    ones; `name` is the target's title."""

    asin: str
    instruction: str
    attributes: list[str]
    goal_options: dict[str, str] | list[str]
    price_upper: float
    query: str
    product_category: str
    name: str
    category: str = ""
    weight: float = 1.0


def make_goal(
    product: Product,
    instruction: str,
    attributes: Sequence[str],
    goal_options: dict[str, str] | list[str] | None = None,
    price_upper: float = NO_LIMIT,
    weight: float = 1.0,
) -> Goal:
    """A goal whose target is `product`."""
    return Goal(
        product.asin, instruction, list(attributes),
        {} if goal_options is None else goal_options, price_upper,
        product.query, product.product_category, product.title, product.category, weight,
    )


class SyntheticGoals(Sequence):
    """One goal for each combination of option values of each product with an instruction, in upstream's
    shuffled order, made when indexed.

    targets: (product, instruction, attributes, price_upper) in catalogue order. The full set has millions of
    these goals: here one is 4 bytes.
    """

    def __init__(self, targets: list[tuple[Product, str, list[str], float]]):
        self._targets, self._starts, n_goals, n_with = targets, [], 0, Counter()
        for product, _, attributes, _ in targets:
            self._starts.append(n_goals)
            n_combinations = math.prod(len(values) for values in product.options.values())
            n_goals += n_combinations
            for attribute in attributes:
                n_with[attribute] += n_combinations
        self._n_with = n_with
        self._order = array("I", range(n_goals))
        random.Random(SHUFFLE_SEED).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = self._order[index]
        target = bisect_right(self._starts, number) - 1
        product, instruction, attributes, upper = self._targets[target]
        number -= self._starts[target]
        chosen = {}
        for name in sorted(product.options, reverse=True):  # the last name varies fastest
            number, pick = divmod(number, len(product.options[name]))
            chosen[name] = product.options[name][pick]
        chosen = dict(sorted(chosen.items()))
        wanted = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
        text = instruction + (f" with {wanted}" if wanted else "") + _price_text(upper)
        weight = sum(1.0 / self._n_with[a] for a in attributes) / len(attributes)
        return make_goal(product, text, attributes, chosen, upper, weight)


class Catalogue:
    """All that sessions share. Attributes: products (list), goals (sequence of Goal), prices (one drawn for
    each), nouns, noun_tagger (its name).

    seed: what upstream gets from `random.seed(seed)` before it starts its server: prices within ranges, then
    the goals' price limits, in its order. size: "small", "full", or "auto" (the small set unless only the
    full one is there). nouns: title -> nouns, see `reward.noun_tagger`. Raises ValueError, naming
    file, product and field, for anything that cannot be read or is not as expected.
    """

    def __init__(self, data_dir: str | Path, human_goals: bool = False, seed: int = 7,
                 nouns: Callable | None = None, size: str = "auto"):
        product_file, extra_file = _catalogue_files(Path(data_dir), size)
        self.human_goals, self.seed = human_goals, seed
        self.nouns, self.noun_tagger = noun_tagger(nouns)
        extras = _read_json(extra_file, dict, "an object: asin -> attributes and instruction")
        human = {}
        if human_goals:
            human = _read_json(Path(data_dir) / HUMAN_FILE, dict, "an object: asin -> list of instructions")
        self.products: list[Product] = []
        self._position: dict[str, int] = {}
        instructions = {}  # asin -> (instruction, attributes)
        for position, item in enumerate(_stream_array(product_file)):
            where = f"{product_file}, product {position}"
            asin = _field(where, item, "asin", str, "text")
            if asin == "nan" or len(asin) > 10 or asin in self._position:
                continue
            extra = _checked(f"{extra_file}, product {asin}", extras.pop(asin, {}), dict, "an object")
            self._position[asin] = len(self.products)
            attributes = _attributes(f"{extra_file}, product {asin}", extra)
            self.products.append(_read_product(f"{where} (asin {asin})", item, attributes))
            if not human_goals and extra.get("instruction") is not None:
                instructions[asin] = _read_instruction(f"{extra_file}, product {asin}", extra)
        rng = random.Random(seed)
        draws = (p.prices[0] if len(p.prices) == 1 else rng.uniform(*p.prices) for p in self.products)
        self.prices = array("d", draws)
        self.goals: Sequence[Goal] = (
            self._human_goals(human, rng) if human_goals else self._synthetic_goals(instructions, rng)
        )
        self.search = lru_cache(maxsize=4096)(self._search)

    def _synthetic_goals(self, instructions: dict, rng: random.Random) -> SyntheticGoals:
        targets = []
        for product, price in zip(self.products, self.prices):
            if product.asin in instructions:
                targets.append((product, *instructions[product.asin], _draw_upper(price, rng)))
        return SyntheticGoals(targets)

    def _human_goals(self, human: dict, rng: random.Random) -> list[Goal]:
        goals = []
        for product, price in zip(self.products, self.prices):
            where = f"{HUMAN_FILE}, product {product.asin}"
            for entry in _checked(where, human.get(product.asin, []), list, "a list of instructions"):
                attributes = _texts(where, entry, "instruction_attributes")
                if attributes:
                    upper = _draw_upper(price, rng)
                    text = _field(where, entry, "instruction", str, "text").strip(".") + _price_text(upper)
                    options = list(_texts(where, entry, "instruction_options"))
                    goals.append(make_goal(product, text, attributes, options, upper))
        random.Random(SHUFFLE_SEED).shuffle(goals)
        return goals

    def product(self, asin: str) -> Product:
        return self.products[self._position[asin]]

    def price_of(self, asin: str) -> float:
        """What the reward takes as the price paid: the shown price, or the drawn one where a range is
        shown."""
        return self.prices[self._position[asin]]

    @cached_property
    def index(self) -> BM25Index:
        """The search index, built when first used."""
        return BM25Index((_contents(p) for p in self.products), [p.asin for p in self.products])

    def _search(self, query: str) -> tuple[Product, ...]:
        """The at most 50 best products for a query, best first."""
        return tuple(self.products[i] for i in self.index.search(query, TOP_K))

    @cached_property
    def by_category(self) -> dict[str, list[Product]]:
        groups: dict[str, list[Product]] = {}
        for product in self.products:
            groups.setdefault(product.category, []).append(product)
        return groups

    @cached_property
    def option_values(self) -> dict[str, list[str]]:
        """Option name -> all values it has in the catalogue, in order of appearance."""
        values: dict[str, dict[str, None]] = {}
        for product in self.products:
            for name, own in product.options.items():
                values.setdefault(name, {}).update(dict.fromkeys(own))
        return {name: list(found) for name, found in values.items()}


def _contents(product: Product) -> str:
    """The text that is searched: title, description, first bullet and options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    bullet = product.bullets[0] if product.bullets else ""
    return " ".join((product.title, product.description, bullet, options)).lower()


def _draw_upper(price: float, rng: random.Random) -> float:
    """The larger of two of the next four multiples of ten above the price (10 to 990); no limit where fewer
    than two are left."""
    steps = [10.0 * i for i in range(1, 100) if 10.0 * i > price][:4]
    return max(rng.sample(steps, 2)) if len(steps) >= 2 else NO_LIMIT


def _price_text(upper: float) -> str:
    return f", and price lower than {upper:.2f} dollars" if upper != NO_LIMIT else ""


# Reading and checking the files


def _catalogue_files(folder: Path, size: str) -> list[Path]:
    if size not in ("auto", *FILES):
        raise ValueError(f"size {size!r}: expected auto, small or full")
    for names in [FILES[size]] if size != "auto" else FILES.values():
        if (folder / names[0]).exists():
            return [folder / name for name in names]
    expected = " or ".join(" and ".join(names) for key, names in FILES.items() if size in ("auto", key))
    raise ValueError(f"{folder}: no WebShop catalogue there; expected the files {expected}")


def _read_json(path: Path, kind: type, expected: str):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); expected {expected}") from error
    return _checked(str(path), content, kind, expected)


def _stream_array(path: Path) -> Iterator[dict]:
    """The objects of a JSON array, one at a time: the full catalogue's file is larger than most memories.
    Commas are not checked."""
    decode, number, at = json.JSONDecoder().raw_decode, 0, 1
    try:
        with open(path, encoding="utf-8") as file:
            buffer = file.read(READ_CHARS).lstrip()
            if not buffer.startswith("["):
                raise ValueError(f"{path}: begins with {buffer[:40]!r}; expected a JSON array of products")
            while True:
                at = _BETWEEN.match(buffer, at).end()
                if buffer.startswith("]", at):
                    return
                try:
                    item, at = decode(buffer, at)
                except json.JSONDecodeError as error:  # cut off by the end of the buffer, or broken
                    more = file.read(READ_CHARS)
                    if not more or len(buffer) - at > MAX_PRODUCT_CHARS:
                        found = buffer[error.pos : error.pos + 40]
                        problem = f"found {found!r} ({error.msg}); expected JSON"
                        raise ValueError(f"{path}, product {number}: {problem}") from error
                    buffer, at = buffer[at:] + more, 0
                    continue
                yield _checked(f"{path}, product {number}", item, dict, "an object")
                number += 1
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({error}); expected a UTF-8 JSON array of products"
        raise ValueError(f"{path}, product {number}: {problem}") from error


def _checked(where: str, value, kind: type, expected: str):
    if not isinstance(value, kind):
        raise ValueError(f"{where}: found {value!r:.80}; expected {expected}")
    return value


def _field(where: str, item: dict, name: str, kind: type, expected: str):
    if name not in _checked(where, item, dict, "an object"):
        raise ValueError(f"{where}, field {name!r}: missing; expected {expected}")
    return _checked(f"{where}, field {name!r}", item[name], kind, expected)


def _texts(where: str, item: dict, name: str) -> tuple[str, ...]:
    values, field = _field(where, item, name, list, "a list of texts"), f"{where}, field {name!r}"
    return tuple(_checked(f"{field}, entry {i}", value, str, "text") for i, value in enumerate(values))


def _attributes(where: str, extra: dict) -> tuple[str, ...]:
    if "attributes" not in extra:
        return ("DUMMY_ATTR",)
    return tuple(map(sys.intern, _texts(where, extra, "attributes")))


def _read_instruction(where: str, extra: dict) -> tuple[str, list[str]]:
    text = _field(where, extra, "instruction", str, "text")
    attributes = list(_texts(where, extra, "instruction_attributes"))
    if not attributes:
        problem = "found none; expected at least one beside an instruction"
        raise ValueError(f"{where}, field 'instruction_attributes': {problem}")
    return text, attributes


def _read_product(where: str, item: dict, attributes: tuple[str, ...]) -> Product:
    bullets = item.get("small_description")
    if isinstance(bullets, list):
        bullets = _texts(where, item, "small_description")
    else:
        bullets = (_field(where, item, "small_description", str, "text or a list of texts"),)
    prices, price_tag = _read_prices(where, item.get("pricing"))
    return Product(
        item["asin"],
        _field(where, item, "name", str, "text"),
        _field(where, item, "full_description", str, "text"),
        bullets,
        _read_options(where, item),
        attributes,
        prices,
        price_tag,
        sys.intern(_field(where, item, "category", str, "text")),
        sys.intern(_field(where, item, "query", str, "text").lower().strip()),
        sys.intern(_field(where, item, "product_category", str, "text")),
    )


def _read_prices(where: str, pricing) -> tuple[tuple[float, ...], str]:
    """'$9.99' -> one price, '$9.99 to $12' -> the range; nothing -> 100 dollars."""
    if not pricing:
        return (100.0,), "$100.0"
    expected = "text such as '$9.99' or '$9.99 to $12.99'"
    parts = _checked(f"{where}, field 'pricing'", pricing, str, expected).split("$")[1:3]
    try:
        prices = tuple(float(Decimal(re.sub(r"[^\d.]", "", part))) for part in parts)
    except InvalidOperation as error:
        raise ValueError(f"{where}, field 'pricing': found {pricing!r:.80}; expected {expected}") from error
    if not prices:
        raise ValueError(f"{where}, field 'pricing': found {pricing!r:.80}; expected {expected}")
    return prices, " to ".join(f"${price}" for price in prices)


def _read_options(where: str, item: dict) -> dict[str, tuple[str, ...]]:
    """{'Color': [{'value': 'Red/Blue'}]} -> {'color': ('red | blue',)}."""
    options, expected = {}, "an object: option name -> list of values"
    raw = _field(where, item, "customization_options", object, expected) or {}
    for name, contents in _checked(f"{where}, field 'customization_options'", raw, dict, expected).items():
        if contents is not None:
            place = f"{where}, field 'customization_options', option {name!r}"
            contents = _checked(place, contents, list, "a list of objects with a value")
            values = [_field(place, content, "value", str, "text") for content in contents]
            values = [value.strip().replace("/", " | ").lower() for value in values]
            options[sys.intern(name.lower())] = tuple(map(sys.intern, values))
    return options
