"""The shop: categories, search, products with reviews, a cart and a checkout, and the customer's account."""
import sqlite3
from random import Random

from flask import g, request

from dreamgym.envs.webarena.sites.site import (
    PEOPLE, TODAY, WORDS, Site, all_words, asked, chosen, day, go, insert, number, of_split, one, page, paged,
    rows, run, words)

SITE = Site("shopping", "One Stop Mini", {"Home": "/", "Cart": "/cart", "Account": "/account"}, "/search")
STATUSES = ("Pending", "Processing", "Complete", "Canceled")
PAYMENTS = ("Card", "Check")
CUSTOMERS, ORDERS, REVIEWS, DAYS = 25, 150, 270, 730
NAMES = WORDS["shop"]
SORTS = {"Name": "name", "Cheapest": "price, name", "Priciest": "price DESC, name",
         "Stars": "stars DESC, name"}
# not *: stars cost a query for each product
TILES = "SELECT slug, name, price FROM shop_shelf WHERE enabled AND"
JOINED = "JOIN shop_products ON shop_products.id = product_id"
SUBJECTS = ("Order", "Product", "Return", "Other")
MOST = 20  # of one product in a cart

SITE.loaders |= {
    "product": lambda slug, _: one("SELECT * FROM shop_shelf WHERE slug = ? AND enabled", slug),
    "order": lambda number, _: one("SELECT * FROM shop_orders WHERE id = ? AND user_id = ?", number,
                                   g.user["id"])}


# ---- first data

def slug(name: str) -> str:
    return name.lower().replace(" ", "-")


def fill(db: sqlite3.Connection, rng: Random, split: str) -> None:
    """120 products, 25 customers (Emma Lopez is the first), 150 orders of two years, some 250 reviews."""
    _add_products(db, rng, split)
    people = of_split([f"{first} {last}" for first in PEOPLE.first for last in PEOPLE.last], split)
    names = sorted(rng.sample(people, CUSTOMERS - 1))
    customers = [_add_customer(db, rng, name) for name in ["Emma Lopez", *names]]
    # the shop grows: later days have more orders
    days = [1 + int((DAYS - 1) * rng.random() * (rng.random() if i % 2 else 1)) for i in range(ORDERS)]
    for order, ago in enumerate(sorted(days, reverse=True), 1001):
        is_emma = rng.random() < (0.2 if ago <= 45 else 0.06)
        _add_order(db, rng, order, customers[0] if is_emma else rng.choice(customers), ago)
    _add_reviews(db, rng, customers)
    in_stock = [row["id"] for row in db.execute("SELECT id FROM shop_products WHERE stock > 0")]
    for product in sorted(rng.sample(in_stock, 2)):
        insert(db, "shop_wishes", user_id=customers[0], product_id=product)


def _add_products(db: sqlite3.Connection, rng: Random, split: str) -> None:
    for group, (category, nouns) in enumerate(NAMES.categories.items(), 1):
        insert(db, "shop_categories", id=group, name=category, slug=slug(category))
        names = sorted((name, low) for noun, low in nouns.items() for name in
                       rng.sample(of_split([f"{look} {noun}" for look in NAMES.looks], split), 3))
        for i, (name, low) in enumerate(names, 1):
            price = 100 * rng.randrange(low, 3 * low) + rng.choice((0, 50, 95, 99))
            stock = 0 if rng.random() < 0.06 else rng.randrange(1, 41)
            insert(db, "shop_products", sku=f"{category[0]}{group}{i:02d}", slug=slug(name), name=name,
                   category_id=group, brand=rng.choice(NAMES.brands), price=price, stock=stock)
        db.execute("UPDATE shop_products SET featured = 1 WHERE stock > 0 AND name = ?",
                   (rng.choice(names)[0],))


def _add_customer(db: sqlite3.Connection, rng: Random, name: str) -> int:
    email = f"{name.lower().replace(' ', '.')}@gmail.com"
    customer = SITE.add_user(db, email, rng, name, range(DAYS, DAYS + 200))
    insert(db, "shop_addresses", user_id=customer,
           street=f"{rng.randrange(1, 100)} {rng.choice(NAMES.streets)}", city=rng.choice(NAMES.cities),
           zip=f"{rng.randrange(10000, 100000)}", phone=f"555-{rng.randrange(1000, 10000)}")
    return customer


