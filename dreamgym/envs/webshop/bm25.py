"""Full-text search that ranks like Lucene's BM25 (k1 0.9, b 0.4) behind English text analysis, in NumPy.

`BM25Index(texts, ids).search(query, k)` gives document positions, best first. It is what WebShop's search box
is (pyserini's default searcher), so all its details count: Lucene's tokens, Porter's stemmer with its
author's later departures, document lengths rounded as Lucene stores them in one byte, float32 scores, ties by
document id. Left out on purpose: fields, phrases, deleting and adding documents.
"""

import math
import re
from array import array
from collections import Counter
from functools import lru_cache

import numpy as np
import regex

K1, B = np.float32(0.9), np.float32(0.4)
MAX_TOKEN_CHARS = 255  # Lucene's tokenizer cuts longer ones
BLOCK_DOCS = 16384  # documents inverted at a time while building: bounds the memory of the Python-side arrays
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
# The same rules for text that is all ASCII, in the faster standard module.
_ASCII_RUN = r"(?:[0-9]+(?:[,;.'][0-9]+)*|[A-Za-z]+(?:[:.'][A-Za-z]+)*)+"
_ASCII_TOKEN = re.compile(rf"_*{_ASCII_RUN}(?:_+{_ASCII_RUN})*_*")

# Porter's suffixes as "suffix>replacement", in the order they are tried.
_STEP2_TEXT = """ational>ate tional>tion enci>ence anci>ance izer>ize bli>ble alli>al entli>ent eli>e
    ousli>ous ization>ize ation>ate ator>ate alism>al iveness>ive fulness>ful ousness>ous aliti>al iviti>ive
    biliti>ble logi>log"""
_STEP3_TEXT = "icate>ic ative> alize>al iciti>ic ical>ic ful> ness>"
_STEP4_TEXT = """al> ance> ence> er> ic> able> ible> ant> ement> ment> ent> sion>s tion>t ou> ism> ate> iti>
    ous> ive> ize>"""
_STEP2, _STEP3, _STEP4 = (
    [pair.split(">") for pair in text.split()] for text in (_STEP2_TEXT, _STEP3_TEXT, _STEP4_TEXT)
)


def _shape(word):
    """One 'v' or 'c' a letter; y is a vowel only after a consonant. `shape.count('vc')` is Porter's measure
    m."""
    shape = ""
    for letter in word:
        shape += "v" if letter in "aeiou" or (letter == "y" and shape[-1:] == "c") else "c"
    return shape


def _ends_cvc(word):
    return _shape(word).endswith("cvc") and word[-1] not in "wxy"


def _swap_suffix(word, table, more_than):
    """Replace the first suffix of `table` that the word ends in, if the measure of what stands before it is
    above `more_than`."""
    for suffix, new in table:
        if word.endswith(suffix):
            if new and new in "st":  # step 4 drops 'ion' after s or t, which belong to what stands before it
                stem, new = word[:-3], ""
            else:
                stem = word[: -len(suffix)]
            return stem + new if _shape(stem).count("vc") > more_than else word
    return word


def _drop_ed_ing(word):
    if word.endswith("eed"):
        return word[:-1] if "vc" in _shape(word[:-3]) else word
    stem = word[:-2] if word.endswith("ed") else word[:-3] if word.endswith("ing") else None
    if stem is None or "v" not in _shape(stem):
        return word
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if len(stem) > 1 and stem[-1] == stem[-2] and _shape(stem)[-1] == "c":
        return stem if stem[-1] in "lsz" else stem[:-1]
    return stem + "e" if _shape(stem).count("vc") == 1 and _ends_cvc(stem) else stem


