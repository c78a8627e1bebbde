"""WebArena as an environment: the contract, refusals, evaluation at stop, isolation, and the same through a
real browser and as a user's sites."""
import json
from contextlib import closing, contextmanager
from copy import copy

import numpy as np
import pytest

from dreamgym.envs.base import make_env
from dreamgym.envs.webarena import env as module, live
from dreamgym.envs.webarena.env import LiveSites, OwnSites, WebArena, official_tasks
from dreamgym.envs.webarena.page import STOPPED
from dreamgym.envs.webarena.sites import SiteDatabase
from dreamgym.episode import StopReason
from tests.conftest import a_task, http_server


@pytest.fixture(scope="module")
def env():
    env = WebArena()
    yield env
    env.close()


def play(env, task, actions):
    (session,) = env.reset([task])
    results = [env.step([session], [action])[0] for action in actions]
    env.end([session])
    return results


def draft_task(**html):
    """A task whose form is filled in and not sent, as WebArena has them."""
    target = {"url": "last", "locator": "document.querySelector('[name=\"message\"').value",
              "required_contents": html}
    config = {"sites": ["shopping"], "task_id": 1, "start_url": "__SHOPPING__/contact", "intent": "Draft it.",
              "intent_template_id": 1, "eval": {"eval_types": ["program_html"], "program_html": [target]}}
    return a_task("Draft it.", env="webarena", goal={"config": config, "database": "test 0"})


TYPED = "type [{}] [A refund, please.] [0]"


def test_a_draft_is_scored_on_the_page_that_the_agent_is_on(env):
    """Stops tasks of unsent forms from never being won: 37 of WebArena's 812."""
    for actions, reward in (([TYPED, "stop []"], 1), (["stop []"], 0),
                            ([TYPED, "go_back", "goto [shopping/contact]", "stop []"], 0)):
        (session,) = env.reset([draft_task(must_include=["refund"])])
        field, database = number(session.state, "textbox 'Message'"), session.inner.sites.db
        assert [env.step([session], [action.format(field)])[0] for action in actions][-1].reward == reward
        assert not database.execute("SELECT * FROM shop_messages").fetchall()
        env.end([session])
    nowhere = play(env, draft_task(must_include=["refund"]), ["new_tab", "stop []"])[-1]
    assert nowhere.done and nowhere.reward == 0 and nowhere.stop != StopReason.NOT_JUDGED


@pytest.mark.parametrize("action", [
    *(f"press [{key}]" for key in ("Backspace", "ArrowDown", "Tab", "a", "Control+Enter", "Shift+Escape")),
    "click [1]", "I would like to shop"])
def test_what_own_sites_do_not_know_changes_nothing(env, action):
    """Stops keys that only a real browser knows from changing its pages alone."""
    task = env.tasks("train")[0]
    typed, pressed, sent = play(env, task, [
        f"type [{number(task.start, 'searchbox ')}] [lamp] [0]", action, "press [enter]"])
    assert (pressed.state, pressed.done, pressed.reward) == (typed.state, False, 0.0)
    assert sent.state != typed.state


def number(state, line):
    return next(i for i, row in enumerate(state.split("\n"), 1) if row.startswith(line))


def test_the_same_class_for_every_name_and_option():
    """Options that are lost, data of another seed that pass for the same."""
    env = make_env("webarena", seed=8, options=["backend=direct"])
    assert env.describe() == {"env": "webarena", "state_form": 4, "data": "own sites", "seed": 8, "databases": 70}
    assert env.describe() != WebArena().describe() and env.numbered_lines and env.label == "own sites"


def test_stop_is_evaluated_and_ends_the_episode(env):
    """A reward for any answer, and a state after the end that could be acted on."""
    task = next(task for task in env.tasks("train") if task.text.startswith("What is the price of")
                and task.goal["parameters"]["answer"] != "N/A")
    product, price = task.goal["parameters"]["product"], task.goal["parameters"]["answer"]
    search = f"type [{number(task.start, 'searchbox ')}] [{product}] [1]"
    for answer, reward in ((price, 1.0), ("$1234567", 0.0), ("", 0.0)):
        searched, stopped = play(env, task, [search, f"stop [{answer}]"])
        assert product in searched.state
        assert (stopped.reward, stopped.done, stopped.state) == (reward, True, STOPPED)
        assert stopped.stop != StopReason.NOT_JUDGED


def test_episodes_do_not_see_each_other(env):
    task = next(task for task in env.tasks("train") if task.goal["config"]["sites"] == ["shopping"])
    one, two = env.reset([task, task])
    product = one.state.partition("heading 'Featured'")[2].split("link '")[1].split("'")[0]
    env.step([one], [f"click [{number(one.state, f'link {product!r}')}]"])
    (added,) = env.step([one], [f"click [{number(one.state, 'button ' + repr('Add to Cart'))}]"])
    assert "You added" in added.state
    (cart,) = env.step([two], ["goto [shopping/cart]"])
    assert product not in cart.state
    env.end([one, two])
    (cart,) = play(env, task, ["goto [shopping/cart]"])
    assert product not in cart.state