def _add_order(db: sqlite3.Connection, rng: Random, order: int, user_id: int, ago: int) -> None:
    if ago <= 45:
        status = rng.choice(("Pending", "Processing", "Complete"))
    else:
        status = "Canceled" if rng.random() < 0.12 else "Complete"
    items = sorted(rng.sample(range(1, 121), rng.choice((1, 1, 2, 2, 3))))
    prices = [db.execute("SELECT price FROM shop_products WHERE id = ?", (item,)).fetchone()[0]
              for item in items]
    lines = [(order, item, price, rng.choice((1, 1, 1, 2, 3))) for item, price in zip(items, prices)]
    db.executemany("INSERT INTO shop_order_items VALUES (?, ?, ?, ?)", lines)
    insert(db, "shop_orders", id=order, user_id=user_id, date=day(ago), status=status,
           payment=rng.choice(PAYMENTS), total=sum(price * quantity for _, _, price, quantity in lines))


def _add_reviews(db: sqlite3.Connection, rng: Random, customers: list[int]) -> None:
    """A product has its own quality; the latest reviews may still wait for approval."""
    quality = [rng.choice((2, 3, 4, 4, 5)) for _ in range(120)]
    written = set()
    for ago in sorted((rng.randrange(1, DAYS) for _ in range(REVIEWS)), reverse=True):
        product = int(120 * rng.random() * rng.random()) + 1
        product = (product * 37) % 120 + 1  # the popular ones are spread over the categories
        user_id = rng.choice(customers)
        if (product, user_id) in written:
            continue
        written.add((product, user_id))
        stars = min(5, max(1, quality[product - 1] + rng.choice((-2, -1, 0, 0, 0, 1, 1))))
        first, second = rng.sample(NAMES.aspects, 2)
        praise = NAMES.praise[stars - 1]
        text = f"{rng.choice(praise)} {first}, {rng.choice(praise).lower()} {second}."
        status = "Pending" if ago <= 60 and rng.random() < 0.6 else "Approved"
        insert(db, "shop_reviews", product_id=product, user_id=user_id, stars=stars, text=text, date=day(ago),
               status=status)


# ---- finding products

@SITE.get("/")
def home():
    return page("Home", heading="Categories", categories=rows("SELECT * FROM shop_categories ORDER BY name"),
                featured=rows(f"{TILES} featured ORDER BY id LIMIT 4"))


def _products(title: str, where: str, *arguments):
    sort = chosen("sort", SORTS)
    found = paged(f"{TILES} {where} ORDER BY {SORTS[sort]}", *arguments)
    return page(title, "products", products=found)


@SITE.get("/category/<slug>")
def category(slug):
    row = one("SELECT * FROM shop_categories WHERE slug = ?", slug)
    return _products(row["name"], "category_id = ?", row["id"])


@SITE.get("/search")
def search():
    """All words must be in the name, the category or the brand."""
    query = asked("q")
    if not query:
        g.filters.clear()
        return _products("All products", "1")
    text = "lower(name || ' ' || category || ' ' || brand)"
    return _products(f"Results for {query}", *all_words(text, query.lower().split()[:8]))


@SITE.get("/product/<product>")
def product(product):
    reviews = paged("SELECT stars, text, full_name FROM shop_reviews JOIN users ON users.id = user_id WHERE "
                    "product_id = ? AND status = 'Approved' ORDER BY shop_reviews.id DESC", product["id"],
                    size=3)
    return page(product["name"], product=product, reviews=reviews)


# ---- the cart

def _cart() -> list[sqlite3.Row]:
    return rows(f"SELECT shop_products.*, quantity, price * quantity AS sum FROM shop_cart {JOINED} "
                "WHERE user_id = ? ORDER BY shop_cart.rowid", g.user["id"])


