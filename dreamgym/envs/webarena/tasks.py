"""Task templates of the own sites, each one declaration, and what follows from it: tasks in WebArena's JSON, a plan, a rule check.

`read_task` finds the template of a sentence, `checks` holds the page of a `stop` against it, `make_tasks` draws tasks. The same declarations
(webarena_templates) drive the players and the teacher.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple
from urllib.parse import quote_plus

from dreamgym.envs.webarena.actions import parse
from dreamgym.envs.webarena.evaluators import NOT_ACHIEVABLE, exact_match, must_include, url_match
from dreamgym.envs.webarena.page import quotable, read_screen
from dreamgym.envs.webarena.sites.map import minutes
from dreamgym.envs.webarena.templates import TEMPLATES, Template
from dreamgym.episode import Task

NEW_TEMPLATES = 0.4                              # share of the held-out tasks whose template is never trained on
HELD_OUT_ENTITIES = 0.25                         # share of products, posts, ... that no training task names
MISSING = 1 / 3                                  # share of what does not exist, in templates that may ask for it
DONE = "done"                                    # what `stop` says when no answer was asked for
ENTITIES = frozenset("product noun category order customer review month forum post member project issue place goal".split())


class Row(NamedTuple):
    """A constraint of a task against a page."""
    asked: str
    found: str
    met: bool


class Check(NamedTuple):
    """A constraint with its kind (page, entity: who or what the page is about, done: what was to be done, answer), and with the words that stand before what is found on
    the page, "" where it stands alone: ("answer", "price", ("$20.00", "$25.00", False))."""
    kind: str
    before: str
    row: Row


@dataclass(frozen=True)
class Wanted:
    """What a sentence asks for."""
    template: Template
    values: tuple[tuple[str, str], ...]

    def __getitem__(self, name: str) -> str:
        return dict(self.values)[name]


# ---- patterns ----------------------------------------------------------------------------------------------------------------------------------

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
    """The names of a text's parameters, each once, in order; `as_said`: only of those that stand there as the task says them, so that they can be read off a page."""
    return list(dict.fromkeys(match[1] for match in _FIELD.finditer(text) if match[1] and not (as_said and match[2])))


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


@lru_cache(maxsize=4096)
def shown_lines(state: str) -> str:
    """The elements of a state, one a line, without numbers."""
    return "\n".join(line.split("] ", 1)[1] for line in state.split("\n") if line.startswith("["))


@lru_cache(maxsize=4096)
def address(state: str) -> str:
    """The address that a state shows."""
    return read_screen(state).address


def find(pattern: str, state: str, values: tuple[tuple[str, str], ...] = ()) -> dict[str, str] | None:
    """What a pattern's open parameters are on a page, None where no line fits; `values` are the parameters that are known."""
    match = _regex(pattern, values, _LINE_END).search(shown_lines(state))
    return match and match.groupdict()


# ---- sentences and checks ----------------------------------------------------------------------------------------------------------------------

@lru_cache(maxsize=20_000)
def read_task(text: str) -> Wanted:
    """The template and the parameters of a sentence; where several fit, the one that says the most itself. Raises ValueError for a sentence of no template."""
    read = [Wanted(template, tuple((name, match[name]) for name in fields(template.intents[0]))) for template in TEMPLATES for intent in template.intents
            if (match := _regex(intent, (), r"\Z").match(text))]
    if not read:
        raise ValueError(f"task {text[:80]!r}: of none of the {len(TEMPLATES)} templates")
    return min(read, key=lambda wanted: sum(len(value) for _, value in wanted.values))


def is_missing(wanted: Wanted, state: str) -> bool:
    """Whether the page says that what is wanted does not exist."""
    return bool(wanted.template.missing) and _on(wanted.template.missing[0], wanted, state) and find(wanted.template.missing[1], state, wanted.values) is not None


def fact(wanted: Wanted, state: str) -> str:
    """The answer that a page shows, "" for none; `done` where none is asked for."""
    if is_missing(wanted, state):
        return NOT_ACHIEVABLE
    if not wanted.template.answer:
        return DONE
    return (find(wanted.template.answer, state, wanted.values) or {}).get("answer", "")


def checks(wanted: Wanted, state: str, action: str) -> list[Row]:
    """Each constraint of a task against the page on which `stop [answer]` is said."""
    return [check.row for check in kinds_of_checks(wanted, state, action)]


