"""The shop: categories, search, products with reviews, a cart and a checkout, and the customer's account. Its data is in `data.py`."""
from __future__ import annotations

import sqlite3

from flask import Blueprint, Flask, Response, abort, g, request

from dreamgym.envs.webarena.sites.data import EMMA, PAYMENTS, SCHEMA, fill
from dreamgym.envs.webarena.sites.site import TODAY, Site, build_app, go, kept, needs_login, number, page, paged, words

__all__ = ["SCHEMA", "SITE", "fill", "make_app"]
SITE = Site("shopping", "One Stop Mini", (("Home", "/"), ("Cart", "/cart"), ("Account", "/account")), search="/search", account=EMMA,
            login_path="/customer/account/login/", login_text="Sign In", user_label="Email")
SORTS = {"Name": "name", "Cheapest": "price, name", "Priciest": "price DESC, name", "Stars": "stars DESC, name"}
TILES = "SELECT slug, name, price, color, picture FROM shop_shelf"      # not *: stars cost a query for each product
SUBJECTS = ("Order", "Product", "Return", "Other")
MOST = 20                                        # of one product in a cart

pages = Blueprint("pages", __name__)


def make_app(world) -> Flask:
    return build_app(SITE, pages)


# ---- finding products ----------------------------------------------------------------------------------------------------------------------------

@pages.get("/")
def home() -> Response:
    categories = g.db.execute("SELECT * FROM shop_categories ORDER BY name").fetchall()
    featured = g.db.execute(f"{TILES} WHERE featured AND enabled ORDER BY id LIMIT 4").fetchall()
    return page("shop_home.html", "Home", categories=categories, featured=featured)


def _listing(title: str, where: str, arguments: tuple, q: str = "") -> Response:
    sort = request.args.get("sort", "Name")
    sort = sort if sort in SORTS else "Name"
    products = paged(f"{TILES} WHERE enabled AND {where} ORDER BY {SORTS[sort]}", arguments)
    return page("shop_list.html", title, products=products, sort=sort, sorts=SORTS, address=kept(**({"q": q} if q else {}), sort=sort), q=q)


@pages.get("/category/<slug>")
def category(slug: str) -> Response:
    row = g.db.execute("SELECT * FROM shop_categories WHERE slug = ?", (slug,)).fetchone() or abort(404)
    return _listing(row["name"], "category_id = ?", (row["id"],))


@pages.get("/search")
def search() -> Response:
    """All words must be in the name, the category or the brand."""
    query = " ".join(request.args.get("q", "").split())[:100]
    parts = query.lower().split()[:8]
    where = " AND ".join(["instr(lower(name || ' ' || category || ' ' || brand), ?)"] * len(parts)) or "1"
    return _listing(f"Results for {query}" if query else "All products", where, tuple(parts), query)


def _product(slug: str) -> sqlite3.Row:
    return g.db.execute("SELECT * FROM shop_shelf WHERE slug = ? AND enabled", (slug,)).fetchone() or abort(404)


@pages.get("/product/<slug>")
def product(slug: str) -> Response:
    row = _product(slug)
    reviews = paged("SELECT stars, text, full_name FROM shop_reviews JOIN users ON users.id = user_id WHERE product_id = ? AND status = 'Approved' "
                    "ORDER BY shop_reviews.id DESC", (row["id"],), size=3)
    return page("shop_product.html", row["name"], product=row, reviews=reviews)


# ---- the cart ------------------------------------------------------------------------------------------------------------------------------------

def _cart() -> list[sqlite3.Row]:
    return g.db.execute("SELECT shop_products.*, quantity, price * quantity AS sum FROM shop_cart JOIN shop_products ON shop_products.id = product_id "
                        "WHERE user_id = ? ORDER BY shop_cart.rowid", (g.user["id"],)).fetchall()


def _put(product: sqlite3.Row, quantity: int) -> None:
    g.db.execute("INSERT INTO shop_cart VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET quantity = excluded.quantity", (g.user["id"], product["id"], quantity))


def _too_many(product: sqlite3.Row, quantity: int) -> str:
    """Why that many cannot be in the cart, or ""."""
    if not product["enabled"]:
        return f"{product['name']} is not sold any more."
    if quantity > min(product["stock"], MOST):
        return f"{product['name']} is out of stock." if not product["stock"] else f"You can buy at most {min(product['stock'], MOST)} of {product['name']}."
    return ""


def _in_cart(product_id: int) -> int:
    row = g.db.execute("SELECT quantity FROM shop_cart WHERE user_id = ? AND product_id = ?", (g.user["id"], product_id)).fetchone()
    return row["quantity"] if row else 0


