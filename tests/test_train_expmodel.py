"""The rows of train_expmodel.py: shares, reproducible draws, who is drawn, known words."""
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dreamgym import checkpoint, tiny
from dreamgym.episode import Episode, Step, Task
from dreamgym.logprobs import TrainSample
from dreamgym.prompts import Question, next_prompt, rename_question
from dreamgym.word_tokenizer import build_tokenizer
from train_expmodel import Args, Rows, needs_task, steps_of_epochs


class Model:
    """Says what it was asked for, in place of samples."""
    tokenizer = None

    def questions(self, steps):
        self.pasts = [len(past) for _, past, _, _ in steps]
        return [Question(t, s, a, [], [], [Step(state="red", action="x", next_state="red")]) for t, _, s, a in steps]

    next_sample = staticmethod(lambda question, step: ("next", question, step))
    reward_sample = staticmethod(lambda task, step: ("reward", task, step))
    variation_sample = staticmethod(lambda seed, target: ("variation", seed, target))


def episodes():
    steps = [Step(state=f"red {i}", action=f"go {i}", next_state=f"red {i + (i != 1)}", thought="nobody looks")
             for i in range(3)]
    other = Step(state="red", action="buy", next_state="red bought", reward=1.0, done=True)
    return [Episode(id="a", task=Task(id="a", text="find red"), steps=steps, source="random"),
            Episode(id="b", task=Task(id="b", text="buy red"), steps=[other], source="counterfactual",
                    label="none")]


def rows_of(**changes):
    args = Args(**{"rows": 20, "reward_share": 0.25, "counterfactual_share": 0.25, "variation_share": 0.0}
                | changes)
    rows = Rows(args, Model(), episodes(), [])
    rows.with_prompt_loss = lambda sample, share, rng: (*sample, share)
    return rows


def test_the_shares_of_the_rows():
    """A kind of row that is never drawn, or rewards of counterfactuals among next states."""
    drawn = rows_of().draw(0)
    kinds = [row[0] for row in drawn]
    assert (kinds.count("next"), kinds.count("reward")) == (10, 10)
    rewards = [row[1] for row in drawn if row[0] == "reward"]
    assert rewards.count("buy red") == 5 and rewards.count("find red") == 5
    assert all(row[1].task == "find red" for row in drawn if row[0] == "next")
    naive = [row[1] for row in rows_of(counterfactual_share=0.0).draw(0) if row[0] == "reward"]
    assert naive == ["find red"] * 5


def test_shares_over_many_steps():
    """A kind of row that never comes, because its share of a step is less than half a row; differences of rounded
    sums below 0, which end a training in its middle."""
    for size in (1, 3, 8, 15, 32):
        for share in (0.01, 0.05, 0.3):
            rows = rows_of(rows=size, reward_share=0.15, counterfactual_share=0.25, variation_share=share, short_share=0.02)
            rows.kinds = dict.fromkeys(rows.kinds, [1])
            counts = [rows.counts(step) for step in range(600)]
            assert all(min(c.values()) >= 0 and size <= sum(c.values()) <= size + 3 for c in counts)
            for kind, wanted in (("variation", share), ("reward", 0.15), ("counterfactual", 0.25)):
                assert sum(c[kind] for c in counts) == pytest.approx(600 * size * wanted, abs=1)


def test_draws_depend_on_seed_and_step_alone():
    first, again = rows_of(), rows_of()
    first.draw(0)
    assert first.draw(7) == again.draw(7) != again.draw(8)
    assert rows_of(seed=1).draw(7) != rows_of().draw(7)


def test_ranks_share_the_rows():
    """A row that two ranks train, or none; a row that another number of ranks changes."""
    parts = [rows_of(demo_dropout=0.5).draw(3, slice(rank, None, 3)) for rank in range(3)]
    assert sorted(map(repr, sum(parts, []))) == sorted(map(repr, rows_of(demo_dropout=0.5).draw(3)))


def test_prompt_loss_leaves_the_answer_and_the_first_token_alone():
    """An answer that is not trained, or a first token that nothing predicts."""
    sample = TrainSample(list(range(200)), [0] * 150 + [1] * 50)
    found = Rows(Args(), Model(), episodes(), []).with_prompt_loss(sample, 0.3, np.random.default_rng(0))
    assert found.ids == sample.ids and found.mask[0] == 0 and all(found.mask[150:])
    assert 25 < sum(found.mask[:150]) < 65 and sum(sample.mask) == 50


