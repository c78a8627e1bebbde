"""WebArena's action grammar as text, one action a line: what a policy writes in the real world and in the
dream alike.

    click [5]   hover [5]   type [7] [blue speaker] [1]   press [Enter]   scroll [down]   goto [shopping/cart]
    go_back   go_forward   new_tab   tab_focus [0]   close_tab   stop [answer]

The last argument of `type`: 1 presses Enter afterwards (default), 0 does not. Ours: `type` on a combobox or
listbox chooses the option of that label; the original grammar cannot operate one.
"""
import re
from dataclasses import dataclass

ON_ELEMENT = ("click", "hover", "type")
ALONE = ("new_tab", "close_tab", "go_back", "go_forward")
NUMBERED = ("click", "hover", "tab_focus")
MODIFIERS = ("Control", "Ctrl", "Shift", "Alt", "Meta")
KEYS = """Enter Tab Escape Backspace Delete Insert Home End PageUp PageDown Space ArrowUp ArrowDown
    ArrowLeft ArrowRight""".split()

_NUMBERED = re.compile(rf"({'|'.join(NUMBERED)}) ?\[(\d{{1,9}})\]")
_TYPE = re.compile(r"type ?\[(\d{1,9})\] ?\[(.*?)\](?: ?\[([01])\])?")
_WORDS = re.compile(r"(press|scroll|goto|stop) ?\[(.*)\]")
_TEXTS = {"press": rf"((?:{'|'.join(MODIFIERS)})\+)*({'|'.join(KEYS)}|F\d\d?|[!-~])",
          "scroll": "(?-i:up|down)", "goto": ".+", "stop": ".*"}


@dataclass(frozen=True)
class Action:
    kind: str
    element: int = 0                             # its number, or that of the tab for tab_focus
    text: str = ""                               # what is typed, pressed, visited, answered, or up | down
    enter: bool = True

    def __str__(self) -> str:
        if self.kind in ALONE:
            return self.kind
        if self.kind == "type":
            return f"type [{self.element}] [{self.text}] [{int(self.enter)}]"
        return f"{self.kind} [{self.element if self.kind in NUMBERED else self.text}]"


def parse(text: str) -> Action | None:
    """One action, alone or between the last pair of ``` of an agent's words; None for what is none."""
    parts = text.split("```")
    text = " ".join(parts[-2 if len(parts) % 2 else -1].split()) if len(parts) > 2 else text.strip()
    if text in ALONE:
        return Action(text)
    if match := _NUMBERED.fullmatch(text):
        return Action(match[1], int(match[2]))
    if match := _TYPE.fullmatch(text):
        return Action("type", int(match[1]), match[2], match[3] != "0")
    if match := _WORDS.fullmatch(text) or re.fullmatch(r"(scroll) (up|down)", text):
        kind, words = match[1], match[2].strip()
        if re.fullmatch(_TEXTS[kind], words, re.IGNORECASE):
            return Action(kind, text=words)
    return None