@pages.post("/product/<slug>/cart")
@needs_login
def add_to_cart(slug: str) -> Response:
    """`quantity` may be left out (a button without the box adds one)."""
    row, quantity = _product(slug), number("quantity", 1, 999) if "quantity" in request.form else 1
    if quantity is None:
        return go(f"/product/{slug}", "Quantity must be a number from 1.")
    quantity += _in_cart(row["id"])
    if refusal := _too_many(row, quantity):
        return go(f"/product/{slug}", refusal)
    _put(row, quantity)
    return go("/cart", f"You added {row['name']} to your cart.")


@pages.get("/cart")
@needs_login
def cart() -> Response:
    items = _cart()
    return page("shop_cart.html", "Cart", items=items, total=sum(item["sum"] for item in items))


@pages.post("/cart/<slug>")
@needs_login
def change_cart(slug: str) -> Response:
    row, quantity = _product(slug), number("quantity", 1, 999)
    if quantity is None:
        return go("/cart", "Quantity must be a number from 1.")
    if refusal := _too_many(row, quantity):
        return go("/cart", refusal)
    if _in_cart(row["id"]):                      # not when it was removed in another tab
        _put(row, quantity)
    return go("/cart", f"You changed {row['name']} to {quantity}.")


@pages.post("/cart/<slug>/remove")
@needs_login
def remove_from_cart(slug: str) -> Response:
    row = g.db.execute("SELECT * FROM shop_products WHERE slug = ?", (slug,)).fetchone() or abort(404)
    g.db.execute("DELETE FROM shop_cart WHERE user_id = ? AND product_id = ?", (g.user["id"], row["id"]))
    return go("/cart", f"You removed {row['name']} from your cart.")


@pages.get("/checkout")
@needs_login
def checkout() -> Response:
    items = _cart()
    if not items:
        return go("/cart", "Your cart is empty.")
    return page("shop_checkout.html", "Checkout", items=items, total=sum(item["sum"] for item in items), address=_address(), payments=PAYMENTS)


@pages.post("/checkout")
@needs_login
def place_order() -> Response:
    items, payment = _cart(), words("payment")
    if not items:
        return go("/cart", "Your cart is empty.")
    if refusal := next(filter(None, (_too_many(item, item["quantity"]) for item in items)), ""):
        return go("/cart", refusal)
    order = g.db.execute("INSERT INTO shop_orders (user_id, date, status, payment, total) VALUES (?, ?, 'Pending', ?, ?)",
                         (g.user["id"], TODAY, payment if payment in PAYMENTS else PAYMENTS[0], sum(item["sum"] for item in items))).lastrowid
    for item in items:
        g.db.execute("INSERT INTO shop_order_items VALUES (?, ?, ?, ?)", (order, item["id"], item["price"], item["quantity"]))
        g.db.execute("UPDATE shop_products SET stock = stock - ? WHERE id = ?", (item["quantity"], item["id"]))
    g.db.execute("DELETE FROM shop_cart WHERE user_id = ?", (g.user["id"],))
    return go(f"/orders/{order}", f"Your order {order} was placed.")


# ---- the account ---------------------------------------------------------------------------------------------------------------------------------

@pages.get("/account")
@needs_login
def account() -> Response:
    return page("shop_account.html", "Account")


@pages.get("/orders")
@needs_login
def orders() -> Response:
    return page("shop_orders.html", "Orders", orders=paged("SELECT * FROM shop_orders WHERE user_id = ? ORDER BY id DESC", (g.user["id"],)))


def _order(order_id: int) -> sqlite3.Row:
    return g.db.execute("SELECT * FROM shop_orders WHERE id = ? AND user_id = ?", (order_id, g.user["id"])).fetchone() or abort(404)


def order_items(order_id: int) -> list[sqlite3.Row]:
    """The lines of an order with their products: `paid` is the price of one then, `price` today's."""
    return g.db.execute("SELECT shop_products.*, i.price AS paid, quantity FROM shop_order_items i JOIN shop_products ON shop_products.id = product_id "
                        "WHERE order_id = ? ORDER BY shop_products.name", (order_id,)).fetchall()


def close_order(order_id: int) -> None:
    """Cancels an order; what it held goes back into stock."""
    g.db.execute("UPDATE shop_orders SET status = 'Canceled' WHERE id = ?", (order_id,))
    for item in order_items(order_id):
        g.db.execute("UPDATE shop_products SET stock = stock + ? WHERE id = ?", (item["quantity"], item["id"]))


@pages.get("/orders/<int:order_id>")
@needs_login
def order(order_id: int) -> Response:
    return page("shop_order.html", f"Order {order_id}", order=_order(order_id), items=order_items(order_id))


@pages.post("/orders/<int:order_id>/cancel")
@needs_login
def cancel(order_id: int) -> Response:
    if _order(order_id)["status"] != "Pending":
        return go(f"/orders/{order_id}", "Only a pending order can be canceled.")
    close_order(order_id)
    return go(f"/orders/{order_id}", f"Your order {order_id} was canceled.")


