"""Four feeders, one text: a page's HTML, what WebArena and BrowserGym would have written of it, and Chromium
itself where it is."""
import pytest

from dreamgym.envs.webarena.ax_tree_sources import from_cdp, from_html, from_text, webarena_tabs
from dreamgym.envs.webarena.page import abstract

HTML = """<!doctype html><html><head><title>One Stop Mini</title><style>p { color: red }</style></head><body>
<header><a href="/cart">Cart <b>2</b></a></header>
<form action="/search"><label for="q">Search</label><input id="q" type="search" name="q"
value="blue"><label>Sort by <select name="s"><option>Name</option>
<option selected>Price</option></select></label><label><input type="checkbox"
checked> Featured</label><button>Go</button></form>
<h1>Results</h1><ul><li><h2><a href="/p/1">Blue Speaker</a></h2><p>price <b>$19.99</b></p></li></ul></body
></html>"""

STATE = """page: One Stop Mini
url: shopping
link 'Cart 2'
searchbox 'Search' value 'blue'
combobox 'Sort by' value 'Price' options 'Name' | 'Price'
checkbox 'Featured' checked
button 'Go'
heading 'Results'
link 'Blue Speaker'
text 'price'
text '$19.99'"""

# what WebArena and BrowserGym write of it
WEBARENA = """Tab 0 (current): One Stop Mini

[0] RootWebArea 'One Stop Mini' url: about:blank
\t[9] link 'Cart 2'
\t[4] form ''
\t\t[23] StaticText 'Search'
\t\t[11] searchbox 'Search'
\t\t\t[34] StaticText 'blue'
\t\t[26] StaticText 'Sort by '
\t\t[27] combobox 'Sort by' hasPopup: menu expanded: False
\t\t\t[35] MenuListPopup ''
\t\t\t\t[42] option 'Name' selected: False
\t\t\t\t[43] option 'Price' selected: True
\t\t[14] checkbox 'Featured' checked: true
\t\t[16] button 'Go'
\t[5] heading 'Results'
\t[29] ListMarker '• '
\t[30] heading 'Blue Speaker'
\t\t[36] link 'Blue Speaker'
\t[37] StaticText 'price '
\t[38] StaticText '$19.99'"""
BROWSERGYM = """RootWebArea 'One Stop Mini', url='about:blank'
\t[a3] banner ''
\t\t[a9] link 'Cart 2', clickable
\t[a4] form ''
\t\t[a10] LabelText ''
\t\t\tStaticText 'Search'
\t\t[a11] searchbox 'Search' value='blue'
\t\t\tStaticText 'blue'
\t\t[a12] LabelText ''
\t\t\tStaticText 'Sort by'
\t\t\t[a27] combobox 'Sort by' value='Price', hasPopup='menu', expanded=False
\t\t\t\tMenuListPopup ''
\t\t\t\t\t[a42] option 'Name', selected=False
\t\t\t\t\t[a43] option 'Price', selected=True
\t\t[a14] checkbox 'Featured', checked='true'
\t\t[a16] button 'Go'
\t[a5] heading 'Results'
\t[a6] list ''
\t\t[a18] listitem ''
\t\t\tListMarker '•'
\t\t\t[a30] heading 'Blue Speaker'
\t\t\t\t[a36] link 'Blue Speaker', clickable
\t\t\t\t\tInlineTextBox 'Blue Speaker'
\t\t\t[a31] paragraph ''
\t\t\t\tStaticText 'price'
\t\t\t\tStaticText '$19.99'"""


def shown(feed):
    title, nodes = feed
    return abstract(title, "shopping", nodes).text


def test_html_and_recorded_texts_give_one_text_and_lines_lead_to_elements():
    feeds = [from_html(HTML), from_text(WEBARENA), from_text(BROWSERGYM)]
    assert [shown(feed) for feed in feeds] == [STATE] * 3
    html, webarena, browsergym = (abstract("", "", found).lines for _, found in feeds)
    assert (webarena[5].ref, browsergym[5].ref) == ("27", "a27")
    assert [html[4].ref.get("name"), html[9].ref.get("href"), html[11].ref.tag] == ["q", "/p/1", "b"]


# ---- text observations ----

OLD = """Tab 0: x | Tab 1 (current): Orders | Tab 2: y

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
\t[50] link 'cut he"""
GRID = """[1] RootWebArea 'Orders'
\t[5] row 'http://localhost:7780/admin/sales/order/view/order_id/299/'
\t\t[6] columnheader '299'
\t\t[7] cell 'Sarah Miller'
\t[8] row 'Grand total 5'
\t[9] row 'http://a/ Canceled'
\t\t[10] cell 'http://a/'
\t\t[11] cell 'Canceled'"""
FLAT = """[1] RootWebArea 'T' focused: True
combobox 'Sort' hasPopup: menu
[6] option 'A' selected: False
[7] option 'B' selected: True
[8] link 'Home'"""


