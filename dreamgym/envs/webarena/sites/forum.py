"""The forum of the own sites, after Postmill: forums, posts, comments, votes, subscriptions, profiles.
WebArena's name for it is `reddit`."""
from __future__ import annotations

import sqlite3
from random import Random

from flask import Blueprint, Response, abort, g, request

from dreamgym.envs.webarena.sites.site import (
    TODAY, Members, Site, add_user, all_words, asked, chosen, day, draw_password, exists, go, insert, kept,
                                               one, page, paged,
    run, toggle, words)

SITE = Site("reddit", "Forum", (("Forums", "/"), ("Account", "/account")), search="/search",
            account=("MarvelsGrantMan136", "test1234"))
FORUMS = {                                       # name: (description, what its posts are about)
    "books": ("Novels, poems and comics", ("novel", "poem", "comic", "story", "bookshelf", "library card")),
    "cooking": ("Food and how to make it",
                ("soup recipe", "bread knife", "cake tin", "pan", "teapot", "grill")),
    "diy": ("Things you build yourself", ("shelf", "lamp", "table", "door", "drill", "bird house")),
    "fitness": ("Running, lifting and rest",
                ("running shoe", "bike", "yoga mat", "swim cap", "gym bag", "watch")),
    "games": ("Board games and video games",
              ("puzzle", "card game", "console", "board game", "quiz book", "chess set")),
    "garden": ("Plants, trees and tools",
               ("rose", "tomato plant", "hedge", "lawn mower", "spade", "plum tree")),
    "movies": ("Films old and new", ("film", "cartoon", "film poster", "projector", "popcorn pan",
                                     "cinema ticket")),
    "music": ("Songs and instruments", ("song", "guitar", "piano", "concert ticket", "record", "drum")),
    "pets": ("Cats, dogs and others", ("cat", "dog", "parrot", "rabbit", "fish tank", "dog bed")),
    "space": ("Stars, planets and rockets",
              ("moon map", "rocket model", "telescope", "comet photo", "star chart", "planet lamp")),
    "tech": ("Phones and computers", ("phone", "laptop", "camera", "printer", "keyboard", "screen")),
    "travel": ("Trips near and far", ("train ticket", "suitcase", "tent", "map", "backpack", "passport")),
}
POSTS = (("My first {}", "I made a start. What should I do next?"),
         ("How to choose a {}", "There are so many. What do you look for?"),
         ("The best {} this year", "I tried a few and kept one."),
         ("Question about a {}", "Can somebody explain how this works?"),
         ("Advice on my old {}", "It will not last long."),
         ("A cheap {}", "I have a small budget. Any ideas?"), ("Lost my {}", "It was here yesterday."),
         ("Review of a new {}", "Good for the price. Four stars."),
         ("Why I love this {}", "It makes every day better."),
         ("Never buy this {}", "It broke after a week."),
         ("Looking for a {}", "Please tell me where to find one."), ("Photo of my {}", "Taken this morning."))
REPLIES = ("I agree with this", "Thank you for the tip", "That did not work for me", "Try a smaller one",
           "Ask in a shop near you", "I had the same problem",
           "Very nice work", "Too much money", "I will try this today", "Do not do this", "My sister has one",
           "Please post a photo", "It gets better with time",
           "Where did you find it", "I would wait a year", "Great idea", "This made me laugh",
           "Wrong forum, I think", "Mine lasted ten years", "Start with a plan")
PEOPLE = "anna boris clara david emma felix greta hugo ines jonas kira liam mona".split()
BIOS = ("I like quiet days", "Here for the photos", "Always learning", "Coffee first", "I answer slowly",
        "New here", "Ask me about trees", "I build things")
SORTS = {"hot": "score + posts.id / 8 DESC, posts.id DESC", "new": "posts.id DESC",
         "top": "score DESC, posts.id DESC"}
