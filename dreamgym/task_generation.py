"""M_task: the experience model's own weights write harder and different tasks (DreamGym, Eq. 6).

The paper shares the parameters of M_task and M_exp, and lets a language model select. Here records select:
of the candidates that some recorded success suggests to be feasible, the one with most words is kept. A
generated task has no goal in the real environment: only the dream can play it.
"""
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from dreamgym.episode import Episode, Task, recorded
from dreamgym.words import shown_words, unshown, words_of

CANDIDATES = 4               # texts sampled for each seed task (ours)
SAMPLING_TEMPERATURE = 0.8   # of sampling them (ours)


def words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+(?:[.'-]\w+)*", text.lower()))


def variation_samples(tasks: Sequence[Task], count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """`count` pairs (seed text, target text) of training tasks; none where no two tasks share a rare word.

    A rare word is in at most a tenth of the texts, or in two. The target is the longest, in words, of three
    draws among the tasks that share one with the seed: harder than the seed on average.
    """
    words_in = {task.text: sorted(set(words(task.text))) for task in tasks}
    having: dict[str, list[str]] = defaultdict(list)
    for text, found in words_in.items():
        for word in found:
            having[word].append(text)
    is_rare = lambda word: 2 <= len(having[word]) <= max(2, len(words_in) // 10)
    groups = {text: [having[word] for word in filter(is_rare, found)] for text, found in words_in.items()}
    seeds = [text for text in groups if groups[text]]
    pairs = []
    for _ in range(count if seeds else 0):
        seed = seeds[rng.integers(len(seeds))]
        others = [text for text in groups[seed][rng.integers(len(groups[seed]))] if text != seed]
        drawn = [others[i] for i in rng.integers(len(others), size=3)]
        pairs.append((seed, max(drawn, key=lambda text: len(words(text)))))
    return pairs


class Known:
    """What training tasks and their recorded episodes say of a new text: `problem`."""

    def __init__(self, tasks: Iterable[Task], episodes: Sequence[Episode]):
        texts = {task.text for task in tasks} | {step.state for e in episodes for step in e.steps}
        self.words = {word for text in texts for word in words(text)}
        self.unshown = unshown(episodes, lambda episode: shown_words(episode.steps[-1]))
        self.showing: dict[str, set[int]] = defaultdict(set)           # word -> successes
        for i, episode in enumerate(recorded(episodes)):
            for word in shown_words(episode.steps[-1]) if episode.success else ():
                self.showing[word].add(i)

    def feasible(self, text: str) -> bool:
        """Whether the last step of one recorded success shows all words of the text. Those that the last
        steps of most successes lack ("put") do not count."""
        needed = [self.showing.get(word, set()) for word in words_of(text) - self.unshown]
        return not needed or bool(set.intersection(*needed))

    def problem(self, text: str | None, taken: Collection[tuple[str, ...]]) -> str:
        """Why a text is no new task: "malformed", "unknown" (a word that no training task or page has),
        "copy" (but for case, blanks, punctuation) or "infeasible"; "" for a good one. `taken`: the words of
        each task, also of held-out ones, for none may be trained on."""
        found = words(text or "")
        if not found:
            return "malformed"
        if any(word not in self.words for word in found):
            return "unknown"
        if found in taken:
            return "copy"
        return "" if self.feasible(text) else "infeasible"


def write_tasks(experience_model, seeds: Sequence[Task], known_texts: Collection[str],
                known: Known, name: str) -> tuple[list[Task], dict[str, int]]:
    """(new tasks `name-0`, `name-1`, …, counts of candidates that were accepted or refused, by reason). Each
    seed gets at most one new task, the longest good one of its candidates. `known_texts`: of tasks that none
    may repeat."""
    made: list[Task] = []
    counts: Counter[str] = Counter()
    taken = set(map(words, known_texts))
    written = experience_model.write_variations([seed.text for seed in seeds], CANDIDATES,
                                                SAMPLING_TEMPERATURE)
    for seed, candidates in zip(seeds, written):
        taken.add(words(seed.text))
        reasons = [known.problem(text, taken) or "accepted" for text in candidates]
        counts.update(reasons)
        if good := [text for text, reason in zip(candidates, reasons) if reason == "accepted"]:
            longest = max(good, key=lambda text: len(words(text)))
            taken.add(words(longest))
            made.append(replace(seed, id=f"{name}-{len(made)}", text=longest, goal={}, generated=True,
                                parent=seed.id))
    return made, dict(counts)
