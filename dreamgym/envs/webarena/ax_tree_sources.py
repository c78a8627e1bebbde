"""Four sources of accessibility nodes for `page.abstract`: a browser's tree (CDP), HTML, and the text
observations of WebArena and BrowserGym. One page gives the same nodes from each.

Roles and names of HTML are computed as Chromium does for the elements that the own sites have (no aria
attributes but aria-label).
"""
import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lxml import etree

from dreamgym.envs.webarena.page import CHECKED, FIELDS, Node

NAMED_ROLES = ("link", "button", "tab", "menuitem", "menuitemcheckbox", "menuitemradio", "treeitem")
ROLES = {**{role: role for role in ("StaticText", "heading", "img", *NAMED_ROLES, *FIELDS)
            if role not in ("date", "time", "datetime", "color")},
         "image": "img", "Date": "date", "DateTime": "datetime", "InputTime": "time", "ColorWell": "color",
         "DisclosureTriangle": "button", "DisclosureTriangleGrouped": "button", "PopUpButton": "combobox",
         "ComboBoxSelect": "combobox", "ListBox": "listbox"}
NAMED = frozenset((*NAMED_ROLES, "heading"))  # their names tell what is inside
# named by their content
WHOLE = frozenset("cell gridcell columnheader rowheader LayoutTableCell row group radiogroup table grid "
                  "term".split())
TYPED_INTO = ("textbox", "searchbox", "spinbutton", "combobox")
SILENT = frozenset(("StaticText", "img", "heading"))
FAR = 1 << 30


# ---- trees of rows

@dataclass
class Row:
    depth: int
    role: str
    name: str = ""
    value: str = ""
    checked: bool = False
    selected: bool | None = None  # None: it has no such property
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
        is_option = row.role == "option" or (row.role == "menuitem" and row.selected is not None)
        if is_option and last and last.role in ("combobox", "listbox"):
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
                within, told = row.depth, bool(row.value) or role not in TYPED_INTO
            elif role in NAMED and row.name.strip() and inside == FAR:
                inside = row.depth
    return nodes


def _restored(rows: list[Row]) -> Iterable[Row]:
    """WebArena leaves out texts that occur in one of the three lines before. Puts back the words of the name
    of a cell, row or group that no row inside says: first, or last when the name begins with what is inside.
    The name of a table row that shares no word with its cells is no text of the page (a grid's address in
    Magento)."""
    last: dict[int, list[Row]] = {}  # by the index of the row that follows
    for i, row in enumerate(rows):
        yield from last.pop(i, ())
        yield row
        if row.role in WHOLE and row.name:
            end = next((j for j in range(i + 1, len(rows)) if rows[j].depth <= row.depth), len(rows))
            said = Counter(word for inner in rows[i + 1:end] if inner.role in ROLES or inner.role in WHOLE
                           for word in f"{inner.name} {inner.value}".split())
            titled = row.role == "row" and len(said) > 0 and said.keys().isdisjoint(row.name.split())
            rest = [word for word in row.name.split() if said.subtract([word]) or said[word] < 0]
            if rest and not titled:
                text = Row(row.depth + 1, "StaticText", " ".join(rest), ref=row.ref)
                if row.name.split()[0] == rest[0]:
                    yield text
                else:
                    last.setdefault(end, []).append(text)
    yield from last.pop(len(rows), ())


# ---- Chromium

def from_cdp(ax_nodes: list[dict],
             frames: Mapping[int, list[dict]] = {}) -> tuple[str, list[Node]]:  # noqa: B006
    """`nodes` of Accessibility.getFullAXTree -> (title, nodes); `ref` is the backendDOMNodeId. `frames`: the
    trees of inner frames by the `ref` of their iframe."""
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


# ---- recorded text

QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_TEXT_LINE = re.compile(rf"(\s*)(?:\[([\w-]+)\] )?(\w+(?: \w+)*) ({QUOTED})(.*)")
_VALUE = re.compile(rf"^ ?(?:, )?value[=:] ?({QUOTED}|[^,]*)")
_STATE = re.compile(r"\b(checked|selected)[=:] ?'?(\w+)")
_TAB = re.compile(r"\d+( \(current\))?: ?(.*)", re.DOTALL)


def unquoted(literal: str) -> str:
    """The string of a Python literal; what is none, and a broken escape, stays as it is."""
    try:
        return ast.literal_eval(literal) if len(literal) > 1 and literal[0] in "'\"" else literal
    except (ValueError, SyntaxError):
        return literal[1:-1]


def text_rows(observation: str) -> list[Row]:
    """The lines of a text observation that are nodes. Raises ValueError where there is none."""
    rows = []
    for match in filter(None, map(_TEXT_LINE.fullmatch, observation.splitlines())):
        indent, ref, role, name, rest = match.groups()
        value, states = _VALUE.match(rest), dict(_STATE.findall(rest))
        selected = states["selected"].lower() == "true" if "selected" in states else None
        rows.append(Row(len(indent), role, unquoted(name), unquoted(value[1].strip()) if value else "",
                        states.get("checked", "").lower() == "true", selected, ref or ""))
    if not rows:
        raise ValueError(f"observation {observation[:60]!r}: no line of the form [N] ROLE 'NAME'")
    return rows


