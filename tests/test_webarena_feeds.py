"""Four feeders, one text: a page recorded from Chromium, its HTML, and what WebArena and BrowserGym would
have written of it; and Chromium itself where it is."""

import shutil

import pytest

from dreamgym.envs.webarena.ax_tree_sources import from_cdp, from_html, from_text, webarena_tabs
from dreamgym.envs.webarena.page import abstract

HTML = """<!doctype html><html><head><title>One Stop Mini</title><style>p { color: red }</style></head><body>
<header><a href="/">Home</a> <a href="/cart">Cart <b>2</b></a></header>
<form action="/search"><label for="q">Search</label><input id="q" type="search" name="q"
value="blue"><label>Sort by <select name="s"><option>Name</option>
<option selected>Price</option></select></label><label><input type="checkbox"
checked> Featured</label><button>Go</button></form>
<h1>Results</h1><ul><li><h2><a href="/p/1">Blue Speaker</a></h2><p>price <b>$19.99</b></p></li></ul>
<table><tr><th>Item</th><th>Stock</th></tr><tr><td>Wool Scarf</td><td>twelve left</td></tr></table></body
></html>"""

STATE = """page: One Stop Mini
url: shopping
link 'Home'
link 'Cart 2'
searchbox 'Search' value 'blue'
combobox 'Sort by' value 'Price' options 'Name' | 'Price'
checkbox 'Featured' checked
button 'Go'
heading 'Results'
link 'Blue Speaker'
text 'price'
text '$19.99'
text 'Item'
text 'Stock'
text 'Wool Scarf'
text 'twelve left'"""

# (id, parent, role or "" when ignored, name, value, properties), recorded with Accessibility.getFullAXTree of
# Chromium 156 from HTML; breadth first as it comes
RECORDED = [
    (0, None, "RootWebArea", "One Stop Mini", None, {"focusable": True, "url": "about:blank"}),
    (1, 0, "", "", None, {}), (2, 1, "", "", None, {}), (3, 2, "banner", "", None, {}),
    (4, 2, "form", "", None, {}), (5, 2, "heading", "Results", None, {"level": 1}),
    (6, 2, "list", "", None, {}), (7, 2, "table", "", None, {}),
    (8, 3, "link", "Home", None, {"focusable": True}), (9, 3, "StaticText", " ", None, {}),
    (10, 3, "link", "Cart 2", None, {"focusable": True}), (11, 4, "LabelText", "", None, {}),
    (12, 4, "searchbox", "Search", "blue", {"invalid": "false", "focusable": True, "editable": "plaintext"}),
    (13, 4, "LabelText", "", None, {}), (14, 4, "", "", None, {}),
    (15, 14, "checkbox", "Featured", None, {"invalid": "false", "focusable": True, "checked": "true"}),
    (16, 14, "", "", None, {}), (17, 4, "button", "Go", None, {"invalid": "false", "focusable": True}),
    (18, 5, "StaticText", "Results", None, {}), (19, 6, "listitem", "", None, {"level": 1}),
    (20, 7, "", "", None, {}), (21, 20, "row", "", None, {}), (22, 20, "row", "", None, {}),
    (23, 8, "StaticText", "Home", None, {}), (25, 10, "StaticText", "Cart ", None, {}),
    (26, 10, "StaticText", "2", None, {}), (27, 11, "StaticText", "Search", None, {}),
    (28, 12, "", "", None, {}), (29, 28, "generic", "", None, {"editable": "plaintext"}),
    (30, 13, "StaticText", "Sort by ", None, {}),
    (31, 13, "combobox", "Sort by", "Price", {"focusable": True, "hasPopup": "menu", "expanded": False}),
    (32, 17, "StaticText", "Go", None, {}), (34, 19, "ListMarker", "• ", None, {}),
    (35, 19, "heading", "Blue Speaker", None, {"level": 2}), (36, 19, "paragraph", "", None, {}),
    (37, 21, "columnheader", "Item", None, {}), (38, 21, "columnheader", "Stock", None, {}),
    (39, 22, "cell", "Wool Scarf", None, {}), (40, 22, "cell", "twelve left", None, {}),
    (45, 29, "StaticText", "blue", None, {"editable": "plaintext"}), (47, 31, "MenuListPopup", "", None, {}),
    (50, 35, "link", "Blue Speaker", None, {"focusable": True}), (51, 36, "StaticText", "price ", None, {}),
    (52, 36, "StaticText", "$19.99", None, {}), (53, 37, "StaticText", "Item", None, {}),
    (54, 38, "StaticText", "Stock", None, {}), (55, 39, "StaticText", "Wool Scarf", None, {}),
    (56, 40, "StaticText", "twelve left", None, {}), (58, 47, "", "", None, {}),
    (59, 58, "option", "Name", None, {"focusable": True, "selected": False}),
    (60, 58, "option", "Price", None, {"focusable": True, "selected": True}),
    (61, 50, "StaticText", "Blue Speaker", None, {}),
    (62, 61, "InlineTextBox", "Blue Speaker", None, {})]


