"""All that exists only for models made from scratch, but for their word tokenizer: size, texts, optimizer.

    tokenizer = build_tokenizer(corpus(episodes, tasks))
    model = create("scratch:64x3", tokenizer)          # hidden size 64, 3 layers

Training them is a preset: configs/tiny/*.json.
"""
import re

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from dreamgym.episode import Episode, Step, Task, rename_episode
from dreamgym.logprobs import TrainSample
from dreamgym.names import Names
from dreamgym.prompts import (Question, next_answer, next_prompt, reward_answer, reward_prompt,
                              variation_prompt)
from dreamgym.word_tokenizer import CHARACTERS, CODED, CONTEXT, WordTokenizer

COMMON_WORDS = 500                   # the most frequent ones, which training rows never code
RENAMED_EVERY = 10                   # one episode in so many gives the tokenizer words in other places


# ---- model ----

def is_scratch(name: str) -> bool:
    return name.startswith("scratch:")


def size_of(spec: str) -> tuple[int, int]:
    """(hidden size, layers) of "scratch:64x3". Raises ValueError."""
    match = re.fullmatch(r"scratch:(\d+)x(\d+)", spec)
    hidden, layers = map(int, match.groups()) if match else (0, 0)
    if hidden < 4 or hidden % 4 or not layers:
        raise ValueError(f"--model {spec}: expected scratch:HIDDENxLAYERS (of 4 x n), such as scratch:64x3")
    return hidden, layers


def create(spec: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> LlamaForCausalLM:
    """A Llama with tied embeddings in fp32."""
    hidden, layers = size_of(spec)
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
            texts.add(next_prompt(Question(episode.task.text, "", action, [("", "")] * 2, [demo] * 2, [demo]),
                                  "full"))
            texts.add(next_answer(step.reasoning, step.next_state,
                                  Question("", step.state, action, [], [], []), "diff"))
            texts |= {reward_prompt("", "", "", "", "full"),
                      reward_answer(step.reward_reasoning, step.reward, step.done)}
    return texts


class WordCoder:
    """Gives known words of training rows the codes of unknown ones, others in each row, so that the model
    learns to copy and compare words by their codes. A tokenizer without codes leaves rows as they are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.words = tokenizer, {}
        if not isinstance(tokenizer, WordTokenizer):
            return
        # words come last in the vocabulary, the most frequent first
        first_rare = max(tokenizer.convert_tokens_to_ids(CHARACTERS)) + 1 + COMMON_WORDS
        for piece, token in tokenizer.get_vocab().items():
            if token >= first_rare and (match := CODED.fullmatch(piece)):
                self.words[token] = tokenizer.convert_tokens_to_ids(list(match[1])), match[2]

    def draw(self, sample: TrainSample, max_tok: int, rng: np.random.Generator) -> TrainSample:
        """The row with codes for some of the rarer words of its prompt, wherever they stand in it. One that
        would have more than `max_tok` stays as it was."""
        if not self.words:
            return sample
        words = sorted({self.words[token][1] for token, trained in zip(sample.ids, sample.mask)
                        if not trained and token in self.words})
        chosen = {word for word, chance in zip(words, rng.random(len(words)))
                  if chance < self.tokenizer.coded_words}
        if not chosen:
            return sample
        salt = rng.bytes(16)
        parts = []
        for token in sample.ids:
            marks, word = self.words.get(token, ((), ""))
            parts.append([*marks, *self.tokenizer.code(word, salt)] if word in chosen else [token])
        ids = [token for part in parts for token in part]
        mask = [trained for part, trained in zip(parts, sample.mask) for _ in part]
        return TrainSample(ids, mask) if len(ids) <= max_tok else sample


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