def from_text(observation: str) -> tuple[str, list[Node]]:
    """A text observation of WebArena or BrowserGym -> (title, nodes); `ref` is the id or bid in the text.
    Raises as `text_rows`."""
    rows = text_rows(observation)
    title = rows[0].name if rows[0].role in ("RootWebArea", "WebArea") else ""
    return title, _reduce(_restored(rows))


def webarena_tabs(observation: str) -> tuple[list[str], int]:
    """Tab titles and the current tab in the first line of a WebArena observation; ([], 0) without one."""
    parts = observation.lstrip().split("\n", 1)[0].split(" | Tab ")
    tabs = [tab for part in parts if (tab := _TAB.fullmatch(part.removeprefix("Tab ")))]
    return [tab[2] for tab in tabs], next((i for i, tab in enumerate(tabs) if tab[1]), 0)


# ---- HTML

Element = etree._Element
_PARSER = etree.HTMLParser(encoding="utf-8")  # which ends a page 256 elements deep: the walk below recurses
_UNSEEN = frozenset(("head", "script", "style", "template", "noscript"))
_INPUTS = {"search": "searchbox", "checkbox": "checkbox", "radio": "radio", "hidden": ""}
_TAGS = {"a": "link", "button": "button", "textarea": "textbox", "select": "combobox", "img": "img",
         **{f"h{i}": "heading" for i in range(1, 7)}}
_INLINE = frozenset("a abbr b code em i kbd label mark small span strong sub sup time u".split())


def from_html(html: str) -> tuple[str, list[Node]]:
    """HTML -> (title, nodes). `ref` is the lxml element, for a text the one around it."""
    data = html.encode("utf-8", "replace")
    root = etree.fromstring(data, _PARSER) if data.strip() else None
    body = root.find("body") if root is not None else None
    if body is None:
        return "", []
    labels = {}
    for label in root.iter("label"):
        target = label.get("for") or next(label.iter("input", "select", "textarea"), None)
        labels.setdefault(target, label)
    return root.findtext("head/title") or "", _reduce(_html_rows(body, 0, labels))


def _html_rows(el: Element, depth: int, labels: dict) -> Iterator[Row]:
    """An element without a role has no row, and what is inside has its depth."""
    if el.tag in _UNSEEN or el.get("hidden") is not None:
        return
    if role := _role(el):
        value = value_of(el) if role in ("textbox", "searchbox") else ""
        value = "•" * len(value) if el.get("type") == "password" else value
        yield Row(depth, role, _name(el, role, labels), value, el.get("checked") is not None, ref=el)
        if role == "combobox":
            chosen = chosen_option(el)
            yield from (Row(depth + 1, "option", option_label(option), selected=option is chosen)
                        for option in el.iter("option"))
        if role in FIELDS:
            return
        depth += 1
    if el.text and not el.text.isspace():
        yield Row(depth, "StaticText", el.text, ref=el)
    for child in el:
        if isinstance(child.tag, str):
            yield from _html_rows(child, depth, labels)
        if child.tail and not child.tail.isspace():
            yield Row(depth, "StaticText", child.tail, ref=el)


def _role(el: Element) -> str:
    if el.tag == "input":
        return _INPUTS.get(el.get("type", ""), "textbox")
    return "" if el.tag == "a" and el.get("href") is None else _TAGS.get(el.tag, "")


def _name(el: Element, role: str, labels: dict) -> str:
    """The accessible name, in Chromium's order: aria-label, the label, the element's own text."""
    label = labels.get(el.get("id")) if el.get("id") else None
    label = labels.get(el) if label is None else label
    name = el.get("aria-label", "").strip()
    if not name and label is not None:
        name = _content(label, el)
    elif not name:
        name = el.get("alt", "") if role == "img" else _content(el) if role in NAMED else ""
    return " ".join(name.split())


def _content(el: Element, but: Element | None = None) -> str:
    """The text as a name: blanks around what is not inline, images by their alternative text."""
    parts = [el.text or ""]
    for child in el:
        if isinstance(child.tag, str) and child is not but:
            space = "" if child.tag in _INLINE else " "
            said = child.get("alt", "") if child.tag == "img" else _content(child, but)
            parts += (space, said, space)
        parts.append(child.tail or "")
    return "".join(parts)


def option_label(option: Element) -> str:
    return " ".join("".join(option.itertext()).split())


def chosen_option(select: Element) -> Element | None:
    """The first one where none is chosen, as in browsers."""
    options = list(select.iter("option"))
    return next((option for option in reversed(options) if option.get("selected") is not None),
                options[0] if options else None)


def value_of(element: Element, held: Any = None) -> str:
    """What a field sends by what it holds (a text, the index of an option), or by its page."""
    if element.tag == "select":
        option = chosen_option(element) if held is None else list(element.iter("option"))[held]
        return "" if option is None else option.get("value", option_label(option))
    if isinstance(held, str):
        return held
    return (element.text or "").removeprefix("\n") if element.tag == "textarea" else element.get("value", "")
