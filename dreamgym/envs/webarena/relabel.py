"""Reasoning by rule for the own sites' steps, and counterfactual reward examples: a `stop` on a page under a
sentence that it fulfils, or misses, mostly by a single constraint."""
import re
from collections.abc import Iterator
from itertools import zip_longest
from urllib.parse import parse_qs, urlsplit

import numpy as np

from dreamgym.envs.webarena.actions import ON_ELEMENT, Action
from dreamgym.envs.webarena.evaluators import NOT_ACHIEVABLE
from dreamgym.envs.webarena.page import FIELDS, STOPPED, Node, Page, quotable
from dreamgym.envs.webarena.scripted import other_fact
from dreamgym.envs.webarena.sites import DATABASES, SiteDatabase
from dreamgym.envs.webarena.tasks import (
    TaskConstraints, address, checks, drawn, fact, fields, filled, find, is_missing, read_task, rule_success)
from dreamgym.envs.webarena.templates import TEMPLATES, Template
from dreamgym.envs.webarena.text import (
    action_type, is_stop, message, read_action, read_page)
from dreamgym.episode import Episode, Step, Task

NO_STOP = "no stop"
MOST_FIELDS = 4                                  # of a form, in a trace
_WORDS = re.compile(r"[\w$]+(?:-\d{4})?")        # of 'Blue Lamp', 'carl/smart-bot', '$12.99' and '555-1234'
_SEAM = re.compile(r"([ /-])")                   # between them


# ---- reasoning traces

def explain(task_text: str, history: list[Step], step: Step, own: bool = True) -> tuple[str, str]:
    """As Environment.explain. `own`: the task is one of the own sites'."""
    before, after = read_page(step.state), read_page(step.next_state)
    if is_stop(step.action):
        ended = before is not None and step.next_state == STOPPED
        return ("stop so stopped", _verdict(task_text, step) if own else "") if ended else ("", "")
    if before is None or after is None or step.reward:
        return "", ""
    return _next_page(read_task(task_text) if own else None, history, step), NO_STOP


def _yes(met: bool) -> str:
    return "yes" if met else "no"


def _verdict(task_text: str, step: Step) -> str:
    if rule_success(task_text, step.state, step.action) != (step.reward == 1):
        return ""
    wanted = read_task(task_text)
    first, *others = checks(wanted, step.state, step.action)
    facts = [f"page {_place(wanted, step.state, first.met, all(check.met for check in others))}"]
    for kind, label, asked, found, met in others:
        if label or kind == "answer":
            second = f"stop [{asked}]" if kind == "answer" else f"for {asked}"
            compared = _by_word(found, asked, met) or _yes(met)
            facts.append(f"{f'{kind} {label}'.strip()} {found} {second} {compared}")
        else:
            asked = f"without {asked[3:]}" if asked.startswith("no ") else asked
            facts.append(f"{kind} {_by_word(asked, found, met) or f'{asked} : {found} {_yes(met)}'}")
    return f"{' ; '.join(facts)} so {'success' if step.reward else 'not done'}"


def _by_word(one: str, other: str, met: bool) -> str:
    """'Blue Blue yes Lamp Mat no': a small model hardly learns to compare whole names. "" where the words do
    not decide."""
    words, others = _WORDS.findall(one), _WORDS.findall(other)
    if (words == others) != met:
        return ""
    return " ".join(f"{word} {found} {_yes(word == found)}"
                    for word, found in zip_longest(words, others, fillvalue="none"))


def _place(wanted: TaskConstraints, state: str, met: bool, others: bool) -> str:
    """The page wanted, and the page this is. What other constraints compare is `*` here, unless the address
    alone tells that it is another page."""
    template, missing = wanted.template, is_missing(wanted, state)
    pattern = (template.missing[0] if missing else template.page).split(" |OR| ")[0]
    compared = set() if missing else {name for line in template.shows for name in fields(line, as_said=True)}
    asked, shown = _places(pattern, wanted, state, compared)
    if asked == shown and others and not met:
        asked, shown = _places(pattern, wanted, state, set())
    return f"{asked} : {shown} {_yes(shown == asked or met)}"


def _places(pattern: str, wanted: TaskConstraints, state: str, compared: set[str]) -> tuple[str, str]:
    """The address wanted and its part of the page's, with `*` for parameters `compared`."""
    starred = re.sub(r"\{(\w+)[.\w]*\}", lambda m: "*" if m[1] in compared else m[0], pattern)
    asked = filled(starred, wanted.values)
    path, _, query = asked.partition("?")
    there, _, given = address(state).partition("?")
    if not re.match(re.escape(path).replace(r"\*", ".+"), there):
        return asked, there
    if not query:
        return asked, path
    keys = dict(pair.partition("=")[::2] for pair in given.split("&"))
    found = (f"{key}={value if value == '*' and key in keys else keys.get(key, 'none')}"
             for key, _, value in (pair.partition("=") for pair in query.split("&")))
    return asked, f"{path}?{'&'.join(found)}"


