"""The own sites: every page is well formed, every form does what it says, and a reset undoes all of it."""

import hashlib
import threading
import urllib.request
from collections import deque
from urllib.parse import parse_qs, urljoin, urlsplit

import pytest

pytest.importorskip("flask", reason="the own sites need flask (requirements-webarena.txt)")
html = pytest.importorskip("lxml.html", reason="reading pages needs lxml (requirements-webarena.txt)")

from dreamgym.envs.webarena.sites import SITES, SiteDatabase  # noqa: E402

FIRST_SHOP = "c6c71383"                          # of the shop's first data, seed 7
SHOP_TABLES = ("categories", "products", "addresses", "orders", "order_items", "wishes", "reviews")


@pytest.fixture
def world():
    return SiteDatabase()


class Visitor:
    """A browser without a screen: cookies, redirects, forms by the text of their button."""

    def __init__(self, world, site, logged_in=True):
        self.world, self.site, self.cookies = world, site, world.login(site) if logged_in else {}

    def get(self, address):
        parts = urlsplit(address)
        return self._follow(
            self.world.handle(self.site, "GET", parts.path or "/", parts.query, None, self.cookies), address)

    def press(self, button, **values):
        """Submits the form whose button says that, with the values its boxes hold; `values` replace them
        (None leaves one out, as an unticked box)."""
        form = next(
            form for form in self.page.iter("form") if any(b.text == button for b in form.iter("button")))
        filled = {**dict(form.form_values()), **values}
        filled = {name: value for name, value in filled.items() if value is not None}
        action = urljoin(self.address, form.get("action") or urlsplit(self.address).path)
        if form.method == "GET":
            return self.get(f"{action}?{'&'.join(f'{name}={value}' for name, value in filled.items())}")
        return self._follow(self.world.handle(self.site, "POST", action, "", filled, self.cookies), action)

    def _follow(self, response, address):
        for name, value in response.set_cookies.items():
            self.cookies = {**self.cookies, name: value}
        if response.status == 303:
            return self.get(response.headers["Location"])
        self.status, self.address, self.body = response.status, address, response.body
        self.page = html.document_fromstring(response.body)
        self.text = " ".join(" ".join(self.page.find("body").text_content().split()).split())
        return self


def one(world, query, *arguments):
    return world.db.execute(query, arguments).fetchone()[0]


def dump(world, tables):
    return "\n".join(
        str(tuple(row)) for table in tables for row in world.db.execute(f"SELECT * FROM {table}"))


def tables(world):
    return [
        row[0]
        for row in world.db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]


def crawl(world, site, most):
    """Every page that links lead to from the start, breadth first."""
    visitor, seen, queue = Visitor(world, site), {"/"}, deque(["/"])
    while queue and most:
        most -= 1
        yield visitor.get(queue.popleft())
        for link in visitor.page.iter("a"):
            target = urljoin(visitor.address, link.get("href")).partition("#")[0]
            if not urlsplit(target).netloc and target not in seen:
                seen.add(target)
                queue.append(target)


# ---- pages -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("site", SITES)
def test_every_page_is_there_and_short_and_well_formed(world, site):
    """Stops: dead links, pages a small model cannot read, controls without a name, forms without a button,
    scripts, ids that stand for two elements."""
    pages = 0
    for visitor in crawl(world, site, 600):
        pages += 1
        where, page = f"{site}{visitor.address}", visitor.page
        assert visitor.status == 200, where
        assert page.findtext(".//title").strip(), where
        assert len(visitor.text.split()) < 220, f"{where}: {len(visitor.text.split())} words"
        assert not page.xpath(
            "//script | //@onclick | //@style[contains(., 'display') or contains(., 'visibility')]"
        ), where
        ids = page.xpath("//@id")
        assert len(ids) == len(set(ids)), where
        labelled = set(page.xpath("//label/@for"))
        for control in page.xpath("//input[not(@type='hidden')] | //select | //textarea"):
            assert control.get("aria-label") or control.get("id") in labelled, (
                f"{where}: {html.tostring(control)}")
        for form in page.iter("form"):
            assert form.get("autocomplete") == "off" and any(
                button.text_content().strip() for button in form.iter("button")
            ), where
        assert all(link.text_content().strip() for link in page.iter("a")), where
    assert pages >= (1 if site == "homepage" else 20)


def test_pages_that_are_not_there(world):
    for path in ("/nope", "/product/nope", "/orders/99999999999999999999999", "/orders/abc"):
        visitor = Visitor(world, "shopping").get(path)
        assert visitor.status == 404 and visitor.page.findtext(".//title") == "Not found"