def test_an_episode_plays_on_the_database_of_its_task(env):
    """A database of another split, a task that begins elsewhere than in a dream."""
    every = [[task] for split in ("train", "valid", "test") for task in env.tasks(split)[::25]]
    tasks = {task.goal["database"]: task for split in ("test", "train") for task in env.tasks(split)}
    for some in (*every, [tasks["test 1"]], [tasks["train 3"], tasks["test 1"]], [tasks["train 3"]],
                 [tasks["test 1"]]):
        sessions = env.reset(some)
        assert [session.inner.sites.name for session in sessions] == [task.goal["database"] for task in some]
        assert [session.state for session in sessions] == [task.start for task in some]
        env.end(sessions)


def test_episodes_cut_short_give_their_sites_back(env):
    task = env.tasks("train")[0]
    env.end(env.reset([task] * 2))
    free = len(env.sites.free)
    for _ in range(3):
        sessions = env.reset([task] * 2)
        env.step(sessions, ["go_back", "stop [done]"])         # one is cut short, one ends by itself
        env.end(sessions)
        env.end(sessions)                                      # giving back twice gives back once
        assert len(env.sites.free) == len({id(stage) for stage in env.sites.free}) == free


def test_scoring_is_selected_by_an_option_and_named(env):
    """Stops numbers by Lite's rules from passing for WebArena's."""
    lite = make_env("webarena", options=["scoring=lite"])
    assert lite.label == "own sites, Lite's scoring" and lite.describe() == env.describe()
    for world, reward in ((env, 1), (lite, 0)):
        (session,) = world.reset([draft_task(must_include=["refunds |OR| please", "fund"])])
        world.step([session], [TYPED.format(number(session.state, "textbox 'Message'"))])
        assert world.step([session], ["stop []"])[0].reward == reward
        world.end([session])
    lite.close()


def test_a_live_instance_is_given_back(env):
    """Stops a user's only instance from being lost by an episode cut short, or by a login that fails."""
    task, closed = env.tasks("train")[0], []
    sites = LiveSites.__new__(LiveSites)
    stage = OwnSites(7, "direct", 1).take(task)
    stage.browser.close, stage.sites = lambda: closed.append(1), live.Instance({})
    sites.free, sites.slots, sites.is_reset = [stage], 1, True
    real = copy(env)
    real.sites = sites
    for _ in range(3):
        sessions = real.reset([task])
        with pytest.raises(ValueError, match="end\\(\\)"):
            real.reset([task])
        real.end(sessions)
    stage.session = lambda task: 1 / 0
    with pytest.raises(ZeroDivisionError):
        real.reset([task])
    assert sites.free == [stage] and len(closed) == 4


def test_closing_ends_the_thread():
    with closing(WebArena()) as env:
        (session,) = env.reset(env.tasks("train")[:1])
    with pytest.raises(RuntimeError, match="after shutdown"):
        session.inner.thread.submit(print)


def test_unknown_splits_backends_and_generated_tasks_are_refused(env):
    config, told = {"config": env.tasks("test")[0].goal["config"]}, "expected one of 'train 0' to 'test 3'"
    for message, call in (
            ("split 'valid_seen'", lambda: env.tasks("valid_seen")),
            ("backend 'firefox': expected one of direct, chromium", lambda: WebArena(backend="firefox")),
            ("scoring 'strict': expected one of webarena, lite", lambda: WebArena(scoring="strict")),
            ("expected URL,MODEL", lambda: WebArena(judge="http://h/v1")),
            (told, lambda: env.reset([a_task(goal=config)])),    # of data from when there was one database
            (told, lambda: env.reset([a_task(goal=config | {"database": "test 99"})])),
            ("generated", lambda: env.reset([a_task("Disable Blue Lamp.", generated=True)]))):
        with pytest.raises(ValueError, match=message):
            call()


