"""The code host of the own sites, after GitLab: projects, issues, merge requests, commits, members, profiles. WebArena's name for it is `gitlab`.

There is no git behind it: a commit is a title, an author and a day. Issues and merge requests are one table of items, with the same pages.
"""
from __future__ import annotations

import re
import sqlite3
from datetime import date, timedelta
from random import Random
from urllib.parse import urlencode

from dreamgym.envs.webarena.sites.site import TODAY, Site, add_user, build_app, go, needs_login, page, paged, user_password, words
from flask import Blueprint, Flask, Response, abort, g, request

SITE = Site("gitlab", "Code", (("Projects", "/"), ("My issues", "/issues"), ("My merge requests", "/merge-requests"), ("Account", "/account")), search="/search",
            account=("byteblaze", "hello1234"), login_path="/users/sign_in", login_text="Sign in", user_label="Username or email")
PEOPLE = {"abel": "Abel Stone", "bella": "Bella Reed", "carl": "Carl Wood", "dora": "Dora Field", "eric": "Eric Lake", "fiona": "Fiona Hill", "gina": "Gina Moss",
          "henry": "Henry Brook", "iris": "Iris Lane", "jack": "Jack Frost"}
FIRST, SECOND = "solar paper tiny fast blue open quiet smart".split(), "bot tool map notes chat site timer shop".split()
AUDIENCE = ("students", "teachers", "writers", "doctors", "cooks", "runners", "families", "artists")
VERBS, THINGS = ("Fix", "Add", "Remove", "Update", "Test", "Speed up"), ("login page", "search box", "main menu", "export", "import", "cache", "mobile view",
                                                                         "error text", "settings", "dark mode", "help text", "start page")
BODIES = ("It is slow on my phone.", "Users asked for this.", "See the last release.", "This broke last week.", "A small change would do.", "It works on one page only.")
NOTES = ("I can look at it", "Please add a test", "Works for me", "Same here", "Can we close this?", "Good idea", "I need more details", "Done in my branch",
         "Not before the release", "Looks good to me")
STATUSES = ("", "", "On vacation", "Busy", "In a meeting", "Working from home")
LABELS, LICENSES, VISIBILITIES = ("bug", "feature", "docs", "question"), ("MIT", "Apache 2.0", "GPL 3.0", "none"), ("public", "internal", "private")
ROLES = ("Guest", "Reporter", "Developer", "Maintainer", "Owner")
KINDS = {"issues": "issue", "merge-requests": "merge request"}        # in addresses, in texts
STATES = {"issues": ("open", "closed"), "merge-requests": ("open", "merged", "closed")}
ANY, NOBODY = "any", "nobody"
SORTS = {"name": "path", "stars": "stars DESC, path", "updated": "updated DESC, path"}
SCHEMA = """
CREATE TABLE code_projects (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, description TEXT NOT NULL, readme TEXT NOT NULL,
                            license TEXT NOT NULL, visibility TEXT NOT NULL, stars INTEGER NOT NULL, forks INTEGER NOT NULL, updated TEXT NOT NULL);
CREATE TABLE code_stars (user TEXT, project INTEGER, PRIMARY KEY (user, project));
CREATE TABLE code_members (project INTEGER, user TEXT, role TEXT NOT NULL, PRIMARY KEY (project, user));
CREATE TABLE code_items (id INTEGER PRIMARY KEY, project INTEGER NOT NULL, kind TEXT NOT NULL, number INTEGER NOT NULL, title TEXT NOT NULL, body TEXT NOT NULL,
                         author TEXT NOT NULL, assignee TEXT NOT NULL, label TEXT NOT NULL, state TEXT NOT NULL, created TEXT NOT NULL, UNIQUE (project, kind, number));
CREATE TABLE code_notes (id INTEGER PRIMARY KEY, item INTEGER NOT NULL, author TEXT NOT NULL, body TEXT NOT NULL, created TEXT NOT NULL);
CREATE TABLE code_commits (id INTEGER PRIMARY KEY, project INTEGER NOT NULL, author TEXT NOT NULL, title TEXT NOT NULL, created TEXT NOT NULL);
CREATE TABLE code_profiles (user TEXT PRIMARY KEY, email TEXT NOT NULL, status TEXT NOT NULL, token TEXT NOT NULL);
CREATE TABLE code_follows (user TEXT, followed TEXT, PRIMARY KEY (user, followed));
CREATE INDEX code_notes_item ON code_notes (item);
CREATE INDEX code_commits_project ON code_commits (project);
"""

