"""The abstract state: what is shown, how it is written, that it reads back; addresses; grounded actions."""

import random

import pytest

from dreamgym.envs.webarena.page import Addresses, Node, abstract, clean, ground_text, quotable, read_line, read_screen

BASES = {"shopping": "http://h:7770", "shopping_admin": "http://h:7780/admin", "reddit": "http://forum.test/", "wikipedia": "http://h:8888/wiki"}


def lines(*nodes, **more):
    return abstract("T", "shopping", list(nodes), **more).text.split("\n")[2:]


def text(name):
    return Node("StaticText", name)


def test_the_documented_form():
    nodes = [Node("link", "Home"), Node("searchbox", "Search", "blue"), Node("combobox", "Sort by", "Price", options=("Name", "Price")),
             Node("checkbox", "Featured", checked=True), Node("radio", "Red", checked=False), Node("heading", "Blue Speaker"), text("$19.99")]
    screen = abstract("One Stop Mini", "shopping/cart?p=2", nodes, tabs=["Home", "Cart"], tab=1, error="no element [44]")
    assert screen.text == """tabs: Home | *Cart
page: One Stop Mini
url: shopping/cart?p=2
[1] link 'Home'
[2] searchbox 'Search' value 'blue'
[3] combobox 'Sort by' value 'Price' options 'Name' | 'Price'
[4] checkbox 'Featured' checked
[5] radio 'Red'
[6] heading 'Blue Speaker'
[7] text '$19.99'
note: no element [44]"""
    page = read_screen(screen.text)
    assert (page.title, page.address, page.tabs, page.tab, page.error) == ("One Stop Mini", "shopping/cart?p=2", ("Home", "Cart"), 1, "no element [44]")
    assert page.lines == screen.refs and str(page) == screen.text          # Node equality covers value, checked and options


def test_what_a_neighbour_says_is_dropped_and_nothing_else():
    assert lines(text("Sort"), text("by"), Node("combobox", "Sort by")) == ["[1] combobox 'Sort by'"]
    assert lines(Node("checkbox", "Red", checked=False), text("Red"), text("big")) == ["[1] checkbox 'Red'", "[2] text 'big'"]
    assert lines(Node("heading", "Lamp"), Node("link", "Lamp")) == ["[1] link 'Lamp'"]
    assert lines(text("by"), Node("combobox", "Sort by")) == ["[1] text 'by'", "[2] combobox 'Sort by'"]         # half a name is no label
    assert lines(text("5"), text("stars"), text("5")) == ["[1] text '5'", "[2] text 'stars'", "[3] text '5'"]
    assert lines(Node("link", "A"), Node("link", "A")) == ["[1] link 'A'", "[2] link 'A'"]                       # two links are two links
    assert lines(text("Lamp"), Node("button", ""), text(" \n")) == ["[1] text 'Lamp'", "[2] button ''"]


def test_names_without_words_vanish_but_fields_stay():
    assert lines(Node("link", "\ue608"), Node("img", ""), Node("heading", "  "), Node("textbox", ""), Node("link", "\ue604 CATALOG")) == ["[1] textbox ''",
                                                                                                                                          "[2] link 'CATALOG'"]


@pytest.mark.parametrize("name, safe", [("Women's Top", "Women's Top"), ("'quoted'", "’quoted’"), ("dogs' toys", "dogs’ toys"), ("a\nb\tc\xa0d", "a b c d"),
                                        ("x' value 'y", "x’ value ’y"), ("a' | 'b", "a’ | ’b"), ("soft\xadhy", "softhy"), ("", ""), ("x" * 200, "x" * 119 + "…")])
def test_names_are_made_safe(name, safe):
    assert quotable(name) == safe
    assert read_line(f"[1] textbox '{safe}' value '{safe}' options '{safe}' | 'z'")[1].name == safe