def test_short_questions():
    """--short-first-steps that does nothing, never ends, asks for what is not shown, or has other names; the same of
    --short-share; rows without coded words; one weight of the prompts of both questions."""
    rows = rows_of(short_first_steps=2, short_share=0.1, reward_prompt_loss=0.1, prompt_loss=0.2,
                   short_prompt_loss=0.3, rename_share=0.5)
    coded = []
    rows.coder = SimpleNamespace(draw=lambda sample, max_tok, rng: coded.append(sample) or sample)
    rows.names = SimpleNamespace(draw=lambda share, rng: lambda text: text.replace("red", "blue") if share else text)
    short = ("next", Question("find red", "red 1", "go 1", [], [], []), 0.3)
    first, later = rows.draw(1), rows.draw(2)
    assert Counter(row[0] for row in first) == {"reward": 13, "next": 7}
    assert {(row[1], row[-1]) for row in first if row[0] == "reward"} == {("buy red", 0.0)}
    assert all((row[0], row[1], row[-1]) == short for row in first if row[0] == "next")
    assert [(row[0], row[1], row[-1]) == short for row in later if row[0] == "next"].count(True) == 2
    assert Counter((row[0], row[-1]) for row in later) == {("reward", 0.1): 10, ("next", 0.2): 8, ("next", 0.3): 2}
    assert len(coded) == 40 and "blue" in later[0][1].task
    naive = rows_of(short_first_steps=2, counterfactual_share=0.0).draw(1)
    assert {row[0] for row in naive} == {"next"}


def test_epochs_are_passes_over_the_recorded_transitions():
    """Counterfactual steps counted as recorded ones; their share taken away where there are none."""
    args = Args(epochs=2, rows=20, reward_share=0.1, counterfactual_share=0.3, variation_share=0.1)
    sources = [{"source": "oracle", "transitions": 300}, {"source": "imported", "transitions": 100}]
    assert steps_of_epochs(args, sources) == 50
    assert steps_of_epochs(args, [*sources, {"source": "counterfactual", "transitions": 999}]) == 80
    args.short_first_steps = 7
    assert steps_of_epochs(args, sources) == 57
    args.short_share = 0.25
    assert steps_of_epochs(args, sources) == 80


def test_renaming_is_whole():
    rows = rows_of(rename_share=1.0, counterfactual_share=0.0)
    rows.names = SimpleNamespace(draw=lambda share, rng: lambda text: text.replace("red", "blue"))
    for row in rows.draw(0):
        assert "red" not in repr(row) and "blue" in repr(row)
    question = Question("red", "red", "red", [("red", "red")], [Step(state="red", action="red", next_state="red", reward=1.0)], [])
    assert "red" not in repr(rename_question(question, lambda text: text.replace("red", "blue")))


def test_rows_under_another_task():
    """A page that needs its task, shown under another one; a reward judged under another task; a share of none."""
    rows = rows_of(other_task=1.0)
    rows.tasks = ["find blue"]
    drawn = rows.draw(0)
    assert {row[1].task for row in drawn if row[0] == "next"} == {"find blue"}
    assert {row[1] for row in drawn if row[0] == "reward"} == {"buy red", "find red"}
    assert {row[1].task for row in rows_of().draw(0) if row[0] == "next"} == {"find red"}


@pytest.mark.parametrize("state, page, reasoning, needs", [
    ("shelf", "Mug", "", True), ("shelf", "shelf", "no mug", True), ("mug", "mug", "", False),
    ("shelf", "cup", "", False), ("smug shelf", "mug", "", True), ("shelf", "find a cup", "a", False)])
def test_which_pages_need_their_task(state, page, reasoning, needs):
    """A wanted thing that is found in a new place: under another task it would be found without being wanted."""
    step = Step(state=state, action="look", next_state=page, reasoning=reasoning)
    assert needs_task(Question("find a mug", state, "look", [], [], []), step, "find a pan") == needs
    assert not needs_task(Question("find a mug", state, "look", [], [], []), step, "find a mug or pan")
    assert not needs_task(Question("find a mug", state, "look", [("the mug", "open")], [], []), step, "find a pan")


def test_demo_dropout_and_history():
    """Demonstrations that are never left out; a history that holds the step itself."""
    drawn = rows_of(demo_dropout=1.0, counterfactual_share=0.0, reward_share=0.0)
    assert all(not row[1].demos for row in drawn.draw(0))
    picked = [int(row[1].action.split()[1]) for row in drawn.draw(3)]
    assert drawn.model.pasts == picked and len(set(picked)) > 1


def test_steps_that_changed_nothing_are_drawn_more_often():
    """--invalid-weight that weighs the wrong steps: step 1 changes nothing."""
    flags = {"rows": 400, "reward_share": 0.0, "counterfactual_share": 0.0}
    share = lambda weight: np.mean([row[1].action == "go 1"
                                    for row in rows_of(invalid_weight=weight, **flags).draw(0)])
    assert 0.25 < share(1.0) < 0.42 and 0.6 < share(4.0) < 0.74


def test_the_tokenizer_knows_what_is_asked():
    """Words of prompts, pages or thoughts that a from-scratch model has to spell."""
    tokenizer = build_tokenizer(tiny.corpus(episodes(), [Task(id="a", text="find red")]))
    step = episodes()[0].steps[0]
    question = Question("find red", step.state, step.action, [(step.state, step.action)], [step], [step])
    pieces = tokenizer.tokenize(f"{next_prompt(question, 'diff')}\n{step.thought}")
    assert sum(len(piece.strip("▁")) == 1 and piece.strip("▁").isalpha() for piece in pieces) == 0


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path):
    (tmp_path / "training-0.pt").touch()
    with pytest.raises(ValueError, match="found no training.pt"):
        checkpoint.load_state(tmp_path, [], SimpleNamespace(rank=0, world_size=1))