def _in_cart(product: sqlite3.Row) -> int:
    return sum(item["quantity"] for item in _cart() if item["id"] == product["id"])


def _put(product: sqlite3.Row, quantity: int | None) -> str:
    """Has that many in the cart, or says why not."""
    if not (refusal := _refusal(product, quantity)):
        run("INSERT INTO shop_cart VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET quantity = excluded.quantity",
            g.user["id"], product["id"], quantity)
    return refusal


def _refusal(product: sqlite3.Row, quantity: int | None) -> str:
    name, most = product["name"], min(product["stock"], MOST)
    if quantity is None:
        return "Quantity must be a number from 1."
    if not product["enabled"]:
        return f"{name} is not sold any more."
    if quantity <= most:
        return ""
    return f"You can buy at most {most} of {name}." if most else f"{name} is out of stock."


@SITE.post("/product/<product>/cart")
def add_to_cart(product):
    quantity = number("quantity", 1) if "quantity" in request.form else 1
    if refusal := _put(product, quantity and quantity + _in_cart(product)):
        return go(refusal, f"/product/{product['slug']}")
    return go(f"You added {product['name']} to your cart.", "/cart")


@SITE.get("/cart", member=True)
def cart():
    return page("Cart", items=_cart())


@SITE.post("/cart/<product>")
def change_cart(product):
    quantity = number("quantity", 1)
    if refusal := _refusal(product, quantity):
        return go(refusal, "/cart")
    if _in_cart(product):  # not when it was removed in another tab
        _put(product, quantity)
    return go(f"You changed {product['name']} to {quantity}.", "/cart")


@SITE.post("/cart/<slug>/remove")
def remove_from_cart(slug):
    row = one("SELECT * FROM shop_products WHERE slug = ?", slug)
    run("DELETE FROM shop_cart WHERE user_id = ? AND product_id = ?", g.user["id"], row["id"])
    return go(f"You removed {row['name']} from your cart.", "/cart")


@SITE.get("/checkout", member=True)
def checkout():
    if not (items := _cart()):
        return go("Your cart is empty.", "/cart")
    return page("Checkout", items=items, address=_address(), payments=PAYMENTS)


@SITE.post("/checkout")
def place_order():
    items, payment = _cart(), words("payment")
    refusals = [refusal for item in items if (refusal := _refusal(item, item["quantity"]))]
    if refusals or not items:
        return go(refusals[0] if refusals else "Your cart is empty.", "/cart")
    order = insert(g.db, "shop_orders", user_id=g.user["id"], date=TODAY, status="Pending",
                   payment=payment if payment in PAYMENTS else PAYMENTS[0],
                   total=sum(item["sum"] for item in items))
    for item in items:
        insert(g.db, "shop_order_items", order_id=order, product_id=item["id"], price=item["price"],
               quantity=item["quantity"])
        _change_stock(item, -1)
    run("DELETE FROM shop_cart WHERE user_id = ?", g.user["id"])
    return go(f"Your order {order} was placed.", f"/orders/{order}")


def _change_stock(item: sqlite3.Row, sign: int) -> None:
    run("UPDATE shop_products SET stock = stock + ? WHERE id = ?", sign * item["quantity"], item["id"])


# ---- the account

@SITE.get("/account", member=True)
def account():
    return page("Account")


@SITE.get("/orders", member=True)
def orders():
    mine = paged("SELECT * FROM shop_orders WHERE user_id = ? ORDER BY id DESC", g.user["id"])
    return page("Orders", orders=mine)


def order_items(order: sqlite3.Row) -> list[sqlite3.Row]:
    """The products of an order: `paid` is the price of one then, `price` today's."""
    return rows(f"SELECT shop_products.*, i.price AS paid, quantity FROM shop_order_items i {JOINED} "
                "WHERE order_id = ? ORDER BY shop_products.name", order["id"])


