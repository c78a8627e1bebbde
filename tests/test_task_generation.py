"""Written tasks: what the check refuses and why, the rows that teach the experience model to vary tasks, and the choice among candidates."""
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dreamgym.envs.webshop import text as text
from dreamgym.episode import Task
from dreamgym.prompts import parse_task
from dreamgym.task_generation import TaskCheck, variation_rows, write_tasks
from dreamgym.tokenizer import build_tokenizer, chat_format

TASKS = [Task(f"t{i}", words, start=text.START, goal={"goal_index": i}) for i, words in enumerate([
    "find me slim jacket, and price lower than 50.00 dollars",
    "find me slim jacket with color: red, and size: large, and price lower than 60.00 dollars",
    "find me warm jacket with color: blue, and price lower than 40.00 dollars",
    "find me green tea",
    "find me warm slim vest with color: red, and price lower than 30.00 dollars",
    "tell me: a joke",                                                     # outside the grammar: left out everywhere
])]
STATES = ["item royal vegan boots $40\nsize: 6 / 7\nchosen: none", "search page", "item broken"]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer([task.text for task in TASKS] + ["vary: "])


def test_each_reason_for_refusal():
    # Stops a policy from practising on tasks that cannot be read, cannot be fulfilled, or are old.
    check = TaskCheck(text, TASKS, STATES)
    for written, problem in (
        (None, "malformed"), ("tell me: a joke", "grammar"), ("", "grammar"), ("find me slim jacket with color: red, and color: blue", "grammar"), ("find me", "grammar"),
        ("find me slim spaceship", "unknown"), ("find me slim jacket with color: purple", "unknown"), ("find me slim jacket with size: red", "unknown"),
        (TASKS[0].text, "copy"), ("find me slim warm jacket with color: red, and price lower than 30.00 dollars", ""),
        ("find me royal vegan boots with size: 7, and price lower than 50.00 dollars", ""),       # words and options of pages count as known
        ("find me boots with size: 8", "unknown"),
    ):
        assert check.problem(written) == problem, written
    check.known.add("find me warm tea")
    assert check.problem("find me warm tea") == "copy"
    assert TaskCheck(text, TASKS, []).problem("find me royal boots") == "unknown"


def test_difficulty_counts_constraints():
    assert [text.difficulty(task.text) for task in TASKS[:5]] == [3, 5, 4, 2, 5]


def test_variation_rows(tokenizer):
    # Stops rows that train the prompt, teach copying, pair unrelated tasks, or come from a task nobody can read.
    rows = variation_rows(tokenizer, text, TASKS, 200, np.random.default_rng(0), "")
    fmt, readable = chat_format(tokenizer, ""), {task.text: set(text.read_task(task.text).words) for task in TASKS[:5]}
    harder, copied, seeds = 0, 0, set()
    assert len(rows) == 200
    for row in rows:
        answer_from = row.mask.index(1)
        assert row.mask == [0] * answer_from + [1] * (len(row.ids) - answer_from) and len(row.mask) == len(row.ids)
        assert row.ids[-1] == fmt.end_ids[0] and fmt.end_ids[0] not in row.ids[answer_from:-1]
        prompt, target = tokenizer.decode(row.ids[:answer_from]), parse_task(tokenizer.decode(row.ids[answer_from:-1]))
        seed = prompt[prompt.index("vary: ") + len("vary: "):].split("\n")[0]
        assert prompt.startswith(fmt.open) and prompt.endswith(fmt.ask) and readable[seed] & readable[target]
        seeds.add(seed)
        copied += seed == target and seed != TASKS[3].text                 # tea shares no word with the others
        harder += text.difficulty(target) >= text.difficulty(seed)
    assert seeds == set(readable) and harder > 100 and copied < 40
    assert [row.ids for row in variation_rows(tokenizer, text, TASKS, 200, np.random.default_rng(0), "")] == [row.ids for row in rows]
    assert variation_rows(tokenizer, text, TASKS[5:], 10, np.random.default_rng(0), "") == variation_rows(tokenizer, text, [], 10, np.random.default_rng(0), "") == []


def test_the_hardest_acceptable_candidate_is_kept(tokenizer):
    # Stops the same task written twice, refused candidates that are used, and unfinished ones that are parsed.
    easy, hard, copy = "find me warm tea", "find me warm slim tea with color: red", TASKS[0].text
    scripted = [(easy, "end"), (hard, "end"), (copy, "end"), (hard, "end"), (easy, "length"), ("find me spaceship", "end"), (easy, "end"), (easy, "end"), ("a\nb", "end")]
    end, asked = chat_format(tokenizer, "").end_ids[0], []

    def sample(prompts, keys, max_new_tok, temperature):
        asked.extend(zip(prompts, keys))
        return [SimpleNamespace(ids=tokenizer(words, add_special_tokens=False)["input_ids"] + [end] * (stop == "end"), stop=stop) for words, stop in scripted]
    dream = SimpleNamespace(settings=SimpleNamespace(system=""), tokenizer=tokenizer, sampler=SimpleNamespace(sample=sample))
    check = TaskCheck(text, TASKS, [])
    made, counts = write_tasks(dream, "webshop", TASKS[:3], 3, check, "g0", 0.8)
    assert len(asked) == 9 == len({key for _, key in asked}) and TASKS[1].text in tokenizer.decode(asked[4][0])
    assert [(task.id, task.text, task.parent, task.generated, task.goal, task.start) for task in made] == [
        ("g0-0", hard, "t0", True, {}, text.START), ("g0-1", easy, "t2", True, {}, text.START)]
    assert counts == {"accepted": 4, "copy": 2, "malformed": 2, "unknown": 1}
    assert {easy, hard} <= check.known and TASKS[0].goal == {"goal_index": 0}
