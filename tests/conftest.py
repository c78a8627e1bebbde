"""Built once per session: a tiny collected data set and a tiny experience model; and a way to run a script's main() in this process."""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
COLLECT = ["--transitions", 300, "--relabelled", 100, "--heldout", 50, "--relabelled-heldout", 24]
TRAIN = ["--steps", 120, "--max-steps", 120, "--rows", 8, "--no-report-variants", "--probe-rows", 10, "--save-every", 1000]


def run_main(name: str, *flags) -> None:
    """What `python NAME.py FLAGS` does, without six seconds of imports; SystemExit and errors come through."""
    before = sys.argv
    sys.argv = [str(ROOT / f"{name}.py"), *map(str, flags)]
    try:
        importlib.import_module(name).main()
    finally:
        sys.argv = before


@pytest.fixture
def script():
    return run_main


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A working folder with out/shop (the embedded shop) and out/data (a tiny collection)."""
    base, before = tmp_path_factory.mktemp("workspace"), os.getcwd()
    os.chdir(base)
    try:
        run_main("collect", "--out", "out/data", *COLLECT)
    finally:
        os.chdir(before)
    return SimpleNamespace(base=base, data=base / "out/data", expmodel=base / "out/expmodel")


@pytest.fixture(scope="session")
def trained(workspace):
    """The workspace with out/expmodel, a tiny experience model that has learnt the form of an answer and little else."""
    run_main("train_expmodel", "--data", workspace.data, "--out", workspace.expmodel, *TRAIN)
    return workspace


@pytest.fixture
def shop(workspace):
    """The embedded shop as a real environment."""
    from dreamgym.envs import make_env

    return make_env("webshop", cache=workspace.base / "out/shop")


@pytest.fixture(autouse=True, scope="module")
def no_games_from_elsewhere():
    """`import alfworld` sets ALFWORLD_DATA, which an environment would take for the user's official games."""
    os.environ.pop("ALFWORLD_DATA", None)


@pytest.fixture(autouse=True)
def no_games_from_the_test_before():
    os.environ.pop("ALFWORLD_DATA", None)
