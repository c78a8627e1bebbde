"""The code host of the own sites, after GitLab: projects, issues, merge requests, commits, members, profiles.
WebArena's name for it is `gitlab`.

There is no git behind it: a commit is a title, an author and a day. Issues and merge requests are one table
of items, with the same pages.
"""
from __future__ import annotations

import re
import sqlite3
from random import Random

from flask import Blueprint, Response, abort, g, request

from dreamgym.envs.webarena.sites.site import (
    TODAY, Members, Site, add_user, all_words, asked, chosen, day, draw_password, exists, go, insert, kept,
                                               one, page, paged,
    run, toggle, words)

SITE = Site("gitlab", "Code",
            (("Projects", "/"), ("My issues", "/issues"), ("My merge requests", "/merge-requests"),
             ("Account", "/account")), search="/search",
            account=("byteblaze", "hello1234"), login_path="/users/sign_in", login_text="Sign in",
            user_label="Username or email")
PEOPLE = {name.split()[0].lower(): name for name in (
    "Abel Stone", "Bella Reed", "Carl Wood", "Dora Field", "Eric Lake", "Fiona Hill", "Gina Moss",
                                                     "Henry Brook",
    "Iris Lane", "Jack Frost")}
FIRST = "solar paper tiny fast blue open quiet smart".split()
SECOND = "bot tool map notes chat site timer shop".split()
AUDIENCE = ("students", "teachers", "writers", "doctors", "cooks", "runners", "families", "artists")
VERBS, THINGS = ("Fix", "Add", "Remove", "Update", "Test", "Speed up"), ("login page", "search box",
                                                                         "main menu", "export", "import",
                                                                         "cache", "mobile view",
                                                                         "error text", "settings",
                                                                         "dark mode", "help text",
                                                                         "start page")
BODIES = ("It is slow on my phone.", "Users asked for this.", "See the last release.",
          "This broke last week.", "A small change would do.", "It works on one page only.")
NOTES = ("I can look at it", "Please add a test", "Works for me", "Same here", "Can we close this?",
         "Good idea", "I need more details", "Done in my branch",
         "Not before the release", "Looks good to me")
STATUSES = ("", "", "On vacation", "Busy", "In a meeting", "Working from home")
LABELS, LICENSES, VISIBILITIES = ("bug", "feature", "docs", "question"), ("MIT", "Apache 2.0", "GPL 3.0",
                                                                          "none"), ("public", "internal",
                                                                                    "private")
ROLES = ("Guest", "Reporter", "Developer", "Maintainer", "Owner")
KINDS = {"issues": "issue", "merge-requests": "merge request"}        # in addresses, in texts
STATES = {"issues": ("open", "closed"), "merge-requests": ("open", "merged", "closed")}
ANY, NOBODY = "any", "nobody"
SORTS = {"name": "path", "stars": "stars DESC, path", "updated": "updated DESC, path"}
SCHEMA = """
CREATE TABLE code_projects (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    description TEXT NOT NULL, readme TEXT NOT NULL, license TEXT NOT NULL, visibility TEXT NOT NULL, stars
    INTEGER NOT NULL, forks INTEGER NOT NULL, updated TEXT NOT NULL);
CREATE TABLE code_stars (user TEXT, project INTEGER, PRIMARY KEY (user, project));
CREATE TABLE code_members (project INTEGER, user TEXT, role TEXT NOT NULL, PRIMARY KEY (project, user));
CREATE TABLE code_items (id INTEGER PRIMARY KEY, project INTEGER NOT NULL, kind TEXT NOT NULL, number INTEGER
    NOT NULL, title TEXT NOT NULL, body TEXT NOT NULL, author TEXT NOT NULL, assignee TEXT NOT NULL, label
    TEXT NOT NULL, state TEXT NOT NULL, created TEXT NOT NULL, UNIQUE (project, kind, number));
CREATE TABLE code_notes (id INTEGER PRIMARY KEY, item INTEGER NOT NULL, author TEXT NOT NULL, body TEXT NOT
    NULL, created TEXT NOT NULL);
CREATE TABLE code_commits (id INTEGER PRIMARY KEY, project INTEGER NOT NULL, author TEXT NOT NULL, title TEXT
    NOT NULL, created TEXT NOT NULL);
CREATE TABLE code_profiles (user TEXT PRIMARY KEY, email TEXT NOT NULL, status TEXT NOT NULL, token TEXT NOT
    NULL);
CREATE TABLE code_follows (user TEXT, followed TEXT, PRIMARY KEY (user, followed));
CREATE INDEX code_notes_item ON code_notes (item);
CREATE INDEX code_commits_project ON code_commits (project);
"""

