"""The generated catalogue, in upstream's own JSON formats.

1,000 products of 200 kinds (5 categories x 8 nouns x 5 leading attributes), near misses of each other. The
words are our own and few (about 250). Product categories share one level only: two would count as the same
type in upstream's reward.
"""
import json
import os
import random
from pathlib import Path

# category: (nouns, attributes, option name -> values). A product takes three of an option's values.
CATEGORIES = {
    "clothing": ("jacket shirt sweater dress coat skirt hoodie vest",
                 "waterproof slim warm breathable casual striped",
                 {"color": "red blue black green white gray", "size": "small medium large xlarge"}),
    "shoes": ("boots sandals sneakers slippers loafers heels clogs flats",
              "leather padded flexible sturdy wide vegan",
              {"color": "red blue black brown white pink", "size": "6 7 8 9"}),
    "kitchen": ("kettle pan bowl mug knife plate jar tray",
                "ceramic nonstick stackable heavy insulated handmade",
                {"color": "yellow blue black green silver orange"}),
    "beauty": ("shampoo soap lotion perfume serum balm scrub mask",
               "organic gentle hydrating sensitive mild herbal",
               {"scent": "rose lemon mint vanilla coconut lavender", "volume": "travel regular family"}),
    "grocery": ("tea coffee cookies crackers granola chocolate noodles sauce",
                "sugarfree spicy roasted crunchy natural instant",
                {"flavor": "honey ginger cherry almond maple apple", "pack": "single twin bulk"}),
}
LINES = "modern classic royal rustic urban northern golden simple bright noble".split()
NOUNS = frozenset(noun for nouns, _, _ in CATEGORIES.values() for noun in nouns.split())


def embedded_nouns(title: str) -> list[str]:
    """The noun tagger of our own titles, which hold exactly one noun."""
    return [word for word in title.lower().split() if word in NOUNS]


def _price(rng: random.Random, base: int) -> str:
    price = base + 10 * rng.choice([0, 0, 1, 2, 3, 4])
    if rng.random() < 0.06:
        return f"${price:.2f} to ${price + 10:.2f}"
    return f"${price:.2f}"


def _product(rng: random.Random, asin: str, kind: tuple[str, str, str], line: str,
             base: int) -> tuple[dict, list[str]]:
    """A product of a kind (category, noun, leading attribute) in upstream's JSON form, and its attributes."""
    category, noun, attribute = kind
    _, attributes, options = CATEGORIES[category]
    owned = [attribute]
    if rng.random() < 0.5:
        owned.append(rng.choice([a for a in attributes.split() if a != attribute]))
    names = list(options) if rng.random() < 0.85 else list(options)[:rng.randrange(2)]
    listed = {}
    for name in names:
        values = options[name].split()
        chosen = sorted(rng.sample(values, min(3, len(values) - 1)), key=values.index)
        listed[name] = [{"value": value, "image": None} for value in chosen]
    item = {
        "asin": asin, "name": " ".join([line, *owned, noun]), "category": category, "query": noun,
        "product_category": f"{category.title()} \u203a {noun.title()}",
        "pricing": _price(rng, base), "images": ["none"],
        "full_description": f"this {noun} is {' and '.join(owned)}",
        "small_description": [f"{line} {noun} for every day", f"made to be {' and '.join(owned)}"],
        "customization_options": listed,
    }
    return item, owned


def make_catalogue(folder: Path | str, seed: int = 0) -> Path:
    """Writes a small set in upstream's file names; the same seed gives the same bytes. 42 % of the products
    have an instruction, as upstream."""
    rng = random.Random(f"dreamgym-shop-{seed}")
    items, instructions = [], {}
    for category, (nouns, attributes, _) in CATEGORIES.items():
        for noun in nouns.split():
            base = 10 * rng.randint(1, 4)
            for attribute in rng.sample(attributes.split(), 5):
                for line in rng.sample(LINES, 5):
                    kind = (category, noun, attribute)
                    item, owned = _product(rng, f"DG{len(items):08d}", kind, line, base)
                    items.append(item)
                    entry = instructions[item["asin"]] = {"attributes": owned}
                    if rng.random() < 0.42:
                        wanted = owned if rng.random() < 0.6 else owned[:1]
                        entry["instruction"] = f"find me {' '.join(wanted)} {noun}"
                        entry["instruction_attributes"] = wanted
    rng.shuffle(items)
    human = {}
    for item in items[:40]:
        owned = instructions[item["asin"]]["attributes"]
        options = [values[0]["value"] for values in item["customization_options"].values()]
        human[item["asin"]] = [{"instruction": f"i need a {' '.join(owned)} {item['query']}.",
                                "instruction_attributes": owned, "instruction_options": options}]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"items_shuffle_1000.json": items, "items_ins_v2_1000.json": instructions,
                "items_human_ins.json": human}
    for name, content in contents.items():
        temporary = folder / f"{name}.{os.getpid()}.tmp"   # two runs may make the same shop at once
        temporary.write_text(json.dumps(content, ensure_ascii=False, indent=0), encoding="utf-8")
        temporary.rename(folder / name)
    return folder
