"""The shop's back office: the same database, seen by the admin. Bestsellers, products, orders, customers,
reviews to approve, and reports."""
from __future__ import annotations

import re
import sqlite3
from random import Random

from flask import Blueprint, Response, request

from dreamgym.envs.webarena.sites.data import STATUSES
from dreamgym.envs.webarena.sites.shop import close_order, order_items
from dreamgym.envs.webarena.sites.site import (
    Site, add_user, asked, chosen, go, kept, number, one, page, paged, run, words)

NAV = ("Products", "Orders", "Customers", "Reviews")
SITE = Site("shopping_admin", "Shop Admin", (("Home", "/"), *((name, f"/{name.lower()}") for name in NAV)),
            account=("admin", "admin1234"), login_text="Sign in", private=True)
SCHEMA = ""                                      # the shop's tables
SHOWN = {"All": "1", "Enabled": "enabled", "Disabled": "NOT enabled", "Out of stock": "stock = 0"}
REVIEW_STATUSES = ("Pending", "Approved")
REPORTS, MONTHS = ("Sales", "Bestsellers"), ("All", *(f"{month:02d}" for month in range(1, 13)))
SOLD = """SELECT name, slug, sum(quantity) AS sold FROM shop_order_items
    JOIN shop_orders ON shop_orders.id = order_id JOIN shop_products ON shop_products.id = product_id
    WHERE shop_orders.status != 'Canceled' AND date LIKE ?
    GROUP BY product_id ORDER BY sold DESC, name"""
ORDERS = "SELECT shop_orders.*, full_name FROM shop_orders JOIN users ON users.id = user_id"
REVIEWS = """SELECT shop_reviews.*, name, slug,
    (SELECT full_name FROM users WHERE users.id = user_id) AS author
    FROM shop_reviews JOIN shop_products ON shop_products.id = product_id"""

pages = Blueprint("pages", __name__)


def fill(db: sqlite3.Connection, rng: Random) -> None:
    """The admin; everything else is the shop's."""
    add_user(db, SITE, *SITE.account, "Admin")


# ---- dashboard and reports ---------------------------------------------------------------------------------

@pages.get("/")
def home() -> Response:
    totals = one("SELECT count(*) AS orders, sum(CASE status WHEN 'Canceled' THEN 0 ELSE total END) AS "
                 "sales, "
                 "(SELECT count(*) FROM users WHERE site = 'shopping') AS customers FROM shop_orders")
    last = run(f"{ORDERS} ORDER BY shop_orders.id DESC LIMIT 3").fetchall()
    return page("cms_home.html", "Dashboard", totals=totals, last=last,
                best=run(f"{SOLD} LIMIT 4", "%").fetchall())


@pages.get("/reports")
def reports() -> Response:
    """Sales of the months of a year, or the bestsellers of a year or of one of its months; canceled orders do
    not count."""
    years = [row[0] for row in run("SELECT DISTINCT substr(date, 1, 4) FROM shop_orders ORDER BY 1 DESC")]
    report, year, month = chosen("report", REPORTS, "Sales"), chosen("year", years,
                                                                     years[0]), chosen("month", MONTHS, "All")
    date = f"{year}-%" if month == "All" else f"{year}-{month}-%"
    if report == "Bestsellers":
        rows = [(row["name"], f"/products/{row['slug']}", f"sold {row['sold']}", row["sold"])
                for row in run(f"{SOLD} LIMIT 8", date)]
    else:
        sales = run("SELECT substr(date, 1, 7) AS month, count(*) AS orders, sum(total) AS total FROM "
                    "shop_orders "
                    "WHERE status != 'Canceled' AND date LIKE ? GROUP BY 1 ORDER BY 1", date)
        rows = [(f"{row['month']}: orders {row['orders']}, sales ${row['total'] / 100:,.2f}", "", "",
                 row["total"])
                for row in sales]
    return page("cms_reports.html", "Reports", rows=rows, largest=max((row[3] for row in rows), default=1),
                reports=REPORTS, years=years, months=MONTHS, report=report, year=year, month=month)


# ---- products ----------------------------------------------------------------------------------------------

@pages.get("/products")
def products() -> Response:
    status, name = chosen("status", SHOWN, "All"), asked("name")
    rows = paged(f"SELECT * FROM shop_products WHERE {SHOWN[status]} AND instr(lower(name), ?) ORDER BY name",
                 (name.lower(),))
    return page("cms_products.html", "Products", products=rows, status=status, name=name, statuses=SHOWN,
                address=kept(name=name, status=status))


def _product(slug: str) -> sqlite3.Row:
    return one("SELECT * FROM shop_shelf WHERE slug = ?", slug)


@pages.get("/products/<slug>")
def product(slug: str) -> Response:
    row = _product(slug)
    sold = one("SELECT ifnull(sum(quantity), 0) AS sold FROM shop_order_items JOIN shop_orders "
               "ON shop_orders.id = order_id WHERE product_id = ? AND status != 'Canceled'",
               row["id"])["sold"]
    return page("cms_product.html", row["name"], product=row, sold=sold)


