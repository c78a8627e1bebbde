"""A small file system as an environment: a complete example to copy. docs/your-environment.md explains it."""
import zlib
from dataclasses import dataclass

import numpy as np

from dreamgym.envs.base import Act, Environment, Player, Session, StepResult
from dreamgym.episode import Task
from dreamgym.prompts import Prompts

FOLDERS, KEYS = "docs music photos work mail".split(), "port color city user".split()
FILES = "notes plan list log report letter draft todo names dates menu map".split()
WORDS = "amber ivory paris delta seven lemon robin cedar".split()


@dataclass
class Disk:
    here: str                      # the current folder
    place: dict[str, str]          # file -> folder
    text: dict[str, str]           # file -> "the KEY in FILE is WORD"
    listed: bool = False           # whether the current folder's files are shown
    did: str = "nothing"           # what the last command did; a task is fulfilled when this is its text

    def files(self) -> list[str]:
        return [file for file in sorted(self.place) if self.place[file] == self.here]

    def page(self) -> str:
        """The state that a policy sees: short, one thing a line."""
        shown = [f"file {file}" for file in self.files()] if self.listed else ["not listed"]
        return "\n".join([f"in {self.here}", *(shown or ["no file"]), f"did {self.did}"])

    def run(self, command: str) -> None:
        """Carries a command out. One that is not possible here changes nothing."""
        match command.split():
            case ["cd", folder] if folder in FOLDERS and folder != self.here:
                self.here, self.listed, self.did = folder, False, "nothing"
            case ["ls"]:
                self.listed = True
            case ["grep", word] if word in WORDS:
                found = [file for file in self.files() if word in self.text[file]]
                self.did = f"find {word} in {' '.join(found) or 'no file'}"
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


class Files(Environment):
    prompts = Prompts("ls, cd FOLDER, cat FILE, grep WORD, mv FILE FOLDER, write FILE WORD, answer WORD.")

    def __init__(self, seed: int = 7, count: int = 500):
        rng, self.splits = np.random.default_rng(seed), {"train": [], "valid": [], "test": []}
        for task in (make_task(f"files-{i}", rng) for i in range(count)):
            place = zlib.crc32(task.text.encode()) % 10      # by its text, so that no task is in two splits
            self.splits[{0: "valid", 1: "test"}.get(place, "train")].append(task)

    def tasks(self, split):
        return self.splits[split]

    def reset(self, tasks):
        disk = lambda goal: Disk(goal["here"], dict(goal["place"]), dict(goal["text"]))
        return [Session(t, t.start, inner=disk(t.goal)) for t in tasks]

    def step(self, sessions, actions):
        results = []
        for session, action in zip(sessions, actions):
            session.inner.run(action)
            session.state = session.inner.page()
            success = session.inner.did == session.task.text
            done = success or session.inner.did.startswith("answer")
            results.append(StepResult(session.state, float(success), done))
        return results

    # The rest is optional. Players make offline data; explanations make it easier to learn from.

    def players(self):
        player = lambda slips: lambda session, rng: lambda state: play(session.task.goal, rng, slips, state)
        return {"solver": Player(player(0.1), share=0.7, imitate=True),
                "random": Player(player(1.0), share=0.3)}

    def explain(self, task, history, step):
        did = step.next_state.split("\ndid ")[1]
        return "possible" if step.valid else "same", f"did {did} so {'yes' if did == task.text else 'no'}"


def make_task(name, rng):
    pick = lambda words: str(rng.choice(words))
    files = rng.permutation(FILES)[:6].tolist()
    disk = Disk(pick(FOLDERS), {file: pick(FOLDERS) for file in files},
                {file: f"the {pick(KEYS)} in {file} is {pick(WORDS)}" for file in files})
    file, word, folder = files[0], pick(WORDS), pick(sorted(set(FOLDERS) - {disk.place[files[0]]}))
    asked, _, known = disk.text[file].partition(" is ")
    tasks = {f"move {file} to {folder}": f"mv {file} {folder}", f"answer {asked}": f"answer {known}",
             f"write {word} into {file}": f"write {file} {word}", f"find {known} in {file}": f"grep {known}"}
    text = pick(list(tasks))
    goal = {"here": disk.here, "place": disk.place, "text": disk.text, "command": tasks[text], "file": file}
    return Task(id=name, text=text, start=disk.page(), goal=goal)


def play(goal, rng, slips, state):
    """Says what it looks for, finds it, does what is asked; a share of the commands are slips."""
    file, folder, word = (str(rng.choice(words)) for words in (FILES, FOLDERS, WORDS))
    shown = [line[5:] for line in state.split("\n") if line.startswith("file ")]
    told = " ".join(f"{name} {'yes' if name == goal['file'] else 'no'}" for name in shown) or "none"
    said = "ls" if "not listed" in state else f"cd {FOLDERS[FOLDERS.index(state.split()[1]) - 1]}"
    if rng.random() < slips:
        said = str(rng.choice([f"cd {folder}", *(f"cat {name}" for name in shown), f"mv {file} {folder}",
                               f"write {file} {word}", f"answer {word}", f"grep {word}", "ls"]))
    elif goal["file"] in shown:
        unread = goal["command"].startswith("answer") and f"in {goal['file']} is" not in state
        said = f"cat {goal['file']}" if unread else goal["command"]
    return Act(said, f"look for {goal['file']} : {told}")