def test_official_tasks(env, tmp_path, monkeypatch):
    """Stops official tasks from being played on our own sites."""
    for name in ("WA_SHOPPING", "SHOPPING", "WA_INSTANCES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="test.raw.json"):
        WebArena(str(tmp_path))
    records = [task.goal["config"] for split in ("train", "test") for task in env.tasks(split)]
    (tmp_path / "test.raw.json").write_text(json.dumps(records))
    lite = [old | {"old_task_id": old["task_id"], "task_id": i} for i, old in enumerate(records[::9])]
    (tmp_path / "test_webarena_lite.raw.json").write_text(json.dumps(lite))
    tasks = official_tasks(tmp_path)
    parts = {split: [task.goal["config"] for task in tasks[split]] for split in tasks}
    ids = [{config.get("old_task_id", config["task_id"]) for config in part} for part in parts.values()]
    assert sum(map(len, ids)) == len(records) == len(set().union(*ids)) and min(map(len, ids)) > 5
    train, valid = ({config["intent_template_id"] for config in parts[split]} for split in ("train", "valid"))
    assert not train & valid
    with pytest.raises(ValueError, match="WA_SHOPPING"):
        WebArena(str(tmp_path / "test.raw.json"))


@contextmanager
def on_served_sites(database, folder, monkeypatch, **options):
    """WebArena with `options`, where the sites of the database are served as a user's."""
    for name, value in {"LOGINS": folder / "logins", "RESPONSES": folder / "answers", "SETTLE_S": 0.0}.items():
        monkeypatch.setattr(module, name, value)
    with database.serve():
        for site, base in database.bases.items():
            monkeypatch.setenv(f"WA_{site.upper()}", base)
        with closing(WebArena(**options)) as real:
            yield real


@pytest.mark.usefixtures("needs_chromium")
def test_webarena_verified_gets_its_files(tmp_path, monkeypatch):
    """Stops episodes of WebArena-Verified from being judged here."""
    record = {"task_id": 5, "sites": ["shopping"], "intent": "Show my cart.", "intent_template_id": 2,
              "start_urls": ["__SHOPPING__"], "intent_template": "x", "instantiation_dict": {}, "revision": 2,
              "eval": [{"evaluator": "AgentResponseEvaluator", "results_schema": {"type": "null"},
                        "expected": {"task_type": "navigate", "status": "SUCCESS", "retrieved_data": None}}]}
    (tmp_path / "verified.json").write_text(json.dumps([record]))
    database = SiteDatabase()
    with on_served_sites(database, tmp_path, monkeypatch, data_dir=str(tmp_path / "verified.json")) as real:
        cart = database.bases["shopping"] + "/cart"
        (here,) = real.tasks("test")
        said = {"task_type": "NAVIGATE", "status": "SUCCESS", "retrieved_data": None}
        assert here.text.startswith("Show my cart. (Answer with stop [JSON]: ")
        went, stopped = play(real, here, ["goto [shopping/cart]", f"stop [{json.dumps(said)}]"])
        assert (stopped.stop, stopped.reward, stopped.done) == (StopReason.NOT_JUDGED, 0.0, True)
        play(real, here, ["goto [shopping/cart]"])
        play(real, here, ["stop [$5]"])
    assert "url: shopping/cart" in went.state
    folders = [next((tmp_path / "answers").iterdir()) / f"attempt-{i}" / "5" for i in (1, 2, 3)]
    answers = [json.loads((folder / "agent_response.json").read_text()) for folder in folders]
    assert answers[:2] == [said, None]
    assert (answers[2]["task_type"], answers[2]["retrieved_data"]) == ("RETRIEVE", ["$5"])
    for folder, visited in zip(folders, (True, True, False)):
        log = json.loads((folder / "network.har").read_text())["log"]["entries"]
        assert any(entry["request"]["url"] == cart for entry in log) == visited
        assert not any(entry["request"].get("postData") for entry in log)      # such as that of a login


@pytest.mark.usefixtures("needs_chromium")
def test_the_browser_reaches_more_hosts_where_they_are_named(monkeypatch):
    """Stops a map's directions, which its script asks another host for, from never coming."""
    with http_server(lambda *_: (200, {"Access-Control-Allow-Origin": "*"}, "<p>4 minutes</p>")) as url:
        monkeypatch.setenv("WA_MAP", url)
        script = f"fetch('{url.replace('127.0.0.1', 'localhost')}').then(r => r.ok, e => false)"
        for named, reached in (("", "false"), ("localhost", "true")):
            monkeypatch.setenv("WA_MORE_HOSTS", named)
            with closing(LiveSites({"map"})) as sites:
                stage = sites.take(None)
                stage.thread.submit(stage.browser.open, ["map"]).result()
                assert stage.thread.submit(stage.browser.front.evaluate, script).result() == reached
                sites.give_back(stage)


@pytest.mark.usefixtures("needs_chromium")
@pytest.mark.parametrize("kind", ["own sites", "official data"])
def test_a_real_browser_plays_the_same_episodes(env, tmp_path, monkeypatch, kind):
    """Results that hold only without a browser: the same texts and the same reward."""
    tasks = [task for task in env.tasks("test") if task.goal["database"] == "test 1"
             and task.goal["config"]["sites"] in (["shopping"], ["gitlab"])][:2]
    (tmp_path / "tasks.json").write_text(json.dumps([task.goal["config"] for task in tasks]))
    is_own, database = kind == "own sites", SiteDatabase(7, tasks[0].goal["database"])
    options = {"backend": "chromium"} if is_own else {"data_dir": str(tmp_path / "tasks.json")}
    with on_served_sites(database, tmp_path, monkeypatch, **options) as real:
        assert real.label == kind and real.slots == 1 and any(p.share for p in real.players().values()) == is_own
        for here_task, there_task in zip(tasks, tasks if is_own else real.tasks("test")):
            (here,), (there,) = env.reset([here_task]), real.reset([there_task])
            act, done = env.players()["oracle"].make(here, np.random.default_rng(0)), False
            while not done:
                assert there.state == here.state
                action = act(here.state)
                (a,), (b,) = env.step([here], [action]), real.step([there], [action])
                assert a == b
                done = a.done
            assert a.reward == 1
            env.end([here])
            real.end([there])