@pages.post("/orders/<int:order_id>/reorder")
@needs_login
def reorder(order_id: int) -> Response:
    """What is not there in that number any more is left out."""
    _order(order_id)
    items = [(item, item["quantity"] + _in_cart(item["id"])) for item in order_items(order_id)]
    possible = [(item, quantity) for item, quantity in items if not _too_many(item, quantity)]
    for item, quantity in possible:
        _put(item, quantity)
    return go("/cart", f"You added {len(possible)} of {len(items)} products to your cart.")


@pages.get("/wishlist")
@needs_login
def wishlist() -> Response:
    products = paged("SELECT shop_products.* FROM shop_wishes JOIN shop_products ON shop_products.id = product_id WHERE user_id = ? AND enabled "
                     "ORDER BY shop_wishes.rowid", (g.user["id"],), size=6)
    return page("shop_wishlist.html", "Wishlist", products=products)


@pages.post("/product/<slug>/wish")
@needs_login
def wish(slug: str) -> Response:
    row = _product(slug)
    g.db.execute("INSERT OR IGNORE INTO shop_wishes VALUES (?, ?)", (g.user["id"], row["id"]))
    return go("/wishlist", f"You added {row['name']} to your wishlist.")


@pages.post("/wishlist/<slug>/remove")
@needs_login
def unwish(slug: str) -> Response:
    row = _product(slug)
    g.db.execute("DELETE FROM shop_wishes WHERE user_id = ? AND product_id = ?", (g.user["id"], row["id"]))
    return go("/wishlist", f"You removed {row['name']} from your wishlist.")


def _address() -> sqlite3.Row:
    return g.db.execute("SELECT * FROM shop_addresses WHERE user_id = ?", (g.user["id"],)).fetchone()


@pages.get("/address")
@needs_login
def address() -> Response:
    return page("shop_address.html", "Address", address=_address())


@pages.post("/address")
@needs_login
def change_address() -> Response:
    fields = [words(name, 60) for name in ("street", "city", "zip", "phone")]
    if not all(fields):
        return go("/address", "All fields are needed.")
    g.db.execute("UPDATE shop_addresses SET street = ?, city = ?, zip = ?, phone = ? WHERE user_id = ?", (*fields, g.user["id"]))
    return go("/address", "You saved your address.")


@pages.get("/reviews")
@needs_login
def my_reviews() -> Response:
    return page("shop_reviews.html", "My Reviews", reviews=paged("SELECT shop_reviews.*, name, slug FROM shop_reviews JOIN shop_products ON shop_products.id = "
                "product_id WHERE user_id = ? ORDER BY shop_reviews.id DESC", (g.user["id"],)))


@pages.get("/product/<slug>/review")
@needs_login
def review(slug: str) -> Response:
    row = _product(slug)
    return page("shop_review.html", f"Review {row['name']}", product=row)


@pages.post("/product/<slug>/review")
@needs_login
def write_review(slug: str) -> Response:
    """A review is shown once the back office has approved it."""
    row, stars, text = _product(slug), number("stars", 1, 5), words("review")
    if stars is None or not text:
        return go(f"/product/{slug}/review", "Stars and a review are needed.")
    g.db.execute("INSERT INTO shop_reviews (product_id, user_id, stars, text, date, status) VALUES (?, ?, ?, ?, ?, 'Pending')",
                 (row["id"], g.user["id"], stars, text, TODAY))
    return go("/reviews", "Your review waits for approval.")


@pages.get("/newsletter")
@needs_login
def newsletter() -> Response:
    return page("shop_newsletter.html", "Newsletter", subscribed=bool(g.db.execute("SELECT 1 FROM shop_subscribers WHERE user_id = ?", (g.user["id"],)).fetchone()))


@pages.post("/newsletter")
@needs_login
def subscribe() -> Response:
    if "subscribed" in request.form:
        g.db.execute("INSERT OR IGNORE INTO shop_subscribers VALUES (?)", (g.user["id"],))
        return go("/newsletter", "You are subscribed.")
    g.db.execute("DELETE FROM shop_subscribers WHERE user_id = ?", (g.user["id"],))
    return go("/newsletter", "You are not subscribed.")


@pages.get("/contact")
@needs_login
def contact() -> Response:
    return page("shop_contact.html", "Contact", subjects=SUBJECTS)


@pages.post("/contact")
@needs_login
def send_message() -> Response:
    subject, text = words("subject"), words("message", 500)
    if subject not in SUBJECTS or not text:
        return go("/contact", "A message is needed.")
    g.db.execute("INSERT INTO shop_messages (user_id, subject, text) VALUES (?, ?, ?)", (g.user["id"], subject, text))
    return go("/contact", "Your message was sent.")
