"""The dream beside the world: one HTML page that needs no network.

A row is a task: the episode in the world, the dream's answers to that episode's own steps, and the episode
that was dreamt; what is missing is left out. Pages may hold any text: `viewer.html` makes text nodes of it,
and its content security policy runs no script but its own and loads nothing.
"""
import base64
import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from dreamgym.envs.base import Audit, Environment, StepResult
from dreamgym.episode import Episode, Step, StopReason, from_json
from dreamgym.evaluation import ask_recorded
from dreamgym.experience_model import ExperienceModel
from dreamgym.run import Dist

TEMPLATE = Path(__file__).with_name("viewer.html")
SHOWN = 50              # episodes of each list: the page stays small enough for any browser


def write_page(path: Path, env: Environment, about: str, episodes: Sequence[Episode],
               model: ExperienceModel | None, folder: Path, notes: Sequence[str] = ()) -> None:
    """Writes the page of `episodes`, real and dreamt ones of the same tasks, and of the last training
    episodes, if `folder` has any. `model`, if any, is asked about every step of the real `episodes`."""
    real = [e for e in episodes if e.world == "real"]
    answers = dict(zip([e.id for e in real], ask_recorded(model, real, Dist()))) if model else {}
    training, cut = read_tail(folder / "episodes.jsonl", SHOWN)
    rows, last = ([row_view(*both, answers, env.audit) for both in pair(part)]
                  for part in (episodes, training))
    for row in last:
        row["tags"].append("training")
    data = {"title": ", ".join(filter(None, [env.name, env.label])), "about": about,
            "notes": [note for note in (*notes, cut) if note], "tiles": tiles(rows), "rows": rows + last}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fill(TEMPLATE.read_text(encoding="utf-8"), data), encoding="utf-8")


def fill(template: str, data: dict) -> str:
    """The template with `data` inside. The policy names the template's own script by its hash."""
    script = template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")     # no "</script>", no "<!--"
    return template.replace("__SCRIPT_HASH__", digest, 1).replace("__DATA__", text, 1)


def read_tail(path: Path, count: int | None = None) -> tuple[list[Episode], str]:
    """(the last `count` episodes of a JSONL file, if it exists, up to one that cannot be read; a note on that
    one, or "")."""
    if not path.is_file():
        return [], ""
    with path.open("rb") as lines:
        tail = deque(enumerate(lines, 1), maxlen=count)
    records = []
    for number, line in tail:
        try:
            records.append(from_json(msgspec.json.decode(line), Episode, f"{path}:{number}"))
        except (ValueError, RecursionError) as error:       # also msgspec's, and half a UTF-8 character
            return records, f"{path}:{number} and what follows is left out: {str(error)[:200]}"
    return records, ""


def pair(episodes: Sequence[Episode]) -> list[tuple[Episode | None, Episode | None]]:
    """(real, dreamt) of the same task, in order; None where one is missing."""
    dreamt = defaultdict(deque)
    for episode in episodes:
        if episode.world == "dream":
            dreamt[episode.task.id].append(episode)
    pairs = [(episode, dreamt[episode.task.id].popleft() if dreamt[episode.task.id] else None)
             for episode in episodes if episode.world == "real"]
    return pairs + [(None, episode) for rest in dreamt.values() for episode in rest]


def row_view(real: Episode | None, dreamt: Episode | None, answers: dict[str, list[StepResult]],
             audit: Audit) -> dict:
    """A row as the page takes it. `answers`: the dream's, by the id of the real episode."""
    task, predictions = (real or dreamt).task, answers.get(real and real.id)
    played, dream = real and play(real, audit), dreamt and play(dreamt, audit)
    reply = predictions and asked(real, predictions, audit)
    differ = real and (dreamt and real.success != dreamt.success
                       or reply and reply["equal"] < len(reply["steps"]))
    success = (real or dreamt).success
    tags = {"all": True, "success": success, "failure": not success, "disagreement": differ,
            "malformed": any(part and part["unread"] for part in (dream, reply))}
    return {"task": task.text, "labels": task.groups, "real": played, "dream": dream, "asked": reply,
            "tags": [name for name, holds in tags.items() if holds]}


def tiles(rows: list[dict]) -> list[tuple[str, int, int]]:
    """Counts of the rows, as (what, part, whole)."""
    real, dream, replies = ([row[name] for row in rows if row[name]] for name in ("real", "dream", "asked"))
    answers, count = sum(len(reply["steps"]) for reply in replies), lambda name: sum(r[name] for r in replies)
    found = [("successes in the world", sum(play["success"] for play in real), len(real)),
             ("successes in the dream", sum(play["success"] for play in dream), len(dream)),
             ("pages exact, asked about the world", count("exact"), answers),
             ("rewards equal, asked about the world", count("equal"), answers),
             ("answers not readable", count("unread"), answers)]
    return [tile for tile in found if tile[2]]


def play(episode: Episode, audit: Audit) -> dict:
    """An episode as the page takes it."""
    steps, broke_off = episode.steps, episode.stop == StopReason.MALFORMED
    outputs = [None] * (len(steps) - 1) + [episode.output if broke_off else None]
    broken = [audit.inconsistencies(episode.readable[:i])[1] for i in range(len(episode.readable) + 1)]
    broken += broken[-1:] * broke_off
    views = [step_view(episode, step, audit, output) | {"contradicts": broken[i + 1] > broken[i]}
             for i, (step, output) in enumerate(zip(steps, outputs))]
    return {"id": episode.id, "source": episode.source, "stop": episode.stop or StopReason.RUNNING,
            "success": episode.success, "score": episode.raw_score, "unread": int(broke_off),
            "start": steps[0].state, "steps": views}


def asked(episode: Episode, predictions: list[StepResult], audit: Audit) -> dict:
    """The dream's answers to the steps of a real episode, each with the real history."""
    steps = [replace(s, next_state=p.state, reward=p.reward, done=p.done, reasoning=p.reasoning,
                     reward_reasoning=p.reward_reasoning) for s, p in zip(episode.steps, predictions)]
    read = [(s, p) for s, p in zip(episode.steps, predictions) if not p.malformed]
    return {"start": steps[0].state, "unread": len(steps) - len(read),
            "exact": sum(s.next_state == p.state for s, p in read),
            "equal": sum(s.reward == p.reward for s, p in read),
            "steps": [step_view(episode, step, audit, p.output if p.malformed else None)
                      for step, p in zip(steps, predictions)]}


def step_view(episode: Episode, step: Step, audit: Audit, output: str | None) -> dict:
    """A step as the page takes it. `output`: the text of a malformed one."""
    malformed = output is not None
    verdict = (audit.success(episode.task, step.state, step.action, step.next_state)
               if step.valid and not malformed else None)
    return {"thought": step.thought, "action": step.shown_action, "next": step.next_state,
            "think": step.reasoning, "why": step.reward_reasoning, "reward": step.reward, "done": step.done,
            "verdict": verdict, "valid": step.valid or malformed, "output": output}
