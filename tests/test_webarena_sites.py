"""The own sites: every page is well formed, forms refuse what they must, pages say what the database holds, and a
reset undoes all of it. What the task templates do is played in test_webarena_offline.py."""
import hashlib
import math
import re
import threading
import urllib.request
from collections import Counter, deque
from urllib.parse import urljoin, urlsplit

import pytest
from lxml import html

from dreamgym.envs.webarena.ax_tree_sources import from_html
from dreamgym.envs.webarena.page import abstract
from dreamgym.envs.webarena.sites import DATABASES, SITES, SiteDatabase, _first_data
from dreamgym.envs.webarena.sites.map import SPEED, TOWNS, Atlas
from dreamgym.envs.webarena.sites.site import open_session

FIRST_DATA = "077b82d0"                          # of seed 7, train 0
ME, CODER, EMMA = "MarvelsGrantMan136", "byteblaze", "emma.lopez@gmail.com"
HOSE = "/product/river-hose"


class Visitor:
    """A browser of one site: cookies, redirects, forms. `names` are the texts and names of its page, in
    order."""

    def __init__(self, world, site, user=None):
        self.world, self.site = world, site
        self.cookies = world.login(site)
        if user is not None:
            person = world.db.execute("SELECT id FROM users WHERE site = ? AND name = ?", (site, user)).fetchone()
            self.cookies = {f"sid_{site}": open_session(world.db, person[0])} if person else {}

    def ask(self, method, path, form=None):
        parts = urlsplit(path)
        return self.world.handle(self.site, method, parts.path, parts.query, form, self.cookies)

    def status(self, path, **form):
        return self.ask("POST" if form else "GET", path, form or None).status

    def get(self, path, *texts):
        """The names of a page; `texts` must be among them, `!text` must not."""
        answer = self.ask("GET", path)
        if answer.status == 303:
            return self.get(answer.headers["Location"], *texts)
        assert answer.status == 200, path
        self.address, self.page = path, html.document_fromstring(answer.body)
        self.names = [node.name for node in from_html(answer.body)[1]]
        for text in texts:
            assert (text.removeprefix("!") in self.names) != text.startswith("!"), (path, text, self.names)
        return self.names

    def post(self, path, *texts, **form):
        """The page after the form."""
        answer = self.ask("POST", path, form)
        assert answer.status == 303, (path, form, answer.status)
        self.cookies = {**self.cookies, **answer.set_cookies}
        return self.get(answer.headers["Location"], *texts)

    def press(self, button, *texts, **values):
        """Submits the form of this page whose button says that, with the values its boxes hold; `values`
        replace them (None leaves one out, as an unticked box)."""
        form = next(form for form in self.page.iter("form") if any(b.text == button for b in form.iter("button")))
        values = {name: value for name, value in {**dict(form.form_values()), **values}.items()
                  if value is not None}
        action = urljoin(self.address, form.get("action") or urlsplit(self.address).path)
        if form.method == "POST":
            return self.post(action, *texts, **values)
        return self.get(f"{action}?{'&'.join(f'{name}={value}' for name, value in values.items())}", *texts)

    def one(self, query, *arguments):
        return self.world.db.execute(query, arguments).fetchone()

    def rows(self, query, *arguments):
        return self.world.db.execute(query, arguments).fetchall()


@pytest.fixture(scope="module")
def made():
    return SiteDatabase()


@pytest.fixture
def world(made):
    yield made
    made.reset()


def visitor(site):
    return pytest.fixture(lambda world: Visitor(world, site))


shop, admin, forum, code, maps = map(visitor, ("shopping", "shopping_admin", "reddit", "gitlab", "map"))


def dump(world, tables="SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"):
    return "\n".join(str(tuple(row)) for table, in world.db.execute(tables).fetchall()
                     for row in world.db.execute(f"SELECT * FROM {table}"))


# ---- pages ----

