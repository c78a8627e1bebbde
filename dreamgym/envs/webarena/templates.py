"""The task templates of the own sites, read from templates.ini.

`plan` is the actions of the shortest way; `page`, `shows` and `answer` say what the page must show on which
one may `stop`; `html` is what WebArena's evaluator looks up afterwards. Only parameters that an intent names
may occur in plan, page, shows and answer: rules and players know no more than a task's sentence and pages.

    lines of a page     heading '{product}'    link 'Order {order}' > text '*, {answer}'
                        `>` is the next line, `*` is anything
    a parameter's forms  {product.slug} blue-speaker   {product.plus} Blue+Speaker
                         {product.low} blue speaker    {product.cap} Blue speaker

In the file, `draw` may use @part, and @name(1, 2) for a table of one column. `on` is the page of a thing: its
keys hold where the template has none of its own, `plan` and `shows` go on from there, `before` comes first;
where `page` is another, the thing's `shows` is left out. `absent` is a table and a column: names whose halves
occur in it, but not together, are asked for, too.
"""
import re
from configparser import ConfigParser, SectionProxy
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Template:
    id: int
    sites: tuple[str, ...]
    intents: tuple[str, ...]            # the same task in other words
    draw: str                           # SQL: a column for each parameter, and `answer` (NULL: no such thing)
    plan: tuple[str, ...]               # up to `stop`
    page: str                           # address to stop on, by url_match's rule
    shows: tuple[str, ...]              # lines of it; `no ...`: a line that must not be there
    answer: str                         # lines with the answer in them
    missing: tuple[str, ...]            # (address, line) of the page that says that there is no such thing
    reference: str                      # url_match's address where it takes more than the intent; "-": none
    # (address, locator, text) of program_html, exact; with locator "main" the text is part of the page
    html: tuple[tuple[str, str, str], ...]
    start: str                          # other than the first site's home; ` |AND| ` for several tabs
    held_out: bool                      # a kind of task that no training task is of


def _or_absent(query: str, table: str, name: str, by: str = " ") -> str:
    rows = f"(SELECT {name} AS whole FROM {table})"
    at = f"instr(whole, '{by}')"
    first = f"(SELECT DISTINCT substr(whole, 1, {at} - 1) AS first FROM {rows})"
    last = f"(SELECT DISTINCT substr(whole, {at} + 1) AS last FROM {rows})"
    return (f"{query} UNION ALL SELECT * FROM (SELECT first || '{by}' || last AS thing, NULL AS answer "
            f"FROM {first}, {last} WHERE thing NOT IN {rows} ORDER BY thing)")


def _template(file: ConfigParser, text: SectionProxy) -> Template:
    parts, thing = file["parts"], file[text["on"]] if "on" in text else {}

    def own(key: str) -> str:
        return text.get(key, "").replace("\n", " ")

    def get(key: str) -> str:
        return own(key) or thing.get(key, "").replace("\n", " ")

    def steps(*lines: str) -> tuple[str, ...]:
        return tuple(step for line in lines for step in line.split("; ") if step)

    def table(match: re.Match) -> str:
        values = re.sub(r"(?<=['\d]), ", "), (", match[2])
        return f"(SELECT column1 AS {match[1]} FROM (VALUES ({values})))"

    def query(sql: str) -> str:
        sql = re.sub(r"@(\w+)\(([^)]*)\)", table, sql.replace("\n", " "))
        return re.sub(r"@(\w+)", lambda part: query(parts[part[1]]) if part[1] in parts else part[0], sql)

    page, draw, missing, html = get("page"), query(text["draw"]), "", ()
    if "absent" in text:
        draw, missing = _or_absent(draw, *map(query, text["absent"].split())), get("missing")
    if "html" in text:
        *address, place, words = own("html").split(" | ")
        selector, _, value = place.rpartition(".")
        place = f"document.querySelector('{selector}').{value}" if selector else place
        html = ((address[0] if address else get("reference") or page, place, words),)
    return Template(
        id=int(text.name), sites=tuple(own("sites").split()) or (page.split("/")[0],),
        intents=tuple(text["ask"].split("\n")), draw=draw,
        plan=steps(own("before"), thing.get("plan", ""), own("plan")), page=page,
        shows=steps("" if own("page") else thing.get("shows", ""), own("shows")), answer=own("answer"),
        missing=tuple(filter(None, missing.split(" | "))), reference=get("reference"), html=html,
        start=get("start"), held_out="held_out" in text)


def _read() -> tuple[Template, ...]:
    file = ConfigParser(interpolation=None, delimiters="=")
    with open(Path(__file__).with_suffix(".ini")) as text:
        file.read_file(text)
    return tuple(_template(file, file[name]) for name in file.sections() if name.isdigit())


TEMPLATES = _read()