pages = Blueprint("pages", __name__)
visitors = Members(pages)


# ---- first data --------------------------------------------------------------------------------------------

def fill(db: sqlite3.Connection, rng: Random) -> None:
    """Five projects belong to the account. Stars differ from project to project, commits from contributor to
    contributor: 'the most' is always one."""
    account = SITE.account[0]
    people = [account, *PEOPLE]
    for person in people:
        password = draw_password(SITE, person, rng)
        add_user(db, SITE, person, password, PEOPLE.get(person, "Byte Blaze"), day(rng.randrange(300, 1500)))
        insert(db, "code_profiles", user=person, email=f"{person}@mail.test",
               status="" if person == account else rng.choice(STATUSES), token=f"{rng.getrandbits(40):010x}")
    names = rng.sample([(first, second) for first in FIRST for second in SECOND], 22)
    projects = []
    for i, ((first, second), stars) in enumerate(zip(names, rng.sample(range(3, 300), len(names)))):
        projects.append(_fill_project(db, rng, account if i < 5 else rng.choice(people[1:]), people,
                                      f"{first}-{second}", stars))
    db.executemany("INSERT INTO code_stars VALUES (?, ?)",
                   [(account, project) for project in rng.sample(projects[5:], 3)])
    db.executemany("INSERT INTO code_follows VALUES (?, ?)",
                   [(account, person) for person in rng.sample(people[1:], 2)])


def _fill_project(db: sqlite3.Connection, rng: Random, owner: str, people: list[str], name: str,
                  stars: int) -> int:
    what, audience = name.replace("-", " "), rng.choice(AUDIENCE)
    team = [owner, *rng.sample([person for person in people if person != owner], rng.randint(2, 5))]
    project = insert(db, "code_projects", path=f"{owner}/{name}", owner=owner,
                     description=f"A {what} for {audience}",
                     readme=f"Run make {name} to build the {what}. Ask {team[-1]} for help.",
                     license=rng.choice(LICENSES),
                     visibility=rng.choice(VISIBILITIES[:2]), stars=stars, forks=rng.randrange(20),
                     updated=day(rng.randrange(1, 40)))
    for person in team:
        insert(db, "code_members", project=project, user=person,
               role="Owner" if person == owner else rng.choice(ROLES[:4]))
    for kind, states in STATES.items():
        titles = rng.sample([f"{verb} {thing}" for verb in VERBS for thing in THINGS],
                            rng.randint(5, 14) if kind == "issues" else rng.randint(3, 6))
        for number, title in enumerate(titles, 1):
            age = (len(titles) - number) * 9 + rng.randrange(1, 9)
            item = insert(db, "code_items", project=project, kind=kind, number=number, title=title,
                          body=rng.choice(BODIES),
                          author=rng.choice(people), assignee=rng.choice([NOBODY, *team]),
                          label=rng.choice(LABELS),
                          state=rng.choice(("open", *states)), created=day(age))
            notes, days = rng.sample(NOTES, rng.randint(0, 3)), sorted(day(rng.randrange(age))
                                                                       for _ in range(4))
            for note, created in zip(notes, days):
                insert(db, "code_notes", item=item, author=rng.choice(people), body=note, created=created)
    _fill_commits(db, rng, project, team[:rng.randint(2, 4)])
    return project


def _fill_commits(db: sqlite3.Connection, rng: Random, project: int, contributors: list[str]) -> None:
    counts = rng.sample(range(2, 15), len(contributors))
    authors = [person for person, commits in zip(contributors, counts) for _ in range(commits)]
    rng.shuffle(authors)
    for i, author in enumerate(authors):
        insert(db, "code_commits", project=project, author=author,
               title=f"{rng.choice(VERBS)} {rng.choice(THINGS)}",
               created=day((len(authors) - i) * 3))


# ---- who may do what ---------------------------------------------------------------------------------------

def _project(owner: str, name: str) -> sqlite3.Row:
    """A project with the visitor's `role` in it ("" for none). 404 for a private one of others."""
    row = one("SELECT code_projects.*, ifnull(role, '') AS role FROM code_projects LEFT JOIN code_members "
              "ON project = id AND user = ? WHERE path = ?", _me(), f"{owner}/{name}")
    return row if row["role"] or row["visibility"] != "private" else abort(404)


