"""The word tokenizer of from-scratch models."""
import random

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from dreamgym import tiny
from dreamgym.chat import encode, encode_untrusted
from dreamgym.logprobs import TrainSample
from dreamgym.tiny import Speller, build_tokenizer, check_tokenizer, create

TEXTS = [
    "click[red]\ncolor: red blue x-large\nbelt $50.0 [1]\nluna search[slim jacket] and $3",
    "url: shop/product/blue-lamp\n[1] link 'Blue Lamp'\n[2] text 'price $12.99, sold 2024-05-29'\nmap/place/red-hat q=red+hat",
    "take mug 1 from drawer 3\nstop [3]\n= state\n= before 1\n= similar 1\n= earlier 1\n- chosen: none\n+ mug 1",
]


def tokens(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(encode(tokenizer, text))


@pytest.mark.parametrize("numbered_names", [False, True])
def test_every_text_comes_back(numbered_names):
    tokenizer, rng = build_tokenizer(TEXTS, numbered_names), random.Random(0)
    parts = ["red", "x", " ", "  ", "\n", *"[],:'?=&+-/%.$", "é", "☃", "\t", "\r\n", "\x00", "<0x41>", "\u2028",
             "<end>", " [3]", "= ", "- ", "+ ", "link '", "'\n", "drawer 3", "mug 77", "stop"]
    noise = ["".join(rng.choice(parts) for _ in range(rng.randrange(10))) for _ in range(4000)]
    for text in TEXTS + noise:
        assert tokenizer.decode(encode_untrusted(tokenizer, text)) == text, repr(text)


@pytest.mark.parametrize("text, expected", [
    ("click[red]", "▁click [ ▁red ]"),
    ("color: red, and", "▁color : ▁red , ▁and"),
    ("belt $50.0 [1]\nluna", "▁belt ▁$50.0 ▁[▁1] \n ▁luna"),
    ("url: map/product/red-lamp\n", "▁url : ▁map /product /red -lamp \n"),
    ("[1] link 'Blue Lamp'\n[2] text '$3.99'", "▁[▁1] ▁link▁' ▁Blue ▁Lamp '\n ▁[▁2] ▁text▁' ▁$3 .99 '"),
    ("sold 2024-05-29", "▁sold ▁2024 -05 -29"),
    ("q=red+Lamp", "▁q = ▁red + ▁Lamp"),
    ("stop [3]\nmug 3", "▁stop ▁[ ▁3 ] \n ▁mug ▁3"),  # said or typed: the token of a number on a page
    ("= state\n= before 1", "▁= ▁state \n ▁= ▁before ▁1"),
    ("= similar 1\n= earlier 1", "▁= ▁similar ▁1 \n ▁= ▁earlier ▁1"),
    ("- chosen: none\n+ [1] red", "▁- ▁chosen : ▁none \n ▁+ ▁[▁1] ▁red"),
])
def test_one_word_is_one_token(text, expected):
    assert tokens(build_tokenizer(TEXTS), text) == expected.split(" ")


def test_numbered_names_are_one_token():
    """Names that are compared word by word; a name not seen before is a word and a number."""
    tokenizer = build_tokenizer([*TEXTS, "at drawer 3: mug 1, pen 2\nmug 12"], numbered_names=True)
    assert tokens(tokenizer, "take mug 1 from drawer 3") == "▁take ▁mug▁1 ▁from ▁drawer▁3".split()
    assert tokens(tokenizer, "drawer 3: mug 12, pen 2\n- mug 1") == (
        "▁drawer▁3|:|▁mug▁12|,|▁pen▁2|\n|▁-|▁mug▁1".split("|"))
    assert tokens(tokenizer, "pen 12") == ["▁pen", "▁12"]


def test_spelled_words_look_like_unknown_ones(monkeypatch):
    """Pieces that the tokenizer would never write, a word spelled in one place alone, a lost token or mask."""
    monkeypatch.setattr(tiny, "COMMON_WORDS", 0)
    text = "url: shop/product/blue-lamp\nname=Petra+lamps Petra cost $131.00"
    tokenizer = build_tokenizer([text, "Pet $13"])
    ids, speller = encode(tokenizer, text), Speller(tokenizer)
    sample = TrainSample(ids, [0] * 5 + [1] * (len(ids) - 5))
    spelled = speller.draw(sample, 1.0, np.random.default_rng(0))
    unknown = tokens(build_tokenizer(["Pet $13"]), text)
    assert tokenizer.convert_ids_to_tokens(spelled.ids) == unknown and "r" in unknown
    start = unknown.index("-")          # of the first trained word
    assert spelled.mask == [0] * start + [1] * (len(unknown) - start)
    halves = [speller.draw(sample, 0.5, np.random.default_rng(i)) for i in range(20)]
    counts = {tokenizer.convert_ids_to_tokens(half.ids).count("▁Petra") for half in halves}
    assert counts == {0, 2} and {tokenizer.decode(half.ids) for half in halves} == {text}
    assert speller.draw(sample, 0.0, np.random.default_rng(1)) is sample


def test_vocabulary_is_deterministic_and_bounded():
    a, b = build_tokenizer(["b a a c"], max_words=2), build_tokenizer(["c a", "a b"], max_words=2)
    assert a.get_vocab() == b.get_vocab()
    assert tokens(a, "a b c") == ["▁a", "▁b", "▁", "c"]


def test_tokenizer_survives_saving(tmp_path):
    tokenizer = build_tokenizer(TEXTS)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    check_tokenizer(tokenizer, loaded)
    for name in ("eos_token", "pad_token", "chat_template"):
        assert getattr(loaded, name) == getattr(tokenizer, name) is not None
    for text in TEXTS:
        assert encode(loaded, text) == encode(tokenizer, text)
    with pytest.raises(ValueError, match="tokenizers differ"):
        check_tokenizer(tokenizer, build_tokenizer(["other words"]))


def test_create():
    """Weights that depend on random numbers drawn before."""
    tokenizer, state = build_tokenizer(TEXTS), torch.get_rng_state()
    a = create("scratch:64x3", tokenizer, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(5)
    b, c = create("scratch:64x3", tokenizer, seed=3), create("scratch:64x3", tokenizer, seed=4)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert 170_000 < sum(p.numel() for p in a.parameters()) - 64 * len(tokenizer) < 190_000
    for spec in ("scratch:64", "scratch:63x3", "scratch:64x0", "64x3"):
        with pytest.raises(ValueError, match="scratch:HIDDENxLAYERS"):
            create(spec, tokenizer)
