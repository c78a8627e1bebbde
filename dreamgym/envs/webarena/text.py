"""What the abstract states of `page` mean together with actions.

An action names an element by the number of its line in the state as the policy sees it (`click [3]`);
grounded, the words of the line follow (`click [3] link 'Cart'`). Every function takes both forms.
"""
import re

from dreamgym.envs.webarena.actions import ON_ELEMENT, Action, parse
from dreamgym.envs.webarena.page import NAME, TYPED, Node, quotable, read_page
from dreamgym.prompts import clean

_GROUNDED = re.compile(rf"(.+) \w+ {NAME}")  # a bare action never ends with a quote after a role
CLICKED = {"link": "link", "button": "button", "checkbox": "tick", "radio": "tick", "switch": "tick"}


def bare(action: str) -> str:
    """An action without the words that grounding adds."""
    match = _GROUNDED.fullmatch(action)
    return match[1] if match and match[1].endswith("]") else action


def read_action(state: str, action: str) -> tuple[Action, Node | None]:
    """An action and its element on the page. `kind` "": no action."""
    said = parse(bare(action)) or Action("")
    page = read_page(state) if said.kind in ON_ELEMENT else None
    return said, page.lines.get(said.element) if page else None


def ground(state: str, action: str) -> str:
    """`click [3]` -> `click [3] link 'Cart'`; of `stop`, the first line that shows the answer. A long text is
    cut as a name. What is no action stays as it is, on one line."""
    (said, node), page = read_action(state, action), read_page(state)
    if not said.kind:
        return clean(action)
    if said.kind == "stop" and said.text and page:
        answer = re.compile(rf"(?<![\w.]){re.escape(said.text)}(?!\w|\.\d)")
        node = next((line for line in page.lines.values() if answer.search(line.name)), None)
    return clean(f"{said} {node.role} '{quotable(node.name)}'" if node else str(said))


def action_type(state: str, action: str) -> str:
    """link | button | search | fill | choose | tick | scroll | back | tab | goto | hover | press | stop,
    or refused: an action of which the page shows that nothing comes of it."""
    (said, node), page = read_action(state, action), read_page(state)
    kind = said.kind
    if page is None or not kind or (kind in ON_ELEMENT and node is None):
        return "refused"
    if kind == "click":
        return CLICKED.get(node.role, "refused")
    if kind == "type":
        if node.options:
            return "choose" if said.text.lower() in map(str.lower, node.options) else "refused"
        return "refused" if node.role not in TYPED else "search" if said.enter else "fill"
    if kind == "scroll":
        window = page.window + (1 if said.text == "down" else -1)
        return "scroll" if 0 <= window < page.windows else "refused"
    if kind == "tab_focus":
        return "tab" if said.element < max(1, len(page.tabs)) else "refused"
    if kind == "close_tab":
        return "tab" if len(page.tabs) > 1 else "refused"
    return {"go_back": "back", "go_forward": "back", "new_tab": "tab"}.get(kind, kind)


def message(state: str) -> str:
    """What the last line tells of the action before ('You added Blue Speaker to your cart.'), or ""."""
    page = read_page(state)
    last = list(page.lines.values())[-1] if page and page.lines else None
    return last.name if last and last.role == "text" and last.name.endswith(".") else ""
