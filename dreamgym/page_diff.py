"""One compact form of a page: its difference to a page that the reader has before it.

    = state                the name of a known page; alone, it is that page unchanged
    - mug 1                a line to take out (the first such line at or after the place of the edit before)
    + nothing              a line to put in at that place; before any other edit, at the end of the page
    ~ chosen: red          a line with a key: it replaces the only line that begins with "chosen: "

    encode(page, {"state": known}) -> text;   decode(text, {"state": known}) == page

A page that is not close to any known one is written out. Small models copy long text badly and name lines
well.
"""
from collections.abc import Mapping
from difflib import SequenceMatcher

MARK = "= "


def encode(page: str, known: Mapping[str, str], keys: bool = False) -> str:
    """The page itself, or the form of it that says the fewest words. Another known page than the first is
    named only where that halves the words: which of several pages saves one word is chance, and no model can
    learn it. `keys`: says each line with a key, changed or not: a model need not tell whether it did."""
    cost = {page: _cost(page)} if not page.startswith(MARK) else {}
    for i, (name, text) in enumerate(known.items()):
        if text == page and not keys:
            return MARK + name
        written = "\n".join([MARK + name, *_edits(text.split("\n"), page.split("\n"), keys)])
        try:
            if decode(written, known) == page:
                cost[written] = _cost(written) * (2 if i else 1)
        except ValueError:       # edits that name lines have no form for this page
            pass
    return min(cost, key=cost.get, default=page)


def _cost(text: str) -> int:
    """Words, without the name of a known page and the marks of edits: else some small known pages would be
    written out."""
    if not text.startswith(MARK):
        return len(text.split())
    return sum(len(edit[len(MARK):].split()) for edit in text.split("\n")[1:])


def _edits(known: list[str], lines: list[str], keys: bool) -> list[str]:
    """The edits that make `lines` of `known`. Where all lines of a place keep their keys they are replaced. A
    new line comes with the line before it ("- a", "+ a", "+ new"), or with the first line ("- a", "+ new",
    "+ a"): a model can name a line that it reads, and hardly count which one it is."""
    edits: list[str] = []
    keyed = lambda place, line: _places(known, line) == [place]
    said = lambda place: keys and keyed(place, known[place])
    for what, a, b, c, d in SequenceMatcher(None, known, lines, autojunk=False).get_opcodes():
        if what == "equal":
            edits += [f"~ {known[i]}" for i in range(a, b) if said(i)]
            continue
        if b - a == d - c and all(keyed(a + i, lines[c + i]) for i in range(b - a)):
            edits += [f"~ {line}" for line in lines[c:d]]
            continue
        if what == "insert" and 0 < a < len(known) and not said(a - 1):
            a, c = a - 1, c - 1
        elif what == "insert" and a == 0:
            b, d = a + 1, d + 1
        edits += [f"- {line}" for line in known[a:b]] + [f"+ {line}" for line in lines[c:d]]
    return edits


def _places(lines: list[str], line: str) -> list[int]:
    """Where lines stand that have the key of `line`: what is before its first ": "."""
    key, colon, _ = line.partition(": ")
    return [i for i, other in enumerate(lines) if other.startswith(key + colon)] if colon else []


def decode(text: str, known: Mapping[str, str]) -> str:
    """The page that a text stands for. Raises ValueError for an unknown page, and for a line that is not
    there."""
    first, *edits = text.split("\n")
    if not first.startswith(MARK):
        return text
    if first[len(MARK):] not in known:
        raise ValueError(f"{first!r}: no such page; known are {', '.join(known)}")
    lines, place = known[first[len(MARK):]].split("\n"), None
    for edit in edits:
        sign, line = edit[:2].ljust(2), edit[2:]      # an answer's last blank is stripped
        if sign == "- ":
            if line not in lines[place or 0:]:
                raise ValueError(f"{edit!r}: the page has no such line after the edit before")
            place = lines.index(line, place or 0)
            del lines[place]
        elif sign == "~ ":
            places = _places(lines, line)
            if len(places) != 1:
                raise ValueError(f"{edit!r}: {len(places)} lines of the page begin so, expected one")
            lines[places[0]], place = line, places[0] + 1
        elif sign == "+ ":
            place = len(lines) if place is None else place
            lines.insert(place, line)
            place += 1
        else:
            raise ValueError(f"{edit!r}: expected a line that begins with '- ', '+ ' or '~ '")
    return "\n".join(lines)
