"""Locators of the own sites' tasks without a browser: `query` reads document.querySelector('.row
a').outerText, .value and .checked. What is not understood is refused, never guessed."""
import ast
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import lxml.html
from lxml.cssselect import CSSSelector

from dreamgym.envs.webarena.ax_tree_sources import QUOTED, value_of

Element = lxml.html.HtmlElement
_LOCATOR = re.compile(rf"document\.querySelector\(({QUOTED})\)\.(outerText|value|checked);?\s*")


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
    """The text on one line, blanks between elements. Where a browser breaks lines decides no own task."""
    return " ".join(" ".join(element.xpath(".//text()[not(ancestor::textarea)]")).split())
