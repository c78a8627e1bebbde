"""Flags: defaults < preset < command line, in two scripts of a project made here; what is refused."""
import dataclasses
import importlib.util
import json
import sys

import pytest

from dreamgym import flags, run

SCRIPT = '''"""Trains something.

More words."""
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Args:
    env: str = "webshop"   # which environment
    model: str = "scratch:8x1"    # which model
    lr: float = 0.1        # step size
    fresh: bool = False    # start over
    config: str = ""       # JSON preset of flags
    FLAGS

    def __post_init__(self):
        if self.lr < 0:
            raise ValueError(f"--lr: found {self.lr}, expected 0 or more")
'''
OWN = {"train": """layers: list[int] = field(default_factory=list)   # which layers
    kind: Literal["a", "b"] = "a"   # which kind""",
       "learn": "depth: int = 1   # how deep"}


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """A project in tmp_path, of two scripts and three presets; `parse(script, *argv)` gives flags as a dict."""
    monkeypatch.setattr(flags, "ROOT", tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "configs/tiny").mkdir(parents=True)
    (tmp_path / "helper.py").write_text("raise RuntimeError('imported')")
    for name, values in {"webshop": {"lr": 3, "train.kind": "b", "learn.lr": 4, "depth": 7},
                         "alfworld": {"lr": 5, "learn.depth": 9}, "default": {"lr": 6}}.items():
        write(tmp_path / f"configs/tiny/{name}.json", values)
    classes = {}
    for name, own in OWN.items():
        (tmp_path / f"{name}.py").write_text(SCRIPT.replace("FLAGS", own))
        spec = importlib.util.spec_from_file_location(f"fake_{name}", tmp_path / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, f"fake_{name}", module)
        spec.loader.exec_module(module)
        classes[name] = module.Args
    return lambda script, *argv: dataclasses.asdict(run.parse(classes[script], list(map(str, argv))))


def write(path, values):
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def refused(parse, capfd, *argv):
    with pytest.raises(SystemExit) as stopped:
        parse("train", *argv)
    assert stopped.value.code == 2
    return "".join(capfd.readouterr()).replace("\n", "")


def test_three_layers(parse, tmp_path, capfd):
    """A preset that overrides the command line, JSON types that leak into the settings, a lost path."""
    preset = write(tmp_path / "x.json", {"lr": 1, "fresh": True, "layers": [3, 4], "env": "alfworld",
                                         "depth": 2})
    args = parse("train", "--config", preset, "--no-fresh", "--kind", "b")
    assert args == {"env": "alfworld", "model": "scratch:8x1", "lr": 1.0, "fresh": False,
                    "config": str(preset), "layers": [3, 4], "kind": "b"}
    assert isinstance(args["lr"], float) and capfd.readouterr().out == ""
    args = parse("train", f"--config={preset}", "--layers", 5, "--env", "webshop")
    assert (args["layers"], args["env"], args["kind"]) == ([5], "webshop", "a")


@pytest.mark.parametrize("argv, name, lr", [
    ((), "webshop", 3), (("--env", "alfworld"), "alfworld", 5), (("--env=logs",), "default", 6),
    (("--env", "my/world.py"), "default", 6), (("--env", "webshop", "--lr", 8), "webshop", 8),
    (("--model", "scratch:9x9", "--env", "alfworld"), "alfworld", 5), (("--model", "Qwen/Qwen3"), "", 0.1)])
def test_a_from_scratch_model_takes_the_preset_of_its_environment(parse, tmp_path, capfd, argv, name, lr):
    """Numbers of a tiny model in a run of a real one, another environment's numbers (B1)."""
    args, path = parse("train", *argv), f"configs/tiny/{name}.json"
    assert args["lr"] == lr and args["config"] == (str(tmp_path / path) if name else "")
    assert capfd.readouterr().out == (f"preset {path}\n" if name else "")


def test_keys_for_one_script(parse, tmp_path):
    assert [parse("train")[flag] for flag in ("lr", "kind")] == [3, "b"]
    assert [parse("learn")[flag] for flag in ("lr", "depth")] == [4, 7]
    preset = write(tmp_path / "x.json", {"learn.lr": 4, "lr": 3})
    assert parse("learn", "--config", preset)["lr"] == 4


@pytest.mark.parametrize("preset, expected", [
    ({"kinds": "a"}, "'kinds' is no flag of any script; nearest: 'kind'"),
    ({"learn.layer": 1}, "'learn.layer' is no flag of any script; nearest: 'learn."),
    ({"trian.lr": 1}, "nearest: 'train.lr'"), ({"config": "y.json"}, "'config' is no flag"),
    ({"lr": "3"}, "Expected `float`, got `str` - at `$.lr`"), ({"train.layers": [1, "x"]}, "Expected `int`"),
    ({"lr": -1}, "--lr: found -1"), ([1], "Expected `object`, got `array`"), ("{lr: 1}", "JSON is malformed")])
def test_bad_presets(parse, tmp_path, capfd, preset, expected):
    text = refused(parse, capfd, "--config", write(tmp_path / "x.json", preset))
    assert expected in text and "x.json" in text


@pytest.mark.parametrize("flag, expected", [
    ("--lrr=3", "--lrr"), ("--config=no.json", "no.json"), ("--lr=-1", "--lr: found -1"), ("--config", "--config")])
def test_bad_flags(parse, capfd, monkeypatch, flag, expected):
    text = refused(parse, capfd, flag)
    assert expected in text and "Traceback" not in text
    monkeypatch.setenv("RANK", "1")
    assert refused(parse, capfd, flag) == ""


