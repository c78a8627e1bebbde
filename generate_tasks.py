"""Seed tasks -> varied tasks, written by the experience model's own weights (M_task, DreamGym, Eq. 6).

    python generate_tasks.py --expmodel out/webshop/expmodel  # random training tasks
    python generate_tasks.py --expmodel out/webshop/expmodel --episodes out/webshop/episodes.jsonl   # Eq. 7

train_policy.py does the same now and then, with its curriculum's seeds; --generated-tasks gives it this file.
"""
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from dreamgym import run
from dreamgym.curriculum import task_value
from dreamgym.envs.base import env_of_data
from dreamgym.episode import Task, read_episodes, read_tasks, recorded, to_json
from dreamgym.experience_model import load_experience_model
from dreamgym.flags import Count
from dreamgym.offline import SPLITS
from dreamgym.rl import usable
from dreamgym.task_generation import Known, write_tasks


@dataclass
class Args:
    expmodel: str = "out/webshop/expmodel"  # folder of train_expmodel.py
    data: str = ""                     # folder of collect.py ("": data beside the experience model)
    episodes: str = ""                 # take the tasks of highest reward variance in these episodes as seeds
    out: str = ""  # JSONL to write ("": tasks_generated.jsonl beside the experience model)
    count: Count = 50                  # seed tasks
    seed: int = 0                      # of seeds and sampling


def valuable_tasks(path: str, count: int) -> list[Task]:
    """Those of highest value (Eq. 7) in a file of episodes, by the last group of each."""
    tasks, groups = {}, defaultdict(list)
    for episode in usable(read_episodes(path), drop_malformed=True):
        tasks[episode.task.id] = episode.task
        groups[episode.task.id, episode.iteration].append(episode.reward)
    last = {task_id: task_value(group) for (task_id, _), group in sorted(groups.items()) if len(group) > 1}
    ranked = sorted(filter(last.get, last), key=last.get, reverse=True)
    if not ranked:
        raise ValueError(f"--episodes {path}: found no group of episodes (one task, one iteration) whose "
                         "rewards differ, so no task has value (Eq. 7); expected episodes of GRPO")
    return [tasks[task_id] for task_id in ranked[:count]]


def main() -> None:
    args = run.parse(Args)
    folder = Path(args.expmodel)
    data, dist = Path(args.data or folder.parent / "data"), run.one_process(args.seed)
    settings = run.load_meta(data)["settings"]
    env = env_of_data(settings["env"], settings)
    tasks = {split: read_tasks(data / f"tasks_{split}.jsonl") for split in SPLITS}
    seeds = (valuable_tasks(args.episodes, args.count) if args.episodes
             else run.sample(tasks["train"], args.count, args.seed, "seeds"))
    model = load_experience_model(folder, env, dist.device, seed=args.seed)
    known = Known(tasks["train"], recorded(read_episodes(data / "train.jsonl")))
    taken = {task.text for part in tasks.values() for task in part}
    out = Path(args.out or folder.parent / "tasks_generated.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)          # refused now, rather than when all is written
    made, counts = write_tasks(model, seeds, taken, known, "generated")
    run.write_jsonl(out, map(to_json, made), append=False)
    texts = {task.id: task.text for task in seeds}
    for task in made[:10]:
        print(f"  {texts[task.parent]}\n    -> {task.text}")
    print(f"{out}: {len(made)} tasks from {len(seeds)} seeds; candidates: {counts}")


if __name__ == "__main__":
    run.main(main)
