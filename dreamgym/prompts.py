"""Every prompt, and every parser of model text: pure functions of strings.

The same words serve a 200k-parameter model trained from scratch and a chat model; a chat model also gets a system prompt that explains them. The
experience model's prompt follows DreamGym, Eq. 4 (task, history, demonstrations, state, action -> reasoning, next state, reward, done). History
comes first and only grows within an episode, so that a sampler keeps its KV cache; the demonstrations of one step stand at the end and are dropped again.
A parser never trusts text: what does not fit the form exactly is None, and the caller counts it as a failure with reward 0.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

MAX_REASONING_CHARS, MAX_STATE_CHARS, MAX_ACTION_CHARS = 4000, 8000, 200
TAGS = re.compile(r"^(think|next|reward|task|state|action|similar|vary)\b\s*:", re.MULTILINE | re.IGNORECASE)

POLICY_SYSTEM = {
    "webshop": "You shop in a web store. Each turn shows the page; answer with exactly one action and nothing else. Actions: search[words] on the search page; "
               "click[N] opens product N of a results page; click[next >], click[< prev], click[back to search] move between pages; on an item page "
               "click[VALUE] chooses an option, click[description] and click[features] show details, click[buy now] ends the episode. Buy only a product that meets "
               "every wish of the task, with its options chosen; go back when an option is absent.",
    "alfworld": "You act in a home. Each turn shows where you are, what is there and what you hold; answer with exactly one action and nothing else. Actions: go to PLACE, "
                "open PLACE, close PLACE, take THING from PLACE, move THING to PLACE, clean THING with sinkbasin N, heat THING with microwave N, cool THING with fridge N, "
                "use desklamp N, examine THING, look, inventory. Things have numbers (mug 1). You hold one thing at a time; closed places must be opened to see what is in them.",
    "webarena": "You work in a web browser. Each turn shows the page as numbered lines; answer with the line that your action is about, without its number (for stop, the one "
                "that shows the answer; none where no line is meant), then, in a new line, with exactly one action, and nothing else. Actions: click [N], type [N] [words] [1] "
                "(1: then press Enter, 0: not; on a combobox, words is the option), hover [N], press [key], scroll [down], scroll [up], new_tab, tab_focus [N], close_tab, "
                "goto [address], go_back, go_forward, stop [answer]. Say stop [answer] on the page that shows the answer or that the work is done; stop [done] where no answer is "
                "asked for, stop [N/A] where the task cannot be done.",
}
EXPERIENCE_SYSTEM = {
    "webshop": "You are a web store. Given a shopper's task, what happened so far, similar past transitions, and an action, think about whether the action is possible and "
               "what it leads to, then answer in this form and no other:\nthink: REASONING\nnext:\nNEXT PAGE\nreward: 0 or 1 done: yes or no\n"
               "For the next page you may write 'same page', 'page before' or 'similar page' where it is one of those, and '=' for a line that does not change. "
               "The reward is 1 only when the purchase meets every wish of the task.",
    "alfworld": "You are a home with rooms, furniture and things. Given a task, what was seen so far, similar past transitions, and an action, think about whether the action is "
                "possible and what it leads to, then answer in this form and no other:\nthink: REASONING\nnext:\nNEXT STATE\nreward: 0 or 1 done: yes or no\n"
                "A thing is in one place only; a place seen before holds what it held. For the next state you may write 'same page' where nothing happens, and for a line '=' "
                "(unchanged), '<' (as on the page before), '~' (as on the similar page), '- THING' or '+ THING' (this list without it, or with it at its end). "
                "The reward is 1 only when the action fulfils the whole task.",
    "webarena": "You are a set of web sites in a browser. Given a task, what was seen so far, similar past transitions, and an action, think about whether the page has that "
                "control and what it leads to, then answer in this form and no other:\nthink: REASONING\nnext:\nNEXT PAGE\nreward: 0 or 1 done: yes or no\n"
                "Write the next page without numbers. A page that differs little from one you know begins with 'same page', 'page before' or 'similar page'; then '- LINE' takes a "
                "line out (a field by its name), '+ LINE' puts one in there, and any other line stands at the end. On other pages a line may be '=' (as on this page), '<' (as on "
                "the page before), '~' (as on the similar page), and a page's name stands for the rest of it. After stop the next page is 'stopped'. The reward is 1 only when "
                "stop fulfils the whole task.",
}
VARY_SYSTEM = {
    "webshop": "You write shopping tasks. Given a task, write a different and harder one in the same form: "
               "'find me WORDS with NAME: VALUE, and price lower than N dollars'.",
    "alfworld": "You write household tasks. Given a task, write a different and harder one in the same form: 'put a clean THING in PLACE', 'heat some THING and put it in PLACE', "
                "'find two THING and put them in PLACE', 'examine the THING with the desklamp'.",
    "webarena": "You write tasks for someone who works with web sites: a shop, its back office, a forum, a code host and a map. Given a task, write a different and harder one "
                "in the same form, about things that these sites have.",
}

SAME, DITTO = "same page", "="
NAMES = (SAME, "page before", "similar page")
REST = 3                                         # lines of a page that its name may stand for, at least
MOST_EDITS = 10                                  # lines written under a page's name
MARKS = dict(zip((DITTO, "<", "~"), NAMES))      # an answer's line that is the same line of that page; all but '=' only where `by_line` says so


def clean(text: str) -> str:
    """One line without control characters or runs of blanks: what text from outside must be before it enters a state."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def as_it_is(state: str, noted: bool = False) -> str:
    """`unnumbered` and `numbered` of an environment whose states the experience model reads and writes as the policy sees them (WebArena's differ)."""
    return state


