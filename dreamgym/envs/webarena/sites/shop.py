"""The shop: categories, search, products with reviews, a cart and a checkout, and the customer's account.
Its data is in `data.py`."""
from __future__ import annotations

import sqlite3

from flask import Blueprint, Response, g, request

from dreamgym.envs.webarena.sites.data import PAYMENTS, SCHEMA, SITE, fill
from dreamgym.envs.webarena.sites.site import (
    TODAY, Members, all_words, asked, chosen, exists, go, insert, kept, number, one, page, paged, run, words)

__all__ = ["SCHEMA", "SITE", "fill", "pages"]
SORTS = {"Name": "name", "Cheapest": "price, name", "Priciest": "price DESC, name",
         "Stars": "stars DESC, name"}
# not *: stars cost a query for each product
TILES = "SELECT slug, name, price, color, picture FROM shop_shelf"
SUBJECTS = ("Order", "Product", "Return", "Other")
MOST = 20                                        # of one product in a cart
NO_QUANTITY = "Quantity must be a number from 1."

pages = Blueprint("pages", __name__)
members = Members(pages)


# ---- finding products --------------------------------------------------------------------------------------

@pages.get("/")
def home() -> Response:
    categories = run("SELECT * FROM shop_categories ORDER BY name").fetchall()
    featured = run(f"{TILES} WHERE featured AND enabled ORDER BY id LIMIT 4").fetchall()
    return page("shop_home.html", "Home", categories=categories, featured=featured)


def _listing(title: str, where: str, arguments: tuple, **query: str) -> Response:
    sort = chosen("sort", SORTS, "Name")
    products = paged(f"{TILES} WHERE enabled AND {where} ORDER BY {SORTS[sort]}", arguments)
    return page("shop_list.html", title, products=products, sort=sort, sorts=SORTS,
                address=kept(**query, sort=sort),
                q=query.get("q", ""))


@pages.get("/category/<slug>")
def category(slug: str) -> Response:
    row = one("SELECT * FROM shop_categories WHERE slug = ?", slug)
    return _listing(row["name"], "category_id = ?", (row["id"],))


@pages.get("/search")
def search() -> Response:
    """All words must be in the name, the category or the brand."""
    query = asked("q")
    parts = query.lower().split()[:8]
    where = all_words("lower(name || ' ' || category || ' ' || brand)", " ".join(parts), none="1")
    if not query:
        return _listing("All products", where, ())
    return _listing(f"Results for {query}", where, tuple(parts), q=query)


def _product(slug: str) -> sqlite3.Row:
    return one("SELECT * FROM shop_shelf WHERE slug = ? AND enabled", slug)


@pages.get("/product/<slug>")
def product(slug: str) -> Response:
    row = _product(slug)
    reviews = paged("SELECT stars, text, full_name FROM shop_reviews JOIN users ON users.id = user_id WHERE "
                    "product_id = ? "
                    "AND status = 'Approved' ORDER BY shop_reviews.id DESC", (row["id"],), size=3)
    return page("shop_product.html", row["name"], product=row, reviews=reviews)


# ---- the cart ----------------------------------------------------------------------------------------------

def _cart() -> list[sqlite3.Row]:
    return run("SELECT shop_products.*, quantity, price * quantity AS sum FROM shop_cart JOIN shop_products "
               "ON shop_products.id = product_id WHERE user_id = ? ORDER BY shop_cart.rowid",
               g.user["id"]).fetchall()


def _put(product: sqlite3.Row, quantity: int) -> None:
    run("INSERT INTO shop_cart VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET quantity = excluded.quantity",
        g.user["id"], product["id"], quantity)


def _too_many(product: sqlite3.Row, quantity: int) -> str:
    """Why that many cannot be in the cart, or ""."""
    most = min(product["stock"], MOST)
    if not product["enabled"]:
        return f"{product['name']} is not sold any more."
    if quantity <= most:
        return ""
    name = product["name"]
    return f"You can buy at most {most} of {name}." if most else f"{name} is out of stock."


def _in_cart(product_id: int) -> int:
    row = run("SELECT quantity FROM shop_cart WHERE user_id = ? AND product_id = ?", g.user["id"],
              product_id).fetchone()
    return row["quantity"] if row else 0


