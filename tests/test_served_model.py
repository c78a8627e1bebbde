"""The experience model behind a server of our own on 127.0.0.1: the same answers as in this process, and
every way a server can fail."""
import json
import threading
from types import SimpleNamespace

import pytest

from dreamgym import run
from dreamgym.envs.base import make_env
from dreamgym.episode import read_episodes
from dreamgym.experience_model import load_experience_model
from dreamgym.model import load_model
from dreamgym.served_model import open_experience_model
from dreamgym.teacher import Endpoint
from conftest import EXAMPLE, TRAIN, http_server


@pytest.fixture
def server(monkeypatch):
    """A chat endpoint; `server.reply(messages, settings)` gives (status, body). `asked` keeps the requests."""
    def answer(method, path, headers, body):
        state.asked.append(json.loads(body))
        status, said = state.reply(state.asked[-1]["messages"], state.asked[-1])
        return status, {}, said if isinstance(said, bytes) else json.dumps(said)

    monkeypatch.setattr(Endpoint, "retries", 1)
    monkeypatch.setattr("openai._base_client.BaseClient._calculate_retry_timeout", lambda *_: 0.0)
    with http_server(answer) as url:
        state = SimpleNamespace(asked=[], url=f"{url}/v1")
        state.args = SimpleNamespace(expmodel=state.url, expmodel_name="m", expmodel_key_env="NO_KEY")
        yield state


def said(text, finish="stop"):
    return 200, {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [
        {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}]}


def first_questions(model, data, count=8):
    steps = [(e, i) for e in read_episodes(data / "valid.jsonl") for i in range(len(e.steps))][:count]
    return model.questions([e.task.text for e, _ in steps], [e.steps[:i] for e, i in steps],
                           [e.steps[i].state for e, i in steps], [e.steps[i].shown_action for e, i in steps])


def test_an_exported_model_answers_as_at_home(server, trained, script, tmp_path):
    """Another prompt, another system text, another limit, or a buffer that stayed behind."""
    script("train_expmodel", "--data", trained.data, "--out", trained.expmodel, *TRAIN, "--export", tmp_path)
    env = make_env(EXAMPLE)
    home = load_experience_model(trained.expmodel, env)
    exported, _ = load_model(str(tmp_path))
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
    first = server.asked[1]["messages"]
    assert [m["role"] for m in first] == ["system", "user"] and "similar 1:" in first[1]["content"]
    server.reply = lambda *_: said("think: it opens\nnext:\nin: /do", "length")
    result, = world.step([session], ["cd docs"])
    assert result.stop == "malformed"
    server.reply = lambda *_: said("vary", "stop")
    assert world.write_variations(["a", "b"], 2, 0.8) == [["vary", "vary"]] * 2


@pytest.mark.parametrize("answer", [(500, {"error": "busy"}), (404, {"error": "no such model"}),
                                    (200, b"<html>gateway</html>"), (200, {"choices": []}), (401, b"")])
def test_a_server_that_fails(server, workspace, answer):
    """Hours of imitation before the first question shows that nobody answers; a traceback."""
    server.reply = lambda *_: answer
    with pytest.raises(ValueError, match=f"^--expmodel {server.url}: "):
        open_experience_model(server.args, None, make_env(EXAMPLE), workspace.data / "train.jsonl")


def test_rl_in_a_served_model(server, trained, script, tmp_path):
    """The main job and evaluate.py with a URL: a folder that is looked for, probes that are not there."""
    server.reply = lambda messages, settings: said(
        "think: no\nreward: 0 done: no" if "reward?" in messages[-1]["content"]
        else "think: it opens\nnext:\nin: /docs")
    served = ("--env", EXAMPLE, "--data", trained.data, "--expmodel", server.url, "--expmodel-name", "m")
    script("train_policy", *served, "--out", tmp_path, "--expmodel-folder", trained.expmodel, "--iterations", 1,
           "--tasks", 2, "--rollouts", 2, "--eval-tasks", 2, "--test-tasks", 2, "--imitation-episodes", 2,
           "--model", "scratch:16x1", "--generate-every", 1)
    result = run.read_json(tmp_path / "result.json")
    assert result["test"][-1]["dream_transitions"] > 0
    script("evaluate", *served, "--split", "valid", "--out", tmp_path / "report")
    assert run.read_json(tmp_path / "report/report.json")["report"]["malformed"]["share"] == 0
    with pytest.raises(ValueError, match="--init expmodel: found a server's URL"):
        script("train_policy", *served, "--model", "scratch:16x1")
