"""The experience model: history, retrieval, prompts, malformed answers, task variation."""

from types import SimpleNamespace

import numpy as np
import pytest

from dreamgym import tiny
from dreamgym.chat import encode_untrusted
from dreamgym.encoder import WordEncoder
from dreamgym.envs.base import Environment
from dreamgym.episode import Episode, Step, StopReason, Task
from dreamgym.experience_model import (
    ExperienceModel, ExperienceSettings, fill_buffer, load_experience_model, save_settings, split_history)
from dreamgym.model import save_model
from dreamgym.prompts import (Prompts, Question, experience_system, is_new, parse_next, parse_reward,
                              variation_system)
from dreamgym.replay import ReplayBuffer
from dreamgym.run import write_json
from dreamgym.sampler import Sample
from dreamgym.word_tokenizer import build_tokenizer

ITEM = "item slim jacket $50\ncolor: red / blue\nchosen: "
PAGES = ["search page", "results page 1\nslim jacket $50 [1]", ITEM + "none", ITEM + "red", "order placed"]
ACTIONS = ["search[jacket]", "click[1]", "click[red]", "click[buy now]"]
REFUSED = Step(state=PAGES[0], action="click[1]", grounded="click[1] !", next_state=PAGES[0],
               reasoning="not here", reward_reasoning="no")
PROMPTS = Prompts(experience="you are a shop", variation="you write wishes")
GOOD, NO_REWARD = "think: it opens\nnext:\nresults page 1", "think: no purchase\nreward: 0 done: no"


class Shop(Environment):
    prompts = PROMPTS

    def ground(self, state, action):
        return f"{action} !"


class FakeSampler:
    """Answers from a list of texts or ids, and keeps the prompts and temperatures it was given."""

    def __init__(self, tokenizer, answers, stop="end"):
        self.tokenizer, self.answers, self.stop = tokenizer, list(answers), stop
        self.prompts, self.temperatures = [], []

    def clear_caches(self):
        pass

    def sample(self, prompts, keys, max_new_tok, temperature):
        self.prompts += prompts
        self.temperatures.append(temperature)
        end = [self.tokenizer.eos_token_id] if self.stop == "end" else []
        answers = [self.answers.pop(0) for _ in prompts]
        ids = [encode_untrusted(self.tokenizer, a) if isinstance(a, str) else a for a in answers]
        return [Sample(row + end, [], self.stop) for row in ids]


def episode(name: str, text: str = "find me a red jacket", **more) -> Episode:
    steps = [REFUSED] + [
        Step(state=s, action=a, grounded=f"{a} !", next_state=n, reasoning=f"so {n.split()[0]}",
             reward_reasoning="judged") for s, a, n in zip(PAGES, ACTIONS, PAGES[1:])]
    steps[-1].reward, steps[-1].done = 1.0, True
    return Episode(id=name, task=Task(id=name, text=text, start=PAGES[0]), steps=steps, **more)


@pytest.fixture(scope="module")
def parts():
    texts = [*PAGES, *ACTIONS, GOOD, NO_REWARD, "find me a red jacket hat", "before 1: earlier similar yes",
             *vars(PROMPTS).values()]
    tokenizer = build_tokenizer(texts)
    return tiny.create("scratch:8x1", tokenizer), tokenizer, WordEncoder(32).fit(PAGES + ACTIONS)


def make(parts, episodes=(), answers=(), stop="end", encoder=None, **settings):
    model, tokenizer, words = parts
    encoder = encoder or words
    buffer = ReplayBuffer(encoder.dim, 1000)
    fill_buffer(buffer, encoder, episodes)
    settings = ExperienceSettings(**{"context": 660, "max_next_tok": 80, "max_reward_tok": 40} | settings)
    dream = ExperienceModel(model, tokenizer, Shop(), settings, (buffer, encoder), slots=4)
    dream.sampler = FakeSampler(tokenizer, answers, stop) if answers is not None else dream.sampler
    return dream


def act(dream, count=1, action="search[jacket]"):
    """The results of an action in `count` new episodes of one task."""
    return dream.step(dream.reset([episode("a").task] * count), [action] * count)


def questions_of(dream, e):
    return dream.questions([(e.task.text, e.steps[:i], s.state, s.grounded) for i, s in enumerate(e.steps)])