@pages.post("/products/<slug>")
def save_product(slug: str) -> Response:
    row, price, stock = _product(slug), words("price").removeprefix("$"), number("stock", 0, 9999)
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,2})?", price) or stock is None:
        return go(f"/products/{slug}", "Price must be like 19.99, and stock a number.")
    dollars, _, cents = price.partition(".")
    run("UPDATE shop_products SET price = ?, stock = ?, enabled = ? WHERE id = ?",
        int(dollars) * 100 + int(cents.ljust(2, "0")), stock, int("enabled" in request.form), row["id"])
    return go(f"/products/{slug}", f"You saved {row['name']}.")


# ---- orders and customers ----------------------------------------------------------------------------------

@pages.get("/orders")
def orders() -> Response:
    status = chosen("status", STATUSES, "All")
    rows = paged(f"{ORDERS} WHERE ? IN ('All', status) ORDER BY shop_orders.id DESC", (status,))
    return page("cms_orders.html", "Orders", orders=rows, status=status, statuses=("All", *STATUSES),
                address=kept(status=status))


def _order(order_id: int) -> sqlite3.Row:
    return one(f"{ORDERS} WHERE shop_orders.id = ?", order_id)


@pages.get("/orders/<int:order_id>")
def order(order_id: int) -> Response:
    return page("cms_order.html", f"Order {order_id}", order=_order(order_id), items=order_items(order_id),
                statuses=STATUSES[:3])


@pages.post("/orders/<int:order_id>")
def change_order(order_id: int) -> Response:
    """To any status but canceled, which has its own button; a canceled order stays so."""
    row, status = _order(order_id), words("status")
    if row["status"] == "Canceled" or status not in STATUSES[:3]:
        return go(f"/orders/{order_id}", "A canceled order cannot be changed.")
    run("UPDATE shop_orders SET status = ? WHERE id = ?", status, order_id)
    return go(f"/orders/{order_id}", f"Order {order_id} is now {status}.")


@pages.post("/orders/<int:order_id>/cancel")
def cancel(order_id: int) -> Response:
    if _order(order_id)["status"] not in ("Pending", "Processing"):
        return go(f"/orders/{order_id}", "Only an open order can be canceled.")
    close_order(order_id)
    return go(f"/orders/{order_id}", f"You canceled order {order_id}.")


@pages.get("/customers")
def customers() -> Response:
    name = asked("name")
    rows = paged("SELECT id, full_name, (SELECT count(*) FROM shop_orders WHERE user_id = users.id) AS "
                 "orders FROM users "
                 "WHERE site = 'shopping' AND instr(lower(full_name || ' ' || name), ?) ORDER BY full_name",
                 (name.lower(),))
    return page("cms_customers.html", "Customers", customers=rows, name=name, address=kept(name=name))


@pages.get("/customers/<int:user_id>")
def customer(user_id: int) -> Response:
    row = one("SELECT users.*, street, city, zip, phone FROM users JOIN shop_addresses ON user_id = users.id "
              "WHERE users.id = ?", user_id)
    spent = one("SELECT ifnull(sum(total), 0) AS total FROM shop_orders WHERE user_id = ? AND status != "
                "'Canceled'", user_id)
    rows = paged("SELECT * FROM shop_orders WHERE user_id = ? ORDER BY id DESC", (user_id,), size=4)
    return page("cms_customer.html", row["full_name"], customer=row, spent=spent["total"], orders=rows)


# ---- reviews -----------------------------------------------------------------------------------------------

@pages.get("/reviews")
def reviews() -> Response:
    status = chosen("status", REVIEW_STATUSES, "All")
    rows = paged(f"{REVIEWS} WHERE ? IN ('All', status) ORDER BY shop_reviews.id DESC", (status,))
    return page("cms_reviews.html", "Reviews", reviews=rows, status=status,
                statuses=("All", *REVIEW_STATUSES),
                address=kept(status=status))


def _review(review_id: int) -> sqlite3.Row:
    return one(f"{REVIEWS} WHERE shop_reviews.id = ?", review_id)


@pages.get("/reviews/<int:review_id>")
def review(review_id: int) -> Response:
    return page("cms_review.html", f"Review {review_id}", review=_review(review_id))


@pages.post("/reviews/<int:review_id>/approve")
def approve(review_id: int) -> Response:
    _review(review_id)
    run("UPDATE shop_reviews SET status = 'Approved' WHERE id = ?", review_id)
    return go(f"/reviews/{review_id}", f"You approved review {review_id}.")


@pages.post("/reviews/<int:review_id>/delete")
def delete(review_id: int) -> Response:
    _review(review_id)
    run("DELETE FROM shop_reviews WHERE id = ?", review_id)
    return go("/reviews", f"You deleted review {review_id}.")
