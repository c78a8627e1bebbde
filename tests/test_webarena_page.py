"""The abstract state: what is shown, how it is written, that it reads back; addresses."""
import random

import pytest

from dreamgym.envs.webarena.page import Addresses, Node, abstract, clean, quotable, read_line, read_page
from dreamgym.envs.webarena.text import ground
from dreamgym.episode import number_lines

BASES = {"shopping": "http://h:7770", "shopping_admin": "http://h:7780/admin", "reddit": "http://forum.test/",
         "wikipedia": "http://h:8888/wiki"}


def lines(*nodes):
    return abstract("T", "shopping", list(nodes)).text.split("\n")[2:]


def text(name):
    return Node("StaticText", name)


def test_the_header():
    """Stops a state of another form than its documentation; test_webarena_feeds.py has the lines of each role."""
    screen = abstract("One Stop Mini", "shopping/cart?p=2", [], tabs=["Home", "Cart"], tab=1)
    assert screen.text == "tabs: Home | *Cart\npage: One Stop Mini\nurl: shopping/cart?p=2"
    page = read_page(screen.text)
    assert (page.title, page.address, page.tabs, page.tab) == (
        "One Stop Mini", "shopping/cart?p=2", ("Home", "Cart"), 1)


def test_a_long_tab_keeps_its_last_words():
    """Stops the tabs of Magento's grids, which begin with their messages, from all being called the same."""
    said = "The information in this tab has been changed. This tab contains invalid data. Please resolve this "
    (line,) = lines(Node("tab", f"{said} before saving. Loading... Bestsellers"))
    assert line.startswith("tab '…") and line.endswith("Loading... Bestsellers'")
    assert len(line) == len("tab ''") + 120
    assert lines(Node("tab", " Most\n Viewed ")) == ["tab 'Most Viewed'"]


def test_a_text_may_be_longer_than_a_name():
    """Stops reviews and posts from ending before they say what a task asks for."""
    long = "word " * 300
    for node, most in ((text(long), 1000), (Node("heading", long), 120), (Node("link", long), 120)):
        (line,) = lines(node)
        assert len(read_line(line).name) == most and line.endswith("word…'")
    state = abstract("T", "shopping", [text(long[:500] + "$5")]).text
    assert ground(state, "stop [$5]").endswith("word…'") and len(ground(state, "stop [$5]")) < 150


@pytest.mark.parametrize("tabs", [(), ("Home", "Cart")])
def test_windows_of_a_long_page_number_the_lines_as_a_policy_sees_them(tabs):
    """Stops `click [3]` from meaning another line than the third one that is shown."""
    nodes, names = [Node("link", f"L{i}") for i in range(1, 66)], []
    for window in (0, 1, 2):
        screen = abstract("T", "map", nodes, tabs, window=window)
        shown = number_lines(screen.text).split("\n")
        for number, node in screen.lines.items():
            assert shown[number - 1] == f"{node} [{number}]"
        assert min(screen.lines) == 3 + bool(tabs)  # header lines are no elements; each window begins again
        assert screen.text.endswith(f"\nwindow {window + 1} of 3")
        names += [node.name for node in screen.lines.values()]
    assert names == [node.name for node in nodes]
    assert abstract("T", "map", nodes, tabs, window=9) == screen
    assert abstract("T", "map", nodes, window=-1) == abstract("T", "map", nodes)
    assert abstract("T", "map", nodes[:30]).text.endswith("\nlink 'L30'")  # exactly one window: no such line


@pytest.mark.parametrize("nodes, shown", [
    ([text("Sort"), text("by"), Node("combobox", "Sort by")], ["combobox 'Sort by'"]),
    ([Node("checkbox", "Red", checked=False), text("Red"), text("big")], ["checkbox 'Red'", "text 'big'"]),
    ([Node("heading", "Lamp"), Node("link", "Lamp")], ["link 'Lamp'"]),
    ([text("by"), Node("combobox", "Sort by")], ["text 'by'", "combobox 'Sort by'"]),        # half a name
    ([text("5"), text("stars"), text("5")], ["text '5'", "text 'stars'", "text '5'"]),
    ([Node("link", "A"), Node("link", "A")], ["link 'A'", "link 'A'"]),
    ([text("Lamp"), Node("button", ""), text(" \n")], ["text 'Lamp'", "button ''"]),
    ([Node("link", "\ue608"), Node("img", ""), Node("heading", "  "), Node("textbox", ""),
      Node("link", "\ue604 CATALOG")], ["textbox ''", "link 'CATALOG'"])])
def test_what_a_neighbour_says_is_dropped_and_nothing_else(nodes, shown):
    assert lines(*nodes) == shown


