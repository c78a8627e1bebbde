"""WebShop's catalogue: products, goals and the search index from upstream's JSON files, the small set or the
full one (1.18 M products). Left out: images, reviews, upstream's goal filters and goal weights.
"""
import json
import math
import random
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from dreamgym.envs.webshop.bm25 import BM25Index
from dreamgym.envs.webshop.reward import rule_nouns
from dreamgym.episode import converted

FILES = (("items_shuffle_1000.json", "items_ins_v2_1000.json"), ("items_shuffle.json", "items_ins_v2.json"))
HUMAN_FILE = "items_human_ins.json"
SHUFFLE_SEED = 233                               # upstream's, for the order of goals
NO_LIMIT = 1_000_000                             # price_upper of a goal that names no price
TOP_K = 50
READ_CHARS = 1 << 22
MAX_PRODUCT_CHARS = 1 << 26
_BETWEEN = re.compile(r"[\s,]*")


# What upstream's files hold of a product; the other fields are ignored.

class Listed(msgspec.Struct):
    asin: str


class Value(msgspec.Struct):
    value: str


class Item(Listed):
    name: str
    full_description: str
    small_description: str | tuple[str, ...]
    category: str
    query: str
    product_category: str
    customization_options: dict[str, list[Value] | None] | Literal[""] | None
    pricing: str | None = None


class Extra(msgspec.Struct):
    """What items_ins_v2 says about a product, or an instruction of items_human_ins."""
    attributes: tuple[str, ...] = ("DUMMY_ATTR",)
    instruction: str | None = None
    instruction_attributes: list[str] = []
    instruction_options: list[str] = []


class Product(NamedTuple):
    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    options: dict[str, tuple[str, ...]]          # name -> values, lower case
    attributes: tuple[str, ...]
    price: float                                 # what a buyer pays: of a range, the price drawn within it
    price_tag: str                               # what pages show
    category: str
    query: str
    product_category: str


Target = tuple[Product, Extra, float]            # product, its instruction, price limit


class Goal(NamedTuple):
    """What is to be bought. `options` is name -> value in synthetic goals, a list of values in human ones."""
    product: Product
    instruction: str
    attributes: list[str]
    options: dict[str, str] | list[str]
    price_upper: float


class SyntheticGoals(Sequence):
    """One goal for each combination of option values of each target, in upstream's shuffled order; one is 4
    bytes until it is asked for."""

    def __init__(self, targets: list[Target]):
        self._targets = targets
        sizes = (math.prod(map(len, product.options.values())) for product, _, _ in targets)
        self._starts = list(accumulate(sizes, initial=0))
        self._order = array("I", range(self._starts[-1]))
        random.Random(SHUFFLE_SEED).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Goal:
        number = self._order[index]
        target = bisect_right(self._starts, number) - 1
        (product, extra, upper), number = self._targets[target], number - self._starts[target]
        chosen = {}
        for name in sorted(product.options, reverse=True):           # the last name varies fastest
            number, pick = divmod(number, len(product.options[name]))
            chosen[name] = product.options[name][pick]
        chosen = dict(sorted(chosen.items()))
        wanted = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
        text = extra.instruction + (f" with {wanted}" if wanted else "") + _price_text(upper)
        return Goal(product, text, extra.instruction_attributes, chosen, upper)


