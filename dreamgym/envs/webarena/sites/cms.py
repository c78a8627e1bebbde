"""The shop's back office: the same database, seen by the admin. Bestsellers, products, orders, customers,
reviews to approve, and reports."""
import re
import sqlite3
from random import Random

from flask import request

from dreamgym.envs.webarena.sites.shop import STATUSES, close_order, order_items
from dreamgym.envs.webarena.sites.site import (
    Site, asked, chosen, go, number, one, page, paged, rows, run, words)

NAV = ("Products", "Orders", "Customers", "Reviews")
SITE = Site("shopping_admin", "Shop Admin", {"Home": "/"} | {name: f"/{name.lower()}" for name in NAV},
            private=True)
SHOWN = {"All": "1", "Enabled": "enabled", "Disabled": "NOT enabled", "Out of stock": "stock = 0"}
SOLD = """SELECT name, slug, sum(quantity) AS sold FROM shop_sold WHERE date LIKE ?
    GROUP BY product_id ORDER BY sold DESC, name LIMIT ?"""
SALES = """SELECT substr(date, 1, 7) AS month, count(*) AS orders, sum(total) AS sold FROM shop_orders
    WHERE status != 'Canceled' AND date LIKE ? GROUP BY 1 ORDER BY 1"""
ORDERS = "SELECT shop_orders.*, full_name FROM shop_orders JOIN users ON users.id = user_id WHERE"
REVIEWS = """SELECT shop_reviews.*, name, slug,
    (SELECT full_name FROM users WHERE users.id = user_id) AS author
    FROM shop_reviews JOIN shop_products ON shop_products.id = product_id WHERE"""
SITE.loaders |= {
    "product": lambda slug, _: one("SELECT * FROM shop_shelf WHERE slug = ?", slug),
    "order": lambda number, _: one(f"{ORDERS} shop_orders.id = ?", number),
    "review": lambda number, _: one(f"{REVIEWS} shop_reviews.id = ?", number)}


def fill(db: sqlite3.Connection, rng: Random, split: str) -> None:
    """The admin; everything else is the shop's."""
    SITE.add_user(db, "admin", rng, "Admin")


@SITE.get("/")
def home():
    totals = one("SELECT count(*) AS orders, sum(total) FILTER (WHERE status != 'Canceled') AS sales, "
                 "(SELECT count(*) FROM users WHERE site = 'shopping') AS customers FROM shop_orders")
    return page("Dashboard", totals=totals, best=rows(SOLD, "%", 4),
                last=rows(f"{ORDERS} 1 ORDER BY shop_orders.id DESC LIMIT 3"))


@SITE.get("/reports")
def reports():
    """Sales of the months of a year, or the bestsellers of a year or month, without canceled orders."""
    years = [row[0] for row in rows("SELECT DISTINCT substr(date, 1, 4) FROM shop_orders ORDER BY 1 DESC")]
    report, year = chosen("report", ("Sales", "Bestsellers")), chosen("year", years)
    month = chosen("month", ("All", *(f"{month:02d}" for month in range(1, 13))))
    date = f"{year}-%" if month == "All" else f"{year}-{month}-%"
    return page("Reports", found=rows(SALES, date) if report == "Sales" else rows(SOLD, date, 8))


@SITE.get("/products")
def products():
    name, status = asked("name").lower(), chosen("status", SHOWN)
    found = paged(f"SELECT * FROM shop_products WHERE {SHOWN[status]} AND instr(lower(name), ?) "
                  "ORDER BY name", name)
    return page("Products", products=found)


@SITE.get("/products/<product>")
def product(product):
    sold = one("SELECT ifnull(sum(quantity), 0) FROM shop_sold WHERE product_id = ?", product["id"])[0]
    return page(product["name"], product=product, sold=sold)


@SITE.post("/products/<product>")
def save_product(product):
    price, stock = words("price").removeprefix("$"), number("stock", 0, 9999)
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,2})?", price) or stock is None:
        return go("Price must be like 19.99, and stock a number.")
    run("UPDATE shop_products SET price = ?, stock = ?, enabled = ? WHERE id = ?",
        round(float(price) * 100), stock, int("enabled" in request.form), product["id"])
    return go(f"You saved {product['name']}.")


@SITE.get("/orders")
def orders():
    status = chosen("status", ("All", *STATUSES))
    found = paged(f"{ORDERS} ? IN ('All', status) ORDER BY shop_orders.id DESC", status)
    return page("Orders", orders=found)


@SITE.get("/orders/<int:order>")
def order(order):
    return page(f"Order {order['id']}", order=order, items=order_items(order), statuses=STATUSES[:3])


@SITE.post("/orders/<int:order>")
def change_order(order):
    """Canceling has its own button; a canceled order stays so."""
    status = words("status")
    if order["status"] == "Canceled" or status not in STATUSES[:3]:
        return go("A canceled order cannot be changed.")
    run("UPDATE shop_orders SET status = ? WHERE id = ?", status, order["id"])
    return go(f"Order {order['id']} is now {status}.")


@SITE.post("/orders/<int:order>/cancel")
def cancel(order):
    return close_order(order, ("Pending", "Processing"), "an open", f"You canceled order {order['id']}.")


@SITE.get("/customers")
def customers():
    found = paged("SELECT id, full_name, (SELECT count(*) FROM shop_orders WHERE user_id = users.id) AS "
                  "orders FROM users WHERE site = 'shopping' AND instr(lower(full_name || ' ' || name), ?) "
                  "ORDER BY full_name", asked("name").lower())
    return page("Customers", customers=found)


@SITE.get("/customers/<int:user_id>")
def customer(user_id):
    row = one("SELECT users.*, street, city, zip, phone, (SELECT ifnull(sum(total), 0) FROM shop_orders "
              "WHERE user_id = users.id AND status != 'Canceled') AS spent "
              "FROM users JOIN shop_addresses ON user_id = users.id WHERE users.id = ?", user_id)
    found = paged("SELECT * FROM shop_orders WHERE user_id = ? ORDER BY id DESC", user_id, size=4)
    return page(row["full_name"], customer=row, orders=found)


@SITE.get("/reviews")
def reviews():
    status = chosen("status", ("All", "Pending", "Approved"))
    found = paged(f"{REVIEWS} ? IN ('All', status) ORDER BY shop_reviews.id DESC", status)
    return page("Reviews", reviews=found)


@SITE.get("/reviews/<int:review>")
def review(review):
    return page(f"Review {review['id']}", review=review)


@SITE.post("/reviews/<int:review>/approve")
def approve(review):
    run("UPDATE shop_reviews SET status = 'Approved' WHERE id = ?", review["id"])
    return go(f"You approved review {review['id']}.", f"/reviews/{review['id']}")


@SITE.post("/reviews/<int:review>/delete")
def delete(review):
    run("DELETE FROM shop_reviews WHERE id = ?", review["id"])
    return go(f"You deleted review {review['id']}.", "/reviews")