def close_order(order: sqlite3.Row, states: tuple[str, ...], what: str, done: str):
    """Cancels an order in one of some states; what it held goes back into stock."""
    path = f"/orders/{order['id']}"
    if order["status"] not in states:
        return go(f"Only {what} order can be canceled.", path)
    run("UPDATE shop_orders SET status = 'Canceled' WHERE id = ?", order["id"])
    for item in order_items(order):
        _change_stock(item, 1)
    return go(done, path)


@SITE.get("/orders/<int:order>", member=True)
def order(order):
    return page(f"Order {order['id']}", order=order, items=order_items(order))


@SITE.post("/orders/<int:order>/cancel")
def cancel(order):
    return close_order(order, ("Pending",), "a pending", f"Your order {order['id']} was canceled.")


@SITE.post("/orders/<int:order>/reorder")
def reorder(order):
    items = order_items(order)
    put = [_put(item, item["quantity"] + _in_cart(item)) for item in items]
    return go(f"You added {put.count('')} of {len(items)} products to your cart.", "/cart")


@SITE.get("/wishlist", member=True)
def wishlist():
    products = paged(f"SELECT shop_products.* FROM shop_wishes {JOINED} WHERE user_id = ? AND enabled "
                     "ORDER BY shop_wishes.rowid", g.user["id"], size=6)
    return page("Wishlist", products=products)


@SITE.post("/product/<product>/wish")
def wish(product):
    run("INSERT OR IGNORE INTO shop_wishes VALUES (?, ?)", g.user["id"], product["id"])
    return go(f"You added {product['name']} to your wishlist.", "/wishlist")


@SITE.post("/wishlist/<product>/remove")
def unwish(product):
    run("DELETE FROM shop_wishes WHERE user_id = ? AND product_id = ?", g.user["id"], product["id"])
    return go(f"You removed {product['name']} from your wishlist.", "/wishlist")


def _address() -> sqlite3.Row:
    return one("SELECT * FROM shop_addresses WHERE user_id = ?", g.user["id"])


@SITE.get("/address", member=True)
def address():
    return page("Address", address=_address())


@SITE.post("/address")
def change_address():
    fields = [words(name, 60) for name in ("street", "city", "zip", "phone")]
    if not all(fields):
        return go("All fields are needed.")
    run("UPDATE shop_addresses SET street = ?, city = ?, zip = ?, phone = ? WHERE user_id = ?", *fields,
        g.user["id"])
    return go("You saved your address.")


@SITE.get("/reviews", member=True)
def reviews():
    mine = paged(f"SELECT shop_reviews.*, name, slug FROM shop_reviews {JOINED} WHERE user_id = ? "
                 "ORDER BY shop_reviews.id DESC", g.user["id"])
    return page("My Reviews", reviews=mine)


@SITE.get("/product/<product>/review", member=True)
def review(product):
    return page(f"Review {product['name']}")


@SITE.post("/product/<product>/review")
def write_review(product):
    stars, text = number("stars", 1, 5), words("review")
    if stars is None or not text:
        return go("Stars and a review are needed.")
    insert(g.db, "shop_reviews", product_id=product["id"], user_id=g.user["id"], stars=stars, text=text,
           date=TODAY, status="Pending")
    return go("Your review waits for approval.", "/reviews")


@SITE.get("/newsletter", member=True)
def newsletter():
    subscribed = rows("SELECT * FROM shop_subscribers WHERE user_id = ?", g.user["id"])
    return page("Newsletter", subscribed=subscribed)


@SITE.post("/newsletter")
def subscribe():
    if "subscribed" in request.form:
        run("INSERT OR IGNORE INTO shop_subscribers VALUES (?)", g.user["id"])
        return go("You are subscribed.")
    run("DELETE FROM shop_subscribers WHERE user_id = ?", g.user["id"])
    return go("You are not subscribed.")


@SITE.get("/contact", member=True)
def contact():
    return page("Contact", subjects=SUBJECTS)


@SITE.post("/contact")
def send_message():
    subject, text = words("subject"), words("message", 500)
    if subject not in SUBJECTS or not text:
        return go("A message is needed.")
    insert(g.db, "shop_messages", user_id=g.user["id"], subject=subject, text=text)
    return go("Your message was sent.")
