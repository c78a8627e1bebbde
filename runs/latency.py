"""When does a dream pay? CPU time of RL in the dream and in the real environment, with an assumed latency of
each real step. The dream also pays for recorded steps and its experience model. Evaluation does not count.
Each run was made by one process: a log has the CPU time of its first rank.

    python -m runs.latency out/study/webshop-0/{dream-grpo,real-grpo,expmodel,data}
"""
import sys
from pathlib import Path

from dreamgym import run
from dreamgym.episode import Source

LATENCIES_S = (0.0, 0.01, 0.1, 1.0, 5.0)


def rl_cost(folder: Path) -> tuple[float, int]:
    """(CPU seconds, transitions) of RL."""
    steps = [line for line in run.read_metrics(folder) if line["name"] == "rl"]
    return sum(s["rollout_cpu_s"] + s["update_cpu_s"] for s in steps), sum(s["transitions"] for s in steps)


def main(dream: str, real: str, expmodel: str, data: str) -> None:
    dream_s, dreamt = rl_cost(Path(dream))
    real_s, played = rl_cost(Path(real))
    model_s = run.read_metrics(Path(expmodel))[-1]["cpu_s"]
    recorded = sum(source["transitions"] for source in run.load_meta(data)["sources"]
                   if source["source"] != Source.COUNTERFACTUAL)
    print(f"experience model {model_s:.0f} CPU s; RL in the dream {dream_s:.0f} for {dreamt:,} transitions, "
          f"in the real environment {real_s:.0f} for {played:,}; {recorded:,} recorded transitions")
    print(run.summary_table([
        {"latency of a real step, s": f"{latency:g}",
         "dream, minutes": f"{(model_s + dream_s + recorded * latency) / 60:.1f}",
         "real, minutes": f"{(real_s + played * latency) / 60:.1f}"} for latency in LATENCIES_S]))
    if played > recorded:
        even_s = (model_s + dream_s - real_s) / (played - recorded)
        print(f"break-even latency: {1000 * even_s:.1f} ms")
    else:
        print(f"no break-even: RL in the real environment took no more steps than the {recorded:,} recorded")


if __name__ == "__main__":
    main(*sys.argv[1:])
