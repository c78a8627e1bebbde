"""Recorded WebArena runs of other people -> our episodes, so that an experience model can start from them.
`read_traces(path, format)` reads

    render      WebArena's own traces: a folder of render_N.html and merge_log.txt (PASS or FAIL), or one file
    acctree     JSON lines (or a JSON list, or {"data": [...]}) of accessibility-tree transitions, or a folder
                of such files: task_id (else the number at the end of the file's name), observation, action
                or current_action, next_observation or next_state_acctree; rows without observation and
                action (thuml/webarena-world-model-cot) are chained by their order
    browsergym  AgentRewardBench's JSON files, one run each, or a folder of them

Ids in actions become line numbers, with the `scroll` steps that lead there. What our grammar cannot say (a
drag, two calls at once) is left out where nothing changed and otherwise cuts the run in two. Left out: a
`stop` without a verdict, an agent's thoughts.
"""
import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache, partial
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from lxml import etree
from msgspec import Struct

from dreamgym.envs.webarena.actions import ON_ELEMENT, Action, parse
from dreamgym.envs.webarena.ax_tree_sources import from_text, text_rows, webarena_tabs
from dreamgym.envs.webarena.page import LINES, STOPPED, Addresses, Page, abstract, clean
from dreamgym.envs.webarena.text import ground
from dreamgym.episode import Episode, Source, Step, StopReason, Task, converted

# WebArena's ports, its public names, and the names that it shows to agents instead
HOSTS = {7770: "shopping", 7780: "shopping_admin", 9999: "reddit", 8023: "gitlab", 8888: "wikipedia",
         3000: "map", 4399: "homepage", "onestopmarket.com": "shopping", "luma.com": "shopping_admin",
         "reddit.com": "reddit", "gitlab.com": "gitlab", "wikipedia.org": "wikipedia",
         "openstreetmap.org": "map", "homepage.com": "homepage"}
ANY_LENGTH = 10**6
INTENT_CHARS = 1000


class Seen(NamedTuple):
    text: str
    address: str                                 # without host
    tabs: list[str]                              # titles
    tab: int


class Move(NamedTuple):
    before: Seen
    action: str
    after: Seen | None  # None: not recorded


class Run(NamedTuple):
    id: str
    task_id: int
    intent: str
    moves: list[Move]
    where: str                                   # file and line
    success: bool | None                         # None: no verdict


Short = Callable[[str], str]  # a recorded url -> the address in our states


def short_address(url: str, bases: Iterable[Addresses] = ()) -> str:
    """As our states show it: of a site of `bases`, else of WebArena's ports and names."""
    if known := next((addresses for addresses in bases if addresses.site(url)), None):
        return known.short(url)
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        site = HOSTS.get(parts.port)
    except ValueError:  # a port that is no number
        site = None
    site = site or HOSTS.get((parts.hostname or "").removeprefix("www."))
    if not site:
        return url.removeprefix("http://").removeprefix("https://").split("#")[0] or "unknown"
    path = parts.path
    if site in ("shopping_admin", "wikipedia"):
        path = re.sub(r"^/(?:wikipedia_en[^/]*|admin(?=[/?]|$))", "", path)
    return site + (path if path != "/" else "") + (f"?{parts.query}" if parts.query else "")


# ---- actions

Aimed = tuple[Action, str]  # ... and the recorded id of its element; None: not in WebArena's grammar


def webarena_action(text: str) -> Aimed | None:
    """`where [12] is ..` comes from the action history, which writes the Enter of `type` as a blank at the
    end of the words."""
    said, _, history = text.partition(" where [")
    if history and (match := re.fullmatch(r"type ?\[(\d+)\] ?\[(.*)\]", said, re.DOTALL)):
        enter = int(match[2].endswith((" ", "\n")))
        said = f"type [{match[1]}] [{clean(match[2], ANY_LENGTH)}] [{enter}]"
    action = parse(re.sub(r"^page_focus\b", "tab_focus", said.strip()))
    return action and (action, str(action.element))


CALLS = {**dict.fromkeys(("click", "check", "uncheck", "focus"), "click"),
         **dict.fromkeys(("fill", "select_option", "clear"), "type"),
         **dict.fromkeys(("press", "keyboard_press"), "press"),
         **dict.fromkeys(("send_msg_to_user", "report_infeasible"), "stop"), "tab_close": "close_tab",
         **{name: name for name in "hover scroll goto go_back go_forward new_tab tab_focus".split()}}