def as_done(state: str, action: str) -> str:
    """`said` of an environment whose policies write the action and nothing else (WebArena's name first what it is about)."""
    return action


def accepted(read, text: str) -> bool:
    """Whether a reader takes a text, that is, raises no ValueError."""
    try:
        read(text)
    except ValueError:
        return False
    return True


# ---- policy ------------------------------------------------------------------------------------------------------------------------------------

def policy_first(task_text: str, state: str) -> str:
    return f"task: {task_text}\nstate:\n{state}\n"


def policy_next(state: str) -> str:
    return f"state:\n{state}\n"


def policy_recap(task_text: str, turns: list[tuple[str, str]], state: str) -> str:
    """The first user text of a new stream when the old one would pass the context: the task and the last few (state, action) turns."""
    seen = "".join(f"state:\n{s}\naction: {a}\n" for s, a in turns)
    return f"task: {task_text}\n{seen}state:\n{state}\n"


def parse_action(text: str) -> str:
    """The action in a policy's answer: the last 'action:' line, or the last `<action>..</action>`, or the only line; '' when there is none."""
    text = text[-10 * MAX_ACTION_CHARS:]                  # the search below is quadratic in unclosed tags
    tagged = re.findall(r"<action>(.*?)</action>", text, re.DOTALL)
    lines = [line.strip() for line in (tagged[-1] if tagged else text).split("\n") if line.strip()]
    named = [line[len("action:"):].strip() for line in lines if line.lower().startswith("action:")]
    action = named[-1] if named else lines[-1] if lines else ""
    return "".join(c for c in action if c.isprintable())[:MAX_ACTION_CHARS].strip()


# ---- experience model --------------------------------------------------------------------------------------------------------------------------

@dataclass
class Demo:
    """A retrieved transition d_j (Eq. 4), reduced to what it teaches: the grounded action and what followed."""
    action: str
    next_state: str


@dataclass
class Prediction:
    reasoning: str
    next_state: str
    reward: float
    done: bool
    refuted: bool = False         # the answer took away what the page does not hold, and counts as no change


def experience_prompt(task_text: str, history: list[tuple[str, str]], demos: list[Demo], state: str, action: str) -> str:
    """history: (state, grounded action) from the first step on; demos: the most similar LAST, next to the answer."""
    past = "".join(f"state:\n{s}\naction: {a}\n" for s, a in history)
    similar = "".join(f"similar: {d.action}\n{d.next_state}\n" for d in demos)
    return f"task: {task_text}\n{past}state:\n{state}\naction: {action}\n{similar}"


def known_pages(state: str, history: list[tuple[str, str]], demos: list[Demo]) -> dict[str, str]:
    """The pages of a prompt that an answer may name instead of copying them: name -> page. (Ours; the paper's model writes every page out.)"""
    pages = {SAME: state}
    if history:
        pages["page before"] = history[-1][0]
    if demos:
        pages["similar page"] = demos[-1].next_state
    return pages


def _marked(state: str, pages: dict[str, str] | None) -> dict[str, list[str]]:
    """mark -> the lines it may stand for."""
    return {DITTO: state.split("\n")} | {mark: pages[name].split("\n") for mark, name in MARKS.items() if pages and name in pages}


def _listed(line: str) -> tuple[str, list[str]]:
    """'at desk 1: pen 1, cup 1' -> ('at desk 1: ', ['pen 1', 'cup 1']); an empty list is written 'nothing'."""
    head, colon, items = line.partition(": ")
    return head + colon, [item for item in items.split(", ") if item not in ("", "nothing")]


