"""Flags and presets: `args = run.parse(Args)` and `run.main(main)` of every script."""
import argparse
import ast
import contextlib
import difflib
import io
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

ROOT = Path(__file__).resolve().parents[1]   # the scripts and configs/ are here
Count = Annotated[int, msgspec.Meta(ge=1)]   # types of flags; `parse` refuses what is out of range
Natural = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
BelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


def is_main() -> bool:
    """True in the one process that talks to the console, before ranks are joined, too."""
    return os.environ.get("RANK", "0") == "0"


def parse(args_class: type, argv: list[str] | None = None):
    """An `args_class` (a dataclass, one field a flag, its `# comment` the help): defaults < preset < flags.
    Refused values: exit code 2."""
    module = sys.modules[args_class.__module__]
    script = Path(module.__file__).stem
    silent = None if is_main() else io.StringIO()       # else each rank says the same
    with contextlib.redirect_stdout(silent or sys.stdout), contextlib.redirect_stderr(silent or sys.stderr):
        try:
            path = _find_preset(args_class, argv)
            default = read_preset(path, script, args_class) if path else args_class()
            args = tyro.cli(args_class, args=argv, default=default,
                            description=module.__doc__.split("\n")[0])
            _check_ranges(args)
            return args
        except ValueError as error:      # a preset, or a check in the class's __post_init__
            print(f"{script}: {error}", file=sys.stderr)
            raise SystemExit(2) from None


def _check_ranges(args) -> None:
    try:
        msgspec.convert(asdict(args), type(args))
    except msgspec.ValidationError as error:     # such as "Expected `int` >= 1 - at `$.tasks`"
        name = re.search(r"\$\.(\w+)", str(error))[1]
        raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: "
                         f"{str(error).split(' - at ')[0].lower()}") from None


def _find_preset(args_class: type, argv: list[str] | None) -> str:
    """--config FILE. By default a from-scratch model takes configs/tiny/ENV.json, or default.json."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config", "env", "model"):
        flags.add_argument(f"--{name}", default=getattr(args_class, name, ""))
    given, _ = flags.parse_known_args(argv)
    if given.config or not given.model.startswith("scratch:"):
        return given.config
    own = ROOT / "configs/tiny" / f"{Path(given.env).name}.json"
    path = own if own.is_file() else own.parent / "default.json"
    print(f"preset {path.relative_to(ROOT)}", flush=True)
    return str(path)


def read_preset(path: str, script: str, args_class: type):
    """An `args_class` with a preset's values: "flag" is for every script that has it, "script.flag" for one.
    Refuses a flag of no script, and a value of the wrong type."""
    flags = [(file.stem, line.target.id) for file in ROOT.glob("*.py")   # of each `class Args`, not imported
             for part in ast.parse(file.read_text(encoding="utf-8")).body
             if getattr(part, "name", "") == "Args"
             for line in part.body if isinstance(line, ast.AnnAssign) and line.target.id != "config"]
    known = sorted({name for owner, flag in flags for name in (flag, f"{owner}.{flag}")})
    try:
        preset = msgspec.json.decode(Path(path).read_bytes(), type=dict)
        preset = {key.replace("-", "_"): value for key, value in preset.items()}
        for key in preset.keys() - set(known):
            nearest, = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ValueError(f"{key!r} is no flag of any script; nearest: {nearest!r}")
        own = {key.removeprefix(f"{script}."): value for key, value in preset.items()
               if key.startswith(f"{script}.")}
        return msgspec.convert(preset | own | {"config": path}, args_class)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise ValueError(f"--config {path}: {error}") from None


def main(script: Callable[[], None]) -> None:
    """Runs a script's main. A ValueError or an OSError ends it with one line and exit code 1, Ctrl-C with one
    line and 130."""
    try:
        script()
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError) as error:
        if os.environ.get("DREAMGYM_DEBUG"):
            raise
        text = "; ".join([str(error), *getattr(error, "__notes__", [])])
        print(f"{Path(sys.argv[0]).name}: {text} (DREAMGYM_DEBUG=1 shows where)", file=sys.stderr)
        raise SystemExit(1) from None
