"""Full-text search that ranks like Lucene's BM25 (k1 0.9, b 0.4) behind English text analysis, in NumPy.

WebShop's search box is pyserini's default searcher, so its details count: Lucene's tokens, Porter's stemmer,
document lengths rounded to one byte, float32 scores, ties by document id.
"""
import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import regex

K1, B = np.float32(0.9), np.float32(0.4)
MAX_TOKEN_CHARS = 255                            # Lucene's tokenizer cuts longer ones
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these "
    "they this to was will with".split()
)

# Word rules of Unicode's UAX #29 and emoji tokens as Lucene 9's StandardTokenizer cuts them (its character
# data are Unicode 12's, so symbols of many kinds are tokens); checked against it on every character to
# U+1FFFF. Left out: the quotation rules for Hebrew.
_PICTOGRAPH = (
    "\u203C\u2049\u2194-\u2199\u21A9\u21AA\u231A\u231B\u2328\u2388\u23CF\u23E9-\u23F3\u23F8-\u23FA\u25AA"
    "\u25AB\u25B6\u25C0\u25FB-\u25FE\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2714"
    "\u2716\u271D\u2721\u2728\u2733\u2734\u2744\u2747\u274C\u274E\u2753-\u2755\u2757\u2763-\u2767"
    "\u2795-\u2797\u27A1\u27B0\u27BF\u2934\u2935\u2B05-\u2B07\u2B1B\u2B1C\u2B50\u2B55\u3297\u3299©®™〰〽"
    "\U0001F000-\U0001F0FF\U0001F10D-\U0001F10F\U0001F12F\U0001F16C-\U0001F16F\U0001F18E"
    "\U0001F191-\U0001F19A\U0001F1AD-\U0001F1E5\U0001F201-\U0001F20F\U0001F21A\U0001F22F"
    "\U0001F232-\U0001F23A\U0001F23C-\U0001F23F\U0001F249-\U0001F53D\U0001F546-\U0001F64F"
    "\U0001F680-\U0001F6FF\U0001F774-\U0001F77F\U0001F7D5-\U0001F7FF\U0001F80C-\U0001F80F"
    "\U0001F848-\U0001F84F\U0001F85A-\U0001F85F\U0001F888-\U0001F88F\U0001F8AE-\U0001F8FF"
    "\U0001F90C-\U0001F93A\U0001F93C-\U0001F945\U0001F947-\U0001FBEF\U0001FBFA-\U0001FFFD"
)
_EXT = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*"
_LETTERS = rf"(?:[[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]--[¸˥-˫]]{_EXT})+"
_DIGITS = rf"(?:\p{{WB=Numeric}}{_EXT})+"
_QUOTE = r"\p{WB=MidNumLet}\p{WB=Single_Quote}"
_RUN = (
    rf"(?:(?:\p{{WB=Katakana}}{_EXT})+"
    rf"|(?:{_DIGITS}(?:[\p{{WB=MidNum}}{_QUOTE}]{_EXT}{_DIGITS})*"
    rf"|{_LETTERS}(?:[\p{{WB=MidLetter}}{_QUOTE}]{_EXT}{_LETTERS})*)+)"
)
_JOIN = rf"(?:\p{{WB=ExtendNumLet}}{_EXT})"
_EMOJI = rf"(?:[{_PICTOGRAPH}]|[#*0-9]\uFE0F)\uFE0F?[\U0001F3FB-\U0001F3FF]?\u20E3?[\U000E0020-\U000E007F]*"
_TOKEN = regex.compile(
    rf"{_JOIN}*{_RUN}(?:{_JOIN}+{_RUN})*{_JOIN}*|{_EMOJI}(?:\u200D{_EMOJI})*|[\U0001F1E6-\U0001F1FF]{{2}}"
    rf"|(?:\p{{LB=Complex_Context}}{_EXT})+|\p{{Script=Han}}{_EXT}|\p{{Script=Hiragana}}{_EXT}",
    regex.V1,
)

# Porter's suffixes as "suffix>replacement", and the measure that what stands before them must exceed.
_STEPS = (
    ("""ational>ate tional>tion enci>ence anci>ance izer>ize bli>ble alli>al entli>ent eli>e ousli>ous
     ization>ize ation>ate ator>ate alism>al iveness>ive fulness>ful ousness>ous aliti>al iviti>ive biliti>ble
     logi>log""", 0),
    ("icate>ic ative> alize>al iciti>ic ical>ic ful> ness>", 0),
    ("""al> ance> ence> er> ic> able> ible> ant> ement> ment> ent> (?<=[st])ion> ou> ism> ate> iti> ous> ive>
     ize>""", 1),
)


def _suffix_rule(text: str, more_than: int) -> tuple[re.Pattern, dict[str, str], int]:
    table = dict(pair.split(">") for pair in text.split())
    return re.compile(f"(?:{'|'.join(table)})$"), table, more_than


_SUFFIX_RULES = [_suffix_rule(*step) for step in _STEPS]


