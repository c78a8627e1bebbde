"""Time of a GRPO step against TRL's GRPOTrainer on equal work: the same model, prompts, observations, forced
answer lengths, batch, AdamW, clip, no KL.

    pip install trl==1.16.0
    python -m benchmarks.trl_step                # one turn of 64 tokens
    python -m benchmarks.trl_step --turns 6 --new 32 --observation 100

TRL generates with transformers through its `rollout_func`, as examples/trl_grpo.py does, once a turn for all
rows. Not equal: TRL also decodes texts, and logs more. CPU seconds of one process: quote the ratio.
"""
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import tyro
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.timing import clock, cpu_s, tiny_llama
from dreamgym import rl, run
from dreamgym.episode import Episode, Step, Task, TokenSegment
from dreamgym.rollout import extend
from dreamgym.sampler import Sampler
from dreamgym.word_tokenizer import build_tokenizer

LR, VOCAB = 1e-4, 8192
TASKS, ROLLOUTS = 4, 8       # different prompts of a step, episodes of each
ROWS = TASKS * ROLLOUTS
PROMPT = 128                 # tokens of a prompt


@dataclass
class Args:
    turns: int = 1           # answers of an episode
    new: int = 64            # tokens of an answer
    observation: int = 0     # tokens between two answers
    steps: int = 3           # of each trainer, after one that warms up; the median counts


def texts(args: Args, step: int) -> list[list[list[int]]]:
    """[turn][row]: the prompt of each row, then its observations."""
    rng = np.random.default_rng(step)
    draw = lambda count, length: rng.integers(1, VOCAB, (count, length)).tolist()
    first = [task for task in draw(TASKS, PROMPT) for _ in range(ROLLOUTS)]
    return [first, *(draw(ROWS, args.observation) for _ in range(args.turns - 1))]


def trl_steps(args: Args, model) -> list[float]:
    """Seconds of each step."""
    spent, started = [], []

    def play(prompts, trainer):
        ids, mask = [[] for _ in prompts], [[] for _ in prompts]
        for turn in texts(args, len(spent)):
            ids, mask = [a + b for a, b in zip(ids, turn)], [m + [0] * len(b) for m, b in zip(mask, turn)]
            answers, _ = trainer._generate_single_turn(ids, None, {}, 1)
            assert {len(answer) for answer in answers} == {args.new}
            ids, mask = [a + b for a, b in zip(ids, answers)], [m + [1] * args.new for m in mask]
        split = lambda part: [row[PROMPT:] for row in part]
        return {"prompt_ids": [row[:PROMPT] for row in ids], "completion_ids": split(ids),
                "logprobs": None, "env_mask": split(mask)}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            started.append(clock())

        def on_step_end(self, *_, **__):
            spent.append(clock() - started[-1])

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, max_steps=1 + args.steps, per_device_train_batch_size=ROWS,
            num_generations=ROLLOUTS, max_completion_length=args.new, learning_rate=LR, beta=0.0,
            lr_scheduler_type="constant", temperature=1.0, top_k=0, bf16=False, use_cpu=True,
            gradient_checkpointing=False, generation_kwargs={"min_new_tokens": args.new},
            save_strategy="no", report_to="none", disable_tqdm=True)
        prompts = Dataset.from_dict({"prompt": [str(i) for i in range((1 + args.steps) * TASKS)]})
        reward = lambda completion_ids, **_: [float(ids[0] % 2) for ids in completion_ids]
        GRPOTrainer(model, reward, args=config, train_dataset=prompts, rollout_func=play, callbacks=[Clock()],
                    processing_class=build_tokenizer(["a word"])).train()
    return spent[1:]


def our_step(args: Args, state, sampler: Sampler, step: int) -> None:
    segments = [TokenSegment() for _ in range(ROWS)]
    for turn in texts(args, step):
        asked = [segment.ids + new for segment, new in zip(segments, turn)]
        samples = sampler.sample(asked, list(range(ROWS)), args.new, 1.0)
        for segment, new, sample in zip(segments, turn, samples):
            extend(segment, new, sample.ids, sample.logps, [])
    sampler.clear_caches()
    episodes = [Episode(id=str(i), task=Task(id=str(i // ROLLOUTS), text=""), segments=[segment],
                        steps=[Step(state="", action="", next_state="next", reward=0.0)] * (args.turns - 1)
                        + [Step(state="", action="", next_state="next", done=True,
                                reward=float(segment.ids[PROMPT] % 2))])
                for i, segment in enumerate(segments)]
    flags = SimpleNamespace(invalid_penalty=0.0, normalize_std=True, loss_mean="token", micro_batch_tok=8192,
                            kl_coef=0.0, kl="k3", updates=1, seed=0, clip_low=0.2, clip_high=0.2,
                            entropy_coef=0.0)
    rl.update(state, rl.make_batch(episodes, state.policy, None, flags, run.Dist()), flags, run.Dist())


def main(args: Args) -> None:
    run.init_dist(0)
    model = tiny_llama(VOCAB, hidden=64, layers=3)
    state = SimpleNamespace(policy=SimpleNamespace(model=deepcopy(model)), reference=None, value_head=None,
                            step=0)
    state.optimizer = torch.optim.AdamW(state.policy.model.parameters(), lr=LR, weight_decay=0.0)
    context = PROMPT + args.turns * (args.new + args.observation)
    sampler = Sampler(state.policy.model, ROWS, context, [], 0)
    ours = [cpu_s(our_step, args, state, sampler, step)[0] for step in range(1 + args.steps)][1:]
    theirs = trl_steps(args, model)
    base, own = np.median(theirs), np.median(ours)
    print(f"{args}\nTRL {base:.2f} s a step ({min(theirs):.2f}-{max(theirs):.2f}), ours {own:.2f} "
          f"({min(ours):.2f}-{max(ours):.2f}): {base / own:.2f} times faster")


if __name__ == "__main__":
    main(tyro.cli(Args))