@pytest.mark.parametrize("text, lines", [
    (OLD, ["page: Orders", "url: shopping", "link 'DASHBOARD'", "textbox 'Women's size' value 'XL'",
           "combobox 'Sort By' value 'Price' options 'Position' | 'Price'", "text 'Total $5'", "link 'Edit'",
           "text 'now'", "text '3 left'", "checkbox 'All' checked", "radio 'One'"]),
    # the title of a row is no text; an address in a cell is
    (GRID, ["page: Orders", "url: shopping", "text '299'", "text 'Sarah Miller'", "text 'Grand total 5'",
            "text 'http://a/'", "text 'Canceled'"]),
    (FLAT, ["page: T", "url: shopping", "combobox 'Sort' value 'B' options 'A' | 'B'", "link 'Home'"])])
def test_texts_of_2023_and_without_indentation(text, lines):
    """Older Chromium: menuitem for option, img, gridcell; a value as the text inside."""
    assert shown(from_text(text)).split("\n") == lines
    assert webarena_tabs(OLD) == (["x", "Orders", "y"], 1)


@pytest.mark.parametrize("bad", ["", "Tab 0 (current): x\n\n", "<html></html>", "error: page crashed"])
def test_a_text_without_nodes_is_refused(bad):
    with pytest.raises(ValueError, match="no line of the form"):
        from_text(bad)


# ---- HTML ----

@pytest.mark.parametrize("html", [
    "", "   ", "\x00", "<", "plain", "<?xml version='1.0' encoding='utf-16'?><p>x</p>", "<html>",
    "\ud800<p>x</p>", "<div>" * 3000])
def test_odd_html_never_raises(html):
    assert isinstance(from_html(html)[1], list)


# ---- Chromium ----

# What the own sites' pages are made of
FRAGMENTS = """
<label>Sort by <select><option>Name<option selected>Price</select></label><label for=s>Size</label><select
id=s><option>S<option>  M  m </select>

<label><input type=checkbox checked> Featured <b>now</b></label><label><input type=radio
name=r> A</label><label><input type=checkbox>I <b>ag</b>ree</label>

<a href=/x>Blue <b>Speaker</b></a> <a href=/y><img alt=Logo src=x></a> <a>no href</a> <a href=/z></a> <a
href=x><img alt=Logo src=x>Shop</a>

<h2><a href=/x>Blue</a> rest</h2><h3>One<span>Two</span></h3><h3>One <span>Two</span></h3><h3
><div>a</div><div>b</div></h3><h1></h1><h2><img alt=im src=x></h2>

<p>Price <b>$5</b> only<br>next line <em>em</em>, end</p><p>a
b</p>

<table><tr><th>Name</th></tr><tr><td><a href=x>Desk</a> big</td><td></td></tr></table>

<table><tr><td><input type=checkbox aria-label=c></td><td><form><input value=1
aria-label=n><button>Go</button></form></td></tr></table>

<ul><li>one</li><li><a href=/1>two</a></li></ul><ol><li>first</ol><dl><dt>t</dt><dd>d</dd></dl>

<textarea aria-label=Body>
hello
world</textarea><input type=password value=abc aria-label=Pw><input type=hidden value=h>

<form><button>Bt <i>x</i></button><button aria-label=AL>zz</button><button disabled>Dis</button><input
disabled aria-label=di value=v></form>

<div hidden>no</div><template>t</template><noscript>ns</noscript><img src=x alt="Alt"><img src=x alt="">

<nav aria-label=Main><a href=/>Home</a></nav><div>a<!-- c -->b</div><code>co</code>&nbsp;<span
> </span>tail<small>s</small>

<a href=/x><div>Blue</div><div>$5</div></a><a href=/x>a<span>b</span><span> c</span></a><a
href=/x><span>a</span>
<span>b</span></a><button><span>Up</span><span>vote</span></button><a href=x><h3>Title</h3><p>Desc</p></a>

<label>Qty <input value=3 size=2> pieces</label><label>Email <span>*</span><input></label>
<div><label for=late>Late</label><p>note</p><input id=late></div>

<nav><ol><li><a href=/>Home</a></li><li aria-current=page>Speakers</li></ol></nav><p>1 of 3 <a
href=?p=2>Next</a></p>

<h1> &nbsp; x </h1><a href="x">  spaced   out  </a><input value="  sp  x " aria-label=sp>
"""


def test_names_and_roles_are_chromiums_own(browser):
    """Each part of FRAGMENTS, as Chromium reports it and as lxml does; then the page above."""
    page = browser.chromium.new_page()
    client = page.context.new_cdp_session(page)
    for fragment in FRAGMENTS.split("\n\n"):
        html = f"<!doctype html><html><head><title>T</title></head><body>{fragment}</body></html>"
        page.set_content(html)
        nodes = client.send("Accessibility.getFullAXTree")["nodes"]
        assert shown(from_cdp(nodes)) == shown(from_html(html)), fragment
    page.set_content(HTML)
    assert shown(from_cdp(client.send("Accessibility.getFullAXTree")["nodes"])) == STATE
    page.close()
