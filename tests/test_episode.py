"""Episodes on disk come back; a line that does not fit is named by file, line and field."""
import copy
import json

import pytest
from msgspec.structs import replace

from dreamgym.episode import (Episode, Step, StopReason, Task, TokenSegment, from_json, line_number, number_lines,
                              read_episodes, read_tasks, rename_episode, successes, to_json)

GOOD = {"schema": 2, "id": "e1", "task": {"id": "t1", "text": "find me red vest", "goal": {"goal_index": 3}},
        "world": "real", "source": "imported", "stop": "success", "raw_score": 1.0,
        "steps": [{"state": "search page", "action": "search[red vest]", "next_state": "order", "reward": 0,
                   "done": False},
                  {"state": "order", "action": "click[buy now]", "next_state": "order placed", "reward": 1,
                   "done": True}]}
LINE = json.dumps(GOOD).encode()


def episode(name: str = "e1") -> Episode:
    item = "item \U0001f9e5 $5\nchosen: none"
    steps = [Step(state="search page", action="search[café 中]", next_state=item, grounded="search[café 中]", thought="so\ntea",
                  reasoning="why\nnot", reward_reasoning="no", imitate=False),
             Step(state=item, action="click[buy now]", next_state="order placed", reward=1.0, done=True)]
    task = Task(id="t", text="find me a coat", env="webshop", start="search page", parent="seed",
                goal={"a": [1, {"b": None}]}, groups=["split seen"], generated=True)
    return Episode(id=name, task=task, steps=steps, world="dream", source="policy", stop=StopReason.SUCCESS,
                   raw_score=0.75, label="price", output="x", iteration=3)


# ---- round trip ----

def test_round_trip_keeps_every_field(tmp_path):
    segments = [TokenSegment(ids=[1, 2], mask=[0, 1], logps=[-0.5], turn_ends=[1])]
    episodes, trained = [episode(f"e{i}") for i in range(3)], replace(episode("e0"), segments=segments)
    record = to_json(trained)                    # values that are defaults are not written: here none is
    assert record == to_json(episodes[0]) and trained.segments is segments
    assert record.keys() == set(Episode.__struct_fields__) - {"segments"} | {"schema"}
    assert record["task"].keys() == set(Task.__struct_fields__)
    assert set().union(*record["steps"]) == set(Step.__struct_fields__)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(to_json(e)) + "\n" for e in episodes))
    assert read_episodes(path) == episodes
    path.write_text("".join(json.dumps(to_json(e.task)) + "\n" for e in episodes))
    assert read_tasks(path) == [e.task for e in episodes]


def test_optional_fields_have_their_defaults():
    read = from_json({"schema": 2, "id": "x", "task": {"id": "t", "text": "find"},
                      "steps": [{"state": "a", "action": "b", "next_state": "c"}]}, Episode, "x")
    assert read == Episode(id="x", task=Task(id="t", text="find"),
                           steps=[Step(state="a", action="b", next_state="c")])
    assert read.reward == 0.0 and not read.success and successes([read, episode()]) == 0.5


@pytest.mark.parametrize("state, next_state, done, valid", [
    ("a", "a", False, False), ("a", "b", False, True), ("a", "a", True, True)])
def test_an_action_that_changes_nothing_is_invalid(state, next_state, done, valid):
    assert Step(state=state, action="x", next_state=next_state, done=done).valid == valid


def test_renaming_reaches_every_text():
    old = episode()
    new = rename_episode(old, str.upper)
    upper = [{k: v.upper() if isinstance(v, str) else v for k, v in s.items()} for s in to_json(old)["steps"]]
    assert to_json(new)["steps"] == upper
    assert [new.task.text, new.task.start] == [old.task.text.upper(), old.task.start.upper()]


@pytest.mark.parametrize("action, element, number", [
    ("click [2]", "link 'Cart'", "[2]"), ("type [2] [1] [0]", "link 'Cart'", "[2]"), ("stop [2]", "text 'sold 2'", ""),
    ("click [0]", "link 'Cart'", ""), ("click [9]", "link 'Cart'", ""), ("click [2]", "", ""), ("go_back", "", "")])
