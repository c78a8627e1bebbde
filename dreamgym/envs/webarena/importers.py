"""Recorded WebArena runs of other people -> our episodes, so that an experience model can start from them.
`read_traces(path, format)` reads

    render      WebArena's own traces: a folder of render_N.html and merge_log.txt (PASS or FAIL), or one file
    acctree     JSON lines (or a JSON list, or {"data": [...]}) of accessibility-tree transitions: task_id,
                observation, action or current_action, next_observation or next_state_acctree; rows without
                observation and action (thuml/webarena-world-model-cot) are chained by their order
    browsergym  AgentRewardBench's JSON files, one run each, or a folder of them: `axtree` text, BrowserGym
                actions, cum_reward

States go through ax_tree_sources and `abstract`, ids in actions become line numbers, BrowserGym's calls
become WebArena's grammar. A page longer than a window gets the `scroll` steps that lead to the element acted
on. What this grammar cannot say (a drag, two calls at once, an id that was not there) is left out where
nothing changed and otherwise cuts the run in two, so that every kept step follows from its own action. A
reward needs a verdict: without one the last `stop` is left out. An agent's thoughts are left out, too: a
step's `reasoning` says why the next state follows. These runs are of the benchmark's own tasks: `dropped_ids`
keeps those of the test set (`old_task_id` in WebArena-Lite) away from training. Not read: AgentLab's pickles
(never unpickle what others made), Playwright traces, screenshots.
"""
from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from lxml import etree

from dreamgym.envs.webarena.actions import ON_ELEMENT, Action, parse
from dreamgym.envs.webarena.ax_tree_sources import from_text, text_rows, webarena_tabs
from dreamgym.envs.webarena.page import STOPPED, Screen, abstract, clean
from dreamgym.envs.webarena.text import ground
from dreamgym.episode import Episode, Step, StopReason, Task

PORTS = {7770: "shopping", 7780: "shopping_admin", 9999: "reddit", 8023: "gitlab", 8888: "wikipedia",
         3000: "map", 4399: "homepage"}
HOSTS = {"onestopmarket.com": "shopping", "luma.com": "shopping_admin", "reddit.com": "reddit",
         "gitlab.com": "gitlab", "wikipedia.org": "wikipedia",
         # the names that WebArena shows to agents instead
         "openstreetmap.org": "map", "homepage.com": "homepage"}
_VERDICT = re.compile(r"\((PASS|FAIL)\)\s+\S*?(\d+)\.json")      # in merge_log.txt
_PREFIX = re.compile(r"^/(?:wikipedia_en[^/]*|admin(?=[/?]|$))")


@dataclass
class Seen:
    """One recorded observation. `tabs` are titles."""
    text: str
    url: str = ""
    tabs: list[str] = field(default_factory=list)
    tab: int = 0


@dataclass
class Move:
    """One recorded transition; `after` None: not recorded."""
    before: Seen
    action: str
    after: Seen | None


@dataclass
class Run:
    """One recorded run. `success` None: no verdict. `where` names file and line."""
    id: str
    task_id: int
    intent: str
    moves: list[Move]
    where: str
    success: bool | None = None


