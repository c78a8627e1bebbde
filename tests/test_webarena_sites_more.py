"""Forum, code host and map: what their pages say is what the database holds, what their forms do is seen on
the next page."""

import math
import re
from collections import Counter
from urllib.parse import urljoin, urlsplit

import pytest

pytest.importorskip("flask", reason="the own sites need flask (requirements-webarena.txt)")
lxml_html = pytest.importorskip("lxml.html", reason="needs lxml (requirements-webarena.txt)")

from dreamgym.envs.webarena.ax_tree_sources import from_html  # noqa: E402
from dreamgym.envs.webarena.page import abstract  # noqa: E402
from dreamgym.envs.webarena.sites import SiteDatabase  # noqa: E402
from dreamgym.envs.webarena.sites.map import SPEED, TOWNS, Atlas  # noqa: E402
from dreamgym.envs.webarena.sites.site import open_session  # noqa: E402

SITES = ("reddit", "gitlab", "map")
ME, CODER = "MarvelsGrantMan136", "byteblaze"


@pytest.fixture(scope="module")
def made():
    return SiteDatabase(7)


@pytest.fixture
def world(made):
    yield made
    made.reset()


class Visitor:
    """A browser of one site: follows redirects, keeps its cookies."""

    def __init__(self, world, site, user=None):
        self.world, self.site = world, site
        self.cookies = world.login(site) if user is None else {}
        if user:
            person = world.db.execute(
                "SELECT id FROM users WHERE site = ? AND name = ?", (site, user)
            ).fetchone()[0]
            self.cookies = {f"sid_{site}": open_session(world.db, person)}

    def ask(self, method, path, form=None):
        parts = urlsplit(path)
        return self.world.handle(self.site, method, parts.path, parts.query, form, self.cookies)

    def get(self, path):
        """The texts and names of a page, in order."""
        answer = self.ask("GET", path)
        assert answer.status == 200, (path, answer.status)
        return [node.name for node in from_html(answer.body)[1]]

    def post(self, path, **form):
        """The page after the form."""
        answer = self.ask("POST", path, form)
        assert answer.status == 303, (path, form, answer.status)
        return self.get(answer.headers["Location"])

    def one(self, query, *arguments):
        return self.world.db.execute(query, arguments).fetchone()


def visitor(site):
    @pytest.fixture
    def of_world(world):
        return Visitor(world, site)
    return of_world


forum, code, maps = visitor("reddit"), visitor("gitlab"), visitor("map")


def rows(world):
    """What the sites' `fill` wrote."""
    return [
        tuple(row)
        for table in (
            "forum_posts", "forum_comments", "forum_subscriptions", "code_projects", "code_members",
            "code_items", "code_commits",
            "map_places")
        for row in world.db.execute(f"SELECT * FROM {table}")]


def test_data_follow_from_the_seed(made):
    from dreamgym.envs.webarena.sites import _first_data

    _first_data.cache_clear()
    assert rows(SiteDatabase(7)) == rows(made) != rows(SiteDatabase(8))


def test_data_are_as_many_as_promised(made):
    count = lambda query: made.db.execute(f"SELECT count(*) FROM {query}").fetchone()[0]
    assert count("forum_forums") == 12
    assert 144 <= count("forum_posts") <= 192
    assert count("forum_comments") > 250
    assert count("code_projects") >= 20 and count("code_items") > 200 and 45 <= count("map_places") <= 75
    assert count("forum_posts WHERE author = '" + ME + "'") >= 3
    assert count("code_projects WHERE owner = '" + CODER + "'") == 5