@members.post("/product/<slug>/cart")
def add_to_cart(slug: str) -> Response:
    """`quantity` may be left out (a button without the box adds one)."""
    row, quantity = _product(slug), number("quantity", 1, 999) if "quantity" in request.form else 1
    if quantity is None:
        return go(f"/product/{slug}", NO_QUANTITY)
    quantity += _in_cart(row["id"])
    if refusal := _too_many(row, quantity):
        return go(f"/product/{slug}", refusal)
    _put(row, quantity)
    return go("/cart", f"You added {row['name']} to your cart.")


@members.get("/cart")
def cart() -> Response:
    items = _cart()
    return page("shop_cart.html", "Cart", items=items, total=sum(item["sum"] for item in items))


@members.post("/cart/<slug>")
def change_cart(slug: str) -> Response:
    row, quantity = _product(slug), number("quantity", 1, 999)
    if quantity is None:
        return go("/cart", NO_QUANTITY)
    if refusal := _too_many(row, quantity):
        return go("/cart", refusal)
    if _in_cart(row["id"]):                      # not when it was removed in another tab
        _put(row, quantity)
    return go("/cart", f"You changed {row['name']} to {quantity}.")


@members.post("/cart/<slug>/remove")
def remove_from_cart(slug: str) -> Response:
    row = one("SELECT * FROM shop_products WHERE slug = ?", slug)
    run("DELETE FROM shop_cart WHERE user_id = ? AND product_id = ?", g.user["id"], row["id"])
    return go("/cart", f"You removed {row['name']} from your cart.")


@members.get("/checkout")
def checkout() -> Response:
    items = _cart()
    if not items:
        return go("/cart", "Your cart is empty.")
    return page("shop_checkout.html", "Checkout", items=items, total=sum(item["sum"] for item in items),
                address=_address(), payments=PAYMENTS)


@members.post("/checkout")
def place_order() -> Response:
    items, payment = _cart(), words("payment")
    if not items:
        return go("/cart", "Your cart is empty.")
    if refusal := next(filter(None, (_too_many(item, item["quantity"]) for item in items)), ""):
        return go("/cart", refusal)
    order = insert(g.db, "shop_orders", user_id=g.user["id"], date=TODAY, status="Pending",
                   payment=payment if payment in PAYMENTS else PAYMENTS[0],
                   total=sum(item["sum"] for item in items))
    for item in items:
        run("INSERT INTO shop_order_items VALUES (?, ?, ?, ?)", order, item["id"], item["price"],
            item["quantity"])
        _change_stock(item, -1)
    run("DELETE FROM shop_cart WHERE user_id = ?", g.user["id"])
    return go(f"/orders/{order}", f"Your order {order} was placed.")


def _change_stock(item: sqlite3.Row, sign: int) -> None:
    run("UPDATE shop_products SET stock = stock + ? WHERE id = ?", sign * item["quantity"], item["id"])


# ---- the account -------------------------------------------------------------------------------------------

@members.get("/account")
def account() -> Response:
    return page("shop_account.html", "Account")


@members.get("/orders")
def orders() -> Response:
    mine = paged("SELECT * FROM shop_orders WHERE user_id = ? ORDER BY id DESC", (g.user["id"],))
    return page("shop_orders.html", "Orders", orders=mine)


def _order(order_id: int) -> sqlite3.Row:
    return one("SELECT * FROM shop_orders WHERE id = ? AND user_id = ?", order_id, g.user["id"])


def order_items(order_id: int) -> list[sqlite3.Row]:
    """The lines of an order with their products: `paid` is the price of one then, `price` today's."""
    return run("SELECT shop_products.*, i.price AS paid, quantity FROM shop_order_items i JOIN shop_products "
               "ON shop_products.id = product_id WHERE order_id = ? ORDER BY shop_products.name",
               order_id).fetchall()


def close_order(order_id: int) -> None:
    """Cancels an order; what it held goes back into stock."""
    run("UPDATE shop_orders SET status = 'Canceled' WHERE id = ?", order_id)
    for item in order_items(order_id):
        _change_stock(item, 1)


@members.get("/orders/<int:order_id>")
def order(order_id: int) -> Response:
    return page("shop_order.html", f"Order {order_id}", order=_order(order_id), items=order_items(order_id))


@members.post("/orders/<int:order_id>/cancel")
def cancel(order_id: int) -> Response:
    if _order(order_id)["status"] != "Pending":
        return go(f"/orders/{order_id}", "Only a pending order can be canceled.")
    close_order(order_id)
    return go(f"/orders/{order_id}", f"Your order {order_id} was canceled.")


