"""The word tokenizer of from-scratch models.

    tokenizer = build_tokenizer(texts, coded_words=0.2)
"""
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from hashlib import blake2b
from itertools import groupby

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

CONTEXT = 2048
SPECIALS = ["<pad>", "<unk>", "<ask>", "<end>"]
CODES = [f"<code {i}>" for i in range(512)]   # two of them stand for a word
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content + '\n' }}"
    "{% elif message.role == 'user' %}{{ message.content + '<ask>' }}"
    "{% else %}{{ message.content + '<end>' }}{% endif %}{% endfor %}"
)

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
CODED = re.compile(r"([▁/%.-]?\$?)(\w{2,})", re.ASCII)   # the mark before a word, and the word
CHARACTERS = ["\n", "▁", "'\n", *map(chr, range(33, 127)), *("▁" + mark for mark in GLUED)]


def build_tokenizer(texts: Iterable[str], numbered_names: bool = False, max_words: int = 4000,
                    coded_words: float = 0.0) -> PreTrainedTokenizerFast:
    """Known words are the most frequent of `texts`. Unknown ones are spelled with characters, other
    characters with bytes; with `coded_words` > 0 unknown words are written as codes (WordTokenizer).

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
    vocabulary += [(code, -1000.0) for code in CODES if coded_words]
    vocabulary += [(piece, -10.0) for piece in CHARACTERS] + [(word, -1.0) for word in frequent]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=SPECIALS.index("<unk>"), byte_fallback=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pieces
    closing = decoders.Replace(Regex(OPENED + "▁"), "")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), closing, decoders.Replace("▁", " ")])
    kind = partial(WordTokenizer, coded_words=coded_words) if coded_words else PreTrainedTokenizerFast
    return kind(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>",
        additional_special_tokens=["<ask>"], chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT)


class WordTokenizer(PreTrainedTokenizerFast):
    """Writes a word that is not in its vocabulary as two of 512 codes, which its hash names. A small model
    learns to copy and compare two tokens, and never well to copy letters. Decoding knows the pairs of words
    that this process has read; a pair that the model makes up remains as it is. Of 262,144 pairs of words one
    shares its codes; the word read last is then decoded. `coded_words`: share of a row's rarer words that
    training codes, too."""

    def __init__(self, *args, coded_words: float, **kwargs):
        super().__init__(*args, coded_words=coded_words, **kwargs)
        self.coded_words = coded_words
        self.first_code = self.convert_tokens_to_ids(CODES[0])
        self.spelled: dict[tuple[int, int], list[int]] = {}      # pair of codes -> the word's own pieces

    def __call__(self, text: str, **options) -> BatchEncoding:
        encoding = super().__call__(text, **options)
        words = groupby(zip(encoding["input_ids"], encoding.word_ids()), key=lambda pair: pair[1])
        ids = [i for _, pairs in words for i in self._code([piece for piece, _ in pairs])]
        return BatchEncoding({"input_ids": ids})

    def _code(self, pieces: list[int]) -> list[int]:
        """The ids of a word, which has one piece where it is known."""
        match = CODED.fullmatch("".join(self.convert_ids_to_tokens(pieces))) if len(pieces) > 1 else None
        if not match:
            return pieces
        code = self.code(match[2])
        self.spelled[tuple(code)] = self.convert_tokens_to_ids(list(match[2]))
        return [*self.convert_tokens_to_ids(list(match[1])), *code]

    def code(self, word: str, salt: bytes = b"") -> list[int]:
        """The two codes of a word; others for another `salt` (at most 16 bytes)."""
        number = int.from_bytes(blake2b(word.encode(), digest_size=8, salt=salt).digest())
        first, second = divmod(number % len(CODES) ** 2, len(CODES))
        return [self.first_code + first, self.first_code + second]

    def decode(self, token_ids: list[int], **options) -> str:
        ids, i = [], 0
        while i < len(token_ids):
            word = self.spelled.get(tuple(token_ids[i:i + 2]))
            ids += word or token_ids[i:i + 1]
            i += 2 if word else 1
        return super().decode(ids, **options)


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    if "coded_words" not in tokenizer.init_kwargs:
        return tokenizer
    # transformers does not know our class. WordTokenizer.from_pretrained would add a token "<s>".
    return WordTokenizer(tokenizer_object=tokenizer.backend_tokenizer, **tokenizer.init_kwargs)


