"""What every script shares to be a good citizen: ranks, seeds, metrics, progress, checkpoints, Ctrl-C, flags.

    args = run.parse(Args)                                  # flags, and --config configs/x.json
    ranks = run.start(args.seed)                            # one process, or the ranks torchrun started
    log = run.Log(args.out, ranks, resume_step=step)        # metrics.jsonl, TensorBoard, console
    with run.graceful(log) as stop: ...                     # first Ctrl-C: stop.agreed(ranks) at the end of a step

Everything is a plain function or a small class, and works the same on one process without torch.distributed. Left out on purpose: several machines
(ranks meet over loopback), several checkpoints kept side by side, loggers other than files and TensorBoard.
"""

import argparse
import contextlib
import dataclasses
import datetime
import difflib
import hashlib
import io
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import tyro
from tqdm import tqdm

SCHEMA = 1
PROGRESS_EVERY_S = 15.0  # seconds between progress lines where no bar can be drawn


# ---- ranks and seeds ----


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Who this process is among its peers; with world 1 every helper is the identity and torch.distributed is never touched."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the console."""
        return self.rank == 0

    def all_reduce_sum(self, values: float | list[float]) -> float | list[float]:
        """Sum over ranks, in float64; a list is summed entry by entry in one call."""
        if self.world == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def gather(self, items: list) -> list:
        """The ranks' lists joined in rank order, on every rank. Items travel as JSON: tuples come back as lists, keys as strings."""
        if self.world == 1:
            return items
        data = torch.frombuffer(bytearray(json.dumps(items).encode()), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world)]
        torch.distributed.all_gather(sizes, torch.tensor([len(data)], device=self.device))
        longest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(data, (0, longest - len(data)))
        rows = [torch.empty_like(padded) for _ in range(self.world)]
        torch.distributed.all_gather(rows, padded)
        return [item for row, size in zip(rows, sizes) for item in json.loads(row[: int(size)].cpu().numpy().tobytes())]

    def broadcast_json(self, obj):
        """Rank 0's JSON-able object, on every rank (what the others pass in is ignored)."""
        return self.gather([obj] if self.is_main else [])[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_reduce_sum(0.0)

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def start(seed: int, threads: int = 1) -> Ranks:
    """Set threads and global seeds, and join the ranks torchrun started, if it did.

    Global seeds are equal on all ranks so that weights made from scratch agree; draws that must differ by rank take `rng(seed, ..., rank)`.
    One thread is the default because OpenMP threads that spin on contended cores are slower than one. Raises ValueError for ranks on more
    than one machine and for more ranks than GPUs.
    """
    torch.set_num_threads(threads)
    random.seed(derive_seed(seed, "python"))
    torch.manual_seed(derive_seed(seed, "torch"))
    cuda = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")   # TF32 where there is a GPU; nothing changes on a CPU
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks(device=torch.device("cuda", 0) if cuda else torch.device("cpu"))
    rank, world, local_rank = (int(os.environ.get(key, "0")) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if here != world:
        raise ValueError(f"found {world} ranks of which {here} on this machine; expected all on one machine: use torchrun --nnodes 1")
    if cuda and local_rank >= torch.cuda.device_count():
        raise ValueError(f"found {world} ranks and {torch.cuda.device_count()} GPUs; expected a GPU for each: lower --nproc-per-node")
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if cuda:
        torch.cuda.set_device(local_rank)
    # hours: the other ranks wait while rank 0 makes what is missing (data, experience model)
    torch.distributed.init_process_group("nccl" if cuda else "gloo", init_method="env://", rank=rank, world_size=world, timeout=datetime.timedelta(hours=24))
    return Ranks(rank, world, local_rank, torch.device("cuda", local_rank) if cuda else torch.device("cpu"))


def spare_cores(ranks: Ranks) -> int:
    """Processes a rank may start for its environments: half of its share of the cores, at least 1 (which means none), at most 8."""
    return min(8, max(1, (os.cpu_count() or 1) // (2 * ranks.world)))


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream with this name; the same on every machine and in every version."""
    text = json.dumps([int(seed), *names], default=int)  # JSON keeps ("ab", "c") and ("a", "bc"), 1 and "1" apart
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def rng(seed: int, *names: str | int) -> np.random.Generator:
    """A generator by name and step, e.g. `rng(seed, "pick", step)`: a resumed run needs no replay of earlier draws."""
    return np.random.default_rng(derive_seed(seed, *names))


def get_random_state() -> dict:
    """The global generators of torch (CPU, this rank's GPU) and Python, in types that `torch.load(weights_only=True)` takes."""
    version, numbers, gauss = random.getstate()
    state = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_random_state(state: dict) -> None:
    """Put back what `get_random_state` returned; a GPU's part is left out where there is no GPU."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


# ---- files ----


def read_json(path: str | Path):
    """The object in a JSON file. Raises ValueError naming the file where it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def write_json(path: str | Path, obj) -> None:
    """Write through a temporary name, so that the path holds the old text or the new, never half. NaN and inf raise ValueError."""
    _replace(Path(path), [json.dumps(obj, indent=1, allow_nan=False) + "\n"])


def write_jsonl(path: str | Path, records: Iterable[dict], append: bool) -> None:
    """One JSON object a line; append=False replaces the file at once. A half line that a kill left at the end is cut before appending."""
    lines = (json.dumps(record, allow_nan=False) + "\n" for record in records)
    path = Path(path)
    if not append:
        return _replace(path, lines)
    _mend_tail(path)
    with path.open("a") as file:
        file.writelines(lines)


def cut_jsonl(path: str | Path, last_step: float) -> dict | None:
    """Drop the records with step > last_step, which a resumed run makes again; returns the last record kept, None if none or no file."""
    path, kept, found = Path(path), [], 0
    if not path.exists():
        return None
    _mend_tail(path)
    with path.open() as file:
        for found, line in enumerate(file, 1):
            try:
                step = json.loads(line)["step"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path} line {found}: expected a JSON object with a step, found {line[:80]!r}; move the file away") from error
            if step <= last_step:
                kept.append(line)
    if len(kept) < found:
        _replace(path, kept)
    return json.loads(kept[-1]) if kept else None


def _replace(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _mend_tail(path: Path) -> None:
    """End the file on a whole line: a record without its newline gets one, half a record is cut."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        if end == 0 or file.read(1) == b"\n":
            return
        file.seek(0)
        data = file.read()
        tail_start = data.rfind(b"\n") + 1
        try:
            json.loads(data[tail_start:])
            file.write(b"\n")
        except ValueError:  # half a record, or half a UTF-8 character
            file.truncate(tail_start)


def fingerprint(obj) -> str:
    """16 hex digits that are equal for equal JSON-able settings, whatever their key order."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- log ----


class Log:
    """metrics.jsonl (the truth), TensorBoard (a mirror of its numbers) and one console line per step; on other ranks it does nothing.

    resume_step: None appends; k drops the lines with step > k so that a resumed curve does not repeat; -1 starts a new curve. The steps of all
    names in one folder count together. time_s and cpu_s are seconds of rank 0's process and go on from the kept part after a resume.
    """

    def __init__(self, folder: str | Path, ranks: Ranks, tensorboard: bool = True, resume_step: int | None = None):
        self.is_main, self.file, self.board = ranks.is_main, None, None
        if not self.is_main:
            return
        path = Path(folder) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        last = cut_jsonl(path, math.inf if resume_step is None else resume_step) or {"time_s": 0.0, "cpu_s": 0.0}
        self.wall_zero, self.cpu_zero = time.perf_counter() - last["time_s"], time.process_time() - last["cpu_s"]
        self.file = path.open("a")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

            self.board = SummaryWriter(str(path.parent / "tensorboard"), purge_step=None if resume_step is None else resume_step + 1)

    def step(self, name: str, step: int, values: dict, show: Iterable[str] | None = None) -> None:
        """Record one step's values (numbers, 0-dim tensors, strings, lists); `show` names those for the console, None all, [] none.

        NaN and inf are written as null, with a warning: JSON has neither.
        """
        if not self.is_main:
            return
        time_s, cpu_s = time.perf_counter() - self.wall_zero, time.process_time() - self.cpu_zero
        record = {"schema": SCHEMA, "name": name, "step": step, "time_s": round(time_s, 3), "cpu_s": round(cpu_s, 3)}
        assert not record.keys() & values.keys(), f"values may not be called {sorted(record.keys() & values.keys())}"
        clean = {}
        for key, value in values.items():
            lost = []  # takes each NaN and inf; append returns None, which is the null we want in their place
            clean[key] = json.loads(json.dumps(value, default=_plain), parse_constant=lost.append)
            if lost:
                self.say(f"warning: {name} step {step}: {key} has {', '.join(lost)}, written as null")
            if self.board and isinstance(clean[key], (int, float)):
                self.board.add_scalar(f"{name}/{key}", clean[key], step)
        self.file.write(json.dumps(record | clean) + "\n")
        self.file.flush()
        shown = [f"{key} {_short(clean[key])}" for key in (clean if show is None else show) if key in clean]
        if shown:
            self.say("  ".join([f"{name} {step}", *shown, f"[{time_s:.0f} s]"]))

    def say(self, text: str) -> None:
        """One line on the console, above any progress bar."""
        if self.is_main:
            tqdm.write(text)
            sys.stdout.flush()  # a pipe is block-buffered, and people watch it

    def close(self) -> None:
        """Flush and close the files."""
        if self.file:
            self.file.close()
        if self.board:
            self.board.close()


def _plain(value):
    return value.tolist()  # a tensor, or a NumPy array or scalar; json.dumps asks only for types it does not know


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary_table(rows: list[dict]) -> str:
    """A plain-text table, one line per dict; columns in order of first appearance, numbers to the right, floats to 4 digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns] + [[_short(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    right = [all(isinstance(row.get(column, 0), (int, float)) for row in rows) for column in columns]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right)).rstrip() for line in lines)


class Timer:
    """Seconds by phase: `with timer("rollout"): ...`, then `timer.take()` once per step. A phase inside another counts in both."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # kernels still under way belong to this phase
            spent = {f"{phase}_s": time.perf_counter() - wall, f"{phase}_cpu_s": time.process_time() - cpu}
            self.seconds |= {key: self.seconds.get(key, 0.0) + value for key, value in spent.items()}

    def take(self) -> dict[str, float]:
        """{"rollout_s": wall seconds, "rollout_cpu_s": CPU seconds of this process, ...} since the last take, and reset."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class _Lines(tqdm):
    """tqdm's counting and estimate, as plain lines for a log file."""

    def display(self, msg=None, pos=None):
        if msg != "":
            print(str(self), file=self.fp, flush=True)


def progress(iterable_or_total: Iterable | int, label: str) -> tqdm:
    """A progress bar with an estimate on rank 0, over an iterable or by hand: `with progress(total, label) as bar: bar.update(n)`.

    Where stderr is no terminal, or in CI, it prints a line every PROGRESS_EVERY_S seconds instead, and nothing for shorter phases.
    """
    source = {"total": iterable_or_total} if isinstance(iterable_or_total, int) else {"iterable": iterable_or_total}
    if not _is_rank_0():
        return tqdm(**source, disable=True)
    if sys.stderr.isatty() and not os.environ.get("CI"):
        return tqdm(**source, desc=label, leave=False, dynamic_ncols=True)
    text = "{desc}: {percentage:.0f}% ({n_fmt}/{total_fmt}), {elapsed} so far, about {remaining} left"
    every = PROGRESS_EVERY_S
    # miniters=1: the clock is looked at on every update, else tqdm guesses from early speed and may stay silent for minutes
    return _Lines(**source, desc=label, leave=False, bar_format=text, mininterval=every, maxinterval=every, delay=every, miniters=1)


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


# ---- checkpoints ----


def save_checkpoint(folder: str | Path, name: str, writer: Callable[[Path], None], meta: dict, ranks: Ranks) -> Path:
    """Write the checkpoint folder/name so that a kill at any point leaves one whole checkpoint, the old or the new.

    Every rank calls this and runs writer(path) on the same empty folder (a sharded model needs all of them to gather; each writes its own
    files); rank 0 adds meta.json last and renames. Raises ValueError if folder/name exists and is no checkpoint.
    """
    whole, new, old = _places(folder, name)
    if ranks.is_main:
        _put_right(folder, name)
        new.mkdir(parents=True)
    ranks.barrier()
    writer(new)
    ranks.barrier()
    if ranks.is_main:
        for path in new.rglob("*"):
            _sync(path)
        write_json(new / "meta.json", {"schema": SCHEMA, **meta})  # its presence says that all the rest is there
        _sync(new)
        if whole.exists():
            os.rename(whole, old)
        os.rename(new, whole)
        _sync(whole.parent)
        if old.exists():
            shutil.rmtree(old)
    ranks.barrier()
    return whole


def latest_checkpoint(folder: str | Path, name: str, ranks: Ranks) -> Path | None:
    """The whole checkpoint folder/name, or None; first puts right what a kill during a save left behind.

    For the run that writes the folder, on every rank; others who only read open folder/name itself, with `load_meta`.
    """
    whole, _, _ = _places(folder, name)
    if ranks.is_main:
        _put_right(folder, name)
    ranks.barrier()
    return whole if whole.exists() else None


def load_meta(checkpoint: str | Path) -> dict:
    """meta.json of a checkpoint folder. Raises ValueError if there is none."""
    path = Path(checkpoint) / "meta.json"
    if not path.exists():
        raise ValueError(f"found no {path}; expected a checkpoint folder, which has one: give the folder that a training script wrote")
    return read_json(path)


def check_meta(meta: dict, expected: dict, where: str | Path, advice: str = "use --fresh to start over or --out another folder") -> None:
    """Raise ValueError naming every key of `expected` that `meta` lacks or has otherwise; other keys of meta are free."""
    expected = json.loads(json.dumps(expected))  # a tuple is a list once it has been in a file
    wrong = [f"{key}: found {json.dumps(meta[key]) if key in meta else 'nothing'}, expected {json.dumps(value)}"
             for key, value in expected.items() if key not in meta or meta[key] != value]  # fmt: skip
    if wrong:
        raise ValueError(f"{where} does not fit this run: {'; '.join(wrong)}; {advice}")


def _places(folder: str | Path, name: str) -> tuple[Path, Path, Path]:
    folder = Path(folder)
    return folder / name, folder / f".{name}.new", folder / f".{name}.old"


def _put_right(folder: str | Path, name: str) -> None:
    """Give the newest whole checkpoint its name, then clear what is left of an unfinished save."""
    whole, new, old = _places(folder, name)
    if whole.exists() and not (whole / "meta.json").exists():
        raise ValueError(f"found {whole} without meta.json; expected a checkpoint or nothing there: use --out another folder")
    for candidate in (new, old):
        if not whole.exists() and (candidate / "meta.json").exists():
            os.rename(candidate, whole)
    for rest in (new, old):
        if rest.exists():
            shutil.rmtree(rest)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


# ---- Ctrl-C ----


class Stop:
    """What `graceful` yields: `requested` is set by the first SIGINT or SIGTERM; poll it where stopping is safe."""

    def __init__(self):
        self.requested = False

    def agreed(self, ranks: Ranks) -> bool:
        """True on every rank once any rank was asked to stop. Every rank calls this at the same point."""
        self.requested = ranks.all_reduce_sum(float(self.requested)) > 0
        return self.requested


@contextlib.contextmanager
def graceful(log: Log) -> Iterator[Stop]:
    """The first SIGINT or SIGTERM sets `stop.requested`, a second SIGINT raises KeyboardInterrupt at once. Main thread only.

    Under torchrun the workers have 30 s from Ctrl-C to the end of their step before they are killed (torchrun --shutdown-timeout).
    """
    stop = Stop()

    def handle(signum, frame):
        if stop.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if log.is_main and not stop.requested:
            os.write(2, b"\nstopping after this step; run the same command to continue\n")  # print() may not be entered twice
        stop.requested = True

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# ---- flags ----


def parse(args_class: type, argv: list[str] | None = None):
    """An `args_class` (a dataclass, one field per flag, its `# comment` the help) from defaults, then --config, then the command line.

    --config is added here: a flat JSON file of flag names and values, such as configs/x.json; a flag without a default must be in it.
    Refused values end the program with exit code 2 and a message that names the flag.
    """
    assert "config" not in {field.name for field in dataclasses.fields(args_class)}, "parse adds --config itself"
    argv = sys.argv[1:] if argv is None else argv
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default="")
    before.add_argument("--config", nargs="?", const="")
    path = before.parse_known_args(argv)[0].config
    try:
        default = tyro.MISSING_NONPROP if not path else _read_preset(args_class, path)

        def flags(
            args: typing.Annotated[args_class, tyro.conf.arg(name="")] = default,
            config: typing.Annotated[str, tyro.conf.arg(help="JSON file of flags and values; flags given here come after it")] = "",
        ):
            return args

        return _cli(flags, argv, (sys.modules[args_class.__module__].__doc__ or "").split("\n")[0])       # the script's first line
    except ValueError as error:  # a preset, or a check in the class's __post_init__
        if _is_rank_0():
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def main(script: Callable[[], None]) -> None:
    """Runs a script's main; what it refuses (a ValueError: flags, files, data, a loss that is not finite) ends it with one line and exit code 1."""
    try:
        script()
    except ValueError as error:
        if os.environ.get("DREAMGYM_DEBUG"):
            raise
        print(f"{Path(sys.argv[0]).name}: {error} (DREAMGYM_DEBUG=1 shows where)", file=sys.stderr)
        raise SystemExit(1) from None


def data_meta(folder: Path) -> dict:
    """meta.json of a folder of collect.py. Raises ValueError when there is none."""
    if not (folder / "meta.json").exists():
        raise ValueError(f"--data {folder}: found no meta.json there; expected a folder that collect.py wrote")
    return read_json(folder / "meta.json")


def _cli(target: Callable, argv: list[str], description: str | None = None):
    """tyro.cli, heard from rank 0 only (its own console_outputs=False still prints bad values, in 1.0.16)."""
    silence = contextlib.nullcontext() if _is_rank_0() else contextlib.redirect_stderr(io.StringIO())
    with silence:
        return tyro.cli(target, args=argv, description=description, console_outputs=_is_rank_0())


def _read_preset(args_class: type, path: str):
    """The preset as an instance, each value checked by the rules of the command line. Raises ValueError, SystemExit for a bad value."""
    if not Path(path).is_file():
        raise ValueError(f"--config: found no file {path}; expected a JSON file of flags and values, such as those in configs/")
    preset, types, tokens = read_json(path), typing.get_type_hints(args_class), []
    if type(preset) is not dict:
        raise ValueError(f"{path}: found a JSON {type(preset).__name__}; expected one object of flags and values")
    for key, value in preset.items():
        name = key.replace("-", "_")
        flag = name.replace("_", "-")
        if name not in types:
            nearest = difflib.get_close_matches(name, types, n=1, cutoff=0.0)
            raise ValueError(f"{path}: {key!r} is no flag of this command; the nearest is {nearest[0]!r}, and --help lists all")
        if type(value) is dict:
            raise ValueError(f"{path}: {key!r} is nested; expected one value or a list")
        if types[name] is bool and isinstance(value, bool):
            tokens.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            tokens += [f"--{flag}", *map(str, value)]
        else:
            tokens.append(f"--{flag}={value}")
    try:
        return _cli(args_class, tokens)
    except SystemExit:
        raise ValueError(f"the value above is from {path}: correct it there") from None
