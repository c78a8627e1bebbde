"""Chats as token ids that only grow: any tokenizer's chat template, read once as the strings around turns.

    chat = chat_format(tokenizer, "You shop.")
    ids = chat.prompt_ids(page)                       # + the answer, with its end token
    ids += chat.prompt_ids(page, is_first=False)      # + the next answer ...

What was sampled is never tokenized again. A turn is tokenized in one piece with the strings around it:
tokenizers join characters over a seam. Left out on purpose: templates with tools or several system turns.
"""
from array import array
from dataclasses import dataclass
from functools import lru_cache

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

# In front of a template that writes the date: a prompt must not change over night.
TODAY = "{% macro strftime_now(form) %}26 Jul 2024{% endmacro %}"
# In front of a template that refuses, drops or moves the system text: it begins the first user turn.
FOLD = ("{% if messages[0].role == 'system' %}{% set messages = [{'role': 'user', 'content': "
        "messages[0].content + '\n\n' + messages[1].content}] + messages[2:] %}{% endif %}")
# In place of a missing template: plain lines.
PLAIN = ("{{ bos_token or '' }}{% for m in messages %}{{ m.content }}"
         "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}")
USER, ANSWER, NEXT = "USERTEXTONE", "ANSWERTEXTONE", "USERTEXTTWO"


@lru_cache(maxsize=8192)     # most repeats are near. An array needs 4 bytes an id
def _encode(tokenizer: PreTrainedTokenizerBase, text: str, untrusted: bool) -> array:
    return array("I", tokenizer(text, add_special_tokens=False, split_special_tokens=untrusted)["input_ids"])


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of our own text, whose special tokens count."""
    return list(_encode(tokenizer, text, False))


def encode_untrusted(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of text from outside. A special token in it is spelled out: a page cannot end a turn."""
    return list(_encode(tokenizer, text, True))


@dataclass
class ChatFormat:
    """A chat as a growing string: open + user + ask + lead + answer + close + user + ask + lead …"""
    tokenizer: PreTrainedTokenizerBase
    open: str
    ask: str
    lead: str                    # blanks that the model writes before its answer
    close: str                   # begins with the end token, which the model writes itself
    end_ids: list[int]           # what ends an answer; the first is the template's own, the one to teach
    strips: bool                 # the template takes blanks and line ends off a user's text
    special_ids: frozenset[int]
    template: str                # the template with all that was decided here, for a server

    def prompt_ids(self, text: str, is_first: bool = True) -> list[int]:
        """The ids of a user turn that asks for an answer: the first of a chat, or one behind an answer."""
        text = text.strip() if self.strips else text
        ids = self._encode_within(self.open if is_first else self.close, text, self.ask)
        return ids if is_first else ids[1:]      # without the end token, which the answer has

    def answer_ids(self, text: str) -> list[int]:
        """The ids of an answer to teach, with its end token."""
        asked, text = encode(self.tokenizer, self.ask), self.lead + text
        ids = self._encode_within(self.ask, text)
        ids = ids[len(asked):] if ids[:len(asked)] == asked else encode_untrusted(self.tokenizer, text)
        return ids + self.end_ids[:1]

    def answer_text(self, ids: list[int]) -> str:
        """The text of a sampled answer, without its end token."""
        return self.tokenizer.decode([i for i in ids if i not in self.end_ids])

    def _encode_within(self, before: str, text: str, after: str = "") -> list[int]:
        """The ids of before + text + after, read in one piece, unless `text` then brings special tokens."""
        head, whole, tail = (encode(self.tokenizer, part) for part in (before, before + text + after, after))
        special = lambda ids: [i for i in ids if i in self.special_ids]
        if special(whole) == special(head + tail):
            return whole
        return head + encode_untrusted(self.tokenizer, text) + tail


def _render(tokenizer: PreTrainedTokenizerBase, template: str, system: str,
            user: str = USER) -> tuple[str, str]:
    """(a question, a question and its answer and the next question)."""
    chat = [{"role": "user", "content": user}, {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": NEXT}]
    head = [{"role": "system", "content": system}] if system else []
    return tuple(tokenizer.apply_chat_template(head + turns, tokenize=False, add_generation_prompt=asks,
                                               chat_template=template)
                 for turns, asks in ((chat[:1], True), (chat, False)))


def _fixed_template(tokenizer: PreTrainedTokenizerBase, system: str, thinks: bool) -> str:
    """The tokenizer's template, its date and thinking fixed, and with FOLD where it needs that."""
    own = tokenizer.get_chat_template() if tokenizer.chat_template else PLAIN
    for fold in ("", FOLD):
        template = f"{TODAY}{{% set enable_thinking = {str(thinks).lower()} %}}{fold}{own}"
        try:
            asked, talked = _render(tokenizer, template, system)
        except (TemplateError, TypeError) as error:
            found = str(error)
            continue
        found = repr(talked)
        once = asked.count(USER) == talked.count(USER) == talked.count(ANSWER) == talked.count(NEXT) == 1
        if once and all(system.strip() in text.split(USER)[0] for text in (asked, talked)):
            return template
    raise ValueError(f"the chat template of {tokenizer.name_or_path!r} does not render user, assistant, user "
                     f"with each text exactly once; found {' '.join(found.split())[:300]}; set another "
                     "chat_template in the model's folder")


def chat_format(tokenizer: PreTrainedTokenizerBase, system: str = "", thinks: bool = False) -> ChatFormat:
    """The strings around the turns of a chat, found by rendering marker texts through the chat template.

    `thinks`: the model is to begin its answers with <think>; else a template that knows thinking is asked for
    none. A template that rewrites old turns (Qwen3 takes their thinking out) is used as it renders the last
    one. Raises ValueError for a template that loses a text, or when no end token is known.
    """
    template = _fixed_template(tokenizer, system, thinks)
    asked, talked = _render(tokenizer, template, system)
    opened, ask = asked.split(USER)
    if ask.rstrip().endswith("<think>"):         # a template that always thinks (DeepSeek-R1, QwQ)
        ask = ask[:ask.rindex("<think>")] + ("" if thinks else "<think>\n\n</think>\n\n")
    lead = talked.split(USER)[1].split(ANSWER)[0].removeprefix(ask)
    tail = talked.split(ANSWER)[1].split(NEXT)[0]
    own_end = max((token for token in tokenizer.get_added_vocab() if tail.lstrip().startswith(token)),
                  key=len, default=None)
    ends = [token for token in (own_end, tokenizer.eos_token) if token is not None]
    if not ends:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no eos token, and no special token ends "
                         "a turn of its template: set eos_token")
    spaced = _render(tokenizer, template, system, f"\n{USER}\n")[0]
    return ChatFormat(tokenizer, opened, ask, lead="" if lead.strip() else lead,
                      close=tail.lstrip() if own_end else ends[0] + tail,
                      end_ids=list(dict.fromkeys(tokenizer.convert_tokens_to_ids(ends))),
                      strips=f"\n{USER}\n" not in spaced, template=template,
                      special_ids=frozenset(i for i, token in tokenizer.added_tokens_decoder.items()
                                            if token.special))
