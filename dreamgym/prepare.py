"""What must exist before RL: data and an experience model, which the other scripts make, and enough memory.

    data, expmodel = prepare(args, out, dist)
    log = start_log(out, resume, dist)

Scripts meet through files only. A folder that fits its flags is kept by the script that made it.
`args` are the flags of train_policy.py.
"""
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from dreamgym import checkpoint, run, tiny
from dreamgym.episode import Task, read_tasks
from dreamgym.flags import ROOT, is_main
from dreamgym.memory import budget, check_memory, measure
from dreamgym.model import base_of
from dreamgym.offline import SPLITS
from dreamgym.served_model import reach_server
from dreamgym.teacher import is_url


def check_model(args) -> None:
    """Refuses flags of a model that contradict each other. Raises ValueError."""
    if args.quantize != "none" and not args.lora_rank:
        raise ValueError(f"--quantize {args.quantize}: 4-bit weights cannot be trained themselves; expected "
                         "--lora-rank, too")
    if tiny.is_scratch(args.model):
        tiny.size_of(args.model)
        if args.lora_rank:
            raise ValueError(f"--lora-rank {args.lora_rank}: a from-scratch model is trained in full")
    if args.lora_rank and args.lr == type(args).lr and is_main():
        print(f"note: --lr {args.lr:g} is for full training; with --lora-rank, ten times as much is usual")


def prepare(args, out: Path, dist) -> tuple[Path, Path | None]:
    """Runs collect.py and train_expmodel.py where their folders are missing or unfinished. Returns the
    folders of the data and of the experience model (None: it is untrained, at a server). Raises ValueError
    where a folder holds no model, the server does not answer, there are too few tasks, or a language model
    made the data of another log."""
    for flag, folder in (("expmodel", args.expmodel), ("imitation", args.imitation)):
        if folder and not is_url(folder) and not Path(folder, "model").is_dir():
            raise ValueError(f"--{flag} {folder}: found no folder model/ in it; expected what an earlier run "
                             f"left in its {flag}/")
    is_file = args.data.endswith(".jsonl") or Path(args.data).is_file()
    data = out / "data" if is_file or not args.data else Path(args.data)
    expmodel = Path(args.expmodel or out / "expmodel")
    if is_url(args.expmodel):
        reach_server(args)                       # before anything that takes time
        expmodel = Path(args.expmodel_folder) if args.expmodel_folder else None
    check_fit(args, expmodel, dist)
    common = ["--env", args.env, "--seed", args.seed, *(["--config", args.config] if args.config else []),
              *(["--fresh"] if args.fresh else [])]
    if is_file or not args.data:
        log = args.data                          # "" for none
        if dist.is_main and not uses_paid_data(data, log):
            launch("collect.py", [*common, "--out", data, *(["--import-file", log] if log else [])])
        dist.barrier()
    needed = args.tasks * (args.rollouts if args.algo == "ppo" else 1)
    found = len(read_tasks(data / "tasks_train.jsonl")[:args.train_tasks or None])
    if args.algo != "imitation" and found < needed:
        flags = "lower --tasks" + " or --rollouts" * (args.algo == "ppo")
        raise ValueError(f"{data}: found {found} training tasks; an iteration plays {needed} different ones: "
                         + flags + ", or raise --train-tasks" * bool(args.train_tasks))
    if not args.expmodel:
        own = ["--model", args.model, "--quantize", args.quantize, "--lora-rank", args.lora_rank,
               "--dtype", args.dtype, "--slots", args.slots, "--micro-batch-tok", args.micro_batch_tok,
               *(["--gradient-checkpointing"] if args.gradient_checkpointing else []),
               "--no-report-variants", "--threads", args.threads]
        launch("train_expmodel.py", [*common, "--data", data, "--out", expmodel, *own], dist)
        dist.barrier()
    return data, expmodel


