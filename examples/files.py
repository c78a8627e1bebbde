"""A small file system as an environment: a complete example to copy. docs/your-environment.md explains it."""
import copy
import zlib
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from dreamgym.envs.base import Environment, Player, Session, StepResult
from dreamgym.episode import StopReason, Task
from dreamgym.prompts import Prompts

FOLDERS, KEYS = "docs music photos work mail".split(), "port color city user".split()
FILES = "notes plan list log report letter draft todo names dates menu map".split()
WORDS = "amber ivory paris delta seven lemon robin cedar".split()


@dataclass
class Disk:
    here: str                      # the current folder
    place: dict[str, str]          # file -> folder
    text: dict[str, str]           # file -> "the KEY in FILE is WORD"
    did: str = "nothing"           # what the last command did; a task is fulfilled when this is its text

    def page(self) -> str:
        """The state that a policy sees: short, one thing a line."""
        files = [f"file {file}" for file in sorted(self.place) if self.place[file] == self.here]
        return "\n".join([f"in {self.here}", *files, f"did {self.did}"])

    def run(self, command: str) -> None:
        """Carries a command out. One that is not possible here changes nothing."""
        match command.split():
            case ["cd", folder] if folder in FOLDERS and folder != self.here:
                self.here, self.did = folder, "nothing"
            case ["answer", word] if word in WORDS:             # "read KEY is WORD" -> "answer KEY"
                read = self.did.removeprefix("read ")
                self.did = f"answer {read.removesuffix(f' is {word}')}"
            case [_, file, *_] if self.place.get(file) != self.here:
                pass
            case ["cat", file]:
                self.did = f"read {self.text[file]}"
            case ["mv", file, folder] if folder in FOLDERS and folder != self.here:
                self.place[file], self.did = folder, f"move {file} to {folder}"
            case ["write", file, word] if word in WORDS:
                self.text[file], self.did = f"the word in {file} is {word}", f"write {word} into {file}"
            case ["rm", file]:
                del self.place[file]
                self.did = f"delete {file}"


class Files(Environment):
    prompts = Prompts(policy="cd FOLDER, cat FILE, mv FILE FOLDER, write FILE WORD, rm FILE, answer WORD.")

    def __init__(self, seed: int = 7, count: int = 500):
        rng, self.splits = np.random.default_rng(seed), {"train": [], "valid": [], "test": []}
        for task in (make_task(f"files-{i}", rng) for i in range(count)):
            place = zlib.crc32(task.text.encode()) % 10      # by its text, so that no task is in two splits
            self.splits[{0: "valid", 1: "test"}.get(place, "train")].append(task)

    def tasks(self, split):
        return self.splits[split]

    def reset(self, tasks):
        return [Session(t.id, t, t.start, inner=Disk(**copy.deepcopy(t.goal["disk"]))) for t in tasks]

    def step(self, sessions, actions):
        results = []
        for session, action in zip(sessions, actions):
            session.inner.run(action)
            session.state, session.steps = session.inner.page(), session.steps + 1
            success = session.inner.did == session.task.text
            done = success or session.inner.did.startswith("answer")
            stop = StopReason.SUCCESS if success else StopReason.FAILURE if done else StopReason.RUNNING
            results.append(StepResult(session.state, float(success), done, stop, raw_score=float(success)))
        return results

    # The rest is optional. Players make offline data; explanations make it easier to learn from.

    def players(self):
        return {"solver": Player(partial(play, slips=0.1), share=0.7, imitate=True),
                "random": Player(partial(play, slips=1.0), share=0.3)}

    def explain(self, task, history, step):
        seen = step.next_state.split("\n")[0] in [old.state.split("\n")[0] for old in history]
        did = step.next_state.split("\ndid ")[1]
        verdict = f"did {did}" + (" so yes" if did == task.text else " so no")
        return "not possible" if not step.valid else "seen before" if seen else "new here", verdict


def make_task(name, rng):
    pick = lambda words: str(rng.choice(words))
    files = rng.permutation(FILES)[:6].tolist()
    disk = Disk(pick(FOLDERS), {file: pick(FOLDERS) for file in files},
                {file: f"the {pick(KEYS)} in {file} is {pick(WORDS)}" for file in files})
    file, word, folder = files[0], pick(WORDS), pick(sorted(set(FOLDERS) - {disk.place[files[0]]}))
    asked, _, known = disk.text[file].partition(" is ")
    tasks = {f"move {file} to {folder}": f"mv {file} {folder}", f"delete {file}": f"rm {file}",
             f"write {word} into {file}": f"write {file} {word}", f"answer {asked}": f"answer {known}"}
    text = pick(list(tasks))
    goal = {"disk": asdict(disk), "command": tasks[text], "file": file}
    return Task(id=name, text=text, start=disk.page(), goal=goal)


def play(session, rng, slips):
    """Looks for the task's file, then does what is asked; a share of the commands are slips."""
    goal, unseen = session.task.goal, rng.permutation(FOLDERS).tolist()

    def act(state):
        file, folder, word = (str(rng.choice(words)) for words in (FILES, FOLDERS, WORDS))
        if rng.random() < slips:
            file = rng.choice([line[5:] for line in state.split("\n") if line.startswith("file ")] or [file])
            return str(rng.choice([f"cd {folder}", f"cat {file}", f"mv {file} {folder}", f"rm {file}",
                                   f"write {file} {word}", f"answer {word}", f"cat {rng.choice(FILES)}"]))
        if f"\nfile {goal['file']}\n" not in state:
            return f"cd {unseen.pop() if unseen else folder}"
        unread = goal["command"].startswith("answer") and f"in {goal['file']} is" not in state
        return f"cat {goal['file']}" if unread else goal["command"]
    return act