pages = Blueprint("pages", __name__)


def make_app(world) -> Flask:
    return build_app(SITE, pages)


# ---- first data ----------------------------------------------------------------------------------------------------------------------------------

def fill(db: sqlite3.Connection, rng: Random) -> None:
    """Five projects belong to the account. Stars differ from project to project, commits from contributor to contributor: 'the most' is always one."""
    account = SITE.account[0]
    people = [account, *PEOPLE]
    for person in people:
        password = SITE.account[1] if person == account else user_password(rng)
        add_user(db, SITE.name, person, password, PEOPLE.get(person, "Byte Blaze"), _day(rng.randrange(300, 1500)))
        db.execute("INSERT INTO code_profiles VALUES (?, ?, ?, ?)",
                   (person, f"{person}@mail.test", "" if person == account else rng.choice(STATUSES), f"{rng.getrandbits(40):010x}"))
    names = rng.sample([(first, second) for first in FIRST for second in SECOND], 22)
    projects = []
    for i, ((first, second), stars) in enumerate(zip(names, rng.sample(range(3, 300), len(names)))):
        projects.append(_fill_project(db, rng, account if i < 5 else rng.choice(people[1:]), people, f"{first}-{second}", stars))
    db.executemany("INSERT INTO code_stars VALUES (?, ?)", [(account, project) for project in rng.sample(projects[5:], 3)])
    db.executemany("INSERT INTO code_follows VALUES (?, ?)", [(account, person) for person in rng.sample(people[1:], 2)])


def _fill_project(db: sqlite3.Connection, rng: Random, owner: str, people: list[str], name: str, stars: int) -> int:
    what, audience = name.replace("-", " "), rng.choice(AUDIENCE)
    team = [owner, *rng.sample([person for person in people if person != owner], rng.randint(2, 5))]
    project = db.execute("INSERT INTO code_projects (path, owner, description, readme, license, visibility, stars, forks, updated) VALUES (?,?,?,?,?,?,?,?,?)",
                         (f"{owner}/{name}", owner, f"A {what} for {audience}", f"Run make {name} to build the {what}. Ask {team[-1]} for help.", rng.choice(LICENSES),
                          rng.choice(VISIBILITIES[:2]), stars, rng.randrange(20), _day(rng.randrange(1, 40)))).lastrowid
    db.executemany("INSERT INTO code_members VALUES (?, ?, ?)", [(project, person, "Owner" if person == owner else rng.choice(ROLES[:4])) for person in team])
    for kind, states in STATES.items():
        titles = rng.sample([f"{verb} {thing}" for verb in VERBS for thing in THINGS], rng.randint(5, 14) if kind == "issues" else rng.randint(3, 6))
        for number, title in enumerate(titles, 1):
            age = (len(titles) - number) * 9 + rng.randrange(1, 9)
            item = db.execute("INSERT INTO code_items (project, kind, number, title, body, author, assignee, label, state, created) VALUES (?,?,?,?,?,?,?,?,?,?)",
                              (project, kind, number, title, rng.choice(BODIES), rng.choice(people), rng.choice([NOBODY, *team]), rng.choice(LABELS),
                               rng.choice(("open", *states)), _day(age))).lastrowid
            db.executemany("INSERT INTO code_notes (item, author, body, created) VALUES (?, ?, ?, ?)",
                           [(item, rng.choice(people), note, day) for note, day in zip(rng.sample(NOTES, rng.randint(0, 3)), _days(rng, age))])
    contributors = team[:rng.randint(2, 4)]
    authors = [person for person, commits in zip(contributors, rng.sample(range(2, 15), len(contributors))) for _ in range(commits)]
    rng.shuffle(authors)
    db.executemany("INSERT INTO code_commits (project, author, title, created) VALUES (?, ?, ?, ?)",
                   [(project, author, f"{rng.choice(VERBS)} {rng.choice(THINGS)}", _day((len(authors) - i) * 3)) for i, author in enumerate(authors)])
    return project