def _edit(old: str, new: str) -> str:
    """'- pen 1' or '+ pen 1' where `new` is the list `old` without one thing, or with one more at its end; '' otherwise."""
    (head, before), (other, after) = _listed(old), _listed(new)
    if head != other or not head or abs(len(before) - len(after)) != 1:
        return ""
    gone = next((item for i, item in enumerate(before) if after[i:i + 1] != [item]), "")
    edit = f"- {gone}" if len(before) > len(after) else f"+ {after[-1]}"
    return edit if _edited(old, edit) == new else ""


def _edited(old: str, edit: str) -> str | None:
    """The line that `_edit` stands for; None where the thing to be taken away is not there."""
    head, items = _listed(old)
    sign, thing = edit[:1], edit[2:]
    if not head or (sign == "-" and thing not in items):
        return None
    items = [*items, thing] if sign == "+" else items[:items.index(thing)] + items[items.index(thing) + 1:]
    return head + (", ".join(items) or "nothing")


def experience_answer(reasoning: str, state: str, next_state: str, reward: float, done: bool, use_reasoning: bool = True, pages: dict[str, str] | None = None,
                      by_line: bool = False, edits: bool = False) -> str:
    """What the experience model is to write. A page of the prompt is named (`known_pages`), and a line equal to the same line of `state` is '='. With
    `by_line` a name stands for the rest of that page, at least REST lines of it or all of the current page, from the line where it is written; the lines of
    the page before and of the similar page are '<' and '~', and a list of the current page without a thing, or with one more, is '- thing', '+ thing'. With
    `edits` a page that differs from a known one by at most MOST_EDITS lines is its name and these lines, each named by what it says (`_edits`)."""
    pages, lines = pages or {SAME: state}, next_state.split("\n")
    names = [name for name, page in pages.items() if page == next_state and not done and (name == SAME or not by_line)]
    edited = _edits(pages, lines) if edits and not names and not done else []
    page = names[0] if names else "\n".join(edited or (_marks(state, lines, pages, done) if by_line else _dittos(state, lines)))
    think = f"think: {reasoning}\n" if use_reasoning else ""
    return f"{think}next:\n{page}\nreward: {int(reward)} done: {'yes' if done else 'no'}"


def _dittos(state: str, lines: list[str]) -> list[str]:
    known = state.split("\n")
    return [DITTO if known[i:i + 1] == [line] else line for i, line in enumerate(lines)]


def _marks(state: str, lines: list[str], pages: dict[str, str], done: bool) -> list[str]:
    """The lines of a page as `by_line` writes them. The end of an episode is never just a known page."""
    marked, written, i = _marked(state, pages), [], 0
    while i < len(lines):
        rests = {MARKS[mark]: known[i:] for mark, known in marked.items() if len(known) - i >= REST and lines[i:len(known)] == known[i:] and (i or not done)}
        if rests:
            name = max(rests, key=lambda name: len(rests[name]))
            written.append(name)
            i += len(rests[name])
            continue
        mark = next((mark for mark, known in marked.items() if known[i:i + 1] == [lines[i]]), "")
        written.append(mark or (_edit(marked[DITTO][i], lines[i]) if i < len(marked[DITTO]) else "") or lines[i])
        i += 1
    return written


_FIELD = re.compile(r".*?(?= (?:value|options) '|$)")     # of a line: all but what a field holds and offers


def _edits(pages: dict[str, str], lines: list[str]) -> list[str]:
    """A page as the one of `pages` that it differs least from: its name, '- line' for a line to be taken out (of a field only role and name), '+ line' for what is
    put in there, and the lines added at its end as they are. A small model can name a line that it reads, and hardly count which one it is. [] where that takes
    more than MOST_EDITS lines, or leaves fewer than REST."""
    best: list[str] = []
    for name, page in pages.items():
        known, written = page.split("\n"), [name]
        for what, a, b, c, d in SequenceMatcher(None, known, lines, autojunk=False).get_opcodes():
            if what == "insert" and a == len(known):
                written += lines[c:d]
            elif what != "equal":
                a, c = (a - 1, c - 1) if what == "insert" else (a, c)     # after the line before it
                pairs = zip_longest(known[max(0, a):b], lines[max(0, c):d])
                written += [line for old, new in pairs for line in (old and f"- {_FIELD.match(old)[0]}", new and f"+ {new}") if line]
        kept = len(known) - sum(line.startswith("- ") for line in written)
        if (kept >= REST or len(written) == 1) and len(written) <= MOST_EDITS + 1 and (not best or len(written) < len(best)) and _edited_page(known, written[1:]) == lines:
            best = written
    return best


