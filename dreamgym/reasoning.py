"""Reasoning traces of recorded steps, from their texts alone: words that stand side by side."""
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from dreamgym.episode import Episode, Source, Step, StopReason, Task, recorded
from dreamgym.hindsight import FEW, ending_verbs, one_sided, said_words
from dreamgym.names import Names, blanked, tools
from dreamgym.words import LIMIT, names_of, numbers_of, shown_words, tokens_of, value_of, words_of

MEANT_TASKS = 5                        # tasks with a word, tasks and successes without: else no meaning
CLEARLY = 0.02                         # by which the first word of lines must separate better than a place
MOST_COMPARED = 8                      # names that one is compared with
MOST_COUNTED = 24                      # things that are listed to count some of them


class CompareWords:
    """Reasoning of any environment, from the texts alone (ours). A small model compares words that stand side
    by side: "red : blue no". Names are words that replace each other in tasks (names.py).

    `episodes` (recorded ones and counterfactual rewards) tell six things:
    1. Where a name of the task is looked for: the last line, of state, action and next state, that has names
       of its kind, or the first one, or any; or the lines that begin with a certain word ("chosen: red").
       Of each kind, the place that best separates successes from failures; the word if it is clearly better.
    2. Names that most of their successes lack there are left out ("change" in "change the price").
    3. Other words have a meaning: what nearly all their successes show, and few others ("hot" for "heat").
    4. Some words count: their successes show a name of the task so often, their failures do not ("two").
    5. Actions that nearly always end an episode, by their first word, may say an answer ("stop [$8.50]").
    6. Some actions need a certain thing (names.tools): who cools with a microwave needs "fridge"."""

    def __init__(self, names: Names, episodes: list[Episode] = ()):
        self.things = frozenset(names.words)
        self.tools = tools(self.things, episodes)
        self.names, self.sides, self.meaning = names, one_sided(episodes), {}
        self.ending = ending_verbs(episodes)
        self._learn_places(episodes)
        self.meaning = self._meanings([episode for episode in recorded(episodes) if episode.success])
        self._learn_places(episodes)
        self.counts = self._counts(episodes)

    def _learn_places(self, episodes: list[Episode]) -> None:
        of_kind, of_name = defaultdict(list), defaultdict(list)    # (which, reward) -> places that have it
        for episode in filter(_is_judged, episodes):
            step = episode.steps[-1]
            for name, kind, lines in self._asked(episode.task, _lines(step)):
                known = [*PLACES, *(begin for begin, _ in lines)]
                places = {place for place in known if name in _names_at(place, lines, name)}
                of_kind[kind, step.reward].append(places)
                of_name[name, step.reward].append(places)
        share = lambda found, place: sum(place in places for places in found) / max(1, len(found))
        gain = lambda kind, place: share(of_kind[kind, 1.0], place) - share(of_kind[kind, 0.0], place)
        self.place = {}
        for kind in {kind for kind, reward in of_kind if reward}:
            begins = set().union(*of_kind[kind, 1.0]) - set(PLACES) if kind is not None else set()
            worth = {place: gain(kind, place) - CLEARLY * (place in begins)
                     for place in (*PLACES, *sorted(begins))}
            self.place[kind] = max(worth, key=worth.get)
        self.left_out = {name for (name, reward), found in of_name.items()
                         if reward and share(found, self.place[self.names.kind(name)]) < 0.5}

    def _meanings(self, won: list[Episode]) -> dict[str, str]:
        """Word of a task -> the word that the last steps of its successes show: nearly all of them, and few
        other successes. These others neither say the shown word themselves ("put a hot mug") nor have another
        word that means it, unless fewer than half of all successes would be left."""
        tasks = {episode.task.text for episode in won}
        frequency = Counter(word for text in tasks for word in filter(self._is_no_name, words_of(text)))
        candidates = [word for word, n in sorted(frequency.items())
                      if MEANT_TASKS <= n <= len(tasks) - MEANT_TASKS]
        says, shows = defaultdict(set), defaultdict(set)           # word -> positions in `won`
        for i, episode in enumerate(won):
            for word in words_of(episode.task.text):
                says[word].add(i)
            for word in shown_words(episode.steps[-1]):
                shows[word].add(i)
        overlap = lambda part, of: len(part & of) / max(1, len(of))
        everyone, gains = set(range(len(won))), defaultdict(dict)
        for shown, showing in shows.items():
            # what a word's tasks say, too, is looked for already
            words = [word for word in candidates if overlap(showing, says[word]) >= 1 - FEW
                     and (word == shown or overlap(says[shown], says[word]) <= FEW)]
            silent = everyone - says[shown]
            unrelated = silent.difference(*(says[word] for word in words))
            for word in words:
                others = unrelated if 2 * len(unrelated) >= len(won) else silent - says[word]
                if len(others) >= MEANT_TASKS and overlap(showing, others) <= FEW:
                    rest = everyone - says[word]         # all others rank: "hot" is rarer than "move"
                    gains[word][shown] = overlap(showing, says[word]) - overlap(showing, rest)
        return {word: word if word in gain else max(sorted(gain), key=gain.get)   # a shown word means itself
                for word, gain in sorted(gains.items())}

    def _counts(self, episodes: list[Episode]) -> dict[str, tuple[int, int | str]]:
        """{word of a task: (n, kind)}. A word counts if nearly all its successes show a name of the task of
        this kind n times in the next state, nearly no failure does, and at most half of the other successes
        do. The most frequent word comes first."""
        won, lost, all_won = defaultdict(list), defaultdict(list), []     # word -> times by kind
        for episode in filter(_is_judged, episodes):
            lines = episode.steps[-1].next_state.split("\n")
            times: Counter = Counter()
            for name, kind, found in self._asked(episode.task, lines):
                times[kind] = max(times[kind], sum(words.count(name) for _, words in found))
            all_won += [times] * episode.success
            for word in filter(self._is_no_name, words_of(episode.task.text)):
                (won if episode.success else lost)[word].append(times)
        enough = lambda found, kind, least: sum(times[kind] >= least for times in found)
        counts = {}
        for word in sorted(won.keys() & lost.keys(), key=lambda word: (-len(won[word]), word)):
            own, failed, others = won[word], lost[word], len(all_won) - len(won[word])
            for kind in sorted({kind for times in own for kind in times} - {"number"}, key=str):
                least = sorted(times[kind] for times in own)[int(FEW * len(own))]
                if (least > 1 and MEANT_TASKS <= min(len(own), len(failed), others)
                        and enough(failed, kind, least) <= FEW * len(failed)
                        and enough(all_won, kind, least) - enough(own, kind, least) <= 0.5 * others):
                    counts.setdefault(word, (least, kind))
        return counts

    def __call__(self, task: Task, history: list[Step], step: Step) -> tuple[str, str]:
        """(why the next state follows, why the reward follows)"""
        return self._why_next(history, step), self._why_reward(task, step)

    def _why_next(self, history: list[Step], step: Step) -> str:
        """First the line of the state that is most like the action, else one with names of its kinds. Then
        each name of the action beside those of its kind, in this line or else in the state, and in the last
        line that has any ("last : blue no": another color was chosen). If a name is missing, earlier pages
        are searched: first their titles, then their other lines. Then a thing that such an action needs,
        beside the one that it names. Last, whether the next state is the same, known from this episode or
        new, and its first line that the state lacks."""
        before, after = step.state.split("\n"), step.next_state.split("\n")
        pages = dict.fromkeys(page for old in reversed(history) for page in (old.next_state, old.state))
        things = lambda text: {one: self.names.kind(one.split()[0]) for one in _THING.findall(text.lower())}
        kinds = {thing: kind for thing, kind in things(step.shown_action).items() if kind is not None}
        of_line, of_state = {"": {}} | {line: things(line) for line in before}, things(step.state)
        like = next(iter(_most_like(_grams(step.shown_action), before, _grams)), "") or next(
            (line for line in before if set(kinds.values()) & set(of_line[line].values())), "")

        def alike(shown: dict[str, int | str | None], wanted: str) -> list[str]:
            return [thing if " " in wanted else thing.split()[0]
                    for thing, kind in shown.items() if kind == kinds[wanted]]

        why, missed = [like] * bool(like), set()
        for thing in kinds:
            here, anywhere = alike(of_line[like], thing), alike(of_state, thing)
            found = anywhere if thing in anywhere and thing not in here else here or anywhere
            why.append(f"{thing} : {_compared(found, thing) or 'none no'}")
            last = next((line for line in reversed(before) if alike(of_line[line], thing)), like)
            if last != like:
                why.append(f"last : {_compared(alike(of_line[last], thing), thing)}")
            if thing not in found:
                missed.add(thing)
        if missed:
            why += _searched(missed, [page.split("\n") for page in pages if page != step.state])
        form, named = blanked(step.shown_action, self.things)
        for i, name in enumerate(named):
            if tool := self.tools.get((form, i)):
                why.append(f"{tool} : {_compared([name], tool)}")
        changed = next((line for line in after if line not in before), after[0])
        outcome = f"{'known' if step.next_state in pages else 'new'} : {changed}"
        return " ; ".join([*why, outcome if after != before else "same"])

    def _why_reward(self, task: Task, step: Step) -> str:
        """Where an answer comes from; each name of the task beside those of its kind in the place where it is
        looked for; each limit beside the numbers that it is for ("30.00 : 40 more"); a word that counts
        beside what it counts. Last, "same" of a refused step that looks like a success: nothing changed, so
        nothing is paid."""
        facts = self._why_answer(task, step)
        for name, kind, lines in self._asked(task, _lines(step)):
            if name not in self.left_out:
                found = _names_at(self.place.get(kind, "last"), lines, name)
                facts.append(f"{name} : {_compared(found, name) or 'none no'}")
        facts += self._why_enough(task, step)
        numbers = [n for before, n in numbers_of(step) if before in self.sides] if self.sides else []
        for limit in LIMIT.findall(task.text) if numbers else ():
            compared = (f"{n} {'more' if value_of(n) > value_of(limit) else 'less'}" for n in numbers)
            facts.append(" ".join([limit, ":", *compared]))
        looks_paid = " no" not in " ".join(facts)    # cautious: a "no" before a "yes" counts, too
        return " , ".join([*facts, "same"] if looks_paid and not step.valid else facts)

    def _why_enough(self, task: Task, step: Step) -> list[str]:
        """['two : cup 2 no mug 1 yes mug 3 yes'], of the first name of the kind behind the word. [] where
        nothing is counted."""
        said = names_of(task.text)
        word = next((word for word in self.counts if word in said), "")
        if not word:
            return []
        times, counted = self.counts[word]
        is_counted = lambda thing: self.names.kind(thing.split()[0]) == counted
        found = list(filter(is_counted, _THING.findall(step.next_state.lower())))
        names = [name for name in [*said[said.index(word):], *said]
                 if is_counted(name) and name not in self.left_out]
        return [f"{word} : {_counted(found, name, times)}" for name in names[:1]]

    def _why_answer(self, task: Task, step: Step) -> list[str]:
        """["said : text 'price $8.50'", "asked : price"]: the line of the state that says most of an answer
        (of several the one most like the task), and its words that the task says, too. [] for no answer."""
        said = said_words(step.action, self.ending)
        if not said:
            return []
        asked = tokens_of(task.text) - said
        line = max(_most_like(said, step.state.split("\n"), tokens_of),
                   key=lambda line: len(asked & tokens_of(line)), default="")
        shared = [word for word in dict.fromkeys(names_of(line)) if word in asked]
        return [f"said : {line or 'none'}", f"asked : {' '.join(shared) or 'none'}"]

    def _is_no_name(self, word: str) -> bool:
        return self.names.kind(word) is None or word in self.left_out

    def _asked(self, task: Task, lines: list[str]) -> Iterator[tuple[str, int | str | None, list]]:
        """(name of the task, or the meaning of a word; its kind; of each line with names of this kind, the
        first word and these names)"""
        words, said = [names_of(line) for line in lines], names_of(task.text)
        meanings = {self.meaning[word] for word in said if word in self.meaning}
        for name in dict.fromkeys(self.meaning.get(word, word) for word in said):
            kind = self.names.kind(name)
            alike = ([word for word in line if word == name or self.names.kind(word) == kind is not None]
                     for line in words)
            if kind is not None or name in meanings:
                yield name, kind, [(f"{line[0]}:", found) for line, found in zip(words, alike) if found]


