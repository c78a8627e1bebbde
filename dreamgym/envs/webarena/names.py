"""Entity randomization: other names for the things of the own sites, for training rows, so that a small model
copies names from the page instead of memorizing them."""
import re
from collections.abc import Callable

import numpy as np

from dreamgym.envs.webarena.sites import data
from dreamgym.envs.webarena.sites.site import WORDS

# Words that the sites also use for something else: 'map', the button 'Star', the role radio, going by bike
FIXED = frozenset("map shop site open star notes garden table watch chat page set phone screen bike card "
                  "library radio".split())
# No letter of "%2F", no element number ("click [12]"), no part of a date
_PIECE = re.compile(r"%[0-9A-F]{2}|[A-Za-z]+|(?<!(?:lick|type|over|ocus) \[)"
                    r"(?:(?<![\d:.-])[1-9]\d(?![\d:-])|(?<![\d.,])1[01]\d\d(?!\d))")


def _kinds() -> tuple[tuple[str, ...], ...]:
    people, shop, forum, code = (WORDS[part] for part in ("people", "shop", "forum", "code"))
    topics = " ".join(topic for _, topics in forum.forums.values() for topic in topics).split()
    nouns = [noun for nouns in shop.categories.values() for noun in nouns]
    lists = (
        (*shop.looks, *code.first),
        (*nouns, *forum.forums, *code.second, *topics),
        (*people.first, *people.last, *shop.brands, *shop.cities, *WORDS["map"].towns),
        map(str, range(10, 100)),
        map(str, range(1001, 1001 + data.ORDERS)),
    )
    taken, result = set(FIXED), []
    for words in lists:
        result.append(tuple(dict.fromkeys(word.lower() for word in words if word.lower() not in taken)))
        taken |= set(result[-1])
    return tuple(result)


# In lower case, each of one kind: looks, things, proper names, prices and counts, numbers of orders
KINDS = _kinds()
# Every word as it may stand in a sentence, as a name, in an address
VOCABULARY = [f"${word} {word} a/{word}" if word.isdigit() else f"{word} {word.capitalize()} a/{word}-{word}"
              for words in KINDS for word in words]


def other_names(rng: np.random.Generator) -> Callable[[str], str]:
    """A change of texts: every word and number of a name becomes another of its kind, one to one."""
    others = {old: str(new) for words in KINDS for old, new in zip(words, rng.permutation(words))}

    def renamed(match: re.Match) -> str:
        word = match[0]
        new = others.get(word.lower(), word)
        return new.capitalize() if word[0].isupper() and new != word else new
    return lambda text: _PIECE.sub(renamed, text)