@pytest.mark.parametrize("site, least", zip(SITES, (150, 300, 250, 300, 100, 1)))
def test_every_page_is_there_and_short_and_well_formed(world, site, least):
    """Walks the links: dead ones, pages a small model cannot read, controls without a name, double ids."""
    me, seen, queue = Visitor(world, site), {"/"}, deque(["/"])
    while queue and len(seen) < 700:
        path = queue.popleft()
        answer = me.ask("GET", path)
        assert answer.status == 200, path
        page = html.document_fromstring(answer.body)
        title, nodes = from_html(answer.body)
        screen = abstract(title, f"{site}{path}", nodes)
        assert title.strip() and screen.windows == 1 and len(screen.text.split()) < 220, path
        assert all(node.name for node in screen.lines.values()), path
        assert not page.xpath("//script | //@onclick | //@style[contains(., 'display')]"), path
        assert max(Counter(page.xpath("//@id")).values(), default=1) == 1, path
        labelled = set(page.xpath("//label/@for"))
        for control in page.xpath("//input[not(@type='hidden')] | //select | //textarea"):
            assert control.get("aria-label") or control.get("id") in labelled, path
        for form in page.iter("form"):
            action = urlsplit(urljoin(path, form.get("action"))).path
            assert form.get("autocomplete") == "off" and form.xpath(".//button/text()"), path
            assert world.apps[site].url_map.bind("localhost").test(action, form.method), (path, action)
        for link in page.iter("a"):
            target = urljoin(path, link.get("href"))
            assert link.text_content().strip(), path
            if not urlsplit(target).netloc and target not in seen:
                seen.add(target)
                queue.append(target)
    assert len(seen) >= least


@pytest.mark.parametrize("site, path, status", [
    ("shopping", "/nope", 404), ("shopping", "/product/nope", 404), ("shopping", f"/orders/{10**30}", 404),
    ("shopping", "/orders/abc", 404), ("reddit", "/f/nowhere", 404), ("reddit", f"/f/books/{10**30}", 404),
    ("reddit", "/user/nobody", 404), ("gitlab", "/abel/nothing", 404),
    ("gitlab", f"/abel/x/issues/{10**30}", 404), ("gitlab", "/nobody", 404), ("map", "/place/mars", 404),
    ("shopping", "/search?q=%27%22%25%00&sort=x&page=-9", 200),
    ("shopping", f"/category/audio?page={10**30}", 200), ("shopping_admin", "/products?name=%ff&status=1", 200),
    ("shopping_admin", "/reports?year=%25&month=0", 200), ("reddit", "/f/books?sort=x", 200)])
def test_odd_addresses(world, site, path, status):
    assert Visitor(world, site).status(path) == status


def test_the_homepage_leads_to_all_sites_and_shows_no_password(world):
    home = Visitor(world, "homepage")
    home.get("/")
    assert sorted(home.page.xpath("//main//a/@href")) == sorted(
        f"{base}/" for site, base in world.bases.items() if site != "homepage")
    assert all(f"account {user}" in home.names and password not in home.ask("GET", "/").body
               for user, password in world.accounts.values())


# ---- the database ----

def test_the_first_data_follow_from_the_seed(made):
    """Stops: data that differ from machine to machine (the digest was made once)."""
    assert hashlib.sha256(dump(made).encode()).hexdigest().startswith(FIRST_DATA)
    _first_data.cache_clear()
    assert dump(SiteDatabase(7)) == dump(made) != dump(SiteDatabase(8))
    assert dump(SiteDatabase(7, "train 1")) != dump(made)
    assert "None" not in dump(made) and not made.db.execute("PRAGMA foreign_key_check").fetchall()
    assert not made.db.execute("SELECT id FROM shop_orders WHERE total != (SELECT sum(price * quantity) FROM "
                               "shop_order_items WHERE order_id = id)").fetchall()


def test_splits_share_no_names():
    """Stops: products, people, towns, places, posts, projects or issues of a validation or test database that
    a training database has, too. Only the accounts are the same everywhere."""
    names = {"train": set(), "valid": set(), "test": set()}
    for database in DATABASES:
        db = SiteDatabase(7, database).db
        for query in ("SELECT name FROM shop_products", "SELECT site || full_name FROM users WHERE name NOT IN "
                      f"('admin', '{EMMA}', '{CODER}', '{ME}')", "SELECT name FROM map_places", "SELECT title "
                      "FROM forum_posts", "SELECT substr(path, instr(path, '/')) FROM code_projects",
                      "SELECT title FROM code_items"):
            names[database.split()[0]] |= {row[0] for row in db.execute(query)}
    assert min(map(len, names.values())) > 500
    assert not names["train"] & (names["valid"] | names["test"]) and not names["valid"] & names["test"]