@pytest.mark.parametrize("site", SITES)
def test_every_page_is_there_short_and_has_its_buttons(world, site):
    """Walks the links of a site. Stops dead links, forms without a button, pages a small model could not
    read, and titles or names that are empty."""
    me, seen, queue, long = Visitor(world, site), {"/"}, ["/"], []
    while queue and len(seen) < 700:
        path = queue.pop(0)
        answer = me.ask("GET", path)
        assert answer.status == 200, (path, answer.status)
        root = lxml_html.fromstring(answer.body)
        title, nodes = from_html(answer.body)
        screen = abstract(title, f"{site}{path}", nodes)
        if screen.windows > 1 or len(screen.text.split()) > 220:
            long.append(path)
        assert all(node.name for node in screen.refs.values()), path
        for form in root.iter("form"):
            assert form.findall(".//button"), path
            assert form.get("autocomplete") == "off" or form.get("class") == "search", path
            action = urlsplit(urljoin(path, form.get("action"))).path
            method = (form.get("method") or "get").upper()
            assert world.apps[site].url_map.bind("localhost").test(action, method), (path, action)
        for link in root.iterfind(".//a"):
            if (where := urljoin(path, link.get("href"))) not in seen and not urlsplit(where).netloc:
                seen.add(where)
                queue.append(where)
    assert len(seen) > {"reddit": 250, "gitlab": 300, "map": 100}[site] and not long, (len(seen), long[:5])


@pytest.mark.parametrize(
    "site, path",
    [
        ("reddit", "/f/nowhere"), ("reddit", f"/f/books/{10**30}"), ("reddit", "/user/nobody"),
        ("gitlab", "/abel/nothing"), ("gitlab", f"/abel/x/issues/{10**30}"), ("gitlab", "/nobody"),
        ("map", "/place/mars"),
        ("map", "/picture.svg?at=mars")])
def test_what_is_not_there_is_not_found(world, site, path):
    assert Visitor(world, site).ask("GET", path).status == 404


def test_guests_are_asked_to_log_in(world):
    post = world.db.execute("SELECT * FROM forum_posts").fetchone()
    for site, path, login, shown in (
        ("reddit", "/submit", "/login", f"/f/{post['forum']}/{post['id']}"),
        ("gitlab", "/projects/new", "/users/sign_in", "/explore")):
        guest = Visitor(world, site)
        guest.cookies = {}
        assert guest.ask("GET", path).headers["Location"].startswith(f"{login}?next=")
        assert not {"Upvote", "Post comment", "New project", "My posts"} & set(guest.get(shown))
    assert Visitor(world, "reddit").get(f"/f/{post['forum']}/{post['id']}").count("Upvote") == 1


# ---- forum -------------------------------------------------------------------------------------------------

