"""WebArena as text: every rule that reads the abstract states of `webarena_page`. Pure functions; nothing here sees a browser, a database or a model.

Actions are WebArena's own (`click [12]`); rules and experience model read them grounded, with the element in words (`click link 'Blue Speaker'`), because
numbers mean something on one page only. The experience model also reads and writes pages without the numbers: they follow from the order of the lines.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from dreamgym.envs.webarena.actions import parse
from dreamgym.envs.webarena.names import VOCABULARY, other_names
from dreamgym.envs.webarena.page import LINES, STOPPED, Node, Page, ground_text, read_screen
from dreamgym.envs.webarena.tasks import checks, read_task
from dreamgym.prompts import accepted, clean

MAX_TASK_CHARS = 400
# How the experience model is trained: with the tokenizer for pages; an answer may name lines of other pages and the rest of a page; half of the demonstrations
# come from other tasks; some rows show none, because a page that the buffer does not know must be written whole
TOKENS, BY_LINE, EDITS, OTHER_TASKS, WITHOUT_DEMO, REFUSED_ROWS = "pages", True, True, 0.5, 0.1, 1
MINIATURES, MINIATURE_STEPS = 10_000, 1_000      # judged steps on made-up pages of a few lines, and the first optimizer steps, which see nothing else (webarena_offline)
VERDICT_WEIGHT = 8.0                             # of "yes" and "no" in the loss: few tokens, of which few are "no", and the reward hangs on them (README, lab notes)
MORE_WORDS = VOCABULARY                          # text with the words that `renaming` brings in, for the tokenizer
EXPERIENCE_STEPS = 2_400, 2_400                  # optimizer steps of the experience model before its probes are looked at, and at most
IMITATED, IMITATION_EPISODES, IMITATION_EPOCHS = ("imperfect",), 1_000, 8     # players whose episodes are imitated, how many, and passes over them
ACTION_TOK = 64                                  # tokens that a policy may write a turn
ITERATIONS, UPDATES, LOSS_MEAN = 10, 8, "token"  # RL in the dream; optimizer steps an iteration; tokens weigh the same
LOOKED_THROUGH = 64                              # transitions retrieved for each demonstration shown: all but those of the same action are left out (`similar`)

_NUMBER = re.compile(r"^\[\d+\] ", re.MULTILINE)
_GROUNDED = re.compile(r"(?P<verb>click|hover|type) (?P<role>[A-Za-z]+) '(?P<name>(?:[^']|(?<=\w)'(?=\w))*)'(?: \[(?P<text>.*?)\](?: \[(?P<enter>[01])\])?)?")
CLICKABLE = frozenset("link button checkbox radio switch menuitem tab option".split())
TYPED = frozenset("textbox searchbox combobox listbox spinbutton slider date datetime time color".split())
MOVES = ("go_back", "go_forward", "close_tab", "tab_focus")


# ---- reading states and actions ----------------------------------------------------------------------------------------------------------------

@lru_cache(maxsize=50_000)
def read_page(state: str) -> Page | None:
    """The parts of a state; None when the text is not one."""
    try:
        return read_screen(state)
    except ValueError:
        return None


def unnumbered(state: str, noted: bool = False) -> str:
    """A state as the experience model reads it: without the lines' numbers, and without the note on the action before; as it writes it, with the note."""
    return _NUMBER.sub("", state if noted else state.rsplit("\nnote: ", 1)[0])


def numbered(text: str) -> str:
    """The inverse of `unnumbered`: lines after the address are numbered from 1, or from where a long page's window begins. A text that is no page stays."""
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith("url: ")), None)
    if start is None:
        return text
    ends = [line for line in lines if re.fullmatch(r"window [1-9]\d* of [1-9]\d*", line)]
    first = (int(ends[-1].split()[1]) - 1) * LINES + 1 if ends else 1
    rows = [line if line in ends or line.startswith("note: ") else f"[{first + i}] {line}" for i, line in enumerate(lines[start + 1:])]
    return "\n".join([*lines[:start + 1], *rows])


@dataclass
class Command:
    """A grounded action. `node`: the line it is meant for, None where it is for none or the page has no such line."""
    kind: str
    node: Node | None = None
    text: str = ""
    enter: bool = True
    known: bool = True                           # an action of the grammar


