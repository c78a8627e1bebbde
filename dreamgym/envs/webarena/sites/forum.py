"""The forum of the own sites, after Postmill: forums, posts, comments, votes, subscriptions, profiles.
WebArena's name for it is `reddit`."""
import sqlite3
from random import Random

from flask import abort, g

from dreamgym.envs.webarena.sites.site import (
    PEOPLE, TODAY, WORDS, Site, all_words, asked, chosen, day, go, insert, of_split, one, page, paged, rows,
    run, toggle, words)

SITE = Site("reddit", "Forum", {"Forums": "/", "Account": "/account"}, "/search")
NAMES = WORDS["forum"]
SORTS = {"hot": "score + posts.id / 8 DESC, posts.id DESC", "new": "posts.id DESC",
         "top": "score DESC, posts.id DESC"}
POST = "/f/<forum>/<int(max=999999):post>"
OWN = "/f/<forum>/<int(max=999999):own_post>"
COMMENT = f"{POST}/comment/<int(max=999999):comment>"
WAY = "<any(up, down):way>"


def _member(name: str, _: dict | None = None) -> sqlite3.Row:
    return one("SELECT name, joined, bio FROM users LEFT JOIN forum_bios ON user = name WHERE site = ? AND "
               "name = ?", SITE.name, name)


def _post(number: int, loaded: dict) -> sqlite3.Row:
    return one("SELECT * FROM forum_posts WHERE id = ? AND forum = ?", number, loaded["forum"]["name"])


def _own_post(number: int, loaded: dict) -> sqlite3.Row:
    post = _post(number, loaded)
    return post if post["author"] == g.name else abort(403)


SITE.loaders |= {
    "forum": lambda name, _: one("SELECT * FROM forum_forums WHERE name = ?", name),
    "post": _post, "own_post": _own_post, "member": _member,
    "comment": lambda number, loaded: one("SELECT * FROM forum_comments WHERE id = ? AND post_id = ?", number,
                                          loaded["post"]["id"])}


def fill(db: sqlite3.Connection, rng: Random, split: str) -> None:
    """Posts in the order of their days: a higher id is a newer post."""
    people = [SITE.account[0], *rng.sample(of_split(map(str.lower, PEOPLE.first), split), 12)]
    for person in people:
        SITE.add_user(db, person, rng, joined=range(300, 1500))
        insert(db, "forum_bios", user=person, bio=rng.choice(NAMES.bios))
    for name, (description, _) in NAMES.forums.items():
        insert(db, "forum_forums", name=name, description=description, sidebar="",
               subscribers=rng.randrange(20, 400))
    for name in rng.sample(sorted(NAMES.forums), 3):
        insert(db, "forum_subscriptions", user=people[0], forum=name)
    posts = []
    for name, (_, nouns) in NAMES.forums.items():
        bodies = {title.format(noun): body for title, body in NAMES.posts for noun in nouns}
        titles = rng.sample(of_split(bodies, split), rng.randint(12, 16))
        posts += [(name, title, bodies[title]) for title in titles]
    rng.shuffle(posts)
    for i, (name, title, body) in enumerate(posts):
        age = (len(posts) - i) // 2 + 1
        answers, author = rng.sample(people, rng.randint(0, 4)), rng.choice(people)
        post = insert(db, "forum_posts", forum=name, author=author, title=title, body=body,
                      score=rng.randint(-3, 40), created=day(age), comments=len(answers))
        replies = rng.sample(NAMES.replies, len(answers))
        days = sorted(day(rng.randrange(age)) for _ in answers)
        for person, reply, created in zip(answers, replies, days):
            insert(db, "forum_comments", post_id=post, author=person, body=reply, score=rng.randint(-4, 12),
                   created=created)


# ---- forums and lists of posts

@SITE.get("/")
def home():
    return page("Forums", forums=paged("SELECT * FROM forum_forums ORDER BY name"))


def _posts(title: str, where: str, *arguments: str, **context):
    sort = chosen("sort", SORTS, "Sort by")
    posts = paged(f"SELECT id, forum, title, score, comments FROM forum_posts AS posts WHERE {where} ORDER "
                  f"BY {SORTS[sort]}", *arguments)
    return page(title, "posts", posts=posts, **{"forum": None, **context})


@SITE.get("/all")
def everything():
    return _posts("All posts", "1")


@SITE.get("/search")
def search():
    q = asked("q")
    return _posts(f"Search {q}".strip(), *all_words("words", q.lower().split()))


@SITE.get("/f/<forum>")
def forum(forum):
    subscribed = rows("SELECT * FROM forum_subscriptions WHERE user = ? AND forum = ?", g.name, forum["name"])
    return _posts(forum["name"], "forum = ?", forum["name"], forum=forum, subscribed=subscribed)


@SITE.post("/f/<forum>/subscribe")
def subscribe(forum):
    name = forum["name"]
    joined = toggle("forum_subscriptions", user=g.name, forum=name)
    run("UPDATE forum_forums SET subscribers = subscribers + ? WHERE name = ?", 1 if joined else -1, name)
    return go(f"You subscribed to {name}." if joined else f"You left {name}.", f"/f/{name}")


@SITE.get("/new-forum", member=True)
def new_forum():
    return page("New forum")