def cdp_nodes(recorded, first=100):
    """Rows -> what CDP answers."""
    nodes = []
    for number, _, role, name, value, properties in recorded:
        node = {
            "nodeId": str(number), "ignored": not role, "role": {"type": "role", "value": role or "none"},
            "name": {"type": "computedString", "value": name},
            "properties": [{"name": key, "value": {"value": v}} for key, v in properties.items()],
            "childIds": [str(row[0]) for row in recorded if row[1] == number],
            "backendDOMNodeId": first + number}
        nodes.append(node | ({"value": {"type": "string", "value": value}} if value is not None else {}))
    return nodes


def walk(nodes):
    """(node, parent) in document order; the parent is the next one around that is not ignored."""
    by_id = {node["nodeId"]: node for node in nodes}

    def visit(node, parent):
        if not node["ignored"]:
            yield node, parent
            parent = node
        for child in node.get("childIds", []):
            if child in by_id:
                yield from visit(by_id[child], parent)
    return visit(nodes[0], None)


def told(node):
    return (
        node["role"]["value"], node.get("name", {}).get("value", ""),
        {p["name"]: p["value"].get("value") for p in node.get("properties", [])})


def webarena_text(nodes):
    """The observation WebArena makes of a tree: its rules for what to leave out, written down from the facts
    (not its code)."""
    lines, depths = [], {}
    for node, parent in walk(nodes):
        role, name, properties = told(node)
        shown = {
            k: v
            for k, v in properties.items()
            if k not in ("focusable", "editable", "readonly", "level", "settable", "multiline", "invalid")}
        outer = depths[parent["nodeId"]] if parent else 0
        empty = (
            not name.strip()
            and not shown
            and role
            in (
                "generic", "img", "list", "strong", "paragraph", "banner", "navigation", "Section",
                "LabelText", "Legend",
                "listitem"))
        depths[node["nodeId"]] = outer if empty else outer + 1
        if not empty and role != "InlineTextBox":
            lines.append(
                "\t" * outer
                + f"[{node['nodeId']}] {role} {name!r}"
                + "".join(f" {key}: {value}" for key, value in shown.items()))
    kept = []
    for line in lines:
        if "StaticText" not in line or not any(
            line.split("StaticText ")[1][1:-1] in before for before in kept[-3:]):
            kept.append(line)
    return "Tab 0 (current): One Stop Mini\n\n" + "\n".join(kept)


def browsergym_text(nodes):
    """The flattened tree of BrowserGym: bids for elements, none for texts, a value behind the name, texts
    that the parent's name holds left out."""
    lines, depths = [], {}
    for node, parent in walk(nodes):
        role, name, properties = told(node)
        outer = depths[parent["nodeId"]] if parent else 0
        skip = (role == "generic" and not name) or (
            role == "StaticText" and (not name.strip() or (parent and name.strip() in told(parent)[1])))
        depths[node["nodeId"]] = outer if skip else outer + 1
        if not skip:
            bid = (
                ""
                if role in ("StaticText", "RootWebArea", "InlineTextBox", "ListMarker", "MenuListPopup")
                else f"[a{node['nodeId']}] ")
            value = f" value={node['value']['value']!r}" if "value" in node else ""
            more = [
                f"{key}={v!r}"
                for key, v in properties.items()
                if key in ("checked", "selected", "expanded", "hasPopup", "url")
            ] + (["clickable"] if role == "link" else [])
            lines.append(
                "\t" * outer + f"{bid}{role} {name.strip()!r}{value}" + "".join(f", {word}" for word in more))
    return "\n".join(lines)


def shown(feed):
    title, nodes = feed
    return abstract(title, "shopping", nodes).text


