"""The scripts as a user meets them, in this process where that stops the same bug."""
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_expmodel
import train_policy
from dreamgym import imitation, prepare, run
from dreamgym.envs.base import StepResult
from dreamgym.episode import StopReason, read_episodes
from tests.conftest import EXAMPLE, ROOT, free_port, run_main


def of(script: str, **flags) -> dict:
    """Flags of one script, as a preset has them."""
    return {f"{script}.{name}": value for name, value in flags.items()}


NUMBERS = {
    "model": "scratch:32x1", "system_prompts": False, "micro_batch_tok": 4096,
    **of("collect", transitions=200, heldout=30),
    **of("train_expmodel", page_format="diff", reasoning=False, context=1024, max_next_tok=60,
         max_reward_tok=20, max_resamples=0, steps=100, max_steps=100, rows=12, lr=0.01, muon_lr=0.02,
         warmup=5, probe_rows=4),
    **of("train_policy", init="expmodel", policy_format="action", policy_context=512, max_action_tok=10,
         imitation_episodes=6, imitation_epochs=2, imitation_lr=0.003, lr=0.0003, iterations=2, tasks=2,
         rollouts=2, updates=2, eval_tasks=2, test_tasks=2, eval_every=2, save_every=1, generate_every=2,
         max_malformed=1.0)}
TUTORIAL = (ROOT / "docs" / "your-environment.md").read_text()
COMMANDS = [line.split()[1:] for block in TUTORIAL.split("```\n")[1::2] for line in block.splitlines()
            if line.startswith("python ")]


def settled(folder):
    """metrics.jsonl without what the clock says, and the peaks of a GPU."""
    return [{k: v for k, v in row.items() if not k.endswith(("_s", "_gb"))}
            for row in run.read_metrics(Path(folder))]


def records(folder, name):
    return [record for record in settled(folder) if record["name"] == name]


def plain(value):
    """A saved value, its tensors as lists, so that == compares all of it."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def assert_same_checkpoint(a, b):
    """Weights, optimizer, generators, curriculum, counters, replay buffer."""
    names = sorted(str(p.relative_to(a)) for p in a.rglob("*") if p.is_file())
    assert names == sorted(str(p.relative_to(b)) for p in b.rglob("*") if p.is_file())
    for name in names:
        if name.endswith(".pt"):
            saved = [plain(torch.load(folder / name, weights_only=True)) for folder in (a, b)]
            assert saved[0] == saved[1], name
        elif name not in ("meta.json", "tokenizer_config.json"):     # these hold paths
            assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    path = tmp_path_factory.mktemp("preset") / "p.json"
    path.write_text(json.dumps(NUMBERS | {"env": "webshop"}))
    return path


@pytest.fixture(scope="module")
def base(preset, tmp_path_factory):
    """A folder in which the tutorial's commands have run, with the preset's small numbers."""
    folder, before = tmp_path_factory.mktemp("run"), os.getcwd()
    (folder / "examples").mkdir()
    (folder / "examples" / "files.py").write_text(Path(EXAMPLE).read_text())
    os.chdir(folder)
    launch = prepare.launch
    prepare.launch = lambda script, flags, dist=None: run_main(Path(script).stem, *flags)
    try:
        for command in COMMANDS[:3]:
            run_main(Path(command[0]).stem, *command[1:], "--config", preset)
    finally:
        os.chdir(before)
        prepare.launch = launch
    return folder / "out" / "files"


@pytest.fixture
def policy(base, preset, monkeypatch):
    """train_policy.py on the tutorial's data, experience model and imitation."""
    monkeypatch.chdir(base.parents[1])
    given = ["--env", "examples/files.py", "--config", preset, "--data", base / "data", "--expmodel",
             base / "expmodel", "--imitation", base / "imitation"]
    return lambda out, *flags: run_main("train_policy", *given, "--out", out, *flags)


