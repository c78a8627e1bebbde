"""Entity randomization: in training rows things get each other's names, so that a model learns to compare and
copy names.

    names = Names((task.text for task in tasks), episodes)
    change = names.draw(0.5, rng)              # in half of the draws other names, else the same
    change(task.text), change(state)           # the same in every text
"""
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import regex as re
from scipy.cluster.hierarchy import DisjointSet

from dreamgym.episode import Episode, recorded
from dreamgym.words import WORD, unshown, words_of

MANY = 5                  # things that can replace each other; there are seldom as many verbs that do
RARE = 0.1                # largest share of the tasks with the name of a thing that fewer can replace
COMMON = 0.25             # largest share with a word that any can replace
_WORD = re.compile(r"%[0-9A-Fa-f]{2}|[^\W\d_]{2,}")    # may be a name; "%2F" is matched whole and is none


class Names:
    """The names of things in the texts of tasks: words that others replace. `words` are exchanged. A group
    with a word of more than a tenth of the tasks is not, unless it has five words: it may be one of verbs.
    Nor are words that no state of most successful `episodes` shows. In "put a mug into my cart" the page has
    a mug, but no "put": the meaning of "put" must be learnt. Nor are the names of `tools`."""

    def __init__(self, tasks: Iterable[str], episodes: Sequence[Episode] = ()):
        self.groups, share = substitutes(tasks)
        are_names = lambda words: len(words) >= MANY or all(share[word] <= RARE for word in words)
        names = {word for words in filter(are_names, self.groups) for word in words}
        kept = {*tools(names, episodes).values()}
        self.words = sorted(names - kept - unshown(episodes, lambda episode: words_of(
            " ".join(step.state for step in episode.steps))))
        self._group_of = {word: i for i, words in enumerate(self.groups) for word in words}

    def kind(self, word: str) -> int | str | None:
        """What a word names: the number of its group, "number", or None for a word that nothing replaces."""
        return "number" if word.isdigit() else self._group_of.get(word.lower())

    def draw(self, share: float, rng: np.random.Generator) -> Callable[[str], str]:
        """A function text -> text. With probability `share` it exchanges all names, alike in every text; else
        it changes nothing. Names of all kinds mix (docs/lab-notes.md)."""
        if rng.random() >= share or not self.words:
            return str
        new = dict(zip(self.words, rng.permutation(self.words).tolist()))

        def exchanged(match: re.Match) -> str:
            word = match[0]
            name = new.get(word.lower())
            if name in (None, word.lower()):
                return word
            return name.upper() if word.isupper() else name.capitalize() if word[0].isupper() else name
        return lambda text: _WORD.sub(exchanged, text)


def blanked(action: str, names: Collection[str]) -> tuple[tuple[str, ...], list[str]]:
    """The words of the action with "_" for each name, and the names."""
    words = WORD.findall(action.lower())
    return tuple("_" if word in names else word for word in words), [word for word in words if word in names]


def tools(names: Collection[str], episodes: Iterable[Episode]) -> dict[tuple, str]:
    """{(blanked action, which of its names): a name that no other can replace there}: "fridge", if "cool _
    with fridge" changed the state for at least five other names, and "cool _ with" anything else for none.
    What such a thing is for must be learnt."""
    beside: dict[tuple, dict[str, set]] = defaultdict(lambda: defaultdict(set))
    for action in {step.shown_action for e in recorded(episodes) for step in e.steps if step.valid}:
        form, named = blanked(action, names)
        for i, word in enumerate(named):
            beside[form, i][word].add((*named[:i], *named[i + 1:]))
    return {place: word for place, found in beside.items() for word, others in found.items()
            if len(found) == 1 and len(others) >= MANY}


def substitutes(tasks: Iterable[str]) -> tuple[list[list[str]], dict[str, float]]:
    """(Groups of words, in lower case, that can replace each other; share of the different tasks with a
    word.) In some tasks they stand between the same two tokens before and the same two behind ("find me _
    boots with"), or a third word does so with both. A word of more than a quarter of the tasks is in no
    group."""
    texts = [re.findall(r"[^\W_]+|\S", text) for text in sorted({task.lower() for task in tasks})]
    counts = Counter(word for text in texts for word in set(text))
    places: dict[tuple, list[str]] = {}
    for text in texts:
        around = ["", "", *text, "", ""]
        for *before, word, after, last in zip(*(around[i:] for i in range(5))):
            if _WORD.fullmatch(word) and counts[word] <= COMMON * len(texts):
                places.setdefault((*before, after, last), []).append(word)
    groups = DisjointSet(word for words in places.values() for word in words)
    for first, *others in places.values():
        for word in others:
            groups.merge(first, word)
    return (sorted(sorted(words) for words in groups.subsets() if len(words) > 1),
            {word: count / len(texts) for word, count in counts.items()})
