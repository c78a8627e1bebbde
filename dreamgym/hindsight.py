"""What recorded episodes tell beyond themselves, without rules of their environment: reasoning
(`CompareWords`), rewards under other tasks (`counterfactual_rewards`), refused actions (`refused_actions`).
"""
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice

import numpy as np
from msgspec.structs import replace

from dreamgym.encoder import WordEncoder
from dreamgym.episode import Episode, Source, Step, StopReason, Task, recorded, verb_of
from dreamgym.names import Names

JUDGED_TIMES = 8                       # at most, a recorded step
UNPAID = {"another task": 0.6, "another number": 0.2, "unpaid step": 0.2}   # shares
NEAR_TASKS, NEAREST_TASKS = 200, 8     # another task is one of the former; in half of the draws, the latter
MEANT = 0.9                            # share of a word's successes with its meaning, at least (others: 0.1)
MEANT_TASKS = 5                        # tasks with a word, and others, before it has a meaning
MOST_COMPARED = 8                      # names that one is compared with
MOST_NUMBERS = 6                       # of both states, that a limit in the task is compared with
REFUSED_PROBABILITY = 0.6              # chance of a refused action before a recorded one
TRIES = 8                              # draws of an action that the state lacks something for
CHANCE = 0.001                         # below this probability by chance, what was always so is a rule
OWN_CHANCE = 0.05                      # the same, that all states show a word of the action taken there
TAKEN_TIMES = 3                        # episodes at least, before an action needs words that it does not say


# ---- reasoning ----