def _day(ago: int) -> str:
    return (date.fromisoformat(TODAY) - timedelta(ago)).isoformat()


def _days(rng: Random, age: int) -> list[str]:
    """The days of a few comments on something `age` days old, in order."""
    return sorted(_day(rng.randrange(age)) for _ in range(4))


# ---- who may do what -----------------------------------------------------------------------------------------------------------------------------

def _project(owner: str, name: str) -> sqlite3.Row:
    """A project with the visitor's `role` in it ("" for none). 404 for a private one of others."""
    row = g.db.execute("SELECT code_projects.*, ifnull(role, '') AS role FROM code_projects LEFT JOIN code_members ON project = id AND user = ? WHERE path = ?",
                       (_me(), f"{owner}/{name}")).fetchone()
    return row if row and (row["role"] or row["visibility"] != "private") else abort(404)


def _led(owner: str, name: str) -> sqlite3.Row:
    """A project that the visitor leads, and so may change settings and members of."""
    project = _project(owner, name)
    return project if project["role"] in ROLES[3:] else abort(403)


def _me() -> str:
    return g.user["name"] if g.user is not None else ""


def _members(project: int) -> list[str]:
    return [row["user"] for row in g.db.execute("SELECT user FROM code_members WHERE project = ? ORDER BY user", (project,))]


# ---- lists of projects ---------------------------------------------------------------------------------------------------------------------------

def _projects(title: str, where: str, arguments: tuple = (), **query: str) -> Response:
    sort = request.args.get("sort", "name")
    sort = sort if sort in SORTS else "name"
    seen = f"(visibility != 'private' OR id IN (SELECT project FROM code_members WHERE user = ?)) AND {where}"
    projects = paged(f"SELECT path, stars FROM code_projects WHERE {seen} ORDER BY {SORTS[sort]}", (_me(), *arguments))
    return page("code_projects.html", title, projects=projects, sort=sort, sorts=SORTS, q=query.get("q", ""),
                address=f"{request.path}?{urlencode(query | {'sort': sort})}&")


@pages.get("/")
def home() -> Response:
    return _projects("Your projects", "owner = ?", (_me(),)) if g.user is not None else everything()


@pages.get("/explore")
def everything() -> Response:
    return _projects("All projects", "1")


@pages.get("/starred")
@needs_login
def starred() -> Response:
    return _projects("Starred projects", "id IN (SELECT project FROM code_stars WHERE user = ?)", (_me(),))


@pages.get("/search")
def search() -> Response:
    q = " ".join(request.args.get("q", "").split())[:100]
    found = " AND ".join(["instr(lower(path || ' ' || description), ?)"] * len(q.split())) or "0"
    return _projects(f"Search {q}".strip(), found, tuple(q.lower().split()), q=q)


@pages.get("/projects/new")
@needs_login
def new_project() -> Response:
    return page("code_new.html", "New project", visibilities=VISIBILITIES)


@pages.post("/projects/new")
@needs_login
def make_project() -> Response:
    name = words("name", 40).lower().replace(" ", "-")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        return go("/projects/new", "A project needs a name of letters, digits and dashes.")
    if not _insert_project(f"{_me()}/{name}", words("description"), words("readme", 2000), "none", _one_of("visibility", VISIBILITIES)):
        return go("/projects/new", f"You have a project {name} already.")
    return go(f"/{_me()}/{name}", "Your project was made.")