def _led(owner: str, name: str) -> sqlite3.Row:
    """A project that the visitor leads, and so may change settings and members of."""
    project = _project(owner, name)
    return project if project["role"] in ROLES[3:] else abort(403)


def _me() -> str:
    return g.user["name"] if g.user is not None else ""


def _people(project: sqlite3.Row) -> list[str]:
    """Whom an issue of a project can be assigned to."""
    members = run("SELECT user FROM code_members WHERE project = ? ORDER BY user", project["id"])
    return [NOBODY, *(row["user"] for row in members)]


# ---- lists of projects -------------------------------------------------------------------------------------

def _projects(title: str, where: str, arguments: tuple = (), **query: str) -> Response:
    sort = chosen("sort", SORTS, "name")
    seen = f"(visibility != 'private' OR id IN (SELECT project FROM code_members WHERE user = ?)) AND {where}"
    projects = paged(f"SELECT path, stars FROM code_projects WHERE {seen} ORDER BY {SORTS[sort]}",
                     (_me(), *arguments))
    return page("code_projects.html", title, projects=projects, sort=sort, sorts=SORTS, q=query.get("q", ""),
                address=kept(**query, sort=sort))


@pages.get("/")
def home() -> Response:
    return _projects("Your projects", "owner = ?", (_me(),)) if g.user is not None else everything()


@pages.get("/explore")
def everything() -> Response:
    return _projects("All projects", "1")


@visitors.get("/starred")
def starred() -> Response:
    return _projects("Starred projects", "id IN (SELECT project FROM code_stars WHERE user = ?)", (_me(),))


@pages.get("/search")
def search() -> Response:
    q = asked("q")
    found = all_words("lower(path || ' ' || description)", q, none="0")
    return _projects(f"Search {q}".strip(), found, tuple(q.lower().split()), q=q)


@visitors.get("/projects/new")
def new_project() -> Response:
    return page("code_new.html", "New project", visibilities=VISIBILITIES)


@visitors.post("/projects/new")
def make_project() -> Response:
    name = words("name", 40).lower().replace(" ", "-")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        return go("/projects/new", "A project needs a name of letters, digits and dashes.")
    readme, visibility = words("readme", 2000), _one_of("visibility", VISIBILITIES)
    if not _insert_project(name, words("description"), readme, "none", visibility):
        return go("/projects/new", f"You have a project {name} already.")
    return go(f"/{_me()}/{name}", "Your project was made.")


def _insert_project(name: str, description: str, readme: str, license: str, visibility: str) -> bool:
    """Adds a project of the visitor; False when there is one of that name already."""
    path = f"{_me()}/{name}"
    if exists("SELECT 1 FROM code_projects WHERE path = ?", path):
        return False
    project = insert(g.db, "code_projects", path=path, owner=_me(), description=description, readme=readme,
                     license=license,
                     visibility=visibility, stars=0, forks=0, updated=TODAY)
    insert(g.db, "code_members", project=project, user=_me(), role="Owner")
    return True


def _one_of(field: str, options: tuple[str, ...] | list[str]) -> str:
    return value if (value := words(field)) in options else abort(400)


# ---- one project -------------------------------------------------------------------------------------------

@pages.get("/<owner>/<name>")
def project(owner: str, name: str) -> Response:
    row = _project(owner, name)
    starred = exists("SELECT 1 FROM code_stars WHERE user = ? AND project = ?", _me(), row["id"])
    return page("code_project.html", row["path"], project=row, starred=starred)


@visitors.post("/<owner>/<name>/star")
def star(owner: str, name: str) -> Response:
    row = _project(owner, name)
    added = toggle("code_stars", user=_me(), project=row["id"])
    run("UPDATE code_projects SET stars = stars + ? WHERE id = ?", 1 if added else -1, row["id"])
    return go(f"/{row['path']}", "You starred this project." if added else "You took your star back.")


@visitors.post("/<owner>/<name>/fork")
def fork(owner: str, name: str) -> Response:
    row = _project(owner, name)
    if not _insert_project(name, row["description"], row["readme"], row["license"], row["visibility"]):
        return go(f"/{row['path']}", f"You have a project {name} already.")
    run("UPDATE code_projects SET forks = forks + 1 WHERE id = ?", row["id"])
    return go(f"/{_me()}/{name}", "The project was forked.")


@pages.get("/<owner>/<name>/readme")
def readme(owner: str, name: str) -> Response:
    return page("code_readme.html", "README", project=_project(owner, name))