def kinds_of_checks(wanted: Wanted, state: str, action: str) -> list[Check]:
    """`checks`, each with its kind; the first is that of the address."""
    template, values = wanted.template, wanted.values
    missing = is_missing(wanted, state)
    place, lines = template.missing if missing else (template.page, None)
    wanted_place = filled(place, dict(values))
    rows = [Check("page", "", Row(wanted_place.split(" |OR| ")[0], address(state), _on(place, wanted, state)))]
    rows += [_line_row(pattern, values, state) for pattern in ((lines,) if missing else template.shows)]
    if template.answer:
        said, found = parse(action).text, fact(wanted, state)
        met = bool(found) and {"exact_match": exact_match, "must_include": must_include}["exact_match" if missing else template.match](found, said)
        rows.append(Check("answer", "" if missing else _before(template.answer, "answer"), Row(said or "none", found or "none", met)))
    return rows


def _before(pattern: str, name: str) -> str:
    """The words before a parameter of a pattern: in its own line, else in the line before."""
    before = pattern.partition(f"{{{name}")[0]
    own = before.rpartition("'")[2].strip(" *$")
    return own if own or "' > " not in before else _FIELD.sub("", _literal(before)).strip()


def _on(place: str, wanted: Wanted, state: str) -> bool:
    return url_match(" |OR| ".join(f"http://{one}" for one in filled(place, dict(wanted.values)).split(" |OR| ")), f"http://{address(state)}")


def _kind(pattern: str) -> str:
    if pattern.startswith("no "):
        return "page"
    if "heading" not in pattern:
        return "done"
    return "entity" if ENTITIES & set(fields(pattern)) else "done" if fields(pattern) else "page"


def _line_row(pattern: str, values: tuple[tuple[str, str], ...], state: str) -> Check:
    """What stands in the place of the parameters is what was found; of a pattern without any ('status Canceled'), in the place of its last word; of a button, the one
    whose name is a part of it ('Star' for 'Unstar')."""
    kind = _kind(pattern)
    if pattern.startswith("no "):
        there = find(pattern[3:], state, values) is not None
        return Check(kind, "", Row(f"no {_literal(pattern)}", _literal(pattern) if there else "none", not there))
    names = [name for name in fields(pattern, as_said=True) if name in dict(values)]
    met, role, literal = find(pattern, state, values) is not None, pattern.split(" ")[0], _literal(pattern)
    before, _, last = literal.rpartition(" ")
    if not names and kind == "done" and (before or role == "button"):
        other = (find(pattern.replace(f" {last}'", " {found}'"), state) or {}).get("found", "none") if before else _likest_button(literal, state)
        return Check(kind, before or role, Row(last, last if met else other, met))
    label = ""
    if kind == "done" and names and (len(names) == 1 or "' > " not in pattern):      # one value, and what stands before it
        label, names = filled(_before(pattern, names[-1]), dict(values)), names[-1:]
    words = " ".join(dict(values)[name] for name in names) or literal
    other = {} if met else find(pattern, state, tuple((name, value) for name, value in values if label and name not in names)) or {}
    return Check(kind, label, Row(words, words if met else " ".join(filter(None, map(other.get, names))) or "none", met))


def _likest_button(name: str, state: str) -> str:
    buttons = re.findall(r"^button '(.*)'$", shown_lines(state), re.MULTILINE)
    return next((button for button in buttons if button.lower() in name.lower()), "none")


def _literal(pattern: str) -> str:
    """What a pattern without parameters shows: the last name in it."""
    return re.findall(r"'([^']*)'", pattern)[-1]


# ---- tasks -------------------------------------------------------------------------------------------------------------------------------------

def drawn(template: Template, world) -> list[dict[str, str]]:
    """All sets of parameters, in the query's order; `answer` is N/A where the query has none."""
    atlas = world.apps["map"].extensions["atlas"]
    named = {place.name: place for place in atlas.places}

    def way_time(a: str, b: str, by: str) -> str:
        return f"{minutes(atlas.metres(named[a], named[b]), by)} minutes"

    def nearest(name: str, kind: str) -> str:
        return min((atlas.metres(named[name], other), other.name) for other in atlas.places if other.category == kind)[1]

    for function in (way_time, nearest):
        world.db.create_function(function.__name__, function.__code__.co_argcount, function)
    world.db.create_function("money", 1, lambda cents: f"${cents / 100:,.2f}")
    return [{name: NOT_ACHIEVABLE if row[name] is None else str(row[name]) for name in row.keys()} for row in world.db.execute(template.draw)]


def held_out(values: Mapping[str, str], seed: int) -> bool:
    """Whether a set of parameters names something that no training task may name."""
    return any(name in ENTITIES and Random(f"{seed} {value}").random() < HELD_OUT_ENTITIES for name, value in values.items())


