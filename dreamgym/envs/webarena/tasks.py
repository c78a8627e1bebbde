"""Tasks of the own sites from the declarations in templates.py: sentences, rule checks, WebArena's JSON."""
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice, zip_longest
from random import Random
from typing import NamedTuple
from urllib.parse import quote_plus

from dreamgym.envs.webarena.direct import InProcessBrowser
from dreamgym.envs.webarena.evaluators import NOT_ACHIEVABLE, exact_match, url_match
from dreamgym.envs.webarena.page import quotable
from dreamgym.envs.webarena.sites import DATABASES, SiteDatabase
from dreamgym.envs.webarena.sites.map import atlas_of, km, minutes
from dreamgym.envs.webarena.templates import TEMPLATES, Template
from dreamgym.envs.webarena.text import read_action, read_page
from dreamgym.episode import Task

COUNTS = {"train": 2560, "valid": 100, "test": 160}
NEW_KINDS = 0.25                                 # share of the test tasks whose template is never trained on
SENTENCES = {"train": 0.5, "valid": 0.25, "test": 0.25}        # shares of what one split alone may ask
FOUND_PER_MISSING = 2                            # where a template may ask for absent things
MAX_TASK_CHARS = 400
DONE = "done"  # what `stop` says when no answer was asked for


class TaskConstraints(NamedTuple):
    template: Template
    values: tuple[tuple[str, str], ...]


# ---- patterns

class Word(str):
    """A parameter in a format string, with its forms."""
    slug = property(lambda self: Word(self.lower().replace(" ", "-")))
    plus = property(lambda self: Word(quote_plus(self)))
    low = property(lambda self: Word(self.lower()))
    cap = property(lambda self: Word(self[:1].upper() + self[1:]))


_FIELD = re.compile(r"\{(\w+)((?:\.\w+)*)\}|\*| > ")
_LINE_END = r"(?=$| value '| checked$| options ')"


