"""An environment that is only a file of recorded episodes: no world to play in, the dream is all there is.

    python collect.py --env logs --import-file FILE.jsonl

docs/data.md has the file's form. Tasks are those that were recorded, split by a hash of their text; each
starts in the first state that was recorded for it.
"""
import hashlib
from collections import defaultdict
from pathlib import Path

from msgspec.structs import replace

from dreamgym.envs.base import Environment
from dreamgym.episode import Task, read_episodes, recorded, verb_of
from dreamgym.prompts import Prompts, plain_episode

NO_WORLD = ("--env logs has only recorded episodes: no world to play in. Evaluate in the dream, or write an "
            "environment (docs/your-environment.md)")
EXAMPLES, EXAMPLE_CHARS = 12, 200      # of recorded actions that a language model's prompt shows


class Logs(Environment):
    name = "logs"
    label = "recorded episodes"
    is_real = False

    def __init__(self, file: str = ""):
        if not file:
            raise ValueError("--env logs: no recorded episodes; give --import-file FILE.jsonl to collect.py "
                             "or --data FILE.jsonl to train_policy.py")
        played = list(map(plain_episode, recorded(read_episodes(file))))
        starts = {(episode.task.text, episode.steps[0].state): episode.task for episode in reversed(played)}
        texts = sorted({text for text, _ in starts}, key=lambda text: hashlib.sha256(text.encode()).digest())
        if len(texts) < 3:
            raise ValueError(f"{file}: found {len(texts)} different tasks, expected at least 3: "
                             "one each to train, choose and test on")
        held_out = max(1, len(texts) // 10)
        splits = ["valid"] * held_out + ["test"] * held_out + ["train"] * len(texts)
        self.split_of = dict(zip(texts, splits))
        self.all = [replace(starts[text, start], id=f"log-{i}", start=start)
                    for i, (text, start) in enumerate(sorted(starts))]
        taken = defaultdict(list)                # valid actions by their first words
        for step in (s for e in played if self.split_of[e.task.text] == "train" for s in e.steps):
            if step.valid and step.action.strip():
                taken[verb_of(step.action)].append(step.action)
        often = sorted(taken.values(), key=len, reverse=True)[:EXAMPLES]
        shown = "".join(f"\n{actions[0][:EXAMPLE_CHARS]}" for actions in often)
        self.prompts = Prompts(policy=f"{Prompts.policy}\nActions look like these:{shown}")
        self.max_steps = max(2, *(len(episode.steps) for episode in played))
        self.fingerprint = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]

    def tasks(self, split: str) -> list[Task]:
        return [task for task in self.all if self.split_of[task.text] == split]

    def reset(self, *_):
        raise ValueError(NO_WORLD)

    step = reset

    def describe(self) -> dict:
        return {"env": "logs", "file": self.fingerprint}
