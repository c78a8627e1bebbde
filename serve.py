"""The dream, or a real environment, as an OpenEnv server: other trainers train in it.

    python serve.py --expmodel out/webshop/expmodel          # the dream
    python serve.py --env webshop --split test               # the real shop
    DREAMGYM_TOKEN=... python serve.py --expmodel out/webshop/expmodel --host 0.0.0.0

A client connects to ws://HOST:PORT/ws, best through OpenEnv's own (docs/scaling.md).
"""
import contextlib
import ipaddress
import os
from dataclasses import dataclass, field
from typing import Literal

from dreamgym import run
from dreamgym.envs.base import Environment, env_of_data, out_folder
from dreamgym.flags import Count, Positive
from dreamgym.offline import tasks_with_start
from dreamgym.served_model import check_server, open_experience_model, trained_folder


@dataclass
class Args:
    expmodel: str = ""                 # serve the dream of this experience model: its folder, or a URL
    expmodel_name: str = ""            # the model's name at that URL, an OpenAI-compatible server
    expmodel_folder: str = ""          # the folder it was exported from ("": untrained, with --env)
    expmodel_key_env: str = "OPENAI_API_KEY"   # environment variable that holds the server's key
    env: str = ""                      # serve this real environment (with --expmodel: instead of its own)
    split: Literal["train", "valid", "test"] = "train"     # whose tasks
    env_options: list[str] = field(default_factory=list)   # name=value (with --expmodel: instead of its own)
    data_dir: str = ""                 # official data (with --expmodel: instead of its own)
    env_seed: int = 7                  # of a generated environment (an experience model has its own)
    host: str = "127.0.0.1"            # address; any but loopback needs a token in DREAMGYM_TOKEN
    port: int = 8000                   # 0: any that is free
    max_sessions: Count = 64           # clients at once, and rows of a batch
    max_action_chars: Count = 20_000   # characters of an action, or of the answer that holds it
    idle_s: Positive = 1800            # seconds after which a silent client loses its session
    seed: int = 0                      # draws tasks where a client gives no seed
    threads: Count = 1                 # torch threads

    def __post_init__(self):
        if self.port not in range(65536):
            raise ValueError(f"--port {self.port}: expected 0 to 65535")
        check_server(self)


def make_environment(args: Args) -> Environment:
    name = args.env
    settings = {"data_dir": "", "env_seed": args.env_seed, "env_options": [], "import_file": ""}
    if folder := trained_folder(args):
        meta = run.load_meta(folder / "model")
        name, settings = args.env or meta["settings"]["env"], meta["data"]
    if not name:
        raise ValueError("found neither --expmodel nor --env; expected --expmodel FOLDER or --env NAME")
    changed = {flag: getattr(args, flag) for flag in ("data_dir", "env_options") if getattr(args, flag)}
    env = env_of_data(name, settings | changed, workers=run.spare_cores(run.Dist()))
    if not args.expmodel and not env.is_real:
        raise ValueError(f"--env {name} is no world to play in; expected --expmodel, too")
    return env


def read_token(host: str) -> str:
    """DREAMGYM_TOKEN. Raises ValueError where there is none and others than this machine could connect."""
    token = os.environ.get("DREAMGYM_TOKEN", "")
    with contextlib.suppress(ValueError):                    # a host's name
        host = "localhost" if ipaddress.ip_address(host).is_loopback else host
    if host != "localhost" and not token:
        raise ValueError(f"--host {host}: other machines could connect; expected a token in DREAMGYM_TOKEN")
    return token


def main() -> None:
    args = run.parse(Args)
    try:
        import uvicorn
        from dreamgym import serving
    except ImportError as error:
        raise ValueError(f"{error}: pip install -r requirements-serve.txt") from None
    token, dist = read_token(args.host), run.one_process(args.seed, args.threads)
    with contextlib.closing(make_environment(args)) as env:
        tasks, world, sessions = tasks_with_start(env, args.split), env, min(args.max_sessions, env.slots)
        if args.expmodel:
            sessions = args.max_sessions
            offline = out_folder(args.env) / "data/train.jsonl"      # what an untrained model retrieves from
            world = open_experience_model(args, trained_folder(args), env, offline, dist.device,
                                          slots=sessions, seed=args.seed)
        service = serving.Service(world, env, tasks, args.split, args.max_action_chars, args.seed)
        app = serving.make_app(service, sessions, args.idle_s, token)
        kind = f"the dream of {args.expmodel}" if args.expmodel else f"{env.name} ({env.label or 'real'})"
        print(f"{kind}: {len(tasks)} {args.split} tasks, {sessions} sessions at most, "
              f"http://{args.host}:{args.port}; Ctrl-C ends", flush=True)
        longest = max(args.max_action_chars, serving.MAX_STATE_CHARS)     # JSON may take 12 bytes a character
        uvicorn.run(app, host=args.host, port=args.port, access_log=False, ws_max_size=12 * longest + 4096,
                    timeout_graceful_shutdown=5)
        service.batcher.close()


if __name__ == "__main__":
    run.main(main)