def test_the_tutorials_commands(base):
    """A tutorial whose commands do not run, and a preset's environment in place of the flag's."""
    assert [command[0] for command in COMMANDS[:4]] == ["collect.py", "train_expmodel.py", "train_policy.py",
                                                        "evaluate.py"]
    for name in ("policy/model.safetensors", "imitation/model/model.safetensors", "expmodel/report.json",
                 "data/train.jsonl", "metrics.jsonl", "result.json", "dream.html"):
        assert (base / name).is_file(), name
    report, result = (json.loads((base / name).read_text()) for name in ("expmodel/report.json", "result.json"))
    assert {"full", "without history", "without retrieval", "without reasoning"} <= report.keys()
    assert [row["policy"] for row in result["rows"]] == ["start (imitation)", "after RL"] and not result["note"]
    assert set(result["test"][1]["reports"]) == {"real 0", "real 0.4", "real 1"}
    assert result["settings"]["env"] == "examples/files.py" and result["settings"]["tasks"] == 2
    episodes = read_episodes(base / "episodes.jsonl")
    assert len(episodes) == 8 and {e.world for e in episodes} == {"dream"}
    rows = records(base, "rl")
    assert [r["step"] for r in rows] == [1, 2] and all(r["sampler_gap"] < 1e-2 for r in rows)


def test_the_tutorials_small_settings(base, preset, monkeypatch):
    """Data and an experience model of the reader's own settings that the main job replaces, or refuses."""
    monkeypatch.chdir(base.parents[1])
    small = [command for command in COMMANDS if "--out out/small" in " ".join(command)]
    steps = json.loads(Path(preset).read_text())["train_expmodel.steps"]
    fewer = ["--steps", steps, "--max-steps", steps, "--short-first-steps", 0]
    for command, less in zip(small, (["--transitions", 300], fewer, ["--iterations", 1]), strict=True):
        run_main(Path(command[0]).stem, *command[1:], "--config", preset, *less)
    assert (base.parent / "small/result.json").is_file()
    with pytest.raises(ValueError, match="train_policy.py --expmodel out/small/expmodel uses it as it is"):
        run_main("train_expmodel", *small[1][1:], "--config", preset, *fewer, "--lr", 0.5)


