"""Four sources of accessibility nodes for `page.abstract`: a browser's tree (CDP), HTML, and the text
observations of WebArena and BrowserGym.

One page gives the same nodes from each, so that the browserless back end, a real browser and recorded traces
speak one language. Three of them are trees of (depth, role, name, ...) rows that `_reduce` thins out; HTML,
the hot path, computes roles and names itself, as Chromium does for a plain server-rendered page (no CSS, no
scripts, no shadow trees). WebArena's text has lost what its rule dropped (a text that occurs in one of the
three lines before): what can be told from the names of cells and groups is put back, a lone '3' after '[1332]
...' is not.
"""
from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lxml import etree

from dreamgym.envs.webarena.page import CHECKED, FIELDS, Node

NAMED_ROLES = ("link", "button", "tab", "menuitem", "menuitemcheckbox", "menuitemradio", "treeitem")
ROLES = {**{role: role for role in ("StaticText", "heading", "img", *NAMED_ROLES, *FIELDS)
            if role not in ("date", "time", "datetime", "color")},
         "image": "img", "Date": "date", "DateTime": "datetime", "InputTime": "time", "ColorWell": "color",
         "DisclosureTriangle": "button",
         "DisclosureTriangleGrouped": "button", "PopUpButton": "combobox", "ComboBoxSelect": "combobox",
         "ListBox": "listbox"}
NAMED = frozenset((*NAMED_ROLES, "heading"))     # their names tell what is inside
# named by their content
WHOLE = frozenset("cell gridcell columnheader rowheader LayoutTableCell row group radiogroup table grid "
                  "term".split())
CHOICES = frozenset(("combobox", "listbox"))
TYPED = frozenset(("textbox", "searchbox", "spinbutton", "combobox"))
SILENT = frozenset(("StaticText", "img", "heading"))
FAR = 1 << 30


# ---- trees of rows -----------------------------------------------------------------------------------------

@dataclass
class Row:
    """One node of a reported tree, before thinning out. `selected` None: it has no such property."""
    depth: int
    role: str
    name: str = ""
    value: str = ""
    checked: bool = False
    selected: bool | None = None
    ref: Any = None


def _reduce(rows: Iterable[Row]) -> list[Node]:
    """Tree -> nodes: no text, image or heading inside a named control or heading (its name says it), and
    nothing but the options inside a field."""
    nodes: list[Node] = []
    # depth of the named control, of the field, that rows belong to; whether the field told its value itself
    inside, within, told = FAR, FAR, False
    for row in rows:
        within, inside = within if row.depth > within else FAR, inside if row.depth > inside else FAR
        last, role = nodes[-1] if nodes else None, ROLES.get(row.role)
        if last and last.role in CHOICES and (row.role == "option"
                                              or (row.role == "menuitem" and row.selected is not None)):
            last.options += (row.name,)
            if row.selected:
                is_first = last.role == "combobox" or not last.value
                last.value = row.name if is_first else f"{last.value}, {row.name}"
        elif within < row.depth:
            if role == "StaticText" and not told and row.name != last.name:
                # a text observation of WebArena tells a value only so
                last.value = f"{last.value} {row.name}".strip()
        elif role and not (inside < row.depth and role in SILENT):
            nodes.append(Node(role, row.name, row.value if role in FIELDS else "",
                              row.checked if role in CHECKED else None, (), row.ref))
            if role in FIELDS:
                within, told = row.depth, bool(row.value) or role not in TYPED
            elif role in NAMED and row.name.strip() and inside == FAR:
                inside = row.depth
    return nodes


def _restored(rows: list[Row]) -> Iterable[Row]:
    """Puts back texts that an observation left out because the name of their cell, row or group holds them:
    the words of such a name that no row inside says. They come first, or last when the name begins with what
    is inside."""
    last: dict[int, list[Row]] = {}              # by the index of the row that follows
    for i, row in enumerate(rows):
        yield from last.pop(i, ())
        yield row
        if row.role in WHOLE and row.name:
            end = next((j for j in range(i + 1, len(rows)) if rows[j].depth <= row.depth), len(rows))
            said = Counter(word for inner in rows[i + 1:end] if inner.role in ROLES or inner.role in WHOLE
                           for word in f"{inner.name} {inner.value}".split())
            rest = []
            for word in row.name.split():
                if said[word]:
                    said[word] -= 1
                else:
                    rest.append(word)
            if rest:
                text = Row(row.depth + 1, "StaticText", " ".join(rest), ref=row.ref)
                if row.name.split()[0] == rest[0]:
                    yield text
                else:
                    last.setdefault(end, []).append(text)
    yield from last.pop(len(rows), ())


