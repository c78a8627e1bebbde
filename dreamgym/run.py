"""What every script shares: ranks, seeds, files, metrics, progress, Ctrl-C (flags: flags.py).

    args = run.parse(Args)                             # defaults < preset of configs/ < command line
    dist = run.init_dist(args.seed)                    # one process, or the ranks that torchrun started
    log = run.Log(out, dist, step)                     # metrics.jsonl, TensorBoard, console
    with run.graceful(log) as stop: ...                # first Ctrl-C: stop.agreed(dist) at the end of a step
"""
import contextlib
import ctypes
import dataclasses
import datetime
import hashlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from dreamgym.flags import ROOT, is_main, main, parse  # noqa: F401  (scripts say run.parse, run.main)

SCHEMA = 1                                   # of metrics.jsonl and of checkpoints
PROGRESS_EVERY_S = 15.0                      # between the lines of a progress bar that goes into a file
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1                         # of prctl


# ---- ranks and seeds ----

@dataclasses.dataclass(frozen=True)
class Dist:
    """This process among its peers. Plain values only; tensors of a model go through FSDP2."""
    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, items: list) -> list:
        """The ranks' lists joined in rank order, on every rank."""
        lists = [items] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(lists, items)
        return [item for part in lists for item in part]

    def all_reduce_sum(self, values: float | list[float]) -> float | list[float]:
        """Sum over ranks, in float64; of a list entry by entry."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def broadcast(self, value):
        """Rank 0's value, on every rank."""
        return self.gather([value])[0]

    def share(self, total: int) -> int:
        """This rank's part of `total`: the parts add up, and rank 0 has one as long as anything is left."""
        return (total + self.world_size - 1 - self.rank) // self.world_size

    def barrier(self) -> None:
        self.gather([])

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def init_dist(seed: int, threads: int = 1) -> Dist:
    """Sets threads and global seeds (equal on all ranks, so that weights made from scratch agree), and joins
    the ranks that torchrun started, if it did."""
    torch.set_num_threads(min(threads, os.cpu_count() or 1))
    if LIBC:      # keep freed memory: giving it back and taking it again is page faults, 8 % of a CPU's step
        LIBC.mallopt(-3, 2**25), LIBC.mallopt(-1, 2**30)     # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    random.seed(derive_seed(seed, "python"))
    torch.manual_seed(derive_seed(seed, "torch"))
    torch.set_float32_matmul_precision("high")   # TF32 on a GPU; changes nothing on a CPU
    cuda, local_rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if "RANK" not in os.environ:
        return Dist(device=device)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) == world_size:   # all ranks on this machine
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(f"rank {rank}: found {torch.cuda.device_count()} GPUs on this machine; expected "
                             "one a rank. Start fewer ranks, or hide the GPUs: CUDA_VISIBLE_DEVICES=''")
        torch.cuda.set_device(local_rank)
    # hours: the other ranks wait while rank 0 makes what is missing (data, experience model)
    torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(hours=24))
    return Dist(rank, world_size, device)


def one_process(seed: int, threads: int = 1) -> Dist:
    """`init_dist` for a script that does not share its work. Raises ValueError under torchrun."""
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(f"found {ranks} ranks: start this script without torchrun")
    return init_dist(seed, threads)


def check_ranks(args, folder: str | Path, dist: Dist) -> None:
    """Raises ValueError, on every rank, where one was started with other flags than rank 0, or does not see
    what rank 0 has written into `folder`."""
    if dist.world_size == 1:
        return
    flags = dist.broadcast(vars(args))
    if other := dist.gather([f"rank {dist.rank} has {name} {value!r}, rank 0 {flags.get(name)!r}"
                             for name, value in vars(args).items() if value != flags.get(name)]):
        raise ValueError(f"{'; '.join(other)}: start all machines with the same command")
    path = Path(folder) / f".seen-{dist.broadcast(os.urandom(8).hex())}"     # a new name: no cache knows it
    if dist.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    dist.barrier()
    blind = {host for host, sees in dist.gather([(socket.gethostname(), path.exists())]) if not sees}
    if dist.is_main:
        path.unlink()
    if blind:
        raise ValueError(f"--out {folder}: rank 0 wrote there, and {', '.join(sorted(blind))} does not see "
                         "it; expected a folder that all machines share, by the same path")