def test_logs_alone(base, preset, tmp_path, monkeypatch):
    """A run on recorded episodes that needs a world, or does not say that success is a dream's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "launch", lambda script, flags, dist=None: run_main(Path(script).stem, *flags))
    shutil.copy(base / "data/train.jsonl", tmp_path / "FILE.jsonl")
    command = next(c for c in COMMANDS if c[0] == "train_policy.py" and "logs" in c)
    run_main("train_policy", *command[1:], "--config", preset, "--iterations", 1)
    result = json.loads((tmp_path / "out/logs/result.json").read_text())
    assert "dream only" in result["note"] and set(result["test"][1]["reports"]) == {"dream 1"}


# ---- interrupted runs ----

def interrupted(monkeypatch, go, *cuts):
    """Runs `go` to its end after a cut at each (module, function, number of its call, kill or Ctrl-C)."""
    def cut(real, call, is_kill):
        calls = []

        def wrapped(*args, **kwargs):
            calls.append(1)
            if len(calls) == call:
                if is_kill:
                    raise RuntimeError("power cut")
                os.kill(os.getpid(), signal.SIGINT)
            return real(*args, **kwargs)
        return wrapped

    for module, name, call, is_kill in cuts:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, cut(getattr(module, name), call, is_kill))
            with pytest.raises(RuntimeError if is_kill else SystemExit, match="power cut" if is_kill else "130"):
                go()
    go()


RUNS = {"dream": ["--iterations", 3],
        "real": ["--algo", "ppo", "--iterations", 1, "--real-transitions", 25, "--updates", 1, "--no-drop-malformed"]}


@pytest.mark.parametrize("kind", RUNS)
def test_an_interrupted_policy_run_ends_bit_equal(kind, base, policy, monkeypatch, tmp_path, capfd):
    """A resume that loses or repeats anything; real RL after the dream that is held to the policy before the dream."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    policy(whole, *RUNS[kind])
    ctrl_c = train_policy, "iterate", 1, False
    interrupted(monkeypatch, lambda: policy(parts, *RUNS[kind]), (train_policy, "validate", 1, True), ctrl_c,
                (train_policy, "log_iteration", 1, True), *[ctrl_c] * (len(records(whole, "rl")) - 1))
    assert "run the same command" in capfd.readouterr().err
    assert_same_checkpoint(parts / "policy", whole / "policy")
    assert settled(parts) == settled(whole)
    for name in ("episodes.jsonl", "evaluations.jsonl"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    if kind == "real":
        dreamt, first, *_ = rows = records(parts, "rl")
        assert (dreamt["world"], first["world"], rows[-1]["real_transitions"]) == ("dream", "real", 25)
        assert abs(first["kl_ref"]) < 1e-6
        weights = [load_file(folder / "model.safetensors") for folder in (base / "imitation/model", whole / "dream-policy")]
        assert any(not torch.equal(weights[0][name], value) for name, value in weights[1].items())
        forms = [run.load_meta(whole / name)["policy"] for name in ("dream-policy", "policy")]
        assert forms[0] == forms[1]              # evaluate.py plays both with the prompts they were trained on


def test_an_interrupted_experience_model_ends_bit_equal(base, preset, monkeypatch, tmp_path):
    flags = ["--env", EXAMPLE, "--config", preset, "--data", tmp_path / "data", "--no-report-variants",
             "--steps", 6, "--max-steps", 8, "--rows", 4, "--save-every", 2]
    run_main("collect", "--env", EXAMPLE, "--config", preset, "--out", tmp_path / "data")
    report = json.loads((base / "expmodel/report.json").read_text())["full"]
    monkeypatch.setattr(train_expmodel, "failed_probes", lambda report: [])      # they pass at step 6
    monkeypatch.setattr(train_expmodel, "report_on", lambda *args, **changes: dict(report))
    go = lambda name: run_main("train_expmodel", *flags, "--out", tmp_path / name)
    go("whole")
    interrupted(monkeypatch, lambda: go("parts"), (train_expmodel, "train_step", 3, False),
                (train_expmodel, "train_step", 2, True), (train_expmodel, "report_on", 1, False))
    assert_same_checkpoint(tmp_path / "parts/model", tmp_path / "whole/model")


def test_interrupted_imitation_ends_bit_equal(base, preset, monkeypatch, tmp_path):
    """Imitation that begins again, or repeats or skips rows; a half imitated policy that is taken for one."""
    monkeypatch.chdir(base.parents[1])
    seen = []

    def go(name, *flags):
        if (tmp_path / name / "imitation").exists() and not seen:
            seen.append(1)
            with pytest.raises(ValueError, match="found no finished policy"):
                go("other", "--imitation", tmp_path / name / "imitation")
        run_main("train_policy", "--env", "examples/files.py", "--config", preset, "--data", base / "data",
                 "--expmodel", base / "expmodel", "--algo", "imitation", "--imitation-rows", 2, "--out",
                 tmp_path / name, *flags)

    go("whole")
    interrupted(monkeypatch, lambda: go("parts"), (imitation, "sft_step", 2, False),
                (imitation, "sft_step", 4, True))
    assert seen
    assert_same_checkpoint(tmp_path / "parts/imitation/model", tmp_path / "whole/imitation/model")


# ---- what is refused ----

def test_a_changed_setting_is_refused_by_name(policy, base, tmp_path):
    """Two settings mixed in one folder; flags that may differ are not refused."""
    with pytest.raises(ValueError,
                       match=r"does not fit this run: lr: found 0.0003, expected 0.01; use --fresh"):
        policy(base, "--lr", 0.01)
    with pytest.raises(ValueError, match=r"imitation_epochs: found 2, expected 7"):
        policy(base.parent / "other", "--imitation-epochs", 7)
    other = tmp_path / "imitation"               # a KL term to another policy from here on
    shutil.copytree(base / "imitation", other)
    meta = run.load_meta(other / "model")
    run.write_json(other / "model/meta.json", meta | {"settings": meta["settings"] | {"seed": 5}})
    with pytest.raises(ValueError, match="imitation: found .* name the --imitation that this run began with"):
        policy(base, "--imitation", other)


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_refused_command_loses_nothing(policy, base, preset, monkeypatch):
    """A finished run without its result, or its model, after a mistyped name."""
    monkeypatch.chdir(base.parents[1])
    before = files_of(base)
    (base.parent / "unfinished/model").mkdir(parents=True)
    run.write_json(base.parent / "unfinished/model/meta.json",
                   run.load_meta(base / "imitation/model") | {"finished": False})
    flags = ["--env", "examples/files.py", "--config", preset, "--fresh"]
    for command, message in (
            (lambda: policy(base, "--imitation", base / "nowhere"), "--imitation .*nowhere: found no folder model/"),
            (lambda: policy(base, "--imitation", base.parent / "unfinished"), "found no finished policy there"),
            (lambda: policy(base, "--expmodel", base / "nowhere", "--fresh"), "--expmodel .*nowhere: found no folder model/"),
            (lambda: policy(base, "--dream", "rewards=rule", "--no-enrich", "--max-generated-fraction", 0, "--fresh"),
             "has no audit that judges"),
            (lambda: run_main("train_expmodel", *flags, "--encoder", base / "nowhere"), "--encoder .*nowhere: expected words"),
            (lambda: run_main("evaluate", "--policy", base / "policy", "--others", base / "nowhere"), "--others .*no such file"),
            (lambda: run_main("evaluate", "--policy", base / "imitation"), "imitation: holds no policy; expected OUT/policy")):
        with pytest.raises(ValueError, match=message):
            command()
        assert files_of(base) == before


def test_a_run_of_malformed_dreams_stops(policy, monkeypatch, tmp_path):
    monkeypatch.setattr(train_policy.ExperienceModel, "predict",
                        lambda self, questions, dreaming: [StepResult("", stop=StopReason.MALFORMED) for _ in questions])
    with pytest.raises(ValueError, match="4 of 4 dreamt episodes broke off in malformed answers"):
        policy(tmp_path, "--max-malformed", 0.9)


# ---- two ranks ----

def test_two_nodes(base, preset, monkeypatch, tmp_path):
    """Ranks that do not find each other or wait for each other for ever, and records of one rank only."""
    flags = ["--env", "examples/files.py", "--config", preset, "--data", base / "data", "--out", tmp_path,
             "--iterations", 1, "--tasks", 3, "--real-transitions"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
               "--local-addr=127.0.0.1", f"--rdzv-endpoint=127.0.0.1:{free_port()}", ROOT / "train_policy.py", *flags, 5]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.chdir(base.parents[1])
    nodes = [subprocess.Popen(list(map(str, command)), text=True, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT) for _ in range(2)]
    for node in nodes:
        said = node.communicate(timeout=900)[0]
        assert "Traceback" not in said and node.returncode == 0, said[-3000:]
    ranks = lambda name: len(torch.load(tmp_path / name / "training.pt", weights_only=True)["ranks"])
    assert ranks("expmodel/model") == ranks("policy") == 2
    alone, shared = (load_file(folder / "expmodel/model/model.safetensors") for folder in (base, tmp_path))
    for name, weights in alone.items():        # Adam makes a step even of a gradient that is all rounding
        assert (shared[name] - weights).norm() < 0.03 * weights.norm(), name
    episodes = [e for e in read_episodes(tmp_path / "episodes.jsonl") if e.world == "dream"]
    assert {e.id.split("-")[2] for e in episodes} == {"r0", "r1"} and len(episodes) == 6
    run_main("train_policy", *flags, 9, "--expmodel", tmp_path / "expmodel")
    rows = records(tmp_path, "rl")
    assert [r["step"] for r in rows] == list(range(1, len(rows) + 1)) and all(r["sampler_gap"] < 1e-2 for r in rows)
    assert [r["real_transitions"] for r in rows if r["real_transitions"] in (5, 9)] == [5, 9] and ranks("policy") == 1