def test_forum_sorts_and_pages(forum):
    posts = forum.world.db.execute(
        "SELECT id, title, score FROM forum_posts WHERE forum = 'books'"
    ).fetchall()
    keys = {
        "new": lambda post: -post["id"], "top": lambda post: (-post["score"], -post["id"]),
        "hot": lambda post: (-post["score"] - post["id"] // 8, -post["id"])}
    for sort, key in keys.items():
        titles = [post["title"] for post in sorted(posts, key=key)]
        shown = [
            name
            for page in (1, 2)
            for name in forum.get(f"/f/books?sort={sort}&page={page}")
            if name in titles]
        assert shown == titles, sort


def test_votes_count_once_turn_and_are_taken_back(forum):
    post = forum.one("SELECT * FROM forum_posts WHERE forum = 'pets'")
    path, score = f"/f/pets/{post['id']}", post["score"]
    for way, expected, said in (
        ("up", 1, "You upvoted this post."), ("down", -1, "You downvoted this post."),
        ("down", 0, "You took your vote back.")):
        assert {f"score {score + expected}", said} <= set(forum.post(f"{path}/{way}"))


def test_comment_votes_leave_posts_alone(forum):
    comment = forum.one(
        "SELECT forum_comments.*, forum FROM forum_comments JOIN forum_posts ON forum_posts.id = post_id")
    before = [tuple(row) for row in forum.world.db.execute("SELECT * FROM forum_posts")]
    assert f"score {comment['score'] - 1}" in forum.post(
        f"/f/{comment['forum']}/{comment['post_id']}/comment/{comment['id']}/down")
    assert [tuple(row) for row in forum.world.db.execute("SELECT * FROM forum_posts")] == before


def test_a_post_is_made_edited_and_deleted(forum):
    assert "A post needs a title." in forum.post("/submit/diy", forum="diy", title="  ", body="text")
    page = forum.post("/submit/diy", forum="pets", title="A 'new' <b>post</b>", body="your\r\nopinion")
    assert {"Your post was made.", "A 'new' <b>post</b>", "your opinion", "score 1", ME} <= set(page)
    number = forum.one("SELECT max(id) FROM forum_posts")[0]
    assert forum.get("/f/pets?sort=new").index("A 'new' <b>post</b>") < forum.get("/f/pets?sort=new").index(
        "page 1 of 2")
    assert "changed" in forum.post(f"/f/pets/{number}/edit", title="A post", body="changed")
    assert "A post needs a title." in forum.post(f"/f/pets/{number}/edit", title="", body="gone")
    assert "Your post was deleted." in forum.post(f"/f/pets/{number}/delete")
    assert forum.ask("GET", f"/f/pets/{number}").status == 404
    forum.post("/submit", forum="pets", title="Next")
    # an address never leads to another post later
    assert forum.one("SELECT max(id) FROM forum_posts")[0] == number + 1


def test_posts_of_others_are_theirs(forum):
    post = forum.one("SELECT * FROM forum_posts WHERE author != ?", ME)
    path = f"/f/{post['forum']}/{post['id']}"
    assert "Delete" not in forum.get(path)
    assert [forum.ask(method, f"{path}/{deed}", {"title": "mine"} if method == "POST" else None).status
            for method, deed in (("GET", "edit"), ("POST", "edit"), ("POST", "delete"))] == [403] * 3
    assert forum.one("SELECT title FROM forum_posts WHERE id = ?", post["id"])[0] == post["title"]


def test_comments_and_replies(forum):
    post = forum.one("SELECT * FROM forum_posts WHERE comments = 2")
    path = f"/f/{post['forum']}/{post['id']}"
    comment = forum.one("SELECT * FROM forum_comments WHERE post_id = ?", post["id"])
    assert {"Your comment was added.", "Comments 3", "Fine", f"{ME}, score 1"} <= set(
        forum.post(f"{path}/comment", comment="Fine"))
    assert {"Comments 4", "So do I", f"{ME} to {comment['author']}, score 1"} <= set(
        forum.post(f"{path}/comment/{comment['id']}", comment="So do I"))
    assert "A comment needs some text." in forum.post(f"{path}/comment", comment=" ")
    assert "So do I" in forum.get(f"/user/{ME}/comments")


def test_subscribing_and_a_new_forum(forum):
    mine = {
        row[0]
        for row in forum.world.db.execute("SELECT forum FROM forum_subscriptions WHERE user = ?", (ME,))}
    name, members = next(
        tuple(row)
        for row in forum.world.db.execute("SELECT name, subscribers FROM forum_forums")
        if row[0] not in mine)
    assert {f"subscribers {members + 1}", "Unsubscribe"} <= set(
        forum.post(f"/f/{name}/subscribe")
    )
    assert name in forum.get("/account")
    assert {f"subscribers {members}", "Subscribe", f"You left {name}."} <= set(
        forum.post(f"/f/{name}/subscribe")
    )
    assert name not in forum.get("/account")
    assert "There is a forum books already." in forum.post("/new-forum", name="books", description="x")
    assert {"Your forum was made.", "walks", "By foot", "No posts", "Unsubscribe"} <= set(
        forum.post("/new-forum", name="Walks", description="By foot"))


def test_bio_and_search(forum):
    assert "bio I am new" in forum.post("/account/bio", bio="I am new")
    assert "I am new" in forum.get(
        f"/user/{ME}")
    found = forum.get("/search?q=GUITAR+my")
    expected = forum.one(
        "SELECT count(*) FROM forum_posts WHERE title || body LIKE '%guitar%' AND title || body LIKE '%my%'"
    )[0]
    assert f"posts {expected}" in found
    assert "posts 0" in forum.get("/search?q=%25")
    assert "posts 0" in forum.get("/search")


# ---- code host ---------------------------------------------------------------------------------------------

def own(code):
    return code.one("SELECT * FROM code_projects WHERE owner = ?", CODER)


def test_filtered_lists_count_right(code):
    for project in code.world.db.execute("SELECT id, path FROM code_projects LIMIT 6").fetchall():
        counts = Counter(
            (row["state"], row["label"])
            for row in code.world.db.execute(
                "SELECT * FROM code_items WHERE kind = 'issues' AND project = ?", (project["id"],)))
        for label in ("bug", "docs"):
            assert f"Issues {counts['open', label]}" in code.get(
                f"/{project['path']}/issues?state=open&label={label}")
        assert f"Issues {sum(counts.values())}" in code.get(f"/{project['path']}/issues?state=any&label=any")
    mine = code.one(
        "SELECT count(*) FROM code_items WHERE kind = 'issues' AND state = 'open' AND assignee = ?", CODER
    )[0]
    assert f"My issues {mine}" in code.get("/issues")


def test_the_most_commits_are_one_persons(code):
    for project in code.world.db.execute("SELECT * FROM code_projects").fetchall():
        counts = Counter(
            row[0]
            for row in code.world.db.execute(
                "SELECT author FROM code_commits WHERE project = ?", (project["id"],)))
        assert len(set(counts.values())) == len(counts) >= 2
        page = code.get(f"/{project['path']}/contributors")
        shown = [
            (page[i - 1], int(name.split(" ")[1]))
            for i, name in enumerate(page)
            if re.fullmatch(r"commits \d+", name)]
        assert shown == counts.most_common()
    assert f"Commits {counts[shown[0][0]]}" in code.get(f"/{project['path']}/commits?author={shown[0][0]}")


def test_stars_and_forks(code):
    project = code.one(
        "SELECT * FROM code_projects WHERE owner != ? AND id NOT IN (SELECT project FROM code_stars)", CODER)
    path, stars = project["path"], project["stars"]
    assert {f"stars {stars + 1}", "Unstar"} <= set(code.post(f"/{path}/star"))
    assert path in code.get(
        "/starred")
    assert {f"stars {stars}", "Star"} <= set(code.post(f"/{path}/star")) and path not in code.get("/starred")
    name = path.split("/")[1]
    assert {f"{CODER}/{name}", "stars 0", project["description"]} <= set(code.post(f"/{path}/fork"))
    assert f"You have a project {name} already." in code.post(
        f"/{path}/fork"
    )
    assert f"forks {project['forks'] + 1}" in code.get(f"/{path}")


def test_members_are_invited_by_those_who_lead(code):
    project = own(code)
    inside = {
        row[0]
        for row in code.world.db.execute("SELECT user FROM code_members WHERE project = ?", (project["id"],))}
    person = next(name for name in ("abel", "bella", "carl", "dora", "eric", "fiona") if name not in inside)
    path = f"/{project['path']}/members"
    for role in ("Guest", "Maintainer"):                             # a second invitation changes the role
        page = code.post(path, username=person, role=role)
        assert f"{person} is now {role}." in page and page[page.index(person) + 1] == role
    assert "There is no user mars." in code.post(
        path, username="mars", role="Guest"
    )
    assert "A user name is needed." in code.post(path, username="", role="Guest")
    assert f"{CODER} owns this project." in code.post(path, username=CODER, role="Guest")
    assert code.ask("POST", path, {"username": person, "role": "King"}).status == 400
    other = code.one(
        "SELECT path FROM code_projects WHERE id NOT IN (SELECT project FROM code_members WHERE user = ?)",
        CODER,
    )[0]
    assert "Invite" not in code.get(f"/{other}/members")
    assert code.ask("POST", f"/{other}/members", {"username": CODER, "role": "Guest"}).status == 403
    assert code.ask("GET", f"/{other}/settings").status == 403


def test_an_issue_from_new_to_reopened(code):
    project = own(code)
    path = f"/{project['path']}/issues"
    assert "An issue needs a title." in code.post(
        f"{path}/new", title="", description="", assignee="nobody", label="bug")
    page = code.post(f"{path}/new", title="Lost page", description="It is gone", assignee=CODER, label="docs")
    assert {
        "Your issue was made.", "Lost page", "state open", "docs", f"author {CODER}", f"assignee {CODER}",
        "It is gone",
    } <= set(page)
    number = code.one(
        "SELECT max(number) FROM code_items WHERE project = ? AND kind = 'issues'", project["id"]
    )[0]
    assert "Lost page" in code.get("/issues") and code.get(path).index("Lost page") < 16
    assert {"This issue is now closed.", "state closed", "Reopen"} <= set(
        code.post(f"{path}/{number}/close")
    )
    assert "Lost page" not in code.get(path)
    assert {"This issue is now open.", "Close"} <= set(code.post(f"{path}/{number}/reopen"))
    assert "assignee nobody" in code.post(f"{path}/{number}/assign", assignee="nobody")
    assert {"Comments 1", "Done", "Your comment was added."} <= set(
        code.post(f"{path}/{number}/comment", comment="Done"))
    assert code.ask("POST", f"{path}/{number}/merge").status == 403


def test_merge_requests_merge_once(code):
    request = code.one(
        """SELECT number, path FROM code_items JOIN code_projects ON code_projects.id = project
        WHERE kind = 'merge-requests' AND state = 'open'
                          AND owner = ?""",
        CODER)
    path = f"/{request['path']}/merge-requests/{request['number']}"
    assert {"state merged", "This merge request is now merged."} <= set(code.post(f"{path}/merge"))
    assert code.ask("POST", f"{path}/reopen").status == 403 and "Merge" not in code.get(path)


def test_others_issues_can_be_commented_not_closed(code):
    item = code.one(
        """SELECT code_items.*, path FROM code_items JOIN code_projects ON code_projects.id = project
        WHERE kind = 'issues' AND state = 'open' AND author != ?
                       AND project NOT IN (SELECT project FROM code_members WHERE user = ?)""",
        CODER,
        CODER)
    path = f"/{item['path']}/issues/{item['number']}"
    assert "Close" not in code.get(path)
    assert code.ask("POST", f"{path}/close").status == 403
    assert "Hello" in code.post(f"{path}/comment", comment="Hello")


def test_private_projects_are_hidden_from_others(code):
    assert "A project needs a name" in " ".join(code.post("/projects/new", name="../x", visibility="private"))
    page = code.post("/projects/new", name="My plan", description="Plans", visibility="private")
    assert {f"{CODER}/my-plan", "Your project was made.", "private", "Settings"} <= set(page)
    assert "You have a project my-plan already." in code.post(
        "/projects/new", name="my-plan", visibility="public")
    other = Visitor(code.world, "gitlab", "abel")
    assert other.ask("GET", f"/{CODER}/my-plan").status == 404
    assert f"{CODER}/my-plan" not in other.get("/search?q=plan")
    assert f"{CODER}/my-plan" in code.get(
        "/search?q=plan")
    code.post(
        f"/{CODER}/my-plan/settings", description="Big plans", readme="Read", license="MIT",
        visibility="public")
    assert {"Big plans", "license MIT", "public"} <= set(
        other.get(f"/{CODER}/my-plan")
    )
    assert "Settings" not in other.get(f"/{CODER}/my-plan")


def test_status_and_follow(code):
    assert "status On a trip" in code.post(
        "/account/status", status="On a trip"
    )
    assert "status On a trip" in code.get(f"/{CODER}")
    name = next(person for person in ("abel", "bella", "carl") if "Follow" in code.get(f"/{person}"))
    followers = code.one("SELECT count(*) FROM code_follows WHERE followed = ?", name)[0]
    assert {f"followers {followers + 1}", "Unfollow"} <= set(
        code.post(f"/{name}/follow")
    )
    assert f"followers {followers}" in code.post(f"/{name}/follow")


# ---- map ---------------------------------------------------------------------------------------------------

def detour(a, b, low, high):
    """The shortest way between a and b on one axis that touches one of the crossing streets."""
    return min(abs(a - line) + abs(b - line) for line in (low, (low + high) // 2, high))


def by_hand(a, b):
    """Metres between two places of a town, from the plan of the streets alone."""
    x, y, _ = TOWNS[a.town]
    across = [(place.y - y) in (-800, 0, 800) for place in (a, b)]
    if across[0] != across[1]:
        return abs(a.x - b.x) + abs(a.y - b.y)
    if across[0]:
        return abs(a.x - b.x) if a.y == b.y else abs(a.y - b.y) + detour(a.x, b.x, x - 800, x + 800)
    return abs(a.y - b.y) if a.x == b.x else abs(a.x - b.x) + detour(a.y, b.y, y - 800, y + 800)


def test_ways_in_towns_are_the_shortest(world):
    atlas = Atlas(world.db)
    places = [place for place in atlas.places if place.category != "town"]
    for a in places:
        for b in places:
            if a.town == b.town and a is not b:
                assert (
                    atlas.metres(a, b)
                    == by_hand(a, b)
                    == atlas.metres(b, a)
                    == sum(length for _, length in atlas.way(a, b)[0])
                ), (a, b)
            assert atlas.metres(a, b) >= math.dist((a.x, a.y), (b.x, b.y)) - 5


def test_between_towns_the_better_of_two_roads(world):
    atlas = Atlas(world.db)
    towns, dist = atlas.by_slug, lambda a, b: round(math.dist(TOWNS[a][:2], TOWNS[b][:2]))
    assert atlas.metres(towns["alder"], towns["dunton"]) == min(
        dist("Alder", t) + dist(t, "Dunton") for t in ("Bree", "Colby"))


def test_directions_say_distance_time_and_streets(maps):
    atlas = Atlas(maps.world.db)
    a, b = (
        place for place in atlas.places if place.category == "station" and place.town in ("Alder", "Colby"))
    metres = atlas.metres(a, b)
    for by in SPEED:
        page = maps.get(f"/directions?from={a.name.replace(' ', '+')}&to={b.slug.replace('-', '+')}&by={by}")
        assert {
            f"distance {metres / 1000:.1f} km",
            f"time {math.ceil(metres / 1000 / SPEED[by] * 60 - 1e-9)} minutes", f"by {by}",
            f"{a.name} to {b.name}",
        } <= set(page)
    assert any(re.fullmatch(r"Road 2, \d+\.\d km", name) for name in page)
    assert "No place called atlantis" in maps.get("/directions?from=atlantis&to=alder")


def test_nearby_is_sorted_and_complete(maps):
    atlas = Atlas(maps.world.db)
    centre = atlas.by_slug["bree"]
    cafes = [
        place.name
        for place in sorted(atlas.places, key=lambda place: (atlas.metres(centre, place), place.name))
        if place.category == "cafe"]
    shown = [
        name
        for page in (1, 2)
        for name in maps.get(f"/nearby/bree?category=cafe&page={page}")
        if name in cafes]
    assert shown == cafes and len(cafes) > 8


def test_search_puts_the_exact_name_first(maps):
    page = maps.get("/search?q=alder")
    assert page[page.index("Search alder") + 1] == "Alder"
    assert "Nothing found" in maps.get("/search?q=volcano")
    assert "Nothing found" in maps.get("/search")


def test_place_pages_say_all(maps):
    for place in Atlas(maps.world.db).places:
        page = maps.get(f"/place/{place.slug}")
        assert {place.name, place.category, f"zip {place.zip}", f"coordinates {place.coordinates}"} <= set(
            page)
        for text in (
            place.phone and f"phone {place.phone}", place.hours and f"open {place.hours}",
            place.street and f"address {place.address}"):
            assert not text or text in page
        lat, lon = (float(part) for part in place.coordinates.split(", "))
        assert 50 < lat < 50.3 and 8 < lon < 8.5


def test_pictures_are_well_formed(maps):
    for query in ("", "?at=alder", "?from=alder-station&to=dunton", "?from=alder&to=alder"):
        answer = maps.ask("GET", f"/picture.svg{query}")
        assert answer.headers["Content-Type"] == "image/svg+xml"
        assert lxml_html.etree.fromstring(
            answer.body.encode()
        ).tag.endswith("svg")
