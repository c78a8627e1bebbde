"""phi(state, action), against slow loops."""
import zlib

import numpy as np

from dreamgym import tiny
from dreamgym.encoder import ModelEncoder, WordEncoder, load_encoder
from dreamgym.word_tokenizer import build_tokenizer

STATES = ["item red hat $9\nchosen: none", "item blue hat $9", "results page 1 of 2", "item red hat $9 hat"]
ACTIONS = ["click[red]", "click[buy now]", "search[hat]", "Click [RED]!"]


def slow_half(text: str, documents: list[str], dim: int) -> np.ndarray:
    """tf-idf bag of words, each word times a random direction of its own."""
    words = lambda t: "".join(c if c.isalnum() or c == "_" else " " for c in t.lower()).split()
    direction = lambda word: np.random.default_rng(zlib.crc32(word.encode())).choice([-1, 1], dim)
    counts = {w: sum(w in words(d) for d in documents) for d in documents for w in words(d)}
    count = lambda word: counts.get(word) or min(counts.values())
    total = sum(np.log(1 + len(documents) / count(word)) * direction(word) for word in words(text))
    return total / np.linalg.norm(total)


def test_words_against_a_loop():
    """Random directions that differ between processes, and a long page that drowns the action."""
    documents = STATES[:3] + ACTIONS[:2]
    encoder = WordEncoder(dim=64).fit(documents + documents[:2])  # a text that comes twice counts once
    found = encoder(STATES, ACTIONS)
    for state, action, vector in zip(STATES, ACTIONS, found):
        halves = [slow_half(text, documents, 32) for text in (action, state)]
        np.testing.assert_allclose(vector, np.concatenate(halves) * 0.5**0.5, atol=1e-5)
    assert found.dtype == np.float32
    assert np.isfinite(encoder(["", "***"], ["\n", ""])).all()


def test_caches_and_files_change_nothing(monkeypatch):
    """A resume that searches by another phi; cached weights from before `fit`; an order by hash."""
    encoder = WordEncoder()
    before = encoder(STATES, ACTIONS)
    fitted = encoder.fit(STATES + ACTIONS)(STATES, ACTIONS)
    assert not np.allclose(before, fitted) and list(encoder.idf) == sorted(encoder.idf)
    monkeypatch.setattr("dreamgym.encoder.CACHED_TEXTS", 2)
    again = load_encoder("words", encoder.idf)
    for _ in range(2):
        np.testing.assert_array_equal(again(STATES, ACTIONS), fitted)


def test_model_encoder(tmp_path):
    """Stops padding, neighbours or the order of texts from leaking into phi."""
    tokenizer = build_tokenizer(STATES + ACTIONS)
    model = tiny.create("scratch:8x1", tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    together = ModelEncoder(str(tmp_path), batch=3)(STATES + [""], ACTIONS + ["click[red]"])
    for state, action, vector in zip(STATES, ACTIONS, together):
        ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in (action, state)]
        slow = [model.model(i).last_hidden_state[0].mean(0).detach().numpy() for i in ids]
        slow = np.concatenate([half / np.linalg.norm(half) for half in slow]) * 0.5**0.5
        np.testing.assert_allclose(vector, slow, atol=1e-4)
    assert np.isfinite(together).all() and together.shape[1] == 16
