"""phi(state, action) of DreamGym, Eq. 4: what the experience replay buffer is searched by, and what history
is selected by.

An encoder maps states and actions to unit vectors: `encoder(states, actions) -> float32 [N, dim]`. The cosine
of two vectors is the mean of the cosine of the actions and that of the states, so a long page cannot drown a
short action.
The paper does not name its encoder. Default here: words, weighted by rarity, randomly projected; no model, no
download.
"""
from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

WORD = re.compile(r"\w+")
CACHED_TEXTS = 100_000


class WordEncoder:
    """A random projection of tf-idf bags of words, one half of the vector for the action and one for the
    state. `fit` counts words."""

    def __init__(self, dim: int = 256, idf: dict[str, float] | None = None):
        self.dim, self.idf = dim, idf or {}
        self.rarest = max(self.idf.values(), default=1.0)
        self.clear_caches()

    def clear_caches(self) -> None:
        self.words: dict[str, np.ndarray] = {}
        self.texts: dict[str, np.ndarray] = {}

    def fit(self, texts: Iterable[str]) -> WordEncoder:
        """Sets the weight of each word from the texts it occurs in: log(1 + N / count)."""
        counts, total = Counter(), 0
        for text in set(texts):
            counts.update(set(WORD.findall(text.lower())))
            total += 1
        self.idf = {word: float(np.log1p(total / count)) for word, count in counts.items()}
        self.rarest = max(self.idf.values(), default=1.0)
        self.clear_caches()
        return self

    def __call__(self, states: Sequence[str], actions: Sequence[str]) -> np.ndarray:
        """[N] states and actions -> unit vectors, float32 [N, dim]."""
        halves = [np.stack([self._text(text) for text in texts]) for texts in (actions, states)]
        return np.concatenate(halves, axis=1) * np.float32(0.5 ** 0.5)

    def _text(self, text: str) -> np.ndarray:
        if text not in self.texts:
            if len(self.texts) >= CACHED_TEXTS:
                self.texts.clear()
            vector = np.zeros(self.dim // 2, np.float32)
            for word, count in Counter(WORD.findall(text.lower())).items():
                vector += count * self.idf.get(word, self.rarest) * self._word(word)
            self.texts[text] = vector / max(float(np.linalg.norm(vector)), 1e-9)
        return self.texts[text]

    def _word(self, word: str) -> np.ndarray:
        """A random direction that depends on the word alone, the same on every machine."""
        if word not in self.words:
            generator = np.random.default_rng(zlib.crc32(word.encode()))
            self.words[word] = generator.choice(np.float32([-1, 1]),
                                                self.dim // 2) * np.float32((self.dim // 2) ** -0.5)
        return self.words[word]


class ModelEncoder:
    """Mean-pooled last hidden states of a Hugging Face encoder, of action and state apart."""

    def __init__(self, name_or_path: str, device: str = "cpu", batch: int = 64, max_tok: int = 512):
        from transformers import AutoModel, AutoTokenizer
        self.model = AutoModel.from_pretrained(name_or_path).to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        self.batch, self.max_tok, self.dim = batch, max_tok, 2 * self.model.config.hidden_size
        self.clear_caches()

    def clear_caches(self) -> None:
        self.texts: dict[str, np.ndarray] = {}

    def __call__(self, states: Sequence[str], actions: Sequence[str]) -> np.ndarray:
        """[N] states and actions -> unit vectors, float32 [N, dim]."""
        self._embed([text for text in {*states, *actions} if text not in self.texts])
        halves = [np.stack([self.texts[text] for text in texts]) for texts in (actions, states)]
        if len(self.texts) >= CACHED_TEXTS:
            self.texts.clear()
        return np.concatenate(halves, axis=1) * np.float32(0.5 ** 0.5)

    def _embed(self, texts: list[str]) -> None:
        import torch
        texts = sorted(texts,
                       key=lambda text: (len(text), text))      # a set has another order in each process
        for start in range(0, len(texts), self.batch):
            part = texts[start:start + self.batch]
            rows = self.tokenizer(part, return_tensors="pt", padding=True, truncation=True,
                                  max_length=self.max_tok)
            with torch.inference_mode():
                hidden_BTH = self.model(**rows.to(self.model.device)).last_hidden_state.float()
            mask_BT1 = rows["attention_mask"][..., None].float()
            mean_BH = torch.nn.functional.normalize((hidden_BTH
                                                     * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1),
                                                    dim=-1)
            self.texts.update(zip(part, mean_BH.cpu().numpy()))


def load_encoder(name: str, idf: dict[str, float] | None = None,
                 device: str = "cpu") -> WordEncoder | ModelEncoder:
    """"words", or a path or hub name of a Hugging Face encoder."""
    return WordEncoder(idf=idf) if name == "words" else ModelEncoder(name, device)
