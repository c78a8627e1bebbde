"""Seed tasks -> varied tasks, written by the experience model's own weights (M_task, DreamGym, Eq. 6).

    python generate_tasks.py --expmodel out/webshop/expmodel --count 50              # from random training tasks
    python generate_tasks.py --expmodel out/webshop/expmodel --episodes out/webshop/episodes.jsonl   # from tasks of high reward variance (Eq. 7)

train_policy.py does the same every few iterations, with its curriculum's seeds. What is written is checked by rule (grammar, known words and options,
no copies); what was refused, and why, is printed.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from dreamgym import run
from dreamgym.curriculum import task_value
from dreamgym.envs import make_rules
from dreamgym.episode import read_episodes, read_tasks
from dreamgym.experience_model import load_dream
from dreamgym.task_generation import TaskCheck, write_tasks


@dataclass
class Args:
    env: str = "webshop"               # environment: webshop | alfworld | webarena
    expmodel: str = ""                 # folder of train_expmodel.py (default: out/ENV/expmodel)
    data: str = ""                     # folder of collect.py (default: beside the experience model)
    episodes: str = ""                 # take the tasks of highest reward variance in this episodes.jsonl as seeds
    out: str = ""                      # JSONL to write (default: tasks_generated.jsonl beside the experience model)
    count: int = 50                    # seed tasks
    candidates: int = 4                # texts sampled per seed; the hardest acceptable one is kept (ours)
    temperature: float = 0.8           # sampling temperature (ours; the paper does not say)
    seed: int = 0                      # seeds and sampling


def main() -> None:
    args = run.parse(Args)
    rules, ranks = make_rules(args.env), run.start(args.seed)
    expmodel = Path(args.expmodel or f"out/{args.env}/expmodel")
    data = Path(args.data or expmodel.parent / "data")
    tasks = read_tasks(data / "tasks_train.jsonl")
    dream = load_dream(expmodel, rules, ranks.device, seed=args.seed)
    seeds = [tasks[i] for i in run.rng(args.seed, "seeds").permutation(len(tasks))[:args.count]]
    if args.episodes:
        rewards = defaultdict(list)
        played = {}
        for episode in read_episodes(args.episodes):
            rewards[episode.task.text].append(episode.reward)
            played[episode.task.text] = episode.task
        valued = sorted(rewards, key=lambda text: -task_value(rewards[text]))
        seeds = [played[text] for text in valued[:args.count] if task_value(rewards[text]) > 0]
        if not seeds:
            raise SystemExit(f"generate_tasks.py: no task in {args.episodes} has rewards that differ; nothing has curriculum value (Eq. 7)")
    states = [step.state for episode in read_episodes(data / "train.jsonl") for step in episode.steps]
    made, counts = write_tasks(dream, args.env, seeds, args.candidates, TaskCheck(rules, tasks, states), "generated", args.temperature)
    out = Path(args.out or expmodel.parent / "tasks_generated.jsonl")
    run.write_jsonl(out, (asdict(task) for task in made), append=False)
    texts = {task.id: task.text for task in seeds}
    for task in made[:10]:
        print(f"  {texts[task.parent]}\n    -> {task.text}")
    pairs = [(rules.difficulty(task.text), rules.difficulty(texts[task.parent])) for task in made]
    harder = Counter((new > old) - (new < old) for new, old in pairs)
    print(f"{out}: {len(made)} tasks from {len(seeds)} seeds; candidates {counts}; constraints: more {harder[1]}, as many {harder[0]}, fewer {harder[-1]}")


if __name__ == "__main__":
    run.main(main)