# ---- Chromium ----------------------------------------------------------------------------------------------

def from_cdp(ax_nodes: list[dict],
             frames: Mapping[int, list[dict]] = MappingProxyType({})) -> tuple[str, list[Node]]:
    """`nodes` of Accessibility.getFullAXTree -> (title, nodes). `frames` holds the trees of inner frames by
    the backendDOMNodeId of the iframe element (DOM.getFrameOwner); they are joined at that element, frames in
    frames too. `ref` is the backendDOMNodeId."""
    title = str(ax_nodes[0].get("name", {}).get("value", "")) if ax_nodes else ""
    return title, _reduce(_cdp_rows(ax_nodes, frames, 0))


def _cdp_rows(ax_nodes: list[dict], frames: Mapping[int, list[dict]], depth: int) -> Iterable[Row]:
    by_id = {node["nodeId"]: node for node in reversed(ax_nodes)}
    stack = [(ax_nodes[0], depth)] if ax_nodes else []
    while stack:
        node, depth = stack.pop()
        ref = node.get("backendDOMNodeId")
        if not node.get("ignored"):
            properties = {p["name"]: p["value"].get("value") for p in node.get("properties", ())}
            yield Row(depth, node["role"]["value"], str(node.get("name", {}).get("value", "")),
                      str(node.get("value", {}).get("value", "")),
                      properties.get("checked") == "true", properties.get("selected"), ref)
            if ref in frames:
                yield from _cdp_rows(frames[ref], frames, depth + 1)
        inner = depth if node.get("ignored") else depth + 1
        stack += [(by_id.pop(child), inner) for child in reversed(node.get("childIds", ())) if child in by_id]


# ---- recorded text -----------------------------------------------------------------------------------------

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_TEXT_LINE = re.compile(rf"(\s*)(?:\[([\w-]+)\] )?(\w+(?: \w+)*) ({_QUOTED})(.*)")
_VALUE = re.compile(rf"^ ?(?:, )?value[=:] ?({_QUOTED}|[^,]*)")
_STATE = re.compile(r"\b(checked|selected)[=:] ?'?(\w+)")
_TAB = re.compile(r"Tab (\d+)( \(current\))?: ?(.*)", re.DOTALL)


def unquoted(literal: str) -> str:
    """The string of a Python string literal; a broken escape stays as it is."""
    try:
        return ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        return literal[1:-1]


def text_rows(observation: str) -> list[Row]:
    """The lines of a text observation. A line that is no node (a cut last line, an error note) is passed
    over; ValueError when there is no node at all."""
    rows = []
    for match in filter(None, map(_TEXT_LINE.fullmatch, observation.splitlines())):
        indent, ref, role, name, rest = match.groups()
        value, states = _VALUE.match(rest), dict(_STATE.findall(rest))
        value = value[1].strip() if value else ""
        rows.append(Row(len(indent), role, unquoted(name), unquoted(value) if value[:1] in ("'", '"')
                        and len(value) > 1 else value,
                        states.get("checked", "").lower() == "true", states["selected"].lower() == "true"
                        if "selected" in states else None, ref or ""))
    if not rows:
        raise ValueError(f"observation {observation[:60]!r}: no line of the form [N] ROLE 'NAME'")
    return rows


def from_text(observation: str) -> tuple[str, list[Node]]:
    """WebArena's tab line and accessibility tree, or BrowserGym's flattened tree -> (title, nodes); `ref` is
    the id or bid in the text. Raises ValueError for a text without nodes."""
    rows = text_rows(observation)
    title = rows[0].name if rows[0].role in ("RootWebArea", "WebArea") else ""
    return title, _reduce(_restored(rows))


def webarena_tabs(observation: str) -> tuple[list[str], int]:
    """Tab titles and the current tab of the first line of a WebArena observation; ([], 0) without such a
    line."""
    parts = observation.lstrip().split("\n", 1)[0].split(" | Tab ")
    matches = [_TAB.fullmatch(f"Tab {part.removeprefix('Tab ')}") for part in parts]
    tabs = [match for match in matches if match]
    return [match[3] for match in tabs], next((i for i, match in enumerate(tabs) if match[2]), 0)


# ---- HTML --------------------------------------------------------------------------------------------------

