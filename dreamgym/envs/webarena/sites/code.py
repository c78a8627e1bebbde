"""The code host of the own sites, after GitLab: projects, issues, merge requests, commits, members, profiles.
WebArena's name for it is `gitlab`.

A commit is a title, an author and a day. Issues and merge requests are one table of items.
"""
import re
import sqlite3
from random import Random
from typing import Any

from flask import abort, g, request

from dreamgym.envs.webarena.sites.site import (
    PEOPLE, TODAY, WORDS, Site, all_words, asked, chosen, day, go, insert, of_split, one, page,
    paged, rows, run, toggle, words)

SITE = Site("gitlab", "Code", {"Projects": "/", "My issues": "/issues",
                               "My merge requests": "/merge-requests", "Account": "/account"}, "/search")
NAMES = WORDS["code"]
LABELS = ("bug", "feature", "docs", "question")
LICENSES = ("MIT", "Apache 2.0", "GPL 3.0", "none")
VISIBILITIES = ("public", "internal", "private")
ROLES = ("Guest", "Reporter", "Developer", "Maintainer", "Owner")
LEADS = ROLES[3:]                                # may change settings and members of a project
KINDS = {"issues": "issue", "merge-requests": "merge request"}        # in addresses, in texts
STATES = {"issues": ("open", "closed"), "merge-requests": ("open", "merged", "closed")}
NOBODY = "nobody"
SORTS = {"name": "path", "stars": "stars DESC, path", "updated": "updated DESC, path"}


# ---- first data

def fill(db: sqlite3.Connection, rng: Random, split: str) -> None:
    """Five projects belong to the account. Stars and commits differ: 'the most' is always one."""
    account = SITE.account[0]
    people = [account, *rng.sample(of_split(map(str.lower, PEOPLE.first), split), 10)]
    for person in people:
        full_name = "Byte Blaze" if person == account else f"{person.capitalize()} {rng.choice(PEOPLE.last)}"
        SITE.add_user(db, person, rng, full_name, range(300, 1500))
        insert(db, "code_profiles", user=person, email=f"{person}@mail.test",
               status="" if person == account else rng.choice(NAMES.statuses),
               token=f"{rng.getrandbits(40):010x}")
    both = [f"{first}-{second}" for first in NAMES.first for second in NAMES.second]
    names = rng.sample(of_split(both, split), 22)
    titles = of_split([f"{verb} {thing}" for verb in NAMES.verbs for thing in NAMES.things], split)
    projects = [_fill_project(db, rng, account if i < 5 else rng.choice(people[1:]), people, titles, name,
                              stars)
                for i, (name, stars) in enumerate(zip(names, rng.sample(range(3, 300), len(names))))]
    for project in rng.sample(projects[5:], 3):
        insert(db, "code_stars", user=account, project=project)
    for person in rng.sample(people[1:], 2):
        insert(db, "code_follows", user=account, followed=person)


def _fill_project(db: sqlite3.Connection, rng: Random, owner: str, people: list[str], titles: list[str],
                  name: str, stars: int) -> int:
    what, audience = name.replace("-", " "), rng.choice(NAMES.audience)
    team = [owner, *rng.sample([person for person in people if person != owner], rng.randint(2, 5))]
    project = insert(db, "code_projects", path=f"{owner}/{name}", owner=owner,
                     description=f"A {what} for {audience}",
                     readme=f"Run make {name} to build the {what}. Ask {team[-1]} for help.",
                     license=rng.choice(LICENSES), visibility=rng.choice(VISIBILITIES[:2]), stars=stars,
                     forks=rng.randrange(20), updated=day(rng.randrange(1, 40)))
    for person in team:
        insert(db, "code_members", project=project, user=person,
               role="Owner" if person == owner else rng.choice(ROLES[:4]))
    for kind, states in STATES.items():
        drawn = rng.sample(titles, rng.randint(5, 14) if kind == "issues" else rng.randint(3, 6))
        for number, title in enumerate(drawn, 1):
            age = (len(drawn) - number) * 9 + rng.randrange(1, 9)
            item = insert(db, "code_items", project=project, kind=kind, number=number, title=title,
                          body=rng.choice(NAMES.bodies), author=rng.choice(people),
                          assignee=rng.choice([NOBODY, *team]), label=rng.choice(LABELS),
                          state=rng.choice(("open", *states)), created=day(age))
            notes = rng.sample(NAMES.notes, rng.randint(0, 3))
            for note, created in zip(notes, sorted(day(rng.randrange(age)) for _ in range(4))):
                insert(db, "code_notes", item=item, author=rng.choice(people), body=note, created=created)
    contributors = team[:rng.randint(2, 4)]
    counts = rng.sample(range(2, 15), len(contributors))
    authors = [person for person, commits in zip(contributors, counts) for _ in range(commits)]
    rng.shuffle(authors)
    for i, author in enumerate(authors):
        insert(db, "code_commits", project=project, author=author,
               title=f"{rng.choice(NAMES.verbs)} {rng.choice(NAMES.things)}",
               created=day((len(authors) - i) * 3))
    return project


