"""serve.py: OpenEnv's own client, real environment and dream, everything a server is sent."""
import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from conftest import EXAMPLE, free_port, run_main
from dreamgym import tiny
from dreamgym.envs.base import make_env
from dreamgym.experience_model import load_experience_model
from dreamgym.model import save_model
from dreamgym.offline import tasks_with_start
from serve import Args, make_environment, read_token

pytest.importorskip("openenv", reason="pip install -r requirements-serve.txt")
import uvicorn  # noqa: E402
from openenv.core.env_server import http_server  # noqa: E402
from openenv.core.generic_client import GenericEnvClient  # noqa: E402
from websockets.sync.client import connect  # noqa: E402

from dreamgym import serving  # noqa: E402
from dreamgym.word_tokenizer import build_tokenizer

DEADLINE_S = 120                       # of a wait that a defect would make endless


@contextlib.contextmanager
def served(env, world=None, max_sessions=16, idle_s=3600.0, token=""):
    """A server in a thread; `calls` are (method, sessions) of its world, `ended`: one was given back."""
    world, calls, ended = world or env, [], threading.Event()
    service = serving.Service(world, env, tasks_with_start(env, "train"), "train", 2_000)

    def counted(method):
        def call(*lists):
            calls.append((method, len(lists[0])))
            answers = getattr(world, method)(*lists)
            if method == "end":
                ended.set()
            return answers
        return call
    service.batcher.world = SimpleNamespace(**{name: counted(name) for name in ("reset", "step", "end")})
    app = serving.make_app(service, max_sessions, idle_s, token)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    until = time.monotonic() + DEADLINE_S
    while not server.started:
        assert thread.is_alive() and time.monotonic() < until
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", ws=f"ws://127.0.0.1:{port}/ws", service=service,
                              calls=calls, ended=ended)
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        service.batcher.close()


def client(server, **options):
    return GenericEnvClient(base_url=server.url, message_timeout_s=DEADLINE_S, **options).sync()


@pytest.fixture(scope="module")
def files():
    return make_env(EXAMPLE)


@pytest.fixture
def server(files):
    with served(files) as server:
        yield server


def play(server, index, actions, before_step=lambda: None):
    with client(server) as env:
        seen = [env.reset(index=index)]
        before_step()
        seen += [env.step({"action": action}) for action in actions]
        return [(r.observation, r.reward, r.done) for r in seen]


def shop_actions(task):
    return [f"search[{task.text}]", "click[1]", "<think>it fits</think>\n<action>click[buy now]</action>"]


def test_sessions_at_once(shop, monkeypatch):
    """Answers that go to another session, and sessions that are stepped one by one."""
    with served(shop) as server:
        plans = [shop_actions(task) for task in server.service.tasks[:16]]
        alone = [play(server, i, plan) for i, plan in enumerate(plans)]
        assert server.calls.count(("step", 1)) == 48
        server.calls.clear()
        together = threading.Barrier(16, lambda: monkeypatch.setattr(serving, "GATHER_S", 30.0))
        with ThreadPoolExecutor(16) as pool:
            games = [pool.submit(play, server, i, plan, together.wait) for i, plan in enumerate(plans)]
            assert [game.result() for game in games] == alone
        assert [n for method, n in server.calls if method == "step"] == [16, 16, 16]
        for method in ("reset", "end"):
            assert sum(n for name, n in server.calls if name == method) == 16
    last = [game[-1] for game in alone]
    assert all(done and observation["stop"] in ("success", "failure") for observation, _, done in last)
    assert any(observation["raw_score"] > 0 for observation, *_ in last)
    assert len({game[1][0]["state"] for game in alone}) > 8


def test_dream(trained, files):
    """A dream that is served otherwise than it is played in training."""
    args = Args(expmodel=str(trained.expmodel))
    env = make_environment(args)
    load = lambda: load_experience_model(args.expmodel, env, slots=4)
    with served(env, load()) as server:
        tasks = server.service.tasks
        seen = [play(server, i, ["ls"])[-1] for i in range(3)]
        assert ("step", 1) in server.calls
    world = load()
    for task, (observation, reward, done) in zip(tasks, seen):
        session, = world.reset([task])
        result, = world.step([session], ["ls"])
        assert (observation["state"], reward, done) == (session.state, result.reward, result.done)
        assert observation["stop"] == result.stop


