"""All that exists only for models made from scratch: their size, their word tokenizer, their optimizer.

    tokenizer = build_tokenizer(corpus(episodes, tasks))
    model = create("scratch:64x3", tokenizer)          # hidden size 64, 3 layers

Training them is a preset: configs/tiny/*.json.
"""
import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dreamgym.episode import Episode, Step, Task, rename_episode
from dreamgym.logprobs import TrainSample
from dreamgym.names import Names
from dreamgym.prompts import (Question, next_answer, next_prompt, reward_answer, reward_prompt,
                              variation_prompt)

CONTEXT = 2048
RENAMED_EVERY = 10                   # one episode in so many gives the tokenizer words in other places
SPECIALS = ["<pad>", "<unk>", "<ask>", "<end>"]
COMMON_WORDS = 500                   # the most frequent ones, which training rows never spell
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content + '\n' }}"
    "{% elif message.role == 'user' %}{{ message.content + '<ask>' }}"
    "{% else %}{{ message.content + '<end>' }}{% endif %}{% endfor %}"
)


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
    # theta learn to copy sooner (docs/lab-notes.md).
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers, num_attention_heads=2, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, rope_theta=1e6, initializer_range=0.06, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


# ---- tokenizer ----

# In the tokenizer a blank is "▁". A word has its leading blank in its token, and one token wherever it
# stands: one "▁" is put after a line start, "[", an opening quote, "&", and a "=" or "+" inside an address,
# and is taken away there by the decoder. Both decide by the characters before the place, and a character that
# itself stands at such a place never counts (INSIDE): so together they change no text.
# The marks of page_diff ("= state", "- LINE", "+ LINE") are one token each.
GLUED = "[],:'?=&+"  # tokens of their own: `click[red]`, `color: red,`, `q=red+hat` have one token for red
LETTER = r"[^▁\n\[\],:'?=&+]"
INSIDE = r"[^▁\n\[=&+']"
OPENED = rf"(?<=\A|\n|\[|&|{INSIDE}▁'|{INSIDE}=|{INSIDE}\+)"
SEAM = r"/|%|-|\.\d\d(?!\d)|\.(?!\w)"  # a word ends before it: /product /blue -lamp, $12 .99, 2024 -05 -29
WORD = rf"▁?{LETTER}(?:(?!{SEAM}){LETTER})*"
ROLE = r"▁[a-z]+▁'"  # a role and the quote that opens its name: link 'Cart'
NUMBERED_NAME = r"▁[a-z]+▁\d{1,2}(?![^▁\n\[\],:;])"  # drawer 3
# A line's number, " [3]". A number that is said ("stop [3]") or typed ("type [4] [3]") has the token of a
# number on a page, so that it can be copied from there.
LINE_NUMBER = r"(?<!stop|\])▁\[▁\d+\]"


CHARACTERS = ["\n", "▁", "'\n", *map(chr, range(33, 127)), *("▁" + mark for mark in GLUED)]