def die_with_parent() -> None:
    """In a child process: it is killed when its parent ends in whatever way. Does nothing but on Linux."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def spare_cores(dist: Dist) -> int:
    """Processes a rank may start for its environments: half of its share of the cores, 1 to 8."""
    here = min(dist.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", dist.world_size)))
    return min(8, max(1, (os.cpu_count() or 1) // (2 * here)))


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream with this name; the same on every machine."""
    text = json.dumps([int(seed), *names], default=int)  # keeps ("ab", "c") and ("a", "bc"), 1 and "1" apart
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def rng(seed: int, *names: str | int) -> np.random.Generator:
    """A generator by name and step, e.g. `rng(seed, "pick", step)`: a resume replays no earlier draws."""
    return np.random.default_rng(derive_seed(seed, *names))


def sample(items: Sequence, count: int | None, seed: int, *names: str | int) -> list:
    """`count` of the items (None: all) in random order."""
    return [items[i] for i in rng(seed, *names).permutation(len(items))[:count]]


# ---- files ----

def read_json(path: str | Path):
    """The value in a JSON file. Raises ValueError naming the file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"found no {path}; expected a folder that a script of ours has finished") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def write_json(path: str | Path, obj) -> None:
    """Replaces the file at once: it holds the old text or the new, never half. Refuses NaN."""
    _replace(Path(path), [json.dumps(obj, indent=1, allow_nan=False) + "\n"])


def write_jsonl(path: str | Path, records: Iterable[dict], append: bool) -> None:
    """One JSON object a line. append=False replaces the file at once."""
    lines = (json.dumps(record, allow_nan=False) + "\n" for record in records)
    if not append:
        return _replace(Path(path), lines)
    with open(path, "a") as file:
        file.writelines(lines)


def cut_jsonl(path: Path, last: float = math.inf, key: str = "step") -> dict | None:
    """Cuts the file before half a line that a kill left, or where the records begin whose `key` is above
    `last`: a resumed run makes them again. Returns the last record kept."""
    end, kept = 0, None
    if path.exists():
        with path.open("r+b") as file:           # line by line: episodes of a long run are gigabytes
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                except ValueError:
                    raise ValueError(f"{path}:{number}: not JSON") from None
                if record.get(key, -math.inf) > last:
                    break
                end, kept = end + len(line), record
            file.truncate(end)
    return kept


def _replace(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_meta(folder: str | Path) -> dict:
    return read_json(Path(folder) / "meta.json")


ADVICE = "use --fresh to start over or --out another folder"


def check_meta(meta: dict, expected: dict, where: str | Path, advice: str = ADVICE) -> None:
    """Raises ValueError naming every key of `expected` that `meta` lacks or has otherwise."""
    expected = json.loads(json.dumps(expected))  # a tuple is a list once it has been in a file
    wrong = [f"{key}: found {json.dumps(meta[key]) if key in meta else 'nothing'}, "
             f"expected {json.dumps(value)}"
             for key, value in expected.items() if key not in meta or meta[key] != value]
    if wrong:
        raise ValueError(f"{where} does not fit this run: {'; '.join(wrong)}; {advice}")


def commit() -> str:
    """The last commit of scripts, package or presets, "-dirty" where they were changed since; "" without
    git."""
    git = lambda *command: subprocess.run(["git", *command, "--", ":(glob)*.py", "dreamgym", "configs"],
                                          cwd=ROOT, text=True, capture_output=True).stdout.strip()
    try:
        return git("log", "-1", "--format=%h") + "-dirty" * bool(git("status", "--porcelain", "-uno"))
    except OSError:
        return ""


def file_fingerprint(path: Path | str) -> str:
    """Of a text's content."""
    return fingerprint(Path(path).read_text(errors="replace"))