@pytest.mark.parametrize("name, safe", [
    ("Women's Top", "Women's Top"), ("'quoted'", "’quoted’"), ("dogs' toys", "dogs’ toys"),
    ("a\nb\tc\xa0d", "a b c d"), ("x' value 'y", "x’ value ’y"), ("a' | 'b", "a’ | ’b"),
    ("soft\xadhy", "softhy"), ("", ""), ("x" * 200, "x" * 119 + "…")])
def test_names_are_made_safe(name, safe):
    assert quotable(name) == safe
    assert read_line(f"textbox '{safe}' value '{safe}' options '{safe}' | 'z'").name == safe


def test_any_page_reads_back_as_it_was_written():
    rng = random.Random(3)
    bits = ["'", " ' ", "' value '", "' checked", "' options '", "' | '", "|", "*", "link 'x'", "\n", "note: x",
            "window 1 of 2", "a", "it's", "é", "日", "\u200b", "\ue001", '"', "]", ": "]
    roles = ["link", "StaticText", "textbox", "combobox", "checkbox", "heading"]
    name = lambda: "".join(rng.choice(bits) for _ in range(rng.randint(0, 6)))
    for _ in range(400):
        nodes = [Node(role, name(), name() if role in ("textbox", "combobox") else "",
                      rng.random() < 0.5 if role == "checkbox" else None,
                      tuple(name() for _ in range(rng.randint(0, 3))) if role == "combobox" else ())
                 for role in rng.choices(roles, k=rng.randint(0, 12))]
        tabs = [name() for _ in range(rng.randint(1, 3))]
        screen = abstract(name(), "shopping/" + clean(name()), nodes, tabs, rng.randrange(len(tabs)),
                          rng.randint(0, 3), 4)
        page = read_page(screen.text)
        assert page.text == screen.text and page.lines == screen.lines
        assert (page.window, page.windows) == (screen.window, screen.windows)


@pytest.mark.parametrize("state", [
    "", "page: x", "url: y\npage: x", "page: x\nurl: y\n[1] link 'a'", "page: x\nurl: y\nhello",
    "page: x\nurl: y\nlink a", "page: x\nurl: y\nlink 'a' 'b'", "page: x\nurl: y\nlink 'a'\nwindow 1 of 1",
    "page: x\nurl: y\nwindow 3 of 2", "page: x\nurl: y\ncheckbox 'a' value 'b' checked options junk",
    "tabs: a\npage: x\nurl: y", "page: x\nurl: y\nlink 'a'\nnote: no element [9]"])
def test_what_abstract_could_not_have_written_is_refused(state):
    assert read_page(state) is None


@pytest.mark.parametrize("url, short", [
    ("http://h:7770/", "shopping"), ("http://h:7770/cart?p=2", "shopping/cart?p=2"),
    ("http://h:7780/admin", "shopping_admin"), ("http://h:7780/admin/sales/", "shopping_admin/sales/"),
    ("http://forum.test/f/books#c1", "reddit/f/books"), ("http://h:8888/wiki/A/Pisa", "wikipedia/A/Pisa"),
    ("http://h:7770/?q=1", "shopping/?q=1"), ("http://h:7780/admin?q=1", "shopping_admin?q=1")])
def test_addresses_have_no_host_and_lead_back(url, short):
    """States that differ by the host alone, and an address that leads elsewhere than it says."""
    addresses = Addresses(BASES)
    assert addresses.short(url) == short == addresses.short(addresses.full(short))
    assert addresses.full(url) == url


def test_wikipedia_starts_on_an_article():
    """Stops the address that WebArena exports for Wikipedia from shutting out all other articles and the search."""
    start = "http://h:8888/wiki_2022-05/A/User:The_other_Kiwix_guy/Landing"
    addresses = Addresses(BASES | {"wikipedia": start})
    assert addresses.full("wikipedia") == addresses.full(start) == start
    for url, short in (("http://h:8888/wiki_2022-05/A/Pisa", "wikipedia/A/Pisa"),
                       ("http://h:8888/search?pattern=Pisa", "wikipedia/search?pattern=Pisa")):
        assert (addresses.short(url), addresses.full(short), addresses.full(url)) == (short, url, url)
        assert addresses.site(url) == "wikipedia"
    with pytest.raises(ValueError, match="no address"):
        addresses.full("http://h:8888/other_book/A/Pisa")


@pytest.mark.parametrize("bad", ["http://example.com/", "http://h:77701/x", "http://h:7780/administrator", "",
                                 "javascript:alert(1)", "shoppingx/cart", "file:///etc/passwd"])
def test_other_hosts_are_refused(bad):
    with pytest.raises(ValueError, match="no address"):
        Addresses(BASES).full(bad)
