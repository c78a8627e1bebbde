"""Locators of WebArena's tasks without a browser: `query(html, js)` is the share of JavaScript that the
official tasks' locators consist of.

A page that scripts build, or a stylesheet that moves text, is not seen as a browser sees it; what is not
understood is refused with NotSupported, never guessed. Locators: querySelector(All), attributes and members
of elements, [n], ?., +, ||, [...list].map(e => ...).join(text).
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import lxml.html
from lxml.cssselect import CSSSelector


class NotSupported(Exception):
    """Something that the back end or the tables here cannot evaluate; the part is not judged, with this
    message as reason."""


class _Throws(Exception):
    """Where JavaScript would throw: a member of null."""


class _TextNode(str):
    """A text node; as a plain text it has no textContent."""


_JS = re.compile(r"\s*(?:(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<number>\d+)"
                 r"|(?P<name>[A-Za-z_$][\w$]*)|(?P<mark>\.\.\.|\?\.|=>|\|\||[.()\[\],+]))")
_BREAKS = frozenset("address article aside blockquote dd details div dl dt fieldset figure footer form h1 h2 "
                    "h3 h4 h5 h6 header hr li main nav ol option p pre "
                    "section table tr ul".split())
_HIDDEN = frozenset("script style head template noscript textarea".split())


def query(page: str | lxml.html.HtmlElement, js: str) -> str | None:
    """What a locator gives on a page without scripts, as text; None where it would throw or give null. Raises
    NotSupported for what is not understood. `outerText` breaks lines by element names, not by a
    stylesheet."""
    root = lxml.html.document_fromstring(page) if isinstance(page, str) else page
    try:
        value = _compiled(js)({"document": root})
    except _Throws:
        return None
    if isinstance(value, (lxml.html.HtmlElement, list)):
        raise NotSupported(f"locator {js!r:.80} gives no text")
    return None if value is None else _js_text(value)


def _js_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


@lru_cache(maxsize=2000)
def _compiled(js: str) -> Callable[[dict], Any]:
    tokens, at = [], 0
    while js[at:].strip().strip(";"):
        match = _JS.match(js, at)
        if not match:
            raise NotSupported(f"locator {js!r:.80}: {js[at:at + 20]!r} is not understood without a browser")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    reader = _Reader(js, tokens)
    try:
        value = reader.either()
    except RecursionError:
        raise NotSupported(f"locator {js!r:.80} is nested too deeply") from None
    reader.expect(None)
    return value


class _Reader:
    """Recursive descent over a locator's tokens; each rule returns a function from the variables to the
    value."""

    def __init__(self, js: str, tokens: list[tuple[str, str]]):
        self.js, self.tokens, self.i = js, tokens, 0

    def peek(self, ahead: int = 0) -> str | None:
        return self.tokens[self.i + ahead][1] if self.i + ahead < len(self.tokens) else None

    def take(self, mark: str) -> bool:
        self.i += (found := self.peek() == mark)
        return found

    def expect(self, mark: str | None) -> None:
        if self.peek() != mark:
            raise NotSupported(f"locator {self.js!r:.80}: found {self.peek()!r}, expected {mark!r}, or what "
                               f"only a browser understands")
        self.i += mark is not None

    def either(self) -> Callable:
        value = self.sum()
        while self.take("||"):
            value = (lambda left, right: lambda names: left(names) or right(names))(value, self.sum())
        return value

    def sum(self) -> Callable:
        value = self.chain()
        while self.take("+"):
            value = (lambda left, right: lambda names: _js_text(left(names))
                     + _js_text(right(names)))(value, self.chain())
        return value

    def chain(self) -> Callable:
        first, links = self.primary(), []
        while (mark := self.peek()) in (".", "?.", "["):
            self.i += 1
            if mark == "[":
                links.append((False, int(self.kind("number")), None))
                self.expect("]")
            else:
                links.append((mark == "?.", self.kind("name"),
                              self.arguments() if self.peek() == "(" else None))
        return lambda names: _followed(first(names), links, names)

    def primary(self) -> Callable:
        kind = self.tokens[self.i][0] if self.peek() else None
        if self.take("("):
            value = self.either()
            self.expect(")")
            return value
        if self.take("["):
            self.expect("...")
            value = self.either()
            self.expect("]")
            return value
        if kind == "text":
            text = re.sub(r"\\(.)", lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]),
                          self.kind("text")[1:-1])
            return lambda names: text
        name = self.kind("name")
        return lambda names: _member_of(names, name)

    def kind(self, kind: str) -> str:
        if not self.peek() or self.tokens[self.i][0] != kind:
            raise NotSupported(f"locator {self.js!r:.80}: found {self.peek()!r}, expected a {kind}")
        self.i += 1
        return self.tokens[self.i - 1][1]

    def arguments(self) -> list[Callable]:
        self.expect("(")
        values = []
        while not self.take(")"):
            values.append(self.arrow() if self.peek(1) == "=>" else self.either())
            if self.peek() != ")":
                self.expect(",")
        return values

    def arrow(self) -> Callable:
        name = self.kind("name")
        self.expect("=>")
        body = self.either()
        return lambda names: lambda item: body({**names, name: item})


def _member_of(names: dict, name: str) -> Any:
    if name not in names:
        raise NotSupported(f"the name {name} in a locator is not understood without a browser")
    return names[name]


def _followed(value: Any, links: list[tuple[bool, int | str, list | None]], names: dict) -> Any:
    for optional, name, arguments in links:
        if value is None and optional:
            return None                          # ?. ends the whole chain
        if value is None:
            raise _Throws
        value = _member(value, name) if arguments is None else _method(value, name,
                                                                       [argument(names)
                                                                        for argument in arguments])
    return value


def _member(value: Any, name: int | str) -> Any:
    if isinstance(name, int) and isinstance(value, (list, str)):
        return value[name] if name < len(value) else None
    if name == "length" and isinstance(value, (list, str)):
        return len(value)
    if name == "textContent" and isinstance(value, _TextNode):
        return str(value)
    if isinstance(value, lxml.html.HtmlElement) and name in _MEMBERS:
        return _MEMBERS[name](value)
    raise NotSupported(f"{name!r} of {type(value).__name__} in a locator is not understood without a browser")


def _method(value: Any, name: int | str, arguments: list) -> Any:
    for kind, table in _METHODS:
        if isinstance(value, kind) and name in table:
            return table[name](value, *arguments)
    raise NotSupported(f"{name}() of {type(value).__name__} in a locator is not understood without a browser")


@lru_cache(maxsize=2000)
def _selector(css: str) -> CSSSelector:
    try:
        # CSS closes what is open at the end: [name="x"
        return CSSSelector(css + "]" * (css.count("[") - css.count("]")), translator="html")
    except Exception as error:                   # cssselect and lxml each have several
        raise NotSupported(f"selector {css!r:.80} is not understood without a browser "
                           f"({str(error)[:80]})") from None


def _select(element: lxml.html.HtmlElement, css: str) -> list:
    root = element.getroottree().getroot() is element
    return [found for found in _selector(css)(element) if found is not element or root]


def _node(child: lxml.html.HtmlElement | None, text: str | None) -> Any:
    return _TextNode(text) if text else child


def _value(element: lxml.html.HtmlElement) -> str | None:
    if element.tag == "select":
        options = element.findall(".//option")
        return options[i].get("value", inner_text(options[i])) if (i := _selected(element)) >= 0 else ""
    if element.tag == "textarea":
        return (element.text_content() or "").removeprefix("\n")
    if element.tag == "input":
        return element.get("value", "on" if element.get("type", "").lower() in ("checkbox", "radio") else "")
    return element.get("value")


def _selected(element: lxml.html.HtmlElement) -> int:
    options = element.findall(".//option")
    chosen = [i for i, option in enumerate(options) if "selected" in option.attrib]
    if element.get("multiple") is not None:
        return chosen[0] if chosen else -1
    return chosen[-1] if chosen else 0 if options else -1


def inner_text(element: lxml.html.HtmlElement) -> str:
    """The text as it is laid out by default: white space collapsed, a line for each block, tabs between
    cells."""
    marked = re.sub(r"[ \x01\x02]*[\x01\x02][ \x01\x02]*", lambda match: "\n\n"
                    if "\x02" in match[0] else "\n", re.sub(r" +", " ", "".join(_marked(element))))
    return re.sub(r" *\x03 *", "\n", marked).strip("\n ")


def _marked(element: lxml.html.HtmlElement, pre: bool = False) -> Iterator[str]:
    """Text with marks: \\x01 the edge of a block, \\x02 that of a paragraph, \\x03 a line break."""
    def text(raw: str | None) -> str:
        return raw.replace("\n", "\x03") if raw and pre else re.sub(r"[ \t\n\r\f]+", " ", raw or "")

    if not isinstance(element.tag, str) or element.tag in _HIDDEN or "hidden" in element.attrib:
        return
    pre = pre or element.tag == "pre"
    edge = "\x02" if element.tag == "p" else "\x01" if element.tag in _BREAKS else ""
    yield "\x03" if element.tag == "br" else edge
    yield text(element.text)
    for child in element:
        yield from _marked(child, pre)
        yield "\t" if child.tag in ("td", "th") and child.getnext() is not None else ""
        yield text(child.tail) if element.tag not in ("tr", "tbody", "thead", "table", "select", "ul",
                                                      "ol") else ""
    yield edge


_MEMBERS: dict[str, Callable] = {
    "outerText": inner_text, "innerText": inner_text, "textContent": lambda e: e.text_content(),
    "value": _value, "selectedIndex": _selected, "checked": lambda e: "checked" in e.attrib,
                                 "id": lambda e: e.get("id", ""), "className": lambda e: e.get("class", ""),
    "title": lambda e: e.get("title", ""), "children": list, "parentElement": lambda e: e.getparent(),
    "firstElementChild": lambda e: e[0] if len(e) else None, "lastElementChild": lambda e: e[-1]
                                 if len(e) else None,
    "firstChild": lambda e: _node(e[0] if len(e) else None, e.text),
                                 "lastChild": lambda e: _node(e[-1], e[-1].tail)
                                 if len(e) else _node(None, e.text),
}
_METHODS: tuple[tuple[type | tuple, dict[str, Callable]], ...] = (
    (lxml.html.HtmlElement,
     {"querySelectorAll": _select, "querySelector": lambda e, css: next(iter(_select(e, css)), None),
                             "getAttribute": lambda e, name: e.get(name)}),
    (list, {"map": lambda items, function: [function(item) for item in items], "join": lambda items,
            by=",": by.join("" if i is None else _js_text(i) for i in items)}),
    ((str, int, bool), {"toString": _js_text}),
    (str, {"trim": lambda text: text.strip(), "toLowerCase": lambda text: text.lower()}),
)