_PARSER = etree.HTMLParser(encoding="utf-8")  # which ends a page 256 elements deep: the walk below recurses
_UNSEEN = frozenset("head script style template noscript datalist video audio rt rp progress meter".split())
_INPUTS = {**{kind: "button" for kind in ("submit", "reset", "button", "image", "file")},
           "checkbox": "checkbox", "radio": "radio", "search": "searchbox",
           "number": "spinbutton", "range": "slider", "date": "date", "datetime-local": "datetime",
           "month": "datetime", "week": "datetime", "time": "time",
           "color": "color", "hidden": ""}
_TAGS = {"button": "button", "textarea": "textbox", "img": "img", "svg": "img",
         **{f"h{i}": "heading" for i in range(1, 7)}}
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,15})?")
_CONTROLS = frozenset(("input", "select", "textarea", "button"))
_INLINE = frozenset("a abbr b bdi bdo cite code data del dfn em font i ins kbd label mark q s samp small "
                    "span strong sub sup time tt u var wbr output summary".split())


def _native_role(el: etree._Element, tag: str, attrs: dict) -> str:
    if tag == "a":
        return "link" if "href" in attrs else ""
    if tag == "input":
        role = _INPUTS.get(attrs.get("type", "").lower(), "textbox")
        return "combobox" if "list" in attrs and role in ("textbox", "searchbox") else role
    if tag == "select":
        return "listbox" if "multiple" in attrs or attrs.get("size", "1").strip() not in ("", "0",
                                                                                          "1") else "combobox"
    if tag == "summary":
        return "button" if el.getparent().tag == "details" else ""
    return _TAGS.get(tag, "")


def _hidden(tag: str, attrs: dict) -> bool:
    return "hidden" in attrs or attrs.get("aria-hidden") == "true" or (tag == "dialog"
                                                                       and "open" not in attrs)


def _selected(select: etree._Element) -> tuple[tuple[str, ...], str]:
    """(labels of the options, label of the chosen one; of several, joined)."""
    options = [(option, option_label(option)) for option in select.iter("option")]
    names = tuple(name for _, name in options)
    chosen = [name for option, name in options if option.get("selected") is not None]
    if _native_role(select, "select", select.attrib) == "listbox":
        return names, ", ".join(chosen)
    enabled = [name for option, name in options if option.get("disabled") is None]
    return names, chosen[-1] if chosen else enabled[0] if enabled else ""


def option_label(option: etree._Element) -> str:
    return " ".join((option.get("label") or "".join(option.itertext())).split())


