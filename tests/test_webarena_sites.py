"""The own sites: every page is well formed, forms refuse what they must, pages say what the database holds,
and a reset undoes all of it. What the task templates do is played in test_webarena_offline.py."""
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
from dreamgym.envs.webarena.live import RECIPES
from dreamgym.envs.webarena.page import abstract
from dreamgym.envs.webarena.sites import DATABASES, SITES, SiteDatabase, _first_data
from dreamgym.envs.webarena.sites.map import TOWNS, Atlas
from dreamgym.envs.webarena.sites.site import open_session

ME, CODER, EMMA = "MarvelsGrantMan136", "byteblaze", "emma.lopez@gmail.com"


class Visitor:
    """A browser of one site: cookies, redirects, forms. `names`: the texts and names of its page, in
    order."""

    def __init__(self, world, site, user=None):
        self.world, self.site = world, site
        self.cookies = world.login(site)
        if user is not None:
            person = self.one("SELECT id FROM users WHERE site = ? AND name = ?", site, user)
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
        """Submits the form of this page that has the button, with the values its boxes hold; `values` replace
        them (None leaves one out, as an unticked box)."""
        form = next(form for form in self.page.iter("form") if any(b.text == button for b in form.iter("button")))
        values = {**dict(form.form_values()), **values}
        values = {name: value for name, value in values.items() if value is not None}
        action = urljoin(self.address, form.get("action") or urlsplit(self.address).path)
        if form.method == "POST":
            return self.post(action, *texts, **values)
        return self.get(f"{action}?{'&'.join(f'{name}={value}' for name, value in values.items())}", *texts)

    def one(self, query, *arguments):
        return self.world.db.execute(query, arguments).fetchone()


@pytest.fixture(scope="module")
def made():
    return SiteDatabase()


@pytest.fixture
def world(made):
    yield made
    made.reset()


def visitor(site):
    return pytest.fixture(lambda world: Visitor(world, site))


shop, admin, forum, maps = map(visitor, ("shopping", "shopping_admin", "reddit", "map"))


def dump(world, tables="SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"):
    return "\n".join(str(tuple(row)) for table, in world.db.execute(tables).fetchall()
                     for row in world.db.execute(f"SELECT * FROM {table}"))


# ---- pages ----

@pytest.mark.parametrize("site, least", zip(SITES, (150, 300, 250, 300, 100, 1)))
def test_every_page_is_there_and_short_and_well_formed(world, site, least):
    """Dead links, pages a small model cannot read, controls without a name, double ids."""
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


def test_the_homepage_leads_to_all_sites_and_shows_no_password(world):
    home = Visitor(world, "homepage")
    home.get("/")
    assert sorted(home.page.xpath("//main//a/@href")) == sorted(
        f"{base}/" for site, base in world.bases.items() if site != "homepage")
    assert all(f"account {user}" in home.names and password not in home.ask("GET", "/").body
               for user, password in world.accounts.values())


# ---- the database ----

def test_the_first_data_follow_from_the_seed(made):
    """Data that differ from machine to machine (the digest, of seed 7 and train 0, was made once)."""
    assert hashlib.sha256(dump(made).encode()).hexdigest().startswith("3287c69e")
    _first_data.cache_clear()
    assert dump(SiteDatabase(7)) == dump(made) != dump(SiteDatabase(8))
    assert dump(SiteDatabase(7, "train 1")) != dump(made)
    assert "None" not in dump(made) and not made.db.execute("PRAGMA foreign_key_check").fetchall()
    assert not made.db.execute("SELECT id FROM shop_orders WHERE total != (SELECT sum(price * quantity) FROM "
                               "shop_order_items WHERE order_id = id)").fetchall()