def short_address(url: str) -> str:
    """A recorded url as our states show it: the site is known by WebArena's port or public name."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        site = PORTS.get(parts.port or 0)
    except ValueError:                           # a port that is no number
        site = None
    site = site or HOSTS.get((parts.hostname or "").removeprefix("www."))
    if not site:
        return url.removeprefix("http://").removeprefix("https://").split("#")[0] or "unknown"
    path = _PREFIX.sub("", parts.path) if site in ("shopping_admin", "wikipedia") else parts.path
    return site + (path if path != "/" else "") + (f"?{parts.query}" if parts.query else "")


# ---- actions -----------------------------------------------------------------------------------------------

Target = Callable[[str], int | None]  # id in the recorded text -> position among the page's shown elements


def webarena_action(text: str, target: Target) -> Action | None:
    """WebArena's action text -> ours; None for one that says nothing, or names an element that was not there.
    `where [12] is ..` comes from the action history, which writes the Enter of `type` as a blank at the end
    of the words."""
    said, _, history = text.partition(" where [")
    if history and (match := re.fullmatch(r"type ?\[(\d+)\] ?\[(.*)\]", said, re.DOTALL)):
        said = f"type [{match[1]}] [{clean(match[2], 10**6)}] [{int(match[2].endswith((' ', chr(10))))}]"
    try:
        action = parse(re.sub(r"^page_focus\b", "tab_focus", said.strip()))
    except ValueError:
        return None
    if action.kind == "goto":
        return Action("goto", text=short_address(action.text))
    return _aimed(action, str(action.element), target)


def _aimed(action: Action, ref: str, target: Target) -> Action | None:
    if action.kind not in ON_ELEMENT:
        return action
    element = target(ref)
    return Action(action.kind, element, action.text, action.enter) if element else None


def _call(text: str) -> tuple[str, list[Any]]:
    """`fill('12', 'blue')` -> ('fill', ['12', 'blue']): read as literals, never run. Raises ValueError for
    anything but one call of literals."""
    try:
        body = ast.parse(text.strip()).body
        call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("not one call")
        return call.func.id, [ast.literal_eval(argument)
                              for argument in [*call.args, *(k.value for k in call.keywords)]]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"action {text[:60]!r}: {error}") from None


def browsergym_action(text: str, target: Target) -> Action | None:
    """A BrowserGym call -> WebArena's grammar; None for what has no such form (noop, drag, coordinates,
    several calls)."""
    try:
        name, arguments = _call(text)
    except ValueError:
        return None
    first, second = ([str(a[0] if isinstance(a, list) and len(a) == 1 else a) for a in arguments]
                     + ["", ""])[:2]
    second = clean(second, 10**6)
    match name:
        case "click" | "check" | "uncheck" | "focus" if second in ("", "left"):
            return _aimed(Action("click"), first, target)
        case "hover":
            return _aimed(Action("hover"), first, target)
        case "fill" | "select_option" | "clear":
            return _aimed(Action("type", text=second, enter=False), first, target)
        case "press" | "keyboard_press":
            return Action("press", text=second if name == "press" else first)
        case "scroll" if second.lstrip("-").replace(".", "", 1).isdigit():
            return Action("scroll", text="up" if second.startswith("-") else "down")
        case "goto":
            return Action("goto", text=short_address(first))
        case "go_back" | "go_forward" | "new_tab":
            return Action(name)
        case "tab_close":
            return Action("close_tab")
        case "tab_focus" if first.isdigit():
            return Action("tab_focus", int(first))
        case "send_msg_to_user":
            return Action("stop", text=clean(first, 10**6))
        case "report_infeasible":
            return Action("stop", text="N/A")
    return None


# ---- runs -> episodes --------------------------------------------------------------------------------------

class Reader:
    """Reads the observations and actions of one format."""

    def __init__(self, feed: Callable, action: Callable[[str, Target], Action | None]):
        self.feed, self.action = lru_cache(8)(feed), action  # a page is asked for several times in a row

    def screen(self, seen: Seen, window: int = 0) -> Screen:
        title, nodes = self.feed(seen.text)
        return abstract(title, short_address(seen.url), nodes, seen.tabs, seen.tab, window)

    def elements(self, seen: Seen) -> list[tuple[int, int, str]]:
        """(window, line, id in the recorded text) of everything that a page shows."""
        return [(window, line, node.ref) for window in range(self.screen(seen).windows)
                for line, node in self.screen(seen, window).refs.items()]

    def target(self, seen: Seen) -> Target:
        """An element that the state does not show is meant for what it holds, or else for what holds it (the
        text of a link; a cell around a button)."""
        shown = {ref: i for i, (_, _, ref) in enumerate(self.elements(seen), 1)}
        rows = text_rows(seen.text)

        def find(ref: str) -> int | None:
            at = next((i for i, row in enumerate(rows) if row.ref == ref), None) if ref else None
            if at is None:
                return None
            end = next((i for i in range(at + 1, len(rows)) if rows[i].depth <= rows[at].depth), len(rows))
            around, depth = [], rows[at].depth
            for row in reversed(rows[:at]):
                if row.depth < depth:
                    around, depth = [*around, row], row.depth
            return next((shown[row.ref] for row in [*rows[at:end], *around] if row.ref in shown), None)
        return find


FORMATS = {"render": Reader(from_text, webarena_action), "acctree": Reader(from_text, webarena_action),
           "browsergym": Reader(from_text, browsergym_action)}


def episodes(run: Run, reader: Reader) -> list[Episode]:
    """The parts of a run that can be told in our grammar, each an episode of its own."""
    parts: list[list[Step]] = [[]]
    window = 0                                   # of the last state: scrolling is ours
    for move in run.moves:
        steps, first = parts[-1], reader.screen(move.before)
        window = window if steps else 0
        screen = reader.screen(move.before, window)
        if steps and steps[-1].next_state != screen.text:
            parts.append([])
            steps, window, screen = parts[-1], 0, first
        action = reader.action(move.action, reader.target(move.before))
        after = reader.screen(move.after) if move.after else None
        still = after is not None and after.text == first.text
        if action is None or (action.kind == "scroll" and still) or (after is None and action.kind != "stop"):
            if not still:
                parts.append([])
            continue
        wanted = window
        if action.kind in ON_ELEMENT:
            wanted, line, _ = reader.elements(move.before)[action.element - 1]
            action = Action(action.kind, line, action.text, action.enter)
        while window != wanted:  # never leaves the page: `wanted` is the window of one of its elements
            way, window = ("down", window + 1) if window < wanted else ("up", window - 1)
            further = reader.screen(move.before, window)
            steps.append(_step(screen.text, Action("scroll", text=way), further.text))
            screen = further
        if action.kind == "stop":
            if run.success is not None:
                steps.append(_stop(screen.text, action, run.success))
            break
        next_text = screen.text if still else after.text
        window = window if still else 0
        steps.append(_step(screen.text, action, next_text))
    return _named(run, [part for part in parts if part], whole=bool(parts[-1]))


def _step(state: str, action: Action, next_state: str, **more: Any) -> Step:
    return Step(state=state, action=str(action), next_state=next_state, grounded=ground(state, str(action)),
                **more)


def _stop(state: str, action: Action, success: bool) -> Step:
    return _step(state, action, STOPPED, reward=float(success), done=True)


def _named(run: Run, parts: list[list[Step]], whole: bool) -> list[Episode]:
    """`whole`: the last part reaches the run's last recorded page. BrowserGym ends a run at success without a
    `stop`: one is put there, as this world asks it."""
    if whole and parts and run.success and not parts[-1][-1].done:
        parts[-1].append(_stop(parts[-1][-1].next_state, Action("stop"), True))
    made = []
    for i, steps in enumerate(parts):
        last = i + 1 == len(parts)
        stop = StopReason.STEP_LIMIT if last and whole else StopReason.RUNNING
        if steps[-1].done:
            stop = StopReason.SUCCESS if steps[-1].reward else StopReason.FAILURE
        task = Task(id=f"webarena-{run.task_id}", text=run.intent, env="webarena", start=steps[0].state,
                    goal={"task_id": run.task_id})
        name = f"{run.id}-part{i + 1}" if len(parts) > 1 else run.id
        made.append(Episode(id=name, task=task, steps=steps, source="imported", stop=stop,
                            raw_score=steps[-1].reward))
    return made


# ---- files -> runs -----------------------------------------------------------------------------------------

def _classed(root: etree._Element, name: str) -> list[str]:
    return ["".join(el.itertext()).strip("\n") for el in root.iter("div", "h3") if el.get("class") == name]


def _render_runs(path: Path) -> Iterator[Run]:
    files = [path] if path.is_file() else sorted(path.glob("render_*.html"))
    if not files:
        raise ValueError(f"{path}: no render_N.html there; expected WebArena's traces")
    log = files[0].parent / "merge_log.txt"
    text = log.read_text(errors="replace") if log.exists() else ""
    verdicts = {int(number): word == "PASS" for word, number in _VERDICT.findall(text)}
    for file in files:
        root = etree.fromstring(file.read_bytes(), etree.HTMLParser(encoding="utf-8", huge_tree=True))
        first = root.find(".//pre") if root is not None else None
        config = "".join(first.itertext()) if first is not None else ""
        number = re.search(r"^task_id: (\d+)$", config, re.MULTILINE)
        intent = re.search(r"^intent: (.+)$", config, re.MULTILINE)
        if not number or not intent:
            raise ValueError(f"{file}: no `task_id: N` and `intent: ..` in its first <pre>; expected a trace "
                             "that WebArena rendered")
        yield Run(f"import-{file.parent.name}-{number[1]}", int(number[1]), clean(intent[1], 1000),
                  _render_moves(file, root), str(file), verdicts.get(int(number[1])))


def _render_moves(file: Path, root: etree._Element) -> list[Move]:
    # the trace never closes its state_obv divs, so that later steps lie inside earlier ones: only the <pre>
    # of each is its own
    shown = [el.find("pre") for el in root.iter("div") if el.get("class") == "state_obv"]
    texts = ["".join(pre.itertext()) for pre in shown if pre is not None]
    urls, said, meant = (_classed(root, name) for name in ("url", "raw_parsed_prediction", "parsed_action"))
    if not texts or len(texts) != len(urls) or len(texts) != len(said):
        raise ValueError(f"{file}: {len(texts)} state_obv, {len(urls)} url, {len(said)} "
                         f"raw_parsed_prediction; expected the same number of each, at least one")
    seen = [Seen(text, url.removeprefix("URL: ").strip(), *webarena_tabs(text))
            for text, url in zip(texts, urls)]
    meant += [""] * (len(said) - len(meant))
    return [Move(before, _spoken(raw, parsed), after)
            for before, after, raw, parsed in zip(seen, [*seen[1:], None], said, meant)]


def _spoken(raw: str, parsed: str) -> str:
    """The agent's own words when they hold an action, else what WebArena made of them."""
    try:
        parse(raw)
        return raw
    except ValueError:
        return parsed or raw