class CompareWords:
    """Reasoning of any environment, from the texts alone (ours). A small model compares words that stand side
    by side: "red : blue no". Names are words that replace each other in tasks (names.py).

    `episodes` (recorded ones and counterfactual rewards) tell three things:
    1. Where a name of the task is looked for: the last line, of state, action and next state, that has names
       of its kind, or the first one, or any. Of each kind, the place that best separates successes from
       failures.
    2. Names that most of their successes lack there are left out ("change" in "change the price").
    3. Other words have a meaning: what nearly all their successes show, and few others ("hot" for "heat")."""

    def __init__(self, names: Names, episodes: list[Episode] = ()):
        self.names, self.sides, self.meaning = names, one_sided(episodes), {}
        self._learn_places(episodes)
        self.meaning = self._meanings([episode for episode in recorded(episodes) if episode.success])
        self._learn_places(episodes)

    def _learn_places(self, episodes: list[Episode]) -> None:
        of_kind, of_name = defaultdict(list), defaultdict(list)    # (which, reward) -> places that have it
        for episode in episodes:
            step = episode.steps[-1]
            if step.done or episode.source == Source.COUNTERFACTUAL:
                for name, kind, lines in self._asked(episode.task, step):
                    places = {place for place in PLACES if name in PLACES[place](lines, name)}
                    of_kind[kind, step.reward].append(places)
                    of_name[name, step.reward].append(places)
        share = lambda found, place: sum(place in places for places in found) / max(1, len(found))
        gain = lambda kind, place: share(of_kind[kind, 1.0], place) - share(of_kind[kind, 0.0], place)
        kinds = {kind for kind, reward in of_kind if reward}
        self.place = {kind: max(PLACES, key=lambda place: gain(kind, place)) for kind in kinds}
        self.left_out = {name for (name, reward), found in of_name.items()
                         if reward and share(found, self.place[self.names.kind(name)]) < 0.5}

    def _meanings(self, won: list[Episode]) -> dict[str, str]:
        """Word of a task -> what the last steps of its successes show."""
        texts = defaultdict(set)
        for text in {episode.task.text for episode in won}:
            for word in _words(text):
                if self.names.kind(word) is None or word in self.left_out:
                    texts[word].add(text)
        tasks = len({episode.task.text for episode in won})
        texts = {word: of for word, of in texts.items() if MEANT_TASKS <= len(of) <= tasks - MEANT_TASKS}
        count, shown, together = Counter(), Counter(), defaultdict(Counter)
        for episode in won:
            seen = _shown(episode.steps[-1])
            shown.update(seen)
            for word in texts.keys() & _words(episode.task.text):
                count[word] += 1
                together[word].update(seen)
        meaning = {}
        for word in sorted(together):
            n, others = count[word], len(won) - count[word]
            gain = {seen: times / n - (shown[seen] - times) / others for seen, times in together[word].items()
                    if times >= MEANT * n and shown[seen] - times <= (1 - MEANT) * others}
            if gain:
                meaning[word] = word if word in gain else max(sorted(gain), key=gain.get)
        return meaning

    def __call__(self, task: Task, history: list[Step], step: Step) -> tuple[str, str]:
        """(why the next state follows, why the reward follows)"""
        return self._why_next(history, step), self._why_reward(task, step)

    def _why_next(self, history: list[Step], step: Step) -> str:
        """The line of the state that is most like the action, else one with names of its kinds; each name of
        the action beside those of its kind in this line, else in the state; the latest line of earlier states
        with the names that were not found; whether the next state is the same, known from this episode, or
        new, and its first line that the state lacks."""
        before, after = step.state.split("\n"), step.next_state.split("\n")
        pages = dict.fromkeys(page for old in reversed(history) for page in (old.next_state, old.state))
        kind = lambda thing: self.names.kind(thing.split()[0])
        of_kinds = lambda text, kinds: [one for one in _THING.findall(text.lower()) if kind(one) in kinds]
        things = [thing for thing in dict.fromkeys(_THING.findall(step.shown_action.lower()))
                  if kind(thing) is not None]
        like = _most_like(_grams(step.shown_action), reversed(before)) or next(
            (line for line in before if of_kinds(line, [*map(kind, things)])), "")
        why, missed = [like] * bool(like), set()
        for thing in things:
            alike = of_kinds(like, [kind(thing)]) or of_kinds(step.state, [kind(thing)])
            if " " not in thing:
                alike = [other.split()[0] for other in alike]
            why.append(f"{thing} : {_compared(alike, thing) or 'none no'}")
            if thing not in alike:
                missed |= {thing, thing.split()[0]}
        seen = _most_like(missed, (line for page in pages if page != step.state for line in page.split("\n")))
        why += [f"before : {seen}"] * bool(seen)
        changed = next((line for line in after if line not in before), after[0])
        outcome = f"{'known' if step.next_state in pages else 'new'} : {changed}"
        return " ; ".join([*why, outcome if after != before else "same"])

    def _why_reward(self, task: Task, step: Step) -> str:
        """Each name of the task beside those of its kind in the place where it is looked for; each limit
        beside the numbers that it is for ("30.00 : 40 more")."""
        facts = []
        for name, kind, lines in self._asked(task, step):
            if name not in self.left_out:
                found = PLACES[self.place.get(kind, "last")](lines, name)
                facts.append(f"{name} : {_compared(found, name) or 'none no'}")
        limits = _LIMIT.findall(task.text) if self.sides else ()
        numbers = [number for before, number in _numbers(step) if before in self.sides] if limits else ()
        for limit in limits if numbers else ():
            facts.append(" ".join([limit, ":", *(f"{n} {'more' if _value(n) > _value(limit) else 'less'}"
                                                 for n in numbers)]))
        return " , ".join(facts)

    def _asked(self, task: Task, step: Step) -> Iterator[tuple[str, int | str | None, list[list[str]]]]:
        """(name of the task, or the meaning of a word; its kind; the names of this kind in each line that has
        any)"""
        lines = (*step.state.split("\n"), step.shown_action, *step.next_state.split("\n"))
        words, meanings = [_NAME.findall(line.lower()) for line in lines], set(self.meaning.values())
        for name in dict.fromkeys(self.meaning.get(word, word) for word in _NAME.findall(task.text.lower())):
            kind = self.names.kind(name)
            alike = ([word for word in line if word == name or self.names.kind(word) == kind is not None]
                     for line in words)
            if kind is not None or name in meanings:
                yield name, kind, list(filter(None, alike))


