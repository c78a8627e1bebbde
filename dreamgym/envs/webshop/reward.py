"""WebShop's reward, with all of upstream's quirks, and the noun taggers it needs.

R = type score (attributes met + options met + [price <= limit]) / (attributes + options + 1): Yao et al.,
WebShop (arXiv 2207.01206), section 3 and appendix A, as upstream's code has it.
"""
import re
from collections.abc import Callable
from functools import lru_cache

from rapidfuzz import fuzz
from rapidfuzz.utils import default_process

FUZZY_ABOVE = 85                                 # of 100
COLORS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy "
    "camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral "
    "cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite "
    "grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta "
    "maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy nude olive orange "
    "peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell silver skull slate "
    "steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow"
).split()                                        # in upstream's order: the first that matches counts
_LATIN_1 = dict.fromkeys(range(128, 256))
_NOT_NOUNS = frozenset((
    "a about after all an and any are as at be before but by can each every for from has have i if in inch "
    "inches into is it its me more my no not of off on one or our out over per pack pcs piece pieces set so "
    "than that the their these this to two under up use very was we when which will with without you your "
    "new best great good super ultra free size"
).split())


@lru_cache(maxsize=1 << 16)
def _cleaned(text: str) -> str:
    """What thefuzz compares: lower case, no characters 128-255, all but letters and digits blanked."""
    return default_process(text.translate(_LATIN_1))


def alike(first: str, second: str) -> bool:
    """thefuzz's token_set_ratio, a whole number from 0 to 100, is above 85."""
    return round(fuzz.token_set_ratio(_cleaned(first), _cleaned(second))) > FUZZY_ABOVE


def _color_in(option) -> str:
    """The first colour word "in" the option, else the option as text: equality with a member of a (name,
    value) pair, any substring of a string ('standard' is 'tan'). This puts R = 1 out of reach for some
    goals."""
    return next((color for color in COLORS if color in option), None) or str(option)


def _type_score(target, product, nouns: Callable[[str], list[str]]) -> float:
    own, its = ({part.strip() for part in p.product_category.split("\u203a")} for p in (product, target))
    wanted = nouns(target.title)
    # Upstream divides a count of distinct words by one that counts repeats.
    title_score = len(set(nouns(product.title)) & set(wanted)) / len(wanted) if wanted else 0.2
    if title_score < 0.1:
        return 0.1 if title_score > 0 else 0.0
    return 1.0 if product.query == target.query or len(own & its) >= 2 or title_score > 0.2 else 0.5


def score(goal, product, chosen: dict[str, str], nouns: Callable[[str], list[str]]) -> float:
    """R in [0, 1]: what buying `product` with the options `chosen` (name -> value) is worth under `goal`.
    `nouns`: title -> its nouns in lower case."""
    texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    met = [any(alike(own, a) for own in product.attributes) or any(a in text for text in texts)
           for a in goal.attributes]
    wanted = goal.options.items() if isinstance(goal.options, dict) else goal.options
    taken = [_color_in(value) for value in chosen.values()]
    met += [any(alike(value, _color_in(option)) for value in taken) for option in wanted]
    met.append(product.price <= goal.price_upper)
    return sum(met) / len(met) * _type_score(goal.product, product, nouns)


def rule_nouns(title: str) -> list[str]:
    """A stand-in for a part-of-speech tagger: all words that begin with a letter but for function words."""
    words = re.findall(r"[a-z][a-z0-9]*", re.sub(r"['\u2019]s\b", "", title.lower()))
    return [word for word in words if word not in _NOT_NOUNS]


def noun_tagger() -> tuple[Callable[[str], list[str]], str]:
    """(title -> nouns, the tagger's name): spaCy's en_core_web_sm as upstream, else `rule_nouns`."""
    try:
        import spacy
        model = spacy.load("en_core_web_sm", exclude=["ner", "lemmatizer"])
    except (ImportError, OSError):               # no spaCy, or no model
        return rule_nouns, "rules"
    return (lambda title: [t.text.lower() for t in model(title) if t.pos_ in ("NOUN", "PROPN")],
            "spacy en_core_web_sm")
