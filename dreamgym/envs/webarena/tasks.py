"""Task templates of the own sites, each one declaration, and what follows from it: tasks in WebArena's JSON,
a plan, a rule check.

`read_task` finds the template of a sentence, `checks` holds the page of a `stop` against it, `make_tasks`
draws tasks. The same declarations (templates.py) drive the players and the reasoning traces.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple
from urllib.parse import quote_plus

from dreamgym.envs.webarena.evaluators import NOT_ACHIEVABLE, exact_match, must_include, url_match
from dreamgym.envs.webarena.page import quotable
from dreamgym.envs.webarena.sites.map import Atlas, minutes
from dreamgym.envs.webarena.templates import TEMPLATES, Template
from dreamgym.envs.webarena.text import read_action, read_page
from dreamgym.episode import Task

COUNTS = {"train": 300, "valid": 100, "test": 100}
NEW_KINDS = 0.4                                  # share of the test tasks whose template is never trained on
HELD_OUT_NAMES = 0.125                           # share of names only for valid; as many for test
MISSING = 1 / 3                                  # share of absent things, in templates that may ask for them
MAX_TASK_CHARS = 400
DONE = "done"                                    # what `stop` says when no answer was asked for
ENTITIES = frozenset("product noun category order customer review month forum post member project issue "
                     "place goal".split())


class Row(NamedTuple):
    """A constraint of a task against a page."""
    asked: str
    found: str
    met: bool


class Check(NamedTuple):
    """A constraint with its kind, and with the words that stand before what is found on the page ("" where
    it stands alone): ("answer", "price", ("$20.00", "$25.00", False)). The kinds are page, entity (who or
    what the page is about), done (what was to be done) and answer."""
    kind: str
    before: str
    row: Row


@dataclass(frozen=True)
class TaskConstraints:
    """What a sentence asks for."""
    template: Template
    values: tuple[tuple[str, str], ...]


# ---- patterns ----------------------------------------------------------------------------------------------

class Word(str):
    """A parameter in a format string, with its forms."""
    slug = property(lambda self: Word(self.lower().replace(" ", "-")))
    plus = property(lambda self: Word(quote_plus(self)))
    low = property(lambda self: Word(self.lower()))
    cap = property(lambda self: Word(self[:1].upper() + self[1:]))


_FIELD = re.compile(r"\{(\w+)((?:\.\w+)*)\}|\*| > ")
_LINE_END = r"(?=$| value '| checked$| options ')"


def filled(text: str, values: Mapping[str, str]) -> str:
    """A template's text with parameters put in."""
    return text.format(**{name: Word(value) for name, value in values.items()})


def fields(text: str, as_said: bool = False) -> list[str]:
    """The names of a text's parameters, each once, in order. `as_said`: only of those that stand there as
    the task says them, so that they can be read off a page."""
    names = [match[1] for match in _FIELD.finditer(text) if match[1] and not (as_said and match[2])]
    return list(dict.fromkeys(names))


@lru_cache(maxsize=20_000)
def _regex(pattern: str, values: tuple[tuple[str, str], ...], end: str) -> re.Pattern:
    known, named, parts, at = dict(values), set(), [], 0
    for match in _FIELD.finditer(pattern):
        parts.append(re.escape(pattern[at:match.start()]))
        name, at = match[1], match.end()
        if match[0] == " > ":
            parts.append(r"\n")
        elif name in known:
            parts.append(re.escape(quotable(filled(match[0], known))))
        elif name and not match[2] and name not in named:
            parts.append(rf"(?P<{name}>[^\n]+?)")
            named.add(name)
        else:
            parts.append(r"[^\n]*?")
    return re.compile(f"^{''.join(parts)}{re.escape(pattern[at:])}{end}", re.MULTILINE)


def address(state: str) -> str:
    """The address that a state shows."""
    return read_page(state).address


def find(pattern: str, state: str, values: tuple[tuple[str, str], ...] = ()) -> dict[str, str] | None:
    """What a pattern's open parameters are on a page, None where no line fits; `values` are the parameters
    that are known."""
    match = _regex(pattern, values, _LINE_END).search(state)
    return match and match.groupdict()


# ---- sentences and checks ----------------------------------------------------------------------------------