class _Reader:
    """One pass over one document. `frame(src)` gives the HTML of an inner frame, or None."""

    def __init__(self, root: etree._Element, frame: Callable[[str], str | None] | None):
        self.root, self.frame, self.nodes = root, frame, []
        self.labels: dict[Any, list[etree._Element]] = {}
        for label in root.iter("label"):
            target = label.get("for") or next((c for c in label.iter("input", "select", "textarea")
                                               if c.get("type") != "hidden"), None)
            self.labels.setdefault(target, []).append(label)

    def walk(self, el: etree._Element, inside: bool) -> None:
        """Appends the nodes of an element. `inside` a named control: its texts, images and headings are part
        of the name."""
        tag, attrs = el.tag, dict(el.items())
        if tag in _UNSEEN or _hidden(tag, attrs):
            return
        role = ROLES.get(attrs["role"].split(" ")[0]) if "role" in attrs else None
        if not role:
            role = "" if attrs.get("role") in ("none", "presentation") else _native_role(el, tag, attrs)
        if role and not (inside and role in SILENT):
            name = self.name(el, tag, role, attrs)
            self.nodes.append(self.node(el, tag, role, name, attrs))
            if role in FIELDS:
                return
            inside = inside or (role in NAMED and bool(name))
        if tag == "iframe":
            self.inner(attrs)
        if tag in ("input", "select", "svg", "textarea", "iframe"):
            return
        closed = tag == "details" and "open" not in attrs
        if not inside and not closed and el.text and not el.text.isspace():
            self.nodes.append(Node("StaticText", el.text, ref=el))
        for child in el:
            if isinstance(child.tag, str) and not (closed and child.tag != "summary"):
                self.walk(child, inside)
            if not inside and not closed and child.tail and not child.tail.isspace():
                self.nodes.append(Node("StaticText", child.tail, ref=el))

    def inner(self, attrs: dict) -> None:
        html = attrs.get("srcdoc") or (self.frame(attrs["src"]) if self.frame and attrs.get("src") else None)
        if html:
            self.nodes += from_html(html, self.frame)[1]

    def node(self, el: etree._Element, tag: str, role: str, name: str, attrs: dict) -> Node:
        checked = ("checked" in attrs or attrs.get("aria-checked") == "true") if role in CHECKED else None
        if tag == "select":
            options, value = _selected(el)
            return Node(role, name, value, checked, options, el)
        return Node(role, name, self.value(el, tag, attrs) if role in FIELDS and checked is None else "",
                    checked, (), el)

    def value(self, el: etree._Element, tag: str, attrs: dict) -> str:
        if tag == "input":
            kind, value = attrs.get("type", "").lower(), attrs.get("value", "")
            if kind in ("number", "range") and _NUMBER.fullmatch(value):
                return str(float(value)).removesuffix(".0")
            return "•" * len(value) if kind == "password" else value or {"range": "50",
                                                                         "color": "#000000"}.get(kind, "")
        return "".join(el.itertext())            # a textarea, or an element with role=textbox

    def name(self, el: etree._Element, tag: str, role: str, attrs: dict) -> str:
        """The accessible name, in Chromium's order: aria-labelledby, aria-label, labels, the element's own
        text or value, title, placeholder."""
        if "aria-labelledby" in attrs:
            named = [self.root.xpath("//*[@id=$id]", id=i) for i in attrs["aria-labelledby"].split()]
            if name := " ".join(self.content(found[0]) for found in named if found).strip():
                return name
        if name := attrs.get("aria-label", "").strip():
            return name
        if self.labels and tag in _CONTROLS:
            if labels := self.labels.get(el, []) + (self.labels.get(attrs["id"] or el, [])
                                                    if "id" in attrs else []):
                return " ".join(self.content(label, el) for label in labels)
        if tag == "input" and role == "button":
            return self.button_name(attrs.get("type", "").lower(), attrs)
        if tag == "img":
            own = attrs.get("alt", "")
        elif tag == "svg":
            own = "".join(el.xpath("string(*[local-name()='title'])"))
        else:
            own = self.content(el) if role in NAMED else ""
        return own or attrs.get("title", "") or (attrs.get("placeholder", "") if role in FIELDS else "")

    def button_name(self, kind: str, attrs: dict) -> str:
        if kind in ("image", "file"):
            own, default = ("alt", "Submit") if kind == "image" else ("", "Choose File")
            return attrs.get(own) or attrs.get("title") or default
        return attrs.get("value", {"submit": "Submit", "reset": "Reset"}.get(kind, "")) or attrs.get("title",
                                                                                                     "")

    def content(self, el: etree._Element, but: etree._Element | None = None) -> str:
        if not len(el):
            return " ".join((el.text or "").split())
        parts: list[str] = []
        self.gather(el, parts, but)
        return " ".join("".join(parts).split())

    def gather(self, el: etree._Element, parts: list[str], but: etree._Element | None) -> None:
        """The text of an element as a name: what is not inline stands apart by blanks, images and fields by
        what they are called or hold."""
        parts.append(el.text or "")
        for child in el:
            tag = child.tag
            if isinstance(tag, str) and tag not in _UNSEEN and child is not but:
                attrs = dict(child.items())
                if not _hidden(tag, attrs):
                    space = "" if tag in _INLINE else " "
                    parts.append(space)
                    self.gather_child(child, tag, attrs, parts, but)
                    parts.append(space)
            parts.append(child.tail or "")

    def gather_child(self, el: etree._Element, tag: str, attrs: dict, parts: list[str], but: Any) -> None:
        if label := attrs.get("aria-label", "").strip():
            parts.append(label)
        elif tag in ("img", "svg"):
            parts.append(self.name(el, tag, "img", attrs))
        elif tag == "select":
            parts.append(_selected(el)[1])
        elif tag == "input":
            role = _native_role(el, tag, attrs)
            if role == "button":
                parts.append(self.name(el, tag, role, attrs))
            elif role and role not in CHECKED:
                parts.append(self.value(el, tag, attrs))
        else:
            self.gather(el, parts, but)


def from_html(html: str | etree._Element,
              frame: Callable[[str], str | None] | None = None) -> tuple[str, list[Node]]:
    """HTML, or its parsed root -> (title, nodes). Form state is read from the attributes (value, checked,
    selected). `ref` is the lxml element, for a text the one around it; `frame(src)` gives the HTML of an
    iframe. A title or page that is not there is empty."""
    root = parse_html(html) if isinstance(html, str) else html
    if root is None:
        return "", []
    reader = _Reader(root, frame)
    body = root.find("body")
    if body is not None:
        reader.walk(body, False)
    return root.findtext("head/title") or "", reader.nodes


def parse_html(html: str) -> etree._Element | None:
    """The root of a parsed page, None for an empty one."""
    data = html.encode("utf-8", "replace")
    return etree.fromstring(data, _PARSER) if data.strip() else None
