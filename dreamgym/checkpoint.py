"""Checkpoints: a folder that is whole or not there, and what continues a run from it.

    resume = checkpoint.find(out, "policy", meta, dist)            # the folder to go on from, or None
    checkpoint.save(out, "policy", lambda path: ..., meta, dist)   # every rank writes into the same folder
"""
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor, distribute_tensor

from dreamgym.run import ADVICE, SCHEMA, Dist, check_meta, load_meta, write_json


def save(folder: str | Path, name: str, writer: Callable[[Path], None], meta: dict, dist: Dist) -> Path:
    """Writes the checkpoint folder/name; a kill at any point leaves a whole one, the old or the new. Every
    rank runs writer(path) on the same empty folder. Raises ValueError where something cannot be written."""
    whole, new, old = _repaired(folder, name, dist)
    try:
        new.mkdir(parents=True, exist_ok=True)
        writer(new)
        dist.barrier()
        if dist.is_main:
            for path in new.rglob("*"):
                _sync(path)
            write_json(new / "meta.json", {"schema": SCHEMA, **meta})  # says that all the rest is there
            _sync(new)
            if whole.exists():
                os.rename(whole, old)
            os.rename(new, whole)
            _sync(whole.parent)
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise                                    # not the disk's
    except (OSError, RuntimeError, SafetensorError) as error:    # each library has its own for a full disk
        free_mb, what = shutil.disk_usage(folder).free / 1e6, str(error).split("\n")[0]
        shutil.rmtree(new, ignore_errors=True)
        raise ValueError(f"could not save {whole}: {what} ({free_mb:.0f} MB free there); make room, then the "
                         "same command continues from the checkpoint before") from error
    return latest(folder, name, dist)


def latest(folder: str | Path, name: str, dist: Dist) -> Path | None:
    """The checkpoint folder/name of the run that calls this on every rank, or None."""
    whole = _repaired(folder, name, dist)[0]
    return whole if dist.broadcast(whole.exists()) else None     # another machine may see it later


def find(folder: str | Path, name: str, meta: dict, dist: Dist, advice: str = ADVICE) -> Path | None:
    """The `latest` to go on from. Raises ValueError naming each key of `meta`, and each of its `settings`,
    that the checkpoint has otherwise, with `advice`."""
    resume = latest(folder, name, dist)
    if resume:
        saved, rest = load_meta(resume), {k: v for k, v in meta.items() if k != "settings"}
        expected = {"schema": SCHEMA} | meta["settings"] | rest
        check_meta(saved | saved.get("settings", {}), expected, resume, advice)
    return resume


def remove(folder: str | Path, name: str, dist: Dist) -> None:
    """Removes folder/name and what a kill left beside it (--fresh)."""
    whole = _repaired(folder, name, dist)[0]
    if dist.is_main and whole.exists():
        shutil.rmtree(whole)
    dist.barrier()


def _repaired(folder: str | Path, name: str, dist: Dist) -> tuple[Path, Path, Path]:
    """The paths of a checkpoint. The newest whole one left by a kill gets its name, the rest goes."""
    whole, new, old = Path(folder, name), Path(folder, f".{name}.new"), Path(folder, f".{name}.old")
    if dist.is_main:
        if whole.exists() and not (whole / "meta.json").exists():
            raise ValueError(f"found {whole} without meta.json; expected a checkpoint or nothing there: "
                             "name another folder")
        for rest in (new, old):
            if not whole.exists() and (rest / "meta.json").exists():
                os.rename(rest, whole)
        for rest in filter(Path.exists, (new, old)):
            shutil.rmtree(rest)
    dist.barrier()
    return whole, new, old


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def save_state(folder: Path, optimizers: list, shared: dict, own: dict, dist: Dist) -> None:
    """Writes training.pt: the optimizers with whole tensors, rank 0's `shared`, and each rank's `own` with
    its random state."""
    def whole(value):
        if not isinstance(value, DTensor):
            return value
        full = value.full_tensor()               # of all ranks' shards; rank 0 alone keeps it
        return full.cpu() if dist.is_main else None

    states = [found | {"state": {i: {name: whole(value) for name, value in state.items()}
                                 for i, state in found["state"].items()}}
              for found in (optimizer.state_dict() for optimizer in optimizers)]
    generators = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    ranks = dist.gather([{**own, "random": generators}])
    if dist.is_main:
        torch.save({"shared": shared | {"optimizers": states}, "ranks": ranks}, folder / "training.pt")


def load_state(folder: Path, optimizers: list, dist: Dist) -> tuple[dict, dict]:
    """(shared, own) of `save_state`, by any number of ranks; optimizers and random state are put back. `own`
    is empty for a rank that the saved run did not have."""
    def shard(value, parameter):
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return value.clone()           # not a view of the file, which the next save deletes

    if not (folder / "training.pt").exists():
        raise ValueError(f"{folder}: found no training.pt; expected a checkpoint of this version; use "
                         "--fresh")
    # mmap: a rank holds one whole tensor of the optimizer at a time, beside its shards
    state = torch.load(folder / "training.pt", weights_only=True, mmap=True, map_location="cpu")
    ranks = state["ranks"]
    if dist.is_main and len(ranks) != dist.world_size:
        print(f"{folder}: saved by {len(ranks)} ranks, continued by {dist.world_size}: weights and optimizer "
              "are the same, samples will be others" + "; new ranks begin with fresh samplers"
              * (len(ranks) < dist.world_size))
    for optimizer, found in zip(optimizers, state["shared"].pop("optimizers")):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.load_state_dict(found | {"state": {
            i: {name: shard(value, parameters[i]) for name, value in values.items()}
            for i, values in found["state"].items()}})
    own = ranks[dist.rank] if dist.rank < len(ranks) else {}
    if own:
        generators = own.pop("random")
        random.setstate(generators["python"])
        torch.set_rng_state(generators["torch"])
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["cuda"])
    return state["shared"], own
