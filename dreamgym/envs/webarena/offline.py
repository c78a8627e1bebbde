"""Offline data of the own sites: episodes of the rule-based players with the teacher's traces, and real pages on which another sentence's `stop` is judged.

collect.py calls `play` by the shares of MIX, and `relabelled`. Relabelling makes the reward a judgement: the same real page under a sentence that it fulfils, or
under one that it misses, mostly by a single constraint; without it the reward would follow from the task alone, because only the task that is played is ever won.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from types import MappingProxyType
from urllib.parse import parse_qs, urlsplit

import numpy as np

from dreamgym.envs import play_explained, webarena_import, webarena_text as text
from dreamgym.envs.webarena.evaluators import NOT_ACHIEVABLE, read_records
from dreamgym.envs.webarena.names import other_names
from dreamgym.envs.webarena.page import quotable
from dreamgym.envs.webarena.scripted import make_player, other_fact
from dreamgym.envs.webarena.sites import SiteDatabase
from dreamgym.envs.webarena.tasks import Wanted, address, drawn, fact, fields, filled, find, kinds_of_checks, read_task
from dreamgym.envs.webarena.teacher import check_trace, explain
from dreamgym.envs.webarena.templates import TEMPLATES, Template
from dreamgym.episode import Episode, Step, Task, renamed

MIX = MappingProxyType({"oracle": 0.05, "searcher": 0.15, "imperfect": 0.45, "random": 0.15, "prober": 0.20})      # shares of episodes
# Of the relabelled steps: fulfilled, or missed by the answer, the page, who or what it is about (often by one word of its name), what was to be done; by another
# kind of task about the same thing; or by nearly everything. Where few of the words compared differ, a small model says "yes" to all and never learns to compare
SHARES = MappingProxyType({"none": 0.28, "answer": 0.20, "page": 0.04, "entity": 0.20, "done": 0.10, "kind": 0.05, "many": 0.13})
PER_PAGE = 6                                     # sentences tried on a page
_SEAM = re.compile(r"([ /-])")                   # between the words of a name: 'Blue Lamp', 'carl/smart-bot'


def play(env, task: Task, kind: str, rng: np.random.Generator, name: str) -> Episode:
    """One real episode of a rule-based player (`kind`: one of MIX), each step explained."""
    session = env.start([task])[0]
    return play_explained(env, session, kind, make_player(kind, task.text, rng, session), explain, name)


def explain_recorded(task_text: str, history: list[str], step: Step) -> str:
    """The trace of a step that somebody else recorded; '' where the rules would have expected another outcome. history: the earlier states of its episode."""
    if not text.possible(step.state, step.action, step.next_state, step.reward):
        return ""
    if text.judged(step.state, step.action):
        expected = text.rule_success(task_text, step.state, step.action) == (step.reward == 1)
    else:
        expected = text.action_type(step.state, step.action) != "refused" or text.unnumbered(step.next_state) == text.unnumbered(step.state)
    if not expected:
        return ""
    trace = explain(task_text, history, step.state, step.action, step.next_state, step.reward)
    return trace if check_trace(trace, step.state, step.action, step.next_state, step.reward) else ""


def read_traces(path: str, form: str, drop: str = "") -> list[Episode]:
    """Recorded runs on WebArena (webarena_import's formats) as episodes, without those of the tasks in the task file `drop`: Lite's are a test set, and are
    numbered there by their place among the 812. Raises ValueError."""
    dropped = {record.get("old_task_id", record["task_id"]) for record in read_records(drop)} if drop else set()
    return webarena_import.read_traces(path, form, dropped)


# ---- relabelling -------------------------------------------------------------------------------------------------------------------------------

def relabelled(env, episodes: list[Episode], count: int, rng: np.random.Generator, prefix: str, forbidden: set[str], seen: set[str]) -> list[Episode]:
    """At most `count` one-step episodes: a `stop` on a real page of `episodes` that is not in `seen` (which grows by them), under a sentence not in `forbidden`
    that it fulfils (about 30 %) or misses; info["broken"] = none | answer | page | entity | done | kind | many.

    No (page, sentence) occurs twice, and none as it was played. Fewer than `count` come back where the pages do not offer more."""
    pages = sorted({step.state for episode in episodes for step in episode.steps} - seen)
    seen |= set(pages)
    used = {(step.state, episode.task.text) for episode in episodes for step in episode.steps if text.judged(step.state, step.action)}
    asked: dict[Template, list[Wanted]] = {}     # the sentences played: where values come from that a page does not show
    for wanted in map(read_task, sorted({episode.task.text for episode in episodes if text.readable(episode.task.text)} - forbidden)):
        if not wanted.template.held_out:         # of those a judge has not seen one sentence
            asked.setdefault(wanted.template, []).append(wanted)
    world = SiteDatabase(env.seed)
    askable = {template: {tuple(row[name] for name in fields(template.intents[0])) for row in drawn(template, world)} for template in TEMPLATES}
    alike = {template: _by_word(rows) for template, rows in askable.items()}
    taken = dict.fromkeys(SHARES, 0)
    results: list[Episode] = []
    for i in rng.permutation(len(pages)):
        offered: dict[str, list[tuple[str, str]]] = {}
        for wanted, action in _wishes(pages[i], asked, alike, rng):
            sentence = filled(str(rng.choice(wanted.template.intents)), dict(wanted.values))
            if tuple(value for _, value in wanted.values) in askable[wanted.template] and sentence not in forbidden and (pages[i], sentence) not in used:
                offered.setdefault(_broken(wanted, pages[i], action), []).append((sentence, action))
        for _ in range(PER_PAGE):
            if len(results) >= count:
                return results
            broken = min(offered, key=lambda kind: (taken[kind] + 1) / SHARES[kind], default="none")
            if broken not in offered or (broken != "none" and taken[broken] / SHARES[broken] > taken["none"] / SHARES["none"] + 10):
                break                            # pages that fulfil something are the rarest: the others wait for them
            sentence, action = offered[broken].pop(int(rng.integers(len(offered[broken]))))
            if not offered[broken]:
                del offered[broken]
            if (pages[i], sentence) in used:
                continue
            used.add((pages[i], sentence))
            taken[broken] += 1
            results.append(_relabelled(pages[i], sentence, action, broken, f"{prefix}-{len(results)}"))
    return results


def _relabelled(state: str, sentence: str, action: str, broken: str, name: str) -> Episode:
    success = bool(text.rule_success(sentence, state, action))
    assert success == (broken == "none"), (sentence, state, action, broken)
    reasoning = explain(sentence, [], state, action, text.STOPPED, float(success))
    only = Step(state, action, text.STOPPED, float(success), True, text.ground(state, action), reasoning, True, {"broken": broken})
    return Episode(name, Task(name, sentence, "webarena", state), [only], source="relabelled", stop="success" if success else "failure", score=float(success))


def _by_word(rows: set[tuple[str, ...]]) -> dict[tuple[int, str], list[str]]:
    """(place of a parameter, word) -> the parameter's values with that word."""
    found: dict[tuple[int, str], set[str]] = {}
    for row in rows:
        for i, value in enumerate(row):
            for word in _SEAM.split(value)[::2]:
                found.setdefault((i, word), set()).add(value)
    return {key: sorted(values) for key, values in found.items() if len(values) > 1}


def _wishes(state: str, asked: dict[Template, list[Wanted]], alike: dict, rng: np.random.Generator) -> Iterator[tuple[Wanted, str]]:
    """Sentences about a page, with the `stop` to be judged: what the page says put into every template of its site, the same with a name that shares a word, and the
    same with one value of another sentence."""
    site = text.page_kind(state)
    for template in TEMPLATES:
        others = asked.get(template)
        if not others or template.page.split("/")[0] != site:
            continue
        other = dict(others[rng.integers(len(others))].values)
        own = {**other, **_captured(template, state)}
        changed = str(rng.choice(list(other))) if other else ""
        namesakes = [{**own, name: near} for i, name in enumerate(other) for word in _SEAM.split(own[name])[::2] for near in alike[template].get((i, word), [])
                     if near != own[name]]
        near = [namesakes[rng.integers(len(namesakes))]] if namesakes else []
        for values in (own, *near, {**own, changed: other[changed]} if changed and rng.random() < 0.5 else other):
            wanted = Wanted(template, tuple((name, values[name]) for name in other))
            right = fact(wanted, state)
            yield wanted, f"stop [{right or other_fact(wanted, state, rng)}]"
            if template.answer and right:
                yield wanted, f"stop [{other_fact(wanted, state, rng)}]"


def _captured(template: Template, state: str) -> dict[str, str]:
    """The values of a template's parameters that a page shows."""
    names, values = set(fields(template.intents[0])), {}
    for pattern in (*template.shows, template.answer):
        found = {} if pattern.startswith("no ") or not pattern else find(pattern, state, tuple(values.items())) or {}
        values |= {name: value for name, value in found.items() if name in names}
    if template.missing and find(template.missing[1], state) is not None:        # what was searched for is in the address only
        key = template.missing[0].split("?")[1].split("=")[0]
        values[fields(template.missing[0])[0]] = parse_qs(urlsplit(address(state)).query).get(key, [""])[0]
    return values


def _broken(wanted: Wanted, state: str, action: str) -> str:
    """The kind of constraint that is missed: one of SHARES."""
    rows = kinds_of_checks(wanted, state, action)
    missed = {check.kind for check in rows if not check.row.met}
    near = _alike(address(state), rows[0].row.asked)
    if len(missed) < 2 and (near or "page" not in missed):
        return next(iter(missed), "none")
    if missed == {"page", "entity"} and near:
        return "entity"
    return "kind" if any(check.row.met and check.row.asked in state and check.kind in ("entity", "done") for check in rows) else "many"


def _alike(one: str, other: str) -> bool:
    """Whether two addresses lead to the same kind of page: as long, and mostly the same (a project's name is two parts)."""
    one, other = one.split("?")[0].rstrip("/").split("/"), other.split("?")[0].rstrip("/").split("/")
    return len(one) == len(other) and sum(a != b for a, b in zip(one, other)) <= 1 + (one[0] == "gitlab")


# ---- miniatures --------------------------------------------------------------------------------------------------------------------------------

OFF = MappingProxyType({"value": 0.65, "line": 0.08, "page": 0.06, "answer": 0.55})     # how often a miniature's page says something else than its task, each on its own
LABELS = sorted({template.answer for template in TEMPLATES if template.answer.startswith("text '") and fields(template.answer) == ["answer"]})


def miniatures(seed: int, count: int, rng: np.random.Generator) -> list[Episode]:
    """`count` one-step episodes like `relabelled` ones on pages of a few lines that no site has, made from the templates, with random names: they teach a small model
    to copy and compare names in a third of the tokens of a real page, and a quarter of the comparisons fail. For training only."""
    world = SiteDatabase(seed)
    drawn_rows = {template: rows for template in TEMPLATES if not template.held_out and fields(template.intents[0]) and (rows := drawn(template, world))}
    templates, results = list(drawn_rows), []
    while len(results) < count:
        template = templates[rng.integers(len(templates))]
        rows = drawn_rows[template]
        values, *others = [rows[rng.integers(len(rows))] for _ in range(4)]
        sentence = filled(str(rng.choice(template.intents)), values)
        state, answers = _little_page(template, values, others, rng)
        if not text.readable(sentence) or text.read_page(state) is None:
            continue
        said = fact(read_task(sentence), state)
        if template.answer and (not said or rng.random() < OFF["answer"]):
            said = str(rng.choice(answers))
        action = f"stop [{said}]"
        broken = "none" if text.rule_success(sentence, state, action) else "many"
        results.append(renamed(_relabelled(state, sentence, action, broken, f"miniature-{len(results)}"), other_names(rng)))
    return results


def _little_page(template: Template, values: dict[str, str], others: list[dict[str, str]], rng: np.random.Generator) -> tuple[str, list[str]]:
    """A page for a task's values, in which each part may be off, and what wrong answers may say. `others`: values of other tasks of the template."""
    off = {what: rng.random() < share for what, share in OFF.items()}
    shown = dict(values)
    if off["value"]:
        name = str(rng.choice(fields(template.intents[0])))
        shown[name] = _off_by_a_word(values[name], others[0][name], rng)
    place, patterns = template.page, [pattern for pattern in template.shows if not pattern.startswith("no ") or rng.random() < OFF["line"]]
    if template.missing and values.get("answer") == NOT_ACHIEVABLE:
        place, patterns = template.missing[0], [template.missing[1]]
    elif template.answer:
        patterns += [str(label) for label in rng.permutation([label for label in LABELS if label != template.answer])[:2]]
        patterns.insert(int(rng.integers(len(patterns) + 1)), template.answer)
    if off["line"] and len(patterns) > 1:
        patterns.pop(int(rng.integers(len(patterns))))
    if off["page"]:
        place = str(rng.choice([t.page for t in TEMPLATES if set(fields(t.page)) <= set(values)]))
    lines, wrong = ["link 'Home'"], [str(other["answer"]) for other in others if "answer" in other]
    for pattern in patterns:
        said = {**shown, **({} if pattern == template.answer or not wrong else {"answer": wrong[len(lines) % len(wrong)]})}
        pattern = pattern.removeprefix("no ").replace("*{", "{").replace("}*", "}")
        part = filled(pattern, {name: quotable(value) for name, value in said.items()}).replace("*", str(rng.integers(1, 9))).split(" > ")
        lines += part[1:] if part[0] in lines else part
    address_ = filled(place.split(" |OR| ")[0], shown)
    title = next((value for value in shown.values() if len(value) > 2), "Home")
    state = "\n".join([f"page: {title}", f"url: {address_}{rng.integers(1, 99) if address_.endswith('/') else ''}", *(f"[{i}] {line}" for i, line in enumerate(lines, 1))])
    return state, [value for value in wrong if f" {quotable(value)}" in state] or [*wrong, title]      # what another line says is the mistake to be found


def _off_by_a_word(value: str, other: str, rng: np.random.Generator) -> str:
    """`other`, or `value` with one word of it."""
    words, others = _SEAM.split(value), _SEAM.split(other)
    if len(words) != len(others) or rng.random() < 0.4:
        return other
    at = 2 * int(rng.integers(len(words) // 2 + 1))
    return "".join([*words[:at], others[at], *words[at + 1:]])
