"""What `--env` and `--env-options` take and refuse; sessions of every environment; recorded logs."""
import sys

import numpy as np
import pytest

from dreamgym import offline
from dreamgym.envs.base import Environment, environment_class, make_env
from dreamgym.envs.logs import Logs
from dreamgym.episode import Episode, Step, Task, to_json
from dreamgym.prompts import Prompts
from dreamgym.run import write_jsonl
from tests.conftest import ROOT, a_step

FILES = str(ROOT / "examples" / "files.py")
TINY = "tests.test_envs_base:Tiny"


class Tiny(Environment):
    """An environment that can be named by package.module:Class."""
    tasks = reset = step = None

    def __init__(self, data_dir: str = "", seed: int = 0, size: int = 3, loud: bool = False,
                 rate: float = 0.5):
        self.given = (data_dir, seed, size, loud, rate)


class Own(Environment):
    """One with defaults of its own, and an option without one."""
    tasks = reset = step = None

    def __init__(self, path, data_dir="rooms", file="tasks.txt", limit=None):
        self.given = (data_dir, file, path, limit)


class Story(Environment):
    """One whose option must be given, and one that no text can be."""
    tasks = reset = step = None

    def __init__(self, story, size=(1, 2)):
        pass


class Unwritten(Environment):
    tasks = None


def test_an_environment_by_class_and_by_file():
    """A user's own environment that cannot be named, has no name in reports, or loses its defaults."""
    env = make_env(TINY, "data", 5, ["size=4", "loud=True", "rate=1e-3"], workers=2)
    assert env.name == TINY and env.given == ("data", 5, 4, True, 0.001)
    assert make_env(TINY, options=["loud=false"]).given[3] is False
    assert make_env("tests.test_envs_base:Own", options=["path=b", "limit=3"]).given == ("rooms", "tasks.txt", "b", "3")
    env = make_env(FILES, seed=3)
    assert env.name == FILES and env.tasks("train")[0] == make_env(FILES, seed=3).tasks("train")[0]
    assert env.tasks("train")[0] != make_env(FILES, seed=4).tasks("train")[0]


def test_a_module_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", sys.path[:])
    (tmp_path / "besides_own.py").write_text("LABEL = 'x'\n")
    own = "from besides_own import LABEL\nfrom dreamgym.envs.base import Environment\nclass Own(Environment):\n    label = LABEL\n"
    (tmp_path / "own_world.py").write_text(own)
    assert environment_class(str(tmp_path / "own_world.py")).label == "x"


@pytest.mark.parametrize("name, flags, message", [
    ("webshopp", {}, "--env webshopp: expected one of webshop, "),
    ("nowhere.py", {}, "nowhere.py: no such file"),
    ("no_such_package:World", {}, "--env no_such_package:World: No module"),
    ("dreamgym.envs.base:World", {}, "--env dreamgym.envs.base:World: .*World"),
    (str(ROOT / "collect.py"), {}, "found 0 subclasses of Environment"),
    ("tests.test_envs_base:Unwritten", {}, "Unwritten has no method reset or step"),
    (TINY, {"options": ["colour=red"]}, "no option 'colour'; it has loud, rate, size"),
    (TINY, {"options": ["seed=1"]}, "no option 'seed'"),
    (TINY, {"options": ["size=big"]}, "--env-options size=big: expected a int"),
    (TINY, {"options": ["loud=maybe"]}, "--env-options loud=maybe: expected a bool"),
    ("tests.test_envs_base:Story", {}, "expected --env-options story=VALUE, which has no default"),
    ("tests.test_envs_base:Story", {"options": ["story=a", "size=(3,4)"]}, "no option 'size'; it has story"),
    (FILES, {"data_dir": "somewhere"}, "takes no data folder"),
    ("logs", {}, "no recorded episodes")])
def test_what_does_not_fit_is_named(name, flags, message):
    with pytest.raises(ValueError, match=message):
        make_env(name, **flags)


# ---- sessions ----