def test_splits_share_no_names():
    """A product, person, place, post, project or issue of two splits. Only the accounts are the same
    everywhere."""
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
    shop.post("/product/river-hose/cart", "River Hose")
    for name in ("test 1", "train 0", "test 1"):
        world.reset(name)
        assert dump(world) == dump(SiteDatabase(7, name))
        other = SiteDatabase(7, name)
        for site, path in (("shopping", "/cart"), ("map", "/"), ("gitlab", "/"), ("reddit", "/account")):
            assert Visitor(world, site).get(path) == Visitor(other, site).get(path)
    world.reset("train 0")


def test_reset_undoes_everything(world, shop):
    before, cookies = dump(world), shop.cookies
    tell(world, STORIES["cart and order"])
    shop.post("/logout")
    shop.post("/customer/account/login/", user=EMMA, password="Password.123")
    world.db.execute("BEGIN")
    world.db.execute("DELETE FROM shop_orders")
    world.db.commit()
    world.reset()
    assert dump(world) == before
    assert world.login("shopping") == cookies == SiteDatabase().login("shopping")
    shop.cookies = cookies
    shop.get("/account", "Emma Lopez")


# ---- logins ----

@pytest.mark.parametrize("site", RECIPES)
def test_login_forms_are_those_of_webarena(world, site):
    path, user, button = RECIPES[site]
    (name, password), guest = world.accounts[site], Visitor(world, site, "")
    guest.get(path or "/")
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


# ---- what is done on the sites ----

WHO = {"shop": ("shopping", None), "admin": ("shopping_admin", None), "forum": ("reddit", None),
       "code": ("gitlab", None), "adam": ("gitlab", "adam"), "maps": ("map", None)}
