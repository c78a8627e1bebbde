"""The pieces of train_policy.py: phases, what the curriculum is fed, its child's Ctrl-C."""
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import dreamgym.model
import generate_tasks
from tests.conftest import EXAMPLE, ROOT, SMALL_RUN, free_port, gone, on_two_ranks, one_step, run_main
from dreamgym import prepare, run
from dreamgym.curriculum import Curriculum
from dreamgym.episode import Step, StopReason, Task, read_tasks, to_json
from dreamgym.imitation import demonstrations
from train_policy import Args, Run, feed_curriculum, whole_groups


def state_of(tasks, step=3, encoder=None):
    model = SimpleNamespace(encoder=encoder)
    return Run(None, None, None, None, Curriculum(tasks), model, step=step)


@pytest.mark.parametrize(("flags", "counters", "phase"), [
    ({"iterations": 3}, {"step": 2}, "dream"), ({"iterations": 3}, {"step": 3}, ""),
    ({"iterations": 3, "real_transitions": 500}, {"step": 3}, "real"),
    ({"iterations": 3, "real_transitions": 500}, {"step": 7, "real_transitions": 499}, "real"),
    ({"iterations": 20, "real_transitions": 500}, {"step": 9, "real_transitions": 500}, ""),   # no dream after S2R
    ({"algo": "imitation"}, {}, ""), ({"world": "real", "real_transitions": 500}, {}, "real"),
    ({"world": "real", "real_transitions": 500}, {"step": 1, "real_transitions": 500}, "")])
def test_the_phases_of_a_run(flags, counters, phase):
    """Real transitions in a dream run, a real phase that never ends, dreams with --world real."""
    run_state = state_of([Task(id="a", text="a")], step=0)
    for name, value in counters.items():
        setattr(run_state, name, value)
    assert run_state.phase(Args(**flags)) == phase


def test_data_of_a_language_model_are_used_as_they_are(workspace, tmp_path, monkeypatch):
    """Paid data that the main job collects again, and another log's data in place of the log's."""
    data, launched, log = shutil.copytree(workspace.data, tmp_path / "data"), [], tmp_path / "log.jsonl"
    settings = run.load_meta(data)["settings"]
    monkeypatch.setattr(prepare, "launch", lambda script, *_: launched.append(script))

    def go(paid, **flags):
        launched.clear()
        run.write_json(data / "meta.json", {"settings": settings | paid})
        prepare.prepare(Args(env=EXAMPLE, tasks=2, **flags), tmp_path, run.Dist())
        return launched == ["train_expmodel.py"]
    assert not go({}) and launched == ["collect.py", "train_expmodel.py"]
    log.write_text("an episode")
    for paid in ({"player": "http://x/v1"}, {"teacher": "http://x/v1"}):
        assert go(paid) and go(paid, fresh=True) and not go({}, fresh=True)
        assert go(paid | {"import_file_fingerprint": run.fingerprint("an episode")}, data=str(log))
        with pytest.raises(ValueError, match="holds data that a language model made of other episodes"):
            go(paid, data=str(log), fresh=True)


def test_demonstrations_are_successful_where_any_is():
    """Imitating failures, explorers, or nothing where logs show no success."""
    task = Task(id="t", text="t")
    lost = [one_step(source, task, source=source) for source in ("slips", "imported")]
    won = [one_step(f"{source}-won", task, 1.0, source=source) for source in ("explorer", "slips", "imported")]
    won[0].steps[0].imitate = False
    assert [e.id for e in demonstrations(lost + won)] == ["slips-won", "imported-won"]
    assert demonstrations(lost + won[:1]) == lost
    probe = Step(state="s", action="probe", next_state="s", imitate=False)
    moved = replace(probe, next_state="n")
    probing = replace(won[1], steps=[probe, *won[1].steps, moved, probe])
    assert demonstrations([probing])[0].steps == [*won[1].steps, moved]