PLACES: dict[str, Callable[[list[list[str]], str], list[str]]] = {      # -> the names that are compared
    "last": lambda lines, name: lines[-1] if lines else [],
    "first": lambda lines, name: lines[0] if lines else [],
    "any": lambda lines, name: [name] if any(name in line for line in lines) else lines[-1] if lines else []}


def _most_like(said: set, lines: Iterable[str]) -> str:
    """The first of the lines that share most of what was said, "" where none shares anything."""
    found = (line for line in lines if said & _grams(line))
    return max(found, key=lambda line: len(said & _grams(line)), default="")


def _compared(found: list[str], wanted: str) -> str:
    """'red no blue yes': what was found, up to the wanted word, each with the outcome of the comparison."""
    if wanted in found:
        found = found[:found.index(wanted) + 1][-MOST_COMPARED:]
    return " ".join(f"{word} {'yes' if word == wanted else 'no'}" for word in found[:MOST_COMPARED])


# ---- counterfactual rewards ----

def counterfactual_rewards(episodes: list[Episode], count: int, rng: np.random.Generator,
                           sides: dict[str, bool]) -> list[Episode]:
    """Counterfactual rewards of any environment, from recorded episodes alone (ours; after hindsight
    relabelling, arXiv 1707.01495, but a success becomes a failure of another task). About half of the at most
    `count` examples are last steps of successes under their own tasks (reward 1). The others have reward 0:
    - the same steps under a similar task, which names something that neither the own task nor the step does;
    - the same steps under the own task with another limit (`another_number`; `sides`: of `one_sided`);
    - recorded steps that were not paid (`unpaid_steps`), as they are.
    The first two kinds end the episode where recorded failures end with such an action (its first word). At
    most JUDGED_TIMES examples are made of a recorded step."""
    played = recorded(episodes)
    won, tasks = [e for e in played if e.success], {e.task.text: e.task for e in played}
    unpaid = unpaid_steps(played)
    fulfilled = {(e.task.text, e.steps[-1].state, e.steps[-1].action) for e in won}
    texts = sorted(tasks)
    words, place = [_names(text) for text in texts], {text: i for i, text in enumerate(texts)}
    vectors_ND = WordEncoder().fit(texts)([""] * len(texts), texts) if won else np.zeros((0, 0))
    ends = {verb_of(step.action) for _, step in unpaid if step.done}
    limits = sorted({limit for text in texts for limit in _LIMIT.findall(text)})

    def another_task(task: Task, step: Step) -> Task | None:
        said = _names(f"{task.text} {step.state} {step.shown_action} {step.next_state}")
        near = np.argsort(-(vectors_ND @ vectors_ND[place[task.text]]), kind="stable")
        unlike = [texts[j] for j in near[:NEAR_TASKS]
                  if words[j] - said and (texts[j], step.state, step.action) not in fulfilled]
        if rng.random() < 0.5:
            unlike = unlike[:NEAREST_TASKS]
        return tasks[unlike[rng.integers(len(unlike))]] if unlike else None

    made, own = [], iter(rng.permutation(np.tile(np.arange(len(unpaid)), JUDGED_TIMES)))
    for i in rng.permutation(np.tile(np.arange(len(won)), JUDGED_TIMES))[:count]:
        task, step, label = won[i].task, won[i].steps[-1], "none"
        if rng.random() < 0.5:
            label = str(rng.choice(list(UNPAID), p=list(UNPAID.values())))
            if label == "unpaid step" and (j := next(own, None)) is not None:
                task, step = unpaid[j]
            else:
                other = another_number(task, step, sides, limits, rng) if label == "another number" else None
                label = "another number" if other else "another task"
                task = other or another_task(task, step)
                step = replace(step, reward=0.0, done=verb_of(step.action) in ends, reward_reasoning="")
        if task:
            made.append(Episode(id="", task=task, steps=[step], label=label))
    return made


