"""The rule-based teacher for the own sites: one line of reasoning for a transition, from its pages, and of a `stop` from the task's constraints.

A trace states facts first and the verdict last, because a small model can only conclude from what it has already written: the element is named as the page names
it, a form's fields are read off before its button is pressed, and a task is checked one constraint after the other against the page. What leads on says where,
and whether that page was seen in this episode. `check_trace` holds a trace against its outcome.
"""
from __future__ import annotations

import re
from itertools import zip_longest

from dreamgym.envs.webarena import text as text
from dreamgym.envs.webarena.page import Page
from dreamgym.envs.webarena.tasks import Wanted, address, fields, filled, is_missing, kinds_of_checks, read_task

SAME, SUCCESS, NOT_DONE = "so the same page", "so success", "so not done"
ELSEWHERE = "elsewhere"                          # of a constraint that the page does not show
NOWHERE = "nothing"                              # the address of an empty tab
MOST_FIELDS = 4                                  # of a form, in a trace
_WORDS = re.compile(r"[\w$]+(?:-\d{4})?")        # of 'Blue Lamp', 'carl/smart-bot', '$12.99' and '555-1234'
_LEADS = re.compile(r" so (\S+) is (new|known|changed)\b")
_HOLDS = re.compile(r" so (.+?) holds (.+?)$")


def explain(task_text: str, history: list[str], state: str, action: str, next_state: str, reward: float) -> str:
    """The reasoning for one real transition; history = the earlier states of the episode. '' when a page is not in the abstract form."""
    before, after = text.read_page(state), text.read_page(next_state)
    wanted = read_task(task_text) if text.readable(task_text) else None
    if before is None or (after is None and next_state != text.STOPPED):
        return ""
    if text.judged(state, action):
        return f"check {' ; '.join(_verdicts(wanted, state, action, bool(reward)))}".rstrip() + f" {SUCCESS if reward else NOT_DONE}"
    if after is None:
        return ""
    facts = _facts(before, after, state, action)
    if text.unnumbered(next_state) == text.unnumbered(state):
        return f"{facts} {SAME}"
    kind, command = text.action_type(state, action), text.read_action(state, action)
    if kind in ("fill", "choose") and after.address == before.address:
        return f"{facts} so {command.node.name} holds {_value(after, command.node) or 'nothing'}"
    if kind == "tick":
        return f"{facts} so {'checked' if not command.node.checked else 'not checked'}"
    told = text.message(next_state)
    tells = [f"tells {told}"] if told and told != text.message(state) else []
    return " ; ".join([f"{facts} so {_leads(history, state, next_state, after)}", *tells, *_shown(wanted, after)])


def _verdicts(wanted: Wanted | None, state: str, action: str, success: bool) -> list[str]:
    """The task's constraints, each with what the page shows; where the evaluators knew more than the page, that too."""
    rows = kinds_of_checks(wanted, state, action) if wanted else []
    facts = []
    for i, (kind, label, (asked, found, met)) in enumerate(rows):
        if i == 0:
            others = all(check.row.met for check in rows[1:])
            facts.append(f"page {_place(wanted, state, met, others)}")
        elif label or kind == "answer":
            second = f"stop [{asked}]" if kind == "answer" else f"for {asked}"
            facts.append(f"{f'{kind} {label}'.strip()} {found} {second} {_by_word(found, asked, met) or _yes(met)}")
        else:
            facts.append(f"{kind} {_compared(f'without {asked[3:]}' if asked.startswith('no ') else asked, found, met)}")
    return facts if not rows or success == all(check.row.met for check in rows) else [*facts, f"{ELSEWHERE} {_yes(success)}"]


def _compared(asked: str, found: str, met: bool) -> str:
    return _by_word(asked, found, met) or f"{asked} : {found} {_yes(met)}"


def _by_word(one: str, other: str, met: bool) -> str:
    """Names compared word by word, each word just before what stands in its place: that a token is the one before it again is what a small model sees most easily (it
    needs no more than the heads that copy), while it hardly learns to compare names as a whole. '' where the words do not decide.

    Where the page says what it shows ('price $12.99'), both are written out before, each after the words that stand before it on the page and in the action. Left to
    find the second word while it compares, a model repeats the first, for mostly they are the same."""
    words, others = _WORDS.findall(one), _WORDS.findall(other)
    if (words == others) != met:
        return ""
    return " ".join(f"{word} {found} {_yes(word == found)}" for word, found in zip_longest(words, others, fillvalue="none"))


def _place(wanted: Wanted, state: str, met: bool, others: bool) -> str:
    """The page wanted, the page this is, and whether they agree. What other constraints compare is `*` here (an address spells it in its own way), unless the
    address alone tells that it is another one, and in nothing else."""
    template, missing = wanted.template, is_missing(wanted, state)
    pattern = (template.missing[0] if missing else template.page).split(" |OR| ")[0]
    compared = set() if missing else {name for line in template.shows for name in fields(line, as_said=True)}
    asked, shown = _places(pattern, wanted, state, compared)
    if asked == shown and others and not met:
        asked, shown = _places(pattern, wanted, state, set())
    return f"{asked} : {shown} {_yes(shown == asked or met)}"


