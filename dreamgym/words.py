"""Words and numbers of texts. Words are in lower case."""
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

import regex as re                     # its letters may have marks, as in Hindi; those of `re` may not

from dreamgym.episode import Episode, Step, recorded

MOST_NUMBERS = 6                       # of both states, that a limit in the task is compared with
TOKEN = re.compile(r"[^\W_]+")         # a word or a number
WORD = re.compile(r"[^\W\d_]+")
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(rf"(?<![\d.,]){_WHOLE}(?:\.\d+)?")
LIMIT = re.compile(rf"(?<![\w.,]){_WHOLE}\.\d+\b(?!\.\d)")     # of a task: it is compared, not found
# a word or a number, no part of "30.00"
_NAME = re.compile(r"(?<![^\W_])(?<!\d[.,])[^\W_]+(?![^\W_]|(?<=\d)[.,]\d)")


def words_of(text: str) -> set[str]:
    """Without numbers."""
    return set(WORD.findall(text.lower()))


def tokens_of(text: str) -> set[str]:
    """Words and numbers."""
    return set(TOKEN.findall(text.lower()))


def names_of(text: str) -> list[str]:
    """Words, and numbers without decimals, in their order."""
    return _NAME.findall(text.lower())


def shown_words(step: Step) -> set[str]:
    """The words of the three texts of a step."""
    return words_of(f"{step.state} {step.shown_action} {step.next_state}")


def unshown(episodes: Iterable[Episode], read: Callable[[Episode], set[str]]) -> set[str]:
    """Words of tasks that `read` does not find in most of their successes."""
    said, shown = Counter(), Counter()
    for episode in recorded(episodes):
        if episode.success:
            words = words_of(episode.task.text)
            said.update(words)
            shown.update(words & read(episode))
    return {word for word in said if 2 * shown[word] < said[word]}


def numbers_of(step: Step) -> list[tuple[str, str]]:
    """The first numbers of both states together, each with the word or signs before it."""
    text = f"{step.state}\n{step.next_state}"
    before = lambda start: re.search(r"[^\s\d.]*$", text[max(0, start - 20):start].rstrip())[0]
    return [(before(found.start()), found[0]) for found in islice(_NUMBER.finditer(text), MOST_NUMBERS)]


def value_of(number: str) -> float:
    return float(number.replace(",", ""))
