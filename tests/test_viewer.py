"""The page that shows dream and world: what it holds, what it refuses to run, and files that were cut."""
import json
from types import SimpleNamespace

import pytest

from dreamgym import viewer
from dreamgym.envs.base import Audit, StepResult
from dreamgym.episode import Episode, Step, StopReason, Task, to_json

HOSTILE = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'><!-- \u2028 \x00 &amp;"


# a task is fulfilled by a red page; the word "wrong" contradicts what was seen before
ENV = SimpleNamespace(name="shop", label="toy", audit=SimpleNamespace(
    success=lambda task, state, action, next_state: "red" in next_state if action == "buy" else None,
    inconsistencies=lambda steps: (len(steps), sum("wrong" in step.next_state for step in steps))))


def episode(name, task, *pages, world="real", stop=StopReason.FAILURE, **more):
    steps = [Step(state=a, action="look", next_state=b) for a, b in zip(pages, pages[1:])]
    return Episode(id=name, task=Task(id=task, text=f"find {task}"), steps=steps, world=world, stop=stop, **more)


def held(path):
    """The data inside a page."""
    return json.loads(path.read_text().split('id="data">')[1].split("</script>")[0])


def test_what_the_page_holds(tmp_path):
    """Answers beside the wrong step, a malformed answer that looks like a page, a verdict on it."""
    real = episode("r", "t", "start", "shelf", "shelf", "red")
    real.steps[-1].action, real.steps[-1].reward, real.steps[-1].done = "buy", 1.0, True
    dreamt = episode("d", "t", "start", "wrong shelf", "shelf", "shelf", world="dream",
                     stop=StopReason.MALFORMED, output="next next")
    answers = [StepResult("shelf", reasoning="it is there"), StepResult("", stop=StopReason.MALFORMED),
               StepResult("blue", 1.0, True)]
    asked = []
    questions = lambda steps, dreaming: asked.extend(len(past) for _, past, *_ in steps) or steps
    model = SimpleNamespace(questions=questions, predict=lambda questions, dreaming: answers)
    viewer.write_page(tmp_path / "new/page.html", ENV, "about", [dreamt, real], model, tmp_path, ["cut", ""])
    data = held(tmp_path / "new/page.html")
    (row,), each = data["rows"], lambda name, key: [step[key] for step in data["rows"][0][name]["steps"]]
    assert row["tags"] == ["all", "success", "disagreement", "malformed"]
    assert [tuple(tile[1:]) for tile in data["tiles"]] == [(1, 1), (0, 1), (1, 3), (2, 3), (1, 3)]
    assert asked == [0, 1, 2] and data["notes"] == ["cut"]
    assert (row["real"]["success"], row["dream"]["stop"], row["task"]) == (True, "malformed", "find t")
    assert each("asked", "next") == ["shelf", "", "blue"] and each("asked", "output") == [None, "", None]
    assert each("asked", "verdict") == [None, None, False] and each("real", "verdict") == [None, None, True]
    assert each("real", "valid") == [True, False, True] and each("asked", "think")[0] == "it is there"
    assert each("dream", "output") == [None, None, "next next"]
    assert each("dream", "contradicts") == [True, False, False]


def test_pairs():
    """Two tasks side by side, and episodes that vanish because they have no counterpart."""
    names = [("r0", "a", "real"), ("d0", "b", "dream"), ("d1", "a", "dream"), ("r1", "a", "real"),
             ("d2", "a", "dream"), ("d3", "a", "dream"), ("r2", "c", "real")]
    found = viewer.pair([episode(name, task, "x", "y", world=world) for name, task, world in names])
    assert [(a and a.id, b and b.id) for a, b in found] == [("r0", "d1"), ("r1", "d2"), ("r2", None),
                                                            (None, "d0"), (None, "d3")]


@pytest.mark.parametrize("rest, said", [
    (b'{"schema": 2, "id": "e3", "ta', "episodes.jsonl:4 and what follows is left out: Input data was truncated"),
    (b'{"schema": 2, "id": "\xc3', "episodes.jsonl:4 and what follows"),
    (b'{"schema": 1}\n', "field `schema` is '1'"), (b"[" * 2000, "episodes.jsonl:4"), (b"", "")])
def test_half_written_files(tmp_path, rest, said):
    """A job that ends in an error, or a page without its episodes, because a kill left half a line."""
    path = tmp_path / "episodes.jsonl"
    lines = [json.dumps(to_json(episode(f"e{i}", "t", "a", "b"))) for i in range(3)]
    path.write_bytes("\n".join(lines).encode() + b"\n" + rest)
    episodes, note = viewer.read_tail(path)
    assert [e.id for e in episodes] == ["e0", "e1", "e2"] and said in note and bool(note) == bool(said)
    assert [e.id for e in viewer.read_tail(path, 2)[0]] == (["e2"] if rest else ["e1", "e2"])
    assert viewer.read_tail(tmp_path / "missing.jsonl") == ([], "")


def hostile_page(path):
    """A page with a script in every text that an agent or a model could have written."""
    texts = dict.fromkeys(("reasoning", "reward_reasoning", "grounded"), HOSTILE)
    step = Step(state=HOSTILE, action=HOSTILE, next_state=f"{HOSTILE}\n2", reward=1.0, done=True, **texts)
    task = Task(id="t", text=HOSTILE, groups=[HOSTILE])
    real = Episode(id=HOSTILE, task=task, steps=[step], source=HOSTILE, stop=StopReason.SUCCESS)
    dreamt = Episode(id=HOSTILE, task=task, steps=[step], world="dream", stop=StopReason.MALFORMED, output=HOSTILE)
    answer = StepResult(f"{HOSTILE}\n3", reasoning=HOSTILE, reward_reasoning=HOSTILE)
    model = SimpleNamespace(questions=lambda steps, dreaming: steps, predict=lambda questions, dreaming: [answer])
    env = SimpleNamespace(name=HOSTILE, label=HOSTILE, audit=Audit())
    viewer.write_page(path, env, HOSTILE, [real, dreamt], model, path.parent, [HOSTILE])


def test_text_cannot_leave_the_data(tmp_path):
    hostile_page(tmp_path / "page.html")
    text, plain = (tmp_path / "page.html").read_text(), viewer.TEMPLATE.read_text()
    assert held(tmp_path / "page.html")["rows"][0]["task"] == HOSTILE
    assert text.count("<") == plain.count("<") and "__" not in text.split("<style>")[0]


def test_in_a_browser(browser, tmp_path):
    """Page text that runs, a policy that blocks the page's own script, and parts that do not appear."""
    hostile_page(tmp_path / "page.html")
    asked, said = [], []
    page = browser.chromium.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"file://{tmp_path}/page.html")
    shown = [page.inner_text("article")]
    page.click("text=played by the same policy")
    shown.append(page.inner_text("article"))
    assert page.evaluate("[window.ran, document.images.length, document.scripts.length]") == [None, 0, 2]
    page.fill("input", "no such words")
    assert page.locator(".row:visible").count() == 0
    page.close()
    assert asked == [f"file://{tmp_path}/page.html"] and said == []
    assert all("onerror='window.ran = 2'" in text for text in shown)
    assert "0 of 1 pages exact" in shown[0] and "world: reward 1, done" in shown[0] and "not readable" in shown[1]