def _json_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """(where, row) of JSON lines, a JSON list, or {"data": list}. Raises ValueError naming file and line or
    entry."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix == ".json":
        whole = _loads(text, str(path))
        entries = whole.get("data", [whole]) if isinstance(whole, dict) else whole
        if not isinstance(entries, list):
            raise ValueError(f"{path}: found {type(entries).__name__}, expected a list of objects")
        rows = enumerate(entries, 1)
    else:
        lines = enumerate(text.splitlines(), 1)
        rows = ((i, _loads(line, f"{path}:{i}")) for i, line in lines if line.strip())
    for number, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: found {type(row).__name__}, expected an object")
        yield f"{path}:{number}", row


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({str(error)[:100]})") from None


def _field(row: dict, names: Iterable[str], where: str, kinds: type | tuple[type, ...],
           default: Any = ...) -> Any:
    """The first of some fields that a row has. Raises ValueError when it is missing without a default, or of
    another type."""
    value = next((row[name] for name in names if row.get(name) is not None), default)
    if value is ... or (value is not default and not isinstance(value, kinds)):
        found = "nothing" if value is ... else type(value).__name__
        raise ValueError(f"{where}: field {' or '.join(f'`{name}`' for name in names)}: found {found}, "
                         f"expected {getattr(kinds, '__name__', 'a number')}")
    return value


OBSERVED = ("observation", "state", "acctree")
ACTED = ("current_action", "action")
FOLLOWED = ("next_state_acctree", "next_observation", "next_state")
INSTRUCTION = ("objective", "intent", "goal", "task")


def _acctree_runs(path: Path, intents: Mapping[int, str]) -> Iterator[Run]:
    groups: dict[tuple, list[tuple[str, dict]]] = {}
    for where, row in _json_rows(path):
        task_id = _field(row, ("task_id",), where, int)
        groups.setdefault((task_id, str(row.get("run_id", ""))), []).append((where, row))
    for (task_id, run_id), rows in groups.items():
        where, first = rows[0]
        intent = clean(_field(first, INSTRUCTION, where, str, ""), 1000)
        intent = intent or intents.get(task_id) or f"WebArena task {task_id}"
        rewards = [row["reward"] for _, row in rows
                   if isinstance(row.get("reward"), (int, float)) and (row.get("done") or row["reward"])]
        success = rewards[-1] == 1 if rewards else None
        named = f"import-{path.stem}-{task_id}" + (f"-{run_id}" if run_id else "")
        yield Run(named, task_id, intent, [*_acctree_moves(rows)], where, success)


def _acctree_moves(rows: list[tuple[str, dict]]) -> Iterator[Move]:
    """A row's next state follows from its own action. Where rows hold neither state nor action, the state is
    the next state of the row before and the action the last of the row after (`previous_actions`), if the two
    runs of actions agree."""
    for i, (where, row) in enumerate(rows):
        url = _field(row, ("url",), where, str, "")
        followed = _field(row, FOLLOWED, where, str, "")
        later = rows[i + 1][1] if i + 1 < len(rows) else {}
        if any(row.get(name) is not None for name in OBSERVED):
            before, action = _field(row, OBSERVED, where, str), _field(row, ACTED, where, str)
            followed = followed or _field(later, OBSERVED, where, str, "")
        else:
            done, more = _field(row, ("previous_actions",), where, list), later.get("previous_actions")
            earlier = rows[i - 1][1] if i else {}
            if not followed:
                raise ValueError(f"{where}: no `observation` and no `next_state_acctree`; expected an "
                                 "accessibility tree")
            agree = more and isinstance(more, list) and more[:-1] == done
            if not agree or earlier.get("previous_actions") != done[:-1]:
                continue
            before, action = _field(earlier, FOLLOWED, where, str), str(more[-1])
        later_url = _field(later, ("url",), where, str, "") or url
        for text in filter(None, (before, followed)):
            if not re.search(r"^\s*\[\d+\] \w+ ", text, re.MULTILINE):
                raise ValueError(f"{where}: observation {text[:40]!r} has no line of the form "
                                 "[N] ROLE 'NAME'")
        yield Move(Seen(before, url, *webarena_tabs(before)), action,
                   Seen(followed, later_url, *webarena_tabs(followed)) if followed else None)


def _browsergym_runs(path: Path) -> Iterator[Run]:
    files = [path] if path.is_file() else sorted(path.rglob("*.json"))
    if not files:
        raise ValueError(f"{path}: no JSON files there; expected AgentRewardBench's trajectories")
    for file in files:
        record = _loads(file.read_text(encoding="utf-8", errors="replace"), str(file))
        where, number = str(file), re.search(r"webarena\.(\d+)$", file.stem)
        if not isinstance(record, dict) or not number or record.get("benchmark", "webarena") != "webarena":
            found = record.get("benchmark") if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"{where}: benchmark {str(found)!r}; expected a run of webarena in a file "
                             "..webarena.N.json")
        steps = [_field({"step": step}, ("step",), f"{where}, steps[{i}]", dict)
                 for i, step in enumerate(_field(record, ("steps",), where, list))]
        summary = _field(record, ("summary_info",), where, dict, {})
        reward = _field(summary, ("cum_reward",), where, (int, float), None)
        agent = clean(str(record.get("agent", file.parent.name)), 80)
        yield Run(f"import-{agent}-{number[1]}", int(number[1]),
                  clean(_field(record, ("goal",), where, str), 1000), _browsergym_moves(steps, where), where,
                  None if reward is None else reward == 1)


def _browsergym_moves(steps: list[dict], where: str) -> list[Move]:
    seen, moves = [], []
    for i, step in enumerate(steps):
        here = f"{where}, steps[{i}]"
        url = _field(step, ("url",), here, str, "")
        pages = _field(step, ("open_pages_urls",), here, list, [])
        tabs = [short_address(str(page)) for page in pages] if len(pages) > 1 else []
        seen.append(Seen(_field(step, ("axtree", "axtree_txt"), here, str), url, tabs,
                         pages.index(url) if tabs and url in pages else 0))
    for step, before, after in zip(steps, seen, [*seen[1:], None]):
        if step.get("action"):                   # the last record has none: it only shows where the run ended
            moves.append(Move(before, str(step["action"]), after))
    return moves


def read_traces(path: Path | str, format: str, dropped_ids: Set[int] = frozenset(),
                intents: Mapping[int, str] = MappingProxyType({})) -> list[Episode]:
    """All runs of a file or folder as episodes, without those of the tasks in `dropped_ids`. `intents` gives
    instructions by task id where a format has none. Raises ValueError naming the file, and the line or step,
    that does not fit the format."""
    path = Path(path)
    if format not in FORMATS:
        raise ValueError(f"format {format!r}: expected one of {', '.join(FORMATS)}")
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    runs = {"render": _render_runs, "acctree": lambda p: _acctree_runs(p, intents),
            "browsergym": _browsergym_runs}[format](path)
    made: dict[str, Episode] = {}
    for run in runs:
        if run.task_id in dropped_ids:
            continue
        try:
            found = episodes(run, FORMATS[format])
        except ValueError as error:
            raise ValueError(f"{run.where}: {error}") from None
        for episode in found:
            if episode.id in made:
                raise ValueError(f"{run.where}: run {episode.id!r} occurs twice; read files of the same "
                                 f"agent and task one at a time")
            made[episode.id] = episode
    return list(made.values())