def test_any_page_reads_back_as_it_was_written():
    """Hostile names: quotes, our own marks, newlines, unicode. A second rendering of what was read must be the same text."""
    rng, bits = random.Random(3), ["'", " ' ", "' value '", "' checked", "' options '", "' | '", "|", "*", "[1] link 'x'", "\n", "note: x", "window 1 of 2", "a", "it's",
                                   "é", "日", "\u200b", "\ue001", '"', "]", ": "]
    name = lambda: "".join(rng.choice(bits) for _ in range(rng.randint(0, 6)))
    for _ in range(400):
        nodes = [Node(role, name(), name() if role in ("textbox", "combobox") else "", rng.random() < 0.5 if role == "checkbox" else None,
                      tuple(name() for _ in range(rng.randint(0, 3))) if role == "combobox" else ())
                 for role in rng.choices(["link", "StaticText", "textbox", "combobox", "checkbox", "heading"], k=rng.randint(0, 12))]
        tabs = [name() for _ in range(rng.randint(1, 3))]
        screen = abstract(name(), "shopping/" + clean(name()), nodes, tabs, rng.randrange(len(tabs)), rng.randint(0, 3), 4, name())
        page = read_screen(screen.text)
        assert str(page) == screen.text and page.lines == screen.refs and (page.window, page.windows) == (screen.window, screen.windows)


@pytest.mark.parametrize("state",
                         ["", "page: x", "url: y\npage: x", "page: x\nurl: y\n[2] link 'a'", "page: x\nurl: y\n[1] link 'a'\n[3] link 'b'", "page: x\nurl: y\nhello",
                                   "page: x\nurl: y\n[1] link a", "page: x\nurl: y\n[1] link 'a' 'b'", "page: x\nurl: y\n[1] link 'a'\nwindow 1 of 1",
                                   "page: x\nurl: y\nwindow 3 of 2", "page: x\nurl: y\n[1] checkbox 'a' value 'b' checked options junk", "tabs: a\npage: x\nurl: y"])
def test_what_abstract_could_not_have_written_is_refused(state):
    with pytest.raises(ValueError, match="state"):
        read_screen(state)


def test_windows_of_a_long_page():
    nodes = [Node("link", f"L{i}") for i in range(1, 66)]
    first, second, third = (abstract("T", "map", nodes, window=w) for w in (0, 1, 2))
    assert first.windows == 3 and list(first.refs) == list(range(1, 31)) and list(third.refs) == list(range(61, 66))
    assert second.text.split("\n")[2] == "[31] link 'L31'" and second.text.endswith("window 2 of 3")
    assert abstract("T", "map", nodes, window=9).text == third.text and abstract("T", "map", nodes, window=-1).text == first.text
    assert abstract("T", "map", nodes[:30]).text.endswith("[30] link 'L30'")                                     # exactly one window: no such line


def test_grounded_actions():
    state = abstract("T", "shopping", [Node("link", "it's 5"), Node("searchbox", "Search", "x"), Node("combobox", "Sort", "A", options=("A", "B"))]).text
    assert ground_text(state, "click [1]") == "click link 'it's 5'"
    assert ground_text(state, "type [2] [blue] [1]") == "type searchbox 'Search' [blue] [1]"
    assert ground_text(state, "type [3] [B] [0]") == "type combobox 'Sort' [B] [0]"
    for action in ("click [12]", "scroll [down]", "stop [click [1]]", "go_back", "nonsense"):
        assert ground_text(state, action) == action


@pytest.mark.parametrize("url, short", [("http://h:7770/", "shopping"), ("http://h:7770/cart?p=2", "shopping/cart?p=2"), ("http://h:7780/admin", "shopping_admin"),
                                        ("http://h:7780/admin/sales/order/", "shopping_admin/sales/order/"), ("http://forum.test/f/books#c1", "reddit/f/books"),
                                        ("http://h:8888/wiki/A/Pisa", "wikipedia/A/Pisa"), ("http://h:7770/?q=1", "shopping/?q=1")])
def test_addresses_have_no_host_and_lead_back(url, short):
    addresses = Addresses(BASES)
    assert addresses.short(url) == short
    assert addresses.short(addresses.full(short)) == short and addresses.full(url) == url


def test_other_hosts_are_refused_unless_allowed():
    addresses = Addresses(BASES)
    for bad in ("http://example.com/", "http://h:77701/x", "http://h:7780/administrator", "javascript:alert(1)", "", "shoppingx/cart", "file:///etc/passwd"):
        with pytest.raises(ValueError, match="no address"):
            addresses.full(bad)
    assert addresses.short("https://example.com/a") == "example.com/a"
    assert Addresses(BASES, elsewhere=True).full("http://example.com/") == "http://example.com/"
    with pytest.raises(ValueError):
        Addresses(BASES, elsewhere=True).full("javascript:alert(1)")