def _shape(word: str) -> str:
    """One 'v' or 'c' a letter; y is a vowel only after a consonant. `count("vc")` is Porter's measure."""
    shape = ""
    for letter in word:
        shape += "v" if letter in "aeiou" or (letter == "y" and shape[-1:] == "c") else "c"
    return shape


def _ends_cvc(word: str) -> bool:
    return _shape(word).endswith("cvc") and word[-1] not in "wxy"


def _drop_ed_ing(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if "vc" in _shape(word[:-3]) else word
    stem = re.sub("(?:ed|ing)$", "", word)
    if stem == word or "v" not in _shape(stem):
        return word
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if stem[-1] == stem[-2:-1] and _shape(stem)[-1] == "c":
        return stem if stem[-1] in "lsz" else stem[:-1]
    return stem + "e" if _shape(stem).count("vc") == 1 and _ends_cvc(stem) else stem


def porter_stem(word: str) -> str:
    """Porter's stem of a lower-case word (1980), with the departures of his own later code (bli, logi, words
    of 1 or 2 letters)."""
    if len(word.encode("utf-16-le")) <= 4:
        return word
    if word.endswith(("sses", "ies")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    word = _drop_ed_ing(word)
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    for suffixes, replacements, more_than in _SUFFIX_RULES:
        match = suffixes.search(word)
        if match and _shape(word[:match.start()]).count("vc") > more_than:
            word = word[:match.start()] + replacements.get(match[0], "")
    if word.endswith("e"):
        measure = _shape(word[:-1]).count("vc")
        if measure > 1 or (measure == 1 and not _ends_cvc(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _shape(word).count("vc") > 1 else word


def words(text: str) -> list[str]:
    """The tokens that Lucene's StandardTokenizer finds, in order; what is left of a long one is cut anew."""
    found = []
    for word in _TOKEN.findall(text):
        rest = word[MAX_TOKEN_CHARS:]
        found += [word[:MAX_TOKEN_CHARS], *words(rest)] if rest else [word]
    return found


@lru_cache(maxsize=1 << 18)
def _terms_of_piece(piece: str) -> list[str]:
    """Index terms: possessives dropped, lower case, no stop words, stemmed."""
    lower = [re.sub("['\u2019\uff07][sS]$", "", word).lower() for word in words(piece)]
    return [porter_stem(word) for word in lower if word not in STOP_WORDS]


def analyze(text: str) -> list[str]:
    """The index terms of `text`, in order, repeats kept."""
    return [term for piece in text.split() for term in _terms_of_piece(piece)]   # no token holds white space


class BM25Index:
    """An inverted index. ids: one ASCII id a document; equal scores are ordered by it. Scores are Lucene's
    BM25Similarity: ln(1 + (N - n + 0.5) / (n + 0.5)) tf / (tf + K1 (1 - B + B length / mean length))."""

    def __init__(self, texts: Iterable[str], ids: list[str]):
        self._postings = defaultdict(lambda: array("i"))       # term -> document, frequency, document, ...
        lengths = []
        for doc, text in enumerate(texts):
            counts = Counter(analyze(text))
            lengths.append(counts.total())
            for term, count in counts.items():
                self._postings[term].extend((doc, count))
        lengths = np.array(lengths, np.int64)
        self._id_rank = np.argsort(np.argsort(np.array(ids, dtype="S"), kind="stable"))
        self._n_docs = int(np.count_nonzero(lengths))          # Lucene counts documents that have a term
        mean_length = np.float32(lengths.sum() / max(self._n_docs, 1) or 1)
        stored = one_byte_lengths(lengths).astype(np.float32)
        self._inverse_norm = np.float32(1) / (K1 * ((np.float32(1) - B) + B * stored / mean_length))

    def search(self, query: str, k: int) -> np.ndarray:
        """Positions of the at most `k` best documents, best first; a repeated query term counts so often."""
        totals = np.zeros(len(self._id_rank), np.float64)      # Lucene, too, sums its float32 parts in double
        for term, boost in Counter(analyze(query)).items():
            docs, freqs = np.array(self._postings.get(term, ()), np.int32).reshape(-1, 2).T
            n = len(docs)
            weight = np.float32(boost) * np.float32(math.log(1 + (self._n_docs - n + 0.5) / (n + 0.5)))
            freqs = freqs.astype(np.float32)
            totals[docs] += weight - weight / (np.float32(1) + freqs * self._inverse_norm[docs])
        scores = totals.astype(np.float32)
        hits = np.flatnonzero(scores)
        if len(hits) > k:
            hits = hits[scores[hits] >= np.partition(scores[hits], -k)[-k]]
        return hits[np.lexsort((self._id_rank[hits], -scores[hits]))[:k]]


def one_byte_lengths(lengths: np.ndarray) -> np.ndarray:
    """Document lengths as Lucene reads them back: exact below 24, then 24 plus a number cut to 4 bits."""
    excess = np.maximum(lengths - 24, 0)
    shift = np.maximum(np.frexp(excess.astype(np.float64))[1] - 4, 0)
    return np.minimum(lengths, 24) + ((excess >> shift) << shift)