def test_a_database_becomes_another(world, shop):
    shop.post(f"{HOSE}/cart", "River Hose")
    for name in ("test 1", "train 0", "test 1"):
        world.reset(name)
        assert dump(world) == dump(SiteDatabase(7, name))
        other = SiteDatabase(7, name)
        for site, path in (("shopping", "/cart"), ("map", "/"), ("gitlab", "/"), ("reddit", "/account")):
            assert Visitor(world, site).get(path) == Visitor(other, site).get(path)
    world.reset("train 0")


def test_reset_undoes_everything(world, shop):
    before, cookies = dump(world), shop.cookies
    shop.get(HOSE)
    shop.press("Add to Cart")
    shop.get("/checkout")
    shop.press("Place Order")
    shop.post("/logout")
    shop.post("/customer/account/login/", user=EMMA, password="Password.123")
    assert dump(world) != before
    world.reset()
    assert dump(world) == before
    assert world.login("shopping") == cookies == SiteDatabase().login("shopping")
    shop.cookies = cookies
    shop.get("/account", "Emma Lopez")


def test_a_reset_undoes_a_commit(world):
    """A commit, after which a rollback could not restore the first data."""
    world.db.execute("BEGIN")
    world.db.execute("DELETE FROM shop_orders")
    world.db.commit()
    world.reset()
    assert world.db.execute("SELECT count(*) FROM shop_orders").fetchone()[0] == 150


# ---- logins ----

@pytest.mark.parametrize("site, path, user, button", [
    ("shopping", "/customer/account/login/", "Email", "Sign In"), ("shopping_admin", "/", "Username", "Sign in"),
    ("reddit", "/login", "Username", "Log in"), ("gitlab", "/users/sign_in", "Username or email", "Sign in")])
def test_login_forms_are_those_of_webarena(world, site, path, user, button):
    (name, password), guest = world.accounts[site], Visitor(world, site, "")
    guest.get(path)
    assert [label.text for label in guest.page.iter("label")] == [user, "Password"]
    guest.press(button, "Wrong user name or password.", user=name, password="wrong")
    assert not guest.cookies
    guest.press(button, f"!{button}", user=name, password=password)
    assert guest.one("SELECT name FROM sessions JOIN users ON users.id = user_id WHERE sid = ?",
                     guest.cookies[f"sid_{site}"])[0] == name


def test_login_leads_back_but_nowhere_else(world):
    guest, account = Visitor(world, "shopping", ""), dict(zip(("user", "password"), world.accounts["shopping"]))
    guest.get("/orders?page=2")
    assert guest.address == "/customer/account/login/?next=%2Forders%3Fpage%3D2"
    guest.press("Sign In", **account)
    assert guest.address == "/orders?page=2"
    for bad in ("//example.com/", "https://example.com/", "/\\example.com", "/a\nb"):
        answer = guest.ask("POST", "/customer/account/login/", {**account, "next": bad})
        assert answer.headers["Location"] == "/"


def test_guests_and_sessions_of_other_sites_are_asked_to_log_in(world, forum, shop, admin):
    post = "/f/{}/{}".format(*forum.one("SELECT forum, id FROM forum_posts"))
    for site, path, login, shown in (("reddit", "/submit", "/login", post),
                                     ("gitlab", "/projects/new", "/users/sign_in", "/explore")):
        guest = Visitor(world, site, "")
        assert guest.ask("GET", path).headers["Location"].startswith(f"{login}?next=")
        assert not {"Upvote", "Post comment", "New project", "My posts"} & set(guest.get(shown))
    forum.get(post, "Upvote")
    admin.cookies = {"sid_shopping_admin": shop.cookies["sid_shopping"]}
    assert admin.status("/orders") == 303


# ---- the shop ----

def test_search_sort_and_paging(shop):
    def prices():
        return [float(price[1:]) for price in shop.page.xpath("//main//span[@class='price']/text()")]

    shop.get("/")
    shop.press("Search", q="acme")
    shop.press("Sort", sort="Cheapest")
    first = prices()
    assert len(first) == 8 and first == sorted(first)
    shop.get(urljoin(shop.address, shop.page.xpath("//a[text()='Next']/@href")[0]))
    assert shop.address == "/search?q=acme&sort=Cheapest&page=2" and prices()[0] >= first[-1]
    shop.press("Search", "No products found.", q="zebra")