# Each story: its name; then, a line each: a visitor; an address, `POST` and an address, or a button of the
# visitor's page; values of the form (`-name`: without it, as an unticked box). After `->`: texts of the next
# page (`!`: not there), or its status alone; or a query of the database, and what it gives. The task
# templates' plans are played in test_webarena_offline.py.
STORIES = dict(story.split("\n", 1) for story in """\
odd addresses
shop /nope -> 404
shop /product/nope -> 404
shop /orders/HUGE -> 404
shop /orders/abc -> 404
forum /f/nowhere -> 404
forum /user/nobody -> 404
code /abel/nothing -> 404
code /nobody -> 404
maps /place/mars -> 404
maps /place/norby-station -> station | coordinates 50.0685, 8.3070
shop /search?q=%27%22%25%00&sort=x&page=-9 -> 200
shop /category/audio?page=HUGE -> 200
admin /products?name=%ff&status=1 -> 200
admin /reports?year=%25&month=0 -> 200
forum /f/books?sort=x -> 200

cart and order
shop /product/river-hose -> stock 37
shop [Add to Cart] quantity=2 -> You added River Hose to your cart.
shop /cart -> !You added River Hose to your cart.
shop [Update] quantity=3 -> You changed River Hose to 3. | total $114.00
shop [Update] quantity=999 -> You can buy at most 20 of River Hose.
shop [Update] quantity=-1 -> Quantity must be a number from 1.
shop /product/amber-kite
shop [Add to Cart]
shop [Update] quantity=1
shop /checkout
shop [Place Order] payment=Check -> Your order 1151 was placed. | total $51.50 | payment Check
shop /product/river-hose -> stock 36
shop /orders/1151 -> status Pending
shop [Cancel Order] -> Your order 1151 was canceled. | !Cancel Order
shop /product/river-hose -> stock 37
shop /orders/1151
shop [Reorder] -> You added 2 of 2 products to your cart.
shop [Remove]
shop [Remove] -> Your cart is empty.
shop /checkout -> Your cart is empty.

what is not sold cannot be bought
shop POST /product/river-hose/cart
shop /checkout
admin /products/river-hose
admin [Save] stock=0
shop [Place Order] -> River Hose is out of stock.
shop /product/river-hose -> !Add to Cart

orders of others are hidden
shop /orders/1125 -> 404
shop POST /orders/1125/cancel -> 404

wishlist, address, newsletter and contact
shop /wishlist -> !Your wishlist is empty.
shop [Remove]
shop [Remove] -> Your wishlist is empty.
shop /address
shop [Save Address] city=  -> All fields are needed.
shop /newsletter
shop [Save] subscribed=1 -> You are subscribed. | subscribed yes
shop [Save] -subscribed -> You are not subscribed.
shop /contact
shop [Send] subject=Return & message=My kite is broken. -> Your message was sent.
SELECT subject, text FROM shop_messages -> Return | My kite is broken.

a review waits for the admin
shop /product/river-hose/review
shop [Submit Review] stars=2 & review=It leaks. -> Your review waits for approval. | stars 2, Pending
shop /product/river-hose -> !It leaks.
admin /reviews/250 -> It leaks.
admin [Approve] -> You approved review 250.
shop /product/river-hose -> It leaks.
admin [Delete] -> You deleted review 250.
shop /product/river-hose -> !It leaks.

the admin changes products
admin /products/river-hose
admin [Save] price=7.5 & stock=3 -> You saved River Hose.
admin [Save] price=1.234 -> Price must be like 19.99, and stock a number.
admin [Save] stock=-1 -> Price must be like 19.99, and stock a number.
admin [Save] -enabled
shop /product/river-hose -> 404
shop /search?q=river+hose -> No products found.
admin /products?name=hose&status=Disabled -> $7.50, stock 3, disabled

the dashboard adds up the orders
admin / -> sales $17,865.40 | orders 150 | sold 11

the admin changes orders
admin /orders -> Greta Clark, $235.00, Complete
admin [Filter] status=Pending -> !Greta Clark, $235.00, Complete
admin /orders/1146
admin [Save] status=Complete -> Order 1146 is now Complete. | !Cancel Order
admin [Save] status=Processing
admin [Cancel Order] -> status Canceled | !Save | !Cancel Order

votes count once, turn, and are taken back
forum POST /f/pets/15/up -> score 15 | You upvoted this post.
forum POST /f/pets/15/down -> score 13 | You downvoted this post.
forum POST /f/pets/15/down -> score 14 | You took your vote back.

a vote on a comment is none on the post of its number
forum POST /f/games/1/comment/1/down -> score 11
forum /f/games/1 -> score 12

a post is made, edited and deleted; no new post or comment has its number
forum POST /submit/diy forum=diy & title=   & body=text -> A post needs a title.
forum [Create post] forum=pets & title=A 'b' <c> & body=x -> Your post was made. | A 'b' <c> | score 1
forum POST /f/pets/172/edit title=A post & body=changed -> changed | MarvelsGrantMan136
forum POST /f/pets/172/edit title= & body=gone -> A post needs a title.
forum POST /f/pets/172/comment comment=First -> Comments 1
forum POST /f/pets/172/delete -> Your post was deleted.
forum /f/pets/172 -> 404
forum POST /f/games/7/comment comment=Second -> Comments 3
SELECT max(id) FROM forum_comments -> 323
forum POST /submit forum=pets & title=Next
SELECT max(id) FROM forum_posts -> 173

posts of others are theirs
forum /f/games/1/edit -> 403
forum POST /f/games/1/edit title=mine -> 403
forum POST /f/games/1/delete -> 403
forum /f/games/1 -> !Delete | Looking for a console

comments and replies
forum POST /f/games/7/comment comment=Fine -> Your comment was added. | Comments 3
forum POST /f/games/7/comment/17 comment=So do I -> Comments 4 | MarvelsGrantMan136 to theo, score 1
forum POST /f/games/7/comment comment=  -> A comment needs some text.
forum /user/MarvelsGrantMan136/comments -> So do I

subscribing and a new forum
forum POST /f/books/subscribe -> subscribers 125 | Unsubscribe
forum POST /f/books/subscribe -> subscribers 124 | Subscribe | You left books.
forum /account -> !books
forum POST /new-forum name=books & description=x -> There is a forum books already.

the forum's search wants all words
forum /search?q=CHESS -> posts 4
forum /search?q=CHESS+review -> posts 1
forum /search?q=%25 -> posts 0
forum /search -> posts 0

filtered lists count right
code /byteblaze/silver-site/issues?state=open&label=bug -> Issues 2
code /byteblaze/silver-site/issues?state=open&label=docs -> Issues 1
code /byteblaze/silver-site/issues?state=any&label=any -> Issues 11
code /issues -> My issues 20
code /adam/smart-forge/commits?author=grace -> Commits 13

directions say distance, time and streets
maps /directions?from=Glenby+Station&to=dunton+station&by=car -> by car | time 23 minutes | Road 2, 12.4 km
maps /directions?from=Glenby+Station&to=dunton+station&by=bike -> by bike | time 61 minutes
maps /directions?from=Glenby+Station&to=dunton+station&by=foot -> time 181 minutes | distance 15.1 km
maps /directions?from=atlantis&to=glenby -> No place called atlantis
maps /search?q=volcano -> Nothing found
maps /search -> Nothing found

stars and forks
code POST /iris/blue-notes/star -> stars 210 | Unstar
code POST /iris/blue-notes/star -> stars 209 | Star
code /starred -> !iris/blue-notes
code POST /iris/blue-notes/fork -> byteblaze/blue-notes | stars 0 | A blue notes for cooks
code POST /iris/blue-notes/fork -> You have a project blue-notes already.
code /iris/blue-notes -> forks 6

members are invited by those who lead
code POST /byteblaze/open-vault/members username=adam & role=Guest -> adam is now Guest.
code POST /byteblaze/open-vault/members username=adam & role=Maintainer -> adam is now Maintainer.
code POST /byteblaze/open-vault/members username=mars & role=Guest -> There is no user mars.
code POST /byteblaze/open-vault/members username= & role=Guest -> A user name is needed.
code POST /byteblaze/open-vault/members username=byteblaze & role=Guest -> byteblaze owns this project.
code POST /byteblaze/open-vault/members username=adam & role=King -> 400
code /adam/smart-forge/members -> !Invite
code POST /adam/smart-forge/members username=byteblaze & role=Guest -> 403
code /adam/smart-forge/settings -> 403

an issue from new to closed
code /byteblaze/open-vault/issues/new
code [Create issue] -> An issue needs a title.
code [Create issue] title=Lost & description=Gone & assignee=byteblaze & label=docs -> Your issue was made.
code /byteblaze/open-vault/issues/10 -> Lost | state open | docs | author byteblaze | Gone
code [Close] -> This issue is now closed. | state closed | Reopen
code /byteblaze/open-vault/issues -> !Lost
code /byteblaze/open-vault/issues/10 -> assignee byteblaze
code [Post comment] comment=Done -> Comments 1 | Done | Your comment was added.
code POST /byteblaze/open-vault/issues/10/merge -> 403

a merge request is merged once
code /byteblaze/silver-site/merge-requests/3
code [Merge] -> state merged | This merge request is now merged. | !Merge
code POST /byteblaze/silver-site/merge-requests/3/reopen -> 403
code POST /byteblaze/silver-site/merge-requests/2/merge -> 403

issues of others can be commented, not closed
code /grace/magic-bot/issues/2 -> !Close
code POST /grace/magic-bot/issues/2/close -> 403
code [Post comment] comment=Hello -> Hello

private projects are hidden from others
code /projects/new
code [Create project] name=../x -> A project needs a name of letters, digits and dashes.
code [Create project] name=My plan & visibility=private -> Your project was made. | private | Settings
code /projects/new
code [Create project] name=My plan -> You have a project my-plan already.
adam /byteblaze/my-plan -> 404
adam /search?q=plan -> !byteblaze/my-plan
code /search?q=plan -> byteblaze/my-plan
code /byteblaze/my-plan/settings
code [Save changes] description=Big plans & license=MIT & visibility=public
adam /byteblaze/my-plan -> Big plans | license MIT | public | !Settings

following
code POST /grace/follow -> followers 1 | Unfollow
code POST /grace/follow -> followers 0""".split("\n\n"))


