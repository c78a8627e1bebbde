"""Text to token ids: a word tokenizer for tiny models, and chat templates as four strings.

`build_tokenizer` makes the tokenizer of the from-scratch models: one frequent word = one token, and every other text still comes back exactly.
`chat_format` reads any tokenizer's chat template once, so that token streams grow by concatenation and nothing is ever rendered or tokenized twice.
Left out on purpose: training of subword merges, and templates with tools or several system turns.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from jinja2.exceptions import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<unk>", "<ask>", "<end>"]
GLUED = "[],:'?=&+"  # always tokens of their own, so that `click[red]`, `color: red,`, `link 'red'`, `is it red?` and `q=red+hat` use the same token for red
# One "▁" is put after a line start, "[", an opening quote and inside the query of an address, and taken away again there: a word has one token wherever it
# stands. Both ways are unconditional on what follows (but a line end), so together they change no text.
OPENED = r"(?<=\A|\n|\[|▁'|=|&|[^▁\n]\+)"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content + '\n' }}"
    "{% elif message.role == 'user' %}{{ message.content + '<ask>' }}{% else %}{{ message.content + '<end>' }}{% endif %}{% endfor %}"
)


# What is one token besides a word, by kind of text. numbered: a word and the number after it ("drawer 3", ALFWorld's names), so that two names are compared by comparing
# two tokens. pages: a role and the quote that opens its name, the quote and the line's end, and the parts of addresses, dates and prices ("shopping /product /blue
# -lamp", "$12 .99"), so that an address never seen before is still made of words
PIECES = {"words": "", "numbered": r"▁[a-z]+▁\d{1,2}(?![^▁\n\[\],:;])|", "pages": r"▁[a-z]+▁'|'\n|"}
SEAM = r"/|%|-|\.\d\d(?!\d)|\.(?!\w)"              # where the words of "pages" end


def build_tokenizer(texts: Iterable[str], form: str = "words", max_words: int = 4000) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is the specials, 256 bytes, the printable ASCII characters and the `max_words` most frequent words of `texts`.

    `click[red]` is ▁click [ ▁red ], `belt $50 [1]` is ▁belt ▁$50 ▁[▁1]: punctuation has a glued and a spaced token, a word only one.
    `form`, one of PIECES, says what else is one token.
    Words outside the vocabulary, and words glued to `,`, `:` or `]`, are spelled with characters, other characters with bytes.
    Decoding is exact for any text without "▁" (U+2581, which returns as a space). The order of the vocabulary is by count, then by word.
    """
    normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁"), normalizers.Replace(Regex(OPENED + r"(?=[^\n])"), "▁")])
    letter = r"[^▁\n\[\],:'?=&+]"
    word = rf"▁?{letter}(?:(?!{SEAM}){letter})*" if form == "pages" else rf"▁?{letter}+"
    numbered = r"(?<!stop|\])" if form == "pages" else ""    # a line's number, " [3]", is one token; a number that is said or typed has that of the page that shows it
    pieces = pre_tokenizers.Split(Regex(PIECES[form] + rf"{numbered}▁\[▁\d+\]|\n|▁?[\[\],:'?=&+]|{word}|▁"), "isolated")
    counts, begins = Counter(), "▁/%-." if form == "pages" else "▁"
    for text in texts:
        counts.update(piece for piece, _ in pieces.pre_tokenize_str(normalizer.normalize_str(text)) if piece[0] in begins and piece.isprintable())
    for name, count in list(counts.items()) if form == "numbered" else ():
        counts.update({f"▁{word}": count for word in name[1:].split("▁")} if "▁" in name[1:] else {})          # a name not seen here is a word and a number
    characters = ["\n", "▁", *["'\n"] * (form == "pages")] + [chr(code) for code in range(33, 127)] + ["▁" + mark for mark in GLUED]
    words = sorted((word for word in counts if word not in characters), key=lambda word: (-counts[word], word))[:max_words]
    # Unigram maximises the summed score: a word beats its spelling, and the byte names lose even against their own spelling in a text.
    vocabulary = [(piece, -1000.0) for piece in SPECIALS + [f"<0x{byte:02X}>" for byte in range(256)]]
    vocabulary += [(piece, -10.0) for piece in characters] + [(word, -1.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=SPECIALS.index("<unk>"), byte_fallback=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pieces
    unopened = decoders.Replace(Regex(OPENED + "▁"), "")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), unopened, decoders.Replace("▁", " ")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>", additional_special_tokens=["<ask>"],
        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False, model_max_length=2048,
    )  # fmt: skip


