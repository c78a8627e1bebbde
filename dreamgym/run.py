"""What every script shares: ranks, seeds, files, metrics, progress, checkpoints, Ctrl-C, flags and presets.

    args = run.parse(Args)                             # defaults < preset of configs/ < command line
    dist = run.init_dist(args.seed)                    # one process, or the ranks that torchrun started
    log = run.Log(args.out, dist, resume_step=step)    # metrics.jsonl, TensorBoard, console
    with run.graceful(log) as stop: ...                # first Ctrl-C: stop.agreed(dist) at the end of a step

Left out on purpose: several checkpoints kept side by side, loggers other than files and TensorBoard.
"""
from __future__ import annotations

import ast
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

import msgspec
import numpy as np
import torch
import tyro
from tqdm import tqdm

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[1]   # the scripts and configs/ are here
PROGRESS_EVERY_S = 15.0                      # between redraws of a progress bar that goes into a file


# ---- ranks and seeds -----------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Dist:
    """This process among its peers. With world_size 1 every method is the identity."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the console."""
        return self.rank == 0

    def all_reduce_sum(self, values: float | list[float]) -> float | list[float]:
        """Sum over ranks, in float64. A list is summed entry by entry in one call."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def gather(self, items: list) -> list:
        """The ranks' lists joined in rank order, on every rank. Items are plain values."""
        if self.world_size == 1:
            return items
        lists = [None] * self.world_size
        torch.distributed.all_gather_object(lists, items)
        return [item for part in lists for item in part]

    def broadcast(self, obj):
        """Rank 0's object (plain values), on every rank. What the other ranks pass in is ignored."""
        if self.world_size == 1:
            return obj
        box = [obj]
        torch.distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def barrier(self) -> None:
        """Waits for every rank."""
        self.all_reduce_sum(0.0)

    def close(self) -> None:
        """Leaves the process group, if there is one."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def init_dist(seed: int, threads: int = 1) -> Dist:
    """Sets threads and global seeds, and joins the ranks that torchrun started, if it did.

    Global seeds are equal on all ranks, so that weights made from scratch agree. Draws that must differ take
    `rng(seed, ..., rank)`. One thread: OpenMP threads that spin on contended cores are slower.
    """
    torch.set_num_threads(min(threads, os.cpu_count() or 1))
    random.seed(derive_seed(seed, "python"))
    torch.manual_seed(derive_seed(seed, "torch"))
    torch.set_float32_matmul_precision("high")   # TF32 on a GPU; changes nothing on a CPU
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Dist(device=device)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) == world_size:   # all ranks on this machine
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(f"found local rank {local_rank} and {torch.cuda.device_count()} GPUs; "
                             "expected a GPU for each rank: lower --nproc-per-node")
        torch.cuda.set_device(local_rank)
    # hours: the other ranks wait while rank 0 makes what is missing (data, experience model)
    torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(hours=24))
    return Dist(rank, world_size, local_rank, device)


def spare_cores(dist: Dist) -> int:
    """Processes a rank may start for its environments: half of its share of the cores, 1 (none) to 8."""
    return min(8, max(1, (os.cpu_count() or 1) // (2 * dist.world_size)))


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream with this name; the same on every machine and in every version."""
    text = json.dumps([int(seed), *names], default=int)  # keeps ("ab", "c") and ("a", "bc"), 1 and "1" apart
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def rng(seed: int, *names: str | int) -> np.random.Generator:
    """A generator by name and step, e.g. `rng(seed, "pick", step)`: a resume replays no earlier draws."""
    return np.random.default_rng(derive_seed(seed, *names))


def get_random_state() -> dict:
    """The global generators of torch and Python, in types that `torch.load(weights_only=True)` takes."""
    version, numbers, gauss = random.getstate()
    state = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_random_state(state: dict) -> None:
    """Puts back what `get_random_state` returned; a GPU's part is left out where there is no GPU."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


# ---- files ---------------------------------------------------------------------------------------

def read_json(path: str | Path):
    """The object in a JSON file. Raises ValueError naming the file where it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def write_json(path: str | Path, obj) -> None:
    """Writes through a temporary name: the path holds the old text or the new, never half. Refuses NaN."""
    _replace(Path(path), [json.dumps(obj, indent=1, allow_nan=False) + "\n"])


def write_jsonl(path: str | Path, records: Iterable[dict], append: bool) -> None:
    """One JSON object a line. append=False replaces the file at once; append=True first mends its end."""
    lines = (json.dumps(record, allow_nan=False) + "\n" for record in records)
    path = Path(path)
    if not append:
        return _replace(path, lines)
    mend_jsonl(path)
    with path.open("a") as file:
        file.writelines(lines)