def _lines(step: Step) -> list[str]:
    return [*step.state.split("\n"), step.shown_action, *step.next_state.split("\n")]


def _is_judged(episode: Episode) -> bool:
    ended = episode.steps[-1].done and episode.stop != StopReason.NOT_JUDGED
    return ended or episode.source == Source.COUNTERFACTUAL


PLACES = "last", "first", "any"        # or the first word of lines: "chosen:"


def _names_at(place: str, lines: list[tuple[str, list[str]]], wanted: str) -> list[str]:
    """The names at a place that `wanted` is compared with; `lines`: of `_asked`."""
    if place == "first":
        return lines[0][1] if lines else []
    if place == "any" and any(wanted in names for _, names in lines):
        return [wanted]
    if place in PLACES:
        return lines[-1][1] if lines else []
    return [name for begin, names in lines if begin == place for name in names]


def _most_like(said: set, lines: Iterable[str], read: Callable[[str], set]) -> list[str]:
    """The lines in which `read` finds most of what was said, [] where none has anything."""
    shared = {line: len(said & read(line)) for line in lines}
    most = max(shared.values(), default=0)
    return [line for line, n in shared.items() if n == most > 0]


def _searched(missed: set[str], pages: list[list[str]]) -> list[str]:
    """['page : at drawer 2: no', 'line : drawer 3 yes']: the title most like the missing names, and whether
    it has all of them; if not, the same of the other lines."""
    said, why = missed | {thing.split()[0] for thing in missed}, []
    titles, others = [page[0] for page in pages], [line for page in pages for line in page[1:]]
    for what, lines in (("page", titles), ("line", others)):
        found = [*_most_like(said, lines, _grams), "none"][0]
        has_all = missed <= _grams(found)
        why.append(f"{what} : {found} {'yes' if has_all else 'no'}")
        if has_all:
            break
    return why


