"""Built once per session: a tiny collected data set and a tiny experience model; and a way to run a script's
main() in this process."""
import importlib
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
EXAMPLE = str(ROOT / "examples" / "files.py")
COLLECT = ["--env", EXAMPLE, "--transitions", 300, "--heldout", 50]
TRAIN = ["--env", EXAMPLE, "--model", "scratch:16x1", "--steps", 20]


def run_main(name: str, *flags) -> None:
    """What `python NAME.py FLAGS` does, without six seconds of imports; SystemExit and errors come
    through."""
    before = sys.argv
    sys.argv = [str(ROOT / f"{name}.py"), *map(str, flags)]
    try:
        importlib.import_module(name).main()
    finally:
        sys.argv = before


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def script():
    return run_main


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A working folder with out/data, a tiny collection of examples/files.py."""
    base = tmp_path_factory.mktemp("workspace")
    run_main("collect", "--out", base / "out/data", *COLLECT)
    return SimpleNamespace(base=base, data=base / "out/data", expmodel=base / "out/expmodel")


@pytest.fixture(scope="session")
def trained(workspace):
    """The workspace with out/expmodel, a tiny experience model that has learnt the form of an answer and
    little else."""
    run_main("train_expmodel", "--data", workspace.data, "--out", workspace.expmodel, *TRAIN)
    return workspace


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    """WebShop with its generated catalogue."""
    from dreamgym.envs.base import make_env
    return make_env("webshop", options=[f"cache={tmp_path_factory.mktemp('shop')}"])


@pytest.fixture(autouse=True)
def no_games_from_elsewhere(monkeypatch):
    """`import alfworld` sets ALFWORLD_DATA, which an environment would take for the user's official games."""
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