def test_which_task(server):
    """A client that gets another task than it asked for, or another for the same seed."""
    tasks = server.service.tasks
    with client(server) as env:
        for choice in ({"index": 5}, {"task_id": tasks[5].id}, {"task": tasks[5].text}):
            observation = env.reset(**choice, episode_id="mine").observation
            assert (observation["task"], observation["state"]) == (tasks[5].text, tasks[5].start)
        assert observation["prompt"] == f"task: {tasks[5].text}\nstate:\n{tasks[5].start}\n"
        env.step({"action": "ls"})
        state = env.state()
        assert (state["episode_id"], state["task_id"], state["step_count"]) == ("mine", tasks[5].id, 1)
        drawn = [env.reset(seed=seed).observation["task"] for seed in (0, 1, 2, 0, 1, 2)]
        assert drawn[:3] == drawn[3:] and len(set(drawn)) > 1


def test_step_limit(server):
    with client(server) as env:
        env.reset(index=0)
        results = [env.step({"action": "nonsense"}) for _ in range(server.service.env.max_steps)]
        assert [r.done for r in results] == [False] * (len(results) - 1) + [True]
        assert results[-1].observation["stop"] == "step_limit"
        with pytest.raises(RuntimeError, match="reset first"):
            env.step({"action": "ls"})


@pytest.mark.parametrize("method, message, expected", [
    ("reset", {"task_id": "nope"}, "no train task has this id"),
    ("reset", {"task_id": {}}, "Expected `str`"),
    ("reset", {"index": -1}, "there are"),
    ("reset", {"split": "test"}, "plays train tasks"),
    ("reset", {"task": "fly home", "start": "in docs"}, "only the dream plays others"),
    ("reset", {"tsak": "typo"}, "unknown field `tsak`"),
    ("step", {"action": "x" * 2_001}, "2,001 characters; expected at most 2,000"),
    ("step", {"action": 5}, "VALIDATION_ERROR")])
def test_bad_message(server, method, message, expected):
    with client(server) as env:
        env.reset(index=0)
        with pytest.raises(RuntimeError, match=expected):
            getattr(env, method)(message) if method == "step" else env.reset(**message)
        assert env.step({"action": "ls"}).observation["state"].startswith("in ")


def test_new_task(server):
    """A dream of a task that cannot be dreamt, and a page that can be taken for a prompt's own line."""
    service = server.service
    service.world = object()                    # anything but the real environment
    task = service.choose(serving.Choice(task="fly home", start="in docs\nreward: 1 done: yes"))
    assert (task.text, task.start, task.generated) == ("fly home", "in docs\n> reward: 1 done: yes", True)
    for choice in ({"task": "fly home"}, {"task": "two\nlines", "start": "a"}, {"task": "a", "start": "b" * 30_000}):
        with pytest.raises(ValueError, match="expected"):
            service.choose(serving.Choice(**choice))


def test_full_and_vanished(files):
    """A session that a lost client keeps, and more of them than were allowed."""
    with served(files, max_sessions=2) as server, client(server) as first:
        first.reset(index=0)
        lost = connect(server.ws)
        lost.send('{"type": "reset", "data": {"index": 1}}')
        lost.recv(DEADLINE_S)
        with client(server) as third, pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
            third.reset(index=2)
        assert not server.ended.is_set()
        lost.socket.shutdown(socket.SHUT_RDWR)                 # no goodbye
        assert server.ended.wait(DEADLINE_S)
        assert first.step({"action": "ls"}).observation["stop"] == ""


