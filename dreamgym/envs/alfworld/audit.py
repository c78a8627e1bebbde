"""What the truth says about ALFWorld's steps, for reports only."""
from dreamgym.envs.alfworld.text import (
    TOOL, Command, View, Wanted, kind_of, read_action, read_task, read_view, tags_of)
from dreamgym.envs.base import Audit
from dreamgym.episode import Step, Task


class ALFWorldAudit(Audit):
    def success(self, task: Task, state: str, action: str, next_state: str) -> bool | None:
        """None where a step cannot end an episode, or where task or pages cannot be read."""
        wanted, command = read_task(task.text), read_action(action)
        before, after = read_view(state), read_view(next_state)
        if not (wanted and command and before and after and state != next_state
                and _may_end(command, before, after)):
            return None
        return _fulfils(wanted, command, before, after)

    def inconsistencies(self, steps: list[Step]) -> tuple[int, int]:
        """(pages that show what a place holds, those of them that contradict an earlier page): a thing that
        is known to be elsewhere, or a place that does not hold what it held, but for what the agent itself
        took and put down. None in the real environment."""
        where: dict[str, str] = {}                   # thing -> place, 'hand' when held
        held_by: dict[str, set[str]] = {}            # place -> what was last seen there
        checked = broken = 0
        for step in steps:
            before, view = read_view(step.state), read_view(step.next_state)
            command = read_action(step.action)
            if before is None or view is None:
                continue
            # nothing jumps into the hand, or out of it
            by_itself = before.held != view.held and (
                command is None or command.verb != ("move" if before.held else "take"))
            for thing in {before.held, view.held} - {""}:
                place = "hand" if thing == view.held else command.place if command else ""
                held_by.get(where.get(thing, ""), set()).discard(thing)
                held_by.get(place, set()).add(thing)
                where[thing] = place
            if not view.place or (view.opened is False and not by_itself):
                continue
            things = set(view.names)
            checked += 1
            elsewhere = any(where.get(thing, view.place) != view.place for thing in things)
            broken += by_itself or elsewhere or held_by.get(view.place, things) != things
            where.update(dict.fromkeys(things, view.place))
            held_by[view.place] = things
        return checked, broken


def _may_end(command: Command, before: View, after: View) -> bool:
    """Whether a step that changed something may fulfil a task: it put a thing down, lit a lamp, or brought a
    thing under a lit one."""
    if command.verb == "move":
        return before.place == command.place and before.held == command.thing
    if command.verb == "use":
        return command.thing in before.names
    brought = command.verb == "go" or (command.verb == "take" and after.held == command.thing)
    return brought and bool(after.holding) and any("lit" in tags_of(thing) for thing in after.things)


def _fulfils(wanted: Wanted, command: Command, before: View, after: View) -> bool:
    if wanted.kind == "look":
        lit = {kind_of(thing) for thing in after.things if "lit" in tags_of(thing)}
        return kind_of(after.holding) == wanted.thing and wanted.place in lit
    return (command.verb == "move"
            and (kind_of(command.thing), kind_of(command.place)) == (wanted.thing, wanted.place)
            and (wanted.kind not in TOOL or wanted.kind in tags_of(before.holding))
            and (wanted.kind != "two" or wanted.thing in before.kinds))
