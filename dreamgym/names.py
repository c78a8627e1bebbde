"""Entity randomization: in training rows things get each other's names, so that a model learns to compare and
copy names, and not which names there are.

    names = Names(task.text for task in tasks)
    change = names.draw(0.5, rng)              # in half of the draws other names, else the same
    change(task.text), change(state)           # the same in every text
"""
import re
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

RARE = 0.1                             # share of the tasks in which the name of a thing may stand
_WORD = re.compile(r"%[0-9A-F]{2}|[^\W\d_]{2,}")    # what may be a name; "%2F" of an address is none


class Names:
    """The names of things in the texts of tasks, found without rules of an environment."""

    def __init__(self, tasks: Iterable[str]):
        self.groups = substitutes(tasks)
        self.kind = {word: i for i, words in enumerate(self.groups) for word in words}

    def alike(self, word: str, other: str) -> bool:
        """Whether two different words name things of one kind, or are numbers."""
        kinds = ["number" if text.isdigit() else self.kind.get(text.lower()) for text in (word, other)]
        return word.lower() != other.lower() and None not in kinds and kinds[0] == kinds[1]

    def draw(self, share: float, rng: np.random.Generator) -> Callable[[str], str]:
        """With probability `share` a function that exchanges the words of each group in texts, else `str`."""
        if rng.random() >= share:
            return str
        new = {old: name for words in self.groups
               for old, name in zip(words, rng.permutation(words).tolist())}

        def other(match: re.Match) -> str:
            word = match[0]
            name = new.get(word.lower(), word)
            return name.capitalize() if word[0].isupper() and name != word else name
        return lambda text: _WORD.sub(other, text)


def substitutes(tasks: Iterable[str]) -> list[list[str]]:
    """Groups of words, in lower case, that can replace each other: in some tasks they stand between the same
    two words before and the same two behind ("find me _ boots with"). A word that stands in more than a tenth
    of the tasks is no name."""
    texts = [re.findall(r"[^\W_]+|\S", text) for text in sorted({task.lower() for task in tasks})]
    counts = Counter(word for text in texts for word in set(text))
    places: dict[tuple, list[str]] = {}
    for text in texts:
        padded = ["", "", *text, "", ""]
        for i, word in enumerate(text):
            if _WORD.fullmatch(word) and counts[word] <= RARE * len(texts):
                places.setdefault((*padded[i:i + 2], *padded[i + 3:i + 5]), []).append(word)
    group = {word: {word} for words in places.values() for word in words}
    for first, *others in places.values():
        for word in others:
            if group[word] is not group[first]:
                group[first] |= group[word]
                group.update(dict.fromkeys(group[word], group[first]))
    return sorted({min(words): sorted(words) for words in group.values() if len(words) > 1}.values())