def test_cart_and_order(shop):
    stock, price = shop.one("SELECT stock, price FROM shop_products WHERE slug = 'river-hose'")
    kite = shop.one("SELECT price FROM shop_products WHERE slug = 'amber-kite'")[0]
    stock_now = lambda: shop.one("SELECT stock FROM shop_products WHERE slug = 'river-hose'")[0]
    shop.get(HOSE)
    shop.press("Add to Cart", "You added River Hose to your cart.", quantity="2")
    shop.get("/cart", "!You added River Hose to your cart.")
    shop.press("Update", "You changed River Hose to 3.", f"total ${3 * price / 100:,.2f}", quantity="3")
    shop.press("Update", f"You can buy at most {min(stock, 20)} of River Hose.", quantity="999")
    shop.press("Update", "Quantity must be a number from 1.", quantity="-1")
    shop.get("/product/amber-kite")
    shop.press("Add to Cart")
    shop.press("Update", quantity="1")
    shop.get("/checkout")
    shop.press("Place Order", "Order 1151", "Your order 1151 was placed.", "status Pending",
               f"total ${(price + kite) / 100:,.2f}", "payment Check", payment="Check")
    assert stock_now() == stock - 1
    shop.press("Cancel Order", "Your order 1151 was canceled.", "!Cancel Order")
    assert stock_now() == stock
    shop.press("Reorder", "You added 2 of 2 products to your cart.")
    shop.press("Remove")
    shop.press("Remove", "Your cart is empty.")
    shop.get("/checkout")
    assert shop.address == "/cart"


def test_what_is_not_sold_cannot_be_bought(shop):
    shop.post(f"{HOSE}/cart")
    shop.get("/checkout")
    shop.world.db.execute("UPDATE shop_products SET stock = 0 WHERE slug = 'river-hose'")
    shop.press("Place Order", "River Hose is out of stock.")
    shop.get(HOSE, "!Add to Cart")


def test_orders_of_others_are_hidden(shop):
    other = shop.one("SELECT id FROM shop_orders WHERE user_id != 1 AND status = 'Pending'")[0]
    assert shop.status(f"/orders/{other}") == 404 == shop.status(f"/orders/{other}/cancel", x="1")


def test_wishlist_address_newsletter_and_contact(shop):
    shop.get("/wishlist")
    while "Remove" in shop.names:
        shop.press("Remove")
    assert "Your wishlist is empty." in shop.names
    shop.get("/address")
    shop.press("Save Address", "All fields are needed.", city=" ")
    shop.get("/newsletter")
    shop.press("Save", "You are subscribed.", "subscribed yes", subscribed="1")
    shop.press("Save", "You are not subscribed.", subscribed=None)
    shop.get("/contact")
    shop.press("Send", "Your message was sent.", subject="Return", message="My kite is broken.")
    assert tuple(shop.one("SELECT subject, text FROM shop_messages")) == ("Return", "My kite is broken.")


# ---- the back office ----

def test_a_review_waits_for_the_admin(shop, admin):
    shop.get(f"{HOSE}/review")
    shop.press("Submit Review", "Your review waits for approval.", "stars 2, Pending", stars="2", review="It leaks.")
    shop.get(HOSE, "!It leaks.")
    admin.get("/reviews")
    admin.press("Filter", status="Pending")
    admin.get(admin.page.xpath("//main//a[starts-with(text(), 'Review')]/@href")[0], "It leaks.")
    number = admin.address.rpartition("/")[2]
    admin.press("Approve", f"You approved review {number}.")
    shop.get(HOSE, "It leaks.")
    admin.press("Delete", f"You deleted review {number}.")
    shop.get(HOSE, "!It leaks.")


def test_the_admin_changes_products(shop, admin):
    admin.get("/products/river-hose")
    admin.press("Save", "You saved River Hose.", price="7.5", stock="3")
    shop.get(HOSE, "price $7.50", "stock 3")
    for wrong in ({"price": "abc"}, {"price": "1.234"}, {"stock": "-1"}, {"price": ""}):
        admin.press("Save", "Price must be like 19.99, and stock a number.", **wrong)
    admin.press("Save", enabled=None)
    assert shop.status(HOSE) == 404
    shop.get("/search?q=river+hose", "No products found.")
    admin.get("/products?name=hose&status=Disabled", "$7.50, stock 3, disabled")