def unpaid_steps(episodes: list[Episode]) -> list[tuple[Task, Step]]:
    """Recorded steps without reward, with their tasks: those that ended an episode, and those that look like
    the last step of a success. Such a step changes the state, has the same words in its action besides those
    of the task ("move", "to"), and shows each word of the task but those that most of their successes lack
    ("put"). Example: the first of two things is put down."""
    lacks = lambda task, step: _words(task.text) - _shown(step)
    form = lambda task, step: frozenset(_words(step.action) - _words(task.text))
    last = [(e.task, e.steps[-1]) for e in episodes if e.success]
    forms = {form(*one) for one in last}
    said, lacked = (Counter(word for words in sets for word in words) for sets in (
        (_words(task.text) for task, _ in last), (lacks(*one) for one in last)))
    return [(e.task, step) for e in episodes for step in e.steps if not step.reward and (
        e.stop != StopReason.NOT_JUDGED if step.done else
        step.valid and form(e.task, step) in forms
        and all(2 * lacked[word] > said[word] for word in lacks(e.task, step)))]


def one_sided(episodes: list[Episode]) -> dict[str, bool]:
    """What is written before a number of a successful last step ("$") -> whether the number is above the
    decimal number of its task. Only where this is the same in all successes, and chance seldom would make it
    so: with the limits of other tasks it would differ."""
    seen = defaultdict(set)
    for episode in recorded(episodes):
        limits = _LIMIT.findall(episode.task.text) if episode.success else ()
        for before, number in _numbers(episode.steps[-1]) if len(limits) == 1 else ():
            seen[before].add((_value(number), _value(limits[0]), episode.task.text))
    sides = {}
    for before, found in seen.items():
        numbers, limits = np.array([pair for *pair, _ in sorted(found)]).T
        above = numbers > limits
        chance = np.searchsorted(np.sort(limits), numbers) / len(limits)      # of being above a limit
        by_task = defaultdict(float)             # numbers of one page are no independent evidence
        for (*_, text), p in zip(sorted(found), chance if above[0] else 1 - chance):
            by_task[text] = max(by_task[text], p)
        if (above == above[0]).all() and np.prod(list(by_task.values())) < CHANCE:
            sides[before] = bool(above[0])
    return sides


def another_number(task: Task, step: Step, sides: dict[str, bool], limits: list[str],
                   rng: np.random.Generator) -> Task | None:
    """The task with one of the other `limits`: one for which all numbers of the step behind some sign are on
    the wrong side (`one_sided`). None without such a limit."""
    own, numbers = _LIMIT.findall(task.text), defaultdict(list)
    for before, number in _numbers(step):
        numbers[before].append(_value(number))
    is_wrong = lambda number, limit, above: number != limit and (number > limit) != above
    wrong = [limit for limit in limits if len(own) == 1 and any(
        all(is_wrong(number, _value(limit), sides[before]) for number in numbers[before])
        for before in sides.keys() & numbers.keys())]
    return replace(task, id="", text=task.text.replace(own[0], str(rng.choice(wrong)))) if wrong else None


_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(rf"(?<![\d.,]){_WHOLE}(?:\.\d+)?")
_LIMIT = re.compile(rf"(?<![\w.,]){_WHOLE}\.\d+\b(?!\.\d)")     # of a task: it is compared, not found
_THING = re.compile(r"[^\W\d_]+(?: \d+\b)?")           # a word, with the number behind it: "drawer 2"
# a word or a number, no part of "30.00"
_NAME = re.compile(r"(?<![^\W_])(?<!\d[.,])[^\W_]+(?![^\W_]|(?<=\d)[.,]\d)")


def _names(text: str) -> set[str]:
    """Words, and numbers without decimals."""
    return set(_NAME.findall(text.lower()))


def _words(text: str) -> set[str]:
    """Without numbers."""
    return set(re.findall(r"[^\W\d_]+", text.lower()))


def _shown(step: Step) -> set[str]:
    """The words of the three texts of a step."""
    return _words(f"{step.state} {step.shown_action} {step.next_state}")


def _numbers(step: Step) -> list[tuple[str, str]]:
    """The first numbers of both states together, each with the word or signs before it."""
    text = f"{step.state}\n{step.next_state}"
    before = lambda start: re.search(r"[^\s\d.]*$", text[max(0, start - 20):start].rstrip())[0]
    return [(before(found.start()), found[0]) for found in islice(_NUMBER.finditer(text), MOST_NUMBERS)]


