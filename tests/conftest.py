"""Shared: tiny data and models made once a session, builders, and scripts run in this process."""
import importlib
import json
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import start_processes
from werkzeug import Request, Response
from werkzeug.serving import make_server

from dreamgym import offline
from dreamgym.episode import Episode, Step, Task
from dreamgym.names import Names

torch.set_num_threads(1)
logging.getLogger("werkzeug").setLevel(logging.ERROR)     # no line a request
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")   # two ranks need two GPUs, and sums on a GPU are not bit-equal
ROOT = Path(__file__).parent.parent
EXAMPLE = str(ROOT / "examples" / "files.py")
COLLECT = ["--env", EXAMPLE, "--transitions", 300, "--heldout", 50]
TRAIN = ["--env", EXAMPLE, "--model", "scratch:16x1", "--steps", 600, "--max-steps", 600, "--short-first-steps", 0,
         "--no-report-variants"]
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SMALL_RUN = ["--model", "scratch:16x1", "--iterations", 2, "--tasks", 2, "--rollouts", 2, "--eval-tasks", 2,
             "--test-tasks", 2, "--imitation-episodes", 4, "--imitation-epochs", 1]


def run_main(name: str, *flags) -> None:
    """What `python NAME.py FLAGS` does, without six seconds of imports; SystemExit and errors come
    through."""
    before = sys.argv
    sys.argv = [str(ROOT / f"{name}.py"), *map(str, flags)]
    try:
        importlib.import_module(name).main()
    finally:
        sys.argv = before


def probed(env, before: Episode, others: list[Episode], rng) -> Episode:
    """The task of an earlier episode again, with probes."""
    names = Names(episode.task.text for episode in others)
    prober = offline.probing(env.players()["imperfect"], before, others, names, [])
    return offline.play(env, before.task, prober, rng, f"probe-{before.id}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _rank(rank: int, worker, port: int, args: tuple) -> None:
    """What torchrun tells a process of two on this machine."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    worker(rank, *args)


def on_two_ranks(worker, *args) -> None:
    """worker(rank, *args) on two gloo ranks, forked from a process that has imported the libraries once."""
    multiprocessing.set_forkserver_preload(["transformers.models.llama.modeling_llama", "dreamgym.model"])
    ranks = start_processes(_rank, (worker, free_port(), args), nprocs=2, join=False, start_method="forkserver")
    end = time.monotonic() + 600
    try:
        while not ranks.join(timeout=10):
            assert time.monotonic() < end, "the ranks wait for each other"
    finally:
        for process in ranks.processes:
            process.kill()


def gone(pids: list[int], seconds: float = 120) -> bool:
    """Whether all of them end soon; a zombie has ended."""
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + seconds
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(runs, pids))


@contextmanager
def http_server(answer):
    """A server on loopback: its address. answer(method, path, headers, body) gives (status, headers, text)."""
    @Request.application
    def app(request):
        # as it was asked for: `request.path` is decoded
        path = request.environ["RAW_URI"]
        status, headers, text = answer(request.method, path, request.headers, request.get_data())
        return Response(text, status, {"Content-Type": "text/html", **headers})

    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def chat_server():
    """A chat endpoint; `reply(messages, settings)` gives (status, text or JSON value) or "silence" for no answer.
    `asked`: (path, settings, key) of the requests; `close()` ends it."""
    over = threading.Event()

    def answer(method, path, headers, body):
        settings = json.loads(body)
        state.asked.append((path, settings, headers.get("Authorization")))
        reply = state.reply(settings["messages"], settings)
        if reply == "silence":
            over.wait()
            return 500, {}, ""
        status, content = reply
        content = content if isinstance(content, str) else json.dumps(content)
        kind = "text/html" if content.startswith("<") else "application/json"
        # retry-after-ms: the client need not pause for half a second
        return status, {"Content-Type": kind, "retry-after-ms": 1, "Location": "/elsewhere"}, content

    with ExitStack() as stack:
        state = SimpleNamespace(asked=[], close=stack.close)
        state.url = stack.enter_context(http_server(answer)) + "/v1"
        stack.callback(over.set)
        yield state


def a_task(text: str = "x", **more) -> Task:
    return Task(**{"id": text, "text": text} | more)


def a_step(state: str = "a", action: str = "b", after: str = "c", reward: float = 0.0, **more) -> Step:
    """A step, which ends its episode where it is paid."""
    given = {"state": state, "action": action, "next_state": after, "reward": reward, "done": reward > 0}
    return Step(**given | more)


def one_step(name: str, task: Task, reward: float = 0.0, **more) -> Episode:
    return Episode(id=name, task=task, steps=[a_step(reward=reward)], **more)


def random_model(kind: str, vocab: int, seed: int = 0, **changes):
    """A small model of a family, its random weights large enough that a wrong position or a leak shows."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    torch.manual_seed(seed)
    size = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25, "pad_token_id": None,
            "max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": None}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**size | changes)).eval()


@pytest.fixture(scope="session")
def needs_chromium():
    """Skips where there is no real browser."""
    try:
        from dreamgym.envs.webarena.chromium import find_chromium
        find_chromium()
    except (ImportError, ValueError) as error:
        pytest.skip(f"no real browser here: {error}")


@pytest.fixture(scope="module")
def browser(needs_chromium):
    """A real browser, whose contexts the tests close."""
    from dreamgym.envs.webarena.chromium import Browser
    with closing(Browser()) as running:
        yield running
        assert running.chromium.contexts == []


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A working folder with out/data, a tiny collection of examples/files.py."""
    base = tmp_path_factory.mktemp("workspace")
    run_main("collect", "--out", base / "out/data", *COLLECT)
    return SimpleNamespace(base=base, data=base / "out/data", expmodel=base / "out/expmodel")


@pytest.fixture(scope="session")
def trained(workspace):
    """The workspace with out/expmodel: a tiny model that has learnt the form of an answer and little else."""
    run_main("train_expmodel", "--data", workspace.data, "--out", workspace.expmodel, *TRAIN)
    return workspace


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    """WebShop with its generated catalogue."""
    from dreamgym.envs.base import make_env
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WEBSHOP_DATA", raising=False)
        return make_env("webshop", options=[f"cache={tmp_path_factory.mktemp('shop')}"])


@pytest.fixture(scope="session")
def alfworlds(tmp_path_factory):
    """ALFWorld on games made here, of all six types twice, and on official ones where they are."""
    from alfworld_official import SOURCE, packages_missing, rebuild
    from dreamgym.envs.alfworld.env import ALFWorld
    from dreamgym.envs.alfworld.games import generate
    if packages_missing():
        pytest.skip(packages_missing())
    base = tmp_path_factory.mktemp("alfworld")
    generate(base / "generated", 3, {"train": 12, "valid": 1, "test": 2})
    if SOURCE.exists():
        for split, count in (("train", 6), ("valid_seen", 3), ("valid_unseen", 2)):
            rebuild(base / "official", split, count)
    return {path.name: ALFWorld(str(path), cache=str(base / "cache")) for path in sorted(base.iterdir())}


@pytest.fixture(autouse=True)
def no_games_from_elsewhere(monkeypatch):
    """`import alfworld` sets ALFWORLD_DATA, which an environment would take for the user's official games."""
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
