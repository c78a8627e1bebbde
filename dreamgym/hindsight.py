"""What recorded episodes tell beyond themselves, without rules of their environment: rewards under other
tasks (`counterfactual_rewards`), refused actions (`refused_actions`). Reasoning: reasoning.py.
"""
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace

from dreamgym.encoder import WordEncoder
from dreamgym.episode import Episode, Source, Step, StopReason, Task, recorded, verb_of
from dreamgym.words import LIMIT, names_of, numbers_of, shown_words, tokens_of, unshown, value_of, words_of

JUDGED_TIMES = 8                       # at most, a recorded step
UNPAID = {"another task": 0.6, "another number": 0.2, "unpaid step": 0.2}   # shares
FEW = 0.1                              # nearly all: all but this share; nearly none: at most this share
ANSWER_SHARE = 0.5                     # of "another task", where the state shows another recorded answer
NEAR_TASKS, NEAREST_TASKS = 200, 8     # another task is one of the former; in half of the draws, the latter
REFUSED_PROBABILITY = 0.6              # chance of a refused action before a recorded one
TRIES = 8                              # draws of an action that the state lacks something for
CHANCE = 0.001                         # below this probability by chance, what was always so is a rule
OWN_CHANCE = 0.05                      # the same, that all states show a word of the action taken there
TAKEN_TIMES = 3                        # episodes at least, before an action needs words that it does not say


# ---- counterfactual rewards ----

def counterfactual_rewards(episodes: list[Episode], count: int, rng: np.random.Generator,
                           sides: dict[str, bool]) -> list[Episode]:
    """Counterfactual rewards of any environment, from recorded episodes alone (ours; after hindsight
    relabelling, arXiv 1707.01495, but a success becomes a failure of another task). About half of the at most
    `count` examples are last steps of successes under their own tasks (reward 1). The others have reward 0:
    - the same steps under a similar task, which names something that neither the own task nor the step does
      (whole numbers are names only where most successes show theirs: a limit of 80 is met by 45, too);
    - the same steps under the own task with another limit (`another_number`; `sides`: of `one_sided`);
    - the same states with another recorded answer that they show, too ("stop [$9]" in place of "stop [$8]");
    - recorded steps that were not paid (`unpaid_steps`), as they are.
    All but the last kind end the episode where most unpaid steps with such an action (its first word) do. At
    most JUDGED_TIMES examples are made of a recorded step."""
    played = recorded(episodes)
    won, tasks = [e for e in played if e.success], {e.task.text: e.task for e in played}
    unpaid = unpaid_steps(played)
    fulfilled = {(e.task.text, e.steps[-1].state, e.steps[-1].action) for e in won}
    texts = sorted(tasks)
    named = names_of if shows_numbers(won) else lambda text: [w for w in names_of(text) if not w.isdigit()]
    words, place = [set(named(text)) for text in texts], {text: i for i, text in enumerate(texts)}
    vectors_ND = WordEncoder().fit(texts)([""] * len(texts), texts) if won else np.zeros((0, 0))
    ends = {verb for verb, share in ending_shares(step for _, step in unpaid).items() if share > 0.5}
    limits = sorted({limit for text in texts for limit in LIMIT.findall(text)})
    answers = read_answers(played)

    def another_task(task: Task, step: Step) -> Task | None:
        said = set(names_of(f"{task.text} {step.state} {step.shown_action} {step.next_state}"))
        near = np.argsort(-(vectors_ND @ vectors_ND[place[task.text]]), kind="stable")
        unlike = [texts[j] for j in near[:NEAR_TASKS]
                  if words[j] - said and (texts[j], step.state, step.action) not in fulfilled]
        if rng.random() < 0.5:
            unlike = unlike[:NEAREST_TASKS]
        return tasks[unlike[rng.integers(len(unlike))]] if unlike else None

    def another_answer(task: Task, step: Step) -> str | None:
        if step.action not in answers:
            return None
        right, shown = answers[step.action], tokens_of(step.state)
        others = [action for action, said in answers.items() if said <= shown and not (
            said <= right or right <= said or (task.text, step.state, action) in fulfilled)]
        return others[rng.integers(len(others))] if others else None

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
                if not other and (answer := another_answer(task, step)) and rng.random() < ANSWER_SHARE:
                    label, other, step = "another answer", task, replace(step, action=answer, grounded="")
                task = other or another_task(task, step)
                step = replace(step, reward=0.0, done=verb_of(step.action) in ends, reward_reasoning="")
        if task:
            made.append(Episode(id="", task=task, steps=[step], label=label))
    return made


