"""The scripts of runs/: a cell from training to its table, DPO, and what is disjoint between splits."""
import pytest
import torch
from safetensors.torch import load_file

from dreamgym import run
from dreamgym.episode import Task
from runs import latency, record, splits, table
from runs.dpo import make_pairs
from tests.conftest import EXAMPLE, SMALL_RUN, one_step, run_main


def test_from_a_cell_to_its_table(trained, tmp_path, monkeypatch, capsys):
    """A world that training does not play in, a record without its outcomes, a table of two commits."""
    out, shared = tmp_path / "lookup", ("--env", EXAMPLE, "--data", trained.data)
    run_main("train_policy", *shared, "--expmodel", trained.expmodel, "--out", out, *SMALL_RUN, "--algo", "rft",
             "--no-enrich", "--max-generated-fraction", 0, "--dream", "pages=lookup")
    steps = [line for line in run.read_metrics(out) if line["name"] == "rl"]
    assert len(steps) == 2 and all(s["stop/malformed"] == 0 if "stop/malformed" in s else True for s in steps)
    assert all(s["dream/steps"] == 0 and s["trained_samples"] >= 0 for s in steps)   # the model was not asked
    run_main("evaluate", *shared, "--policy", out / "policy", "--tasks", 3, "--repeats", 2, "--temperatures", 0, 0.4,
             "--out", out / "test")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    record.main(str(out), "files-0-lookup")
    found = run.read_json(tmp_path / "files-0-lookup.json")
    assert {t: [len(row) for row in rows.values()] for t, rows in found["outcomes"].items()} == {
        "0": [1] * 3, "0.4": [2] * 3}
    assert found["dream_transitions"] > 0 == found["real_transitions"] and found["policy"] == "lookup"
    better = found | {"policy": "better", "outcomes": {t: {k: "1" * len(v) for k, v in rows.items()}
                                                       for t, rows in found["outcomes"].items()}}
    run.write_json(tmp_path / "better.json", better)
    files = [tmp_path / "files-0-lookup.json", tmp_path / "better.json"]
    run_main("runs.table", *files, "--against", "lookup")
    rows = capsys.readouterr().out.splitlines()
    gain = 1 - sum(row.count("1") for row in found["outcomes"]["0.4"].values()) / 6
    assert f"{gain:+.3f} [" in rows[-1] and "1.000 [1.000, 1.000]" in rows[-1] and "pass@2" in rows[-4]
    run.write_json(tmp_path / "better.json", better | {"policy": "dream-500"})
    run_main("runs.table", tmp_path / "better.json", "--picture", tmp_path / "sizes.png")
    (x, mean, *_), = table.by_number(table.read([tmp_path / "better.json"]))["dream", False]
    assert (x, mean) == (500, 1.0) and (tmp_path / "sizes.png").stat().st_size > 5_000
    run.write_json(tmp_path / "better.json", better | {"commit": "another"})
    with pytest.raises(ValueError, match="one table has one commit, found .*another"):
        table.read(files)
    with pytest.raises(ValueError, match="--dream: expected --no-enrich"):
        run_main("train_policy", "--dream", "pages=lookup")


@pytest.mark.parametrize("played, said", [(300, "break-even latency: 80.0 ms"), (100, "no break-even")])
def test_latency_at_which_a_dream_pays(tmp_path, capsys, played, said):
    """Evaluation or counterfactuals that count; a break-even where the dream needs more real steps."""
    step = {"name": "rl", "rollout_cpu_s": 1.0, "update_cpu_s": 2.0, "transitions": played // 2}
    lines = {"dream": [step, step], "real": [step | {"update_cpu_s": 0.0}] * 2 + [{"name": "evaluation", "cpu_s": 99}],
             "model": [{"name": "expmodel", "cpu_s": 2.0}, {"name": "expmodel", "cpu_s": 12.0}]}
    for name, rows in lines.items():
        (tmp_path / name).mkdir()
        run.write_jsonl(tmp_path / name / "metrics.jsonl", rows, append=False)
    sources = [{"source": "oracle", "transitions": 100}, {"source": "counterfactual", "transitions": 50}]
    (tmp_path / "data").mkdir()
    run.write_json(tmp_path / "data/meta.json", {"sources": sources})
    latency.main(*(str(tmp_path / name) for name in ("dream", "real", "model", "data")))
    assert said in capsys.readouterr().out                   # (12 + 6 - 2) s / (300 - 100) steps


def test_dpo(trained, tmp_path, capsys):
    """A folder that cannot be a start; pairs that are turned round."""
    run_main("train_policy", "--env", EXAMPLE, "--data", trained.data, "--expmodel", trained.expmodel, "--out",
             tmp_path, *SMALL_RUN, "--algo", "imitation")
    run_main("runs.dpo", "--env", EXAMPLE, "--data", trained.data, "--policy", tmp_path / "imitation", "--out",
             tmp_path / "dpo", "--lr", 1e-3, "--epochs", 8)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert said[0].endswith("loss 0.693, 0.00 ranked right") and said[-1].endswith("1.00 ranked right")
    start, end = (run.load_meta(tmp_path / name / "model") for name in ("imitation", "dpo"))
    assert end == start | {"dpo": end["dpo"]}
    weights = [load_file(tmp_path / name / "model/model.safetensors") for name in ("imitation", "dpo")]
    assert any(not torch.equal(weights[0][k], weights[1][k]) for k in weights[0])


def test_pairs_are_of_one_task():
    rows = [("x", 1.0), ("x", 0.0), ("x", 0.0), ("y", 1.0), ("z", 0.0), ("w", 0.0), ("w", 1.0), ("w", 1.0)]
    pairs = make_pairs([one_step(str(i), Task(id=str(i), text=text), reward)
                        for i, (text, reward) in enumerate(rows)], 0)
    assert sorted((won.id, lost.id) for won, lost in pairs) == [("0", "1"), ("6", "5")]


def test_splits(workspace, capsys):
    """Counts of one split taken for another's."""
    splits.main(str(workspace.data))
    rows = {line[:line.index("  ")]: line.split()[-6:] for line in capsys.readouterr().out.splitlines()[2:]}
    train, valid, lost, test, new, _ = (int(cell.replace(",", "")) for cell in rows["instructions"])
    assert valid == lost and test == new and train > valid > 0      # no instruction is in two splits
    assert int(rows["pages"][2]) < int(rows["pages"][1])
