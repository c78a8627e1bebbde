"""A data folder whose training counterfactuals are those that need no rules (dreamgym.hindsight), in
place of the environment's own. Validation and test, hence all probes, stay as they are.

    python -m runs.hindsight webshop out/study/webshop-0/data out/study/webshop-0/data-hindsight
"""
import shutil
import sys
from pathlib import Path

from dreamgym import offline, run
from dreamgym.episode import read_episodes, read_tasks, recorded, to_json


def main(name: str, data: str, out: str) -> None:
    shutil.copytree(data, out, dirs_exist_ok=True)
    env, _ = offline.environment_of(name, Path(data), run.Dist())
    env.counterfactuals = lambda *_: None
    episodes = read_episodes(Path(data) / "train.jsonl")
    played = recorded(episodes)
    tasks = {split: read_tasks(Path(data) / f"tasks_{split}.jsonl") for split in offline.SPLITS}
    made = offline.counterfactuals(env, {"train": played}, tasks, "train", len(episodes) - len(played),
                                   run.rng(0, "hindsight"))
    run.write_jsonl(Path(out) / "train.jsonl", map(to_json, played + made), append=False)
    wrong = 0
    for task, step in ((e.task, e.steps[0]) for e in made):
        truth = env.audit.success(task, step.state, step.shown_action, step.next_state)
        wrong += truth is not None and truth != bool(step.reward)
    print(f"{out}: {len(made)} counterfactuals, of which the audit calls {wrong} wrong")
    env.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
