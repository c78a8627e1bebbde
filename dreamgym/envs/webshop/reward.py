"""WebShop's reward: how well a purchase meets a goal, with all of upstream's quirks, and the noun taggers it
needs.

`reward(goal, product, price, chosen_options, nouns)` is a pure function, so that a teacher can judge any
purchase it makes up. Source: Yao et al., WebShop (arXiv 2207.01206), section 3 and appendix A; where the code
differs from the paper, the code is followed.
"""

import re
from collections.abc import Callable
from functools import lru_cache

from rapidfuzz import fuzz
from rapidfuzz.utils import default_process

FUZZY_ABOVE = 85  # of 100
_COLORS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy "
    "camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral "
    "cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite "
    "grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta "
    "maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy nude olive orange "
    "peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell silver skull slate "
    "steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow"
)
COLORS = _COLORS.split()  # in upstream's order: the first that matches counts
_LATIN_1 = dict.fromkeys(range(128, 256))
_FUNCTION_WORDS = (
    "a about after all an and any are as at be before but by can each every for from has have i if in inch "
    "inches into is it its me more my no not of off on one or our out over per pack pcs piece pieces set so "
    "than that the their these this to two under up use very was we when which will with without you your "
    "new best great good super ultra free size"
)
_NOT_NOUNS = frozenset(_FUNCTION_WORDS.split())


@lru_cache(maxsize=1 << 16)
def _cleaned(text: str) -> str:
    """What thefuzz compares: without the characters 128-255, lower case, all but letters and digits
    blanked."""
    return default_process(text.translate(_LATIN_1))


def alike(first: str, second: str) -> bool:
    """thefuzz's token_set_ratio, a whole number from 0 to 100, is above 85."""
    return round(fuzz.token_set_ratio(_cleaned(first), _cleaned(second))) > FUZZY_ABOVE


def _color_in(option) -> str:
    """The first colour word "in" the option, else the option as text. For a (name, value) pair that is
    equality with a member, for a string it is any substring ('standard' is 'tan'): upstream's asymmetry,
    which puts R = 1 out of reach for some goals."""
    return next((color for color in COLORS if color in option), None) or str(option)


def _type_reward(goal, product, nouns: Callable[[str], list[str]]) -> dict:
    same_query = product.query == goal.query
    own, its = ({part.strip() for part in p.product_category.split("\u203a")} for p in (product, goal))
    same_category = len(own & its) >= 2
    wanted = nouns(goal.name)
    # Upstream divides a count of distinct words by one that counts repeats.
    title_score = len(set(nouns(product.title)) & set(wanted)) / len(wanted) if wanted else 0.2
    r_type = 1.0 if same_query or same_category or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1 if title_score > 0 else 0.0
    return {"r_type": r_type, "query_match": same_query, "category_match": same_category,
            "title_score": title_score}


def reward(goal, product, price: float, chosen_options: dict[str, str],
           nouns: Callable[[str], list[str]]) -> tuple[float, dict]:
    """R in [0, 1] for buying `product` at `price` with `chosen_options` (name -> value) under `goal`, and
    what it is made of.

    R = r_type (attributes met + options met + [price <= upper]) / (attributes + options + 1). The details:
    r_type, query_match, category_match, title_score, matched_attributes, option_met (one bool for each goal
    option), matched_options, price_ok. `nouns`: title -> its nouns in lower case.
    """
    texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    attributes = [a for a in goal.attributes
                  if any(alike(p, a) for p in product.attributes) or any(a in text for text in texts)]
    wanted = list(goal.goal_options.items() if isinstance(goal.goal_options, dict) else goal.goal_options)
    chosen = [_color_in(value) for value in chosen_options.values()]
    option_met = [any(alike(value, _color_in(option)) for value in chosen) for option in wanted]
    price_ok = price <= goal.price_upper
    details = _type_reward(goal, product, nouns)
    score = (len(attributes) + sum(option_met) + price_ok) / (len(goal.attributes) + len(wanted) + 1)
    matched = [option for option, met in zip(wanted, option_met) if met]
    details |= {"matched_attributes": attributes, "option_met": option_met, "matched_options": matched,
                "price_ok": price_ok}
    return score * details["r_type"], details


def rule_nouns(title: str) -> list[str]:
    """A stand-in for a part-of-speech tagger: all words of a title that begin with a letter, but for function
    words and a few that say nothing.

    Titles are little else than noun phrases; it calls adjectives nouns, on both sides of the comparison
    alike.
    """
    words = re.findall(r"[a-z][a-z0-9]*", re.sub(r"['\u2019]s\b", "", title.lower()))
    return [word for word in words if word not in _NOT_NOUNS]


def noun_tagger(given: Callable[[str], list[str]] | None = None) -> tuple[Callable[[str], list[str]], str]:
    """(title -> nouns, the tagger's name): the given one, else spaCy's en_core_web_sm as upstream, else
    `rule_nouns`. Answers are cached."""
    if given is not None:
        return lru_cache(maxsize=1 << 16)(given), "given"
    try:
        import spacy

        model = spacy.load("en_core_web_sm", exclude=["ner", "lemmatizer"])
    except (ImportError, OSError):  # no spaCy, or no model
        return lru_cache(maxsize=1 << 16)(rule_nouns), "rules"

    def nouns(title: str) -> list[str]:
        return [token.text.lower() for token in model(title) if token.pos_ in ("NOUN", "PROPN")]

    return lru_cache(maxsize=1 << 16)(nouns), "spacy en_core_web_sm"