def test_the_line_that_an_action_names(action, element, number):
    """Stops an answer from being taken for a line's number."""
    step = Step(state="page: A\nlink 'Cart' new\ntext 'sold 2'", action=action, next_state="b",
                grounded=f"{action} {element}".strip())
    assert line_number(step) == number
    assert number_lines(step.state) == "page: A [1]\nlink 'Cart' new [2]\ntext 'sold 2' [3]"


def test_blank_lines_are_no_episodes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("")
    assert read_episodes(path) == [] and read_tasks(path) == []
    path.write_text("\ufeff" + json.dumps(GOOD) + "\n  \n\n")
    assert len(read_episodes(path)) == 1
    path.write_text("\n\n" + json.dumps(GOOD | {"id": 5}))
    with pytest.raises(ValueError, match=r"a\.jsonl:3: .*id"):
        read_episodes(path)


# ---- lines that do not fit ----

TASK, FIRST, LAST = ["task"], ["steps", 0], ["steps", 1]


@pytest.mark.parametrize("place, changes, message", [                 # None: the field is taken away
    ([], {"schema": None}, "field `schema` is 'None', expected 2"),
    ([], {"steps": []}, "field `steps` is empty"), ([], {"extra": 1}, "unknown field `extra`"),
    (TASK, {"text": " \n"}, "task: field `text` is empty"), (TASK, {"text": "a\nb"}, "task: field `text`"),
    (TASK, {"other": 3}, "unknown field `other`"), (FIRST, {"observation": "x"}, "unknown field `observation`"),
    (LAST, {"reward": 0.5}, r"steps\[1\]: field `reward` is 0.5, expected 0 or 1"),
    (LAST, {"done": 1}, r"\$.steps\[.\].done"),
    (FIRST, {"done": True}, r"steps\[0\]: done before the last step"),
    (LAST, {"done": False}, r"steps\[1\]: reward 1 with done false"),
    (LAST, {"state": "elsewhere"}, r"steps\[1\]: field `state` differs from the `next_state` before it"),
    (LAST, {"reward": 0.0}, "field `stop` is 'success', but the last `reward` is 0; expected 1"),
    ([], {"stop": "failure"}, "field `stop` is 'failure', but the last `reward` is 1"),
    ([], {"stop": "malformed"}, "'malformed', which only a dream can be"),
    (FIRST, {"action": "click[1]\nreward: 1 done: yes"}, r"steps\[0\].*`action`"),
])
def test_record_that_does_not_fit_is_named(tmp_path, place, changes, message):
    record = part = copy.deepcopy(GOOD)
    for key in place:
        part = part[key]
    part.update(changes)
    for key in [key for key, value in changes.items() if value is None]:
        del part[key]
    check_second_line(tmp_path, json.dumps(record).encode(), message)


def check_second_line(folder, line: bytes, message: str):
    path = folder / "log.jsonl"
    path.write_bytes(json.dumps(GOOD | {"id": "first"}).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=message) as refused:
        read_episodes(path)
    assert type(refused.value) is ValueError and str(refused.value).startswith(f"{path}:2")
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("old, new", [
    (LINE, b"{'id': 1}"), (LINE, b"3"), (LINE, b"[" * 100_000), (b"search page", b"caf\xe9"),
    (b"search page", b"search \\ud800"), (b'"raw_score": 1.0', b'"raw_score": NaN')])
def test_line_that_is_no_record_is_named(tmp_path, old, new):
    """An error without file and line; NaN and lone surrogates that crash when they are written."""
    assert old in LINE
    check_second_line(tmp_path, LINE.replace(old, new), "log.jsonl:2")


def test_repeated_ids_bad_tasks_and_missing_files_are_named(tmp_path):
    """Two episodes of one id, of which retrieval would give one its own answer; a folder taken for a file."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(LINE + b"\n" + json.dumps(GOOD | {"id": "e2"}).encode() + b"\n" + LINE)
    with pytest.raises(ValueError, match=r"log\.jsonl:3: field `id`: 'e1' occurs twice"):
        read_episodes(path)
    path.write_text('{"schema": 2, "id": "a", "text": "find me a vest"}\n{"schema": 2, "id": "b"}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl:2: .*`text`"):
        read_tasks(path)
    for missing in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ValueError, match="no such file"):
            read_episodes(missing)
