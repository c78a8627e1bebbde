"""phi(state, action) of DreamGym, Eq. 4: what the replay buffer is searched by, and history selected.

    vectors_ND = load_encoder("words")(states, actions)        # unit vectors, float32

The cosine of two vectors is the mean of the cosine of the actions and that of the states, so a long page
cannot drown a short action. The paper does not name its encoder; the default is ours.
"""
from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import regex as re

WORD = re.compile(r"\w+")
CACHED_TEXTS = 100_000


class Encoder:
    """Half of a vector is the action's, half the state's; a subclass embeds single texts."""

    def __init__(self) -> None:
        self.texts: dict[str, np.ndarray] = {}

    def clear_caches(self) -> None:
        self.texts.clear()

    def __call__(self, states: Sequence[str], actions: Sequence[str]) -> np.ndarray:
        new = sorted({*states, *actions} - self.texts.keys(), key=lambda text: (len(text), text))
        self.texts.update(zip(new, self.embed(new)))
        halves = [np.stack([self.texts[text] for text in texts]) for texts in (actions, states)]
        if len(self.texts) >= CACHED_TEXTS:
            self.clear_caches()
        return np.concatenate(halves, axis=1) * np.float32(0.5 ** 0.5)


class WordEncoder(Encoder):
    """A random projection of tf-idf bags of words."""

    def __init__(self, dim: int = 256, idf: dict[str, float] | None = None):
        super().__init__()
        self.dim, self.idf = dim, idf or {}

    def fit(self, texts: Iterable[str]) -> WordEncoder:
        """Sets the weight of each word from the texts it occurs in: log(1 + N / count)."""
        bags = [set(WORD.findall(text.lower())) for text in set(texts)]
        counts = Counter(word for bag in bags for word in bag)
        self.idf = {word: float(np.log1p(len(bags) / count)) for word, count in sorted(counts.items())}
        self.clear_caches()
        return self

    def embed(self, texts: list[str]) -> list[np.ndarray]:
        rarest, found = max(self.idf.values(), default=1.0), []
        for text in texts:
            vector = np.zeros(self.dim // 2, np.float32)
            for word, count in Counter(WORD.findall(text.lower())).items():
                vector += count * self.idf.get(word, rarest) * direction(word, self.dim // 2)
            found.append(vector / max(float(np.linalg.norm(vector)), 1e-9))
        return found


@lru_cache(maxsize=CACHED_TEXTS)
def direction(word: str, dim: int) -> np.ndarray:
    """A random direction, the same on every machine."""
    signs = np.random.default_rng(zlib.crc32(word.encode())).choice(np.float32([-1, 1]), dim)
    return signs * np.float32(dim ** -0.5)


class ModelEncoder(Encoder):
    """Mean-pooled last hidden states of a Hugging Face encoder."""

    def __init__(self, name_or_path: str, device: str = "cpu", batch: int = 64, max_tok: int = 512):
        from transformers import AutoModel, AutoTokenizer
        super().__init__()
        self.model = AutoModel.from_pretrained(name_or_path).to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        self.batch, self.max_tok, self.dim = batch, max_tok, 2 * self.model.config.hidden_size

    def embed(self, texts: list[str]) -> list[np.ndarray]:
        import torch
        found = []
        for start in range(0, len(texts), self.batch):
            rows = self.tokenizer(texts[start:start + self.batch], return_tensors="pt", padding=True,
                                  truncation=True, max_length=self.max_tok).to(self.model.device)
            with torch.inference_mode():
                hidden_BTH = self.model(**rows).last_hidden_state.float()
            mask_BT1 = rows["attention_mask"][..., None].float()
            mean_BH = (hidden_BTH * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1)
            found += list(torch.nn.functional.normalize(mean_BH, dim=-1).cpu().numpy())
        return found


def load_encoder(name: str, idf: dict[str, float] | None = None, device: str = "cpu") -> Encoder:
    """"words", or a path or hub name of a Hugging Face encoder. Raises ValueError."""
    try:
        return WordEncoder(idf=idf) if name == "words" else ModelEncoder(name, device)
    except (OSError, ValueError) as error:
        raise ValueError(f"--encoder {name}: expected words, or an encoder of Hugging Face "
                         f"({str(error).splitlines()[0]})") from error