def uses_paid_data(data: Path, log: str) -> bool:
    """Whether a language model made the data of a whole folder: it played or explained, which costs as much
    again. They are used as they are, also with --fresh. Raises ValueError where they are not of the recorded
    episodes in the file `log`."""
    settings = run.load_meta(data)["settings"] if (data / "meta.json").exists() else {}
    if not (settings.get("player") or settings.get("teacher")):
        return False
    if log and settings.get("import_file_fingerprint") != run.file_fingerprint(log):
        raise ValueError(f"--data {log}: {data} holds data that a language model made of other episodes; "
                         "expected another --out")
    print(f"{data}: a language model made these data, kept with their own settings (collect.py --fresh "
          "collects again)")
    return True


def launch(script: str, flags: list, dist=None) -> None:
    """Another script in its own process; its failure or Ctrl-C ends this one too. It does not outlive this
    one (on Linux): two scripts would write one folder. With `dist` every rank calls it, and the children are
    ranks like their parents."""
    environment = {k: v for k, v in os.environ.items() if dist or k not in ("RANK", "WORLD_SIZE")}
    if dist and dist.world_size > 1:
        with socket.create_server(("", 0)) as server:      # a port of rank 0's machine that is free now
            port = dist.broadcast(server.getsockname()[1])
        environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    command = [sys.executable, str(ROOT / script), *map(str, flags)]
    child = subprocess.Popen(command, env=environment, preexec_fn=run.die_with_parent,
                             start_new_session=True)      # else a terminal's Ctrl-C would reach it twice
    before = {s: signal.signal(s, lambda number, _: child.send_signal(number))
              for s in (signal.SIGINT, signal.SIGTERM)}
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def check_fit(args, expmodel: Path | None, dist) -> None:
    """The budget of a language model, before anything is made. An experience model that is yet to be trained
    counts as another --model."""
    if tiny.is_scratch(args.model):
        return
    size, dream = measure(args.model), None
    if not is_url(args.expmodel):
        dream, folder = (size, args.policy_context, args.quantize, bool(args.lora_rank)), expmodel / "model"
        if (folder / "experience.json").is_file():
            base, rank = base_of(str(folder))
            context = run.read_json(folder / "experience.json")["settings"]["context"]
            quantize = run.load_meta(folder)["settings"]["quantize"]
            shares_base = (bool(args.lora_rank and rank) and base == base_of(args.model)[0]
                           and quantize == args.quantize)
            dream = measure(str(folder)), context, quantize, shares_base
    episodes = max(args.tasks * args.rollouts, args.eval_tasks, args.test_tasks)
    check_memory(budget(args, size, args.policy_context, dist.world_size, dist.device.type, dream,
                        -(-episodes // dist.world_size)), dist)


def read_splits(args, data: Path) -> dict[str, list[Task]]:
    """As many tasks as flags say, the same ones in every run; by default all training tasks."""
    splits = {name: read_tasks(data / f"tasks_{name}.jsonl") for name in SPLITS}
    for name, count in (("train", args.train_tasks), ("valid", args.eval_tasks), ("test", args.test_tasks)):
        if count:
            splits[name] = run.sample(splits[name], count, 0, name)
    return splits


def start_log(out: Path, resume: Path | None, dist) -> run.Log:
    """The log at the step of `resume`; what was written after it, without `resume` by any earlier run, is
    dropped."""
    if not resume:
        checkpoint.remove(out, "policy", dist)
    saved = run.read_json(resume / "run.json") if resume else {"evaluations": []}
    step = saved["step"] if saved["evaluations"] else -1        # -1: not even evaluated, all is made again
    log = run.Log(out, dist, step)
    if dist.is_main:
        run.cut_jsonl(out / "episodes.jsonl", step - 1, "iteration")
        run.cut_jsonl(out / "evaluations.jsonl", step, "iteration")
        (out / "result.json").unlink(missing_ok=True)    # it says that the run is finished
    return log