@lru_cache(maxsize=20_000)
def read_task(text: str) -> TaskConstraints:
    """The template and the parameters of a sentence; where several fit, the one that says the most itself.
    Raises ValueError for a sentence of no template."""
    found = []
    if len(text) <= MAX_TASK_CHARS:
        for template in TEMPLATES:
            for intent in template.intents:
                if match := _regex(intent, (), r"\Z").match(text):
                    names = fields(template.intents[0])
                    found.append(TaskConstraints(template, tuple((name, match[name]) for name in names)))
    if not found:
        raise ValueError(f"task {text[:80]!r}: of none of the {len(TEMPLATES)} templates")
    return min(found, key=lambda wanted: sum(len(value) for _, value in wanted.values))


def try_task(text: str) -> TaskConstraints | None:
    """`read_task`, or None where the sentence is of no template."""
    try:
        return read_task(text)
    except ValueError:
        return None


def is_missing(wanted: TaskConstraints, state: str) -> bool:
    """Whether the page says that what is wanted does not exist."""
    if not wanted.template.missing:
        return False
    place, line = wanted.template.missing
    return _on(place, wanted, state) and find(line, state, wanted.values) is not None


def fact(wanted: TaskConstraints, state: str) -> str:
    """The answer that a page shows, "" for none; `done` where none is asked for."""
    if is_missing(wanted, state):
        return NOT_ACHIEVABLE
    if not wanted.template.answer:
        return DONE
    return (find(wanted.template.answer, state, wanted.values) or {}).get("answer", "")


def checks(wanted: TaskConstraints, state: str, action: str) -> list[Check]:
    """Each constraint of a task against the page on which `stop [answer]` is said; the first is that of
    the address."""
    template, values = wanted.template, wanted.values
    missing = is_missing(wanted, state)
    place, lines = (template.missing[0], template.missing[1:]) if missing else (template.page, template.shows)
    asked = filled(place, dict(values)).split(" |OR| ")[0]
    rows = [Check("page", "", Row(asked, address(state), _on(place, wanted, state)))]
    rows += [_line_check(pattern, values, state) for pattern in lines]
    if template.answer:
        said, found = read_action(state, action).text, fact(wanted, state)
        same = must_include if template.match == "must_include" and not missing else exact_match
        before = "" if missing else _before(template.answer, "answer")
        met = bool(found) and same(found, said)
        rows.append(Check("answer", before, Row(said or "none", found or "none", met)))
    return rows


def rule_success(task_text: str, state: str, action: str) -> bool | None:
    """Whether a `stop` fulfils the task, by rule. None for other actions, and where task or page cannot be
    read."""
    wanted, command = try_task(task_text), read_action(state, action)
    if wanted is None or command.kind != "stop" or read_page(state) is None:
        return None
    return all(check.row.met for check in checks(wanted, state, action))


def _before(pattern: str, name: str) -> str:
    """The words before a parameter of a pattern: in its own line, else in the line before."""
    before = pattern.partition(f"{{{name}")[0]
    own = before.rpartition("'")[2].strip(" *$")
    return own if own or "' > " not in before else _FIELD.sub("", _literal(before)).strip()


def _on(place: str, wanted: TaskConstraints, state: str) -> bool:
    places = filled(place, dict(wanted.values)).split(" |OR| ")
    return url_match(" |OR| ".join(f"http://{one}" for one in places), f"http://{address(state)}")


def _kind(pattern: str) -> str:
    if pattern.startswith("no "):
        return "page"
    if "heading" not in pattern:
        return "done"
    return "entity" if ENTITIES & set(fields(pattern)) else "done" if fields(pattern) else "page"


