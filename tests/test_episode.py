"""Episodes on disk: what is written comes back, and a line that does not fit is named by file, line and
field."""
import copy
import json

import pytest
from msgspec.structs import replace

from dreamgym.episode import (
    Episode,
    Step,
    StopReason,
    Task,
    TokenSegment,
    from_json,
    number_lines,
    read_episodes,
    read_tasks,
    rename_episode,
    successes,
    to_json,
)
from dreamgym.run import write_jsonl

GOOD = {
    "schema": 2, "id": "e1", "task": {"id": "t1", "text": "find me red vest",
                                      "goal": {"goal_index": 3}}, "world": "real",
    "source": "imported", "stop": "success", "raw_score": 1.0,
    "steps": [{"state": "search page", "action": "search[red vest]", "next_state": "order", "reward": 0,
               "done": False},
              {"state": "order", "action": "click[buy now]", "next_state": "order placed", "reward": 1,
               "done": True}],
}


def episode(name: str = "e1") -> Episode:
    item = "item \U0001f9e5 $5\nchosen: none"
    steps = [Step(state="search page", action="search[café 中]", next_state=item, grounded="search[café 中]",
                  reasoning="why\nnot", reward_reasoning="no"),
             Step(state=item, action="click[buy now]", next_state="order placed", reward=1.0, done=True)]
    task = Task(id="t", text="find me a coat", env="webshop", start="search page",
                goal={"a": [1, {"b": None}]},
                groups=["split seen"], generated=True, parent="seed")
    return Episode(id=name, task=task, steps=steps, world="dream", source="policy", stop=StopReason.SUCCESS,
                   raw_score=0.75,
                   label="price", output="x", iteration=3)


# ---- round trip ----------------------------------------------------------------------------------

def test_round_trip_keeps_every_field(tmp_path):
    """A field that is written but not read back, text that changes on the way, a field that this test
    forgot."""
    episodes = [episode(f"e{i}") for i in range(3)]
    record = to_json(episodes[0])                # values that are defaults are not written: here none is
    assert record.keys() == set(Episode.__struct_fields__) - {"segments"} | {"schema"}
    assert record["task"].keys() == set(Task.__struct_fields__)
    assert set().union(*record["steps"]) == set(Step.__struct_fields__)
    write_jsonl(tmp_path / "a.jsonl", [to_json(e) for e in episodes[:1]], append=False)
    write_jsonl(tmp_path / "a.jsonl", [to_json(e) for e in episodes[1:]], append=True)
    assert read_episodes(tmp_path / "a.jsonl") == episodes
    write_jsonl(tmp_path / "tasks.jsonl", [to_json(e.task) for e in episodes], append=False)
    assert read_tasks(tmp_path / "tasks.jsonl") == [e.task for e in episodes]


def test_token_segments_stay_in_memory():
    """Token ids in the JSONL, or `to_json` taking them away from the episode that is being trained on."""
    segments = [TokenSegment(ids=[1, 2], mask=[0, 1], logps=[-0.5], turn_ends=[1])]
    e = replace(episode(), segments=segments)
    record = to_json(e)
    assert "segments" not in record and e.segments is segments
    assert from_json(record, Episode, "x") == episode()


def test_optional_fields_have_their_defaults():
    """An imported log that has to name every field."""
    read = from_json({"schema": 2, "id": "x", "task": {"id": "t", "text": "find"},
                      "steps": [{"state": "a", "action": "b", "next_state": "c"}]}, Episode, "x")
    assert read == Episode(id="x", task=Task(id="t", text="find"),
                           steps=[Step(state="a", action="b", next_state="c")])
    assert read.reward == 0.0 and not read.success and successes([read, episode()]) == 0.5


@pytest.mark.parametrize("state, next_state, done, valid", [("a", "a", False, False), ("a", "b", False, True),
                                                            ("a", "a", True, True)])
def test_an_action_that_changes_nothing_is_invalid(state, next_state, done, valid):
    """A penalty on the action that ends the episode, or none on one that was refused."""
    assert Step(state=state, action="x", next_state=next_state, done=done).valid == valid


def test_renaming_reaches_every_text():
    """A thing that keeps its old name in one text: the row would contradict itself."""
    old = episode()
    new = rename_episode(old, lambda text: text.upper())
    assert json.dumps([to_json(new)["steps"], new.task.text, new.task.start], ensure_ascii=False) == \
        json.dumps([[{k: v.upper() if isinstance(v, str) else v for k, v in s.items()}
                     for s in to_json(old)["steps"]],
                    old.task.text.upper(), old.task.start.upper()], ensure_ascii=False)
    assert number_lines("a\nb") == "[1] a\n[2] b"


def test_blank_lines_are_no_episodes(tmp_path):
    """A trailing blank line refused or counted; line numbers that drift behind blank lines; a Windows
    editor's mark."""
    path = tmp_path / "a.jsonl"
    path.write_text("")
    assert read_episodes(path) == [] and read_tasks(path) == []
    path.write_text("\ufeff" + json.dumps(GOOD) + "\n  \n\n")
    assert len(read_episodes(path)) == 1
    path.write_text("\n\n" + json.dumps(GOOD | {"id": 5}))
    with pytest.raises(ValueError, match=r"a\.jsonl:3: .*id"):
        read_episodes(path)


# ---- lines that do not fit -----------------------------------------------------------------------

def changed(*path, **changes):
    """A change of the record at `path`; without changes, the last name of the path is taken away."""
    def change(record):
        for key in path if changes else path[:-1]:
            record = record[key]
        if changes:
            record.update(changes)
        else:
            del record[path[-1]]
    return change


