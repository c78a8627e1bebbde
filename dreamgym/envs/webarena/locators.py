"""Locators of the own sites' tasks without a browser: `query` reads document.querySelector('.row
a').outerText, .value and .checked. What is not understood is refused, never guessed."""
import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import lxml.html
from lxml.cssselect import CSSSelector

from dreamgym.envs.webarena.ax_tree_sources import QUOTED, value_of

Element = lxml.html.HtmlElement
_LOCATOR = re.compile(rf"document\.querySelector\(({QUOTED})\)\.(outerText|value|checked);?\s*")
_BLOCKS = frozenset("aside div form h1 h2 h3 h4 h5 h6 header li main nav ol option p section ul".split())
_HIDDEN = frozenset("script style head template noscript textarea".split())
_NO_TEXT = frozenset("select ul ol".split())  # blanks between what is inside do not show


class NotSupported(Exception):
    """Something that the back end or the tables here cannot evaluate; the part is not judged, with this
    message as reason."""


def query(html: str, js: str, held: Mapping[str, Any] = {}) -> str | None:  # noqa: B006
    """What a locator gives on a page without scripts, None where it would throw. `held`: what controls hold
    by now (direct.Tab.held), by their path. Raises NotSupported."""
    match = _LOCATOR.fullmatch(js)
    if not match:
        raise NotSupported(f"locator {js!r:.80} is not understood without a browser")
    root = lxml.html.document_fromstring(html or "<html></html>")  # an empty tab
    element = next(iter(_selector(ast.literal_eval(match[1]))(root)), None)
    if element is None:
        return None
    now = held.get(element.getroottree().getpath(element))
    if match[2] == "outerText":
        return inner_text(element)
    if match[2] == "value":
        return value_of(element, now)
    return str("checked" in element.attrib if now is None else now).lower()


@lru_cache(maxsize=2000)
def _selector(css: str) -> CSSSelector:
    try:
        # CSS closes what is open at the end: [name="x"
        return CSSSelector(css + "]" * (css.count("[") - css.count("]")), translator="html")
    except Exception as error:  # cssselect and lxml each have several
        raise NotSupported(f"selector {css!r:.80} is not understood without a browser "
                           f"({str(error)[:80]})") from None


def inner_text(element: Element) -> str:
    """The text as element names lay it out: white space collapsed, a line for each block."""
    text = re.sub(r" +", " ", "".join(_marked(element)))
    marked = re.sub(r"[ \x01\x02]*[\x01\x02][ \x01\x02]*",
                    lambda match: "\n\n" if "\x02" in match[0] else "\n", text)
    return re.sub(r" *\x03 *", "\n", marked).strip("\n ")


def _marked(element: Element) -> Iterator[str]:
    """Text with marks: \\x01 the edge of a block, \\x02 that of a paragraph, \\x03 a line break."""
    if not isinstance(element.tag, str) or element.tag in _HIDDEN or "hidden" in element.attrib:
        return
    edge = "\x02" if element.tag == "p" else "\x01" if element.tag in _BLOCKS else ""
    yield "\x03" if element.tag == "br" else edge
    yield re.sub(r"[ \t\n\r\f]+", " ", element.text or "")
    for child in element:
        yield from _marked(child)
        yield "" if element.tag in _NO_TEXT else re.sub(r"[ \t\n\r\f]+", " ", child.tail or "")
    yield edge