def _compared(found: list[str], wanted: str) -> str:
    """'red no blue yes': what was found, up to the wanted word, each with the outcome of the comparison."""
    if wanted in found:
        found = found[:found.index(wanted) + 1][-MOST_COMPARED:]
    return " ".join(f"{word} {'yes' if word == wanted else 'no'}" for word in found[:MOST_COMPARED])


def _counted(found: list[str], wanted: str, times: int) -> str:
    """'cup 2 no mug 1 yes mug 3 yes': all things up to the one that is enough (the last ones of a long list),
    or 'none no' at the end. A small model counts what it lists; numbers tell which mug was counted."""
    at = [i for i, thing in enumerate(found) if thing.split()[0] == wanted][times - 1:]
    listed = found[:at[0] + 1] if at else found
    said = [f"{thing} {'yes' if thing.split()[0] == wanted else 'no'}" for thing in listed[-MOST_COUNTED:]]
    return " ".join(said if at else [*said, "none no"])


_THING = re.compile(r"[^\W\d_]+(?: \d+\b(?![.,]\d))?")     # a word, with the number behind it: "drawer 2"


@lru_cache(maxsize=100_000)
def _grams(text: str) -> set:
    """Things, their words, other numbers, and each two of them that are neighbours."""
    tokens = re.findall(rf"{_THING.pattern}|\d+", text.lower())
    return {*tokens, *(token.split()[0] for token in tokens), *zip(tokens, tokens[1:])}