def cut_jsonl(path: str | Path, last_step: float) -> dict | None:
    """Drops the records with step > last_step, which a resumed run makes again. Returns the last one kept."""
    path, kept, found = Path(path), [], 0
    if not path.exists():
        return None
    mend_jsonl(path)
    with path.open() as file:
        for found, line in enumerate(file, 1):
            try:
                step = json.loads(line)["step"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path} line {found}: expected a JSON object with a step, "
                                 f"found {line[:80]!r}; move the file away") from error
            if step <= last_step:
                kept.append(line)
    if len(kept) < found:
        _replace(path, kept)
    return json.loads(kept[-1]) if kept else None


def mend_jsonl(path: str | Path) -> None:
    """Ends the file on a whole line: a record without its newline gets one, half a record is cut."""
    if not Path(path).exists():
        return
    with Path(path).open("r+b") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        if file.read(1) in (b"", b"\n"):
            return
        file.seek(0)
        data = file.read()
        tail_start = data.rfind(b"\n") + 1
        try:
            json.loads(data[tail_start:])
            file.write(b"\n")
        except ValueError:  # half a record, or half a UTF-8 character
            file.truncate(tail_start)


def _replace(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def fingerprint(obj) -> str:
    """16 hex digits that are equal for equal JSON-able settings, whatever their key order."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def data_meta(folder: Path) -> dict:
    """meta.json of a folder of collect.py. Raises ValueError when there is none."""
    path = folder / "meta.json"
    if not path.exists():
        raise ValueError(f"--data {folder}: found no meta.json; expected a folder that collect.py wrote")
    return read_json(path)


# ---- log -----------------------------------------------------------------------------------------

class Log:
    """metrics.jsonl (the truth), TensorBoard (its mirror) and one console line a step; only on rank 0.

    resume_step: None appends; k drops the lines with step > k, which a resumed run makes again; -1 starts a
    new curve. The steps of all names in one folder count together. time_s and cpu_s go on after a resume.
    """

    def __init__(self, folder: str | Path, dist: Dist, tensorboard: bool = True,
                 resume_step: int | None = None):
        self.is_main, self.file, self.board = dist.is_main, None, None
        if not self.is_main:
            return
        path = Path(folder) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        last = cut_jsonl(path, math.inf if resume_step is None else resume_step) or {"time_s": 0, "cpu_s": 0}
        self.wall_zero = time.perf_counter() - last["time_s"]
        self.cpu_zero = time.process_time() - last["cpu_s"]
        self.file = path.open("a")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

            purge_step = None if resume_step is None else resume_step + 1
            self.board = SummaryWriter(str(path.parent / "tensorboard"), purge_step=purge_step)

    def step(self, name: str, step: int, values: dict, show: Iterable[str] | None = None) -> None:
        """Records one step's values (numbers, tensors, strings, lists). `show` names those for the console
        (None: all). NaN and inf are written as null, with a warning: JSON has neither."""
        if not self.is_main:
            return
        time_s, cpu_s = time.perf_counter() - self.wall_zero, time.process_time() - self.cpu_zero
        record = {"schema": SCHEMA, "name": name, "step": step,
                  "time_s": round(time_s, 3), "cpu_s": round(cpu_s, 3)}
        assert not record.keys() & values.keys(), f"values may not be called {record.keys() & values.keys()}"
        clean = {}
        for key, value in values.items():
            lost = []  # takes each NaN and inf; append returns None, which is the null we want in their place
            text = json.dumps(value, default=lambda array: array.tolist())
            clean[key] = json.loads(text, parse_constant=lost.append)
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
        """Flushes and closes the files."""
        if self.file:
            self.file.close()
        if self.board:
            self.board.close()


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary_table(rows: list[dict]) -> str:
    """A plain-text table, one line a dict; numbers to the right, floats to 4 digits."""
    columns = []
    for name in dict.fromkeys(key for row in rows for key in row):
        cells = [name, *(_short(row.get(name, "")) for row in rows)]
        width = max(map(len, cells))
        cells.insert(1, "-" * width)
        numbers = all(isinstance(row.get(name, 0), (int, float)) for row in rows)
        columns.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns))


class Timer:
    """Seconds by phase: `with timer("rollout"): ...`, then `timer.take()` once a step."""

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
        """{"rollout_s": wall seconds, "rollout_cpu_s": CPU seconds, ...} since the last take."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class _Lines(tqdm):
    """A progress bar as plain lines, for log files."""

    def display(self, msg=None, pos=None):
        if msg != "":
            print(str(self), file=self.fp, flush=True)


def progress(iterable_or_total: Iterable | int, label: str) -> tqdm:
    """A progress bar on rank 0, over an iterable or by hand: `with progress(n, label) as bar: bar.update(1)`.

    Where stderr is no terminal, or in CI, it is a plain line every PROGRESS_EVERY_S seconds.
    """
    source = {"total" if isinstance(iterable_or_total, int) else "iterable": iterable_or_total}
    source |= {"desc": label, "leave": False, "disable": not _is_main()}
    if sys.stderr.isatty() and not os.environ.get("CI"):
        return tqdm(**source, dynamic_ncols=True)
    # miniters=1: the clock is looked at on every update, else tqdm guesses from early speed and may be silent
    return _Lines(**source, mininterval=PROGRESS_EVERY_S, maxinterval=PROGRESS_EVERY_S, miniters=1,
                  delay=PROGRESS_EVERY_S,
                  bar_format="{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left")


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


# ---- checkpoints ---------------------------------------------------------------------------------

def save_checkpoint(folder: str | Path, name: str, writer: Callable[[Path], None], meta: dict,
                    dist: Dist) -> Path:
    """Writes the checkpoint folder/name; a kill at any point leaves one whole checkpoint, the old or the new.

    Every rank runs writer(path) on the same empty folder; rank 0 adds meta.json last and renames.
    Raises ValueError if folder/name exists and is no checkpoint.
    """
    whole, new, old = _places(folder, name)
    if dist.is_main:
        _put_right(folder, name)
        new.mkdir(parents=True)
    dist.barrier()
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
        if old.exists():
            shutil.rmtree(old)
    dist.barrier()
    return whole


def latest_checkpoint(folder: str | Path, name: str, dist: Dist) -> Path | None:
    """The whole checkpoint folder/name, or None; first puts right what a kill during a save left behind.

    For the run that writes the folder, on every rank. Who only reads opens folder/name itself.
    """
    whole, _, _ = _places(folder, name)
    if dist.is_main:
        _put_right(folder, name)
    dist.barrier()
    return whole if whole.exists() else None


def load_meta(checkpoint: str | Path) -> dict:
    """meta.json of a checkpoint folder. Raises ValueError if there is none."""
    path = Path(checkpoint) / "meta.json"
    if not path.exists():
        raise ValueError(f"found no {path}; expected a checkpoint folder that a training script wrote")
    return read_json(path)


def check_meta(meta: dict, expected: dict, where: str | Path,
               advice: str = "use --fresh to start over or --out another folder") -> None:
    """Raises ValueError naming every key of `expected` that `meta` lacks or has otherwise."""
    expected = json.loads(json.dumps(expected))  # a tuple is a list once it has been in a file
    found = {key: json.dumps(meta[key]) if key in meta else "nothing" for key in expected}
    wrong = [f"{key}: found {found[key]}, expected {json.dumps(value)}"
             for key, value in expected.items() if key not in meta or meta[key] != value]
    if wrong:
        raise ValueError(f"{where} does not fit this run: {'; '.join(wrong)}; {advice}")


def _places(folder: str | Path, name: str) -> tuple[Path, Path, Path]:
    folder = Path(folder)
    return folder / name, folder / f".{name}.new", folder / f".{name}.old"


def _put_right(folder: str | Path, name: str) -> None:
    """Gives the newest whole checkpoint its name, then clears what is left of an unfinished save."""
    whole, new, old = _places(folder, name)
    if whole.exists() and not (whole / "meta.json").exists():
        raise ValueError(f"found {whole} without meta.json; expected a checkpoint or nothing there: "
                         "use --out another folder")
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


# ---- Ctrl-C --------------------------------------------------------------------------------------

class Stop:
    """What `graceful` yields: the first SIGINT or SIGTERM sets `requested`."""

    def __init__(self):
        self.requested = False

    def agreed(self, dist: Dist) -> bool:
        """True on every rank once any rank was asked to stop. Every rank calls this at the same point."""
        self.requested = dist.all_reduce_sum(float(self.requested)) > 0
        return self.requested


@contextlib.contextmanager
def graceful(log: Log) -> Iterator[Stop]:
    """The first SIGINT or SIGTERM sets `stop.requested`, a second SIGINT raises KeyboardInterrupt at once.

    Main thread only. Under torchrun the workers have 30 s to the end of their step (--shutdown-timeout).
    """
    stop = Stop()

    def handle(signum, frame):
        if stop.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if log.is_main and not stop.requested:
            # not print(), which a handler may not enter twice
            os.write(2, b"\nstopping after this step; run the same command to continue\n")
        stop.requested = True

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# ---- flags and presets ---------------------------------------------------------------------------

def parse(args_class: type, argv: list[str] | None = None):
    """An `args_class` (a dataclass, one field a flag, its `# comment` the help): defaults < preset < flags.

    The preset is --config FILE. Without it, a from-scratch model takes configs/tiny/ENV.json or default.json.
    The field `config` gets the preset's path. Refused values end the program with exit code 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    module, is_main = sys.modules[args_class.__module__], _is_main()
    script = Path(getattr(module, "__file__", "") or "").stem
    try:
        # tyro's own console_outputs=False still prints bad values
        with contextlib.nullcontext() if is_main else contextlib.redirect_stderr(io.StringIO()):
            chosen, argv = _pick(argv, config="")
            path = chosen.config or _tiny_preset(args_class, argv)
            values = _read_preset(path, script, args_class) if path else {}
            if "config" in args_class.__dataclass_fields__:
                values["config"] = path
            args = tyro.cli(args_class, args=argv, default=args_class(**values), console_outputs=is_main,
                            description=(module.__doc__ or "").split("\n")[0])
    except ValueError as error:  # a preset, or a check in the class's __post_init__
        if is_main:
            print(f"{script}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if path and not chosen.config and is_main:
        print(f"preset {Path(path).relative_to(ROOT)}", flush=True)
    return args


def _pick(argv: list[str], **defaults: str):
    """(these flags alone, the rest of the command line)."""
    flags = dataclasses.make_dataclass("Flags", [(name, str, default) for name, default in defaults.items()])
    return tyro.cli(flags, args=argv, return_unknown_args=True, add_help=False)


def _tiny_preset(args_class: type, argv: list[str]) -> str:
    """The preset of a from-scratch model, by --env; "" with any other --model."""
    flags, _ = _pick(argv, env=getattr(args_class, "env", ""), model=getattr(args_class, "model", ""))
    if flags.model != "tiny" and not flags.model.startswith("scratch"):
        return ""
    folder = ROOT / "configs" / "tiny"
    own = folder / f"{flags.env}.json"
    return str(own if flags.env.isidentifier() and own.is_file() else folder / "default.json")


def _read_preset(path: str, script: str, args_class: type) -> dict:
    """A preset's values for this script: "flag" is for every script that has it, "script.flag" for one only.
    Raises ValueError naming file and key for a key that no script knows and for a value of the wrong type."""
    if not Path(path).is_file():
        raise ValueError(f"--config: found no file {path}; expected JSON of flags and values, as in configs/")
    preset, types = read_json(path), typing.get_type_hints(args_class)
    if type(preset) is not dict:
        raise ValueError(f"{path}: found a JSON {type(preset).__name__}; expected one object")
    flags = _flags_of_scripts() | {script: set(types) - {"config"}}
    general, own = {}, {}
    for key, value in preset.items():
        owner, _, name = key.replace("-", "_").rpartition(".")
        known = flags.get(owner, set()) if owner else set().union(*flags.values())
        if name not in known:
            if not known:
                raise ValueError(f"{path}: {key!r}: no script {owner}.py, only {', '.join(sorted(flags))}")
            nearest, = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            raise ValueError(f"{path}: {key!r} is no flag of {owner or 'any script'}; nearest: {nearest!r}")
        if owner in ("", script) and name in types:
            try:
                (own if owner else general)[name] = msgspec.convert(value, types[name])
            except msgspec.ValidationError as error:
                raise ValueError(f"{path}: {key!r} is {json.dumps(value)}: {error}") from None
    try:
        args_class(**general | own)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return general | own


def _flags_of_scripts() -> dict[str, set[str]]:
    """The flags of every script at the project's root, read from its `class Args` without importing it."""
    return {path.stem: {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)} - {"config"}
            for path in ROOT.glob("*.py") for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef) and node.name == "Args"}


def main(script: Callable[[], None]) -> None:
    """Runs a script's main. What it refuses (a ValueError) ends it with one line and exit code 1."""
    try:
        script()
    except ValueError as error:
        if os.environ.get("DREAMGYM_DEBUG"):
            raise
        print(f"{Path(sys.argv[0]).name}: {error} (DREAMGYM_DEBUG=1 shows where)", file=sys.stderr)
        raise SystemExit(1) from None