@pytest.mark.parametrize("name", [FILES, "webshop", "webarena", "generated", "official"])
def test_sessions_answer_as_alone(request, name):
    """Sessions that see each other or depend on their batch; an episode that its seed does not repeat;
    players whose shares do not add up; a prober that is imitated."""
    if name in ("generated", "official"):
        env = request.getfixturevalue("alfworlds").get(name) or pytest.skip("no official games")
    else:
        env = request.getfixturevalue("shop") if name == "webshop" else make_env(name)
    tasks, players = offline.tasks_with_start(env, "train")[:2], env.players()
    assert sum(player.share for player in players.values()) == pytest.approx(1)
    imitated = "solver" if name == FILES else "imperfect"
    assert [kind for kind, player in players.items() if player.imitate] == [imitated]
    plays = [(task, kind) for task in tasks for kind in players]
    alone, again = ([offline.play(env, task, players[kind], np.random.default_rng(7), kind)
                     for task, kind in plays] for _ in range(2))
    assert alone == again and len({str(episode.steps) for episode in alone}) > len(tasks)
    sessions = env.reset([task for task, _ in plays])
    for i in range(max(len(episode.steps) for episode in alone)):
        running = [(session, e.steps[i]) for session, e in zip(sessions, alone) if i < len(e.steps)]
        results = env.step([session for session, _ in running], [step.action for _, step in running])
        assert [(r.state, r.reward, r.done) for r in results] == [
            (step.next_state, step.reward, step.done) for _, step in running]
    env.end(sessions)


# ---- logs ----

def write_log(path, count: int) -> str:
    """`count` episodes, each of its own task, of 1 and 4 steps in turn."""
    episodes = [Episode(id=f"e{i}", task=Task(id="t", text=f" find  item\u00a0{i} "),
                        steps=[Step(state=f"s{j}", action="go", next_state=f"s{j + 1}")
                               for j in range((1, 4)[i % 2])]) for i in range(count)]
    write_jsonl(path, map(to_json, episodes), append=False)
    return str(path)


@pytest.mark.parametrize("count, sizes", [(3, [1, 1, 1]), (9, [7, 1, 1]), (30, [24, 3, 3])])
def test_recorded_tasks_are_split_once(tmp_path, count, sizes):
    """A task in two splits, an empty split, a split that changes from run to run; test episodes among the
    training data, because one of two readers cleans the text of a task."""
    path = write_log(tmp_path / "log.jsonl", count)
    env, again = (make_env("logs", file=path) for _ in range(2))
    parts = {split: env.tasks(split) for split in offline.SPLITS}
    assert [len(part) for part in parts.values()] == sizes and env.max_steps == 4 and not env.is_real
    tasks = sum(parts.values(), [])
    assert len({task.text for task in tasks}) == len({task.id for task in tasks}) == count
    assert all(task.start == "s0" for task in tasks) and again.tasks("test") == parts["test"]
    for split, episodes in offline.by_split(env, offline.read_logs(env, path, ""), parts).items():
        assert sorted(e.task.text for e in episodes) == sorted(task.text for task in parts[split])


def test_logs_show_their_actions(tmp_path):
    """A language model that has to guess what an action looks like, or a held-out one in its prompt."""
    actions = ["cat notes", "rm notes", "cat plan", "bad"]
    episodes = [Episode(id=f"{i}-{j}", task=Task(id="t", text=f"task {i}"),
                        steps=[a_step("s", action, "s" if action == "bad" else "n")])
                for i in range(9) for j, action in enumerate([f"held {i}", *actions])]
    write_jsonl(tmp_path / "log.jsonl", map(to_json, episodes), append=False)
    env = Logs(str(tmp_path / "log.jsonl"))
    first = min(int(task.text.split()[1]) for task in env.tasks("train"))
    assert env.prompts.policy == f"{Prompts.policy}\nActions look like these:\ncat notes\nheld {first}\nrm notes"


def test_logs_cannot_be_played(tmp_path):
    three, four = (Logs(write_log(tmp_path / f"{n}.jsonl", n)) for n in (3, 4))
    for call in (lambda: three.reset(three.tasks("train")), lambda: three.step([], [])):
        with pytest.raises(ValueError, match="no world to play in"):
            call()
    with pytest.raises(ValueError, match="found 2 different tasks, expected at least 3"):
        Logs(write_log(tmp_path / "short.jsonl", 2))
    assert three.describe() != four.describe() and three.describe() == Logs(str(tmp_path / "3.jsonl")).describe()
