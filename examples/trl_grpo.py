"""GRPO of TRL in a served dream, or in a served real environment (docs/scaling.md).

    python serve.py --expmodel out/webshop/expmodel
    python -m examples.trl_grpo --model Qwen/Qwen2.5-0.5B-Instruct

TRL's row is an episode: the first prompt, then answers (trained) and pages (`env_mask` 0), as ids that only
grow. All episodes of a step run at once, each in a session of its own, so that the server batches them. Needs
trl==1.16.0 and requirements-serve.txt.
"""
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import tyro
from datasets import Dataset
from openenv.core.generic_client import GenericEnvClient
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from dreamgym.chat import ChatFormat, chat_format


@dataclass
class Args:
    model: str                         # folder or hub name of the policy to train
    url: str = "http://127.0.0.1:8000"     # of serve.py
    out: str = "out/trl"               # folder for the trained policy
    steps: int = 100                   # optimizer steps
    tasks: int = 4                     # tasks of a step
    rollouts: int = 8                  # episodes of a task: the GRPO group
    max_action_tok: int = 512          # tokens of an answer
    invalid_penalty: float = 0.1       # taken from the reward, times the share of actions that change nothing
    lr: float = 1e-6                   # learning rate


@dataclass
class Row:
    """One episode."""
    prompt: list[int]
    state: str
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)      # 1 = sampled by the policy
    turns: int = 0
    invalid: int = 0
    reward: float = 0.0
    stop: str = ""

    def append(self, ids: list[int], mask: int) -> None:
        self.ids, self.mask = self.ids + ids, self.mask + [mask] * len(ids)

    def turn(self, answer: list[int], result, chat: ChatFormat) -> None:
        """An answer, and the page that followed, which asks for the next one."""
        page, self.stop, self.reward = result.observation, result.observation["stop"], result.reward
        self.append(answer, 1)
        self.turns += 1
        self.invalid += not result.done and page["state"] == self.state
        self.state = page["state"]
        if not result.done:
            end = [] if answer[-1:] and answer[-1] in chat.end_ids else chat.end_ids[:1]     # it was cut off
            self.append(end + chat.prompt_ids(page["prompt"], is_first=False), 0)


def make_rollout(args: Args, clients: list, pool: ThreadPoolExecutor):
    """TRL's `rollout_func`. Equal prompts are seeds of the same task: a group."""
    def play(prompts: list[str], trainer: GRPOTrainer) -> dict:
        context = trainer.model.config.max_position_embeddings
        first = pool.map(lambda client, seed: client.reset(seed=int(seed)), clients, prompts)
        pages = [result.observation for result in first]
        chat = chat_format(trainer.processing_class, pages[0]["system"], thinks=True)
        rows = [Row(chat.prompt_ids(page["prompt"]), page["state"]) for page in pages]
        live = list(range(len(rows)))
        while live := [i for i in live if not rows[i].stop
                       and len(rows[i].prompt + rows[i].ids) + args.max_action_tok <= context]:
            asked = [rows[i].prompt + rows[i].ids for i in live]
            answers, _ = trainer._generate_single_turn(asked, None, {}, 1)
            texts = [chat.answer_text(ids) for ids in answers]
            results = pool.map(lambda i, text: clients[i].step({"action": text}), live, texts)
            for i, answer, result in zip(live, answers, results):
                rows[i].turn(answer, result, chat)
        rewards = [None if row.stop == "malformed"              # the dream's failure: TRL leaves it out
                   else row.reward - args.invalid_penalty * row.invalid / max(1, row.turns) for row in rows]
        return {"prompt_ids": [row.prompt for row in rows], "completion_ids": [row.ids for row in rows],
                "logprobs": None, "env_mask": [row.mask for row in rows], "env_reward": rewards}
    return play


def env_reward(env_reward: list[float | None], **_) -> list[float | None]:
    return env_reward


def main(args: Args) -> list[dict]:
    """Trains, saves, and returns TRL's log."""
    tokenizer, episodes = AutoTokenizer.from_pretrained(args.model), args.tasks * args.rollouts
    token = os.environ.get("DREAMGYM_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else None
    clients = [GenericEnvClient(base_url=args.url, headers=headers, message_timeout_s=600).sync()
               for _ in range(episodes)]
    config = GRPOConfig(
        args.out, max_steps=args.steps, per_device_train_batch_size=episodes, num_generations=args.rollouts,
        max_completion_length=args.max_action_tok, learning_rate=args.lr, bf16=torch.cuda.is_available(),
        logging_steps=1, save_strategy="no", report_to="none")
    seeds = Dataset.from_dict({"prompt": [str(seed) for seed in range(args.steps * args.tasks)]})
    with ThreadPoolExecutor(episodes) as pool:
        try:
            trainer = GRPOTrainer(args.model, env_reward, args=config, train_dataset=seeds,
                                  processing_class=tokenizer, rollout_func=make_rollout(args, clients, pool))
            trainer.train()
            trainer.save_model(args.out)
        finally:
            for client in clients:
                client.close()
    return trainer.state.log_history


if __name__ == "__main__":
    main(tyro.cli(Args))