def _line_check(pattern: str, values: tuple[tuple[str, str], ...], state: str) -> Check:
    """What stands in the place of the parameters is what was found; of a pattern without any ('status
    Canceled'), in the place of its last word; of a button, the one whose name is a part of it ('Star' for
    'Unstar')."""
    kind = _kind(pattern)
    if pattern.startswith("no "):
        there = find(pattern[3:], state, values) is not None
        literal = _literal(pattern)
        return Check(kind, "", Row(f"no {literal}", literal if there else "none", not there))
    names = [name for name in fields(pattern, as_said=True) if name in dict(values)]
    met, role, literal = find(pattern, state, values) is not None, pattern.split(" ")[0], _literal(pattern)
    before, _, last = literal.rpartition(" ")
    if not names and kind == "done" and (before or role == "button"):
        if not before:
            other = _likest_button(literal, state)
        else:
            other = (find(pattern.replace(f" {last}'", " {found}'"), state) or {}).get("found", "none")
        return Check(kind, before or role, Row(last, last if met else other, met))
    label = ""
    if kind == "done" and names and (len(names) == 1 or "' > " not in pattern):
        # one value, and what stands before it
        label, names = filled(_before(pattern, names[-1]), dict(values)), names[-1:]
    words = " ".join(dict(values)[name] for name in names) or literal
    known = tuple((name, value) for name, value in values if label and name not in names)
    other = {} if met else find(pattern, state, known) or {}
    found = words if met else " ".join(filter(None, map(other.get, names))) or "none"
    return Check(kind, label, Row(words, found, met))


def _likest_button(name: str, state: str) -> str:
    buttons = re.findall(r"^button '(.*)'$", state, re.MULTILINE)
    return next((button for button in buttons if button.lower() in name.lower()), "none")


def _literal(pattern: str) -> str:
    """What a pattern without parameters shows: the last name in it."""
    return re.findall(r"'([^']*)'", pattern)[-1]


# ---- tasks -------------------------------------------------------------------------------------------------

def drawn(template: Template, world) -> list[dict[str, str]]:
    """All sets of parameters, in the query's order; `answer` is N/A where the query has none."""
    made = world.apps["map"].extensions
    if "atlas" not in made:                      # the site makes it at the first visit; streets never change
        made["atlas"] = Atlas(world.db)
    atlas = made["atlas"]
    named = {place.name: place for place in atlas.places}

    def way_time(a: str, b: str, by: str) -> str:
        return f"{minutes(atlas.metres(named[a], named[b]), by)} minutes"

    def nearest(name: str, kind: str) -> str:
        others = [other for other in atlas.places if other.category == kind]
        return min((atlas.metres(named[name], other), other.name) for other in others)[1]

    for function in (way_time, nearest):
        world.db.create_function(function.__name__, function.__code__.co_argcount, function)
    world.db.create_function("money", 1, lambda cents: f"${cents / 100:,.2f}")
    return [{name: NOT_ACHIEVABLE if row[name] is None else str(row[name]) for name in row.keys()}
            for row in world.db.execute(template.draw)]


def name_split(name: str, seed: int) -> str:
    """The split whose tasks may name a thing: train | valid | test."""
    place = Random(f"{seed} {name.lower()}").random()
    return "test" if place < HELD_OUT_NAMES else "valid" if place < 2 * HELD_OUT_NAMES else "train"


def values_split(values: Mapping[str, str], seed: int) -> str:
    """The split that a set of parameters belongs to: test where a name of test is in it, else valid where
    one of valid is, else train."""
    splits = {name_split(value, seed) for name, value in values.items() if name in ENTITIES}
    return "test" if "test" in splits else "valid" if "valid" in splits else "train"


def make_tasks(world, seed: int) -> dict[str, list[Task]]:
    """The tasks of each split, evenly over the templates; the same for the same seed and world. Valid
    tasks name things that no training task names; test tasks name others again, or are of a new kind.
    `goal` holds WebArena's JSON record (`config`) and `parameters`, which only the oracle may read."""
    rng = Random(f"tasks {seed}")
    pools = {template.id: _shuffled(template, world, rng) for template in TEMPLATES}
    known, new = [t for t in TEMPLATES if not t.held_out], [t for t in TEMPLATES if t.held_out]

    def chosen(templates: list[Template], split: str, count: int) -> list[tuple[Template, dict[str, str]]]:
        """So many, one of each template in turn, until there are no more."""
        rows = []
        for template in templates:
            names = fields(template.intents[0])
            rows.append([(template, values) for values in pools[template.id] if template.held_out
                         or values_split({name: values[name] for name in names}, seed) == split])
        turns = max(map(len, rows))
        return [row[i] for i in range(turns) for row in rows if i < len(row)][:count]

    of_new = round(COUNTS["test"] * NEW_KINDS)
    parts = {
        "train": chosen(known, "train", COUNTS["train"]),
        "valid": chosen(known, "valid", COUNTS["valid"]),
        "test": chosen(new, "test", of_new) + chosen(known, "test", COUNTS["test"] - of_new),
    }
    first_state, tasks, number = _first_states(world), {}, 0
    for split, rows in parts.items():
        tasks[split] = []
        for template, values in rows:
            intent = filled(rng.choice(template.intents), values)
            goal = {"config": task_record(template, values, intent, number), "parameters": values}
            groups = [f"kind {'new' if template.held_out else 'known'}", f"template {template.id}",
                      f"site {'+'.join(template.sites)}"]
            start = first_state(filled(_start(template), values))
            tasks[split].append(Task(id=f"webarena-{split}-{len(tasks[split]):04d}", text=intent,
                                     env="webarena", start=start, goal=goal, groups=groups))
            number += 1
    return tasks


