"""Chats as token ids that only grow: any tokenizer's chat template, read once as three strings and its end
tokens.

    fmt = chat_format(tokenizer, "You shop.")
    ids = encode(tokenizer, fmt.open) + encode_untrusted(tokenizer, page) + encode(tokenizer, fmt.ask)

Streams grow by concatenation: nothing is ever rendered or tokenized twice. Left out on purpose: templates
with tools or several system turns.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

# In front of a template that writes the date: a prompt must not change over night.
TODAY = "{% macro strftime_now(form) %}26 Jul 2024{% endmacro %}"
USER, ANSWER, NEXT = "USERTEXTONE", "ANSWERTEXTONE", "USERTEXTTWO"


@lru_cache(maxsize=65536)
def _encode(tokenizer: PreTrainedTokenizerBase, text: str, untrusted: bool) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=untrusted)["input_ids"])


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of our own text, such as the strings of a ChatFormat, whose special tokens count. Cached."""
    return list(_encode(tokenizer, text, False))


def encode_untrusted(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of text from outside (pages, tasks, answers). A special token written in it is spelled out, so
    that a page cannot end a turn. Cached."""
    return list(_encode(tokenizer, text, True))


@dataclass
class ChatFormat:
    """A chat as a growing string: open + user + ask + (answer with its end token) + close + user + ask + ...

    `close` starts after the end token, which the model writes itself. `end_ids` are the tokens that end an
    answer; the first is the template's own, the one to teach.
    """
    open: str
    ask: str
    close: str
    end_ids: list[int]


def _render(tokenizer: PreTrainedTokenizerBase, system: str, texts: list[str], ask: bool) -> str:
    """The template's text for alternating user and assistant turns, without thinking where the template knows
    it."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask,
                                         enable_thinking=False,
                                         chat_template=TODAY + tokenizer.get_chat_template())


def chat_format(tokenizer: PreTrainedTokenizerBase, system: str = "") -> ChatFormat:
    """The strings around the turns of a chat, found by rendering marker texts through the chat template once.

    A template that refuses or drops the system role gets the system text in front of the first user turn.
    Without a template the format is plain lines. A template that rewrites old turns (Qwen3 removes their
    thinking) is used as it renders a first turn: streams only grow. Raises ValueError when the template loses
    a user's or assistant's text, or when no end token is known.
    """
    if tokenizer.chat_template is None:
        return ChatFormat(system + "\n" if system else "", "\n", "\n", _end_ids(tokenizer, None))
    before = ""
    try:
        asked = _render(tokenizer, system, [USER], True)
        talked = _render(tokenizer, system, [USER, ANSWER, NEXT], False)
        kept = system.strip() in asked and system.strip() in talked.split(USER)[0]
    except TemplateError:
        kept = False
    if not kept:
        before = system + "\n\n"
        asked = _render(tokenizer, "", [USER], True)
        talked = _render(tokenizer, "", [USER, ANSWER, NEXT], False)
    if asked.count(USER) != 1 or talked.count(ANSWER) != 1 or talked.count(NEXT) != 1:
        raise ValueError(f"the chat template of {tokenizer.name_or_path!r} does not render each turn exactly "
                         f"once; got {talked!r}")
    opened, ask = asked.split(USER)
    end, close = _split_end(tokenizer, talked.split(ANSWER)[1].split(NEXT)[0])
    return ChatFormat(opened + before, ask, close, _end_ids(tokenizer, end))


def _split_end(tokenizer: PreTrainedTokenizerBase, between: str) -> tuple[str | None, str]:
    """The end-of-turn token between an answer and the next turn, if one stands first there, and the text
    after it."""
    for token in sorted(tokenizer.get_added_vocab(), key=len, reverse=True):  # one may begin another
        if between.lstrip().startswith(token):
            return token, between.lstrip().removeprefix(token)
    return None, between


def _end_ids(tokenizer: PreTrainedTokenizerBase, end: str | None) -> list[int]:
    ids = [tokenizer.convert_tokens_to_ids(end)] if end is not None else []
    ids += [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    if not ids:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no eos token, and no special token ends "
                         "a turn of its template: set eos_token")
    return list(dict.fromkeys(ids))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, text: str,
               is_first: bool = True) -> list[int]:
    """The ids of a user turn that asks for an answer: `text` from outside, in the chat's own frame; the first
    turn of a conversation, or one behind an answer."""
    before = encode(tokenizer, chat.open if is_first else chat.close)
    return before + encode_untrusted(tokenizer, text) + encode(tokenizer, chat.ask)


def answer_text(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, ids: list[int]) -> str:
    """The text of a sampled answer, without its end token."""
    return tokenizer.decode([i for i in ids if i not in chat.end_ids])
