"""What the truth says about a step of WebShop, by rule: for reports, never for training."""
from dreamgym.envs.base import Audit
from dreamgym.envs.webshop import text
from dreamgym.episode import Step, Task


class WebShopAudit(Audit):
    action_type = staticmethod(text.action_type)

    def success(self, task: Task, state: str, action: str, next_state: str) -> bool | None:
        """A price range counts by its lower end; the price that is drawn within it is not on the page."""
        item, wanted = text.read_item(state), text.read_task(task.text)
        if text.split_action(action) != ("click", "buy now") or item is None or wanted is None:
            return None
        return all(met for _, met in text.checks(wanted, item))

    def inconsistencies(self, steps: list[Step]) -> tuple[int, int]:
        """(item pages seen again, those of them whose options differ from the first time)."""
        known: dict[str, list[str]] = {}
        seen_again = differ = 0
        for step in steps:
            if text.page_kind(step.next_state) == "item":
                title, *options = step.next_state.split("\n")
                options = [line for line in options if not line.startswith("chosen: ")]
                seen_again += title in known
                differ += known.setdefault(title, options) != options
        return seen_again, differ