def filled(text: str, values: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    return text.format(**{name: Word(value) for name, value in dict(values).items()})


def fields(text: str) -> list[str]:
    """The names of the parameters in a text."""
    return list(dict.fromkeys(match[1] for match in _FIELD.finditer(text) if match[1]))


@lru_cache(maxsize=20_000)
def _regex(pattern: str, values: tuple[tuple[str, str], ...], end: str) -> re.Pattern:
    known, named, parts, at = dict(values), set(), [], 0
    for match in _FIELD.finditer(pattern):
        parts.append(re.escape(pattern[at:match.start()]))
        name, at = match[1], match.end()
        if match[0] == " > ":
            parts.append(r"\n")
        elif name in known:
            parts.append(re.escape(quotable(filled(match[0], values))))
        elif name and not match[2] and name not in named:
            parts.append(rf"(?P<{name}>[^\n]+?)")
            named.add(name)
        else:
            parts.append(r"[^\n]*?")
    return re.compile(f"^{''.join(parts)}{re.escape(pattern[at:])}{end}", re.MULTILINE)


def address(state: str) -> str:
    return read_page(state).address


def find(pattern: str, state: str, values: tuple[tuple[str, str], ...] = ()) -> dict[str, str] | None:
    """What a pattern's parameters other than `values` are on a page, None where no line fits."""
    match = _regex(pattern, values, _LINE_END).search(state)
    return match and match.groupdict()


# ---- sentences and what fulfils them

@lru_cache(maxsize=20_000)
def read_task(text: str) -> TaskConstraints | None:
    """None for a sentence of no template; where several fit, the one that says the most itself."""
    found = [TaskConstraints(template, tuple((name, match[name]) for name in fields(template.intents[0])))
             for template in TEMPLATES for intent in template.intents
             if len(text) <= MAX_TASK_CHARS and (match := _regex(intent, (), r"\Z").match(text))]
    return min(found, key=lambda wanted: sum(len(value) for _, value in wanted.values), default=None)


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


def rule_success(task_text: str, state: str, action: str) -> bool | None:
    """Whether a task asks for this `stop` on this page. None for other actions, and for what cannot be
    read."""
    wanted, (said, _) = read_task(task_text), read_action(state, action)
    if wanted is None or said.kind != "stop" or read_page(state) is None:
        return None
    template = wanted.template
    place, *lines = template.missing if is_missing(wanted, state) else (template.page, *template.shows)
    shown = ((find(line.removeprefix("no "), state, wanted.values) is None) == line.startswith("no ")
             for line in lines)
    return _on(place, wanted, state) and all(shown) and (
        not template.answer or bool(right := fact(wanted, state)) and exact_match(right, said.text))


def _on(place: str, wanted: TaskConstraints, state: str) -> bool:
    places = filled(place, wanted.values).split(" |OR| ")
    return url_match(" |OR| ".join(f"http://{one}" for one in places), f"http://{address(state)}")


# ---- tasks

def drawn(template: Template, world) -> list[dict[str, str]]:
    """All sets of parameters; `answer` is N/A where the query has none."""
    atlas = atlas_of(world.first)
    named = {place.name: place for place in atlas.places}

    def way_time(a: str, b: str, by: str) -> str:
        return f"{minutes(atlas.metres(named[a], named[b]), by)} minutes"

    def distance(a: str, b: str) -> str:
        return km(atlas.metres(named[a], named[b]))

    def nearest(name: str, kind: str) -> str:
        others = [other for other in atlas.places if other.category == kind]
        return min((atlas.metres(named[name], other), other.name) for other in others)[1]

    for function in (way_time, distance, nearest):
        world.db.create_function(function.__name__, function.__code__.co_argcount, function)
    world.db.create_function("money", 1, lambda cents: f"${cents / 100:,.2f}")
    return [{name: NOT_ACHIEVABLE if row[name] is None else str(row[name]) for name in row.keys()}
            for row in world.db.execute(template.draw)]


def sentence_split(template: Template, values: Mapping[str, str]) -> str:
    """The split that may ask this: some tasks name nothing of a database ('Set my status to "On call".')."""
    if not fields(template.intents[0]):
        return "train"
    return Random(filled(template.intents[0], values)).choices(*zip(*SENTENCES.items()))[0]


def make_tasks(split: str, seed: int) -> list[Task]:
    """One of each template and database in turn. No two splits share a database or a sentence. `goal`:
    WebArena's JSON record (`config`), `database`, and `parameters`, for the oracle alone."""
    worlds = [SiteDatabase(seed, name) for name in DATABASES if name.startswith(split)]
    rng = Random(f"tasks {seed} {split}")
    starts = [_first_states(world) for world in worlds]

    def askable(template: Template, at: int) -> Iterator[tuple[int, Template, dict[str, str]]]:
        for row in _shuffled(template, worlds[at], rng):
            if template.held_out or sentence_split(template, row) == split:
                yield at, template, row

    def chosen(count: int, new: bool) -> list[tuple[int, Template, dict[str, str]]]:
        lists, found = [], {}
        for i, template in enumerate(template for template in TEMPLATES if template.held_out == new):
            order = [(i + at) % len(worlds) for at in range(len(worlds))]  # each is the first as often
            lists.append(turn(*(askable(template, at) for at in order)))
        unlike = (row for row in turn(*lists)
                  if found.setdefault(filled(row[1].intents[0], row[2]), row) is row)
        return list(islice(unlike, count))

    of_new = round(COUNTS[split] * NEW_KINDS) if split == "test" else 0
    tasks, first_id = [], 10_000 * list(COUNTS).index(split)
    for at, template, values in chosen(of_new, True) + chosen(COUNTS[split] - of_new, False):
        intent = filled(rng.choice(template.intents), values)
        config = task_record(template, values, intent, first_id + len(tasks))
        groups = [f"kind {'new' if template.held_out else 'known'}", f"template {template.id}",
                  f"site {'+'.join(template.sites)}"]
        tasks.append(Task(id=f"webarena-{split}-{len(tasks):04d}", text=intent, env="webarena",
                          start=starts[at](_start(template, values)), groups=groups,
                          goal={"config": config, "database": worlds[at].name, "parameters": values}))
    return tasks


def turn(*lists: Iterable) -> Iterator:
    """The first of each, then the second of each, and so on."""
    return (item for items in zip_longest(*lists) for item in items if item is not None)


def _first_states(world: SiteDatabase) -> Callable[[str], str]:
    """start addresses -> the page on which an episode begins."""
    browser, cookies = InProcessBrowser(world), {site: world.login(site) for site in world.accounts}
    return lru_cache(maxsize=None)(lambda start: browser.open(start.split(" |AND| "), cookies).text)


def _shuffled(template: Template, world: SiteDatabase, rng: Random) -> list[dict[str, str]]:
    """All sets of parameters, every third one of what is not there, as long as there are such."""
    rows, result, number = drawn(template, world), [], rng.randrange(FOUND_PER_MISSING + 1)
    rng.shuffle(rows)
    absent = [row for row in rows if row.get("answer") == NOT_ACHIEVABLE]
    found = [row for row in rows if row.get("answer") != NOT_ACHIEVABLE]
    while found:
        number += 1
        is_absent = absent and number % (FOUND_PER_MISSING + 1) == 0
        result.append(absent.pop() if is_absent else found.pop())
    return result


def _start(template: Template, values: Mapping[str, str]) -> str:
    return filled(template.start or template.sites[0], values)


def _placed(addresses: str) -> str:
    """`shopping/cart` -> `__SHOPPING__/cart`, also for several addresses."""
    return re.sub(r"(?:^|(?<=\| ))\w+", lambda site: f"__{site[0].upper()}__", addresses)


def task_record(template: Template, values: Mapping[str, str], intent: str, number: int) -> dict:
    return {
        "sites": list(template.sites),
        "task_id": number,
        "require_login": True,
        "storage_state": f"./.auth/{'.'.join(template.sites)}_state.json",
        "start_url": _placed(_start(template, values)),
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
        # N/A, too: WebArena's fuzzy match would ask a judge about every other answer
        spec["reference_answers"] = {"exact_match": values["answer"]}
    if url != "-":
        spec["eval_types"].append("url_match")
        spec |= {"reference_url": _placed(filled(url, values)), "url_note": "GOLD in PRED"}
    if template.html:
        spec["eval_types"].append("program_html")
    for row in template.html:
        short, locator, text = (filled(part, values) for part in row)
        whole = locator == "main"
        spec["program_html"].append({
            "url": _placed(short),
            "locator": "document.querySelector('main').outerText" if whole else locator,
            "required_contents": {"must_include": [text]} if whole else {"exact_match": text}})
    return spec
