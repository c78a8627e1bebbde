"""The compact form of a page: what is encoded comes back, and an edit that does not fit is refused."""
import random

import pytest

from dreamgym.page_diff import decode, encode

LINES = ["a", "b", "c", "a b", "", " ", "- a", "+ a", "= a", "= state", "- ", "~ a: x", "chosen: none", "chosen: red", "a: x", ": x", "[1] x", "é 中"]


def random_page(rng: random.Random) -> str:
    return "\n".join(rng.choice(LINES) for _ in range(rng.randint(1, 8)))


def mutated(page: str, rng: random.Random) -> str:
    """The page with one to three lines taken out, put in or repeated."""
    lines = page.split("\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines) + 1)
        lines[at:at + rng.randint(0, 2)] = [rng.choice(LINES) for _ in range(rng.randint(0, 2))]
    return "\n".join(lines)


def test_random_pages_come_back():
    """An edit at the wrong one of two equal lines, and pages that look like edits."""
    rng, short = random.Random(0), 0
    for _ in range(5000):
        known = {name: random_page(rng) for name in ("state", "similar 1")[:rng.randint(0, 2)]}
        page = mutated(rng.choice(list(known.values())),
                       rng) if known and rng.random() < 0.8 else random_page(rng)
        if page.startswith("= ") and page not in known.values():
            continue                                 # prompts.escape takes such pages out of the way
        text = encode(page, known, keys=rng.random() < 0.5)
        assert decode(text, known) == page, (page, known, text)
        short += text != page
    assert short > 300                               # the compact form is met


TOP, HAND = "top\nb c d e f g\nc", "red: salt\nblue: empty\nb c d e f g h i j\nhand: none"
AT, WORDS = "at: home\nb c d e f g h i j\nholding: nothing", "a b c d e f g h\ntepid\nlast: labelled it"
OLDER = "a b c d e f g h\ntepid\nlast: took"


@pytest.mark.parametrize("state, keys, page, text", [
    (TOP, False, "top\nb c d e f g\nc", "= state"),
    (TOP, False, "top\nb c d e f g\nred", "= state\n- c\n+ red"),
    (TOP, False, "top\nb c d e f g\nc\nmore", "= state\n+ more"),
    (TOP, False, "top\nnew\nb c d e f g\nc", "= state\n- top\n+ top\n+ new"),
    # the old line, which a small model must then copy, too; a changed key that is taken for a changed value
    (HAND, False, "red: salt\nblue: empty\nb c d e f g h i j\nhand: red", "= state\n~ hand: red"),
    (HAND, False, "red: empty\nblue: salt\nb c d e f g h i j\nhand: none",
     "= state\n~ red: empty\n~ blue: salt"),
    (HAND, False, "red: empty\nb: empty\nb c d e f g h i j\nhand: none",
     "= state\n- red: salt\n- blue: empty\n+ red: empty\n+ b: empty"),
    # a model that must tell whether a line with a key changed before it may leave it out
    (AT, True, "at: home\nb c d e f g h i j\nholding: cup", "= state\n~ at: home\n~ holding: cup"),
    (AT, True, "at: home\nnew\nb c d e f g h i j\nholding: cup",
     "= state\n~ at: home\n+ new\n~ holding: cup"),
    (AT, True, "at: shop\nb c d e f g h i j\nmore\nholding: cup",
     "= state\n~ at: shop\n- holding: nothing\n+ more\n+ holding: cup"),
    # an older page that saves the one word "it": which page is nearest is chance, and no model learnt it
    (WORDS, False, "a b c d e f g h\ncold\nlast: cooled",
     "= state\n- tepid\n- last: labelled it\n+ cold\n+ last: cooled"),
    (WORDS, False, "a b c d e f g h\ncold\nlast: took", "= before 1\n- tepid\n+ cold")])
def test_the_form(state, keys, page, text):
    """A form that drifts from the module's text, on which trained models rely."""
    known = {"state": state} | ({"before 1": OLDER} if state == WORDS else {})
    assert encode(page, known, keys=keys) == text and decode(text, known) == page


def test_a_small_known_page_is_named():
    """A name that is as long as the page: the page would be copied."""
    known = {"at shelf 1:": "at shelf 1:\nmug 1\nholding: nothing"}
    assert encode("at shelf 1:\nmug 1\nholding: cup 1", known, keys=True) == "= at shelf 1:\n~ holding: cup 1"
    assert encode("at shelf 2:\npan 1\nholding: cup 1", known, keys=True) == "at shelf 2:\npan 1\nholding: cup 1"


@pytest.mark.parametrize("text", [
    "= state\n~ c: x", "= state\n~ a: x", "= state\n~ b", "= state\n~ : x", "= nowhere", "= state\nplain line",
    "= state\n-a", "= state\n- z", "= state\n- b\n- a", "= state\n- a\n+ a\n- a", "= state\n", "= state\n= state"])
def test_edits_that_do_not_fit(text):
    """A line that is not there, taken out "successfully": a wrong answer that counts as a right one."""
    with pytest.raises(ValueError):
        decode(text, {"state": "a\nb\na: 1\na: 2\nc:1", "similar 1": "a"})
