"""WebArena's action grammar as text, one action a line: what a policy writes in the real world and in the
dream alike.

    click [5]   hover [5]   type [7] [blue speaker] [1]   press [Enter]   scroll [down]   goto [shopping/cart]
    go_back   go_forward   new_tab   tab_focus [0]   close_tab   stop [answer]

The last argument of `type` is 1 (press Enter afterwards, the default) or 0. Ours: `type` on a combobox or
listbox chooses the option of that label, since the original grammar cannot operate one. What an element
number means is the screen's affair, and what an action does the back end's.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

ON_ELEMENT = ("click", "hover", "type")
ALONE = ("new_tab", "close_tab", "go_back", "go_forward")
FORMS = {
    "click": "click [N]",
    "type": "type [N] [words] [1]",
    "hover": "hover [N]",
    "press": "press [key]",
    "scroll": "scroll [up] or scroll [down]",
    "tab_focus": "tab_focus [N]",
    "goto": "goto [address]",
    "stop": "stop [answer]",
    **{kind: kind for kind in ALONE},
}

_NUMBERED = re.compile(r"(click|hover|tab_focus) ?\[(\d{1,9})\]")
_TYPE = re.compile(r"type ?\[(\d{1,9})\] ?\[(.*?)\](?: ?\[([01])\])?")
_WORDS = re.compile(r"(press|scroll|goto|stop) ?\[(.*)\]")
_KEY = re.compile(r"(?:(?:Control|Ctrl|Shift|Alt|Meta)\+)*"
                  r"(?:Enter|Tab|Escape|Backspace|Delete|Insert|Home|End|PageUp|PageDown|Space"
                  r"|Arrow(?:Up|Down|Left|Right)|F\d\d?|[!-~])", re.IGNORECASE)


@dataclass(frozen=True)
class Action:
    """One parsed action. `element`: the number of the element, or of the tab for tab_focus; `text`: what
    is typed, pressed, visited, answered, or up | down."""
    kind: str
    element: int = 0
    text: str = ""
    enter: bool = True

    def __str__(self) -> str:
        if self.kind in ALONE:
            return self.kind
        if self.kind == "type":
            return f"type [{self.element}] [{self.text}] [{int(self.enter)}]"
        return f"{self.kind} [{self.element if self.kind in ('click', 'hover', 'tab_focus') else self.text}]"


def fenced(text: str) -> str:
    """The action in an agent's answer: what stands in its last pair of ``` marks, or the whole text
    without any."""
    parts = text.split("```")
    return " ".join(parts[-2 if len(parts) % 2 else -1].split()) if len(parts) > 2 else text.strip()


def parse(text: str) -> Action:
    """Reads one action, with or without an agent's words and ``` around it. Raises ValueError with a
    message that a state may show."""
    text = fenced(text)
    if text in ALONE:
        return Action(text)
    if match := _NUMBERED.fullmatch(text):
        return Action(match[1], int(match[2]))
    if match := _TYPE.fullmatch(text):
        return Action("type", int(match[1]), match[2], match[3] != "0")
    if match := _WORDS.fullmatch(text) or re.fullmatch(r"(scroll) (up|down)", text):
        return _checked(Action(match[1], text=match[2].strip()))
    kind = re.match(r"\w*", text)[0]
    if kind in FORMS:
        raise ValueError(f"{kind} needs the form {FORMS[kind]}")
    raise ValueError(f"no action {text[:40]!r}, expected one of {', '.join(FORMS)}")


def _checked(action: Action) -> Action:
    text = action.text
    good = {"press": _KEY.fullmatch(text), "scroll": text in ("up", "down"), "goto": text}
    if not good.get(action.kind, True):
        raise ValueError(f"{action.kind} needs the form {FORMS[action.kind]}, not [{action.text[:40]}]")
    return action