def text_of(dream, ids):
    return dream.tokenizer.decode(ids, skip_special_tokens=True)


# ---- history and retrieval ----

class AngleEncoder:
    """phi for tests: an action, or a title, is a number of degrees, so that every cosine is known."""

    dim = 2

    def __call__(self, states, actions):
        angles = np.radians([float(a.split()[0].rstrip(":")) for a in actions])
        return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)

    def clear_caches(self):
        pass


@pytest.mark.parametrize("show_first", [False, True])
@pytest.mark.parametrize("history", range(5))
@pytest.mark.parametrize("length", range(7))
def test_history_against_a_loop(parts, history, length, show_first):
    """A history that is one step short, shows a step twice, or takes what is unlike the question; a page that is
    known in a newer version; a first page, of which later ones say nothing, out of sight."""
    angles, titles = [70, 80, 0, 10, 40, 10, 200][:length], [200, 20, 80, 12, 30, 20, 200][:length]
    past = [Step(state=f"page {i}", action=f"{angle}", grounded=f"{angle} !", next_state=f"{title}:\npage {i + 1}")
            for i, (angle, title) in enumerate(zip(angles, titles))]
    dream = make(parts, encoder=AngleEncoder(), history=history, min_similarity=0.7, k=0, show_first=show_first)
    (question,) = dream.questions([("task", past, "page now", "12")])
    last = max(0, length - history)
    assert question.recent == [(s.state, s.grounded) for s in past[last:]]
    newest = [i for i in range(last) if titles[i] not in titles[i + 1:] and abs(titles[i] - 12) < 45]
    pages = sorted(newest, key=lambda i: (abs(titles[i] - 12), -i))[:history // 2]
    close = [i for i in range(last) if i not in pages and abs(angles[i] - 12) < 45]
    steps = sorted(close, key=lambda i: (abs(angles[i] - 12), -i))[:history - history // 2]
    first = [0] if show_first and history and last else []       # it is like nothing that is asked
    assert [(d.state, d.shown_action, d.next_state) for d in question.earlier] == [
        (past[i].state, past[i].grounded, past[i].next_state) for i in first + steps[::-1] + pages[::-1]]


def test_what_is_retrieved(parts):
    """A dream that knows less of its tasks than a table, or that confirms its own errors; an answer that is looked up
    in a report."""
    own, twin, other, dreamt = episode("a"), episode("b"), episode("c", "find me a hat"), episode("d", world="dream")
    for question, step in zip(questions_of(make(parts, [own, twin, other], k=3), own), own.steps):
        best = question.demos[-1]
        assert (best.action, best.next_state) == (step.grounded, step.next_state)
    for some, settings in (([own, twin], {}), ([other], {"k": 0}), ([other], {"min_similarity": 1.1})):
        assert all(q.demos == [] for q in questions_of(make(parts, some, **settings), own))
    asked = [(own.task.text, [], own.steps[0].state, own.steps[0].grounded)]
    for episodes, want in ([own, dreamt, other], own), ([dreamt, other], other):
        question, = make(parts, episodes, k=1).questions(asked, dreaming=True)
        assert [t.task for t in question.demos] == [want.task.text] and not question.demos[0].synthetic


def test_transitions_of_a_broken_dream(parts):
    """A step without a next state as a demonstration; a rank that has no step to look up."""
    broken = episode("a", world="dream", stop=StopReason.MALFORMED)
    assert [(t.action, t.synthetic) for t in make(parts, [broken]).buffer.records] == [
        (s.grounded, True) for s in broken.steps[:-1]]
    real = make(parts, [episode("b")])
    assert not any(t.synthetic for t in real.buffer.records) and real.lookup([], []) == []


# ---- one prompt for training and dreaming ----

@pytest.mark.parametrize("settings", [
    {}, {"k": 0, "history": 0}, {"page_format": "diff", "k": 2}, {"reasoning": False},
    {"page_format": "titles", "show_first": True}, {"context": 230, "system_prompts": False}])
def test_acting_feeds_the_prompts_of_training(parts, settings):
    e = episode("a")
    dream = make(parts, [episode("c", "find me a hat")], **settings)
    samples = [(dream.next_sample(q, s), dream.reward_sample(e.task.text, s))
               for q, s in zip(questions_of(dream, e), e.steps)]
    (session,) = dream.reset([e.task])
    for step, pair in zip(e.steps, samples):
        for sample in pair:
            told = text_of(dream, sample.ids).startswith(experience_system(PROMPTS, dream.settings.page_format))
            assert told == dream.settings.system_prompts
        prompts = [s.ids[: s.mask.index(1)] for s in pair]
        starts = [] if dream.settings.reasoning else ["next:\n", "reward:"]
        starts = [encode_untrusted(dream.tokenizer, start) for start in starts] or [[], []]
        begun = [p + start for p, start in zip(prompts, starts)]
        assert all(s.ids[:len(b)] == b and sum(s.mask) == len(s.ids) - len(p)
                   for s, b, p in zip(pair, begun, prompts))
        dream.sampler = FakeSampler(dream.tokenizer, [s.ids[len(b):-1] for s, b in zip(pair, begun)])
        (result,) = dream.step([session], [step.action])
        assert dream.sampler.prompts == begun
        assert (result.state, result.reward, result.done) == (step.next_state, step.reward, step.done)
        expected = (step.reasoning, step.reward_reasoning) if dream.settings.reasoning else ("", "")
        assert (result.reasoning, result.reward_reasoning) == expected
    assert result.stop == StopReason.SUCCESS and result.raw_score == 1.0
    assert dream.counts | {"shortened": 0} == {"steps": 5, "resampled": 0, "malformed": 0, "shortened": 0}


def test_the_context_cuts_the_oldest_first(parts):
    """A prompt longer than its room, a cut inside a page."""
    e = episode("a")
    dream = make(parts, [episode(f"c{i}", f"hat {i}") for i in range(2)], k=3, history=2, min_similarity=-1.0)
    question, parts_of = questions_of(dream, e)[-1], lambda q: (q.recent, q.earlier, q.demos)
    full, count = len(dream.next_prompt_ids(question)[0]), []
    for context in range(80 + full, 80, -10):
        dream.settings.context = context
        ids, shown = dream.next_prompt_ids(question)
        for part, whole in zip(parts_of(shown), parts_of(question)):
            assert part == whole[len(whole) - len(part):]
        count.append(sum(map(len, parts_of(shown))))
        assert len(ids) <= context - dream.settings.max_next_tok or count[-1] == 0
        text = text_of(dream, ids)
        assert text.endswith(f"task: {e.task.text}\nstate:\n{question.state}\naction: {question.action}\n")
    assert count[0] == sum(map(len, parts_of(question))) >= 6 and count[-1] == 0
    assert count == sorted(count, reverse=True) and len(set(count)) > 4
    assert dream.counts["shortened"] == sum(n < count[0] for n in count)


@pytest.mark.parametrize("limits, fits", [
    ({}, (True, True)), ({"max_next_tok": 10}, (False, True)), ({"max_reward_tok": 5}, (True, False)),
    ({"context": 60, "max_next_tok": 40}, (False, False))])
def test_what_cannot_be_generated_is_not_taught(parts, limits, fits):
    dream, e = make(parts, **limits), episode("a")
    samples = (dream.next_sample(questions_of(dream, e)[2], e.steps[2]),
               dream.reward_sample(e.task.text, e.steps[2]))
    assert tuple(s is not None for s in samples) == fits
    assert all(len(s.ids) <= dream.settings.context and s.ids[-1] in dream.chat.end_ids for s in samples if s)


def test_what_no_prompt_can_hold(parts):
    dream = make(parts, answers=None, context=120, max_next_tok=4)
    for action in ("search[" + "slim " * 300 + "]", "\x00\u2028" * 30, ""):
        assert act(dream, action=action)[0].stop == StopReason.MALFORMED
    with pytest.raises(ValueError, match="task t: field `start` is empty"):
        dream.reset([Task(id="t", text="find me a hat")])


# ---- malformed answers ----

BAD = ["", "the next page shows jackets", "think: a\nreward: 1 done: yes\nnext:\nb\x00"]
BAD_REWARD = ["think: a\nreward: 1 done: no", "yes, it does", NO_REWARD + "\nreward: 1 done: yes"]


@pytest.mark.parametrize("stop, answers", [
    ("length", [GOOD] * 3), *(("end", [text] * 3) for text in BAD), *(("end", [GOOD] + [text] * 3) for text in BAD_REWARD)])
def test_a_malformed_or_endless_answer_ends_the_episode(parts, stop, answers):
    dream = make(parts, answers=answers, stop=stop)
    (result,) = act(dream)
    assert (result.state, result.reward, result.done, result.stop) == (PAGES[0], 0, True, StopReason.MALFORMED)
    assert result.output == dream.tokenizer.decode(encode_untrusted(dream.tokenizer, answers[-1]))
    assert dream.counts == {"steps": 1, "resampled": 2, "malformed": 1, "shortened": 0}
    assert dream.sampler.temperatures[-3:] == [0.0, 1.0, 1.0]


def test_a_malformed_answer_is_drawn_again_by_itself(parts):
    """An episode that fails by one slip; answers of one episode that reach another."""
    other = "think: no\nnext:\nsearch page 2"
    dream = make(parts, answers=["nonsense", other, GOOD, NO_REWARD, "nonsense", "think: a\nreward: 0 done: yes"])
    a, b = dream.step(dream.reset([episode("a").task] * 2), ["search[jacket]", "search[hat]"])
    assert (a.state, a.done) == ("results page 1", False)
    assert (b.state, b.done, b.stop) == ("search page 2", True, StopReason.FAILURE)
    prompts = dream.sampler.prompts
    assert prompts[0] == prompts[2] and prompts[4] == prompts[5]
    assert dream.sampler.temperatures == [0.0, 1.0, 0.0, 1.0]
    assert dream.counts == {"steps": 2, "resampled": 2, "malformed": 0, "shortened": 0}


def test_an_answer_that_goes_on_is_cut(parts):
    asked = Question("find", "search page", "search[jacket]", [], [], [])
    for stop, text in (("length", f"{GOOD}\naction: a\nnext:\nb"), ("end", f"{GOOD}\nreward: 1 done: yes")):
        dream = make(parts, answers=[text], stop=stop)
        (answer, _), = dream._ask([([1], lambda written: parse_next(written, asked, "full"))], "", 20)
        assert answer == ("it opens", "results page 1") and dream.counts["resampled"] == 0
    assert make(parts, answers=[GOOD], stop="length")._answers([([1], parse_reward)], "", 20) == [(None, GOOD)]


@pytest.mark.parametrize("draws, calls", [(0, 1), (1, 2), (2, 3), (4, 3)])
def test_further_draws_are_made_together(parts, draws, calls):
    """Stops one endless answer from being decoded alone eight times; the first that can be read counts."""
    dream = make(parts, answers=["nonsense"] * (1 + draws), max_resamples=draws)
    assert dream._ask([([1], parse_reward)], "", 20) == [(None, "nonsense")]
    assert dream.counts["resampled"] == draws and len(dream.sampler.temperatures) == calls
    dream = make(parts, answers=["nonsense"] * 3 + [NO_REWARD, OPEN], max_resamples=4)
    assert dream._ask([([1], parse_reward)], "", 20) == [(parse_reward(NO_REWARD), NO_REWARD)]


PAID, OPEN = "think: yes\nreward: 1 done: yes", "think: no\nreward: 0 done: no"


@pytest.mark.parametrize("drawn, reward", [
    ([PAID, PAID], 1.0), ([PAID, OPEN], 0.0), ([OPEN], 0.0), (["nonsense", PAID], 1.0)])
def test_a_paying_verdict_is_confirmed(parts, drawn, reward):
    """A policy that lives on the judge's slips: a draw that does not pay takes the reward back."""
    dream = make(parts, answers=[GOOD, GOOD, PAID, OPEN, *drawn], confirmations=2)
    paid, unpaid = dream.step(dream.reset([episode("a").task, episode("b", "hat").task]), ["search[jacket]"] * 2)
    assert (paid.reward, paid.done, unpaid.reward) == (reward, bool(reward), 0.0)
    assert dream.sampler.temperatures == [0.0, 0.0] + [1.0] * len(drawn) and not dream.sampler.answers


def test_equal_questions_are_answered_once(parts):
    """One answer decoded for each rollout; one slip, drawn again, in all of them; answers that outlive the weights."""
    dream = make(parts, answers=["nonsense", GOOD, GOOD, NO_REWARD, GOOD, NO_REWARD])
    assert {result.state for result in act(dream, 2)} == {"results page 1"}
    assert [len(dream.sampler.prompts), dream.counts["resampled"]] == [4, 2]     # one greedy, two drawn, one reward
    dream.answers[next(iter(dream.answers))] = GOOD, True
    assert act(dream, 3)[2].state == "results page 1" and len(dream.sampler.prompts) == 4
    dream.clear_caches()
    act(dream)
    assert len(dream.sampler.prompts) == 6 and not dream.sampler.answers


def test_new_pages_are_drawn_where_asked_for(parts):
    """One guess for all rollouts; a drawn verdict or copy; a draw that is unreadable or known in place of a good answer."""
    known = f"next:\n{PAGES[0]}"
    dream = make(parts, answers=[GOOD, "think: x\nnext:\nsearch page 2", "nonsense", known, NO_REWARD, NO_REWARD,
                                 known, NO_REWARD], next_temperature=0.5)
    results = act(dream, 3)
    assert [r.state for r in results] == ["search page 2", "results page 1", "results page 1"]
    assert results[0].reasoning == "x" and dream.sampler.temperatures == [0.0, 0.5, 0.0]
    assert act(dream, action="click[no]")[0].state == PAGES[0]
    assert dream.sampler.temperatures == [0.0, 0.5, 0.0, 0.0, 0.0]
    question = Question("", "a\nb", "go", [], [], [])
    assert is_new(("", "c"), question) and not is_new(("", "a\nc"), question) and not is_new(None, question)


# ---- task variation, files ----

def test_write_variations(parts):
    """Variations that are handed to another seed task, unreadable ones that become tasks."""
    dream = make(parts, answers=["red hat", "a\nb", "", "blue hat", "state: x", "hat 2"])
    assert dream.write_variations(["hat", "jacket"], 3, 0.8) == [["red hat", None, None], ["blue hat", None, "hat 2"]]
    prompts = [text_of(dream, ids) for ids in dream.sampler.prompts]
    assert ["vary: hat\n" in p for p in prompts] == [True] * 3 + [False] * 3
    assert prompts[0].startswith(variation_system(PROMPTS))
    taught = dream.variation_sample("hat", "red hat")
    assert taught.ids[: taught.mask.index(1)] == dream.sampler.prompts[0]
    dream.sampler = FakeSampler(dream.tokenizer, ["red hat"], "length")
    assert dream.write_variations(["hat"], 1, 0.8) == [[None]]


def test_a_saved_model_reads_the_same_prompts(parts, tmp_path):
    dream = make(parts, [episode("c", "hat")], None, k=2, page_format="diff", max_next_tok=6, max_reward_tok=6)
    folder = tmp_path / "model"
    save_model(dream.model, dream.tokenizer, folder)
    dream.buffer.save(folder / "replay")
    save_settings(folder, dream.settings, "words", dream.encoder)
    write_json(folder / "meta.json", {"settings": {}})
    again = load_experience_model(tmp_path, Shop())
    assert again.settings == dream.settings
    again.encoder = WordEncoder(32, again.encoder.idf)  # this test's phi is small
    a, b = (questions_of(d, episode("a")) for d in (dream, again))
    assert a == b and [dream.next_prompt_ids(q) for q in a] == [again.next_prompt_ids(q) for q in b]
    assert dream.predict(a[:2]) == again.predict(b[:2])
    with pytest.raises(ValueError, match="found no experience model there"):
        load_experience_model(tmp_path / "elsewhere", SimpleNamespace())


def test_the_page_before_is_another_page():
    """A refused action in the history: "back" then led to the page where it was refused."""
    steps = [Step(state=str(i), action="a", next_state=str(i) if i in (1, 4) else "x") for i in range(5)]
    pages = lambda count: tuple([step.state for step in part] for part in split_history(steps, count))
    assert pages(2) == (["2", "3"], ["0", "1", "4"]) and pages(9) == (["0", "2", "3"], ["1", "4"])
    assert pages(0) == ([], ["0", "1", "2", "3", "4"])
