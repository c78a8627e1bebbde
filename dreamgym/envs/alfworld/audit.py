"""What the truth says about ALFWorld's steps, for reports only."""
from __future__ import annotations

from dreamgym.envs.alfworld.relabel import judge
from dreamgym.envs.alfworld.text import LAMPS, TREATED, ground, kind_of, name_of, read_action, read_view
from dreamgym.envs.base import Audit
from dreamgym.episode import Step, Task


class ALFWorldAudit(Audit):

    def action_type(self, state: str, action: str) -> str:
        """go | open | close | take | move | clean | heat | cool | slice | use | look | refused (by what this
        page shows, the engine would change nothing; whether a place exists, and what is within reach, it does
        not show)."""
        command, view = read_action(ground(state, action)), read_view(state)
        if command is None or view is None:
            return "refused"
        names, held, here = (
            [name_of(thing) for thing in view.things], name_of(view.holding), command.place == view.place,
        )
        fits = {
            "go": not here,
            "open": here and view.opened is False,
            "close": here and view.opened is True,
            "take": here and not held and command.thing in names,
            "move": here and held == command.thing != "" and view.opened is not False,
            "slice": held == command.place
            and kind_of(held) in ("knife", "butterknife")
            and command.thing in names,
            "use": command.thing in names and kind_of(command.thing) in LAMPS,
            "examine": command.place in (view.place, held),
            "look": True,
            "inventory": True,
            **{
                verb: held == command.thing and here and kind_of(view.place) == tool
                for verb, (tool, _) in TREATED.items()
            },
        }[command.verb]
        if not fits:
            return "refused"
        return "look" if command.verb in ("look", "inventory", "examine") else command.verb

    def success(self, task: Task, state: str, action: str, next_state: str) -> bool | None:
        """Whether a step fulfils the task, by rule; None where a step cannot end an episode, or where task or
        pages cannot be read."""
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
            command = read_action(ground(step.state, step.action))
            if before is None or view is None:
                continue
            held, holds = name_of(before.holding), name_of(view.holding)
            # nothing jumps into the hand, or out of it
            by_itself = held != holds and (
                command is None or command.verb != ("take" if not held else "move")
            )
            for thing in {held, holds} - {""}:
                place = "hand" if thing == holds else command.place if command else ""
                held_by.get(where.get(thing, ""), set()).discard(thing)
                held_by.get(place, set()).add(thing)
                where[thing] = place
            if not view.place or (view.opened is False and not by_itself):
                continue
            things = set(map(name_of, view.things))
            checked += 1
            elsewhere = any(where.get(thing, view.place) != view.place for thing in things)
            broken += by_itself or elsewhere or held_by.get(view.place, things) != things
            where.update(dict.fromkeys(things, view.place))
            held_by[view.place] = things
        return checked, broken