SCHEMA = """
CREATE TABLE forum_forums (name TEXT PRIMARY KEY, description TEXT NOT NULL, sidebar TEXT NOT NULL,
    subscribers INTEGER NOT NULL);
CREATE TABLE forum_posts (id INTEGER PRIMARY KEY AUTOINCREMENT, forum TEXT NOT NULL, author TEXT NOT NULL,
    title TEXT NOT NULL, body TEXT NOT NULL, score INTEGER NOT NULL, created TEXT NOT NULL, comments INTEGER
    NOT NULL DEFAULT 0, words TEXT AS (lower(title || ' ' || body || ' ' || forum)) STORED);
CREATE TABLE forum_comments (id INTEGER PRIMARY KEY, post_id INTEGER NOT NULL, author TEXT NOT NULL, body TEXT
    NOT NULL, score INTEGER NOT NULL, created TEXT NOT NULL, answered TEXT NOT NULL DEFAULT '');
CREATE TABLE forum_votes (user TEXT, kind TEXT, item INTEGER, value INTEGER NOT NULL, PRIMARY KEY (user, kind,
    item));
CREATE TABLE forum_subscriptions (user TEXT, forum TEXT, PRIMARY KEY (user, forum));
CREATE TABLE forum_bios (user TEXT PRIMARY KEY, bio TEXT NOT NULL);
CREATE INDEX forum_posts_forum ON forum_posts (forum);
CREATE INDEX forum_posts_author ON forum_posts (author);
CREATE INDEX forum_comments_post ON forum_comments (post_id);
CREATE INDEX forum_comments_author ON forum_comments (author);
"""
POST = "/f/<name>/<int(max=999999):number>"
COMMENT = f"{POST}/comment/<int(max=999999):item>"
WAY = "<any(up, down):way>"
pages = Blueprint("pages", __name__)
members = Members(pages)


def fill(db: sqlite3.Connection, rng: Random) -> None:
    """Posts in the order of their days, so that a higher id is a newer post; every member posts and comments,
    the account's own posts are in several forums."""
    account = SITE.account[0]
    people = [account, *PEOPLE]
    for person in people:
        add_user(db, SITE, person, draw_password(SITE, person, rng), joined=day(rng.randrange(300, 1500)))
        db.execute("INSERT INTO forum_bios VALUES (?, ?)", (person, rng.choice(BIOS)))
    for name, (description, _) in FORUMS.items():
        db.execute("INSERT INTO forum_forums VALUES (?, ?, '', ?)",
                   (name, description, rng.randrange(20, 400)))
    db.executemany("INSERT INTO forum_subscriptions VALUES (?, ?)",
                   [(account, name) for name in rng.sample(sorted(FORUMS), 3)])
    posts = [(name, title.format(noun), body) for name, (_, nouns) in FORUMS.items()
             for (title, body), noun in rng.sample([(post, noun) for post in POSTS for noun in nouns],
                                                   rng.randint(12, 16))]
    rng.shuffle(posts)
    for i, (name, title, body) in enumerate(posts):
        age, answers, author = (len(posts) - i) // 2 + 1, rng.sample(people,
                                                                     rng.randint(0, 4)), rng.choice(people)
        post = insert(db, "forum_posts", forum=name, author=author, title=title, body=body,
                      score=rng.randint(-3, 40),
                      created=day(age), comments=len(answers))
        replies, days = rng.sample(REPLIES, len(answers)), sorted(day(rng.randrange(age)) for _ in answers)
        for person, reply, created in zip(answers, replies, days):
            insert(db, "forum_comments", post_id=post, author=person, body=reply, score=rng.randint(-4, 12),
                   created=created)


def _forum(name: str) -> sqlite3.Row:
    return one("SELECT * FROM forum_forums WHERE name = ?", name)


def _post(forum: str, number: int) -> sqlite3.Row:
    return one("SELECT * FROM forum_posts WHERE id = ? AND forum = ?", number, forum)


def _own_post(forum: str, number: int) -> sqlite3.Row:
    post = _post(forum, number)
    return post if post["author"] == g.user["name"] else abort(403)


def _vote(kind: str, item: int) -> int:
    """1, 0 or -1: what the visitor said of a post or a comment."""
    if g.user is None:
        return 0
    row = run("SELECT value FROM forum_votes WHERE user = ? AND kind = ? AND item = ?", g.user["name"], kind,
              item).fetchone()
    return row[0] if row else 0


# ---- forums and lists of posts -----------------------------------------------------------------------------

@pages.get("/")
def home() -> Response:
    return page("forum_home.html", "Forums", forums=paged("SELECT * FROM forum_forums ORDER BY name"))