def _edited_page(known: list[str], edits: list[str]) -> list[str]:
    """What `_edits` stands for, without the name of the page. Raises ValueError for a line that is not there."""
    lines, at = list(known), 0
    for edit in edits:
        if edit[:2] == "- ":
            at = next((i for i, line in enumerate(lines) if i >= at and (line == edit[2:] or line.startswith(edit[2:] + " "))), -1)
            if at < 0:
                raise ValueError(f"{edit!r}: the page has no such line after the one before")
            del lines[at]
        elif edit[:2] == "+ ":
            lines.insert(at, edit[2:])
            at += 1
        elif edit in MARKS or edit in NAMES:
            raise ValueError(f"line {edit!r} after the end of a page")
        else:
            lines.append(edit)
    return lines


def _unmarked(state: str, written: list[str], pages: dict[str, str] | None) -> list[str] | None:
    """What `_marks` and `_edits` stand for. Raises ValueError for a mark or a name beyond the lines of its page; None where an edit takes away what is not there."""
    marked, lines, first = _marked(state, pages), [], written[0].casefold().rstrip(" .")
    if first in NAMES:
        known = (pages or {SAME: state}).get(first)
        if known is None:
            raise ValueError(f"{first!r}: the prompt has no such page")
        return _edited_page(known.split("\n"), written[1:])
    for line in written:
        i, name = len(lines), line.casefold().rstrip(" .")
        mark = next((mark for mark, known in MARKS.items() if name == known), line)
        if mark in MARKS:
            rest = marked.get(mark, [])[i:] if name in NAMES else marked.get(mark, [])[i:i + 1]
            if not rest:
                raise ValueError(f"line {line!r}: its page has no line {i + 1}")
            lines += rest
        elif line[:2] in ("- ", "+ "):
            edited = _edited(marked[DITTO][i], line) if i < len(marked[DITTO]) else None
            if edited is None:
                return None
            lines.append(edited)
        else:
            lines.append(line)
    return lines


_ANSWER = re.compile(r"(?:think: (?P<think>[^\n]*)\n)?next:\n(?P<next>.+)\nreward: (?P<reward>[01]) done: (?P<done>yes|no)", re.DOTALL)


def parse_experience(text: str, state: str, pages: dict[str, str] | None = None, by_line: bool = False) -> Prediction | None:
    """The experience model's answer, or None when it is malformed: wrong form, too long, control characters, tags forged inside the page, the name of a
    page that the prompt did not hold, a mark beyond the lines of its page, or a reward without an end. An edit that takes away what is not there stands
    for no change at all, without a reward (`refuted`)."""
    text = text.strip()
    match = _ANSWER.fullmatch(text) if len(text) <= MAX_REASONING_CHARS + MAX_STATE_CHARS else None
    if not match:
        return None
    page, reward, done = match["next"].strip(), float(match["reward"]), match["done"] == "yes"
    thought, name = (match["think"] or "").strip(), page.casefold().rstrip(" .")
    forged = TAGS.search(page) or any(not c.isprintable() and c != "\n" for c in text)
    if forged or not page or len(page) > MAX_STATE_CHARS or len(thought) > MAX_REASONING_CHARS or (reward and not done) or (name in NAMES and done):
        return None
    if by_line:
        try:
            lines = _unmarked(state, page.split("\n"), pages)
        except ValueError:
            return None
        if lines is None:                        # what is to be taken away is not there: nothing happens, as in the world
            return Prediction(thought, state, 0.0, False, refuted=True)
        page = "\n".join(lines)
    elif name in NAMES:
        page = (pages or {SAME: state}).get(name, "")
    else:
        known, lines = state.split("\n"), page.split("\n")
        if any(line == DITTO and i >= len(known) for i, line in enumerate(lines)):
            return None
        page = "\n".join(known[i] if line == DITTO else line for i, line in enumerate(lines))
    return Prediction(thought, page, reward, done) if page else None


# ---- task variation (Eq. 6) --------------------------------------------------------------------------------------------------------------------

def vary_prompt(seed_task: str) -> str:
    return f"vary: {seed_task}\n"


def parse_task(text: str) -> str | None:
    """One line of task text from M_task's answer; None when it is empty, has several lines, control characters, or tags."""
    text = text.strip()
    if not text or len(text) > 400 or not text.isprintable() or TAGS.search(text):
        return None
    return text
