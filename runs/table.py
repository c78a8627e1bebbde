"""Records of runs/record.py -> a table: test success at each temperature with its 95 % interval (bootstrap
over seeds and tasks), pass@k at T=0.4, the difference to one policy, paired by seed and task, also with the t
interval over seeds.

    python -m runs.table runs/results/webshop-*.json --against imitation
    python -m runs.table runs/results/webshop-*.json --picture p.png  # of runs/worlds.sh, runs/sizes.sh
"""
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from matplotlib.figure import Figure

from dreamgym.evaluation import bootstrap, pass_at_k, with_interval
from dreamgym.run import main as run_main, parse, summary_table
from dreamgym.worlds import parse_options

PRIMARY = "0.4"                        # verl-agent's temperature, hence the paper's
SHOWN_K = (2, 4, 8, 16)                # of pass@k


@dataclass
class Args:
    files: Annotated[list[str], tyro.conf.Positional] = field(default_factory=list)  # of runs/results/
    against: str = "imitation"         # the policy that others are compared with
    picture: str = ""  # FILE.png: success against the rate of an error, or the number in policies' names


def read(files: list[str]) -> dict[str, dict[int, dict]]:
    """Records by policy and seed. Raises ValueError where they do not belong into one table."""
    if not files:
        raise ValueError("expected files of runs/results/")
    records, kinds = defaultdict(dict), defaultdict(set)
    for record in (json.loads(Path(file).read_text()) for file in files):
        seed = record["settings"]["seed"]
        if seed in records[record["policy"]]:
            raise ValueError(f"{record['policy']}, seed {seed}: found twice")
        records[record["policy"]][seed] = record
        kinds["environment"].add(json.dumps(record["environment"]))
        kinds["split"].add(record["split"])
        kinds["commit"].add(record["commit"])
    for name, found in kinds.items():
        if len(found) > 1:
            raise ValueError(f"one table has one {name}, found {', '.join(sorted(found))}")
    return records


def wins(records: Iterable[dict], temperature: str) -> list[dict[str, list[bool]]]:
    """Success of each episode, by task, of each record."""
    return [{task: [c == "1" for c in row] for task, row in record["outcomes"][temperature].items()}
            for record in records]


def cells(by_seed: dict[int, dict], base: dict[int, dict], against: str) -> dict[str, str]:
    """A row of the table."""
    first, *_ = records = by_seed.values()
    row = {"greedy" if t == "0" else f"T={t}": with_interval(bootstrap(wins(records, t)))
           for t in first["outcomes"]}
    passed = [pass_at_k(won) for won in wins(records, PRIMARY)]
    row |= {f"pass@{k}": f"{sum(p[k] for p in passed) / len(passed):.3f}"
            for k in SHOWN_K if all(k in p for p in passed)}
    shared = sorted(by_seed.keys() & base.keys())
    if shared and base is not by_seed:
        found = bootstrap(*(wins([side[seed] for seed in shared], PRIMARY) for side in (by_seed, base)))
        row[f"T={PRIMARY} - {against}"] = with_interval(found, "+")
        if len(shared) > 1:
            row["t over seeds"] = f"[{found['t_low']:+.3f}, {found['t_high']:+.3f}]"
    used = [sum(r[f"{world}_transitions"] for r in records) // len(by_seed) for world in ("dream", "real")]
    row |= {"--dream": " ".join(first["settings"].get("dream", []))}
    return row | {"dream / real transitions": f"{used[0]:,} / {used[1]:,}", "seeds": str(len(by_seed))}


KINDS = ("false_positives", "false_negatives", "swapped_pages")
Curves = dict[tuple[str, bool], list[tuple[float, ...]]]       # (name, dashed): (x, mean, low, high)


def point(x: float, by_seed: dict[int, dict]) -> tuple[float, ...]:
    found = bootstrap(wins(by_seed.values(), PRIMARY))
    return x, found["mean"], found["low"], found["high"]


def by_rate(records: dict[str, dict[int, dict]]) -> Curves:
    """A curve for each kind of error, dashed where it strikes the same (task, action) always. The worlds with
    true pages and no error are rate 0 of each."""
    curves = defaultdict(list)
    for by_seed in records.values():
        options = parse_options(next(iter(by_seed.values()))["settings"].get("dream", []))
        rates = {kind: getattr(options, kind) for kind in KINDS if getattr(options, kind)}
        if options.pages == "true" and options.rewards == "own" and len(rates) <= 1:
            keys = [(k, options.fixed) for k in rates] or [(k, f) for k in KINDS for f in (False, True)]
            here = point(sum(rates.values()), by_seed)
            for key in keys:
                curves[key].append(here)
    return curves


def by_number(records: dict[str, dict[int, dict]]) -> Curves:
    """A curve for "start" of the policies "start-500", "start-2000"."""
    curves = defaultdict(list)
    for policy, by_seed in records.items():
        name, _, number = policy.rpartition("-")
        if number.isdigit():
            curves[name, False].append(point(float(number), by_seed))
    return curves


def draw(records: dict[str, dict[int, dict]], path: str) -> None:
    """Real success against the rate of each error, or against numbers on a logarithmic scale."""
    rates = by_rate(records)
    curves = rates or by_number(records)
    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    names = sorted({name for name, _ in curves})
    for (name, dashed), points in sorted(curves.items()):
        x, mean, low, high = zip(*sorted(points))
        color, how = f"C{names.index(name)}", ", always the same" if dashed else ", at random"
        axes.plot(x, mean, "o--" if dashed else "o-", color=color, markersize=4,
                  label=name.replace("_", " ") + how * bool(rates))
        axes.fill_between(x, low, high, color=color, alpha=0.08, linewidth=0)
    axes.set(xlabel="rate of the error in training" if rates else "recorded transitions",
             ylabel=f"real success, T={PRIMARY}", ylim=(0, 1), xscale="linear" if rates else "log")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    args = parse(Args)
    records = read(args.files)
    first = next(iter(next(iter(records.values())).values()))
    print(f"{first['environment']['env']}, {first['label']}, {first['split']} tasks, commit "
          f"{first['commit']}; 95 % intervals: bootstrap over seeds and tasks")
    base = records.get(args.against, {})
    print(summary_table([{"policy": name} | cells(by_seed, base, args.against)
                         for name, by_seed in records.items()]))
    if args.picture:
        draw(records, args.picture)


if __name__ == "__main__":
    run_main(main)