def read_action(state: str, action: str) -> Command:
    """An action as the policy writes it, or grounded, on a page."""
    page = read_page(state)
    if match := _GROUNDED.fullmatch(action):
        found = [node for node in page.lines.values() if (node.role, node.name) == (match["role"], match["name"])] if page else []
        return Command(match["verb"], found[0] if found else None, match["text"] or "", match["enter"] != "0")
    try:
        parsed = parse(action)
    except ValueError:
        return Command("", known=False)
    node = page.lines.get(parsed.element) if page and parsed.kind in ("click", "hover", "type") else None
    return Command(parsed.kind, node, parsed.text if parsed.kind != "tab_focus" else str(parsed.element), parsed.enter)


def ground(state: str, action: str) -> str:
    """The action with its element in words; what is no action stays as it is."""
    try:
        return ground_text(state, str(parse(action)))
    except ValueError:
        return clean(action)


def said(state: str, action: str) -> str:
    """What a policy writes to do an action: the line it is about, in words, and then the action. Which line is meant follows from the task, and its number from
    the page: a small model learns the two one by one. For `stop` it is the first line that shows the answer."""
    command, page = read_action(state, action), read_page(state)
    node = command.node
    if command.kind == "stop" and command.text and page:
        shown = re.compile(rf"(?<!\w){re.escape(command.text)}(?!\w)")
        node = next((line for line in page.lines.values() if shown.search(line.name)), None)
    return f"{node.role} '{node.name}'\n{action}" if node else action


def page_kind(state: str) -> str:
    """The site of a page; stopped | unknown."""
    page = read_page(state)
    return "stopped" if state == STOPPED else "unknown" if page is None else re.split(r"[/?]", page.address)[0] or "empty"


def retrieval_text(task_text: str, state: str, action: str) -> str:
    """What the replay buffer is searched by: the action, and the address it is done at, because a button's name says little without its page."""
    page = read_page(state)
    return f"{action}\n{page.address if page else ''} {page.title if page else ''}\n{action}"


def similar(action: str, demo_action: str) -> bool:
    """Whether a retrieved demonstration may be shown: only of the same action."""
    return action == demo_action


def action_type(state: str, action: str) -> str:
    """link | button | search | fill | choose | tick | scroll | back | tab | goto | hover | press | stop | refused (what this page shows that nothing comes of)."""
    command, page = read_action(state, action), read_page(state)
    if not command.known or page is None:
        return "refused"
    kind, node = command.kind, command.node
    if kind in ("click", "hover", "type") and node is None:
        return "refused"
    if kind == "click":
        return {"link": "link", "button": "button"}.get(node.role, "tick" if node.role in ("checkbox", "radio", "switch") else "refused")
    if kind == "type":
        if node.options:
            return "choose" if command.text.lower() in map(str.lower, node.options) else "refused"
        return "refused" if node.role not in TYPED else "search" if command.enter else "fill"
    if kind == "scroll":
        return "scroll" if 0 <= page.window + (1 if command.text == "down" else -1) < page.windows else "refused"
    if kind == "tab_focus":
        return "tab" if int(command.text) < max(1, len(page.tabs)) else "refused"
    if kind == "close_tab":
        return "tab" if len(page.tabs) > 1 else "refused"
    return {"go_back": "back", "go_forward": "back", "new_tab": "tab"}.get(kind, kind)


def valid(state: str, action: str, next_state: str) -> bool:
    """Whether an imagined action counts as one that the browser takes: the page that follows has no note."""
    page = read_page(next_state)
    return next_state == STOPPED or (page is not None and not page.error)


def judged(state: str, action: str) -> bool:
    """True for `stop`: task, page and answer alone decide. The experience model then sees neither history nor demonstrations."""
    return read_action(state, action).kind == "stop"


def possible(state: str, action: str, next_state: str, reward: float) -> bool:
    """What an imagined page must at least be: a page, and the end after `stop`, which alone may pay."""
    if judged(state, action) or next_state == STOPPED or reward:
        return judged(state, action) and next_state == STOPPED
    return read_page(next_state) is not None