def _insert_project(path: str, description: str, readme: str, license: str, visibility: str) -> bool:
    """Adds a project of the visitor; False when there is one of that name already."""
    added = g.db.execute("""INSERT OR IGNORE INTO code_projects (path, owner, description, readme, license, visibility, stars, forks, updated)
                            VALUES (?, ?, ?, ?, ?, ?, 0, 0, ?)""", (path, _me(), description, readme, license, visibility, TODAY))
    if added.rowcount:
        g.db.execute("INSERT INTO code_members VALUES (?, ?, 'Owner')", (added.lastrowid, _me()))
    return bool(added.rowcount)


def _one_of(field: str, options: tuple[str, ...] | list[str]) -> str:
    return value if (value := words(field)) in options else abort(400)


# ---- one project ---------------------------------------------------------------------------------------------------------------------------------

@pages.get("/<owner>/<name>")
def project(owner: str, name: str) -> Response:
    row = _project(owner, name)
    starred = g.db.execute("SELECT 1 FROM code_stars WHERE user = ? AND project = ?", (_me(), row["id"])).fetchone()
    return page("code_project.html", row["path"], project=row, starred=starred is not None)


@pages.post("/<owner>/<name>/star")
@needs_login
def star(owner: str, name: str) -> Response:
    row = _project(owner, name)
    taken = g.db.execute("DELETE FROM code_stars WHERE user = ? AND project = ?", (_me(), row["id"])).rowcount
    if not taken:
        g.db.execute("INSERT INTO code_stars VALUES (?, ?)", (_me(), row["id"]))
    g.db.execute("UPDATE code_projects SET stars = stars + ? WHERE id = ?", (-1 if taken else 1, row["id"]))
    return go(f"/{row['path']}", "You took your star back." if taken else "You starred this project.")


@pages.post("/<owner>/<name>/fork")
@needs_login
def fork(owner: str, name: str) -> Response:
    row = _project(owner, name)
    if not _insert_project(f"{_me()}/{name}", row["description"], row["readme"], row["license"], row["visibility"]):
        return go(f"/{row['path']}", f"You have a project {name} already.")
    g.db.execute("UPDATE code_projects SET forks = forks + 1 WHERE id = ?", (row["id"],))
    return go(f"/{_me()}/{name}", "The project was forked.")


@pages.get("/<owner>/<name>/readme")
def readme(owner: str, name: str) -> Response:
    return page("code_readme.html", "README", project=_project(owner, name))


@pages.get("/<owner>/<name>/commits")
def commits(owner: str, name: str) -> Response:
    row, author = _project(owner, name), request.args.get("author", ANY)
    authors = [ANY, *(r["author"] for r in g.db.execute("SELECT DISTINCT author FROM code_commits WHERE project = ? ORDER BY author", (row["id"],)))]
    found = paged("SELECT * FROM code_commits WHERE project = ? AND ? IN (author, 'any') ORDER BY id DESC", (row["id"], author))
    return page("code_commits.html", "Commits", project=row, commits=found, author=author, authors=authors, address=f"{request.path}?{urlencode({'author': author})}&")


@pages.get("/<owner>/<name>/contributors")
def contributors(owner: str, name: str) -> Response:
    row = _project(owner, name)
    found = paged("SELECT author, count(*) AS commits FROM code_commits WHERE project = ? GROUP BY author ORDER BY commits DESC, author", (row["id"],))
    return page("code_contributors.html", "Contributors", project=row, contributors=found, most=found.rows[0]["commits"] if found.rows else 1)


@pages.get("/<owner>/<name>/members")
def members(owner: str, name: str) -> Response:
    row = _project(owner, name)
    return page("code_members.html", "Members", project=row, roles=ROLES[:4], leads=row["role"] in ROLES[3:],
                members=paged("SELECT user, role FROM code_members WHERE project = ? ORDER BY user", (row["id"],)))


@pages.post("/<owner>/<name>/members")
@needs_login
def invite(owner: str, name: str) -> Response:
    row, person, role = _led(owner, name), words("username"), _one_of("role", ROLES[:4])
    if g.db.execute("SELECT 1 FROM users WHERE site = ? AND name = ?", (SITE.name, person)).fetchone() is None:
        return go(request.path, f"There is no user {person}." if person else "A user name is needed.")
    if person == row["owner"]:
        return go(request.path, f"{person} owns this project.")
    g.db.execute("INSERT OR REPLACE INTO code_members VALUES (?, ?, ?)", (row["id"], person, role))
    return go(request.path, f"{person} is now {role}.")


