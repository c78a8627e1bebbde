"""Locators of the own sites' tasks without a browser: `query(html, js)` follows chains such as
document.querySelector('.row a').outerText. What is not understood is refused with NotSupported, never
guessed."""
from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import lxml.html
from lxml.cssselect import CSSSelector

Element = lxml.html.HtmlElement
_LINK = re.compile(r"""\.(\w+)(?:\(('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\))?""")
_LOCATOR = re.compile(rf"document(?:{_LINK.pattern})+;?\s*")
_BLOCKS = frozenset("aside div form h1 h2 h3 h4 h5 h6 header li main nav ol option p section ul".split())
_HIDDEN = frozenset("script style head template noscript textarea".split())
_NO_TEXT = frozenset("select ul ol".split())     # blanks between what is inside do not show


class NotSupported(Exception):
    """Something that the back end or the tables here cannot evaluate; the part is not judged, with this
    message as reason."""


def query(html: str, js: str, held: Mapping[str, Any] = {}) -> str | None:  # noqa: B006
    """What a locator gives on a page without scripts, as text; None where it would throw or give null. `held`
    is what controls hold by now (direct.Tab.held), by their path in the page, where that is not what the page
    says. Raises NotSupported for what is not understood."""
    if not _LOCATOR.fullmatch(js):
        raise NotSupported(f"locator {js!r:.80} is not understood without a browser")
    value = lxml.html.document_fromstring(html or "<html></html>")     # an empty tab
    for name, argument in _LINK.findall(js[len("document"):]):
        table = _METHODS if argument else _MEMBERS
        if value is None:
            return None
        if name not in table or not isinstance(value, Element):
            raise NotSupported(f"{name!r} in a locator is not understood without a browser")
        more = ast.literal_eval(argument) if argument else held.get(value.getroottree().getpath(value))
        value = table[name](value, more)
    if isinstance(value, Element):
        raise NotSupported(f"locator {js!r:.80} gives no text")
    return str(value).lower() if isinstance(value, bool) else value


@lru_cache(maxsize=2000)
def _selector(css: str) -> CSSSelector:
    try:
        # CSS closes what is open at the end: [name="x"
        return CSSSelector(css + "]" * (css.count("[") - css.count("]")), translator="html")
    except Exception as error:                   # cssselect and lxml each have several
        raise NotSupported(f"selector {css!r:.80} is not understood without a browser "
                           f"({str(error)[:80]})") from None


def _value(element: Element, held: str | int | None) -> str | None:
    if element.tag == "select":
        options = element.findall(".//option")
        chosen = [option for option in options if "selected" in option.attrib][-1:] or options[:1]
        chosen = chosen if held is None else [options[held]]
        return chosen[0].get("value", inner_text(chosen[0])) if chosen else ""
    if isinstance(held, str):
        return held
    if element.tag == "textarea":
        return (element.text or "").removeprefix("\n")
    return element.get("value", "")


def inner_text(element: Element) -> str:
    """The text as it is laid out by default (by element names, not by a stylesheet): white space collapsed, a
    line for each block."""
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


_MEMBERS: dict[str, Callable] = {
    "outerText": lambda e, held: inner_text(e),
    "value": _value,
    "checked": lambda e, held: "checked" in e.attrib if held is None else held,
}
_METHODS: dict[str, Callable] = {
    "querySelector": lambda e, css: next((found for found in _selector(css)(e)
                                           if found is not e or e.getparent() is None), None),
    "getAttribute": lambda e, name: e.get(name),
}