def test_odd_queries_are_no_errors(world):
    for site, path in (
        ("shopping", "/search?q=%27%22%25%00&sort=x&page=-9"),
        ("shopping", "/category/audio?page=999999999999999999999999"),
        ("shopping_admin", "/products?name=%ff&status=1"),
        ("shopping_admin", "/reports?year=%25&month=0")):
        assert Visitor(world, site).get(path).status == 200


def test_the_homepage_leads_to_all_sites_and_shows_no_password(world):
    visitor = Visitor(world, "homepage").get("/")
    links = [link.get("href") for link in visitor.page.find(".//main").iter("a")]
    assert sorted(links) == sorted(f"{world.bases[site]}/" for site in SITES if site != "homepage")
    assert all(
        user in visitor.text and password not in visitor.body for user, password in world.accounts.values())


# ---- the database ------------------------------------------------------------------------------------------

def test_the_first_data_follow_from_the_seed(world):
    """Stops: data that differ from machine to machine (the digest was made once), or that do not hang on the
    seed."""
    everything = tables(world)
    assert dump(SiteDatabase(7), everything) == dump(world, everything)
    assert dump(SiteDatabase(8), everything) != dump(world, everything)
    first = dump(world, [f"shop_{table}" for table in SHOP_TABLES])
    assert hashlib.sha256(first.encode()).hexdigest().startswith(FIRST_SHOP)
    assert "None" not in first
    assert not world.db.execute("PRAGMA foreign_key_check").fetchall()


def test_the_order_totals_are_their_items(world):
    assert not world.db.execute(
        "SELECT id FROM shop_orders WHERE total != (SELECT sum(price * quantity) FROM shop_order_items WHERE "
                                "order_id = id)"
    ).fetchall()


def test_reset_undoes_everything(world):
    before = dump(world, tables(world))
    cookies = world.login("shopping")
    visitor = Visitor(world, "shopping").get("/product/blue-hose")
    visitor.press("Add to Cart").get("/checkout").press("Place Order").get("/account").press("Sign Out")
    Visitor(world, "shopping", False).get("/customer/account/login/").press(
        "Sign In", user="emma.lopez@gmail.com", password="Password.123")
    assert dump(world, tables(world)) != before
    world.reset()
    assert dump(world, tables(world)) == before
    assert world.login("shopping") == cookies == SiteDatabase().login("shopping")
    visitor.cookies = cookies
    assert "Emma Lopez" in visitor.get("/account").text


def test_a_commit_is_refused(world):
    """Stops: an evaluator's helper that writes and commits, after which no reset could restore the first
    data."""
    world.db.execute("DELETE FROM shop_orders")
    with pytest.raises(Exception, match="not authorized"):
        world.db.commit()
    world.reset()
    assert one(world, "SELECT count(*) FROM shop_orders") == 150


def test_worlds_are_independent(world):
    other = SiteDatabase()
    Visitor(world, "shopping").get("/product/blue-hose").press("Add to Cart")
    assert "blue-hose" in Visitor(world, "shopping").get("/cart").body
    assert "Your cart is empty." in Visitor(other, "shopping").get("/cart").text


# ---- logins ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "site, path, user, button",
    [
        ("shopping", "/customer/account/login/", "Email", "Sign In"),
        ("shopping_admin", "/", "Username", "Sign in"), ("reddit", "/login", "Username", "Log in"),
        ("gitlab", "/users/sign_in", "Username or email", "Sign in")])
def test_login_forms_are_those_of_webarena(world, site, path, user, button):
    name, password = world.accounts[site]
    visitor = Visitor(world, site, False).get(path)
    assert [label.text for label in visitor.page.iter("label")] == [user, "Password"]
    assert "Wrong user name or password." in visitor.press(button, user=name, password="wrong").text
    assert f"sid_{site}" not in visitor.cookies
    visitor.press(button, user=name, password=password)
    assert (
        one(
            world, "SELECT name FROM sessions JOIN users ON users.id = user_id WHERE sid = ?",
            visitor.cookies[f"sid_{site}"])
        == name)
    assert button not in [link.text for link in visitor.page.iter("a")]


def test_login_leads_back_but_nowhere_else(world):
    visitor = Visitor(world, "shopping", False).get("/orders?page=2")
    assert visitor.address == "/customer/account/login/?next=%2Forders%3Fpage%3D2"
    name, password = world.accounts["shopping"]
    assert visitor.press("Sign In", user=name, password=password).address == "/orders?page=2"
    for bad in ("//example.com/", "https://example.com/", "/\\example.com", "/a\nb"):
        answer = world.handle(
            "shopping", "POST", "/customer/account/login/", "",
            {"user": name, "password": password, "next": bad})
        assert answer.headers["Location"] == "/"


def test_a_session_belongs_to_its_site(world):
    sid = world.login("shopping")["sid_shopping"]
    assert (
        world.handle("shopping_admin", "GET", "/orders", "", None, {"sid_shopping_admin": sid}).status == 303)