@pages.get("/<owner>/<name>/settings")
@needs_login
def settings(owner: str, name: str) -> Response:
    return page("code_settings.html", "Settings", project=_led(owner, name), licenses=LICENSES, visibilities=VISIBILITIES)


@pages.post("/<owner>/<name>/settings")
@needs_login
def save_settings(owner: str, name: str) -> Response:
    row = _led(owner, name)
    g.db.execute("UPDATE code_projects SET description = ?, readme = ?, license = ?, visibility = ?, updated = ? WHERE id = ?",
                 (words("description"), words("readme", 2000), _one_of("license", LICENSES), _one_of("visibility", VISIBILITIES), TODAY, row["id"]))
    return go(f"/{row['path']}", "The settings were saved.")


# ---- issues and merge requests -------------------------------------------------------------------------------------------------------------------

_KIND = "<any('issues', 'merge-requests'):kind>"
_ITEM = f"/<owner>/<name>/{_KIND}/<int(max=999999):number>"


def _item(project: int, kind: str, number: int) -> sqlite3.Row:
    return g.db.execute("SELECT * FROM code_items WHERE project = ? AND kind = ? AND number = ?", (project, kind, number)).fetchone() or abort(404)


def _items(title: str, kind: str, where: str, arguments: tuple, project: sqlite3.Row | None, **query: str) -> Response:
    """Issues or merge requests, newest first, of the state and label that were asked for."""
    state, label = request.args.get("state", "open"), request.args.get("label", ANY)
    found = paged(f"""SELECT number, title, state, label, path FROM code_items JOIN code_projects ON code_projects.id = project
                      WHERE kind = ? AND ? IN (state, 'any') AND ? IN (label, 'any') AND {where} ORDER BY created DESC, code_items.id DESC""",
                  (kind, state, label, *arguments))
    return page("code_items.html", title, kind=kind, one=KINDS[kind], items=found, project=project, state=state, states=(*STATES[kind], ANY), label=label,
                labels=(ANY, *LABELS), by=query.get("by"), address=f"{request.path}?{urlencode(query | {'state': state, 'label': label})}&")


@pages.get("/issues", defaults={"kind": "issues"})
@pages.get("/merge-requests", defaults={"kind": "merge-requests"})
@needs_login
def my_items(kind: str) -> Response:
    by = "author" if request.args.get("by") == "author" else "assignee"
    return _items(f"My {KINDS[kind]}s", kind, f"{by} = ?", (_me(),), None, by=by)


@pages.get(f"/<owner>/<name>/{_KIND}")
def items(owner: str, name: str, kind: str) -> Response:
    row = _project(owner, name)
    return _items(f"{KINDS[kind]}s".capitalize(), kind, "project = ?", (row["id"],), row)


@pages.get("/<owner>/<name>/issues/new")
@needs_login
def new_issue(owner: str, name: str) -> Response:
    row = _project(owner, name)
    return page("code_new_issue.html", "New issue", project=row, people=[NOBODY, *_members(row["id"])], labels=LABELS)


@pages.post("/<owner>/<name>/issues/new")
@needs_login
def make_issue(owner: str, name: str) -> Response:
    row = _project(owner, name)
    if not words("title"):
        return go(request.path, "An issue needs a title.")
    number = g.db.execute("SELECT ifnull(max(number), 0) + 1 FROM code_items WHERE project = ? AND kind = 'issues'", (row["id"],)).fetchone()[0]
    g.db.execute("INSERT INTO code_items (project, kind, number, title, body, author, assignee, label, state, created) VALUES (?, 'issues', ?, ?, ?, ?, ?, ?, 'open', ?)",
                 (row["id"], number, words("title"), words("description", 2000), _me(), _one_of("assignee", [NOBODY, *_members(row["id"])]),
                  _one_of("label", LABELS), TODAY))
    return go(f"/{row['path']}/issues/{number}", "Your issue was made.")