@members.post("/orders/<int:order_id>/reorder")
def reorder(order_id: int) -> Response:
    """What is not there in that number any more is left out."""
    _order(order_id)
    items = [(item, item["quantity"] + _in_cart(item["id"])) for item in order_items(order_id)]
    possible = [(item, quantity) for item, quantity in items if not _too_many(item, quantity)]
    for item, quantity in possible:
        _put(item, quantity)
    return go("/cart", f"You added {len(possible)} of {len(items)} products to your cart.")


@members.get("/wishlist")
def wishlist() -> Response:
    products = paged("SELECT shop_products.* FROM shop_wishes JOIN shop_products ON shop_products.id = "
                     "product_id "
                     "WHERE user_id = ? AND enabled ORDER BY shop_wishes.rowid", (g.user["id"],), size=6)
    return page("shop_wishlist.html", "Wishlist", products=products)


@members.post("/product/<slug>/wish")
def wish(slug: str) -> Response:
    row = _product(slug)
    run("INSERT OR IGNORE INTO shop_wishes VALUES (?, ?)", g.user["id"], row["id"])
    return go("/wishlist", f"You added {row['name']} to your wishlist.")


@members.post("/wishlist/<slug>/remove")
def unwish(slug: str) -> Response:
    row = _product(slug)
    run("DELETE FROM shop_wishes WHERE user_id = ? AND product_id = ?", g.user["id"], row["id"])
    return go("/wishlist", f"You removed {row['name']} from your wishlist.")


def _address() -> sqlite3.Row:
    return run("SELECT * FROM shop_addresses WHERE user_id = ?", g.user["id"]).fetchone()


@members.get("/address")
def address() -> Response:
    return page("shop_address.html", "Address", address=_address())


@members.post("/address")
def change_address() -> Response:
    fields = [words(name, 60) for name in ("street", "city", "zip", "phone")]
    if not all(fields):
        return go("/address", "All fields are needed.")
    run("UPDATE shop_addresses SET street = ?, city = ?, zip = ?, phone = ? WHERE user_id = ?", *fields,
        g.user["id"])
    return go("/address", "You saved your address.")


@members.get("/reviews")
def my_reviews() -> Response:
    reviews = paged("SELECT shop_reviews.*, name, slug FROM shop_reviews JOIN shop_products ON "
                    "shop_products.id = product_id "
                    "WHERE user_id = ? ORDER BY shop_reviews.id DESC", (g.user["id"],))
    return page("shop_reviews.html", "My Reviews", reviews=reviews)


@members.get("/product/<slug>/review")
def review(slug: str) -> Response:
    row = _product(slug)
    return page("shop_review.html", f"Review {row['name']}", product=row)


@members.post("/product/<slug>/review")
def write_review(slug: str) -> Response:
    """A review is shown once the back office has approved it."""
    row, stars, text = _product(slug), number("stars", 1, 5), words("review")
    if stars is None or not text:
        return go(f"/product/{slug}/review", "Stars and a review are needed.")
    insert(g.db, "shop_reviews", product_id=row["id"], user_id=g.user["id"], stars=stars, text=text,
           date=TODAY, status="Pending")
    return go("/reviews", "Your review waits for approval.")


@members.get("/newsletter")
def newsletter() -> Response:
    subscribed = exists("SELECT 1 FROM shop_subscribers WHERE user_id = ?", g.user["id"])
    return page("shop_newsletter.html", "Newsletter", subscribed=subscribed)


@members.post("/newsletter")
def subscribe() -> Response:
    if "subscribed" in request.form:
        run("INSERT OR IGNORE INTO shop_subscribers VALUES (?)", g.user["id"])
        return go("/newsletter", "You are subscribed.")
    run("DELETE FROM shop_subscribers WHERE user_id = ?", g.user["id"])
    return go("/newsletter", "You are not subscribed.")


@members.get("/contact")
def contact() -> Response:
    return page("shop_contact.html", "Contact", subjects=SUBJECTS)


@members.post("/contact")
def send_message() -> Response:
    subject, text = words("subject"), words("message", 500)
    if subject not in SUBJECTS or not text:
        return go("/contact", "A message is needed.")
    insert(g.db, "shop_messages", user_id=g.user["id"], subject=subject, text=text)
    return go("/contact", "Your message was sent.")