@SITE.post("/new-forum")
def make_forum():
    name, description = words("name", 30).lower(), words("description", 100)
    if not name.isalnum() or not name.isascii():
        return go("A forum needs a name of letters and digits.")
    if not description:
        return go("A forum needs a description.")
    if not run("INSERT OR IGNORE INTO forum_forums VALUES (?, ?, ?, 1)", name, description,
               words("sidebar")).rowcount:
        return go(f"There is a forum {name} already.")
    insert(g.db, "forum_subscriptions", user=g.name, forum=name)
    return go("Your forum was made.", f"/f/{name}")


# ---- posts

def _path(post: sqlite3.Row) -> str:
    return f"/f/{post['forum']}/{post['id']}"


@SITE.get(POST)
def post(forum, post):
    comments = rows("SELECT * FROM forum_comments WHERE post_id = ? ORDER BY id", post["id"])
    return page(post["title"], post=post, comments=comments, vote=_vote("post", post))


@SITE.get("/submit", "/submit/<chosen>", member=True)
def submit(chosen=""):
    forums = [row["name"] for row in rows("SELECT name FROM forum_forums ORDER BY name")]
    return page("New post", "edit", forums=forums, forum=chosen, post=None)


@SITE.post("/submit", "/submit/<chosen>")
def make_post(chosen=""):
    forum = one("SELECT * FROM forum_forums WHERE name = ?", words("forum"))["name"]
    if not words("title"):
        return go("A post needs a title.", f"/submit/{forum}")
    number = insert(g.db, "forum_posts", forum=forum, author=g.name, title=words("title"),
                    body=words("body", 2000), score=1, created=TODAY)
    return go("Your post was made.", f"/f/{forum}/{number}")


@SITE.get(f"{OWN}/edit", member=True)
def edit(forum, own_post):
    return page("Edit post", post=own_post)


@SITE.post(f"{OWN}/edit")
def change_post(forum, own_post):
    if not words("title"):
        return go("A post needs a title.")
    run("UPDATE forum_posts SET title = ?, body = ? WHERE id = ?", words("title"), words("body", 2000),
        own_post["id"])
    return go("Your post was changed.", _path(own_post))


@SITE.post(f"{OWN}/delete")
def delete_post(forum, own_post):
    run("DELETE FROM forum_comments WHERE post_id = ?", own_post["id"])
    run("DELETE FROM forum_posts WHERE id = ?", own_post["id"])
    return go("Your post was deleted.", f"/f/{forum['name']}")


def _vote(kind: str, item: sqlite3.Row) -> int:
    """1, 0 or -1: the visitor's vote on a post or a comment."""
    found = rows("SELECT value FROM forum_votes WHERE user = ? AND kind = ? AND item = ?", g.name, kind,
                 item["id"])
    return found[0]["value"] if found else 0


@SITE.post(f"{POST}/{WAY}", f"{COMMENT}/{WAY}")
def vote(forum, post, way, comment=None):
    """The same vote again takes it back."""
    kind, item = ("comment", comment) if comment else ("post", post)
    old, value = _vote(kind, item), 1 if way == "up" else -1
    new = 0 if old == value else value
    run("INSERT OR REPLACE INTO forum_votes VALUES (?, ?, ?, ?)", g.name, kind, item["id"], new)
    run(f"UPDATE forum_{kind}s SET score = score + ? WHERE id = ?", new - old, item["id"])
    said = f"You {way}voted this {kind}." if new else "You took your vote back."
    return go(said, _path(post) + (f"/comment/{item['id']}" if comment else ""))


@SITE.get(COMMENT)
def comment(forum, post, comment):
    return page("Comment", heading="", post=post, comment=comment)


@SITE.post(f"{POST}/comment", COMMENT)
def make_comment(forum, post, comment=None):
    if not words("comment"):
        return go("A comment needs some text.", "" if comment else _path(post))
    insert(g.db, "forum_comments", post_id=post["id"], author=g.name, body=words("comment", 2000), score=1,
           created=TODAY, answered=comment["author"] if comment else "")
    run("UPDATE forum_posts SET comments = comments + 1 WHERE id = ?", post["id"])
    return go("Your comment was added.", _path(post))


# ---- members

@SITE.get("/user/<member>")
def member(member):
    posts = paged("SELECT * FROM forum_posts WHERE author = ? ORDER BY id DESC", member["name"])
    return page(member["name"], member=member, posts=posts)


@SITE.get("/user/<member>/comments")
def member_comments(member):
    comments = paged("SELECT forum_comments.*, forum, title FROM forum_comments JOIN forum_posts "
                     "ON forum_posts.id = post_id WHERE forum_comments.author = ? "
                     "ORDER BY forum_comments.id DESC", member["name"], size=6)
    return page(f"Comments of {member['name']}", "member", heading=member["name"], member=member, posts=None,
                comments=comments)


@SITE.get("/account", member=True)
def account():
    subscribed = rows("SELECT forum FROM forum_subscriptions WHERE user = ? ORDER BY forum", g.name)
    return page("Account", heading=g.name, member=_member(g.name), subscribed=subscribed)


@SITE.get("/account/bio", member=True)
def bio():
    return page("Edit bio", member=_member(g.name))


@SITE.post("/account/bio")
def change_bio():
    run("INSERT OR REPLACE INTO forum_bios VALUES (?, ?)", g.name, words("bio"))
    return go("Your bio was saved.", "/account")