def _listed(title: str, where: str, arguments: tuple = (), forum: sqlite3.Row | None = None,
            **query: str) -> Response:
    """Posts of a forum, or of all, in the order that was asked for."""
    sort = chosen("sort", SORTS, "hot")
    posts = paged(f"SELECT id, forum, title, score, comments FROM forum_posts AS posts WHERE {where} ORDER "
                  f"BY {SORTS[sort]}", arguments)
    subscribed = forum is not None and g.user is not None and exists(
        "SELECT 1 FROM forum_subscriptions WHERE user = ? AND forum = ?", g.user["name"], forum["name"])
    return page("forum_posts.html", title, posts=posts, forum=forum, subscribed=subscribed, sort=sort,
                sorts=SORTS,
                q=query.get("q", ""), address=kept(**query, sort=sort))


@pages.get("/all")
def everything() -> Response:
    return _listed("All posts", "1")


@pages.get("/search")
def search() -> Response:
    q = asked("q")
    return _listed(f"Search {q}".strip(), all_words("words", q, none="0"), tuple(q.lower().split()), q=q)


@pages.get("/f/<name>")
def forum(name: str) -> Response:
    return _listed(name, "forum = ?", (name,), _forum(name))


@members.post("/f/<name>/subscribe")
def subscribe(name: str) -> Response:
    _forum(name)
    joined = toggle("forum_subscriptions", user=g.user["name"], forum=name)
    run("UPDATE forum_forums SET subscribers = subscribers + ? WHERE name = ?", 1 if joined else -1, name)
    return go(f"/f/{name}", f"You subscribed to {name}." if joined else f"You left {name}.")


@members.get("/new-forum")
def new_forum() -> Response:
    return page("forum_new.html", "New forum")


@members.post("/new-forum")
def make_forum() -> Response:
    name, description = words("name", 30).lower(), words("description", 100)
    if not name.isalnum() or not name.isascii():
        return go("/new-forum", "A forum needs a name of letters and digits.")
    if not description:
        return go("/new-forum", "A forum needs a description.")
    if not run("INSERT OR IGNORE INTO forum_forums VALUES (?, ?, ?, 1)", name, description,
               words("sidebar")).rowcount:
        return go("/new-forum", f"There is a forum {name} already.")
    run("INSERT INTO forum_subscriptions VALUES (?, ?)", g.user["name"], name)
    return go(f"/f/{name}", "Your forum was made.")


# ---- one post ----------------------------------------------------------------------------------------------

@pages.get(POST)
def post(name: str, number: int) -> Response:
    row = _post(name, number)
    comments = run("SELECT * FROM forum_comments WHERE post_id = ? ORDER BY id", number).fetchall()
    return page("forum_post.html", row["title"], post=row, comments=comments, vote=_vote("post", number))


@pages.get("/submit")
@members.get("/submit/<name>")
def submit(name: str = "") -> Response:
    forums = [row["name"] for row in run("SELECT name FROM forum_forums ORDER BY name")]
    return page("forum_submit.html", "New post", forums=forums, chosen=name, post=None)


@pages.post("/submit")
@members.post("/submit/<name>")
def make_post(name: str = "") -> Response:
    forum = _forum(words("forum"))["name"]
    if not words("title"):
        return go(f"/submit/{forum}", "A post needs a title.")
    number = insert(g.db, "forum_posts", forum=forum, author=g.user["name"], title=words("title"),
                    body=words("body", 2000),
                    score=1, created=TODAY)
    return go(f"/f/{forum}/{number}", "Your post was made.")


@members.get(f"{POST}/edit")
def edit(name: str, number: int) -> Response:
    return page("forum_submit.html", "Edit post", post=_own_post(name, number))


@members.post(f"{POST}/edit")
def change_post(name: str, number: int) -> Response:
    _own_post(name, number)
    if not words("title"):
        return go(f"/f/{name}/{number}/edit", "A post needs a title.")
    run("UPDATE forum_posts SET title = ?, body = ? WHERE id = ?", words("title"), words("body", 2000),
        number)
    return go(f"/f/{name}/{number}", "Your post was changed.")


