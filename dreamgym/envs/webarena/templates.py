"""The task templates of the own sites, site by site. Data only: `tasks` says how it is used.

A template is text. `draw`, an SQL query, gives every set of parameters; `intents` ask for it; `plan` is the
actions of the shortest way, with elements in words; `page`, `shows` and `answer` say what the page must show
on which one may `stop`; `html` is what WebArena's evaluator looks up afterwards. Only parameters that an
intent names may occur in plan, page, shows and answer: rules and players know no more than a task's sentence
and pages. `reference` and `html` may use any column of the query, and `answer` is its column of that name.

    lines of a page     heading '{product}'    link 'Order {order}' > text '*, {answer}'
                        `>` is the next line, `*` is anything
    a parameter's forms  {product.slug} blue-speaker   {product.plus} Blue+Speaker
                         {product.low} blue speaker    {product.cap} Blue speaker
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    id: int
    sites: tuple[str, ...]
    intents: tuple[str, ...]            # the same task in other words
    # SQL: a column for each parameter, and `answer` where one is asked for (NULL: the thing does not exist)
    draw: str
    plan: tuple[str, ...]               # up to `stop`
    page: str                           # address to stop on, by url_match's rule
    shows: tuple[str, ...] = ()         # lines of it; `no ...`: a line that must not be there
    answer: str = ""                    # lines with the answer in them
    match: str = "exact_match"          # or must_include
    # (address, line) of the page that says that there is no such thing; the answer is then N/A
    missing: tuple[str, str] = ()
    reference: str = ""                 # url_match's address where it takes more than the intent; "-": none
    # (address, locator, text) of program_html, exact; with locator "main" the text is part of the page
    html: tuple[tuple[str, str, str], ...] = ()
    start: str = ""                     # other than the first site's home; ` |AND| ` for several tabs
    held_out: bool = False              # a kind of task that no training task is of


def _values(name: str, *values: object) -> str:
    """A table of one column for a query."""
    return f"(SELECT column1 AS {name} FROM (VALUES {', '.join(f'({value!r})' for value in values)}))"


def _absent(name: str, table: str, by: str = " ") -> str:
    """Names in `table`.`name` whose two halves occur, but not together: a query of (thing, NULL)."""
    rows = f"(SELECT {name} AS whole FROM {table})"
    at = f"instr(whole, '{by}')"
    first = f"(SELECT DISTINCT substr(whole, 1, {at} - 1) AS first FROM {rows})"
    last = f"(SELECT DISTINCT substr(whole, {at} + 1) AS last FROM {rows})"
    return (f"SELECT first || '{by}' || last AS thing, NULL AS answer FROM {first}, {last} "
            f"WHERE thing NOT IN {rows} ORDER BY thing")


_NOUN = "lower(substr(name, instr(name, ' ') + 1))"
_NO_PRODUCT = ("shopping/search?q={product.plus} |OR| shopping/search?q={product.low.plus}",
               "text 'No products found.'")
_NO_PRODUCT_ADMIN = ("shopping_admin/products?name={product.plus} |OR| "
                     "shopping_admin/products?name={product.low.plus}", "text 'No products found.'")
_NO_CUSTOMER = ("shopping_admin/customers?name={customer.plus} |OR| "
                "shopping_admin/customers?name={customer.low.plus}", "text 'No customers found.'")
_NO_PROJECT = ("gitlab/search?q={project.plus}", "text 'No projects'")
_NO_PLACE = ("map/search?q={place.plus} |OR| map/search?q={place.low.plus}", "text 'Nothing found'")
_CUSTOMERS = "(SELECT id, full_name FROM users WHERE site = 'shopping')"
_OPEN_PRODUCT = ("type searchbox 'Search' [{product}] [1]", "click link '{product}'")
_ADMIN_PRODUCT = ("click link 'Products'", "type textbox 'Name' [{product}] [1]", "click link '{product}'")
_ADMIN_ORDER = ("click link 'Orders'", "click link 'Order {order}'")
_ADMIN_CUSTOMER = ("click link 'Customers'", "type textbox 'Name' [{customer}] [1]",
                   "click link '{customer}'")
_OPEN_POST = ("type searchbox 'Search' [{post}] [1]", "click link '{post}'")
_OPEN_FORUM = ("click link '{forum}'",)
_OPEN_PROJECT = ("type searchbox 'Search' [{project}] [1]", "click link '{project}'")
_OPEN_PLACE = ("type searchbox 'Search' [{place}] [1]", "click link '{place}'")
_PRODUCT, _ADMIN = "shopping/product/{product.slug}", "shopping_admin/products/{product.slug}"
_POST = "reddit/f/{forum}/{id}"
_SUBSCRIBED = (("reddit/account", "document.querySelector('a[href=\"/f/{forum}\"]').outerText", "{forum}"),)
_ME = "MarvelsGrantMan136"                       # the forum's account
_NOT_SUBSCRIBED = ("SELECT name AS forum FROM forum_forums "
                   f"WHERE name NOT IN (SELECT forum FROM forum_subscriptions WHERE user = '{_ME}')")
_EMMA = "(SELECT id FROM users WHERE name = 'emma.lopez@gmail.com')"
_NEW_ORDERS = "(SELECT * FROM shop_orders ORDER BY id DESC LIMIT 24)"
_OWN = "(SELECT * FROM code_projects WHERE owner = 'byteblaze')"
_MONTHS = ("(SELECT DISTINCT substr(date, 1, 4) AS year, substr(date, 6, 2) AS month FROM shop_orders "
           "WHERE status != 'Canceled')")
_PLACES = "(SELECT * FROM map_places WHERE category != 'town')"
_PAIRS = (f"(SELECT a.name AS place, b.name AS goal, way FROM {_PLACES} AS a "
          f"JOIN {_PLACES} AS b ON (a.id * 7 + b.id) % 11 = 0 AND a.id != b.id, "
          f"{_values('way', 'car', 'bike', 'foot')})")
_COMMENTS = _values("text", "Well done", "Tell me more", "So true", "No way", "See you there")
_TITLES = _values("title", "Hello all", "What a day", "Good news", "Any plans", "Big sale", "One question")
_BIOS = _values("text", "I plant trees", "Away for now", "Tea, not coffee", "Ask me tomorrow", "I like maps")
_ABOUT = _values("text", "All about it", "News and tips", "For beginners")
_ISSUES = _values("title", "Text is cut", "Page is blank", "Sound is off", "Add a logo", "Wrong date")
_STATUSES = _values("text", "Out for lunch", "Writing tests", "On call", "Back on Monday", "Reading")

SHOP = (
    Template(101, ("shopping",),
        intents=("What is the price of {product}?", "How much does {product} cost?"),
        draw="SELECT name AS product, money(price) AS answer FROM shop_products UNION ALL SELECT * "
             f"FROM ({_absent('name', 'shop_products')})",
        plan=_OPEN_PRODUCT,
        page=_PRODUCT, shows=("heading '{product}'",), answer="text 'price {answer}'", missing=_NO_PRODUCT,
        reference="-"),
    Template(102, ("shopping",),
        intents=("How many {product} are in stock?", "Tell me the stock of {product}."),
        draw="SELECT name AS product, stock AS answer FROM shop_products WHERE stock",
        plan=_OPEN_PRODUCT,
        page=_PRODUCT, shows=("heading '{product}'",), answer="text 'stock {answer}'"),
    Template(103, ("shopping",),
        intents=("Which brand makes {product}?", "What is the brand of {product}?"),
        draw="SELECT name AS product, brand AS answer FROM shop_products",
        plan=_OPEN_PRODUCT,
        page=_PRODUCT, shows=("heading '{product}'",), answer="text 'brand {answer}'", reference="-",
        held_out=True),
    Template(104, ("shopping",),
        intents=("Who wrote the last review of {product}?",),
        draw="SELECT p.name AS product, full_name AS answer, max(r.id) FROM shop_reviews r "
             "JOIN shop_products p ON p.id = product_id JOIN users u ON u.id = user_id "
             "WHERE status = 'Approved' GROUP BY p.id",
        plan=_OPEN_PRODUCT,
        page=_PRODUCT, shows=("heading '{product}'", "no link 'Previous'"),
        answer="link 'Write Review' > text '{answer}, stars *'"),
    Template(105, ("shopping",),
        intents=("What is the {rank} product in {category}?",),
        draw="SELECT c.name AS category, rank, CASE rank WHEN 'cheapest' THEN (SELECT name "
             "FROM shop_products WHERE category_id = c.id ORDER BY price, name LIMIT 1) ELSE (SELECT name "
             "FROM shop_products WHERE category_id = c.id ORDER BY price DESC, name LIMIT 1) END AS answer "
             f"FROM shop_categories c, {_values('rank', 'cheapest', 'priciest')}",
        plan=("click link '{category}'", "type combobox 'Sort' [{rank.cap}]", "click button 'Sort'"),
        page="shopping/category/{category.slug}?sort={rank.cap}",
        shows=("heading '{category}'", "no link 'Previous'"), answer="button 'Sort' > link '{answer}'"),
    Template(106, ("shopping",),
        intents=("Search for {noun} and show the {rank} first.", "List every {noun}, the {rank} first."),
        draw=f"SELECT DISTINCT {_NOUN} AS noun, rank "
             f"FROM shop_products, {_values('rank', 'cheapest', 'priciest')}",
        plan=("type searchbox 'Search' [{noun}] [1]", "type combobox 'Sort' [{rank.cap}]",
              "click button 'Sort'"),
        page="shopping/search?q={noun}&sort={rank.cap}", shows=("heading 'Results for {noun}'",)),
    Template(107, ("shopping",),
        intents=("Put {number} {product} into my cart.", "I need {number} {product} in my cart."),
        draw=f"SELECT name AS product, number FROM shop_products, {_values('number', 2, 3, 4, 5, 6)} "
             "WHERE stock >= number",
        plan=(*_OPEN_PRODUCT, "type textbox 'Quantity' [{number}] [0]", "click button 'Add to Cart'"),
        page="shopping/cart",
        shows=("heading 'Cart'", "link '{product}' > text '*' > textbox 'Quantity' value '{number}'"),
        html=(("shopping/cart",
               "document.querySelector('form[action=\"/cart/{product.slug}\"] input').value", "{number}"),)),
    Template(108, ("shopping",),
        intents=("Add {product} to my cart.",),
        draw="SELECT name AS product FROM shop_products WHERE stock",
        plan=(*_OPEN_PRODUCT, "click button 'Add to Cart'"),
        page="shopping/cart", shows=("heading 'Cart'", "link '{product}'"),
        html=(("shopping/cart", "main", "{product}"),)),
    Template(109, ("shopping",),
        intents=("Add {product} to my wishlist.", "Put {product} on my wishlist."),
        draw="SELECT name AS product FROM shop_products WHERE id NOT IN (SELECT product_id "
             f"FROM shop_wishes WHERE user_id = {_EMMA})",
        plan=(*_OPEN_PRODUCT, "click button 'Add to Wishlist'"),
        page="shopping/wishlist", shows=("heading 'Wishlist'", "link '{product}'"),
        html=(("shopping/wishlist", "main", "{product}"),)),
    Template(110, ("shopping",),
        intents=("Review {product} with {stars} stars.", "Give {stars} stars to {product} in a review."),
        draw=f"SELECT name AS product, stars FROM shop_products, {_values('stars', 1, 2, 3, 4)} "
             f"WHERE id NOT IN (SELECT product_id FROM shop_reviews WHERE user_id = {_EMMA})",
        plan=(*_OPEN_PRODUCT, "click link 'Write Review'", "type combobox 'Stars' [{stars}]",
              "type textbox 'Review' [My view.] [0]", "click button 'Submit Review'"),
        page="shopping/reviews",
        shows=("heading 'My Reviews'", "link '{product}' > text 'stars {stars}, Pending'"),
        html=(("shopping/reviews",
               "document.querySelector('a[href=\"/product/{product.slug}\"] + span').outerText",
               "stars {stars}, Pending"),)),
    Template(111, ("shopping",),
        intents=("What is the status of my order {order}?",),
        draw=f"SELECT id AS 'order', status AS answer FROM shop_orders WHERE user_id = {_EMMA}",
        plan=("click link 'Account'", "click link 'Orders'", "click link 'Order {order}'"),
        page="shopping/orders/{order}", shows=("heading 'Order {order}'",),
        answer="text 'status {answer}'"),
    Template(112, ("shopping",),
        intents=("How much did I pay for order {order}?",),
        draw=f"SELECT id AS 'order', money(total) AS answer FROM shop_orders WHERE user_id = {_EMMA}",
        plan=("click link 'Account'", "click link 'Orders'", "click link 'Order {order}'"),
        page="shopping/orders/{order}", shows=("heading 'Order {order}'",), answer="text 'total {answer}'",
        held_out=True),
    Template(113, ("shopping",),
        intents=("Change my {field} to {value}.",),
        draw="SELECT column1 AS field, column2 AS value "
             "FROM (VALUES ('phone', '555-1234'), ('phone', '555-7788'), ('phone', '555-4000'), ('city', "
             "'Boston'), ('city', 'Miami'), ('city', 'Denver'), ('zip', '20304'), ('zip', '98765'), "
             "('street', '5 Lake Street'), ('street', '7 Oak Street'), ('street', '12 Park Road')) "
             f"WHERE value NOT IN (SELECT city FROM shop_addresses WHERE user_id = {_EMMA})",
        plan=("click link 'Account'", "click link 'Address'", "type textbox '{field.cap}' [{value}] [0]",
              "click button 'Save Address'"),
        page="shopping/address", shows=("heading 'Address'", "text '{field} {value}'"),
        html=(("shopping/address", "document.querySelector('[name=\"{field}\"]').value", "{value}"),)),
    Template(114, ("shopping",),
        intents=("Subscribe me to the newsletter.",),
        draw="SELECT 1",
        plan=("click link 'Newsletter'", "click checkbox 'Subscribed'", "click button 'Save'"),
        page="shopping/newsletter", shows=("text 'subscribed yes'",),
        html=(("shopping/newsletter", "document.querySelector('[name=\"subscribed\"]').checked", "true"),)),
)

ADMIN = (
    Template(201, ("shopping_admin",),
        intents=("Set the stock of {product} to {number}.",),
        draw=f"SELECT name AS product, number FROM shop_products, {_values('number', 50, 60, 75, 80, 90)}",
        plan=(*_ADMIN_PRODUCT, "type textbox 'Stock' [{number}] [0]", "click button 'Save'"),
        page=_ADMIN, shows=("heading '{product}'", "text 'stock {number}'"),
        html=((_ADMIN, "document.querySelector('[name=\"stock\"]').value", "{number}"),)),
    Template(202, ("shopping_admin",),
        intents=("Change the price of {product} to {price}.",),
        draw="SELECT name AS product, price FROM (SELECT name "
             f"FROM shop_products), {_values('price', '9.50', '12.99', '20.00', '35.50', '49.95')}",
        plan=(*_ADMIN_PRODUCT, "type textbox 'Price' [{price}] [0]", "click button 'Save'"),
        page=_ADMIN, shows=("heading '{product}'", "text 'price ${price}'"),
        html=((_ADMIN, "document.querySelector('[name=\"price\"]').value", "{price}"),)),
    Template(203, ("shopping_admin",),
        intents=("How many {product} were sold?",),
        draw="SELECT name AS product, (SELECT ifnull(sum(quantity), 0) FROM shop_order_items "
             "JOIN shop_orders ON shop_orders.id = order_id "
             "WHERE product_id = p.id AND status != 'Canceled') AS answer FROM shop_products p "
             f"UNION ALL SELECT * FROM ({_absent('name', 'shop_products')})",
        plan=_ADMIN_PRODUCT,
        page=_ADMIN, shows=("heading '{product}'",), answer="text 'sold {answer}'",
        missing=_NO_PRODUCT_ADMIN),
    Template(204, ("shopping_admin",),
        intents=("Set order {order} to {status}.",),
        draw="SELECT id AS 'order', new AS status "
             f"FROM {_NEW_ORDERS}, {_values('new', 'Pending', 'Processing', 'Complete')} "
             "WHERE status NOT IN ('Canceled', new)",
        plan=(*_ADMIN_ORDER, "type combobox 'Status' [{status}]", "click button 'Save'"),
        page="shopping_admin/orders/{order}", shows=("heading 'Order {order}'", "text 'status {status}'"),
        html=(("shopping_admin/orders/{order}", "document.querySelector('[name=\"status\"]').value",
               "{status}"),)),
    Template(205, ("shopping_admin",),
        intents=("Cancel order {order}.",),
        draw=f"SELECT id AS 'order' FROM {_NEW_ORDERS} WHERE status IN ('Pending', 'Processing')",
        plan=(*_ADMIN_ORDER, "click button 'Cancel Order'"),
        page="shopping_admin/orders/{order}", shows=("heading 'Order {order}'", "text 'status Canceled'"),
        html=(("shopping_admin/orders/{order}", "main", "Canceled"),)),
    Template(206, ("shopping_admin",),
        intents=("What is the phone number of the customer {customer}?",),
        draw=f"SELECT full_name AS customer, phone AS answer FROM {_CUSTOMERS} "
             "JOIN shop_addresses ON user_id = id UNION ALL SELECT * "
             f"FROM ({_absent('full_name', _CUSTOMERS)})",
        plan=_ADMIN_CUSTOMER,
        page="shopping_admin/customers/", shows=("heading '{customer}'",), answer="text 'phone {answer}'",
        missing=_NO_CUSTOMER, reference="-"),
    Template(207, ("shopping_admin",),
        intents=("How much did {customer} spend?",),
        draw="SELECT full_name AS customer, u.id, money((SELECT ifnull(sum(total), 0) FROM shop_orders "
             f"WHERE user_id = u.id AND status != 'Canceled')) AS answer FROM {_CUSTOMERS} u",
        plan=_ADMIN_CUSTOMER,
        page="shopping_admin/customers/", shows=("heading '{customer}'",), answer="text 'spent {answer}'",
        reference="shopping_admin/customers/{id}", held_out=True),
    Template(208, ("shopping_admin",),
        intents=("Approve review {review}.",),
        draw="SELECT id AS review FROM shop_reviews WHERE status = 'Pending' ORDER BY id",
        plan=("click link 'Reviews'", "type combobox 'Status' [Pending]", "click button 'Filter'",
              "click link 'Review {review}'", "click button 'Approve'"),
        page="shopping_admin/reviews/{review}",
        shows=("heading 'Review {review}'", "text 'status Approved'"),
        html=(("shopping_admin/reviews/{review}", "main", "Approved"),)),
    Template(209, ("shopping_admin",),
        intents=("What was the bestseller of month {month} of {year}?",),
        draw="SELECT year, month, (SELECT name FROM shop_order_items JOIN shop_orders o ON o.id = order_id "
             "JOIN shop_products p ON p.id = product_id "
             "WHERE o.status != 'Canceled' AND date LIKE year || '-' || month || '-%' GROUP BY p.id "
             f"ORDER BY sum(quantity) DESC, name LIMIT 1) AS answer FROM {_MONTHS} ORDER BY year, month",
        plan=("click link 'Reports'", "type combobox 'Report' [Bestsellers]",
              "type combobox 'Year' [{year}]", "type combobox 'Month' [{month}]", "click button 'Show'"),
        page="shopping_admin/reports?report=Bestsellers&year={year}&month={month}", shows=(),
        answer="button 'Show' > link '{answer}'"),
    Template(210, ("shopping_admin",),
        intents=("What were the sales of month {month} of {year}?",),
        draw="SELECT year, month, (SELECT money(sum(total)) FROM shop_orders "
             "WHERE status != 'Canceled' AND date LIKE year || '-' || month || '-%') AS answer "
             f"FROM {_MONTHS} ORDER BY year, month",
        plan=("click link 'Reports'", "type combobox 'Year' [{year}]", "click button 'Show'"),
        page="shopping_admin/reports?report=Sales&year={year}", shows=(),
        answer="text '{year}-{month}: orders *, sales {answer}'", reference="-", held_out=True),
    Template(211, ("shopping_admin",),
        intents=("Disable {product}.", "Take {product} off the shop."),
        draw="SELECT name AS product FROM shop_products",
        plan=(*_ADMIN_PRODUCT, "click checkbox 'Enabled'", "click button 'Save'"),
        page=_ADMIN, shows=("heading '{product}'", "text 'status disabled'"),
        html=((_ADMIN, "document.querySelector('[name=\"enabled\"]').checked", "false"),)),
)

FORUM = (
    Template(301, ("reddit",),
        intents=("Who wrote the post {post}?",),
        draw="SELECT title AS post, author AS answer FROM forum_posts",
        plan=_OPEN_POST,
        page="reddit/f/", shows=("heading '{post}'",),
        answer="heading '{post}' > link '*' > link '{answer}'", reference="-"),
    Template(302, ("reddit",),
        intents=("How many comments does the post {post} have?",),
        draw="SELECT title AS post, forum, id, comments AS answer FROM forum_posts",
        plan=_OPEN_POST,
        page="reddit/f/", shows=("heading '{post}'",), answer="heading 'Comments {answer}'",
        reference=_POST),
    Template(303, ("reddit",),
        intents=("Subscribe to the forum {forum}.", "Subscribe me to {forum}."),
        draw=_NOT_SUBSCRIBED,
        plan=(*_OPEN_FORUM, "click button 'Subscribe'"),
        page="reddit/f/{forum}", shows=("heading '{forum}'", "button 'Unsubscribe'"),
        html=_SUBSCRIBED),
    Template(304, ("reddit",),
        intents=("Upvote the post {post}.", "Give the post {post} an upvote."),
        draw="SELECT title AS post, forum, id, score + 1 AS new FROM forum_posts",
        plan=(*_OPEN_POST, "click button 'Upvote'"),
        page="reddit/f/", shows=("heading '{post}'", "text 'your vote up'"), reference=_POST,
        html=((_POST, "document.querySelector('.badge').outerText", "score {new}"),)),
    Template(305, ("reddit",),
        intents=('Comment "{text}" on the post {post}.',),
        draw=f"SELECT title AS post, forum, id, text FROM forum_posts, {_COMMENTS}",
        plan=(*_OPEN_POST, "type textbox 'Comment' [{text}] [0]", "click button 'Post comment'"),
        page="reddit/f/", shows=("heading '{post}'", f"text '{_ME}, score *' > text '{{text}}'"),
        reference=_POST,
        html=((_POST, "main", "{text}"),)),
    Template(306, ("reddit",),
        intents=('Make a post "{title}" in the forum {forum}.',),
        draw=f"SELECT name AS forum, title FROM forum_forums, {_TITLES}",
        plan=(*_OPEN_FORUM, "click link 'New post'", "type textbox 'Title' [{title}] [0]",
              "click button 'Create post'"),
        page="reddit/f/{forum}/", shows=("heading '{title}'", "heading '{title}' > link '{forum}'"),
        html=(("reddit/f/{forum}?sort=new", "main", "{title}"),)),
    Template(307, ("reddit",),
        intents=("Sorted by {sort}, which post of {forum} is the first?",
                 "Which post of {forum} comes first when sorted by {sort}?"),
        draw="SELECT name AS forum, sort, CASE sort WHEN 'new' THEN (SELECT title FROM forum_posts "
             "WHERE forum = name ORDER BY id DESC LIMIT 1) ELSE (SELECT title FROM forum_posts "
             "WHERE forum = name ORDER BY score DESC, id DESC LIMIT 1) END AS answer "
             f"FROM forum_forums, {_values('sort', 'new', 'top')}",
        plan=(*_OPEN_FORUM, "type combobox 'Sort by' [{sort}]", "click button 'Sort'"),
        page="reddit/f/{forum}?sort={sort}", shows=("heading '{forum}'", "no link 'Previous'"),
        answer="button 'Sort' > link '{answer}'"),
    Template(308, ("reddit",),
        intents=('Write "{text}" in my bio.', 'Let my bio say "{text}".'),
        draw=f"SELECT text FROM {_BIOS}",
        plan=("click link 'Account'", "click link 'Edit bio'", "type textbox 'Bio' [{text}] [0]",
              "click button 'Save bio'"),
        page="reddit/account", shows=("text 'bio {text}'",),
        html=(("reddit/account", "main", "{text}"),)),
    Template(309, ("reddit",),
        intents=('Make a forum {name} about "{text}".',),
        draw=f"SELECT name, text FROM {_values('name', 'boats', 'chess', 'trains', 'cheese')}, {_ABOUT}",
        plan=("click link 'New forum'", "type textbox 'Name' [{name}] [0]",
              "type textbox 'Description' [{text}] [0]", "click button 'Create forum'"),
        page="reddit/f/{name}", shows=("heading '{name}'", "text '{text}'"),
        html=(("reddit/f/{name}", "main", "{text}"),), held_out=True),
    Template(310, ("reddit",),
        intents=("How many subscribers does {forum} have?",),
        draw="SELECT name AS forum, subscribers AS answer FROM forum_forums",
        plan=_OPEN_FORUM,
        page="reddit/f/{forum}", shows=("heading '{forum}'",), answer="text 'subscribers {answer}'"),
    Template(311, ("reddit",),
        intents=("Show the posts of {forum}, sorted by {sort}.",),
        draw=f"SELECT name AS forum, sort FROM forum_forums, {_values('sort', 'new', 'top')}",
        plan=(*_OPEN_FORUM, "type combobox 'Sort by' [{sort}]", "click button 'Sort'"),
        page="reddit/f/{forum}?sort={sort}", shows=("heading '{forum}'",)),
)

CODE = (
    Template(401, ("gitlab",),
        intents=("How many stars does the project {project} have?",),
        draw="SELECT path AS project, stars AS answer FROM code_projects UNION ALL SELECT * "
             f"FROM ({_absent('path', 'code_projects', '/')})",
        plan=_OPEN_PROJECT,
        page="gitlab/{project}", shows=("heading '{project}'",), answer="text 'stars {answer}'",
        missing=_NO_PROJECT, reference="-"),
    Template(402, ("gitlab",),
        intents=("What is the license of the project {project}?",),
        draw="SELECT path AS project, license AS answer FROM code_projects",
        plan=_OPEN_PROJECT,
        page="gitlab/{project}", shows=("heading '{project}'",), answer="text 'license {answer}'",
        held_out=True),
    Template(403, ("gitlab",),
        intents=("Star the project {project}.", "Give the project {project} a star."),
        draw="SELECT path AS project FROM code_projects WHERE id NOT IN (SELECT project FROM code_stars "
             "WHERE user = 'byteblaze')",
        plan=(*_OPEN_PROJECT, "click button 'Star'"),
        page="gitlab/{project}", shows=("heading '{project}'", "button 'Unstar'"),
        html=(("gitlab/starred", "main", "{project}"),)),
    Template(404, ("gitlab",),
        intents=('Open an issue "{title}" in {project}.',),
        draw=f"SELECT path AS project, title FROM code_projects, {_ISSUES}",
        plan=("click link 'Issues'", "click link 'New issue'", "type textbox 'Title' [{title}] [0]",
              "click button 'Create issue'"),
        page="gitlab/{project}/issues/", shows=("link '{project}' > heading '{title}'",),
        html=(("gitlab/{project}/issues", "main", "{title}"),), start="gitlab/{project}"),
    Template(405, ("gitlab",),
        intents=("Close the issue {issue} of {project}.",),
        draw="SELECT path AS project, title AS issue, number FROM code_items "
             f"JOIN {_OWN} p ON p.id = project WHERE kind = 'issues' AND state = 'open'",
        plan=("click link 'Issues'", "click link '{issue}'", "click button 'Close'"),
        page="gitlab/{project}/issues/",
        shows=("link '{project}' > heading '{issue}'", "text 'state closed'"),
        reference="gitlab/{project}/issues/{number}",
        html=(("gitlab/{project}/issues/{number}", "main", "closed"),), start="gitlab/{project}"),
    Template(406, ("gitlab",),
        intents=("Assign the issue {issue} of {project} to {person}.",),
        draw="SELECT path AS project, title AS issue, number, user AS person FROM code_items i "
             f"JOIN {_OWN} p ON p.id = i.project JOIN code_members m ON m.project = p.id "
             "WHERE kind = 'issues' AND state = 'open' AND assignee != user",
        plan=("click link 'Issues'", "click link '{issue}'", "type combobox 'Assignee' [{person}]",
              "click button 'Assign'"),
        page="gitlab/{project}/issues/",
        shows=("link '{project}' > heading '{issue}'", "text 'assignee {person}'"),
        reference="gitlab/{project}/issues/{number}",
        html=(("gitlab/{project}/issues/{number}", "main", "assignee {person}"),),
        start="gitlab/{project}"),
    Template(407, ("gitlab",),
        intents=("Invite {person} to {project} as {role}.",),
        draw="SELECT path AS project, name AS person, role "
             f"FROM {_OWN} p, users u, {_values('role', 'Guest', 'Reporter', 'Developer', 'Maintainer')} "
             "WHERE site = 'gitlab' AND name NOT IN (SELECT user FROM code_members WHERE project = p.id)",
        plan=("click link 'Members'", "type textbox 'Username' [{person}] [0]",
              "type combobox 'Role' [{role}]", "click button 'Invite'"),
        page="gitlab/{project}/members", shows=("link '{person}' > text '{role}'",),
        html=(("gitlab/{project}/members",
               "document.querySelector('.row a[href=\"/{person}\"] + span').outerText", "{role}"),),
        start="gitlab/{project}"),
    Template(408, ("gitlab",),
        intents=("Who made the most commits in {project}?", "Who is the top contributor of {project}?"),
        draw="SELECT path AS project, (SELECT author FROM code_commits WHERE project = p.id "
             "GROUP BY author ORDER BY count(*) DESC LIMIT 1) AS answer FROM code_projects p",
        plan=(*_OPEN_PROJECT, "click link 'Contributors'"),
        page="gitlab/{project}/contributors", shows=("link '{project}' > heading 'Contributors'",),
        answer="heading 'Contributors' > link '{answer}'"),
    Template(409, ("gitlab",),
        intents=('Set my status to "{text}".', 'Let my status say "{text}".'),
        draw=f"SELECT text FROM {_STATUSES}",
        plan=("click link 'Account'", "type textbox 'Status' [{text}] [0]", "click button 'Set status'"),
        page="gitlab/account", shows=("text 'status {text}'",),
        html=(("gitlab/account", "main", "status {text}"),)),
    Template(410, ("gitlab",),
        intents=("Who is the author of the issue {issue} of {project}?",),
        draw="SELECT path AS project, title AS issue, i.number, author AS answer FROM code_items i "
             "JOIN code_projects p ON p.id = project WHERE kind = 'issues' AND state = 'open'",
        plan=("click link 'Issues'", "click link '{issue}'"),
        page="gitlab/{project}/issues/", shows=("link '{project}' > heading '{issue}'",),
        answer="text 'author {answer}'", reference="gitlab/{project}/issues/{number}",
        start="gitlab/{project}", held_out=True),
    Template(411, ("gitlab",),
        intents=("Show the {state} issues of {project} with the label {label}.",),
        draw="SELECT path AS project, state, label "
             f"FROM code_projects, {_values('state', 'open', 'closed')}, "
             f"{_values('label', 'bug', 'feature', 'docs', 'question')}",
        plan=("click link 'Issues'", "type combobox 'State' [{state}]", "type combobox 'Label' [{label}]",
              "click button 'Filter'"),
        page="gitlab/{project}/issues?state={state}&label={label}", start="gitlab/{project}"),
)

MAP = (
    Template(501, ("map",),
        intents=("What is the phone number of {place}?",),
        draw=f"SELECT name AS place, phone AS answer FROM {_PLACES} WHERE phone != '' UNION ALL SELECT * "
             f"FROM ({_absent('name', _PLACES)})",
        plan=_OPEN_PLACE,
        page="map/place/{place.slug}", shows=("heading '{place}'",), answer="text 'phone {answer}'",
        missing=_NO_PLACE),
    Template(502, ("map",),
        intents=("What is the address of {place}?", "Where is {place}?"),
        draw=f"SELECT name AS place, number || ' ' || street || ', ' || town AS answer FROM {_PLACES} "
             f"UNION ALL SELECT * FROM ({_absent('name', _PLACES)})",
        plan=_OPEN_PLACE,
        page="map/place/{place.slug}", shows=("heading '{place}'",), answer="text 'address {answer}'",
        missing=_NO_PLACE, reference="-"),
    Template(503, ("map",),
        intents=("When is {place} open?",),
        draw=f"SELECT name AS place, hours AS answer FROM {_PLACES} WHERE hours != ''",
        plan=_OPEN_PLACE,
        page="map/place/{place.slug}", shows=("heading '{place}'",), answer="text 'open {answer}'",
        held_out=True),
    Template(504, ("map",),
        intents=("How long is the way from {place} to {goal} by {way}?",),
        draw=f"SELECT *, way_time(place, goal, way) AS answer FROM {_PAIRS}",
        plan=("click link 'Directions'", "type textbox 'From' [{place}] [0]",
              "type textbox 'To' [{goal}] [0]", "type combobox 'By' [{way}]",
              "click button 'Get directions'"),
        page="map/directions?by={way}", shows=("heading '{place} to {goal}'", "text 'by {way}'"),
        answer="text 'time {answer}'", reference="-"),
    Template(505, ("map",),
        intents=("Which {kind} is the nearest to {place}?",),
        draw="SELECT name AS place, kind, nearest(name, kind) AS answer "
             f"FROM {_PLACES}, {_values('kind', 'hotel', 'market', 'museum', 'park', 'station', 'pharmacy')} "
             "WHERE category != kind",
        plan=(*_OPEN_PLACE, "type combobox 'Category' [{kind}]", "click button 'Find nearby'"),
        page="map/nearby/{place.slug}?category={kind}",
        shows=("heading '{kind.cap} near {place}'", "no link 'Previous'"),
        answer="button 'Find nearby' > link '{answer}'"),
    Template(506, ("map",),
        intents=("Show the way from {place} to {goal} by {way}.",),
        draw=f"SELECT * FROM {_PAIRS}",
        plan=("click link 'Directions'", "type textbox 'From' [{place}] [0]",
              "type textbox 'To' [{goal}] [0]", "type combobox 'By' [{way}]",
              "click button 'Get directions'"),
        page="map/directions?from={place.plus}&to={goal.plus}&by={way}",
        shows=("heading '{place} to {goal}'",)),
)

SEVERAL = (
    Template(601, ("shopping_admin", "shopping"),
        intents=("In the admin set the stock of {product} to {number}, then show it in the shop.",),
        draw=f"SELECT name AS product, number FROM shop_products, {_values('number', 55, 66, 77, 88)} "
             "WHERE stock",
        plan=("type textbox 'Stock' [{number}] [0]", "click button 'Save'", "tab_focus [1]",
              "click link '{product}'"),
        page=_PRODUCT, shows=("heading '{product}'", "text 'stock {number}'"),
        html=((_PRODUCT, "main", "stock {number}"),),
        start=f"{_ADMIN} |AND| shopping/search?q={{product.plus}}"),
    Template(602, ("homepage", "shopping"),
        intents=("From the homepage, look up the price of {product} in the shop.",),
        draw="SELECT name AS product, money(price) AS answer FROM shop_products",
        plan=("click link 'Shop'", *_OPEN_PRODUCT),
        page=_PRODUCT, shows=("heading '{product}'",), answer="text 'price {answer}'"),
    Template(603, ("homepage", "map"),
        intents=("From the homepage, look up the phone number of {place} on the map.",),
        draw=f"SELECT name AS place, phone AS answer FROM {_PLACES} WHERE phone != ''",
        plan=("click link 'Map'", *_OPEN_PLACE),
        page="map/place/{place.slug}", shows=("heading '{place}'",), answer="text 'phone {answer}'",
        held_out=True),
    Template(604, ("homepage", "reddit"),
        intents=("From the homepage, go to the forum site and subscribe to {forum}.",),
        draw=_NOT_SUBSCRIBED,
        plan=("click link 'Forum'", *_OPEN_FORUM, "click button 'Subscribe'"),
        page="reddit/f/{forum}", shows=("heading '{forum}'", "button 'Unsubscribe'"),
        html=_SUBSCRIBED),
    Template(605, ("shopping_admin", "shopping"),
        intents=("Approve review {review} by {author} in the admin, then show it on the page of {product} "
                 "in the shop.",),
        draw="SELECT r.id AS review, p.name AS product, full_name AS author, r.text FROM shop_reviews r "
             "JOIN shop_products p ON p.id = product_id JOIN users u ON u.id = user_id "
             "WHERE status = 'Pending' AND NOT EXISTS (SELECT 1 FROM shop_reviews "
             "WHERE product_id = p.id AND id > r.id)",
        plan=("click button 'Approve'", "tab_focus [1]", "click link '{product}'"),
        page=_PRODUCT, shows=("heading '{product}'", "text '{author}, stars *'"),
        html=((_PRODUCT, "main", "{text}"),),
        start="shopping_admin/reviews/{review} |AND| shopping/search?q={product.plus}"),
)

TEMPLATES = (*SHOP, *ADMIN, *FORUM, *CODE, *MAP, *SEVERAL)
