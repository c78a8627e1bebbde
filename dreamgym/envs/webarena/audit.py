"""What the truth says about steps in WebArena, for reports only."""
from dreamgym.envs.base import Audit
from dreamgym.envs.webarena.tasks import rule_success
from dreamgym.envs.webarena.text import action_type, message, read_page
from dreamgym.episode import Step, Task

CHANGING = ("button", "search", "choose", "fill", "tick", "press")  # what may change a page that was seen


class WebArenaAudit(Audit):
    action_type = staticmethod(action_type)

    def __init__(self, own: bool = True):
        self.own = own  # the own sites' tasks: rules can read their sentences

    def success(self, task: Task, state: str, action: str, next_state: str) -> bool | None:
        return rule_success(task.text, state, action) if self.own else None

    def inconsistencies(self, steps: list[Step]) -> tuple[int, int]:
        """Of pages seen again while nothing was sent that may change them."""
        seen: dict[tuple[str, int], list[str]] = {}
        checked = broken = 0
        for step in steps:
            page = read_page(step.next_state)
            if action_type(step.state, step.action) in CHANGING or message(step.next_state):
                seen = {}
            if page is None:
                continue
            key, lines = (page.address, page.window), [str(node) for node in page.lines.values()]
            checked += key in seen
            broken += seen.get(key, lines) != lines
            seen[key] = lines
        return checked, broken