def browsergym_action(text: str) -> Aimed | None:
    """A call, read as literals and never run."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        name = call.func.id
        values = [ast.literal_eval(value) for value in [*call.args, *(k.value for k in call.keywords)]]
    except (SyntaxError, ValueError, TypeError, AttributeError, MemoryError, RecursionError):
        return None
    values = [str(v[0] if isinstance(v, list) and len(v) == 1 else v) for v in values]
    first, second = ([clean(value, ANY_LENGTH) for value in values] + ["", ""])[:2]
    kind = CALLS.get(name)
    said = {"click": second in ("", "left"), "tab_focus": first.isdigit(),
            "scroll": re.fullmatch(r"-?\d+(\.\d*)?", second)}
    if kind is None or not said.get(kind, True):
        return None
    text = {"type": second, "press": second if name == "press" else first, "goto": first,
            "stop": "N/A" if name == "report_infeasible" else first,
            "scroll": "up" if second.startswith("-") else "down"}.get(kind, "")
    return Action(kind, int(first) if kind == "tab_focus" else 0, text, kind != "type"), first


# ---- runs -> episodes

_nodes = lru_cache(8)(from_text)  # a page is asked for several times in a row


def screen(seen: Seen, window: int = 0, size: int = LINES) -> Page:
    title, nodes = _nodes(seen.text)
    return abstract(title, seen.address, nodes, seen.tabs, seen.tab, window, size)


def place(seen: Seen, ref: str) -> tuple[int, int] | None:
    """(window, line) of an element, else of what is in it, else of what it is in."""
    shown = {node.ref: (window, line) for window in range(screen(seen).windows)
             for line, node in screen(seen, window).lines.items()}
    rows = text_rows(seen.text)
    at = next((i for i, row in enumerate(rows) if ref and row.ref == ref), None)
    if at is None:
        return None
    near = [rows[at], *takewhile(lambda row: row.depth > rows[at].depth, rows[at + 1:])]
    depth = rows[at].depth
    for row in reversed(rows[:at]):
        if row.depth < depth:
            near, depth = [*near, row], row.depth
    return next((shown[row.ref] for row in near if row.ref in shown), None)


def episodes(run: Run, read_action: Callable[[str], Aimed | None], short: Short) -> list[Episode]:
    """One for each part of a run that our grammar can say."""
    parts: list[list[Step]] = [[]]
    window = 0  # of the last state: scrolling is ours
    for before, said, after in run.moves:
        window = window if parts[-1] else 0
        state = screen(before, window).text
        if parts[-1] and parts[-1][-1].next_state != state:
            parts.append([])
            window, state = 0, screen(before).text
        steps = parts[-1]
        action, ref = read_action(said) or (None, "")
        still = after is not None and (screen(after, size=ANY_LENGTH).text
                                       == screen(before, size=ANY_LENGTH).text)
        wanted = window, 0
        if action and action.kind in ON_ELEMENT:
            wanted = place(before, ref)
        if action is None or wanted is None or (action.kind == "scroll" and still) or (
                after is None and action.kind != "stop"):
            if not still:
                parts.append([])
            continue
        while window != wanted[0]:
            way, window = ("down", window + 1) if window < wanted[0] else ("up", window - 1)
            steps.append(_step(state, Action("scroll", text=way), screen(before, window).text))
            state = steps[-1].next_state
        if action.kind == "stop":
            if run.success is not None:
                steps.append(_step(state, action, STOPPED, run.success))
            break
        if action.kind in ON_ELEMENT:
            action = Action(action.kind, wanted[1], action.text, action.enter)
        if action.kind == "goto":
            action = Action("goto", text=short(action.text))
        # A page that changed below its first window is the same one, still scrolled
        window = window if screen(after).text == screen(before).text else 0
        steps.append(_step(state, action, screen(after, window).text))
    return _named(run, [part for part in parts if part], whole=bool(parts[-1]))


def _step(state: str, action: Action, next_state: str, success: bool = False) -> Step:
    return Step(state=state, action=str(action), next_state=next_state, reward=float(success),
                done=action.kind == "stop", grounded=ground(state, str(action)))


def _named(run: Run, parts: list[list[Step]], whole: bool) -> list[Episode]:
    """`whole`: the last part reaches the run's last page. BrowserGym's runs end at success: `stop` is
    added."""
    if whole and parts and run.success and not parts[-1][-1].done:
        parts[-1].append(_step(parts[-1][-1].next_state, Action("stop"), STOPPED, True))
    made = []
    for i, steps in enumerate(parts, 1):
        stop = StopReason.STEP_LIMIT if i == len(parts) and whole else StopReason.RUNNING
        if steps[-1].done:
            stop = StopReason.SUCCESS if steps[-1].reward else StopReason.FAILURE
        task = Task(id=f"webarena-{run.task_id}", text=run.intent, env="webarena", start=steps[0].state,
                    goal={"task_id": run.task_id})
        made.append(Episode(id=f"{run.id}-part{i}" if len(parts) > 1 else run.id, task=task, steps=steps,
                            source=Source.IMPORTED, stop=stop, raw_score=steps[-1].reward))
    return made


# ---- WebArena's rendered traces

def _files(path: Path, patterns: tuple[str, ...], expected: str) -> list[Path]:
    """The file itself, or those in the folder."""
    files = [path] if path.is_file() else sorted(file for form in patterns for file in path.glob(form))
    if not files:
        raise ValueError(f"{path}: no {' or '.join(patterns)} there; expected {expected}")
    return files


def _render_runs(path: Path, short: Short) -> Iterator[Run]:
    files = _files(path, ("render_*.html",), "WebArena's traces, render_N.html")
    log = files[0].parent / "merge_log.txt"
    text = log.read_text(errors="replace") if log.exists() else ""
    verdicts = {int(number): word == "PASS"
                for word, number in re.findall(r"\((PASS|FAIL)\)\s+\S*?(\d+)\.json", text)}
    for file in files:
        root = etree.fromstring(file.read_bytes(), etree.HTMLParser(encoding="utf-8", huge_tree=True))
        config = "" if root is None else "".join(root.xpath("(//pre)[1]//text()"))
        number = re.search(r"^task_id: (\d+)$", config, re.MULTILINE)
        intent = re.search(r"^intent: (.+)$", config, re.MULTILINE)
        if not number or not intent:
            raise ValueError(f"{file}: no `task_id: N` and `intent: ..` in its first <pre>; expected a trace "
                             "that WebArena rendered")
        yield Run(f"import-{file.parent.name}-{number[1]}", int(number[1]), clean(intent[1], INTENT_CHARS),
                  _render_moves(file, root, short), str(file), verdicts.get(int(number[1])))


def _render_moves(file: Path, root: etree._Element, short: Short) -> list[Move]:
    def texts(path: str) -> list[str]:
        return ["".join(element.itertext()).strip("\n") for element in root.xpath(path)]

    # the trace never closes its state_obv divs: later steps lie inside earlier ones
    shown = texts("//div[@class='state_obv']/pre[1]")
    urls, said, meant = (texts(f"//*[@class='{name}']")
                         for name in ("url", "raw_parsed_prediction", "parsed_action"))
    if not shown or len(shown) != len(urls) or len(shown) != len(said):
        raise ValueError(f"{file}: {len(shown)} state_obv, {len(urls)} url, {len(said)} "
                         f"raw_parsed_prediction; expected the same number of each, at least one")
    seen = [Seen(text, short(url.removeprefix("URL: ").strip()), *webarena_tabs(text))
            for text, url in zip(shown, urls)]
    # the agent's own words where they hold an action, else what WebArena made of them
    spoken = [raw if parse(raw) else parsed or raw for raw, parsed in zip_longest(said, meant, fillvalue="")]
    return [*map(Move, seen, spoken, [*seen[1:], None])]


# ---- JSON

def _loads(text: str, where: object) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({str(error)[:100]})") from None


class TreeRow(Struct):
    task_id: int
    run_id: Any = ""
    url: str | None = ""
    intent: str | None = None
    observation: str | None = None
    action: str | None = None
    followed: str | None = None
    previous_actions: list | None = None
    reward: Any = None
    done: Any = False


# The first that a row has counts
NAMES = {"observation": ("observation", "state", "acctree"), "action": ("current_action", "action"),
         "followed": ("next_state_acctree", "next_observation", "next_state"),
         "intent": ("objective", "intent", "goal", "task")}


def _tree_rows(path: Path) -> Iterator[tuple[str, TreeRow]]:
    """(where, row) of JSON lines, a JSON list, or {"data": list}."""
    named = re.search(r"\d+$", path.stem)
    of_file = {"task_id": int(named[0])} if named else {}
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix == ".json":
        whole = _loads(text, path)
        whole = whole.get("data", [whole]) if isinstance(whole, dict) else whole
        entries = enumerate(converted(whole, list, path), 1)
    else:
        lines = enumerate(text.split("\n"), 1)
        entries = ((i, _loads(line, f"{path}:{i}")) for i, line in lines if line.strip())
    for number, entry in entries:
        row = of_file | converted(entry, dict, f"{path}:{number}")
        if "task_id" not in row:
            raise ValueError(f"{path}:{number}: no task_id; expected one in each row, or a file name that "
                             "ends with it (steps-21.jsonl)")
        named = {name: next((row[other] for other in others if row.get(other) is not None), None)
                 for name, others in NAMES.items()}
        yield f"{path}:{number}", converted(row | named, TreeRow, f"{path}:{number}")


def _acctree_runs(path: Path, short: Short) -> Iterator[Run]:
    groups: dict[tuple, list[tuple[str, TreeRow]]] = {}
    for file in _files(path, ("*.jsonl", "*.json"), "rows of accessibility trees"):
        for where, row in _tree_rows(file):
            groups.setdefault((file, row.task_id, str(row.run_id)), []).append((where, row))
    for (file, task_id, run_id), rows in groups.items():
        where, first = rows[0]
        intent = clean(first.intent or "", INTENT_CHARS) or f"WebArena task {task_id}"
        rewards = [row.reward for _, row in rows
                   if isinstance(row.reward, (int, float)) and (row.done or row.reward)]
        named = f"import-{file.stem}-{task_id}" + (f"-{run_id}" if run_id else "")
        yield Run(named, task_id, intent, [*_acctree_moves(rows, short)], where,
                  rewards[-1] == 1 if rewards else None)


def _acctree_moves(rows: list[tuple[str, TreeRow]], short: Short) -> Iterator[Move]:
    """Where rows hold neither state nor action, the row before tells the state and the row after the action
    (the last of `previous_actions`), if their histories agree."""
    none = TreeRow(0)
    table = [none, *(row for _, row in rows), none]
    for (where, _), earlier, row, later in zip(rows, table, table[1:], table[2:]):
        before, action, followed, done = row.observation, row.action, row.followed, row.previous_actions
        if (action if before is not None else followed and done) is None or not (before or followed):
            raise ValueError(f"{where}: expected `observation` and `current_action`, or `previous_actions` "
                             "and `next_state_acctree`")
        if before is None:
            more = later.previous_actions
            if not more or more[:-1] != done or earlier.previous_actions != done[:-1]:
                continue
            before, action = earlier.followed, str(more[-1])
        else:
            followed = followed or later.observation
        here, there = short(row.url or ""), short(later.url or row.url or "")
        after = Seen(followed, there, *webarena_tabs(followed)) if followed else None
        yield Move(Seen(before, here, *webarena_tabs(before)), action, after)


class GymStep(Struct):
    axtree: str | None = None
    axtree_txt: str | None = None
    url: str | None = None
    open_pages_urls: list[str] | None = None
    action: Any = None

    def __post_init__(self):
        if self.axtree is None and self.axtree_txt is None:
            raise ValueError("expected `axtree`")

    def seen(self, short: Short) -> Seen:
        url, pages = self.url or "", self.open_pages_urls or []
        tabs = [short(page) for page in pages] if len(pages) > 1 else []
        return Seen(self.axtree_txt if self.axtree is None else self.axtree, short(url), tabs,
                    pages.index(url) if tabs and url in pages else 0)


class GymSummary(Struct):
    cum_reward: float | None = None


class GymRun(Struct):
    steps: list[GymStep]
    goal: str
    benchmark: Literal["webarena"] = "webarena"
    agent: Any = None
    summary_info: GymSummary | None = None


def _browsergym_runs(path: Path, short: Short) -> Iterator[Run]:
    for file in _files(path, ("**/*.json",), "AgentRewardBench's trajectories"):
        number = re.search(r"webarena\.(\d+)$", file.stem)
        if not number:
            raise ValueError(f"{file}: expected a run of webarena in a file ..webarena.N.json")
        run = converted(_loads(file.read_text(encoding="utf-8", errors="replace"), file), GymRun, file)
        seen = [step.seen(short) for step in run.steps]
        moves = [Move(before, str(step.action), after)  # the last step has no action
                 for step, before, after in zip(run.steps, seen, [*seen[1:], None]) if step.action]
        reward = run.summary_info and run.summary_info.cum_reward
        agent = clean(str(run.agent or file.parent.name), 80)
        yield Run(f"import-{agent}-{number[1]}", int(number[1]), clean(run.goal, INTENT_CHARS), moves,
                  str(file), None if reward is None else reward == 1)


FORMATS = {"render": (_render_runs, webarena_action), "acctree": (_acctree_runs, webarena_action),
           "browsergym": (_browsergym_runs, browsergym_action)}


def read_traces(path: Path | str, format: str, dropped_ids: Set[int] = frozenset(),
                bases: Sequence[Mapping[str, str]] = ()) -> list[Episode]:
    """All runs of a file or folder but those of the tasks `dropped_ids`. `bases`: site -> address for each
    set of sites that was recorded. Raises ValueError naming the file and line that does not fit."""
    path = Path(path)
    if format not in FORMATS:
        raise ValueError(f"format {format!r}: expected one of {', '.join(FORMATS)}")
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    read_runs, read_action = FORMATS[format]
    short = partial(short_address, bases=[Addresses(known) for known in bases])
    made: dict[str, Episode] = {}
    for run in read_runs(path, short):
        if run.task_id in dropped_ids:
            continue
        try:
            found = episodes(run, read_action, short)
        except ValueError as error:
            raise ValueError(f"{run.where}: {error}") from None
        for episode in found:
            if episode.id in made:
                raise ValueError(f"{run.where}: run {episode.id!r} occurs twice; read files of the same "
                                 f"agent and task one at a time")
            made[episode.id] = episode
    return list(made.values())