def test_grpo_feeds_the_curriculum_by_task():
    """Values that mix tasks (Eq. 7: each task has the variance of its own rewards)."""
    a, b, c, d = tasks = [Task(id=name, text=name) for name in "abcd"]
    run_state = state_of(tasks)
    episodes = [one_step("0", a, 1.0), one_step("1", b), one_step("2", a), one_step("3", b)]
    episodes += [one_step("4", c, stop=StopReason.MALFORMED), one_step("5", d, 1.0),
                 one_step("6", d, stop=StopReason.MALFORMED)]
    assert feed_curriculum(Args(), run_state, episodes) == pytest.approx(2 / 3)
    stats = run_state.curriculum.stats
    assert stats["a"].value == 0.25 and stats["b"].value == 0 and stats["c"].episodes == 0
    for name in "cd":                      # at most one episode is left to learn from: they fade
        assert (stats[name].value, stats[name].last) == (0.0, run_state.step)


def test_ppo_feeds_the_curriculum_by_cluster():
    """Single episodes (variance 0 each) that empty the curriculum: similar tasks share a group."""
    tasks = [Task(id=f"{kind}{i}", text=f"find {kind}") for kind in ("jacket", "belt") for i in range(4)]
    encoder = lambda states, texts: np.array([[1.0, 0.0] if "jacket" in t else [0.0, 1.0] for t in texts],
                                             np.float32)
    run_state = state_of(tasks, encoder=encoder)
    episodes = [one_step(t.id, t, float(t.id in ("jacket0", "jacket1"))) for t in tasks]
    assert feed_curriculum(Args(algo="ppo", rollouts=4), run_state, episodes) == 0.5
    assert {t.id: run_state.curriculum.stats[t.id].value for t in tasks} == {
        t.id: 0.25 if "jacket" in t.id else 0.0 for t in tasks}
    for args in (Args(algo="ppo", rollouts=1), Args(algo="rft", rollouts=1)):     # no cluster of one task
        assert feed_curriculum(args, state_of(tasks, encoder=encoder), episodes) == 0.5


@pytest.mark.parametrize(("size", "left"), [(1, 5), (2, 1), (3, 7)])
def test_the_real_budget_has_no_rest(size, left):
    """Two ranks that share one last transition as 0 and 0, and loop for ever: budgets add up."""
    shares = [run.Dist(rank, size).share(left) for rank in range(size)]
    assert sum(shares) == left and shares[0] >= 1 and max(shares) - min(shares) <= 1


def test_groups_that_the_budget_cut_are_left_out():
    """Groups of short episodes alone, whose failures are missing."""
    tasks = [Task(id=name, text=name, env="x") for name in "ab"]
    episodes = [one_step(str(i), tasks[i > 2], 1.0) for i in range(5)]
    assert whole_groups(episodes, 3, 6) == episodes[:3] and whole_groups(episodes, 2, 6) == episodes[3:]
    assert whole_groups(episodes, 1, 6) == [] and whole_groups(episodes, 1, 5) == episodes          # PPO


def test_ctrl_c_reaches_the_script_that_is_running(tmp_path, monkeypatch):
    """Ctrl-C that kills the experience model's training before it has saved: the child gets it once."""
    child = tmp_path / "child.py"
    child.write_text(
        "import pathlib, signal, sys, time\nhere = pathlib.Path(__file__).parent\n"
        "def stop(*_):\n    time.sleep(0.3)\n    with (here / 'saved').open('a') as f: f.write('x')\n    "
        "sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop)\n(here / 'ready').touch()\ntime.sleep(60)\n")

    def press():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(SystemExit) as stopped:
        prepare.launch(child, [])
    assert stopped.value.code == 130 and (tmp_path / "saved").read_text() == "x"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has ended")