# ---- what a route names

def _project(name: str, loaded: dict) -> sqlite3.Row:
    """A project with the visitor's `role` in it ("" for none). 404 for a private one of others."""
    row = one("SELECT code_projects.*, ifnull(role, '') AS role FROM code_projects LEFT JOIN code_members "
              "ON project = id AND user = ? WHERE path = ?", g.name, f"{loaded.pop('owner')}/{name}")
    return row if row["role"] or row["visibility"] != "private" else abort(404)


def _led(name: str, loaded: dict) -> sqlite3.Row:
    project = _project(name, loaded)
    return project if project["role"] in LEADS else abort(403)


def _item(number: int, loaded: dict) -> sqlite3.Row:
    return one("SELECT * FROM code_items WHERE project = ? AND kind = ? AND number = ?",
               loaded["project"]["id"], loaded.pop("kind"), number)


def _person(name: str, _: dict | None = None) -> sqlite3.Row:
    return one("SELECT name, full_name, joined, email, status, token, "
               "(SELECT count(*) FROM code_follows WHERE followed = name) AS followers "
               "FROM users JOIN code_profiles ON user = name WHERE site = ? AND name = ?", SITE.name, name)


SITE.loaders |= {"project": _project, "led": _led, "item": _item, "person": _person}
PROJECT, LED = "/<owner>/<project>", "/<owner>/<led>"
KIND = f"{PROJECT}/<any('issues', 'merge-requests'):kind>"
ITEM = f"{KIND}/<int(max=999999):item>"


def _path(project: sqlite3.Row, item: sqlite3.Row | None = None) -> str:
    return f"/{project['path']}" + (f"/{item['kind']}/{item['number']}" if item else "")


def _people(project: sqlite3.Row) -> list[str]:
    """Whom an issue can be assigned to."""
    members = rows("SELECT user FROM code_members WHERE project = ? ORDER BY user", project["id"])
    return [NOBODY, *(row["user"] for row in members)]


def _one_of(field: str, options: tuple[str, ...] | list[str]) -> str:
    return value if (value := words(field)) in options else abort(400)


# ---- lists of projects

def _projects(title: str, where: str, *arguments: str):
    sort = chosen("sort", SORTS, "Sort by")
    found = paged("SELECT path, stars FROM code_projects WHERE (visibility != 'private' OR id IN (SELECT "
                  f"project FROM code_members WHERE user = ?)) AND {where} ORDER BY {SORTS[sort]}", g.name,
                  *arguments)
    return page(title, "projects", projects=found)


@SITE.get("/")
def home():
    return _projects("Your projects", "owner = ?", g.name) if g.user else everything()


@SITE.get("/explore")
def everything():
    return _projects("All projects", "1")


@SITE.get("/starred", member=True)
def starred():
    return _projects("Starred projects", "id IN (SELECT project FROM code_stars WHERE user = ?)", g.name)


@SITE.get("/search")
def search():
    q = asked("q")
    text = "lower(path || ' ' || description)"
    return _projects(f"Search {q}".strip(), *all_words(text, q.lower().split()))


@SITE.get("/projects/new", member=True)
def new_project():
    return page("New project", visibilities=VISIBILITIES)