def test_a_recorded_page_gives_one_text_from_all_four_feeders():
    nodes = cdp_nodes(RECORDED)
    assert shown(from_cdp(nodes)) == STATE
    assert shown(from_html(HTML)) == STATE
    assert shown(from_text(webarena_text(nodes))) == STATE
    assert shown(from_text(browsergym_text(nodes))) == STATE


def test_every_shown_line_leads_to_its_element():
    title, nodes = from_html(HTML)
    screen = abstract(title, "shopping", nodes)
    assert screen.refs[5].ref.get("name") == "q"
    assert screen.refs[10].ref.get("href") == "/p/1"
    assert screen.refs[12].ref.tag == "b"
    assert abstract("", "", from_cdp(cdp_nodes(RECORDED))[1]).refs[6].ref == 131
    assert abstract("", "", from_text(webarena_text(cdp_nodes(RECORDED)))[1]).refs[6].ref == "31"
    assert abstract("", "", from_text(browsergym_text(cdp_nodes(RECORDED)))[1]).refs[6].ref == "a31"


# ---- text observations -------------------------------------------------------------------------------------

def test_a_text_of_2023():
    """Older Chromium: menuitem for option, img, gridcell; a value as the text inside; names as Python writes
    them; a cut last line."""
    title, nodes = from_text("""Tab 0: x | Tab 1 (current): Orders | Tab 2: y

[1] RootWebArea 'Orders' focused: True
\t[11] link '\\ue604 DASHBOARD'
\t[12] textbox "Women's size" required: True
\t\t[13] StaticText 'XL'
\t[20] combobox 'Sort By' hasPopup: menu expanded: False
\t\t[21] menuitem 'Position ' selected: False
\t\t[22] menuitem 'Price' selected: True
\t[30] row 'Total $5 Edit now 3 left'
\t\t[31] gridcell 'Total $5'
\t\t[32] gridcell 'Edit now'
\t\t\t[33] link 'Edit'
\t\t[34] gridcell '3 left'
\t[40] checkbox 'All' checked: true
\t[41] radio 'One' checked: false
\t[50] link 'cut he""")
    assert title == "Orders"
    assert shown((title, nodes)).split("\n")[2:] == [
        "link 'DASHBOARD'", "textbox 'Women's size' value 'XL'",
        "combobox 'Sort By' value 'Price' options 'Position' | 'Price'", "text 'Total $5'", "link 'Edit'",
        "text 'now'", "text '3 left'", "checkbox 'All' checked",
        "radio 'One'"]
    assert webarena_tabs("Tab 0: x | Tab 1 (current): Orders | Tab 2: y\n\n[1] RootWebArea 'Orders'") == (
        ["x", "Orders", "y"],
        1)


def test_a_text_without_indentation_still_reads():
    title, nodes = from_text(
        "[1] RootWebArea 'T' focused: True\n"
        "combobox 'Sort' hasPopup: menu\n[6] option 'A' selected: False\n[7] option 'B' selected: True\n[8] "
                             "link 'Home'"
    )
    assert shown((title, nodes)).split("\n")[2:] == [
        "combobox 'Sort' value 'B' options 'A' | 'B'",
        "link 'Home'"]


@pytest.mark.parametrize("bad", ["", "Tab 0 (current): x\n\n", "<html></html>", "error: page crashed"])
def test_a_text_without_nodes_is_refused(bad):
    for feed in (from_text, from_text):
        with pytest.raises(ValueError, match="no line of the form"):
            feed(bad)


# ---- frames and HTML ---------------------------------------------------------------------------------------

def test_frames_are_joined_where_they_stand():
    root = [
        (0, None, "RootWebArea", "Outer", None, {}), (1, 0, "StaticText", "before", None, {}),
        (2, 0, "Iframe", "f", None, {}),
        (3, 0, "StaticText", "after", None, {})]
    inner = [
        (0, None, "RootWebArea", "Inner", None, {}), (1, 0, "link", "in", None, {}),
        (2, 0, "Iframe", "", None, {})]
    deep = [(0, None, "RootWebArea", "Deep", None, {}), (1, 0, "button", "deep", None, {})]
    title, nodes = from_cdp(cdp_nodes(root), {102: cdp_nodes(inner, 200), 202: cdp_nodes(deep, 300)})
    assert title == "Outer"
    assert [(n.name, n.ref) for n in nodes] == [
        ("before", 101), ("in", 201), ("deep", 301),
        ("after", 103)]
    html = "<title>Outer</title><p>before</p><iframe src=/in></iframe><p>after</p>"
    pages = {"/in": "<a href=/>in</a><iframe srcdoc='<button>deep</button>'></iframe>"}
    assert [n.name for n in from_html(html, pages.get)[1]] == ["before", "in", "deep", "after"]
    assert [n.name for n in from_html(html)[1]] == ["before", "after"]