def _next_page(wanted: TaskConstraints | None, history: list[Step], step: Step) -> str:
    """What the page says of the action, then what comes of it, and whether that shows what the task names."""
    before, after = read_page(step.state), read_page(step.next_state)
    kind, (action, field) = action_type(step.state, step.action), read_action(step.state, step.action)
    facts = _facts(kind, action, field, before, after)
    if step.next_state == step.state:
        return f"{facts} so the same page"
    if kind == "refused":
        return ""
    nodes = after.lines.values()
    if kind in ("fill", "choose") and after.address == before.address:
        held = next((node.value for node in nodes if (node.role, node.name) == (field.role, field.name)), "")
        return f"{facts} so {field.name} holds {held or 'nothing'}"
    if kind == "tick":
        return f"{facts} so {'not checked' if field.checked else 'checked'}"
    seen = [*(earlier.state for earlier in history), step.state]
    pages = {(page.address, page.window) for state in seen if (page := read_page(state))}
    is_known = "known" if step.next_state in seen else \
        "changed" if (after.address, after.window) in pages else "new"
    result = [f"{facts} so {after.address or 'nothing'} is {is_known}"]
    if (told := message(step.next_state)) and told != message(step.state):
        result.append(f"tells {told}")
    values = [value for _, value in wanted.values if len(value) > 2] if wanted else []
    result += [f"{value} {_yes(any(value in node.name for node in nodes))}" for value in values[:1]]
    return " ; ".join(result)


def _facts(kind: str, action: Action, node: Node | None, before: Page, after: Page) -> str:
    act, text = action.kind, action.text
    if not act:
        return "not an action"
    if act in ON_ELEMENT and node is None:
        return "not on this page"
    name = node.name if node else ""
    named = f"{node.role} {name}".strip() if node else ""
    if kind == "refused":
        if act == "type" and node.options:
            return f"{name} has {text} no"
        if act == "scroll":
            return f"window {before.window + 1} of {before.windows}"
        if act in ("tab_focus", "close_tab"):
            return f"tabs {max(1, len(before.tabs))}"
        return f"{named} takes no {'text' if act == 'type' else 'click'}"
    if kind == "button" and (held := _form(before, action.element)):
        return f"{named} with {held}"
    return {"choose": f"{name} has {text} yes", "search": f"{name} for {text}",
            "back": act.replace("go_", ""), "scroll": f"window {after.window + 1} of {after.windows}",
            "tab": f"tab {after.title}", "goto": f"address {text}", "press": f"key {text}"}.get(kind, named)


def _form(page: Page, button: int) -> str:
    """What the fields just above a button hold."""
    above = [node for number, node in page.lines.items() if number < button]
    held: list[str] = []
    for node in reversed(above[-MOST_FIELDS:]):
        if node.role not in FIELDS:
            break
        value = node.value if node.checked is None else _yes(node.checked)
        held.insert(0, f"{node.name} {value or 'empty'}")
    return ", ".join(held)


# ---- counterfactuals

# What a `stop` misses, as shares on recorded pages: nothing, one kind of constraint, all but the thing
# (`kind`: another task about it), or more. With few "no" a small model says "yes" to all.
SHARES = {"none": 0.28, "answer": 0.20, "page": 0.04, "entity": 0.20, "done": 0.10, "kind": 0.05,
          "many": 0.13}
PER_PAGE = 6                                     # sentences tried on a page
SURPLUS = 10                                     # beyond this the others wait for fulfilled ones, the rarest
Values = dict[str, str]
Rows = dict[Template, list[Values]]  # what can be asked on a database; no new kinds of tasks