# ---- the shop ----------------------------------------------------------------------------------------------

def test_search_sort_and_paging(world):
    visitor = Visitor(world, "shopping").get("/")
    visitor.press("Search", q="blue").press("Sort", sort="Cheapest")
    prices = [float(price.text[1:]) for price in visitor.page.xpath("//main//span[@class='price']")]
    assert len(prices) == 8 and prices == sorted(prices)
    visitor.get(urljoin(visitor.address, visitor.page.xpath("//a[text()='Next']/@href")[0]))
    assert parse_qs(urlsplit(visitor.address).query) == {"q": ["blue"], "sort": ["Cheapest"], "page": ["2"]}
    assert float(visitor.page.xpath("//main//span[@class='price']")[0].text[1:]) >= prices[-1]
    assert "No products found." in visitor.press("Search", q="zebra").text


def test_cart_and_order(world):
    stock = one(world, "SELECT stock FROM shop_products WHERE slug = 'blue-hose'")
    price = one(world, "SELECT price FROM shop_products WHERE slug = 'blue-hose'")
    visitor = Visitor(world, "shopping").get("/product/blue-hose").press("Add to Cart", quantity="2")
    assert visitor.address == "/cart" and "You added Blue Hose to your cart." in visitor.text
    assert "You added Blue Hose" not in visitor.get("/cart").text
    assert "You changed Blue Hose to 3." in visitor.press("Update", quantity="3").text
    assert f"total ${3 * price / 100:,.2f}" in visitor.text
    assert f"at most {min(stock, 20)}" in visitor.press("Update", quantity="999").text
    assert "must be a number" in visitor.press("Update", quantity="-1").text
    visitor.get("/product/blue-kite").press("Add to Cart").press("Update", quantity="1")
    visitor.get("/checkout").press("Place Order", payment="Check")
    assert visitor.address == "/orders/1151"
    assert "Your order 1151 was placed." in visitor.text
    assert "status Pending" in visitor.text
    assert one(world, "SELECT total FROM shop_orders WHERE id = 1151") == price + one(
        world, "SELECT price FROM shop_products WHERE slug = 'blue-kite'")
    assert one(world, "SELECT stock FROM shop_products WHERE slug = 'blue-hose'") == stock - 1
    assert "was canceled" in visitor.press("Cancel Order").text
    assert one(world, "SELECT stock FROM shop_products WHERE slug = 'blue-hose'") == stock
    assert "Cancel Order" not in visitor.body and "You added 2 of 2 products" in visitor.press("Reorder").text
    visitor.press("Remove").press("Remove")
    assert "Your cart is empty." in visitor.text and visitor.get("/checkout").address == "/cart"


def test_what_is_not_sold_cannot_be_bought(world):
    visitor = Visitor(world, "shopping").get("/product/blue-hose").press("Add to Cart")
    world.db.execute("UPDATE shop_products SET stock = 0 WHERE slug = 'blue-hose'")
    assert "Blue Hose is out of stock." in visitor.get("/checkout").press("Place Order").text
    assert "Add to Cart" not in visitor.get("/product/blue-hose").body


def test_orders_of_others_are_hidden(world):
    other = one(world, "SELECT id FROM shop_orders WHERE user_id != 1 AND status = 'Pending'")
    visitor = Visitor(world, "shopping")
    assert visitor.get(f"/orders/{other}").status == 404
    assert world.handle("shopping", "POST", f"/orders/{other}/cancel", "", {}, visitor.cookies).status == 404


def test_wishlist_address_newsletter_and_contact(world):
    visitor = Visitor(world, "shopping").get("/product/blue-hose").press("Add to Wishlist")
    assert visitor.address == "/wishlist" and "You added Blue Hose to your wishlist." in visitor.text
    while "Remove" in visitor.body:
        visitor.press("Remove")
    assert "Your wishlist is empty." in visitor.text
    assert "You saved your address." in visitor.get("/address").press("Save Address", city="Rome").text
    assert one(world, "SELECT city FROM shop_addresses WHERE user_id = 1") == "Rome"
    assert "All fields are needed." in visitor.press("Save Address", city=" ").text
    assert "You are subscribed." in visitor.get("/newsletter").press("Save", subscribed="1").text
    assert "You are not subscribed." in visitor.press("Save", subscribed=None).text
    assert (
        "Your message was sent."
        in visitor.get("/contact").press("Send", subject="Return", message="My kite is broken.").text)
    assert one(world, "SELECT subject || ': ' || text FROM shop_messages") == "Return: My kite is broken."


# ---- the back office ---------------------------------------------------------------------------------------