@pytest.mark.parametrize(
    "html",
    [
        "", "   ", "\x00", "<", "plain", "<?xml version='1.0' encoding='utf-16'?><p>x</p>", "<html>",
        "\ud800<p>x</p>",
        "<div>" * 3000])
def test_odd_html_never_raises(html):
    assert isinstance(from_html(html)[1], list)


# ---- Chromium ----------------------------------------------------------------------------------------------

FRAGMENTS = """
<label for=q>Search</label><input id=q value=blue placeholder=ph>

<input placeholder=Search><input type=search placeholder="Find it" value=x><input title=Tt><input
aria-label=AA placeholder=P><input placeholder=P title=T>

<label>Sort by <select><option>Name<option selected>Price</select></label><label for=s>Size</label><select
id=s><option>S<option disabled>  M  m </select>

<label><input type=checkbox checked> Featured <b>now</b></label><label><input type=radio
name=r> A</label><label><input type=checkbox>I <b>ag</b>ree</label>

<a href=/x>Blue <b>Speaker</b></a> <a href=/y><img alt=Logo src=x></a> <a>no href</a> <a href=/z></a> <a
href=x><img alt=Logo src=x>Shop</a>

<h2><a href=/x>Blue</a> rest</h2><h3>One<span>Two</span></h3><h3>One <span>Two</span></h3><h3
><div>a</div><div>b</div></h3><h1></h1><h2><img alt=im src=x></h2>

<p>Price <b>$5</b> only<br>next line <em>em</em>, end</p><p>x<wbr>y</p><p>so&shy;ft</p><p>a
b</p><pre>
lead
 two</pre>

<table><caption>Cap <b>x</b></caption><tr><th>Name</th><th>Qty</th></tr><tr><td>Chair</td><td
>5</td></tr><tr><td><a href=x>Desk</a> big</td><td></td></tr></table>

<table><tr><td><input type=checkbox aria-label=c></td><td><form><input value=1
aria-label=n><button>Go</button></form></td></tr></table>

<ul><li>one</li><li><a href=/1>two</a></li></ul><ol><li>first</ol><dl><dt>t</dt><dd>d</dd></dl>

<textarea aria-label=Body>
hello
world</textarea><input type=password value=abc aria-label=Pw><input type=number value=3 aria-label=N><input
type=date aria-label=D value=2024-01-02>

<input type=email aria-label=E><input type=range aria-label=R><input type=file aria-label=F><input
type=file><input type=color aria-label=C>
<input type=time aria-label=Ti>

<form><input type=submit><input type=submit value=Go><input type=submit value=""><input type=reset><input
type=button value=B><input type=image alt=Im src=x>
<input type=image src=x><button>Bt <i>x</i></button><button aria-label=AL>zz</button><button
title=TT></button><input type=hidden value=h></form>

<div hidden>no</div><div aria-hidden=true>no2</div><template>t</template><noscript>ns</noscript><details
><summary>Sum <a href=x>L</a></summary>inside</details>
<details open><summary>Sum2</summary>inside2</details>

<img src=x alt="Alt"><img src=x><img src=x alt=""><img title=Ti src=x><figure><img alt=f
src=x><figcaption>Cap</figcaption></figure><svg><title>sv</title></svg>
<button><svg><title>Ico</title></svg></button>

<fieldset><legend>Leg <b>q</b></legend><input aria-label=x></fieldset><select multiple aria-label=M><option
selected>a<option selected>b<option>c</select>
<select size=3 aria-label=S><option>a</select>

<select aria-label=G><optgroup label=OG><option>a</optgroup><optgroup label=O2><option label=Lab>b<option
disabled>c</optgroup></select><select aria-label=E>
</select><select aria-label=DD><option disabled>d<option>e</select>

<div role=button>RB</div><div role=link>RL</div><span role=tab aria-selected=true>Tab</span><div
role=heading>H</div><nav aria-label=Main><a href=/>Home</a></nav>
<div role=checkbox aria-checked=true aria-label=cc></div>

<div>a<!-- c -->b</div><code>co</code>&nbsp;&nbsp;<span> </span>tail<kbd>k</kbd><small
>s</small><s>st</s><mark>mk</mark><time>tm</time><sup>2</sup>

<a href=/x title=TT>Name</a><a href=/x title=TT></a><a href=/x aria-label=AL>Name</a><input
aria-labelledby=l1><span id=l1>By Label</span>
<button disabled>Dis</button><input disabled aria-label=di value=v>

<a href=/x><div>Blue</div><div>$5</div></a><a href=/x>a<span>b</span><span> c</span></a><a
href=/x><span>a</span>
<span>b</span></a><a href=/x>one<br>two</a><button><span>Up</span><span>vote</span></button><a
href=x><h3>Title</h3><p>Desc</p></a>

<a href=x>a<button>b</button></a><a href=x>a <select><option>q</select></a><h2>a<input
value=v>b</h2><label>Qty <input value=3 size=2> pieces</label>
<label>Email <span>*</span><input></label>

<label for=a>One</label><label for=a>Two</label><input id=a><div><label
for=late>Late</label><p>note</p><input id=late></div><input type=checkbox>
<input type=radio title=rt>

<a href=x>vis<span hidden>hid</span><span aria-hidden=true>ah</span></a><a href=x
hidden>no</a><dialog>closed</dialog><dialog open>opened</dialog>
<output>out</output><progress value=3></progress><a href=x>5<small>pt</small></a>

<nav><ol><li><a href=/>Home</a></li><li aria-current=page>Speakers</li></ol></nav><p>1 of 3 <a
href=?p=2>Next</a></p><div role=presentation>pp</div>
<img role=presentation alt=zz src=x><a href=x role=button>as button</a>

<h1> &nbsp; x </h1><a href="x">  spaced   out  </a><input value="  sp  x " aria-label=sp><a href=x
aria-label=""><span aria-label=SL>sx</span></a>
<abbr title=x>ab</abbr><i class=icon></i>
"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the browser checks need playwright (requirements-webarena.txt)")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if not path:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-features=IsolateOrigins,site-per-process"])
        try:
            page = browser.new_page()
            yield page, page.context.new_cdp_session(page)
        finally:
            browser.close()


def test_names_and_roles_are_chromiums_own(browser):
    """Each part of FRAGMENTS, as Chromium reports it and as lxml does."""
    page, client = browser
    for fragment in FRAGMENTS.split("\n\n"):
        html = f"<!doctype html><html><head><title>T</title></head><body>{fragment}</body></html>"
        page.set_content(html)
        assert shown(from_cdp(client.send("Accessibility.getFullAXTree")["nodes"])) == shown(
            from_html(html)
        ), fragment


def test_a_live_tree_gives_one_text_from_all_four_feeders(browser):
    page, client = browser
    page.set_content(HTML)
    nodes = client.send("Accessibility.getFullAXTree")["nodes"]
    assert (
        shown(from_cdp(nodes))
        == shown(from_text(webarena_text(nodes)))
        == shown(from_text(browsergym_text(nodes)))
        == STATE)


def test_live_frames(browser):
    """Inner frames come from getFullAXTree with their frameId; their element from DOM.getFrameOwner."""
    page, client = browser
    html = (
        "<title>T</title><p>before</p>"
        "<iframe srcdoc='<a href=/>in</a><iframe "
            "srcdoc=\"<button>deep</button>\"></iframe>'></iframe><p>after</p>"
    )
    page.set_content(html)
    client.send("Page.enable")
    client.send("DOM.enable")
    frames, waiting = {}, client.send("Page.getFrameTree")["frameTree"].get("childFrames", [])
    while waiting:
        frame = waiting.pop()
        waiting += frame.get("childFrames", [])
        owner = client.send("DOM.getFrameOwner", {"frameId": frame["frame"]["id"]})["backendNodeId"]
        frames[owner] = client.send("Accessibility.getFullAXTree", {"frameId": frame["frame"]["id"]})["nodes"]
    assert len(frames) == 2
    assert (
        [n.name for n in from_cdp(client.send("Accessibility.getFullAXTree")["nodes"], frames)[1]]
        == ["before", "in", "deep", "after"]
        == [n.name for n in from_html(html)[1]])