def test_the_admin_changes_orders(admin):
    order = admin.one("SELECT max(id) FROM shop_orders WHERE status = 'Pending'")[0]
    admin.get("/orders")
    assert not any(name.endswith(", Complete") for name in admin.press("Filter", status="Pending"))
    admin.get(f"/orders/{order}")
    admin.press("Save", f"Order {order} is now Complete.", "!Cancel Order", status="Complete")
    admin.press("Save", status="Processing")
    admin.press("Cancel Order", "status Canceled")
    assert not admin.page.xpath("//main//form")


def test_reports_are_sums_of_the_orders(admin):
    """Against sums in Python over all orders."""
    orders = admin.rows("SELECT * FROM shop_orders WHERE status != 'Canceled'")
    march = [row["total"] for row in orders if row["date"].startswith("2024-03")]
    admin.get("/reports?report=Sales&year=2024",
              f"2024-03: orders {len(march)}, sales ${sum(march) / 100:,.2f}")
    sold = Counter()
    for name, quantity, date in admin.rows(
            "SELECT name, quantity, date FROM shop_order_items JOIN shop_products ON shop_products.id = product_id "
            "JOIN shop_orders ON shop_orders.id = order_id AND status != 'Canceled'"):
        sold[name] += quantity * date.startswith("2023-12")
    best = min(sold, key=lambda name: (-sold[name], name))
    admin.get("/reports?report=Bestsellers&year=2023&month=12", f"sold {sold[best]}")
    assert admin.page.xpath("//main//a")[0].text == best
    admin.get("/", f"sales ${sum(row['total'] for row in orders) / 100:,.2f}")


# ---- over HTTP ----

def test_served_pages_are_the_pages_in_process(world):
    login = world.login("shopping")
    with world.serve() as served:
        base = served.bases["shopping"]
        assert base.startswith("http://127.0.0.1:") and len(set(served.bases.values())) == len(SITES)
        cookie = {"Cookie": f"sid_shopping={login['sid_shopping']}"}
        with urllib.request.urlopen(urllib.request.Request(f"{base}/account", headers=cookie)) as answer:
            assert answer.headers["Cache-Control"] == "no-store"
            assert answer.read().decode() == world.handle("shopping", "GET", "/account", cookies=login).body
        with urllib.request.urlopen(f"{base}/static/style.css") as answer:
            assert b"--accent" in answer.read()
        assert f"{base}/" in world.handle("homepage", "GET", "/").body
    assert world.bases["shopping"] == "http://shopping.test"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{base}/", timeout=2)