def test_a_review_waits_for_the_admin(world):
    shop, admin = Visitor(world, "shopping"), Visitor(world, "shopping_admin")
    shop.get("/product/blue-hose/review").press("Submit Review", stars="2", review="It leaks.")
    assert "waits for approval" in shop.text and "It leaks." not in shop.text
    assert "stars 2, Pending" in shop.get("/reviews").text
    admin.get("/reviews").press("Filter", status="Pending")
    admin.get(admin.page.xpath("//main//a[starts-with(text(), 'Review')]/@href")[0])
    assert "It leaks." in admin.text and "You approved review" in admin.press("Approve").text
    assert "It leaks." in shop.get("/product/blue-hose").text
    admin.press("Delete")
    assert "You deleted review" in admin.text and "It leaks." not in shop.get("/product/blue-hose").text


def test_the_admin_changes_products(world):
    shop, admin = Visitor(world, "shopping"), Visitor(world, "shopping_admin").get("/products/blue-hose")
    assert "You saved Blue Hose." in admin.press("Save", price="7.5", stock="3").text
    assert "price $7.50" in shop.get("/product/blue-hose").text and "stock 3" in shop.text
    for wrong in ({"price": "abc"}, {"price": "1.234"}, {"stock": "-1"}, {"price": ""}):
        assert "Price must be like 19.99" in admin.press("Save", **wrong).text
    admin.press("Save", enabled=None)
    assert shop.get("/product/blue-hose").status == 404
    assert "No products found." in shop.get("/search?q=blue+hose").text
    assert "disabled" in admin.get("/products?name=hose&status=Disabled").text


def test_the_admin_changes_orders(world):
    order = one(world, "SELECT max(id) FROM shop_orders WHERE status = 'Pending'")
    admin = Visitor(world, "shopping_admin").get("/orders").press("Filter", status="Pending")
    assert "Complete," not in admin.text
    assert (
        f"Order {order} is now Complete."
        in admin.get(f"/orders/{order}").press("Save", status="Complete").text)
    assert "Cancel Order" not in admin.body
    admin.press("Save", status="Processing").press("Cancel Order")
    assert "status Canceled" in admin.text and not admin.page.xpath("//main//form")


def test_reports_are_sums_of_the_orders(world):
    """Against sums in Python over all orders."""
    admin = Visitor(world, "shopping_admin")
    orders = [row for row in world.db.execute("SELECT * FROM shop_orders WHERE status != 'Canceled'")]
    march = [row["total"] for row in orders if row["date"].startswith("2024-03")]
    assert (
        f"2024-03: orders {len(march)}, sales ${sum(march) / 100:,.2f}"
        in admin.get("/reports?report=Sales&year=2024").text)
    sold = {}
    for item in world.db.execute(
        "SELECT name, quantity, date FROM shop_order_items JOIN shop_orders ON shop_orders.id = order_id AND "
                                 "status != 'Canceled' "
        "JOIN shop_products ON shop_products.id = product_id"):
        if item["date"].startswith("2023-12"):
            sold[item["name"]] = sold.get(item["name"], 0) + item["quantity"]
    best = min(sold, key=lambda name: (-sold[name], name))
    admin.get("/reports?report=Bestsellers&year=2023&month=12")
    assert admin.page.xpath("//main//a")[0].text == best and f"sold {sold[best]}" in admin.text
    assert f"sales ${sum(row['total'] for row in orders) / 100:,.2f}" in admin.get("/").text


# ---- over HTTP ---------------------------------------------------------------------------------------------

def test_served_pages_are_the_pages_in_process(world):
    with world.serve() as served:
        assert all(base.startswith("http://127.0.0.1:") for base in served.bases.values())
        assert len(
            set(served.bases.values())
        ) == len(SITES)
        request = urllib.request.Request(
            f"{served.bases['shopping']}/account",
            headers={"Cookie": f"sid_shopping={world.login('shopping')['sid_shopping']}"})
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["Cache-Control"] == "no-store"
            assert (
                answer.read().decode()
                == world.handle("shopping", "GET", "/account", "", None, world.login("shopping")).body)
        with urllib.request.urlopen(f"{served.bases['shopping']}/static/style.css") as answer:
            assert b"--accent" in answer.read()
        assert f"{served.bases['shopping']}/" in world.handle("homepage", "GET", "/").body
    assert world.bases["shopping"] == "http://shopping.test"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{served.bases['shopping']}/", timeout=2)


def test_threads_do_not_mix(world):
    """Stops: two requests at once on the one connection."""
    failed = []

    def visit(site):
        try:
            visitor = Visitor(world, site)
            for _ in range(40):
                assert visitor.get("/").status == 200
        except Exception as error:               # of a thread: must reach the test
            failed.append(error)

    threads = [threading.Thread(target=visit, args=(site,)) for site in SITES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