def _value(number: str) -> float:
    return float(number.replace(",", ""))


# ---- refused actions ----

def refused_actions(episodes: list[Episode], share: float, rng: np.random.Generator) -> list[Episode]:
    """Copies of recorded episodes, with actions put in that the environment would probably refuse (ours):
    recorded actions, in states that lack a word they need (`needed_words`). Nothing follows them. Nothing in
    a copy is imitated. A copy without such an action is left out. Logs of good players hold no refused
    action, and a dream that has seen none grants whatever is tried. `share`: of copies among all episodes, at
    most 0.5."""
    needed = needed_words(episodes) if share else {}
    made, known = [], sorted(needed)
    for episode in episodes if known else ():
        if episode.source == Source.INFERRED or rng.random() >= share / (1 - share):
            continue
        own = [step.action for step in episode.steps if step.action in needed] or known
        steps: list[Step] = []
        for step in episode.steps:
            shown, lacking = _tokens(step.state), None
            if rng.random() < REFUSED_PROBABILITY:
                pools = (own if rng.random() < 0.5 else known for _ in range(TRIES))
                tried = (pool[rng.integers(len(pool))] for pool in pools)
                lacking = next((action for action in tried if needed[action] - shown), None)
            if lacking:
                steps.append(Step(state=step.state, action=lacking, next_state=step.state, imitate=False))
            steps.append(replace(step, imitate=False))
        if len(steps) > len(episode.steps):
            made.append(replace(episode, id=f"inferred-{len(made)}", steps=steps, source=Source.INFERRED))
    return made


def needed_words(episodes: list[Episode]) -> dict[str, set[str]]:
    """The words that each recorded action needs: all states show them in which it was taken and changed
    something, and hardly by chance. The action's own words need less evidence, but for those that most
    actions of its first word have. Actions that end episodes are counted together with those of the same
    first word; all their words need the same evidence."""
    taken, ending = defaultdict(dict), defaultdict(set)      # action -> {state: an episode}
    for i, episode in enumerate(recorded(episodes)):
        for step in episode.steps:
            if step.done or step.next_state != step.state:
                taken[step.action][step.state] = i
            if step.done:
                ending[verb_of(step.action)].add(step.action)
    said, verbs = defaultdict(Counter), Counter(map(verb_of, taken))
    for action in taken:
        said[verb_of(action)].update(_tokens(action))
    shown = {state: _tokens(state) for states in taken.values() for state in states}
    frequency = Counter(word for words in shown.values() for word in words)

    def always(states: dict[str, int]) -> tuple[dict[str, float], int]:
        """(the words that all states show, with the chance of that; in how many episodes)"""
        times = len(set(states.values()))
        return {word: (frequency[word] / len(shown)) ** times
                for word in set.intersection(*(shown[state] for state in states))}, times

    ends = {verb: always({state: i for action in sorted(actions) for state, i in taken[action].items()})
            for verb, actions in ending.items()}
    needed = {}
    for action, states in taken.items():
        verb = verb_of(action)
        is_end = action in ending[verb]
        chance, times = ends[verb] if is_end else always(states)
        own = set() if is_end else {w for w in _tokens(action) if 2 * said[verb][w] <= verbs[verb]}
        others = CHANCE if times >= TAKEN_TIMES else 0.0
        needed[action] = {word for word, p in chance.items() if p < (OWN_CHANCE if word in own else others)}
    return {action: words for action, words in needed.items() if words}


@lru_cache(maxsize=100_000)
def _grams(text: str) -> set:
    """Things, their words, other numbers, and each two of them that are neighbours."""
    tokens = re.findall(rf"{_THING.pattern}|\d+", text.lower())
    return {*tokens, *(token.split()[0] for token in tokens), *zip(tokens, tokens[1:])}


def _tokens(text: str) -> set[str]:
    """Words and numbers."""
    return set(re.findall(r"[^\W_]+", text.lower()))