def _shuffled(template: Template, world, rng: Random) -> list[dict[str, str]]:
    """In random order, with the share of missing things that tasks should have."""
    rows = drawn(template, world)
    rng.shuffle(rows)
    there = [row for row in rows if row.get("answer") != NOT_ACHIEVABLE]
    absent = [row for row in rows if row.get("answer") == NOT_ACHIEVABLE]
    every, result = round(1 / MISSING) - 1, []
    for i, row in enumerate(there):
        result.append(row)
        if absent and i % every == every - 1:
            result.append(absent.pop())
    return result


def _start(template: Template) -> str:
    return template.start or template.sites[0]


def _first_states(world) -> Callable[[str], str]:
    """-> function: start address(es) -> the first state."""
    from dreamgym.envs.webarena.direct import InProcessBrowser       # a back end is needed here only
    browser, cookies = InProcessBrowser(world), {site: world.login(site) for site in world.accounts}
    return lru_cache(maxsize=None)(lambda start: browser.open(start.split(" |AND| "), cookies).text)


def placeholder(short: str) -> str:
    """`shopping/cart` -> `__SHOPPING__/cart`."""
    site = re.match(r"\w+", short)[0]
    return f"__{site.upper()}__{short[len(site):]}"


def _placed(addresses: str, by: str) -> str:
    return by.join(placeholder(one) for one in addresses.split(by))


def task_record(template: Template, values: Mapping[str, str], intent: str, number: int) -> dict:
    """A task in WebArena's JSON format."""
    return {
        "sites": list(template.sites),
        "task_id": number,
        "require_login": True,
        "storage_state": f"./.auth/{'.'.join(template.sites)}_state.json",
        "start_url": _placed(filled(_start(template), values), " |AND| "),
        "geolocation": None,
        "intent_template": re.sub(r"\{(\w+)\}", r"{{\1}}", template.intents[0]),
        "instantiation_dict": {name: values[name] for name in fields(template.intents[0])},
        "intent": intent,
        "require_reset": False,
        "eval": _evaluation(template, values),
        "intent_template_id": template.id,
    }


def _evaluation(template: Template, values: Mapping[str, str]) -> dict:
    missing = values.get("answer") == NOT_ACHIEVABLE
    url = template.missing[0] if missing else template.reference or template.page
    spec: dict = {"eval_types": [], "reference_answers": None, "reference_url": "", "program_html": []}
    if template.answer:
        spec["eval_types"].append("string_match")
        wanted = values["answer"] if template.match == "exact_match" else [values["answer"]]
        spec["reference_answers"] = {"fuzzy_match": NOT_ACHIEVABLE} if missing else {template.match: wanted}
        spec["string_note"] = "There is no such thing on this site." if missing else ""
    if url != "-":
        spec["eval_types"].append("url_match")
        spec |= {"reference_url": _placed(filled(url, values), " |OR| "), "url_note": "GOLD in PRED"}
    if template.html:
        spec["eval_types"].append("program_html")
        spec["program_html"] = [_target(*(filled(part, values) for part in row)) for row in template.html]
    return spec


def _target(short: str, locator: str, text: str) -> dict:
    whole = locator == "main"
    return {"url": short if short == "last" else placeholder(short),
            "locator": "document.querySelector('main').outerText" if whole else locator,
            "required_contents": {"must_include": [text]} if whole else {"exact_match": text}}
