"""Chats as token ids that only grow: any tokenizer's chat template, read once as three strings and its end
tokens.

    chat = chat_format(tokenizer, "You shop.")
    ids = prompt_ids(tokenizer, chat, page)                       # + the answer, with its end token
    ids += prompt_ids(tokenizer, chat, page, is_first=False)      # + the next answer ...

Nothing is ever rendered or tokenized twice. Left out on purpose: templates with tools or several system
turns.
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
    """The ids of our own text, such as the strings of a ChatFormat, whose special tokens count."""
    return list(_encode(tokenizer, text, False))


def encode_untrusted(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of text from outside (pages, tasks, answers). A special token written in it is spelled out, so
    that a page cannot end a turn."""
    return list(_encode(tokenizer, text, True))


@dataclass
class ChatFormat:
    """A chat as a growing string: open + user + ask + (answer with its end token) + close + user + ask …"""
    open: str
    ask: str
    close: str           # starts after the end token, which the model writes itself
    end_ids: list[int]   # what ends an answer; the first is the template's own, the one to teach


def _render(tokenizer: PreTrainedTokenizerBase, system: str) -> tuple[str, str]:
    """(a question, a question and its answer and the next question), by the template; without thinking where
    it knows that."""
    chat = [{"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": NEXT}]
    head = [{"role": "system", "content": system}] if system else []
    return tuple(tokenizer.apply_chat_template(head + turns, tokenize=False, add_generation_prompt=asks,
                                               enable_thinking=False,
                                               chat_template=TODAY + tokenizer.get_chat_template())
                 for turns, asks in ((chat[:1], True), (chat, False)))


def chat_format(tokenizer: PreTrainedTokenizerBase, system: str = "") -> ChatFormat:
    """The strings around the turns of a chat, found by rendering marker texts through the chat template once.

    A template that refuses or drops the system role gets the system text in front of the first user turn.
    Without a template the format is plain lines. A template that rewrites old turns (Qwen3 removes their
    thinking) is used as it renders a first turn: streams only grow. Raises ValueError when the template loses
    a user's or assistant's text, or when no end token is known.
    """
    before, end = system + "\n\n" if system else "", None
    if tokenizer.chat_template is None:
        opened, ask, close = before[:-1], "\n", "\n"
    else:
        asked, talked = _render(tokenizer, "")
        try:
            own = _render(tokenizer, system)
            if all(system.strip() in text.split(USER)[0] for text in own):
                before, (asked, talked) = "", own
        except TemplateError:
            pass
        if asked.count(USER) != 1 or talked.count(ANSWER) != 1 or talked.count(NEXT) != 1:
            raise ValueError(f"the chat template of {tokenizer.name_or_path!r} does not render each turn "
                             f"exactly once; got {talked!r}")
        opened, ask = asked.split(USER)
        opened, close = opened + before, talked.split(ANSWER)[1].split(NEXT)[0]
        for token in sorted(tokenizer.get_added_vocab(), key=len, reverse=True):  # one may begin another
            if close.lstrip().startswith(token):
                end, close = token, close.lstrip().removeprefix(token)
                break
    ends = [token for token in (end, tokenizer.eos_token) if token is not None]
    if not ends:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no eos token, and no special token ends "
                         "a turn of its template: set eos_token")
    return ChatFormat(opened, ask, close, list(dict.fromkeys(tokenizer.convert_tokens_to_ids(ends))))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, text: str,
               is_first: bool = True) -> list[int]:
    """The ids of a user turn that asks for an answer: the first of a chat, or one behind an answer."""
    before = encode(tokenizer, chat.open if is_first else chat.close)
    return before + encode_untrusted(tokenizer, text) + encode(tokenizer, chat.ask)


def answer_text(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, ids: list[int]) -> str:
    """The text of a sampled answer, without its end token."""
    return tokenizer.decode([i for i in ids if i not in chat.end_ids])
