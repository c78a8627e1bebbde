"""WebArena as an environment: the contract, notes, evaluation at stop, isolation of episodes, and the same through a real browser and as a user's own sites."""

import json
import shutil

import pytest

from dreamgym.envs import make_env, webarena_text
from dreamgym.envs.webarena.env import LiveWebArena, WebArena
from dreamgym.envs.webarena.sites import SiteDatabase

CHROMIUM = pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def env():
    return WebArena()


def task_of(env, start, split="train"):
    return next(t for t in env.tasks(split) if t.text.startswith(start))


def play(env, task, actions):
    session = env.start([task])[0]
    return session, [env.act([session], [action])[0] for action in actions]


def number(state, line):
    """The number of the line that reads so."""
    return next(row.split("]")[0][1:] for row in state.split("\n") if row.split("] ", 1)[-1] == line)


def test_tasks_start_where_the_environment_starts_them(env):
    """Stops a dream that begins on another page than the world, and splits that share a sentence."""
    train, test = env.tasks("train"), env.tasks("test")
    assert (len(train), len(test)) == (300, 100) and not {t.text for t in train} & {t.text for t in test}
    some = train[::40] + test[::20]
    assert [s.state for s in env.start(some)] == [t.start for t in some]
    assert {t.goal["split"] for t in test} == {"new template", "new entity"}


def test_what_comes_to_nothing_is_a_note_and_invalid(env):
    """Stops an unknown element, or words that are no action, from raising, from changing the page, or from counting as valid."""
    session, (unknown, words, moved) = play(env, env.tasks("train")[0], ["click [444]", "I would like to shop", "click [1]"])
    first = env.tasks("train")[0].start
    assert unknown.state == first + "\nnote: no element [444]" and not unknown.info["valid"] and not unknown.done
    assert words.state.startswith(first + "\nnote: no action") and not words.info["valid"]
    assert moved.info["valid"] and "note:" not in moved.state and moved.info["grounded"].startswith("click ")


def test_stop_is_evaluated_and_ends_the_episode(env):
    """Stops a reward for any answer, and a state after the end that could be acted on."""
    task = next(t for t in env.tasks("train") if t.text.startswith("What is the price of") and t.goal["type"] == "string_match")
    product, price = task.goal["parameters"]["product"], task.goal["parameters"]["answer"]
    for answer, reward in ((price, 1.0), ("$1234567", 0.0), ("", 0.0)):
        session, (searched, stopped) = play(env, task, [f"type [{number(task.start, chr(115) + 'earchbox ' + repr('Search'))}] [{product}] [1]", f"stop [{answer}]"])
        assert product in searched.state
        assert (stopped.reward, stopped.done, stopped.state, stopped.info["stop"]) == (reward, True, webarena_text.STOPPED, "success" if reward else "failure")


def test_episodes_do_not_see_each_other(env):
    """Stops a cart that one episode fills from being full in another, at the same time or later on the same sites."""
    task = next(t for t in env.tasks("train") if t.goal["config"]["sites"] == ["shopping"])
    one, two = env.start([task, task])
    product = next(row.split("'")[1] for row in one.state.split("heading 'Featured'")[1].split("\n") if " link '" in row)
    env.act([one], [f"click [{number(one.state, f'link {product!r}')}]"])
    added = env.act([one], [f"click [{number(one.state, 'button ' + repr('Add to Cart'))}]"])[0]
    assert "You added" in added.state
    cart = env.act([two], ["goto [shopping/cart]"])[0]
    assert product not in cart.state
    for session in (one, two):
        env.act([session], ["stop [done]"])
    later, (cart,) = play(env, task, ["goto [shopping/cart]"])
    assert product not in cart.state


def test_unknown_splits_backends_and_generated_tasks_are_refused(env):
    """Stops a wrong flag or a dreamt task from ending in the middle of a run."""
    with pytest.raises(ValueError, match="split 'valid_seen'"):
        env.tasks("valid_seen")
    with pytest.raises(ValueError, match="--backend firefox"):
        make_env("webarena", backend="firefox")
    task = env.tasks("train")[0]
    with pytest.raises(ValueError, match="generated"):
        env.start([type(task)("g", task.text, "webarena", task.start)])


def test_official_tasks_without_addresses_are_refused(tmp_path, monkeypatch):
    """Stops official tasks from being played on our own sites, and a folder without tasks from being taken for one with."""
    for name in ("WA_SHOPPING", "SHOPPING", "WA_INSTANCES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="test.raw.json"):
        LiveWebArena(str(tmp_path))
    (tmp_path / "tasks.json").write_text(json.dumps([t.goal["config"] for t in WebArena().tasks("test")[:3]]))
    with pytest.raises(ValueError, match="WA_SHOPPING"):
        LiveWebArena(str(tmp_path / "tasks.json"))


@CHROMIUM
def test_a_real_browser_plays_the_same_episode(env):
    """Stops results that hold only without a browser: the oracle's way shows the same texts and gets the same reward."""
    pytest.importorskip("playwright")
    from dreamgym.envs.webarena.scripted import make_player
    real = WebArena(backend="chromium")
    try:
        for task in (env.tasks("test")[i] for i in (0, 17, 45)):
            here, there = env.start([task])[0], real.start([task])[0]
            act = make_player("oracle", task.text, None, here)
            for _ in range(env.max_steps):
                assert there.state == here.state
                action = act(here.state)
                a, b = env.act([here], [action])[0], real.act([there], [action])[0]
                assert (a.state, a.reward, a.done, a.info) == (b.state, b.reward, b.done, b.info)
                if a.done:
                    break
            assert a.reward == 1
    finally:
        real.close()


@CHROMIUM
def test_own_sites_stand_in_for_a_users_webarena(env, tmp_path, monkeypatch):
    """Stops the path of a user's WebArena from rotting: addresses, logins through the forms, Chromium, evaluation on the sites that answer there."""
    pytest.importorskip("playwright")
    from dreamgym.envs import webarena_env
    from dreamgym.envs.webarena.scripted import make_player
    monkeypatch.setattr(webarena_env, "LOGINS", tmp_path / "logins")
    monkeypatch.setattr(webarena_env, "SETTLE_S", 0.0)
    chosen = [t for t in env.tasks("test") if t.goal["config"]["sites"] in (["shopping"], ["gitlab"])][:2]
    (tmp_path / "tasks.json").write_text(json.dumps([t.goal["config"] for t in chosen]))
    world = SiteDatabase()
    with world.serve() as served:
        for site, base in served.bases.items():
            monkeypatch.setenv(f"WA_{site.upper()}", base)
        live = LiveWebArena(str(tmp_path / "tasks.json"))
        try:
            assert "user's" in live.label and live.slots == 1
            for task, own in zip(live.tasks("test"), chosen):
                session = live.start([task])[0]
                assert session.state == own.start
                twin = env.start([own])[0]
                act = make_player("oracle", own.text, None, twin)
                result = None
                while result is None or not result.done:
                    action = act(session.state)
                    result = live.act([session], [action])[0]
                assert result.reward == 1 and result.info["stop"] == "success"
        finally:
            live.close()