def determined(history: list[str], state: str, action: str) -> bool:
    """True when the next page follows from this page and those before it in the episode; False where a page is seen for the first time, or was changed."""
    return action_type(state, action) in ("refused", "fill", "choose", "tick", "hover", "back", "stop")


def recall(history: list[tuple[str, str]], state: str, action: str, views: int) -> list[tuple[str, str]]:
    """The part of the (state, action) history that decides what follows: the last pages where the agent goes back or to another tab; else the page that the same
    action led to before, and the last one that told of something done."""
    kind = action_type(state, action)
    if kind in ("back", "tab"):
        return history[-views:]
    if kind not in ("link", "button", "search", "goto"):
        return []
    led = [history[i + 1] for i, (page, done) in enumerate(history[:-1]) if done == action]
    told = [pair for pair in history if message(pair[0])]
    chosen = [*told[-views:], *led[-views:]]
    return [pair for i, pair in enumerate(chosen) if pair not in chosen[i + 1:]][-views:]


def message(state: str) -> str:
    """What a page tells of the action before, in its last line ('You added Blue Speaker to your cart.'); '' where it tells nothing."""
    page = read_page(state)
    last = list(page.lines.values())[-1] if page and page.lines else None
    return last.name if last and last.role == "text" and last.name.endswith(".") else ""


def with_note(state: str, note: str) -> str:
    """The same page after an action that came to nothing."""
    page = read_page(state)
    return str(replace(page, error=note)) if page else state


def contradictions(steps: list[tuple[str, str, str]]) -> tuple[int, int]:
    """(pages seen again, those of them that read otherwise than before) of an episode's (state, action, next state), as long as nothing was sent that may change them."""
    seen: dict[tuple[str, int], str] = {}
    checked = broken = 0
    for state, action, next_state in steps:
        page = read_page(next_state)
        if action_type(state, action) in ("button", "search", "choose", "fill", "tick", "press") or (page and message(next_state)):
            seen = {}
        if page is None:
            continue
        key, text = (page.address, page.window), "\n".join(map(str, page.lines.values()))
        checked += key in seen
        broken += seen.get(key, text) != text
        seen[key] = text
    return checked, broken


def renaming(rng, action: str, taken: bool, start: str = "") -> Callable[[str], str] | None:
    """Other names for things, the same in every text of one training row (see webarena_names): for half of the experience model's rows, and with `start`, for every
    demonstration that a policy imitates, which else learns the few things that are sold by heart."""
    return None if not start and rng.random() < 0.5 else other_names(rng)


# ---- reading tasks -----------------------------------------------------------------------------------------------------------------------------

def readable(text: str) -> bool:
    """Whether `read_task` can read a sentence."""
    return len(text) <= MAX_TASK_CHARS and accepted(read_task, text)


def difficulty(text: str) -> int:
    """Actions that the shortest way takes."""
    return len(read_task(text).template.plan)


def topics(text: str) -> list[str]:
    """What a variation of a task may keep."""
    wanted = read_task(text)
    return [f"template {wanted.template.id}", *dict(wanted.values).values()]


def needs(text: str) -> set[str]:
    """What the world must be known to have for a task to make sense: its kind of task, and every name in it."""
    return set(topics(text))


def offers(state: str) -> set[str]:
    """What a page shows that the world has, in the words of `needs`."""
    page = read_page(state)
    return {node.name for node in page.lines.values()} if page else set()


def starts(text: str, start: str) -> bool:
    """Whether a task can be done from a first page: it is on the task's site, or on the page that links to all."""
    return page_kind(start) in (*read_task(text).template.sites, "homepage")


def finds(task_text: str, state: str, action: str, next_state: str) -> bool | None:
    """Whether a search showed what the task names; None for any other step. A dream that finds more is easier than the world."""
    page = read_page(next_state)
    if action_type(state, action) != "search" or page is None or not readable(task_text):
        return None
    return any(name in node.name for name in dict(read_task(task_text).values).values() for node in page.lines.values())


def rule_success(task_text: str, state: str, action: str, next_state: str = "") -> bool | None:
    """The rule check's verdict on `stop`: True / False; None for other actions, or where the task cannot be read."""
    if not judged(state, action) or not readable(task_text):
        return None
    return all(met for _, _, met in checks(read_task(task_text), state, action))