def _places(pattern: str, wanted: Wanted, state: str, compared: set[str]) -> tuple[str, str]:
    """The address wanted and the part of the page's that it speaks of, both with `*` for the parameters `compared`."""
    asked = filled(re.sub(r"\{(\w+)[.\w]*\}", lambda m: "*" if m[1] in compared else m[0], pattern), dict(wanted.values))
    path, _, query = asked.partition("?")
    there, _, given = address(state).partition("?")
    keys = dict(pair.partition("=")[::2] for pair in given.split("&"))
    same = re.match(re.escape(path).replace(r"\*", ".+"), there) is not None
    found = [f"{key}={value if value == '*' and key in keys else keys.get(key, 'none')}" for key, _, value in (pair.partition("=") for pair in query.split("&"))] if query else []
    return asked, "?".join([path if same else there, *(["&".join(found)] if found and same else [])])


# ---- the facts of each action ------------------------------------------------------------------------------------------------------------------

def _facts(before: Page, after: Page, state: str, action: str) -> str:
    """What the page says of an action before anything comes of it."""
    command, kind = text.read_action(state, action), text.action_type(state, action)
    node = command.node
    named = f"{node.role} {node.name}".strip() if node else ""
    if not command.known:
        return "not an action"
    if command.kind in ("click", "hover", "type") and node is None:
        return "not on this page"
    if kind == "refused":
        return _refusal(command, named, before)
    if kind == "button":
        return f"{named} with {fields}" if (fields := _form(before, node)) else named
    if kind == "choose":
        return f"{node.name} has {command.text} yes"
    if kind == "search":
        return f"{node.name} for {command.text}"
    if kind in ("link", "tick", "hover", "fill"):
        return named
    return {"back": command.kind.replace("go_", ""), "scroll": f"window {after.window + 1} of {after.windows}", "tab": f"tab {after.title}",
            "goto": f"address {command.text}", "press": f"key {command.text}"}[kind]


def _refusal(command: text.Command, named: str, before: Page) -> str:
    if command.kind == "type" and command.node.options:
        return f"{command.node.name} has {command.text} no"
    if command.kind == "scroll":
        return f"window {before.window + 1} of {before.windows}"
    if command.kind in ("tab_focus", "close_tab"):
        return f"tabs {max(1, len(before.tabs))}"
    return f"{named} takes no {'text' if command.kind == 'type' else 'click'}"


def _form(page: Page, button) -> str:
    """What the fields just above a button hold."""
    nodes = list(page.lines.values())
    at = next((i for i, node in enumerate(nodes) if node is button), 0)
    fields = []
    while at and (nodes[at - 1].role in text.TYPED or nodes[at - 1].checked is not None) and len(fields) < MOST_FIELDS:
        at -= 1
        value = nodes[at].value if nodes[at].checked is None else _yes(nodes[at].checked)
        fields.insert(0, f"{nodes[at].name} {value or 'empty'}")
    return ", ".join(fields)


def _value(page: Page, node) -> str:
    return next((other.value for other in page.lines.values() if (other.role, other.name) == (node.role, node.name)), "")


def _leads(history: list[str], state: str, next_state: str, after: Page) -> str:
    pages = [text.unnumbered(page) for page in [*history, state]]
    if text.unnumbered(next_state) in pages:
        return f"{after.address or NOWHERE} is known"
    seen = any(page.address == after.address and page.window == after.window for old in [*history, state] if (page := text.read_page(old)))
    return f"{after.address or NOWHERE} is {'changed' if seen else 'new'}"


def _shown(wanted: Wanted | None, after: Page) -> list[str]:
    """Whether a page shows what the task names first; said before the page is written."""
    values = [value for _, value in wanted.values if len(value) > 2] if wanted else []
    return [f"{value} {_yes(any(value in node.name for node in after.lines.values()))}" for value in values[:1]]


def _yes(met: bool) -> str:
    return "yes" if met else "no"


# ---- a trace against its outcome ---------------------------------------------------------------------------------------------------------------

def check_trace(trace: str, state: str, action: str, next_state: str, reward: float) -> bool:
    """Whether the verdict words of a trace agree with what happened."""
    before, after = text.read_page(state), text.read_page(next_state)
    if not trace or before is None:
        return False
    if text.judged(state, action):
        facts, _, verdict = trace.rpartition(" so ")
        said = f"{ELSEWHERE} yes" in facts or (not re.search(r" no(?= |$)", facts) and facts != "check")
        return next_state == text.STOPPED and f"so {verdict}" == (SUCCESS if reward else NOT_DONE) and (facts == "check" or said == bool(reward))
    if after is None or SUCCESS in trace or NOT_DONE in trace or reward:
        return False
    same = text.unnumbered(next_state) == text.unnumbered(state)
    if trace.endswith(SAME) != same:
        return False
    leads, holds = _LEADS.search(trace), _HOLDS.search(trace)
    agree = [not leads or leads[1] == (after.address or NOWHERE),
             not holds or any((node.name, node.value or "nothing") == holds.groups() for node in after.lines.values())]
    for value, said in re.findall(r" ; ([^;]+?) (yes|no)(?= ;|$)", trace):
        agree.append((said == "yes") == any(value in node.name for node in after.lines.values()))
    return same or (all(agree) and bool(leads or holds or trace.endswith("checked")))
