"""The word tokenizer of from-scratch models."""
import random

import numpy as np
import pytest
import torch

from dreamgym import tiny
from dreamgym.chat import encode, encode_untrusted
from dreamgym.logprobs import TrainSample
from dreamgym.tiny import WordCoder, create
from dreamgym.word_tokenizer import CODES, build_tokenizer, load_tokenizer

TEXTS = [
    "click[red]\ncolor: red blue x-large\nbelt $50.0 [1]\nluna search[slim jacket] and $3",
    "url: shop/product/blue-lamp\n[1] link 'Blue Lamp'\n[2] text 'price $12.99, sold 2024-05-29'\nmap/place/red-hat q=red+hat",
    "take mug 1 from drawer 3\nstop [3]\n= state\n= before 1\n= similar 1\n= earlier 1\n- chosen: none\n+ mug 1",
]


def tokens(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(encode(tokenizer, text))


@pytest.mark.parametrize("options", [{}, {"numbered_names": True}, {"coded_words": 0.5}])
def test_every_text_comes_back(options):
    tokenizer, rng = build_tokenizer(TEXTS, **options), random.Random(0)
    parts = ["red", "x", " ", "  ", "\n", *"[],:'?=&+-/%.$", "é", "☃", "\t", "\r\n", "\x00", "<0x41>", "\u2028",
             "<end>", " [3]", "= ", "- ", "+ ", "link '", "'\n", "drawer 3", "mug 77", "stop", "Gina", "gina",
             "555-8464", "$131.50", "<code 3>"]
    noise = ["".join(rng.choice(parts) for _ in range(rng.randrange(10))) for _ in range(4000)]
    for text in TEXTS + noise:
        assert tokenizer.decode(encode_untrusted(tokenizer, text)) == text, repr(text)


@pytest.mark.parametrize("text, expected", [
    ("click[red]", "▁click [ ▁red ]"),
    ("color: red, and", "▁color : ▁red , ▁and"),
    ("belt $50.0 [1]\nluna", "▁belt ▁$50.0 ▁[▁1] \n ▁luna"),
    ("url: map/product/red-lamp\n", "▁url : ▁map /product /red -lamp \n"),
    ("[1] link 'Blue Lamp'\n[2] text '$3.99'", "▁[▁1] ▁link▁' ▁Blue ▁Lamp '\n ▁[▁2] ▁text▁' ▁$3 .99 '"),
    ("q=red+Lamp", "▁q = ▁red + ▁Lamp"),
    ("stop [3]\nmug 3", "▁stop ▁[ ▁3 ] \n ▁mug ▁3"),  # said or typed: the token of a number on a page
    ("= state\n= before 1", "▁= ▁state \n ▁= ▁before ▁1"),
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


def test_unknown_words_have_codes():
    """A word with other codes in another place."""
    tokenizer = build_tokenizer(TEXTS, coded_words=0.5)
    pieces = tokens(tokenizer, "url: Gina/gina-Gina cost $131.00 q=Gina ['Gina'] (Gina)")
    assert pieces[:3] == ["▁url", ":", "▁"] and set(gina := pieces[3:5]) <= set(CODES)
    assert [pieces[i:i + 2] for i in range(len(pieces))].count(gina) == 4
    assert pieces[5] == "/" and pieces[6:8] != gina and set(pieces[6:8]) <= set(CODES)
    assert pieces[-7:] == ["▁", "(", *"Gina", ")"]      # spelled: the mark before it is another
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids([CODES[0], CODES[1]])) == "<code 0><code 1>"


def test_words_of_training_rows_get_codes(monkeypatch):
    """A word coded in one place alone, the same code in each row, codes for words that stand only in the
    answer, a lost token or mask."""
    monkeypatch.setattr(tiny, "COMMON_WORDS", 0)
    tokenizer = build_tokenizer(["url: shop/blue-lamp Petra paid $131 for the lamp\nanswer"], coded_words=1.0)
    coder = WordCoder(tokenizer)
    ids = encode(tokenizer, "Petra/blue $131\nPetra paid $131")
    sample = TrainSample(ids, [0] * 4 + [1] * (len(ids) - 4))
    rows = [coder.draw(sample, 99, np.random.default_rng(i)) for i in range(2)]
    pieces = [tokenizer.convert_ids_to_tokens(row.ids) for row in rows]
    for coded, row in zip(pieces, rows):
        assert coded[:3] == coded[11:14] and coded[0] == "▁" and coded[3] == "/" and coded[6:8] == ["▁", "$"]
        assert coded[6:10] == coded[15:19] and coded[10] == "\n" and coded[14] == "▁paid"
        assert row.mask == [0] * 11 + [1] * 8
    assert pieces[0] != pieces[1] and coder.draw(sample, 18, np.random.default_rng(0)) is sample
    tokenizer.coded_words = 0.5
    halves = [tokenizer.convert_ids_to_tokens(coder.draw(sample, 99, np.random.default_rng(i)).ids)
              for i in range(20)]
    assert {half.count("▁Petra") for half in halves} == {0, 2}
    tokenizer.coded_words = 0.0
    assert coder.draw(sample, 99, np.random.default_rng(1)) is sample


def test_vocabulary_is_deterministic_and_bounded():
    a, b = build_tokenizer(["b a a c"], max_words=2), build_tokenizer(["c a", "a b"], max_words=2)
    assert a.get_vocab() == b.get_vocab()
    assert tokens(a, "a b c") == ["▁a", "▁b", "▁", "c"]


@pytest.mark.parametrize("coded_words", [0.0, 0.2])
def test_tokenizer_survives_saving(tmp_path, coded_words):
    tokenizer = build_tokenizer(TEXTS, coded_words=coded_words)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    for name in ("eos_token", "pad_token", "chat_template"):
        assert getattr(loaded, name) == getattr(tokenizer, name) is not None
    for text in [*TEXTS, "gina"]:
        assert encode(loaded, text) == encode(tokenizer, text)


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