@pages.get("/<owner>/<name>/commits")
def commits(owner: str, name: str) -> Response:
    row, author = _project(owner, name), request.args.get("author", ANY)
    authors = run("SELECT DISTINCT author FROM code_commits WHERE project = ? ORDER BY author", row["id"])
    found = paged("SELECT * FROM code_commits WHERE project = ? AND ? IN (author, 'any') ORDER BY id DESC",
                  (row["id"], author))
    return page("code_commits.html", "Commits", project=row, commits=found, author=author,
                authors=[ANY, *(r["author"] for r in authors)], address=kept(author=author))


@pages.get("/<owner>/<name>/contributors")
def contributors(owner: str, name: str) -> Response:
    row = _project(owner, name)
    found = paged("SELECT author, count(*) AS commits FROM code_commits WHERE project = ? GROUP BY author "
                  "ORDER BY commits DESC, author", (row["id"],))
    return page("code_contributors.html", "Contributors", project=row, contributors=found,
                most=found.rows[0]["commits"] if found.rows else 1)


@pages.get("/<owner>/<name>/members")
def members(owner: str, name: str) -> Response:
    row = _project(owner, name)
    return page("code_members.html", "Members", project=row, roles=ROLES[:4], leads=row["role"] in ROLES[3:],
                members=paged("SELECT user, role FROM code_members WHERE project = ? ORDER BY user",
                              (row["id"],)))


@visitors.post("/<owner>/<name>/members")
def invite(owner: str, name: str) -> Response:
    row, person, role = _led(owner, name), words("username"), _one_of("role", ROLES[:4])
    if not exists("SELECT 1 FROM users WHERE site = ? AND name = ?", SITE.name, person):
        return go(request.path, f"There is no user {person}." if person else "A user name is needed.")
    if person == row["owner"]:
        return go(request.path, f"{person} owns this project.")
    run("INSERT OR REPLACE INTO code_members VALUES (?, ?, ?)", row["id"], person, role)
    return go(request.path, f"{person} is now {role}.")


@visitors.get("/<owner>/<name>/settings")
def settings(owner: str, name: str) -> Response:
    return page("code_settings.html", "Settings", project=_led(owner, name), licenses=LICENSES,
                visibilities=VISIBILITIES)


@visitors.post("/<owner>/<name>/settings")
def save_settings(owner: str, name: str) -> Response:
    row = _led(owner, name)
    texts = words("description"), words("readme", 2000), _one_of("license", LICENSES), _one_of("visibility",
                                                                                               VISIBILITIES)
    run("UPDATE code_projects SET description = ?, readme = ?, license = ?, visibility = ?, updated = ? "
        "WHERE id = ?",
        *texts, TODAY, row["id"])
    return go(f"/{row['path']}", "The settings were saved.")


# ---- issues and merge requests -----------------------------------------------------------------------------

_KIND = "<any('issues', 'merge-requests'):kind>"
_ITEM = f"/<owner>/<name>/{_KIND}/<int(max=999999):number>"


def _item(project: int, kind: str, number: int) -> sqlite3.Row:
    return one("SELECT * FROM code_items WHERE project = ? AND kind = ? AND number = ?", project, kind,
               number)


def _items(title: str, kind: str, where: str, arguments: tuple, project: sqlite3.Row | None,
           **query: str) -> Response:
    """Issues or merge requests, newest first, of the state and label that were asked for."""
    state, label = request.args.get("state", "open"), request.args.get("label", ANY)
    found = paged("SELECT number, title, state, label, path FROM code_items JOIN code_projects "
                  "ON code_projects.id = project WHERE kind = ? AND ? IN (state, 'any') AND ? IN (label, "
                  "'any') "
                  f"AND {where} ORDER BY created DESC, code_items.id DESC", (kind, state, label, *arguments))
    return page("code_items.html", title, kind=kind, one=KINDS[kind], items=found, project=project,
                state=state, states=(*STATES[kind], ANY), label=label,
                labels=(ANY, *LABELS), by=query.get("by"), address=kept(**query, state=state, label=label))


@pages.get("/issues", defaults={"kind": "issues"})
@visitors.get("/merge-requests", defaults={"kind": "merge-requests"})
def my_items(kind: str) -> Response:
    by = "author" if request.args.get("by") == "author" else "assignee"
    return _items(f"My {KINDS[kind]}s", kind, f"{by} = ?", (_me(),), None, by=by)


@pages.get(f"/<owner>/<name>/{_KIND}")
def items(owner: str, name: str, kind: str) -> Response:
    row = _project(owner, name)
    return _items(f"{KINDS[kind]}s".capitalize(), kind, "project = ?", (row["id"],), row)