@pages.get(_ITEM)
def item(owner: str, name: str, kind: str, number: int) -> Response:
    row = _project(owner, name)
    shown = _item(row["id"], kind, number)
    notes = g.db.execute("SELECT * FROM code_notes WHERE item = ? ORDER BY id", (shown["id"],)).fetchall()
    return page("code_item.html", shown["title"], project=row, item=shown, notes=notes, kind=kind, one=KINDS[kind], may=_may(row, shown),
                people=[NOBODY, *_members(row["id"])])


def _may(project: sqlite3.Row, item: sqlite3.Row) -> bool:
    """Whether the visitor may close, reopen, merge and assign: members but guests, and the author."""
    return project["role"] in ROLES[1:] or item["author"] == _me()


@pages.post(f"{_ITEM}/comment")
@needs_login
def comment(owner: str, name: str, kind: str, number: int) -> Response:
    shown = _item(_project(owner, name)["id"], kind, number)
    if not words("comment"):
        return go(f"/{owner}/{name}/{kind}/{number}", "A comment needs some text.")
    g.db.execute("INSERT INTO code_notes (item, author, body, created) VALUES (?, ?, ?, ?)", (shown["id"], _me(), words("comment", 2000), TODAY))
    return go(f"/{owner}/{name}/{kind}/{number}", "Your comment was added.")


@pages.post(f"{_ITEM}/<any(close, reopen, merge, assign):deed>")
@needs_login
def change_item(owner: str, name: str, kind: str, number: int, deed: str) -> Response:
    row = _project(owner, name)
    shown = _item(row["id"], kind, number)
    state = {"close": "closed", "reopen": "open", "merge": "merged"}.get(deed, shown["state"])
    if not _may(row, shown) or state not in STATES[kind] or (shown["state"] == "merged" and deed != "assign"):
        abort(403)
    assignee = _one_of("assignee", [NOBODY, *_members(row["id"])]) if deed == "assign" else shown["assignee"]
    g.db.execute("UPDATE code_items SET state = ?, assignee = ? WHERE id = ?", (state, assignee, shown["id"]))
    return go(f"/{owner}/{name}/{kind}/{number}", f"Assigned to {assignee}." if deed == "assign" else f"This {KINDS[kind]} is now {state}.")


# ---- people --------------------------------------------------------------------------------------------------------------------------------------

def _person(name: str) -> sqlite3.Row:
    return g.db.execute("""SELECT name, full_name, joined, email, status, token, (SELECT count(*) FROM code_follows WHERE followed = name) AS followers
                           FROM users JOIN code_profiles ON user = name WHERE site = ? AND name = ?""", (SITE.name, name)).fetchone() or abort(404)


@pages.get("/account")
@needs_login
def account() -> Response:
    return page("code_account.html", "Account", person=_person(_me()))


@pages.post("/account/status")
@needs_login
def set_status() -> Response:
    g.db.execute("UPDATE code_profiles SET status = ? WHERE user = ?", (words("status", 100), _me()))
    return go("/account", "Your status was set.")


@pages.get("/<name>")
def person(name: str) -> Response:
    row = _person(name)
    follows = g.db.execute("SELECT 1 FROM code_follows WHERE user = ? AND followed = ?", (_me(), name)).fetchone() is not None
    return page("code_person.html", row["full_name"], person=row, follows=follows,
                projects=paged("SELECT path, stars FROM code_projects WHERE owner = ? AND (visibility != 'private' OR owner = ?) ORDER BY path", (name, _me())))


@pages.post("/<name>/follow")
@needs_login
def follow(name: str) -> Response:
    _person(name)
    left = g.db.execute("DELETE FROM code_follows WHERE user = ? AND followed = ?", (_me(), name)).rowcount
    if not left:
        g.db.execute("INSERT INTO code_follows VALUES (?, ?)", (_me(), name))
    return go(f"/{name}", f"You no longer follow {name}." if left else f"You follow {name}.")