def test_threads_do_not_mix(world):
    statuses = []
    visitors = [Visitor(world, site) for site in SITES]
    threads = [threading.Thread(target=lambda me=me: statuses.extend(me.status("/") for _ in range(40)))
               for me in visitors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 40 * len(SITES)


# ---- forum ----

@pytest.mark.parametrize("sort, key", [
    ("new", lambda post: -post["id"]), ("top", lambda post: (-post["score"], -post["id"])),
    ("hot", lambda post: (-post["score"] - post["id"] // 8, -post["id"]))])
def test_forum_sorts_and_pages(forum, sort, key):
    posts = forum.rows("SELECT id, title, score FROM forum_posts WHERE forum = 'books'")
    titles = [post["title"] for post in sorted(posts, key=key)]
    pages = [name for page in (1, 2) for name in forum.get(f"/f/books?sort={sort}&page={page}")]
    assert [name for name in pages if name in titles] == titles


def test_votes_count_once_turn_and_are_taken_back(forum):
    post = forum.one("SELECT * FROM forum_posts WHERE forum = 'pets'")
    for way, change, said in (("up", 1, "You upvoted this post."), ("down", -1, "You downvoted this post."),
                              ("down", 0, "You took your vote back.")):
        forum.post(f"/f/pets/{post['id']}/{way}", f"score {post['score'] + change}", said)


def test_comment_votes_leave_posts_alone(forum):
    comment = forum.one(
        "SELECT forum_comments.*, forum FROM forum_comments JOIN forum_posts ON forum_posts.id = post_id")
    before = [tuple(row) for row in forum.rows("SELECT * FROM forum_posts")]
    forum.post(f"/f/{comment['forum']}/{comment['post_id']}/comment/{comment['id']}/down",
               f"score {comment['score'] - 1}")
    assert [tuple(row) for row in forum.rows("SELECT * FROM forum_posts")] == before


def test_a_post_is_made_edited_and_deleted(forum):
    title = "A 'new' <b>post</b>"
    forum.post("/submit/diy", "A post needs a title.", forum="diy", title="  ", body="text")
    forum.post("/submit/diy", "Your post was made.", title, "your opinion", "score 1", ME, forum="pets", title=title,
               body="your\r\nopinion")
    number = forum.one("SELECT max(id) FROM forum_posts")[0]
    names = forum.get("/f/pets?sort=new")
    assert names.index(title) < names.index("page 1 of 2")
    forum.post(f"/f/pets/{number}/edit", "changed", title="A post", body="changed")
    forum.post(f"/f/pets/{number}/edit", "A post needs a title.", title="", body="gone")
    forum.post(f"/f/pets/{number}/delete", "Your post was deleted.")
    assert forum.status(f"/f/pets/{number}") == 404
    forum.post("/submit", forum="pets", title="Next")
    # an address never leads to another post later
    assert forum.one("SELECT max(id) FROM forum_posts")[0] == number + 1


def test_posts_of_others_are_theirs(forum):
    post = forum.one("SELECT * FROM forum_posts WHERE author != ?", ME)
    path = f"/f/{post['forum']}/{post['id']}"
    forum.get(path, "!Delete")
    assert [forum.status(f"{path}/edit"), forum.status(f"{path}/edit", title="mine"),
            forum.status(f"{path}/delete", x="1")] == [403] * 3
    assert forum.one("SELECT title FROM forum_posts WHERE id = ?", post["id"])[0] == post["title"]


def test_comments_and_replies(forum):
    post = forum.one("SELECT * FROM forum_posts WHERE comments = 2")
    path = f"/f/{post['forum']}/{post['id']}"
    comment = forum.one("SELECT * FROM forum_comments WHERE post_id = ?", post["id"])
    forum.post(f"{path}/comment", "Your comment was added.", "Comments 3", "Fine", f"{ME}, score 1",
               comment="Fine")
    forum.post(f"{path}/comment/{comment['id']}", "Comments 4", "So do I",
               f"{ME} to {comment['author']}, score 1", comment="So do I")
    forum.post(f"{path}/comment", "A comment needs some text.", comment=" ")
    forum.get(f"/user/{ME}/comments", "So do I")


def test_subscribing_and_a_new_forum(forum):
    name, members = forum.one("SELECT name, subscribers FROM forum_forums WHERE name NOT IN "
                              "(SELECT forum FROM forum_subscriptions WHERE user = ?)", ME)
    forum.post(f"/f/{name}/subscribe", f"subscribers {members + 1}", "Unsubscribe")
    forum.post(f"/f/{name}/subscribe", f"subscribers {members}", "Subscribe", f"You left {name}.")
    forum.get("/account", f"!{name}")
    forum.post("/new-forum", "There is a forum books already.", name="books", description="x")


def test_forum_search(forum):
    found = forum.one("SELECT count(*) FROM forum_posts WHERE title || body LIKE '%guitar%' "
                      "AND title || body LIKE '%my%'")[0]
    for words, count in (("?q=GUITAR+my", found), ("?q=%25", 0), ("", 0)):
        forum.get(f"/search{words}", f"posts {count}")


# ---- code host ----

@pytest.fixture
def own(code):
    """The path of a project of the account."""
    return code.one("SELECT path FROM code_projects WHERE owner = ?", CODER)[0]


def test_filtered_lists_count_right(code):
    for number, path in code.rows("SELECT id, path FROM code_projects LIMIT 6"):
        counts = Counter(map(tuple, code.rows(
            "SELECT state, label FROM code_items WHERE kind = 'issues' AND project = ?", number)))
        for label in ("bug", "docs"):
            code.get(f"/{path}/issues?state=open&label={label}", f"Issues {counts['open', label]}")
        code.get(f"/{path}/issues?state=any&label=any", f"Issues {counts.total()}")
    mine = code.one("SELECT count(*) FROM code_items WHERE kind = 'issues' AND state = 'open' AND assignee = ?",
                    CODER)[0]
    code.get("/issues", f"My issues {mine}")


def test_the_most_commits_are_one_persons(code):
    for number, path in code.rows("SELECT id, path FROM code_projects"):
        counts = Counter(row[0] for row in code.rows("SELECT author FROM code_commits WHERE project = ?", number))
        assert len(set(counts.values())) == len(counts) >= 2
        names = code.get(f"/{path}/contributors")
        assert [(names[i - 1], int(name[8:])) for i, name in enumerate(names)
                if re.fullmatch(r"commits \d+", name)] == counts.most_common()
    (best, most), *_ = counts.most_common()
    code.get(f"/{path}/commits?author={best}", f"Commits {most}")


def test_stars_and_forks(code):
    path, stars, forks, about = code.one("SELECT path, stars, forks, description FROM code_projects WHERE "
                                         "owner != ? AND id NOT IN (SELECT project FROM code_stars)", CODER)
    name = path.split("/")[1]
    code.post(f"/{path}/star", f"stars {stars + 1}", "Unstar")
    code.post(f"/{path}/star", f"stars {stars}", "Star")
    code.get("/starred", f"!{path}")
    code.post(f"/{path}/fork", f"{CODER}/{name}", "stars 0", about)
    code.post(f"/{path}/fork", f"You have a project {name} already.")
    code.get(f"/{path}", f"forks {forks + 1}")


def test_members_are_invited_by_those_who_lead(code, own):
    path = f"/{own}/members"
    person = code.one("SELECT name FROM users WHERE site = 'gitlab' AND name NOT IN (SELECT user FROM code_members "
                      "JOIN code_projects ON id = project WHERE path = ?)", own)[0]
    for role in ("Guest", "Maintainer"):         # a second invitation changes the role
        names = code.post(path, username=person, role=role)
        assert f"{person} is now {role}." in names and names[names.index(person) + 1] == role
    for name, said in (("mars", "There is no user mars."), ("", "A user name is needed."),
                       (CODER, f"{CODER} owns this project.")):
        code.post(path, said, username=name, role="Guest")
    assert code.status(path, username=person, role="King") == 400
    other = code.one("SELECT path FROM code_projects WHERE id NOT IN (SELECT project FROM code_members "
                     "WHERE user = ?)", CODER)[0]
    code.get(f"/{other}/members", "!Invite")
    assert code.status(f"/{other}/members", username=CODER, role="Guest") == 403
    assert code.status(f"/{other}/settings") == 403


def test_an_issue_from_new_to_reopened(code, own):
    path = f"/{own}/issues"
    issue = {"title": "Lost page", "description": "It is gone", "assignee": CODER, "label": "docs"}
    code.post(f"{path}/new", "An issue needs a title.", **{**issue, "title": ""})
    code.post(f"{path}/new", "Your issue was made.", "Lost page", "state open", "docs", f"author {CODER}",
              f"assignee {CODER}", "It is gone", **issue)
    here = code.address
    assert code.get(path).index("Lost page") < 16
    code.post(f"{here}/close", "This issue is now closed.", "state closed", "Reopen")
    code.get(path, "!Lost page")
    code.post(f"{here}/assign", "assignee nobody", assignee="nobody")
    code.post(f"{here}/comment", "Comments 1", "Done", "Your comment was added.", comment="Done")
    assert code.status(f"{here}/merge", x="1") == 403


ITEM = "SELECT path, kind, number FROM code_items JOIN code_projects ON code_projects.id = project WHERE state = 'open'"


def test_merge_requests_merge_once(code):
    path = "/{}/{}/{}".format(*code.one(f"{ITEM} AND kind = 'merge-requests' AND owner = ?", CODER))
    code.post(f"{path}/merge", "state merged", "This merge request is now merged.")
    assert code.status(f"{path}/reopen", x="1") == 403
    code.get(path, "!Merge")


def test_others_issues_can_be_commented_not_closed(code):
    path = "/{}/{}/{}".format(*code.one(
        f"{ITEM} AND kind = 'issues' AND author != ? AND project NOT IN (SELECT project FROM code_members "
        "WHERE user = ?)", CODER, CODER))
    code.get(path, "!Close")
    assert code.status(f"{path}/close", x="1") == 403
    code.post(f"{path}/comment", "Hello", comment="Hello")


def test_private_projects_are_hidden_from_others(code):
    person = code.one("SELECT name FROM users WHERE site = 'gitlab' AND name != ?", CODER)[0]
    path, other = f"/{CODER}/my-plan", Visitor(code.world, "gitlab", person)
    plan = {"name": "My plan", "description": "Plans", "visibility": "private"}
    code.post("/projects/new", "A project needs a name of letters, digits and dashes.",
              **{**plan, "name": "../x"})
    code.post("/projects/new", path[1:], "Your project was made.", "private", "Settings", **plan)
    code.post("/projects/new", "You have a project my-plan already.", **plan)
    assert other.status(path) == 404
    other.get("/search?q=plan", f"!{path[1:]}")
    code.get("/search?q=plan", path[1:])
    code.post(f"{path}/settings", description="Big plans", readme="Read", license="MIT", visibility="public")
    other.get(path, "Big plans", "license MIT", "public", "!Settings")


def test_follow(code):
    name = code.one("SELECT name FROM users WHERE site = 'gitlab' AND name != ? AND name NOT IN (SELECT followed "
                    "FROM code_follows WHERE user = ?)", CODER, CODER)[0]
    followers = code.one("SELECT count(*) FROM code_follows WHERE followed = ?", name)[0]
    code.post(f"/{name}/follow", f"followers {followers + 1}", "Unfollow")
    code.post(f"/{name}/follow", f"followers {followers}")


# ---- map ----

@pytest.fixture
def atlas(made):
    return Atlas(made.db)


def by_hand(a, b):
    """Metres between two places of a town, from the plan of the streets alone: on two streets of one
    direction the shortest detour to one that crosses them."""
    town = min(TOWNS, key=lambda middle: math.dist(middle[:2], a.at))
    east, other_east = ((place.y - town[1]) in (-800, 0, 800) for place in (a, b))
    along, across = (0, 1) if east else (1, 0)
    a, b = (a.x, a.y), (b.x, b.y)
    if east != other_east or a[across] == b[across]:
        return abs(a[0] - b[0]) + abs(a[1] - b[1])
    return abs(a[across] - b[across]) + min(abs(a[along] - town[along] - line) + abs(b[along] - town[along] - line)
                                            for line in (-800, 0, 800))


def test_ways_in_towns_are_the_shortest(atlas):
    places = [place for place in atlas.places if place.category != "town"]
    for a in places:
        for b in places:
            assert atlas.metres(a, b) >= math.dist((a.x, a.y), (b.x, b.y)) - 5
            if a.town == b.town and a is not b:
                legs = sum(length for _, length in atlas.way(a, b))
                assert atlas.metres(a, b) == by_hand(a, b) == atlas.metres(b, a) == legs, (a, b)


def test_between_towns_the_better_of_two_roads(atlas):
    dist = lambda a, b: round(math.dist(TOWNS[a][:2], TOWNS[b][:2]))
    assert atlas.metres(atlas.by_slug["glenby"], atlas.by_slug["ingle"]) == min(
        dist(0, town) + dist(town, 3) for town in (1, 2))


def test_directions_say_distance_time_and_streets(maps, atlas):
    a, b = atlas.by_slug["glenby-station"], atlas.by_slug["dunton-station"]
    km = atlas.metres(a, b) / 1000
    for by, speed in SPEED.items():
        names = maps.get(f"/directions?from=Glenby+Station&to=dunton+station&by={by}")
        assert {f"distance {km:.1f} km", f"time {math.ceil(km / speed * 60 - 1e-9)} minutes", f"by {by}",
                "Glenby Station to Dunton Station"} <= set(names)
    assert any(re.fullmatch(r"Road 2, \d+\.\d km", name) for name in names)
    maps.get("/directions?from=atlantis&to=glenby", "No place called atlantis")


def test_nearby_is_sorted_and_complete(maps, atlas):
    centre = atlas.by_slug["norby"]
    cafes = [place.name for place in sorted(atlas.places, key=lambda p: (atlas.metres(centre, p), p.name))
             if place.category == "cafe"]
    names = maps.get("/nearby/norby?category=cafe")
    assert [name for name in names if name in cafes] == cafes and len(cafes) == 8


def test_search_puts_the_exact_name_first(maps):
    names = maps.get("/search?q=glenby")
    assert names[names.index("Search glenby") + 1] == "Glenby"
    assert all("Nothing found" in maps.get(path) for path in ("/search?q=volcano", "/search"))


def test_place_pages_say_all(maps, atlas):
    for place in atlas.places:
        texts = {f"phone {place.phone}": place.phone, f"open {place.hours}": place.hours,
                 f"address {place.address}": place.street, f"zip {place.zip}": True, place.category: True,
                 f"coordinates {place.coordinates}": True}
        assert {text for text, there in texts.items() if there} <= set(maps.get(f"/place/{place.slug}"))
        lat, lon = map(float, place.coordinates.split(", "))
        assert 50 < lat < 50.3 and 8 < lon < 8.5