def fingerprint(obj) -> str:
    """16 hex digits, equal for equal JSON-able settings, whatever their key order."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- log ----

class Log:
    """metrics.jsonl (the truth), TensorBoard (its mirror) and one console line a step; only on rank 0. Lines
    with step > resume_step (-1: all) are dropped. time_s and cpu_s go on."""

    def __init__(self, folder: Path, dist: Dist, resume_step: int):
        self.is_main = dist.is_main
        if not self.is_main:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        last = cut_jsonl(path, resume_step) or {"time_s": 0, "cpu_s": 0}
        self.wall_zero = time.perf_counter() - last["time_s"]
        self.cpu_zero = time.process_time() - last["cpu_s"]
        self.file = path.open("a")
        self.board = SummaryWriter(f"{folder}/tensorboard", purge_step=resume_step + 1)

    def step(self, name: str, step: int, values: dict, show: Iterable[str] = ()) -> None:
        """Records one step's values; `show` names those for the console. NaN and inf become null."""
        if not self.is_main:
            return
        time_s, cpu_s = time.perf_counter() - self.wall_zero, time.process_time() - self.cpu_zero
        record = {"schema": SCHEMA, "name": name, "step": step,
                  "time_s": round(time_s, 3), "cpu_s": round(cpu_s, 3)}
        for key, value in values.items():
            lost = []  # takes each NaN and inf; append returns None, which is the null we want in their place
            text = json.dumps(value, default=lambda array: array.tolist())
            record[key] = json.loads(text, parse_constant=lost.append)
            if lost:
                self.say(f"warning: {name} step {step}: {key} has {', '.join(lost)}, written as null")
            if isinstance(record[key], (int, float)):
                self.board.add_scalar(f"{name}/{key}", record[key], step)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if shown := [f"{key} {_short(record[key])}" for key in show if key in record]:
            self.say("  ".join([f"{name} {step}", *shown, f"[{time_s:.0f} s]"]))

    def say(self, text: str) -> None:
        if self.is_main:
            tqdm.write(text)
            sys.stdout.flush()  # a pipe is block-buffered, and people watch it

    def close(self) -> None:
        if self.is_main:
            self.file.close()
            self.board.close()


def read_metrics(folder: Path) -> list[dict]:
    """The lines of a log."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
    """`with timer("rollout"): ...`, then `take()`: {"rollout_s": seconds, "rollout_cpu_s": ...}, and on a GPU
    "rollout_peak_gb", the most that tensors of this process held."""

    def __init__(self):
        self.found = Counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu, cuda = time.perf_counter(), time.process_time(), torch.cuda.is_initialized()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        yield
        if cuda:
            torch.cuda.synchronize()  # kernels still under way belong to this phase
            peak_gb = torch.cuda.max_memory_allocated() / 1e9
            self.found[f"{phase}_peak_gb"] = max(self.found[f"{phase}_peak_gb"], peak_gb)
        self.found[f"{phase}_s"] += time.perf_counter() - wall
        self.found[f"{phase}_cpu_s"] += time.process_time() - cpu

    def take(self) -> dict[str, float]:
        found, self.found = dict(self.found), Counter()
        return found


class _Lines(tqdm):
    def display(self, msg=None, pos=None):
        if msg != "":
            print(str(self), file=self.fp, flush=True)


def progress(total: int, label: str, done: int = 0) -> tqdm:
    """A progress bar on rank 0; where stderr is no terminal, or in CI, a line every PROGRESS_EVERY_S. `done`:
    before this process began."""
    bar = {"total": total, "desc": label, "initial": done, "leave": False, "disable": not is_main()}
    if sys.stderr.isatty() and not os.environ.get("CI"):
        return tqdm(**bar, dynamic_ncols=True)
    # miniters=1: the clock is looked at on every update, else tqdm guesses from early speed and may be silent
    return _Lines(**bar, mininterval=PROGRESS_EVERY_S, maxinterval=PROGRESS_EVERY_S, delay=PROGRESS_EVERY_S,
                  miniters=1, bar_format="{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left")


# ---- Ctrl-C ----

class Clock:
    """Says when a checkpoint is due by time."""

    def __init__(self, minutes: float):
        self.minutes = minutes
        self.restart()

    def restart(self) -> None:
        self.end_s = time.monotonic() + 60 * self.minutes

    def rang(self, dist: Dist) -> bool:
        """True on every rank once the minutes of one are over. Every rank calls this at the same point."""
        return dist.all_reduce_sum(float(time.monotonic() >= self.end_s)) > 0


class graceful:
    """The first SIGINT or SIGTERM sets `requested`, a second SIGINT raises KeyboardInterrupt. Under torchrun
    the workers have 30 s to the end of their step."""

    def __init__(self, log: Log):
        self.log, self.requested = log, False

    def agreed(self, dist: Dist) -> bool:
        """True on every rank once any rank was asked to stop. Every rank calls this at the same point."""
        self.requested = dist.all_reduce_sum(float(self.requested)) > 0
        return self.requested

    def __enter__(self):
        self.before = {number: signal.signal(number, self._handle)
                       for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.log.is_main and not self.requested:    # not print(), which a handler may not enter twice
            os.write(2, b"\nstopping after this step; run the same command to continue\n")
        self.requested = True