@SITE.post("/projects/new")
def make_project():
    name = words("name", 40).lower().replace(" ", "-")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        return go("A project needs a name of letters, digits and dashes.")
    texts = {"description": words("description"), "readme": words("readme", 2000), "license": "none",
             "visibility": _one_of("visibility", VISIBILITIES)}
    if not _insert_project(name, texts):
        return go(f"You have a project {name} already.")
    return go("Your project was made.", f"/{g.name}/{name}")


def _insert_project(name: str, texts: dict[str, str] | sqlite3.Row) -> bool:
    """Adds a project of the visitor; False when there is one of that name already."""
    path = f"{g.name}/{name}"
    if rows("SELECT 1 FROM code_projects WHERE path = ?", path):
        return False
    texts = {key: texts[key] for key in ("description", "readme", "license", "visibility")}
    project = insert(g.db, "code_projects", path=path, owner=g.name, stars=0, forks=0, updated=TODAY, **texts)
    insert(g.db, "code_members", project=project, user=g.name, role="Owner")
    return True


# ---- one project

@SITE.get(PROJECT)
def project(project):
    starred = rows("SELECT 1 FROM code_stars WHERE user = ? AND project = ?", g.name, project["id"])
    return page(project["path"], project=project, starred=starred)


@SITE.post(f"{PROJECT}/star")
def star(project):
    added = toggle("code_stars", user=g.name, project=project["id"])
    run("UPDATE code_projects SET stars = stars + ? WHERE id = ?", 1 if added else -1, project["id"])
    return go("You starred this project." if added else "You took your star back.", _path(project))


@SITE.post(f"{PROJECT}/fork")
def fork(project):
    name = project["path"].split("/")[1]
    if not _insert_project(name, project):
        return go(f"You have a project {name} already.", _path(project))
    run("UPDATE code_projects SET forks = forks + 1 WHERE id = ?", project["id"])
    return go("The project was forked.", f"/{g.name}/{name}")


@SITE.get(f"{PROJECT}/readme")
def readme(project):
    return page("README", project=project)


@SITE.get(f"{PROJECT}/commits")
def commits(project):
    authors = rows("SELECT DISTINCT author FROM code_commits WHERE project = ? ORDER BY 1", project["id"])
    author = chosen("author", ["any", *(row["author"] for row in authors)], strict=False)
    found = paged("SELECT * FROM code_commits WHERE project = ? AND ? IN (author, 'any') ORDER BY id DESC",
                  project["id"], author)
    return page("Commits", heading=f"Commits {found.total}", project=project, commits=found)


@SITE.get(f"{PROJECT}/contributors")
def contributors(project):
    found = paged("SELECT author, count(*) AS commits FROM code_commits WHERE project = ? GROUP BY author "
                  "ORDER BY commits DESC, author", project["id"])
    return page("Contributors", project=project, contributors=found)


@SITE.get(f"{PROJECT}/members")
def members(project):
    found = paged("SELECT user, role FROM code_members WHERE project = ? ORDER BY user", project["id"])
    return page("Members", project=project, roles=ROLES[:4], members=found)


@SITE.post(f"{LED}/members")
def invite(led):
    person, role = words("username"), _one_of("role", ROLES[:4])
    if not rows("SELECT 1 FROM users WHERE site = ? AND name = ?", SITE.name, person):
        return go(f"There is no user {person}." if person else "A user name is needed.")
    if person == led["owner"]:
        return go(f"{person} owns this project.")
    run("INSERT OR REPLACE INTO code_members VALUES (?, ?, ?)", led["id"], person, role)
    return go(f"{person} is now {role}.")


@SITE.get(f"{LED}/settings", member=True)
def settings(led):
    return page("Settings", project=led, licenses=LICENSES, visibilities=VISIBILITIES)


@SITE.post(f"{LED}/settings")
def save_settings(led):
    run("UPDATE code_projects SET description = ?, readme = ?, license = ?, visibility = ?, updated = ? "
        "WHERE id = ?", words("description"), words("readme", 2000), _one_of("license", LICENSES),
        _one_of("visibility", VISIBILITIES), TODAY, led["id"])
    return go("The settings were saved.", _path(led))


# ---- issues and merge requests