@members.post(f"{POST}/delete")
def delete_post(name: str, number: int) -> Response:
    _own_post(name, number)
    run("DELETE FROM forum_comments WHERE post_id = ?", number)
    run("DELETE FROM forum_posts WHERE id = ?", number)
    return go(f"/f/{name}", "Your post was deleted.")


def _change_vote(kind: str, item: int, value: int) -> str:
    """Sets the visitor's vote, or takes it back when it was the same; the score follows. The confirmation."""
    new = 0 if (old := _vote(kind, item)) == value else value
    run("INSERT OR REPLACE INTO forum_votes VALUES (?, ?, ?, ?)", g.user["name"], kind, item, new)
    run(f"UPDATE forum_{kind}s SET score = score + ? WHERE id = ?", new - old, item)
    return f"You {'upvoted' if new > 0 else 'downvoted'} this {kind}." if new else "You took your vote back."


@members.post(f"{POST}/{WAY}")
def vote_post(name: str, number: int, way: str) -> Response:
    _post(name, number)
    return go(f"/f/{name}/{number}", _change_vote("post", number, 1 if way == "up" else -1))


# ---- comments ----------------------------------------------------------------------------------------------

def _comment(post_id: int, number: int) -> sqlite3.Row:
    return one("SELECT * FROM forum_comments WHERE id = ? AND post_id = ?", number, post_id)


def _add_comment(name: str, number: int, answered: str, back: str) -> Response:
    _post(name, number)
    if not words("comment"):
        return go(back, "A comment needs some text.")
    insert(g.db, "forum_comments", post_id=number, author=g.user["name"], body=words("comment", 2000),
           score=1, created=TODAY,
           answered=answered)
    run("UPDATE forum_posts SET comments = comments + 1 WHERE id = ?", number)
    return go(f"/f/{name}/{number}", "Your comment was added.")


@members.post(f"{POST}/comment")
def comment(name: str, number: int) -> Response:
    return _add_comment(name, number, "", f"/f/{name}/{number}")


@pages.get(COMMENT)
def one_comment(name: str, number: int, item: int) -> Response:
    return page("forum_comment.html", "Comment", post=_post(name, number), comment=_comment(number, item),
                vote=_vote("comment", item))


@members.post(COMMENT)
def reply(name: str, number: int, item: int) -> Response:
    return _add_comment(name, number, _comment(number, item)["author"], request.path)


@members.post(f"{COMMENT}/{WAY}")
def vote_comment(name: str, number: int, item: int, way: str) -> Response:
    _comment(number, item)
    return go(f"/f/{name}/{number}/comment/{item}", _change_vote("comment", item, 1 if way == "up" else -1))


# ---- members -----------------------------------------------------------------------------------------------

def _member(name: str) -> sqlite3.Row:
    return one("SELECT name, joined, bio FROM users LEFT JOIN forum_bios ON user = name WHERE site = ? AND "
               "name = ?", SITE.name, name)


@pages.get("/user/<name>")
def member(name: str) -> Response:
    posts = paged("SELECT * FROM forum_posts WHERE author = ? ORDER BY id DESC", (name,))
    return page("forum_member.html", name, member=_member(name), posts=posts, comments=None)


@pages.get("/user/<name>/comments")
def member_comments(name: str) -> Response:
    comments = paged("SELECT forum_comments.*, forum, title FROM forum_comments JOIN forum_posts "
                     "ON forum_posts.id = post_id WHERE forum_comments.author = ? "
                     "ORDER BY forum_comments.id DESC", (name,), size=6)
    return page("forum_member.html", f"Comments of {name}", member=_member(name), posts=None,
                comments=comments)


@members.get("/account")
def account() -> Response:
    subscribed = run("SELECT forum FROM forum_subscriptions WHERE user = ? ORDER BY forum",
                     g.user["name"]).fetchall()
    return page("forum_account.html", "Account", member=_member(g.user["name"]), subscribed=subscribed)


@members.get("/account/bio")
def bio() -> Response:
    return page("forum_bio.html", "Edit bio", member=_member(g.user["name"]))


@members.post("/account/bio")
def change_bio() -> Response:
    run("INSERT OR REPLACE INTO forum_bios VALUES (?, ?)", g.user["name"], words("bio"))
    return go("/account", "Your bio was saved.")