def tell(world, story):
    visitors = {who: Visitor(world, *site) for who, site in WHO.items()}
    for line in story.replace("HUGE", str(10**30)).splitlines():
        does, _, said = line.partition(" -> ")
        if does.startswith("SELECT"):
            assert [str(value) for value in world.db.execute(does).fetchone()] == said.split(" | "), line
            continue
        who, post, place, values = re.fullmatch(r"(\w+) (POST )?(/\S*|\[.*?\]) ?(.*)", does).groups()
        visitor, form = visitors[who], {}
        for value in filter(None, values.split(" & ")):
            name, _, text = value.partition("=")
            form |= {name[1:]: None} if name.startswith("-") else {name: text}
        texts = [text for text in said.split(" | ") if text]
        if said.isdigit():
            assert visitor.ask("POST" if post else "GET", place, form).status == int(said), line
        elif place.startswith("["):
            visitor.press(place[1:-1], *texts, **form)
        elif post:
            visitor.post(place, *texts, **form)
        else:
            visitor.get(place, *texts)


@pytest.mark.parametrize("story", STORIES)
def test_what_is_done_on_the_sites(world, story):
    """Stops forms that take what they must refuse, counts that do not follow, and rights that others have."""
    tell(world, STORIES[story])


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
            assert b"main {" in answer.read()
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
def test_forum_sorts_and_pages(world, forum, sort, key):
    posts = world.db.execute("SELECT id, title, score FROM forum_posts WHERE forum = 'books'")
    titles = [post["title"] for post in sorted(posts, key=key)]
    pages = [name for page in (1, 2) for name in forum.get(f"/f/books?sort={sort}&page={page}")]
    assert [name for name in pages if name in titles] == titles