@pytest.mark.parametrize("script, flag, good, bad, expected", [
    *((script, flag, least, least - 1, f"`int` >= {least}") for script, flag, least in (
        ("collect", "transitions", 1), ("collect", "heldout", 0), ("train_expmodel", "rows", 1),
        ("train_expmodel", "k", 0), ("train_policy", "save_every", 1), ("train_policy", "iterations", 0),
        ("evaluate", "repeats", 1), ("serve", "max_sessions", 1))),
    ("train_policy", "clip_low", 0.99, 1.0, "`float` < 1"), ("evaluate", "gamma", 0.99, 1.0, "`float` < 1"),
    ("train_policy", "eval_temperature", 0.0, -1.0, "`float` >= 0"), ("train_policy", "lr", 0.1, -0.1, "`float` >= 0"),
    ("train_expmodel", "muon_lr", 0.1, "inf", "`float` <="), ("generate_tasks", "count", 1, 0, "`int` >= 1"),
    ("serve", "threads", 1, 0, "`int` >= 1")])
def test_flags_out_of_range(capfd, script, flag, good, bad, expected):
    """A run of no step, one that divides by zero after an hour, a ratio clipped at 0, which bounds nothing; and
    a refused value that is sensible."""
    name, args_class = f"--{flag.replace('_', '-')}", importlib.import_module(script).Args
    given = ["--env", "webshop"] if script == "serve" else []
    assert getattr(run.parse(args_class, [*given, name, str(good)]), flag) == good
    with pytest.raises(SystemExit) as stopped:
        run.parse(args_class, [*given, name, str(bad)])
    assert stopped.value.code == 2 and f"{name} {bad}: expected {expected}" in capfd.readouterr().err


@pytest.mark.parametrize("script, given, expected", [
    ("collect", {"teacher": "http://x/v1"}, "expected --teacher-model"), ("collect", {"player": "NAME"}, "--player: expected"),
    ("collect", {"player_share": 0.0}, "--player-share 0.0"), ("collect", {"import_format": "x"}, "expected --import-file, too"),
    ("evaluate", {"temperatures": []}, "--temperatures: expected"),
    ("evaluate", {"bound": True, "world": "dream"}, "--bound .* expected"),
    ("evaluate", {"bound": True, "play": 1}, "neither --play nor --others"),
    ("evaluate", {"judge": "http://x/v1"}, "--judge .* expected"), ("evaluate", {"html": "page"}, "--html page: expected"),
    ("serve", {"port": 70_000}, "--port 70000: expected"), ("train_policy", {"world": "real"}, "--real-transitions"),
    ("train_policy", {"rollouts": 1}, "expected 2 or more"),
    ("train_policy", {"policy_context": 100, "max_action_tok": 100}, "fewer than --policy-context 100"),
    ("train_expmodel", {"context": 500, "max_next_tok": 500}, "fewer than --context 500"),
    ("train_expmodel", {"lr_floor": 0.0, "steps": 10, "max_steps": 20}, "expected --max-steps 10"),
    ("train_policy", {"init": "model"}, "--init expmodel"), ("train_expmodel", {"lora_rank": 4}, "trained in full"),
    *((script, {"quantize": "nf4", "model": "x"}, "--lora-rank") for script in ("train_policy", "train_expmodel")),
    ("train_expmodel", {"coded_words": 0.1, "model": "x"}, "from-scratch"),
    ("train_expmodel", {"reward_share": 0.8, "counterfactual_share": 0.3}, "more than 1"),
    ("train_expmodel", {"short_first_steps": 9, "steps": 9}, "expected fewer"),
    ("train_expmodel", {"steps": 9, "max_steps": 8}, "--max-steps 8: expected at least --steps 9"),
    *((script, {"model": "scratch:63x3"}, "scratch:HIDDENxLAYERS") for script in ("train_policy", "train_expmodel"))])
def test_flags_that_contradict_each_other(script, given, expected):
    module = importlib.import_module(script)
    with pytest.raises(ValueError, match=expected):
        getattr(module, "check", bool)(module.Args(**given))


def test_help_has_one_line_per_flag(parse, capfd):
    """A flag without help, and help that shows other defaults than the preset's."""
    with pytest.raises(SystemExit) as stopped:
        parse("train", "--help")
    lines = capfd.readouterr().out.splitlines()
    assert stopped.value.code == 0 and any(line.strip() == "Trains something." for line in lines)
    for flag, words in {"--lr": "step size (default: 3.0)", "--fresh, --no-fresh": "start over",
                        "--kind": "default: b"}.items():
        assert sum(flag in line and words in line for line in lines) == 1, lines


@pytest.mark.parametrize("error, code, line", [
    (KeyboardInterrupt(), 130, "interrupted\n"),
    (OSError(28, "No space left"), 1, "No space left (DREAMGYM_DEBUG"),
    (ValueError("found 1, expected 2"), 1, "found 1, expected 2 (DREAMGYM_DEBUG=1 shows where)")])
def test_main_ends_with_one_line(error, code, line, monkeypatch, capfd):
    """A traceback for what a script refuses, and none where one is asked for."""
    def script():
        raise error
    with pytest.raises(SystemExit) as stopped:
        run.main(script)
    assert stopped.value.code == code
    said = capfd.readouterr().err
    assert line in said and len(said.splitlines()) == 1
    if code == 130:
        return
    monkeypatch.setenv("DREAMGYM_DEBUG", "1")
    with pytest.raises(type(error)):
        run.main(script)


@pytest.mark.parametrize("path", sorted(flags.ROOT.glob("configs/**/*.json")), ids=lambda path: path.stem)
def test_shipped_presets_name_flags_that_exist(path):
    flags.read_preset(str(path), "no_script", dataclasses.make_dataclass("Args", []))
