-- The tables of all sites, one database. Money is whole cents, dates are ISO text.

CREATE TABLE users (id INTEGER PRIMARY KEY, site, name, password, full_name, joined, UNIQUE (site, name));
CREATE TABLE sessions (id INTEGER PRIMARY KEY, sid UNIQUE, user_id INT REFERENCES users, message DEFAULT '');

CREATE TABLE shop_categories (id INTEGER PRIMARY KEY, name UNIQUE, slug UNIQUE);
CREATE TABLE shop_products (id INTEGER PRIMARY KEY, sku UNIQUE, slug UNIQUE, name UNIQUE,
    category_id INT REFERENCES shop_categories, brand, price INT, stock INT, enabled DEFAULT 1, featured DEFAULT 0);
CREATE TABLE shop_addresses (user_id INTEGER PRIMARY KEY REFERENCES users, street, city, zip, phone);
CREATE TABLE shop_orders (id INTEGER PRIMARY KEY, user_id INT REFERENCES users, date, status, payment,
    total INT);
CREATE TABLE shop_order_items (order_id INT REFERENCES shop_orders, product_id INT REFERENCES shop_products,
    price INT, quantity INT, PRIMARY KEY (order_id, product_id)) WITHOUT ROWID;
CREATE VIEW shop_sold AS SELECT product_id, name, slug, quantity, date FROM shop_order_items JOIN shop_orders ON
    shop_orders.id = order_id JOIN shop_products ON shop_products.id = product_id WHERE status != 'Canceled';
CREATE TABLE shop_cart (user_id INT REFERENCES users, product_id INT REFERENCES shop_products, quantity INT,
    PRIMARY KEY (user_id, product_id));
CREATE TABLE shop_wishes (user_id INT REFERENCES users, product_id INT REFERENCES shop_products,
    PRIMARY KEY (user_id, product_id));
CREATE TABLE shop_reviews (id INTEGER PRIMARY KEY, product_id INT REFERENCES shop_products,
    user_id INT REFERENCES users, stars INT, text, date, status);
CREATE TABLE shop_subscribers (user_id INTEGER PRIMARY KEY REFERENCES users);
CREATE TABLE shop_messages (id INTEGER PRIMARY KEY, user_id INT REFERENCES users, subject, text);
CREATE INDEX shop_reviews_by_product ON shop_reviews (product_id);
CREATE VIEW shop_shelf AS SELECT shop_products.*, shop_categories.name AS category, shop_categories.slug AS
    category_slug, (SELECT avg(stars) FROM shop_reviews WHERE product_id = shop_products.id AND status =
    'Approved') AS stars FROM shop_products JOIN shop_categories ON shop_categories.id = category_id;

CREATE TABLE forum_forums (name PRIMARY KEY, description, sidebar, subscribers);
CREATE TABLE forum_posts (id INTEGER PRIMARY KEY AUTOINCREMENT, forum, author, title, body, score INT,
    created, comments DEFAULT 0, words AS (lower(title || ' ' || body || ' ' || forum)) STORED);
CREATE TABLE forum_comments (id INTEGER PRIMARY KEY AUTOINCREMENT, post_id INT, author, body, score INT, created,
    answered DEFAULT '');
CREATE TABLE forum_votes (user, kind, item INT, value INT, PRIMARY KEY (user, kind, item));
CREATE TABLE forum_subscriptions (user, forum, PRIMARY KEY (user, forum));
CREATE TABLE forum_bios (user PRIMARY KEY, bio);

CREATE TABLE code_projects (id INTEGER PRIMARY KEY, path UNIQUE, owner, description, readme, license,
    visibility, stars INT, forks INT, updated);
CREATE TABLE code_stars (user, project INT, PRIMARY KEY (user, project));
CREATE TABLE code_members (project INT, user, role, PRIMARY KEY (project, user));
CREATE TABLE code_items (id INTEGER PRIMARY KEY, project INT, kind, number INT, title, body, author, assignee,
    label, state, created, UNIQUE (project, kind, number));
CREATE TABLE code_notes (id INTEGER PRIMARY KEY, item INT, author, body, created);
CREATE TABLE code_commits (id INTEGER PRIMARY KEY, project INT, author, title, created);
CREATE TABLE code_profiles (user PRIMARY KEY, email, status, token);
CREATE TABLE code_follows (user, followed, PRIMARY KEY (user, followed));

CREATE TABLE map_places (id INTEGER PRIMARY KEY, slug UNIQUE, name UNIQUE, category, town, street, number INT,
    zip, phone, hours, x INT, y INT);
CREATE TABLE map_streets (name, x1 INT, y1 INT, x2 INT, y2 INT);