def build_tokenizer(texts: Iterable[str], numbered_names: bool = False, max_words: int = 4000,
                    ) -> PreTrainedTokenizerFast:
    """Of the most frequent words of `texts`; others are spelled with characters, other characters with bytes.

    `click[red]` is ▁click [ ▁red ], `belt $50 [1]` is ▁belt ▁$50 ▁[▁1]: punctuation has a glued and a spaced
    token, a word only one. With `numbered_names` a word and the number after it ("drawer 3") are one token,
    where frequent; numbers that stand for amounts are then harder to copy. Decoding is exact for any text
    without "▁" (U+2581, which returns as a space).
    """
    opening = normalizers.Replace(Regex(OPENED + r"(?=[^\n])"), "▁")
    normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁"), opening])
    forms = [ROLE, r"'\n", LINE_NUMBER, r"\n", r"▁?[\[\],:'?=&+]", WORD, "▁"]
    pieces = pre_tokenizers.Split(Regex("|".join([NUMBERED_NAME] * numbered_names + forms)), "isolated")
    counts: Counter[str] = Counter()
    lines = Counter(line for text in texts for line in text.split("\n"))  # many pages share their lines
    for line, times in lines.items():
        for piece, _ in pieces.pre_tokenize_str(normalizer.normalize_str(line)):
            if piece[0] in "▁/%-." and piece.isprintable():
                counts[piece] += times
    for piece, count in list(counts.items()):
        if re.fullmatch(NUMBERED_NAME, piece):  # a name not seen here is a word and a number
            counts.update({f"▁{part}": count for part in piece[1:].split("▁")})
    frequent = sorted(counts.keys() - set(CHARACTERS), key=lambda word: (-counts[word], word))[:max_words]
    # Unigram maximises the summed score: a word beats its spelling, and a byte's name loses even to its own.
    vocabulary = [(piece, -1000.0) for piece in SPECIALS + [f"<0x{byte:02X}>" for byte in range(256)]]
    vocabulary += [(piece, -10.0) for piece in CHARACTERS] + [(word, -1.0) for word in frequent]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=SPECIALS.index("<unk>"), byte_fallback=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pieces
    closing = decoders.Replace(Regex(OPENED + "▁"), "")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), closing, decoders.Replace("▁", " ")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>",
        additional_special_tokens=["<ask>"], chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT)


def corpus(episodes: list[Episode], tasks: list[Task]) -> set[str]:
    """Every text that the word tokenizer must know, as the model will see it. Some episodes have other names,
    as in training."""
    texts = {variation_prompt(task.text) for task in tasks}
    names, rng = Names(task.text for task in tasks), np.random.default_rng(0)
    renamed = [rename_episode(episode, names.draw(1.0, rng)) for episode in episodes[::RENAMED_EVERY]]
    for episode in episodes + renamed:
        for step in episode.steps:
            action = step.shown_action
            demo = Step(state="", action=action, next_state="", reward=1.0)
            texts |= {f"state:\n{step.state}\naction: {action}\n", step.next_state}
            texts.add(next_prompt(Question(episode.task.text, "", action, [("", "")] * 2, [demo] * 2, [demo]),
                                  "full"))
            texts.add(next_answer(step.reasoning, step.next_state,
                                  Question("", step.state, action, [], [], []), "diff"))
            texts |= {reward_prompt("", "", "", "", "full"),
                      reward_answer(step.reward_reasoning, step.reward, step.done)}
    return texts


class Speller:
    """Spells words in training rows as the word tokenizer spells those that it does not know. Else a model
    hardly learns to copy them (as BPE-dropout, arXiv 1910.13267, but the same word everywhere in a row)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        ids = tokenizer.get_vocab()
        rarer = len(SPECIALS) + 256 + len(CHARACTERS) + COMMON_WORDS     # words are sorted by frequency
        self.pieces = {}
        for word, token in ids.items():
            if token >= rarer and re.fullmatch(r"[▁/%.-]?\$?\w{2,}", word, re.ASCII):
                known = max(end for end in range(1, len(word)) if word[:end] in ids)
                self.pieces[token] = [ids[word[:known]], *(ids[character] for character in word[known:])]

    def draw(self, sample: TrainSample, share: float, rng: np.random.Generator) -> TrainSample:
        """The row with a `share` of its rarer words spelled."""
        words = [token for token in sorted(set(sample.ids)) if token in self.pieces]
        spelled = {token for token, chance in zip(words, rng.random(len(words))) if chance < share}
        if not spelled:
            return sample
        parts = [self.pieces[token] if token in spelled else [token] for token in sample.ids]
        mask = [trained for part, trained in zip(parts, sample.mask) for _ in part]
        return TrainSample([token for part in parts for token in part], mask)


def check_tokenizer(tokenizer_a: PreTrainedTokenizerBase, tokenizer_b: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the two vocabularies differ."""
    differ = {token for token, _ in tokenizer_a.get_vocab().items() ^ tokenizer_b.get_vocab().items()}
    if differ:
        raise ValueError(f"the tokenizers differ in {len(differ)} tokens (for example {sorted(differ)[:5]}). "
                         "Use the checkpoint's own tokenizer, or train the model again with this one.")


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
