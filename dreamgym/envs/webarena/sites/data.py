"""The first data of the shop and its back office.

Names come from a small vocabulary ('Blue Speaker', 'Wool Scarf'), so that a tiny language model can read and
write them. Only draws whose outcome Python keeps the same over versions and machines are used (`random()`,
`choice`, `shuffle`, `randrange` of a str-seeded Random).
"""
import sqlite3
from random import Random

from dreamgym.envs.webarena.sites.site import (
    PEOPLE, WORDS, Site, day, insert, of_split)

SITE = Site("shopping", "One Stop Mini", {"Home": "/", "Cart": "/cart", "Account": "/account"},
            search="/search", account=("emma.lopez@gmail.com", "Password.123"),
            login_path="/customer/account/login/", login_text="Sign In", user_label="Email")
STATUSES = ("Pending", "Processing", "Complete", "Canceled")
PAYMENTS = ("Card", "Check")
CUSTOMERS, ORDERS, REVIEWS, DAYS = 25, 150, 270, 730
NAMES = WORDS["shop"]


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
    for number, ago in enumerate(sorted(days, reverse=True), 1001):
        is_emma = rng.random() < (0.2 if ago <= 45 else 0.06)
        _add_order(db, rng, number, customers[0] if is_emma else rng.choice(customers), ago)
    _add_reviews(db, rng, customers)
    in_stock = [row["id"] for row in db.execute("SELECT id FROM shop_products WHERE stock > 0")]
    for product in sorted(rng.sample(in_stock, 2)):
        insert(db, "shop_wishes", user_id=customers[0], product_id=product)


def _add_products(db: sqlite3.Connection, rng: Random, split: str) -> None:
    for number, (category, nouns) in enumerate(NAMES.categories.items(), 1):
        insert(db, "shop_categories", id=number, name=category, slug=slug(category))
        names = sorted((name, low, 5 * (number - 1) + i) for i, (noun, low) in enumerate(nouns.items())
                       for name in rng.sample(of_split([f"{look} {noun}" for look in NAMES.looks], split), 3))
        for i, (name, low, picture) in enumerate(names, 1):
            price = 100 * rng.randrange(low, 3 * low) + rng.choice((0, 50, 95, 99))
            stock = 0 if rng.random() < 0.06 else rng.randrange(1, 41)
            insert(db, "shop_products", sku=f"{category[0]}{number}{i:02d}", slug=slug(name), name=name,
                   category_id=number, brand=rng.choice(NAMES.brands), color=name.split()[0].lower(),
                   picture=picture, price=price, stock=stock)
        db.execute("UPDATE shop_products SET featured = 1 WHERE stock > 0 AND name = ?",
                   (rng.choice(names)[0],))


def _add_customer(db: sqlite3.Connection, rng: Random, name: str) -> int:
    email = f"{name.lower().replace(' ', '.')}@gmail.com"
    customer = SITE.add_user(db, email, rng, name, range(DAYS, DAYS + 200))
    insert(db, "shop_addresses", user_id=customer,
           street=f"{rng.randrange(1, 100)} {rng.choice(NAMES.streets)}", city=rng.choice(NAMES.cities),
           zip=f"{rng.randrange(10000, 100000)}", phone=f"555-{rng.randrange(1000, 10000)}")
    return customer


def _add_order(db: sqlite3.Connection, rng: Random, number: int, user_id: int, ago: int) -> None:
    """What was ordered lately may still be open."""
    if ago <= 45:
        status = rng.choice(("Pending", "Processing", "Complete"))
    else:
        status = "Canceled" if rng.random() < 0.12 else "Complete"
    items = sorted(rng.sample(range(1, 121), rng.choice((1, 1, 2, 2, 3))))
    prices = [db.execute("SELECT price FROM shop_products WHERE id = ?", (item,)).fetchone()[0]
              for item in items]
    lines = [(number, item, price, rng.choice((1, 1, 1, 2, 3))) for item, price in zip(items, prices)]
    db.executemany("INSERT INTO shop_order_items VALUES (?, ?, ?, ?)", lines)
    insert(db, "shop_orders", id=number, user_id=user_id, date=day(ago), status=status,
           payment=rng.choice(PAYMENTS), total=sum(price * quantity for _, _, price, quantity in lines))


def _add_reviews(db: sqlite3.Connection, rng: Random, customers: list[int]) -> None:
    """Some products have many reviews, some none; a product has its own quality; the latest reviews may still
    wait for approval."""
    quality = [rng.choice((2, 3, 4, 4, 5)) for _ in range(120)]
    written = set()
    for ago in sorted((rng.randrange(1, DAYS) for _ in range(REVIEWS)), reverse=True):
        product = int(120 * rng.random() * rng.random()) + 1
        product = (product * 37) % 120 + 1       # the popular ones are spread over the categories
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
