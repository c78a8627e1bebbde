"""What the truth says about ALFWorld's steps, for reports only."""
from dreamgym.envs.alfworld.relabel import conditions, judge
from dreamgym.envs.alfworld.text import LAMPS, kind_of, read_action, read_view
from dreamgym.envs.base import Audit
from dreamgym.episode import Step, Task


class ALFWorldAudit(Audit):

    def action_type(self, state: str, action: str) -> str:
        """go | open | close | take | move | clean | heat | cool | slice | use | look | refused (by what this
        page shows; whether a place exists, and what is within reach, it does not show)."""
        command, view = read_action(action), read_view(state)
        if command is None or view is None:
            return "refused"
        verb, here = command.verb, command.place == view.place
        fits = {
            "go": not here,
            "open": here and view.opened is False,
            "close": here and view.opened is True,
            "use": command.thing in view.names and kind_of(command.thing) in LAMPS,
            "examine": command.place in (view.place, view.held),
            "look": True,
            "inventory": True,
        }.get(verb)
        if not (all(met for _, _, met in conditions(command, view)) if fits is None else fits):
            return "refused"
        return "look" if verb in ("inventory", "examine") else verb

    def success(self, task: Task, state: str, action: str, next_state: str) -> bool | None:
        """None where a step cannot end an episode, or where task or pages cannot be read."""
        rows = judge(task.text, Step(state=state, action=action, next_state=next_state))
        return None if rows is None else all(met for _, _, met in rows)

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