def counterfactuals(episodes: list[Episode], count: int, rng: np.random.Generator,
                    seed: int) -> list[Episode]:
    """As many of each database that was played on: at most half on recorded pages, the rest synthetic."""
    played: dict[str, list[Episode]] = {}
    for episode in episodes:
        played.setdefault(episode.task.goal.get("database", DATABASES[0]), []).append(episode)
    made, taken = [], dict.fromkeys(SHARES, 0)
    for done, name in enumerate(sorted(played), 1):
        world = SiteDatabase(seed, name)
        rows = {template: drawn(template, world) for template in TEMPLATES if not template.held_out}
        missing = count * done // len(played) - len(made)
        made += _on_recorded_pages(played[name], missing // 2, rng, rows, taken)
        made += synthetic(count * done // len(played) - len(made), rng, rows)
    return made


def _on_recorded_pages(episodes: list[Episode], count: int, rng: np.random.Generator,
                       rows: Rows, taken: dict[str, int]) -> list[Episode]:
    """At most `count`; no (page, sentence) twice, and none as it was played. `taken`: how many there are by
    what they miss."""
    steps = [(step, episode.task.text) for episode in episodes for step in episode.steps]
    pages = sorted({step.state for step, _ in steps if read_page(step.state)})
    used = {(step.state, text) for step, text in steps if is_stop(step.action)}
    known = {template: {tuple(row[name] for name in fields(template.intents[0])) for row in part}
             for template, part in rows.items()}
    alike = {template: _by_shared_word(part) for template, part in known.items()}
    results: list[Episode] = []
    for i in rng.permutation(len(pages)):
        offered: dict[str, list[tuple[str, str]]] = {}
        for wanted, action in _candidates(pages[i], rows, alike, rng):
            sentence = filled(str(rng.choice(wanted.template.intents)), wanted.values)
            exists = tuple(value for _, value in wanted.values) in known[wanted.template]
            if exists and (pages[i], sentence) not in used:
                offered.setdefault(_broken(wanted, pages[i], action), []).append((sentence, action))
        for _ in range(PER_PAGE):
            if len(results) >= count:
                return results
            broken = min(offered, key=lambda kind: (taken[kind] + 1) / SHARES[kind], default="none")
            waits = taken[broken] / SHARES[broken] > taken["none"] / SHARES["none"] + SURPLUS
            if broken not in offered or (broken != "none" and waits):
                break
            sentence, action = offered[broken].pop(int(rng.integers(len(offered[broken]))))
            if not offered[broken]:
                del offered[broken]
            if (pages[i], sentence) not in used:
                used.add((pages[i], sentence))
                taken[broken] += 1
                results.append(_example(pages[i], sentence, action, broken))
    return results


def _example(state: str, sentence: str, action: str, label: str) -> Episode:
    success = bool(rule_success(sentence, state, action))
    assert success == (label == "none"), (sentence, state, action, label)
    step = Step(state=state, action=action, next_state=STOPPED, reward=float(success), done=True)
    return Episode(id="", task=Task(id="", text=sentence), steps=[step], label=label)


def _by_shared_word(rows: set[tuple[str, ...]]) -> dict[tuple[int, str], list[str]]:
    """(place of a parameter, word) -> the parameter's values with that word."""
    found: dict[tuple[int, str], set[str]] = {}
    for row in rows:
        for i, value in enumerate(row):
            for word in _SEAM.split(value)[::2]:
                found.setdefault((i, word), set()).add(value)
    return {key: sorted(values) for key, values in found.items() if len(values) > 1}


def _candidates(state: str, rows: Rows, alike: dict,
                rng: np.random.Generator) -> Iterator[tuple[TaskConstraints, str]]:
    """Sentences about a page with a `stop`: what the page says in every template of its site, also with a
    name that shares a word, and with a value of another sentence."""
    site = re.split(r"[/?]", address(state))[0]
    for template in TEMPLATES:
        others = rows.get(template)
        if not others or template.page.split("/")[0] != site:
            continue
        row = others[rng.integers(len(others))]  # gives values that the page does not show
        other = {name: row[name] for name in fields(template.intents[0])}
        own = {**other, **_captured(template, state)}
        namesakes = [{**own, name: near} for i, name in enumerate(other)
                     for word in _SEAM.split(own[name])[::2]
                     for near in alike[template].get((i, word), []) if near != own[name]]
        versions = [own] + ([namesakes[rng.integers(len(namesakes))]] if namesakes else [])
        changed = str(rng.choice(list(other))) if other else ""
        versions.append({**own, changed: other[changed]} if changed and rng.random() < 0.5 else other)
        for values in versions:
            wanted = TaskConstraints(template, tuple((name, values[name]) for name in other))
            right = fact(wanted, state)
            yield wanted, f"stop [{right or other_fact(wanted, state, rng)}]"
            if template.answer and right:
                yield wanted, f"stop [{other_fact(wanted, state, rng)}]"


def _captured(template: Template, state: str) -> Values:
    """The values of a template's parameters that a page shows."""
    names, values = set(fields(template.intents[0])), {}
    for pattern in (*template.shows, template.answer):
        if pattern and not pattern.startswith("no "):
            found = find(pattern, state, tuple(values.items())) or {}
            values |= {name: value for name, value in found.items() if name in names}
    if template.missing and find(template.missing[1], state) is not None:  # the address alone says what of
        key = template.missing[0].split("?")[1].split("=")[0]
        values[fields(template.missing[0])[0]] = parse_qs(urlsplit(address(state)).query).get(key, [""])[0]
    return values


def _broken(wanted: TaskConstraints, state: str, action: str) -> str:
    """One of SHARES."""
    rows = checks(wanted, state, action)
    missed = {check.kind for check in rows if not check.met}
    # the same kind of page: as long an address, and mostly the same (a project's name is two parts)
    here, asked = (place.split("?")[0].rstrip("/").split("/") for place in (address(state), rows[0].asked))
    near = (len(here) == len(asked)
            and sum(a != b for a, b in zip(here, asked)) <= 1 + (here[0] == "gitlab"))
    if len(missed) < 2 and (near or "page" not in missed):
        return next(iter(missed), "none")
    if missed == {"page", "entity"} and near:
        return "entity"
    about = [check for check in rows if check.kind in ("entity", "done")]
    return "kind" if any(check.met and check.asked in state for check in about) else "many"


# ---- synthetic pages

# How often a part of a synthetic page says something else than its task, each on its own
OFF = {"value": 0.65, "line": 0.08, "page": 0.06, "answer": 0.55}
LABELS = sorted({t.answer for t in TEMPLATES
                 if t.answer.startswith("text '") and fields(t.answer) == ["answer"]})


def synthetic(count: int, rng: np.random.Generator, rows: Rows) -> list[Episode]:
    """Pages of a few lines, a third of the tokens of a real page, teach a small model to copy and compare
    names."""
    templates = [template for template, part in rows.items() if part and fields(template.intents[0])]
    results: list[Episode] = []
    while len(results) < count:
        template = templates[rng.integers(len(templates))]
        values, *others = [rows[template][rng.integers(len(rows[template]))] for _ in range(4)]
        sentence = filled(str(rng.choice(template.intents)), values)
        state, answers = _small_page(template, values, others, rng)
        wanted = read_task(sentence)
        if wanted is None or read_page(state) is None:
            continue
        said = fact(wanted, state)
        if template.answer and (not said or rng.random() < OFF["answer"]):
            said = str(rng.choice(answers))
        action = f"stop [{said}]"
        results.append(_example(state, sentence, action, _broken(wanted, state, action)))
    return results


def _small_page(template: Template, values: Values, others: list[Values],
                rng: np.random.Generator) -> tuple[str, list[str]]:
    """A page for a task's values, in which each part may be off, and wrong answers. `others`: of other
    tasks."""
    off = {what: rng.random() < share for what, share in OFF.items()}
    shown = dict(values)
    if off["value"]:
        name = str(rng.choice(fields(template.intents[0])))
        shown[name] = _off_by_a_word(values[name], others[0][name], rng)
    place = template.page
    patterns = [p for p in template.shows if not p.startswith("no ") or rng.random() < OFF["line"]]
    if template.missing and values.get("answer") == NOT_ACHIEVABLE:
        place, patterns = template.missing[0], [template.missing[1]]
    elif template.answer:
        labels = [label for label in LABELS if label != template.answer]
        patterns += [str(label) for label in rng.permutation(labels)[:2]]
        patterns.insert(int(rng.integers(len(patterns) + 1)), template.answer)
    if off["line"] and len(patterns) > 1:
        patterns.pop(int(rng.integers(len(patterns))))
    if off["page"]:
        place = str(rng.choice([t.page for t in TEMPLATES if set(fields(t.page)) <= set(values)]))
    lines, wrong = ["link 'Home'"], [str(other["answer"]) for other in others if "answer" in other]
    for pattern in patterns:
        said = dict(shown)
        if pattern != template.answer and wrong:
            said["answer"] = wrong[len(lines) % len(wrong)]
        pattern = pattern.removeprefix("no ").replace("*{", "{").replace("}*", "}")
        part = filled(pattern, {name: quotable(value) for name, value in said.items()})
        part = part.replace("*", str(rng.integers(1, 9))).split(" > ")
        lines += part[1:] if part[0] in lines else part
    where = filled(place.split(" |OR| ")[0], shown)
    where += str(rng.integers(1, 99)) if where.endswith("/") else ""
    title = next((value for value in shown.values() if len(value) > 2), "Home")
    state = "\n".join([f"page: {title}", f"url: {where}", *lines])
    on_page = [value for value in wrong if f" {quotable(value)}" in state]  # another line's answer
    return state, on_page or [*wrong, title]


def _off_by_a_word(value: str, other: str, rng: np.random.Generator) -> str:
    """`other`, or `value` with one word of it."""
    words, others = _SEAM.split(value), _SEAM.split(other)
    if len(words) != len(others) or rng.random() < 0.4:
        return other
    at = 2 * int(rng.integers(len(words) // 2 + 1))
    words[at] = others[at]
    return "".join(words)