def porter_stem(word):
    """Porter's stem of a lower-case word (M. F. Porter, 1980), with the departures his own later code makes
    (bli, logi, words of 1 or 2 letters)."""
    if len(word.encode("utf-16-le")) <= 4:
        return word
    if word.endswith(("sses", "ies")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    word = _drop_ed_ing(word)
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    word = _swap_suffix(_swap_suffix(_swap_suffix(word, _STEP2, 0), _STEP3, 0), _STEP4, 1)
    if word.endswith("e"):
        measure = _shape(word[:-1]).count("vc")
        if measure > 1 or (measure == 1 and not _ends_cvc(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _shape(word).count("vc") > 1 else word


def words(text):
    """The tokens Lucene's StandardTokenizer finds in `text`, in order."""
    found = _ASCII_TOKEN.findall(text) if text.isascii() else _TOKEN.findall(text)
    if len(text) > MAX_TOKEN_CHARS and len(max(found, key=len, default="")) > MAX_TOKEN_CHARS:
        pieces = []
        for word in found:  # what is left of a long token is cut into tokens anew
            pieces += [word[:MAX_TOKEN_CHARS], *words(word[MAX_TOKEN_CHARS:])]
        return pieces
    return found


def _term_of(word):
    """The index term of one token: possessive dropped, lower case, stemmed; "" for a stop word."""
    if word[-2:-1] in ("'", "\u2019", "\uff07") and word[-1] in "sS":
        word = word[:-2]
    word = word.lower()
    return "" if word in STOP_WORDS else porter_stem(word)


@lru_cache(maxsize=1 << 18)
def _terms_of_piece(piece):
    return tuple(term for word in words(piece) if (term := _term_of(word)))


def analyze(text):
    """The index terms of `text`, in order, repeats kept."""
    # no token reaches across white space
    return [term for piece in text.split() for term in _terms_of_piece(piece)]


class BM25Index:
    """An inverted index over documents, term by term in flat arrays (about 6 bytes a posting): built once,
    read only, shared by all sessions.

    texts: one string a document, any iterable. ids: one ASCII id a document; equal scores are ordered by it.
    Scores are Lucene's BM25Similarity in float32: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), times tf / (tf +
    K1 (1 - B + B length / mean length)).
    """

    def __init__(self, texts, ids):
        self._term_numbers = {}
        blocks, lengths = self._invert(texts)
        self._merge(blocks)
        self._id_rank = np.empty(len(ids), np.int32)
        by_id = np.argsort(np.array(ids, dtype="S"), kind="stable")
        self._id_rank[by_id] = np.arange(len(ids), dtype=np.int32)
        if len(lengths) != len(ids):
            raise ValueError(f"{len(lengths)} texts came with {len(ids)} ids: give one id for each text")
        self._n_docs = int(np.count_nonzero(lengths))  # Lucene counts documents that have a term
        mean_length = np.float32(lengths.sum() / max(self._n_docs, 1))
        stored = _one_byte_lengths(lengths).astype(np.float32)
        # An index without any term has no mean length, and no posting to use it.
        with np.errstate(divide="ignore", invalid="ignore"):
            self._inverse_norm = np.float32(1) / (K1 * ((np.float32(1) - B) + B * stored / mean_length))

    def _invert(self, texts):
        """Blocks of (terms, documents, frequencies) sorted by term then document, and all document lengths in
        terms."""
        blocks, lengths, terms, docs, freqs = [], array("i"), array("i"), array("i"), array("H")
        numbers = self._term_numbers
        for doc, text in enumerate(texts):
            counts = Counter(analyze(text))
            lengths.append(counts.total())
            terms.extend([numbers.setdefault(term, len(numbers)) for term in counts])
            freqs.extend(min(n, 65535) for n in counts.values())
            docs.extend([doc] * len(counts))
            if doc % BLOCK_DOCS == BLOCK_DOCS - 1:
                blocks.append(_sorted_block(terms, docs, freqs))
                terms, docs, freqs = array("i"), array("i"), array("H")
        blocks.append(_sorted_block(terms, docs, freqs))
        return blocks, np.array(lengths, np.int64)

    def _merge(self, blocks):
        """Lay the blocks' postings out term after term: CSR arrays without sorting everything at once."""
        n_terms = len(self._term_numbers)
        doc_counts = np.zeros(n_terms, np.int64)
        for terms, _, _ in blocks:
            doc_counts += np.bincount(terms, minlength=n_terms)
        self._starts = np.concatenate([[0], np.cumsum(doc_counts)])
        self._docs, self._freqs = np.empty(self._starts[-1], np.int32), np.empty(self._starts[-1], np.uint16)
        free = self._starts[:-1].copy()
        blocks.reverse()
        while blocks:
            terms, docs, freqs = blocks.pop()
            _, first, counts = np.unique(terms, return_index=True, return_counts=True)
            place = free[terms] + np.arange(len(terms)) - np.repeat(first, counts)
            self._docs[place], self._freqs[place] = docs, freqs
            free += np.bincount(terms, minlength=n_terms)

    def search(self, query, k):
        """Positions of the at most `k` best documents for `query`, best first; a repeated query term counts
        that many times."""
        totals = np.zeros(len(self._id_rank), np.float64)  # Lucene, too, sums its float32 parts in double
        for term, boost in Counter(analyze(query)).items():
            number = self._term_numbers.get(term)
            if number is None:
                continue
            postings = slice(self._starts[number], self._starts[number + 1])
            docs = self._docs[postings]
            n = len(docs)
            weight = np.float32(boost) * np.float32(math.log(1 + (self._n_docs - n + 0.5) / (n + 0.5)))
            freqs = self._freqs[postings].astype(np.float32)
            totals[docs] += weight - weight / (np.float32(1) + freqs * self._inverse_norm[docs])
        scores = totals.astype(np.float32)
        hits = np.flatnonzero(scores)
        if len(hits) > k:
            hits = hits[scores[hits] >= np.partition(scores[hits], -k)[-k]]
        return hits[np.lexsort((self._id_rank[hits], -scores[hits]))[:k]]


def _sorted_block(terms, docs, freqs):
    terms = np.array(terms, np.int32)
    order = np.argsort(terms, kind="stable")
    return terms[order], np.array(docs, np.int32)[order], np.array(freqs, np.uint16)[order]


def _one_byte_lengths(lengths):
    """Document lengths as Lucene reads them back from one byte: exact below 24, above that 24 plus a number
    cut to its 4 highest bits."""
    excess = np.maximum(lengths - 24, 0)
    shift = np.maximum(np.frexp(excess.astype(np.float64))[1] - 4, 0)
    return np.minimum(lengths, 24) + ((excess >> shift) << shift)