def _items(title: str, kind: str, where: str, argument: Any, project: sqlite3.Row | None = None):
    state = chosen("state", (*STATES[kind], "any"), strict=False)
    label = chosen("label", ("any", *LABELS), strict=False)
    found = paged("SELECT number, title, state, label, path FROM code_items JOIN code_projects "
                  "ON code_projects.id = project WHERE kind = ? AND ? IN (state, 'any') AND "
                  f"? IN (label, 'any') AND {where} = ? ORDER BY created DESC, code_items.id DESC",
                  kind, state, label, argument)
    return page(title, "items", heading=f"{title} {found.total}", kind=kind, items=found, project=project)


@SITE.get("/issues", "/merge-requests", member=True)
def my_items():
    kind = request.path[1:]
    return _items(f"My {KINDS[kind]}s", kind, chosen("by", ("assignee", "author"), "I am"), g.name)


@SITE.get(KIND)
def items(project, kind):
    return _items(f"{KINDS[kind]}s".capitalize(), kind, "project", project["id"], project)


@SITE.get(f"{PROJECT}/issues/new", member=True)
def new_issue(project):
    return page("New issue", project=project, people=_people(project), labels=LABELS)


@SITE.post(f"{PROJECT}/issues/new")
def make_issue(project):
    if not words("title"):
        return go("An issue needs a title.")
    number = one("SELECT ifnull(max(number), 0) + 1 FROM code_items WHERE project = ? AND kind = 'issues'",
                 project["id"])[0]
    insert(g.db, "code_items", project=project["id"], kind="issues", number=number, title=words("title"),
           body=words("description", 2000), author=g.name, assignee=_one_of("assignee", _people(project)),
           label=_one_of("label", LABELS), state="open", created=TODAY)
    return go("Your issue was made.", f"/{project['path']}/issues/{number}")


@SITE.get(ITEM)
def item(project, item):
    notes = rows("SELECT * FROM code_notes WHERE item = ? ORDER BY id", item["id"])
    return page(item["title"], project=project, item=item, notes=notes, may=_may(project, item),
                people=_people(project))


def _may(project: sqlite3.Row, item: sqlite3.Row) -> bool:
    """Whether the visitor may close, reopen, merge and assign: members but guests, and the author."""
    return project["role"] in ROLES[1:] or item["author"] == g.name


@SITE.post(f"{ITEM}/comment")
def comment(project, item):
    if not words("comment"):
        return go("A comment needs some text.", _path(project, item))
    insert(g.db, "code_notes", item=item["id"], author=g.name, body=words("comment", 2000), created=TODAY)
    return go("Your comment was added.", _path(project, item))


@SITE.post(f"{ITEM}/<any(close, reopen, merge, assign):deed>")
def change_item(project, item, deed):
    kind, assignee = item["kind"], item["assignee"]
    state = {"close": "closed", "reopen": "open", "merge": "merged"}.get(deed, item["state"])
    before = {"assign": STATES[kind], "merge": ("open",)}.get(deed, ("open", "closed"))
    if item["state"] not in before or state not in STATES[kind] or not _may(project, item):
        abort(403)
    if deed == "assign":
        assignee = _one_of("assignee", _people(project))
    run("UPDATE code_items SET state = ?, assignee = ? WHERE id = ?", state, assignee, item["id"])
    said = f"Assigned to {assignee}." if deed == "assign" else f"This {KINDS[kind]} is now {state}."
    return go(said, _path(project, item))


# ---- people

@SITE.get("/account", member=True)
def account():
    person = _person(g.name)
    return page("Account", heading=person["full_name"], person=person)


@SITE.post("/account/status")
def set_status():
    run("UPDATE code_profiles SET status = ? WHERE user = ?", words("status", 100), g.name)
    return go("Your status was set.", "/account")


@SITE.get("/<person>")
def person(person):
    follows = rows("SELECT 1 FROM code_follows WHERE user = ? AND followed = ?", g.name, person["name"])
    projects = paged("SELECT path, stars FROM code_projects WHERE owner = ? AND (visibility != 'private' "
                     "OR owner = ?) ORDER BY path", person["name"], g.name)
    return page(person["full_name"], person=person, follows=follows, projects=projects)


@SITE.post("/<person>/follow")
def follow(person):
    name = person["name"]
    followed = toggle("code_follows", user=g.name, followed=name)
    return go(f"You follow {name}." if followed else f"You no longer follow {name}.", f"/{name}")
