"""All that exists only for models made from scratch, but for their word tokenizer: size, texts, optimizer.

    tokenizer = build_tokenizer(corpus(episodes, tasks))
    model = create("scratch:64x3", tokenizer)          # hidden size 64, 3 layers

Training them is a preset: configs/tiny/*.json.
"""
import re
from collections import defaultdict

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from dreamgym.episode import Episode, Step, Task, named_line, number_lines, rename_episode
from dreamgym.logprobs import TrainSample
from dreamgym.names import Names
from dreamgym.prompts import (Question, next_answer, next_prompt, reward_answer, reward_prompt,
                              variation_prompt)
from dreamgym.word_tokenizer import CODES, CONTEXT, WordTokenizer

RENAMED_EVERY = 10                   # one episode in so many gives the tokenizer words in other places


# ---- model ----

def is_scratch(name: str) -> bool:
    return name.startswith("scratch:")


def create(spec: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> LlamaForCausalLM:
    """A Llama with tied embeddings in fp32."""
    match = re.fullmatch(r"scratch:(\d+)x(\d+)", spec)
    hidden, layers = map(int, match.groups()) if match else (0, 0)
    if hidden < 4 or hidden % 4 or not layers:
        raise ValueError(f"--model {spec}: expected scratch:HIDDENxLAYERS (of 4 x n), such as scratch:64x3")
    # A head matches words only by rotary pairs that turn slowly over a prompt: two wide heads and a large
    # theta learn to copy sooner.
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers, num_attention_heads=2, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, rope_theta=1e6, initializer_range=0.06, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


# ---- tokenizer ----

def corpus(episodes: list[Episode], tasks: list[Task]) -> set[str]:
    """Every text that the word tokenizer must know, as the model will see it. Some episodes have other names,
    as in training."""
    texts = {variation_prompt(task.text) for task in tasks}
    names, rng = Names((task.text for task in tasks), episodes), np.random.default_rng(0)
    renamed = [rename_episode(episode, names.draw(1.0, rng)) for episode in episodes[::RENAMED_EVERY]]
    for episode in episodes + renamed:
        for step in episode.steps:
            action = step.shown_action
            demo = Step(state="", action=action, next_state="", reward=1.0)
            texts |= {f"state:\n{step.state}\naction: {action}\n", step.next_state, step.thought}
            if named_line(step):
                texts.add(number_lines(step.state))
            texts.add(next_prompt(Question(episode.task.text, "", action, [("", "")] * 2, [demo] * 2, [demo]),
                                  "full"))
            texts.add(next_answer(step.reasoning, step.next_state,
                                  Question("", step.state, action, [], [], []), "diff"))
            texts |= {reward_prompt("", "", "", "", "full"),
                      reward_answer(step.reward_reasoning, step.reward, step.done)}
    return texts


class WordCoder:
    """Gives coded words of training rows other codes, anew in each row, so that the model learns to copy and
    compare codes, and not those of its data by heart. A tokenizer without codes leaves rows as they are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.share = tokenizer.coded_words if isinstance(tokenizer, WordTokenizer) else 0.0
        self.first = tokenizer.first_code if self.share else 0

    def draw(self, sample: TrainSample, rng: np.random.Generator) -> TrainSample:
        """The row with other codes for some of its coded words, wherever they stand in it."""
        if not self.share:
            return sample
        is_code = lambda token: self.first <= token < self.first + len(CODES)
        ids, places, i = list(sample.ids), defaultdict(list), 0      # pair of codes -> where it begins
        while i < len(ids) - 1:
            pair = is_code(ids[i]) and is_code(ids[i + 1])
            if pair:
                places[ids[i], ids[i + 1]].append(i)
            i += 1 + pair
        for word in sorted(places):
            if rng.random() < self.share:
                other = (self.first + rng.integers(len(CODES), size=2)).tolist()
                for i in places[word]:
                    ids[i:i + 2] = other
        return TrainSample(ids, sample.mask)


# ---- optimizer ----

class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal before the step (Jordan et al., 2024; the weight decay of arXiv
    2502.16982). torch.optim.Muon computes in bfloat16, which took 38 % of a training step on a CPU without
    bfloat16 instructions."""

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, momentum = self.state[p], group["momentum"]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                mean = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.add_(orthogonal(p.grad.lerp(mean, momentum)), alpha=-rate)


def orthogonal(matrix_MN: torch.Tensor) -> torch.Tensor:
    """Roughly the closest orthogonal matrix: five steps of Newton and Schulz with Muon's coefficients."""
    if matrix_MN.shape[0] > matrix_MN.shape[1]:
        return orthogonal(matrix_MN.T).T
    x_MN = matrix_MN / matrix_MN.norm().clamp(min=1e-7)
    for _ in range(5):
        gram_MM = x_MN @ x_MN.T
        x_MN = 3.4445 * x_MN + (-4.7750 * gram_MM + 2.0315 * gram_MM @ gram_MM) @ x_MN
    return x_MN