def shows_numbers(won: list[Episode]) -> bool:
    """Whether the last steps of most successes show the whole numbers of their tasks."""
    numbers = lambda text: {name for name in names_of(text) if name.isdigit()}
    shown = [said <= numbers(f"{step.state}\n{step.shown_action}\n{step.next_state}")
             for e in won if (said := numbers(e.task.text)) for step in e.steps[-1:]]
    return 2 * sum(shown) >= len(shown)


def ending_shares(steps: Iterable[Step]) -> dict[str, float]:
    """The first words of actions, and the share of the steps with each that ended an episode."""
    done = defaultdict(list)
    for step in steps:
        done[verb_of(step.action)].append(step.done)
    return {verb: sum(ended) / len(ended) for verb, ended in done.items()}


def ending_verbs(episodes: Iterable[Episode]) -> set[str]:
    """The first words of actions of which nearly all ended an episode; inferred refusals do not count. Such
    an action may say an answer ("stop [$8.50]")."""
    steps = (step for episode in recorded(episodes) if episode.source != Source.INFERRED
             for step in episode.steps)
    return {verb for verb, share in ending_shares(steps).items() if share >= 1 - FEW}


def said_words(action: str, ending: set[str]) -> set[str]:
    """The words and numbers of an answer; `ending`: of `ending_verbs`. Nothing for other actions."""
    verb = verb_of(action)
    return tokens_of(action) - tokens_of(verb) if verb in ending else set()


def read_answers(episodes: list[Episode]) -> dict[str, set[str]]:
    """Last actions of successes -> the words that they say, where these were always read from the state: the
    state shows them, neither the task nor the next state says them. Where one succeeds without ("stop
    [done]"), another one would, too."""
    ending, found, others = ending_verbs(episodes), {}, set()
    for episode in episodes:
        step = episode.steps[-1]
        if episode.success and episode.source != Source.PROBER and (said := said_words(step.action, ending)):
            found[step.action] = said
            known = tokens_of(f"{episode.task.text}\n{step.next_state}")
            if not said <= tokens_of(step.state) or said & known:
                others.add(step.action)
    return {action: said for action, said in found.items() if action not in others}


def unpaid_steps(episodes: list[Episode]) -> list[tuple[Task, Step]]:
    """Recorded steps without reward, with their tasks: those that ended an episode, and those that look like
    the last step of a success. Such a step changes the state. Its action has the same words besides those of
    the task ("move", "to"). It shows each word of the task but those that most of their successes lack
    ("put"). Example: the first of two things is put down."""
    form = lambda task, step: frozenset(words_of(step.action) - words_of(task.text))
    forms = {form(e.task, e.steps[-1]) for e in episodes if e.success}
    seldom = unshown(episodes, lambda episode: shown_words(episode.steps[-1]))
    return [(e.task, step) for e in episodes for step in e.steps if not step.reward and (
        e.stop != StopReason.NOT_JUDGED if step.done else
        step.valid and form(e.task, step) in forms and words_of(e.task.text) - shown_words(step) <= seldom)]


def one_sided(episodes: list[Episode]) -> dict[str, bool]:
    """What is written before a number of a successful last step ("$") -> whether the number is above the
    decimal number of its task. Only where this is the same in all successes, and chance seldom would make it
    so: with the limits of other tasks it would differ."""
    seen = defaultdict(set)
    for episode in recorded(episodes):
        limits = LIMIT.findall(episode.task.text) if episode.success else ()
        for before, number in numbers_of(episode.steps[-1]) if len(limits) == 1 else ():
            seen[before].add((value_of(number), value_of(limits[0]), episode.task.text))
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
    own, numbers = LIMIT.findall(task.text), defaultdict(list)
    for before, number in numbers_of(step):
        numbers[before].append(value_of(number))
    is_wrong = lambda number, limit, above: number != limit and (number > limit) != above
    wrong = [limit for limit in limits if len(own) == 1 and any(
        all(is_wrong(number, value_of(limit), sides[before]) for number in numbers[before])
        for before in sides.keys() & numbers.keys())]
    return replace(task, id="", text=task.text.replace(own[0], str(rng.choice(wrong)))) if wrong else None


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
            shown, lacking = tokens_of(step.state), None
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
        said[verb_of(action)].update(tokens_of(action))
    shown = {state: tokens_of(state) for states in taken.values() for state in states}
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
        own = set() if is_end else {w for w in tokens_of(action) if 2 * said[verb][w] <= verbs[verb]}
        others = CHANCE if times >= TAKEN_TIMES else 0.0
        needed[action] = {word for word, p in chance.items() if p < (OWN_CHANCE if word in own else others)}
    return {action: words for action, words in needed.items() if words}