def check_tokenizer(tokenizer_a: PreTrainedTokenizerBase, tokenizer_b: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the two vocabularies differ: ids of one would mean other words in a model made for the other."""
    vocab_a, vocab_b = tokenizer_a.get_vocab(), tokenizer_b.get_vocab()
    if vocab_a == vocab_b:
        return
    differ = sorted(token for token in vocab_a.keys() | vocab_b.keys() if vocab_a.get(token) != vocab_b.get(token))
    raise ValueError(
        f"the tokenizers differ: {len(vocab_a)} and {len(vocab_b)} tokens, {len(differ)} with another id or in one only (for example {differ[:5]}). "
        "Use the checkpoint's own tokenizer, or train the model again with this one."
    )


@lru_cache(maxsize=65536)
def _encode(tokenizer: PreTrainedTokenizerBase, text: str, untrusted: bool) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=untrusted)["input_ids"])


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of our own text, such as the strings of a ChatFormat, whose special tokens count; cached, and the list is the caller's own."""
    return list(_encode(tokenizer, text, False))


def encode_untrusted(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of text from outside (pages, tasks, answers): a special token written in it is spelled out, so that a page cannot end a turn."""
    return list(_encode(tokenizer, text, True))


@dataclass
class ChatFormat:
    """A chat as a growing string: open + user + ask + (sampled answer with its end token) + close + user + ask + ...

    `close` starts after the end token, which the model writes itself. `end_ids` are the tokens that end an answer.
    """

    open: str
    ask: str
    close: str
    end_ids: list[int]


USER, ANSWER, NEXT = "USERTEXTONE", "ANSWERTEXTONE", "USERTEXTTWO"


def _render(tokenizer: PreTrainedTokenizerBase, system: str, texts: list[str], ask: bool) -> str:
    """The template's text for alternating user and assistant turns; templates that know `enable_thinking` are asked for an answer without it."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask, enable_thinking=False)


def chat_format(tokenizer: PreTrainedTokenizerBase, system: str = "") -> ChatFormat:
    """The strings around the turns of a chat, found by rendering marker texts through the tokenizer's chat template once.

    A template that refuses or drops the system role gets the system text in front of the first user turn. Without a template the format is
    plain lines. A template that rewrites old turns (Qwen3 removes their thinking) is used as it renders a first turn: streams only grow.
    Raises ValueError when the template loses a user's or assistant's text, or when no end token is known.
    """
    if tokenizer.chat_template is None:
        return ChatFormat(system + "\n" if system else "", "\n", "\n", _end_ids(tokenizer, None))
    before = ""
    try:
        asked, talked = _render(tokenizer, system, [USER], True), _render(tokenizer, system, [USER, ANSWER, NEXT], False)
        kept = system.strip() in asked and system.strip() in talked.split(USER)[0]
    except TemplateError:
        kept = False
    if not kept:
        before = system + "\n\n"
        asked, talked = _render(tokenizer, "", [USER], True), _render(tokenizer, "", [USER, ANSWER, NEXT], False)
    if asked.count(USER) != 1 or talked.count(ANSWER) != 1 or talked.count(NEXT) != 1:
        raise ValueError(f"the chat template of {tokenizer.name_or_path!r} does not render each turn exactly once; got {talked!r}")
    opened, ask = asked.split(USER)
    between = talked.split(ANSWER)[1].split(NEXT)[0]
    end, close = _split_end(tokenizer, between)
    return ChatFormat(opened + before, ask, close, _end_ids(tokenizer, end))


def _split_end(tokenizer: PreTrainedTokenizerBase, between: str) -> tuple[str | None, str]:
    """The end-of-turn token between an answer and the next turn, if one stands first there, and the text after it."""
    for token in sorted(tokenizer.get_added_vocab(), key=len, reverse=True):  # the longest first: one may begin another
        if between.lstrip().startswith(token):
            return token, between.lstrip()[len(token):]  # fmt: skip
    return None, between


def _end_ids(tokenizer: PreTrainedTokenizerBase, end: str | None) -> list[int]:
    ids = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    if end is not None:
        ids.append(tokenizer.convert_tokens_to_ids(end))
    if not ids:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no eos token and no special token ends a turn of its template: set eos_token")
    return list(dict.fromkeys(ids))