def test_a_child_does_not_outlive_a_killed_parent(tmp_path):
    """A second collect.py in the folder of one that still runs unseen."""
    (tmp_path / "child.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    parent = subprocess.Popen([sys.executable, "-c", f"""
from dreamgym import prepare
prepare.launch({str(tmp_path / "child.py")!r}, [])"""], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill(), parent.wait()
    assert gone([child], 10)


def test_scarce_tasks_are_the_same_in_every_run(trained):
    """RL that knows all tasks, or others after a resume."""
    counts = SimpleNamespace(train_tasks=3, eval_tasks=2, test_tasks=1)
    few, again = (prepare.read_splits(counts, trained.data) for _ in range(2))
    assert few == again and {name: len(tasks) for name, tasks in few.items()} == {"train": 3, "valid": 2, "test": 1}
    everything = read_tasks(trained.data / "tasks_train.jsonl")
    counts.train_tasks = 0
    assert prepare.read_splits(counts, trained.data)["train"] == everything
    assert all(task in everything for task in few["train"])


def test_seeds_are_valuable_now(tmp_path):
    """Variance between policies of different iterations, or between tasks of one text; dreams that broke off as failures."""
    tasks = {name: Task(id=name, text="one text") for name in "abcd"}
    episodes = [one_step(str(i), tasks[name], float(won), iteration=int(at)) for i, (at, name, won) in enumerate(
        ["0a1", "0a0", "1a1", "1a1", "0b0", "1b1", "0c1", "0c1", "0d1", "0d0"])]
    episodes.append(one_step("x", tasks["c"], stop=StopReason.MALFORMED, world="dream", iteration=0))
    run.write_jsonl(tmp_path / "all.jsonl", map(to_json, episodes), append=False)
    run.write_jsonl(tmp_path / "none.jsonl", map(to_json, episodes[2:8]), append=False)
    assert generate_tasks.valuable_tasks(str(tmp_path / "all.jsonl"), 5) == [tasks["d"]]
    with pytest.raises(ValueError, match="found no group of episodes"):
        generate_tasks.valuable_tasks(str(tmp_path / "none.jsonl"), 5)


def test_generated_tasks_of_a_file_are_played(trained, tmp_path):
    """A file that nothing reads; tasks without a generated mark in the dream."""
    run_main("generate_tasks", "--expmodel", trained.expmodel, "--data", trained.data, "--count", 3, "--out",
             tmp_path / "made.jsonl")
    made = read_tasks(tmp_path / "made.jsonl")
    seed = read_tasks(trained.data / "tasks_train.jsonl")[0]
    made.append(Task(id="generated-x", text="new", start=seed.start, env=seed.env, generated=True, parent=seed.id))
    run.write_jsonl(tmp_path / "file.jsonl", map(to_json, made), append=False)
    flags = ["--env", EXAMPLE, "--data", trained.data, "--expmodel", trained.expmodel, "--out", tmp_path / "out",
             *SMALL_RUN, "--iterations", 1, "--max-malformed", 1, "--generated-tasks"]
    run_main("train_policy", *flags, tmp_path / "file.jsonl", "--max-generated-fraction", 0.5)
    curriculum = run.read_json(tmp_path / "out/policy/run.json")["curriculum"]["tasks"]
    assert {task.id for task in made} <= {stats["task"]["id"] for stats in curriculum}
    for more, said in (([trained.data / "tasks_train.jsonl"], "`generated` false"),
                       ([tmp_path / "file.jsonl", "--max-generated-fraction", 0], "above 0"),
                       ([tmp_path / "file.jsonl", "--tasks", 10_000], "lower --tasks"),
                       ([tmp_path / "file.jsonl", "--train-tasks", 1], "found 1 training tasks")):
        with pytest.raises(ValueError, match=said):
            run_main("train_policy", *flags, *more)


def sharded_rank(rank, out, port, flags):
    dreamgym.model.REPLICATED_BELOW = 0
    (out / f"machine{rank}").mkdir()
    os.chdir(out / f"machine{rank}")
    with pytest.raises(ValueError, match="does not see it; expected a folder that all machines share"):
        run_main("train_policy", *flags, "--out", "not-shared")
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    run_main("train_policy", *flags, "--out", out)


def test_two_ranks_with_sharded_models(trained, tmp_path):
    """Ranks that wait for each other: rank 0 alone asks for new tasks, rollouts differ in length. And machines
    that do not share a folder."""
    flags = ["--env", EXAMPLE, "--data", trained.data, "--expmodel", trained.expmodel, *SMALL_RUN,
             "--generate-every", 1, "--eval-tasks", 3, "--test-tasks", 3, "--max-malformed", 1, "--no-drop-malformed"]
    on_two_ranks(sharded_rank, tmp_path, free_port(), flags)
    assert (tmp_path / "result.json").is_file() and (tmp_path / "dream.html").is_file()