BAD = {
    "no schema": (changed("schema"),
                  "field `schema` is 'None', expected 2"), "old schema": (changed(schema=1),
                                                                          "`schema` is '1'"),
    "no id": (changed("id"), "`id`"), "no task": (changed("task"), "`task`"), "no steps": (changed("steps"),
                                                                                    "field `steps` is empty"),
    "steps no list": (changed(steps={}), r"\$.steps"), "task no object": (changed(task="find"), r"\$.task"),
    "number as id": (changed(id=7), r"\$.id"), "null id": (changed(id=None), r"\$.id"),
    "text score": (changed(raw_score="1.0"), r"\$.raw_score"), "world": (changed(world="mars"),
                                                                         "field `world` is 'mars'"),
    "unknown": (changed(extra=1), "unknown field `extra`"), "stop": (changed(stop="tired"),
                                                                     r"'tired'.*\$.stop"),
    "task id": (changed("task", "id"), r"`id`.*\$.task"), "no text": (changed("task", "text"),
                                                                      r"`text`.*\$.task"),
    "blank text": (changed("task", text=" \n"), "task: field `text` is empty"),
    "text lines": (changed("task", text="find\nstate:\norder placed"), "task: field `text`"),
    "goal": (changed("task", goal=3), r"\$.task.goal"), "generated": (changed("task", generated=1),
                                                                      r"\$.task.generated"),
    "no state": (changed("steps", 0, "state"), r"`state`.*\$.steps"),
    "step unknown": (changed("steps", 0, observation="x"), "unknown field `observation`"),
    "action list": (changed("steps", 0, action=["click"]), r"\$.steps\[.\].action"),
    "text reward": (changed("steps", 1, reward="1"), r"\$.steps\[.\].reward"),
    "raw reward": (changed("steps", 1, reward=0.5), r"steps\[1\]: field `reward` is 0.5, expected 0 or 1"),
    "negative reward": (changed("steps", 1, reward=-1), r"steps\[1\]: field `reward` is -1"),
    "number as done": (changed("steps", 1, done=1), r"\$.steps\[.\].done"),
    "done early": (changed("steps", 0, done=True), r"steps\[0\]: done before the last step"),
    "paid but not done": (changed("steps", 1, done=False), r"steps\[1\]: reward 1 with done false"),
    "broken chain": (changed("steps", 1, state="elsewhere"),
                     r"steps\[1\]: field `state` differs from the `next_state` before it"),
    "action lines": (changed("steps", 0, action="click[1]\nreward: 1 done: yes"), r"steps\[0\].*`action`"),
}


@pytest.mark.parametrize("name", BAD)
def test_record_that_does_not_fit_is_named(tmp_path, name):
    """A bad record entering training, or an error that leaves the user to search a file of thousands of
    lines."""
    change, message = BAD[name]
    record = copy.deepcopy(GOOD)
    change(record)
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(GOOD | {"id": "first"}) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=message) as refused:
        read_episodes(path)
    assert str(refused.value).startswith(f"{path}:2") and len(str(refused.value)) < 500


LINE = json.dumps(GOOD).encode()
SCORE = b'"raw_score": 1.0'
RAW = {
    "not json": b"{'id': 1}", "cut": LINE[:-20], "two records": LINE + LINE,
    "not utf-8": LINE.replace(b"search page", b"caf\xe9"),
    "binary": bytes(range(1, 256)).replace(b"\n", b""), "deep": b"[" * 100_000,
    "deep goal": LINE.replace(b'{"goal_index": 3}', b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "long number": LINE.replace(SCORE, b'"raw_score": ' + b"9" * 5000), "nan": LINE.replace(SCORE,
                                                                                         b'"raw_score": NaN'),
    "infinity": LINE.replace(SCORE, b'"raw_score": -Infinity'), "surrogate": LINE.replace(b"search page",
                                                                                          b"search \\ud800"),
    "number": b"3", "list": b"[]", "string": b'"x"', "null": b"null",
}


@pytest.mark.parametrize("name", RAW)
def test_line_that_is_no_record_is_named(tmp_path, name):
    """An error without file and line; NaN and lone surrogates that are read but crash the run when it writes
    them."""
    assert RAW[name] != LINE
    path = tmp_path / "log.jsonl"
    path.write_bytes(json.dumps(GOOD | {"id": "first"}).encode() + b"\n" + RAW[name] + b"\n")
    with pytest.raises(ValueError) as refused:
        read_episodes(path)
    assert type(refused.value) is ValueError and str(refused.value).startswith(f"{path}:2")
    assert len(str(refused.value)) < 500


def test_duplicate_id_is_named_with_its_line(tmp_path):
    """Two episodes of one id: retrieval would give an episode its own answer."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(LINE + b"\n" + json.dumps(GOOD | {"id": "e2"}).encode() + b"\n" + LINE)
    with pytest.raises(ValueError, match=r"log\.jsonl:3: field `id`: 'e1' occurs twice"):
        read_episodes(path)


def test_bad_tasks_and_missing_files_are_named(tmp_path):
    """A user's file with one bad line stopping the run without saying which; a folder taken for a file."""
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"schema": 2, "id": "a", "text": "find me a vest"}\n{"schema": 2, "id": "b"}\n')
    with pytest.raises(ValueError, match=r"tasks\.jsonl:2: .*`text`"):
        read_tasks(path)
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ValueError, match="no such file"):
            read_episodes(path)