# ---- map ----

def by_hand(a, b):
    """Metres between two places of a town, by the plan of the streets: on two streets of one direction the
    shortest detour to one that crosses them."""
    town = min(TOWNS, key=lambda middle: math.dist(middle[:2], a.at))
    east, other_east = ((place.y - town[1]) in (-800, 0, 800) for place in (a, b))
    along, across = (0, 1) if east else (1, 0)
    a, b = (a.x, a.y), (b.x, b.y)
    if east != other_east or a[across] == b[across]:
        return abs(a[0] - b[0]) + abs(a[1] - b[1])
    return abs(a[across] - b[across]) + min(abs(a[along] - town[along] - line) + abs(b[along] - town[along] - line)
                                            for line in (-800, 0, 800))


def test_ways_are_the_shortest(made):
    """Between towns, the better of two roads."""
    atlas = Atlas(made.db)
    places = [place for place in atlas.places if place.category != "town"]
    for a in places:
        for b in places:
            assert atlas.metres(a, b) >= math.dist((a.x, a.y), (b.x, b.y)) - 5
            if a.town == b.town and a is not b:
                legs = sum(length for _, length in atlas.way(a, b))
                assert atlas.metres(a, b) == by_hand(a, b) == atlas.metres(b, a) == legs, (a, b)
    dist = lambda a, b: round(math.dist(TOWNS[a][:2], TOWNS[b][:2]))
    assert atlas.metres(atlas.by_slug["glenby"], atlas.by_slug["ingle"]) == min(
        dist(0, town) + dist(town, 3) for town in (1, 2))


def test_lists_of_places(maps):
    """Near ones that are not sorted or not complete; a search that puts another name before the exact one."""
    far = [float(name.split()[0]) for name in maps.get("/nearby/norby?category=cafe") if " km, " in name]
    assert far == sorted(far) and len(far) == 8
    names = maps.get("/search?q=glenby")
    assert names[names.index("Search glenby") + 1] == "Glenby"