def make_tasks(world, seed: int, train: int = 300, test: int = 100) -> dict[str, list[Task]]:
    """So many tasks of each side, evenly over the templates; the same for the same seed and world. `goal` holds WebArena's JSON record
    (`config`), `split` (train | new template | new entity), `type` (what decides: an evaluator, or impossible) and `parameters`, which only the oracle may read."""
    rng = Random(f"tasks {seed}")
    pools = {template.id: _shuffled(template, world, rng) for template in TEMPLATES}
    named = {template.id: set(fields(template.intents[0])) for template in TEMPLATES}

    def pool(template: Template, test: bool) -> list[dict[str, str]]:
        return [values for values in pools[template.id]
                if template.held_out or held_out({name: values[name] for name in named[template.id]}, seed) == test]

    trained, new = [t for t in TEMPLATES if not t.held_out], [t for t in TEMPLATES if t.held_out]
    of_new = round(test * NEW_TEMPLATES)
    parts = {"train": _evenly([(t, pool(t, False)) for t in trained], train), "new template": _evenly([(t, pool(t, True)) for t in new], of_new),
             "new entity": _evenly([(t, pool(t, True)) for t in trained], test - of_new)}
    starts, tasks = _starts(world), {"train": [], "test": []}
    for split, chosen in parts.items():
        for template, values in chosen:
            side = "train" if split == "train" else "test"
            number = len(tasks["train"]) + len(tasks["test"])
            intent = filled(rng.choice(template.intents), values)
            record = task_record(template, values, intent, number)
            goal = {"config": record, "split": split, "type": _type(record["eval"], values), "parameters": values}
            tasks[side].append(Task(f"webarena-{side}-{len(tasks[side]):04d}", intent, "webarena", starts(filled(_start(template), values)), goal))
    return tasks


def _shuffled(template: Template, world, rng: Random) -> list[dict[str, str]]:
    """In random order, with the share of missing things that tasks should have."""
    rows = drawn(template, world)
    rng.shuffle(rows)
    there = [row for row in rows if row.get("answer") != NOT_ACHIEVABLE]
    absent = [row for row in rows if row.get("answer") == NOT_ACHIEVABLE]
    every = round(1 / MISSING) - 1
    return [row for i, row in enumerate(there) for row in ([row, absent.pop()] if absent and i % every == every - 1 else [row])]


def _evenly(pools: list[tuple[Template, list[dict[str, str]]]], count: int) -> list[tuple[Template, dict[str, str]]]:
    """So many, one of each template in turn, until the pools are empty."""
    turns = max((len(rows) for _, rows in pools), default=0)
    return [(template, rows[i]) for i in range(turns) for template, rows in pools if i < len(rows)][:count]


def _start(template: Template) -> str:
    return template.start or template.sites[0]


def _starts(world):
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
    names = fields(template.intents[0])
    return {"sites": list(template.sites), "task_id": number, "require_login": True, "storage_state": f"./.auth/{'.'.join(template.sites)}_state.json",
            "start_url": _placed(filled(_start(template), values), " |AND| "), "geolocation": None,
            "intent_template": re.sub(r"\{(\w+)\}", r"{{\1}}", template.intents[0]), "instantiation_dict": {name: values[name] for name in names},
            "intent": intent, "require_reset": False, "eval": _evaluation(template, values), "intent_template_id": template.id}


def _evaluation(template: Template, values: Mapping[str, str]) -> dict:
    missing = values.get("answer") == NOT_ACHIEVABLE
    url = template.missing[0] if missing else template.reference or template.page
    spec: dict = {"eval_types": [], "reference_answers": None, "reference_url": "", "program_html": []}
    if template.answer:
        spec["eval_types"].append("string_match")
        answer = {"fuzzy_match": NOT_ACHIEVABLE} if missing else {template.match: values["answer"] if template.match == "exact_match" else [values["answer"]]}
        spec |= {"reference_answers": answer, "string_note": "There is no such thing on this site." if missing else ""}
    if url != "-":
        spec["eval_types"].append("url_match")
        spec |= {"reference_url": _placed(filled(url, values), " |OR| "), "url_note": "GOLD in PRED"}
    if template.html:
        spec["eval_types"].append("program_html")
        spec["program_html"] = [_target(*(filled(part, values) for part in target)) for target in template.html]
    return spec


def _target(short: str, locator: str, text: str) -> dict:
    whole = locator == "main"
    return {"url": short if short == "last" else placeholder(short), "locator": "document.querySelector('main').outerText" if whole else locator,
            "required_contents": {"must_include": [text]} if whole else {"exact_match": text}}


def _type(spec: dict, values: Mapping[str, str]) -> str:
    if values.get("answer") == NOT_ACHIEVABLE:
        return "impossible"
    return next(kind for kind in ("program_html", "string_match", "url_match") if kind in spec["eval_types"])