@visitors.get("/<owner>/<name>/issues/new")
def new_issue(owner: str, name: str) -> Response:
    row = _project(owner, name)
    return page("code_new_issue.html", "New issue", project=row, people=_people(row), labels=LABELS)


@visitors.post("/<owner>/<name>/issues/new")
def make_issue(owner: str, name: str) -> Response:
    row = _project(owner, name)
    if not words("title"):
        return go(request.path, "An issue needs a title.")
    last = one("SELECT ifnull(max(number), 0) AS number FROM code_items WHERE project = ? AND kind = "
               "'issues'", row["id"])
    number = last["number"] + 1
    insert(g.db, "code_items", project=row["id"], kind="issues", number=number, title=words("title"),
           body=words("description", 2000), author=_me(), assignee=_one_of("assignee", _people(row)),
           label=_one_of("label", LABELS), state="open", created=TODAY)
    return go(f"/{row['path']}/issues/{number}", "Your issue was made.")


@pages.get(_ITEM)
def item(owner: str, name: str, kind: str, number: int) -> Response:
    row = _project(owner, name)
    shown = _item(row["id"], kind, number)
    notes = run("SELECT * FROM code_notes WHERE item = ? ORDER BY id", shown["id"]).fetchall()
    return page("code_item.html", shown["title"], project=row, item=shown, notes=notes, kind=kind,
                one=KINDS[kind], may=_may(row, shown),
                people=_people(row))


def _may(project: sqlite3.Row, item: sqlite3.Row) -> bool:
    """Whether the visitor may close, reopen, merge and assign: members but guests, and the author."""
    return project["role"] in ROLES[1:] or item["author"] == _me()


@visitors.post(f"{_ITEM}/comment")
def comment(owner: str, name: str, kind: str, number: int) -> Response:
    shown = _item(_project(owner, name)["id"], kind, number)
    if not words("comment"):
        return go(f"/{owner}/{name}/{kind}/{number}", "A comment needs some text.")
    insert(g.db, "code_notes", item=shown["id"], author=_me(), body=words("comment", 2000), created=TODAY)
    return go(f"/{owner}/{name}/{kind}/{number}", "Your comment was added.")


@visitors.post(f"{_ITEM}/<any(close, reopen, merge, assign):deed>")
def change_item(owner: str, name: str, kind: str, number: int, deed: str) -> Response:
    row = _project(owner, name)
    shown = _item(row["id"], kind, number)
    state = {"close": "closed", "reopen": "open", "merge": "merged"}.get(deed, shown["state"])
    if not _may(row, shown) or state not in STATES[kind] or (shown["state"] == "merged" and deed != "assign"):
        abort(403)
    assignee = _one_of("assignee", _people(row)) if deed == "assign" else shown["assignee"]
    run("UPDATE code_items SET state = ?, assignee = ? WHERE id = ?", state, assignee, shown["id"])
    said = f"Assigned to {assignee}." if deed == "assign" else f"This {KINDS[kind]} is now {state}."
    return go(f"/{owner}/{name}/{kind}/{number}", said)


# ---- people ------------------------------------------------------------------------------------------------

def _person(name: str) -> sqlite3.Row:
    return one("SELECT name, full_name, joined, email, status, token, "
               "(SELECT count(*) FROM code_follows WHERE followed = name) AS followers "
               "FROM users JOIN code_profiles ON user = name WHERE site = ? AND name = ?", SITE.name, name)


@visitors.get("/account")
def account() -> Response:
    return page("code_account.html", "Account", person=_person(_me()))


@visitors.post("/account/status")
def set_status() -> Response:
    run("UPDATE code_profiles SET status = ? WHERE user = ?", words("status", 100), _me())
    return go("/account", "Your status was set.")


@pages.get("/<name>")
def person(name: str) -> Response:
    row = _person(name)
    follows = exists("SELECT 1 FROM code_follows WHERE user = ? AND followed = ?", _me(), name)
    return page("code_person.html", row["full_name"], person=row, follows=follows,
                projects=paged("SELECT path, stars FROM code_projects WHERE owner = ? "
                               "AND (visibility != 'private' OR owner = ?) ORDER BY path", (name, _me())))


@visitors.post("/<name>/follow")
def follow(name: str) -> Response:
    _person(name)
    followed = toggle("code_follows", user=_me(), followed=name)
    return go(f"/{name}", f"You follow {name}." if followed else f"You no longer follow {name}.")
