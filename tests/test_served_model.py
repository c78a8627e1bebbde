"""The experience model behind a server on 127.0.0.1: the same answers, and every way it can fail."""
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from dreamgym import run
from dreamgym.envs.base import make_env
from dreamgym.episode import read_episodes
from dreamgym.experience_model import load_experience_model
from dreamgym.model import load_model
from dreamgym.served_model import open_experience_model
from dreamgym.teacher import Endpoint
from conftest import EXAMPLE, SMALL_RUN, TRAIN, run_main
from test_viewer import held


@pytest.fixture
def server(chat_server, monkeypatch):
    """The chat endpoint as an experience model, asked by a client that does not pause."""
    monkeypatch.setattr("dreamgym.served_model.Endpoint", partial(Endpoint, retries=1))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    chat_server.args = SimpleNamespace(expmodel=chat_server.url, expmodel_name="m", expmodel_key_env="A_KEY")
    return chat_server


def said(text, finish="stop"):
    return 200, {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [
        {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}]}


def first_questions(model, data, count=8):
    steps = [(e, i) for e in read_episodes(data / "valid.jsonl") for i in range(len(e.steps))][:count]
    return model.questions([(e.task.text, e.steps[:i], e.steps[i].state, e.steps[i].shown_action)
                            for e, i in steps])


def test_an_exported_model_answers_as_at_home(server, trained, tmp_path):
    """Another prompt, another system text, another limit, or a buffer that stayed behind."""
    run_main("train_expmodel", "--data", trained.data, "--out", trained.expmodel, *TRAIN, "--export",
             tmp_path / "exported")
    env = make_env(EXAMPLE)
    home = load_experience_model(trained.expmodel, env)
    exported, _ = load_model(str(tmp_path / "exported"))
    assert all((a == b).all() for a, b in zip(exported.parameters(), home.model.parameters(), strict=True))

    lock = threading.Lock()

    def reply(messages, settings):
        with lock:
            (text, ended), = home._write([home._prompt(messages[-1]["content"])], "", settings["max_tokens"],
                                         settings["temperature"])
        return said(text, "stop" if ended else "length")
    server.reply = reply
    away = open_experience_model(server.args, trained.expmodel, env, trained.data / "train.jsonl")
    assert away.settings == home.settings and len(away.buffer) == len(home.buffer) > 0
    home.settings.max_resamples = away.settings.max_resamples = 0      # draws differ, greedy answers do not
    assert away.predict(first_questions(away, trained.data)) == home.predict(first_questions(home, trained.data))
    assert away.set_state(away.get_state()) is None


def test_an_untrained_model_is_a_world(server, workspace):
    """A world that is not told what it is, has no demonstrations, or takes a cut answer for a page."""
    env, episodes = make_env(EXAMPLE), read_episodes(workspace.data / "train.jsonl")
    thought = "<think>\nhm\n</think>\n"
    server.reply = lambda messages, settings: said(
        "think: no\nreward: 0 done: no" if "reward?" in messages[-1]["content"]
        else f"{thought}think: it opens\nnext:\nin: /docs")
    world = open_experience_model(server.args, None, env, workspace.data / "train.jsonl")
    session, = world.reset([episodes[0].task])
    result, = world.step([session], ["cd docs"])
    assert (result.state, result.done, result.reasoning) == ("in: /docs", False, "it opens")
    first = server.asked[1][1]["messages"]
    assert [m["role"] for m in first] == ["system", "user"] and "similar 1:" in first[1]["content"]
    server.reply = lambda *_: said("think: it opens\nnext:\nin: /do", "length")
    result, = world.step([session], ["cd docs"])
    assert result.stop == "malformed"
    server.reply = lambda *_: said("vary", "stop")
    assert world.write_variations(["a", "b"], 2, 0.8) == [["vary", "vary"]] * 2


GOOD, HTML = said("yes"), "<html>gateway</html>"


@pytest.mark.parametrize(("replies", "found"), [
    ([(500, {"error": "boom"}), GOOD], 1), ([(200, HTML), GOOD], 1), ([(200, '{"choi'), GOOD], 1),
    ([(200, {"choices": []}), GOOD], 1), ([(200, "[]"), GOOD], 1), ([said(None)], 0),
    ([said("ye", "length")], 0),
    ([(500, {"error": "boom"})], "InternalServerError: boom"), (["silence"], "APITimeoutError: timed out"),
    ([(200, HTML)], "no chat completion in the body"), ([(400, "too long")], 0),
    ([(401, {"error": "bad key sk-12345"})], r"AuthenticationError: bad key \*\*\*.*A_KEY: set"),
    (["refuse"], "APIConnectionError: .*refused")])