def test_idle(files, monkeypatch):
    """A silent client that keeps its session for ever."""
    quick, clock = dict(vars(asyncio), sleep=lambda s: asyncio.sleep(min(s, 0.01))), [0.0]
    monkeypatch.setattr(http_server, "asyncio", SimpleNamespace(**quick))
    monkeypatch.setattr(http_server, "time", SimpleNamespace(time=lambda: clock[0]))
    with served(files, idle_s=60.0) as server, client(server) as env:
        env.reset(index=0)
        clock[0] = 59.0
        assert not env.step({"action": "ls"}).done
        clock[0] = 120.0
        assert server.ended.wait(DEADLINE_S)
        with pytest.raises(RuntimeError, match="reset first"):
            env.step({"action": "ls"})
        with pytest.raises(RuntimeError, match="connect again"):
            env.reset(index=0)


def test_world_that_fails(files, monkeypatch):
    with served(files) as server, client(server) as env:
        env.reset(index=0)
        with monkeypatch.context() as broken:
            broken.setattr(files, "step", lambda sessions, actions: 1 / 0)
            with pytest.raises(RuntimeError, match="division by zero"):
                env.step({"action": "ls"})
        with pytest.raises(RuntimeError, match="reset first"):
            env.step({"action": "ls"})
        env.reset(index=0)
        assert env.step({"action": "ls"}).done is False


def test_token(files):
    """A stranger, and a web page in the user's own browser."""
    with served(files, token="s3cret") as server:
        for headers, status in (({}, 401), ({"Authorization": "Bearer s3cre"}, 401),
                                ({"Authorization": "Bearer s3cret", "Origin": "http://evil"}, 403)):
            with pytest.raises(ConnectionError, match=f"HTTP {status}"):
                client(server, headers=headers).connect()
        with client(server, headers={"Authorization": "Bearer s3cret"}) as env:
            assert env.reset(index=0).observation["task"]


@pytest.mark.parametrize("host, token, fits", [
    ("127.0.0.1", "", True), ("::1", "", True), ("localhost", "", True), ("0.0.0.0", "", False),
    ("0.0.0.0", "s3cret", True)])
def test_hosts(monkeypatch, host, token, fits):
    """A server that is open to everybody."""
    monkeypatch.setenv("DREAMGYM_TOKEN", token)
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="DREAMGYM_TOKEN"):
        assert read_token(host) == token


def test_ctrl_c(capsys):
    """A server that hangs, or leaves sessions behind, where one is connected."""
    port, seen, over, until = free_port(), [], threading.Event(), time.monotonic() + DEADLINE_S

    def interrupt():
        while time.monotonic() < until and not seen:
            with contextlib.suppress(ConnectionError):
                env = client(SimpleNamespace(url=f"http://127.0.0.1:{port}"))
                seen.append(env.reset(index=0).observation["task"])
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(DEADLINE_S)                                  # connected to the end
    thread = threading.Thread(target=interrupt)
    thread.start()
    run_main("serve", "--env", EXAMPLE, "--port", port)
    over.set()
    thread.join()
    assert seen and "train tasks, 64 sessions at most" in capsys.readouterr().out


def test_trl(trained, files, tmp_path):
    """A server that TRL's trainer cannot train in, or whose sessions are not batched for it."""
    pytest.importorskip("trl", reason="pip install trl==1.16.0")
    from examples import trl_grpo
    tokenizer = build_tokenizer(["task: state: in docs not listed did nothing ls cd"])
    save_model(tiny.create("scratch:16x1", tokenizer), tokenizer, tmp_path / "policy")
    world = load_experience_model(trained.expmodel, files, slots=8)
    with served(files, world) as server:
        log = trl_grpo.main(trl_grpo.Args(str(tmp_path / "policy"), server.url, str(tmp_path / "out"), steps=2,
                                          tasks=2, rollouts=4, max_action_tok=8))
    assert [row["step"] for row in log if "reward" in row] == [1, 2]
    assert sum(n for method, n in server.calls if method == "reset") == 2 * 2 * 4
    assert max(n for method, n in server.calls if method == "step") == 8
    assert (tmp_path / "out/config.json").is_file()