class Catalogue:
    """All that sessions share. `seed`, as of upstream's `random.seed`: prices within ranges, then the goals'
    price limits. `nouns`: title -> its nouns. Raises ValueError naming file, product and field."""

    def __init__(self, data_dir: str | Path, human_goals: bool = False, seed: int = 7,
                 nouns: Callable[[str], list[str]] = rule_nouns):
        folder = Path(data_dir)
        files = next((names for names in FILES if (folder / names[0]).exists()), None)
        if files is None:
            expected = " or ".join(" and ".join(names) for names in FILES)
            raise ValueError(f"{folder}: no WebShop catalogue there; expected the files {expected}")
        self.nouns = lru_cache(maxsize=1 << 16)(nouns)
        extras = _read_object(folder / files[1])
        human = _read_object(folder / HUMAN_FILE) if human_goals else {}
        rng, self.by_asin, wanted = random.Random(seed), {}, []
        for number, item in enumerate(_stream_array(folder / files[0])):
            where = f"{folder / files[0]}, product {number}"
            asin = converted(item, Listed, where).asin
            if asin == "nan" or len(asin) > 10 or asin in self.by_asin:
                continue
            extra = converted(extras.pop(asin, {}), Extra, f"{folder / files[1]}, product {asin}")
            product = self.by_asin[asin] = _product(where, converted(item, Item, where), extra, rng)
            entries = [extra]
            if human_goals:
                entries = converted(human.get(asin, []), list[Extra],
                                    f"{folder / HUMAN_FILE}, product {asin}")
            wanted += [(product, entry) for entry in entries
                       if entry.instruction is not None and entry.instruction_attributes]
        self.products = list(self.by_asin.values())
        targets = [(product, entry, _draw_upper(product.price, rng)) for product, entry in wanted]
        if human_goals:
            self.goals = [Goal(product, entry.instruction.strip(".") + _price_text(upper),
                               entry.instruction_attributes, entry.instruction_options, upper)
                          for product, entry, upper in targets]
            random.Random(SHUFFLE_SEED).shuffle(self.goals)
        else:
            self.goals = SyntheticGoals(targets)
        self.search = lru_cache(maxsize=4096)(self._search)

    @cached_property
    def index(self) -> BM25Index:
        return BM25Index(map(_contents, self.products), list(self.by_asin))

    def _search(self, query: str) -> tuple[Product, ...]:
        """The at most 50 best products for a query, best first."""
        return tuple(self.products[i] for i in self.index.search(query, TOP_K))


def _contents(product: Product) -> str:
    """The text that is searched: title, description, first bullet and options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join((product.title, product.description, *product.bullets[:1], options)).lower()


def _draw_upper(price: float, rng: random.Random) -> float:
    """The larger of two of the next four multiples of ten above the price (10 to 990); no limit where fewer
    than two are left."""
    steps = [10.0 * i for i in range(1, 100) if 10.0 * i > price][:4]
    return max(rng.sample(steps, 2)) if len(steps) >= 2 else NO_LIMIT


def _price_text(upper: float) -> str:
    return f", and price lower than {upper:.2f} dollars" if upper != NO_LIMIT else ""


# ---- upstream's files --------------------------------------------------------------------------------------

def _read_object(path: Path) -> dict:
    try:
        return converted(json.loads(path.read_text(encoding="utf-8")), dict, path)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error


def _stream_array(path: Path) -> Iterator[object]:
    """The entries of a JSON array, one at a time: the full catalogue is larger than most memories."""
    decode, at = json.JSONDecoder().raw_decode, 1
    try:
        with open(path, encoding="utf-8") as file:
            buffer = file.read(READ_CHARS).lstrip()
            while not buffer.startswith("]", at := _BETWEEN.match(buffer, at).end()):
                try:
                    item, at = decode(buffer, at)
                except json.JSONDecodeError:     # cut off by the end of the buffer, or broken
                    more = file.read(READ_CHARS)
                    if not more or len(buffer) - at > MAX_PRODUCT_CHARS:
                        raise
                    buffer, at = buffer[at:] + more, 0
                else:
                    yield item
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a JSON array of products ({error})") from error


def _product(where: str, item: Item, extra: Extra, rng: random.Random) -> Product:
    bullets = item.small_description
    prices = _prices(where, item.pricing)
    options = {sys.intern(name.lower()): tuple(sys.intern(entry.value.strip().replace("/", " | ").lower())
                                               for entry in entries)
               for name, entries in (item.customization_options or {}).items() if entries is not None}
    return Product(item.asin, item.name, item.full_description,
                   (bullets,) if isinstance(bullets, str) else bullets, options,
                   tuple(map(sys.intern, extra.attributes)),
                   prices[0] if len(prices) == 1 else rng.uniform(*prices),
                   " to ".join(f"${price}" for price in prices), sys.intern(item.category),
                   sys.intern(item.query.lower().strip()), sys.intern(item.product_category))


def _prices(where: str, pricing: str | None) -> list[float]:
    """'$9.99' -> one price, '$9.99 to $12' -> the range; nothing -> 100 dollars."""
    if not pricing:
        return [100.0]
    try:
        low, *high = (float(re.sub(r"[^\d.]", "", part)) for part in pricing.split("$")[1:3])
    except ValueError:
        raise ValueError(f"{where}: found `pricing` {pricing!r:.80}; expected text such as '$9.99' or "
                         "'$9.99 to $12.99'") from None
    return [low, *high]