def test_a_server_that_fails(server, workspace, monkeypatch, capfd, replies, found):
    """A run that ends because of trouble that passes, lost requests unseen, a key in a message."""
    monkeypatch.setenv("A_KEY", "sk-12345")
    if "silence" in replies:
        monkeypatch.setattr("dreamgym.served_model.Endpoint", partial(Endpoint, retries=1, timeout_s=0.3))
    server.reply = lambda *_: GOOD
    start = lambda: open_experience_model(server.args, None, make_env(EXAMPLE), workspace.data / "train.jsonl")
    monkeypatch.setattr("dreamgym.served_model.RETRIES", 2)
    world, before = start(), len(server.asked)
    server.reply = lambda *_: replies[min(len(server.asked) - before, len(replies)) - 1]
    if replies == ["refuse"]:
        server.close()
    if isinstance(found, int):
        world.write_variations(["a"], 1, 0.8)
        assert world.counts["repeated"] == found == len(server.asked) - before - 1
        assert world.counts["refused"] == (replies == [(400, "too long")])      # malformed, and no end of the run
        return
    for ask, end in ((start, ""), (lambda: world.write_variations(["a"], 1, 0.8), ".*; run the same command")):
        with pytest.raises(ValueError, match=f"^--expmodel {server.url}: .*{found}{end}") as error:
            ask()
        shown = str(error.value) + "".join(capfd.readouterr())
        assert "\n" not in str(error.value) and "sk-12345" not in shown


def test_64_requests_at_once(server, workspace):
    """Requests that wait for each other, or answers in another order than their questions."""
    together = threading.Barrier(64)

    def reply(messages, settings):
        together.wait(timeout=120)
        state = messages[-1]["content"].rpartition("state:\n")[2].split("\naction:")[0]
        return said("reward: 0 done: no" if "reward?" in messages[-1]["content"]
                    else f"next:\n{state} and on")
    server.reply = lambda *_: GOOD
    world = open_experience_model(server.args, None, make_env(EXAMPLE), workspace.data / "train.jsonl")
    task = read_episodes(workspace.data / "train.jsonl")[0].task
    server.reply = reply
    sessions = world.reset([replace(task, start=f"in {i}") for i in range(64)])
    assert [r.state for r in world.step(sessions, ["ls"] * 64)] == [f"in {i} and on" for i in range(64)]


def test_an_absent_server_is_noticed_first(server, tmp_path):
    server.reply = lambda *_: (404, {"error": "no such model"})
    with pytest.raises(ValueError, match=f"^--expmodel {server.url}: "):
        run_main("train_policy", "--env", EXAMPLE, "--out", tmp_path / "out", "--expmodel", server.url,
                 "--expmodel-name", "m", "--model", "scratch:16x1", "--init", "expmodel", "--expmodel-folder", "x")
    assert not (tmp_path / "out").exists()


def test_rl_in_a_served_model(server, trained, tmp_path):
    """The main job and evaluate.py with a URL: a folder that is looked for, probes that are not there."""
    server.reply = lambda messages, settings: said(
        "think: no\nreward: 0 done: no" if "reward?" in messages[-1]["content"]
        else "think: it opens\nnext:\nin: /docs")
    served = ("--env", EXAMPLE, "--data", trained.data, "--expmodel", server.url, "--expmodel-name", "m")
    run_main("train_policy", *served, "--out", tmp_path, "--expmodel-folder", trained.expmodel, *SMALL_RUN,
             "--generate-every", 1)
    result = run.read_json(tmp_path / "result.json")
    assert result["test"][-1]["dream_transitions"] > 0
    run_main("evaluate", *served, "--split", "valid", "--out", tmp_path / "report", "--html", tmp_path / "page.html")
    assert run.read_json(tmp_path / "report/report.json")["report"]["malformed"]["share"] == 0
    page = held(tmp_path / "page.html")          # of a model that has no folder
    assert f"experience model {server.url}" in page["about"] and all(row["asked"] for row in page["rows"])
    with pytest.raises(ValueError, match="--init expmodel: found a server's URL"):
        run_main("train_policy", *served, "--model", "scratch:16x1")
