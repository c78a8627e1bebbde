"""The experience model as a world: one prompt for training and dreaming, retrieval, malformed answers, and a tiny model that reproduces what it saw."""

from collections import Counter

import numpy as np
import pytest
import torch

import train_expmodel
from dreamgym import run
from dreamgym.envs.webshop import text as rules
from dreamgym.episode import Episode, Step, Task, read_episodes, read_tasks
from dreamgym.experience_model import DreamSettings, Encoder, ExperienceModel, Query, fill_buffer, retrieve, to_transitions, training_row
from dreamgym.model import Row, build_tokenizer, clip_grad_norm, create_tiny, encode_untrusted, row_logps
from dreamgym.optim import make_optimizers
from dreamgym.replay import ReplayBuffer
from dreamgym.report import step_queries
from dreamgym.sampler import Sample

TASK = Task("t", "find me slim jacket with color: red, and price lower than 60.00 dollars", "webshop", rules.START)
ITEM = "item luna slim jacket $50\ncolor: red / blue\nchosen: red"


class FakeSampler:
    """Answers from a list of texts (or from a function of the prompt), and keeps the prompts it was given."""

    def __init__(self, tokenizer, answers, stop="end"):
        self.tokenizer, self.answers, self.stop, self.prompts = tokenizer, list(answers), stop, []
        self.temperatures = []

    def sample(self, prompts, keys, max_new_tok, temperature):
        self.prompts += prompts
        self.temperatures.append(temperature)
        texts = [self.answers.pop(0) for _ in prompts]
        end = [self.tokenizer.eos_token_id] if self.stop == "end" else []
        return [Sample(encode_untrusted(self.tokenizer, text) + end, [], self.stop) for text in texts]

    def reset(self):
        pass


@pytest.fixture(scope="module")
def world(workspace):
    """Episodes, tokenizer, an untrained model, phi and a seeded buffer."""
    episodes = read_episodes(workspace.data / "train.jsonl")
    tokenizer = build_tokenizer(train_expmodel.corpus(episodes, read_tasks(workspace.data / "tasks_train.jsonl")[:200]))
    model = create_tiny(tokenizer, "tiny", 0)
    encoder = Encoder(model, tokenizer)
    buffer = ReplayBuffer(encoder.dim, 10_000)
    fill_buffer(buffer, encoder, rules, [e for e in episodes if e.source != "relabelled"])
    return {"episodes": episodes, "tokenizer": tokenizer, "model": model, "encoder": encoder, "buffer": buffer}


def dream_of(world, settings=None, **changes):
    return ExperienceModel(world["model"], world["tokenizer"], rules, settings or DreamSettings(**changes), world["buffer"], world["encoder"])


def rows_of(world, dream, episodes):
    queries, steps = step_queries(episodes)
    demos = retrieve(dream.buffer, dream.encoder, rules, dream.settings, queries)
    return [training_row(dream.fmt, world["tokenizer"], rules, dream.settings, q.task_text, q.history, d, s) for q, (_, s), d in zip(queries, steps, demos)]


def prompt_of(row):
    return row.ids[: row.mask.index(1)]


def text_of(world, ids):
    return world["tokenizer"].decode(ids)


# ---------------------------------------------------------------------------------------------------------------- one prompt


@pytest.mark.parametrize("changes", [{}, {"k": 0}, {"k": 3, "history": 2}, {"history": 0}, {"context": 400}, {"reasoning": False}])
def test_predict_feeds_the_prompt_of_training(world, changes):
    """Stops training and dreaming from drifting apart by one token: history, demonstrations, cuts, and the start of an answer without reasoning."""
    episodes = [e for e in world["episodes"] if e.source != "relabelled"][:12] + [e for e in world["episodes"] if e.source == "relabelled"][:5]
    dream = dream_of(world, attempts=1, **changes)
    queries, _ = step_queries(episodes)
    dream.sampler = FakeSampler(world["tokenizer"], ["" for _ in queries])
    dream.predict(queries, list(range(len(queries))))
    rows = rows_of(world, dream, episodes)
    assert len(rows) == len(dream.sampler.prompts) > 30
    for row, prompt in zip(rows, dream.sampler.prompts):
        assert row.ids[: len(prompt)] == prompt and not any(row.mask[: len(prompt_of(row))]) and all(row.mask[len(prompt_of(row)):])
        assert len(prompt) - len(prompt_of(row)) == (0 if dream.settings.reasoning else len(encode_untrusted(world["tokenizer"], "next:\n")))


def test_build_rows_are_these_rows(world):
    """Stops the training script from building its prompts in a way of its own."""
    episodes = [e for e in world["episodes"] if e.source != "relabelled"][:8]
    dream = dream_of(world)
    built = train_expmodel.build_rows(train_expmodel.Args(), world["tokenizer"], rules, dream.settings, episodes, world["buffer"], world["encoder"])
    assert [(r.ids, r.mask) for r in built] == [(r.ids, r.mask) for r in rows_of(world, dream, episodes)]


def test_acting_through_an_episode_feeds_the_prompts_of_training(world):
    """Stops `act` from keeping another history than the offline episode: a model that answers rightly leads through the very same states."""
    episodes = sorted((e for e in world["episodes"] if e.source == "demonstrator"), key=lambda e: -len(e.steps))[:3]
    dream = dream_of(world, history=2)
    rows = rows_of(world, dream, episodes)
    first = np.cumsum([0, *(len(e.steps) for e in episodes)])
    sessions = dream.start([e.task for e in episodes])
    for session, episode in zip(sessions, episodes):
        session.id = episode.id
    for t in range(max(len(e.steps) for e in episodes)):
        running = [i for i, e in enumerate(episodes) if t < len(e.steps)]
        now = [rows[first[i] + t] for i in running]
        dream.sampler = FakeSampler(world["tokenizer"], [text_of(world, row.ids[len(prompt_of(row)): -1]) for row in now])
        results = dream.act([sessions[i] for i in running], [episodes[i].steps[t].action for i in running])
        assert dream.sampler.prompts == [prompt_of(row) for row in now]
        for i, result in zip(running, results):
            step = episodes[i].steps[t]
            assert (result.state, result.reward, result.done, result.info["grounded"], result.info["valid"]) == (step.next_state, step.reward, step.done, step.grounded, step.valid)
            assert result.info["reasoning"] == step.reasoning
    assert dream.counts == {"steps": len(rows), "retried": 0, "malformed": 0, "refuted": 0}


def test_recall():
    """Stops a window of pages that is filled up with option clicks on the page the model sees anyway, or that loses the results an item was opened from."""
    start, results, item, red = "search page", "results page 1 of 2\na $1 [1]", "item a $1\ncolor: red\nchosen: none", "item a $1\ncolor: red\nchosen: red"
    history = [(start, "search[a]"), (results, "click[1] a $1"), (item, "click[red]"), (red, "click[red]")]
    assert rules.recall(history, red, "click[x]", 1) == [(results, "click[1] a $1")]
    assert rules.recall(history, red, "click[x]", 2) == history[:2]
    assert rules.recall(history, red, "click[x]", 9) == history[:2]
    assert rules.recall(history + [(red, "click[< prev]")], results, "click[x]", 1) == [(red, "click[< prev]")]
    assert rules.recall([], start, "click[x]", 2) == []


def test_the_context_cuts_history_first_then_demonstrations(world):
    """Stops a prompt longer than its room, a cut in the middle of a page, and history that is kept while the demonstration next to the answer goes."""
    history = [(f"results page {i} of 9\nplain red jacket $1{i} [1]", "click[next >]") for i in range(1, 4)]
    query = Query(TASK.text, history, "results page 4 of 9\nplain red jacket $14 [1]", "click[next >]", "x")
    texts = []
    for context in (4000, 300, 275, 250, 230, 201):
        dream = dream_of(world, context=context, history=3, k=1)
        dream.sampler = FakeSampler(world["tokenizer"], [""] * dream.settings.attempts)
        dream.predict([query], ["x"])
        ids = dream.sampler.prompts[0]
        texts.append(text_of(world, ids))
        has_more = texts[-1].count("state:") > 1 or "similar:" in texts[-1]
        assert len(ids) <= context - dream.settings.max_new_tok or not has_more
        assert texts[-1].startswith(f"task: {TASK.text}\n") and f"state:\n{query.state}\naction: {query.grounded}\n" in texts[-1]
    pages, similar = [t.count("state:") for t in texts], ["similar:" in t for t in texts]
    assert pages[0] == 4 and similar[0] and pages[-1] == 1 and not similar[-1]
    assert pages == sorted(pages, reverse=True) and similar == sorted(similar, reverse=True)
    assert all(p == 1 for p, s in zip(pages, similar) if not s)


def test_a_purchase_is_judged_from_task_and_page_alone(world):
    """Stops 'this looks like a good shopper' from standing in for a judgement: no history and no demonstration at buy-time, in training and in the dream."""
    history = [(rules.START, "search[slim jacket]"), ("results page 1 of 1\nluna slim jacket $50 [1]", "click[1] luna slim jacket $50")]
    dream = dream_of(world, k=4, history=4)
    dream.sampler = FakeSampler(world["tokenizer"], [""] * (2 * dream.settings.attempts))
    dream.predict([Query(TASK.text, history, ITEM, "click[buy now]", "x"), Query(TASK.text, history, ITEM, "click[features]", "x")], [0, 1])
    bought, looked = (text_of(world, ids) for ids in dream.sampler.prompts[:2])
    assert bought.count("state:") == 1 and "similar:" not in bought and "results page" not in bought
    assert looked.count("state:") > 1


# ---------------------------------------------------------------------------------------------------------------- retrieval


def test_retrieval_never_returns_the_own_episode(world):
    """Stops the answer from leaking into the prompt: a buffer that holds only the own episode has nothing to say, a full one says something else."""
    episode = max((e for e in world["episodes"] if e.source == "demonstrator"), key=lambda e: len(e.steps))
    queries, _ = step_queries([episode])
    alone = ReplayBuffer(world["encoder"].dim, 1000)
    fill_buffer(alone, world["encoder"], rules, [episode])
    settings = DreamSettings(k=3)
    assert retrieve(alone, world["encoder"], rules, settings, queries) == [[] for _ in queries]
    stranger = [Query(q.task_text, q.history, q.state, q.grounded, "another") for q in queries]
    found = retrieve(alone, world["encoder"], rules, settings, stranger)
    assert any(d.action == q.grounded and d.next_state == s.next_state for q, s, demos in zip(queries, episode.steps, found) for d in demos)
    own = {t.next_state for t in to_transitions([episode])} - {t.next_state for t in world["buffer"].transitions() if t.episode_id != episode.id}
    assert own and not any(d.next_state in own for demos in retrieve(world["buffer"], world["encoder"], rules, settings, queries) for d in demos)


def test_the_most_similar_demonstration_stands_last(world):
    """Stops the best demonstration from standing furthest from the answer, where it is cut first."""
    episode = next(e for e in world["episodes"] if e.source == "demonstrator")
    step = episode.steps[0]
    query = Query(episode.task.text, [], step.state, step.grounded, "another")
    assert retrieve(world["buffer"], world["encoder"], rules, DreamSettings(k=3), [query])[0][-1].action == step.grounded


def test_encoder_is_the_mean_of_the_word_embeddings(world):
    """Stops padding, order or batching from leaking into phi; against a slow loop."""
    texts = [f"{s.action}\n{s.state}" for e in world["episodes"][:6] for s in e.steps]
    vectors = Encoder(world["model"], world["tokenizer"], batch=4)(texts + texts[:3])
    for text, vector in zip(texts + texts[:3], vectors):
        rows = [world["model"].model.embed_tokens.weight[i] for i in encode_untrusted(world["tokenizer"], text)]
        np.testing.assert_allclose(vector, (sum(rows) / len(rows)).detach().numpy(), atol=1e-6)
    deep = Encoder(world["model"], world["tokenizer"], layer=-1, batch=3)
    np.testing.assert_allclose(deep(texts[:7])[2], Encoder(world["model"], world["tokenizer"], layer=-1)(texts[2:3])[0], atol=1e-5)


def test_dreamt_transitions_are_marked(world):
    """Stops synthetic transitions from passing for real ones in the buffer."""
    step = Step(rules.START, "search[x]", "results page 1 of 1\nnothing", grounded="search[x]")
    assert [t.synthetic for t in to_transitions([Episode("a", TASK, [step], world="dream"), Episode("b", TASK, [step])])] == [True, False]


# ---------------------------------------------------------------------------------------------------------------- malformed answers

GOOD = "think: it opens\nnext:\nresults page 1 of 1\nluna slim jacket $50 [1]\nreward: 0 done: no"
BAD = {
    "empty": "", "prose": "I think the next page shows jackets", "no end line": "think: a\nnext:\nsearch page", "half": "think: it opens\nnext:",
    "reward while running": "think: a\nnext:\nsearch page\nreward: 1 done: no", "large reward": "think: a\nnext:\nsearch page\nreward: 100 done: yes",
    "forged tag in the page": "think: a\nnext:\nsearch page\nreward: 1 done: yes\nreward: 1 done: yes", "unknown page": "think: a\nnext:\nyou won\nreward: 0 done: no",
    "control characters": "think: a\nnext:\nsearch\x07 page\nreward: 0 done: no", "no such page": "think: a\nnext:\npage before\nreward: 0 done: no",
    "paid without a purchase": "think: a\nnext:\norder placed\nreward: 1 done: yes", "special token": "think: <end>\nnext:\n<ask>\nreward: 0 done: no",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_answer_is_a_counted_failure(world, name):
    """Stops a crash in mid-run, and a reward from anything but a well-formed judgement of a purchase."""
    dream = dream_of(world)
    dream.sampler = FakeSampler(world["tokenizer"], [BAD[name], GOOD] + [BAD[name]] * (dream.settings.attempts - 1))
    sessions = dream.start([TASK, TASK])
    bad, good = dream.act(sessions, ["search[slim jacket]"] * 2)
    assert (bad.reward, bad.done, bad.info["stop"], bad.state) == (0.0, True, "malformed", rules.START) and "output" in bad.info
    assert (good.done, good.state) == (False, "results page 1 of 1\nluna slim jacket $50 [1]")
    assert dream.counts == {"steps": 2, "retried": dream.settings.attempts - 1, "malformed": 1, "refuted": 0}


def test_a_malformed_answer_is_drawn_again_by_itself(world):
    """Stops an episode from failing by one slip of the dream, and answers of one query from reaching another; the first draw is greedy, later ones are not."""
    dream = dream_of(world)
    dream.sampler = FakeSampler(world["tokenizer"], ["nonsense", GOOD, "nonsense", GOOD])
    again, good = dream.act(dream.start([TASK, TASK]), ["search[slim jacket]"] * 2)
    assert again.state == good.state == "results page 1 of 1\nluna slim jacket $50 [1]"
    assert dream.sampler.temperatures == [0.0, 1.0, 1.0] and dream.sampler.prompts[0] == dream.sampler.prompts[2] == dream.sampler.prompts[3]
    assert dream.counts == {"steps": 2, "retried": 2, "malformed": 0, "refuted": 0}


@pytest.mark.parametrize("stop", ["length", "context"])
def test_an_endless_answer_is_malformed(world, stop):
    """Stops an answer that was cut off at a lucky place from counting."""
    dream = dream_of(world)
    dream.sampler = FakeSampler(world["tokenizer"], [GOOD] * dream.settings.attempts, stop)
    assert dream.act(dream.start([TASK]), ["search[slim jacket]"])[0].info["stop"] == "malformed"


def test_a_purchase_can_be_paid_and_a_refused_action_is_marked(world):
    """Stops the checks from refusing what is right: reward 1 at a purchase; a click on what is not there is invalid but no error."""
    dream = dream_of(world)
    dream.sampler = FakeSampler(world["tokenizer"], ["think: yes\nnext:\norder placed\nreward: 1 done: yes", "think: no\nnext:\nsame page\nreward: 0 done: no"])
    sessions = dream.start([TASK, TASK])
    sessions[0].state = sessions[1].state = ITEM
    paid, refused = dream.act(sessions, ["click[buy now]", "click[purple]"])
    assert (paid.reward, paid.done, paid.info["stop"]) == (1.0, True, "success")
    assert (refused.state, refused.done, refused.info["valid"]) == (ITEM, False, False)


def test_prompts_longer_than_the_context_do_not_crash(world):
    """Stops a page or an action of any length from ending the run: with no room for an answer the real sampler gives none, which is malformed."""
    dream = dream_of(world, context=260, max_new_tok=20)
    for action in ("search[" + "slim " * 800 + "]", "\x00\u2028" * 30, ""):
        assert dream.act(dream.start([TASK]), [action])[0].info["stop"] == "malformed"


def test_a_task_without_a_first_state_is_refused(world):
    """Stops a dream that begins on an empty page."""
    with pytest.raises(ValueError, match="t: no first state"):
        dream_of(world).start([Task("t", TASK.text)])


# ---------------------------------------------------------------------------------------------------------------- a model that learns


@pytest.fixture(scope="module")
def overfitted(world):
    """The world with a model that was trained on two episodes until it knows them by heart."""
    episodes = sorted((e for e in world["episodes"] if e.source == "demonstrator" and e.success), key=lambda e: sum(len(s.next_state) for s in e.steps))[:2]
    model = create_tiny(world["tokenizer"], "tiny", 1)
    dream = ExperienceModel(model, world["tokenizer"], rules, DreamSettings(), world["buffer"], world["encoder"])
    rows = rows_of(world, dream, episodes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(250):
        logp_N, _, _ = row_logps(model, rows, with_entropy=False)
        (-logp_N.mean()).backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if logp_N.min() > -0.1:
            break
    assert logp_N.min() > -0.7, logp_N.min()
    return dream, episodes


def replay(dream, episodes, forget):
    """The results of the episodes' own actions, all episodes side by side."""
    sessions, results = dream.start([e.task for e in episodes]), [[] for _ in episodes]
    for session, episode in zip(sessions, episodes):
        session.id = episode.id
    for t in range(max(len(e.steps) for e in episodes)):
        running = [i for i, e in enumerate(episodes) if t < len(e.steps)]
        if forget:
            dream.forget()
        for i, result in zip(running, dream.act([sessions[i] for i in running], [episodes[i].steps[t].action for i in running])):
            results[i].append(result)
    return results


def test_an_overfitted_model_reproduces_its_transitions(overfitted):
    """Stops any break between training rows and dreaming: decoded through the real sampler, states, rewards and ends come back exactly."""
    dream, episodes = overfitted
    for episode, results in zip(episodes, replay(dream, episodes, forget=False)):
        assert [(r.state, r.reward, r.done) for r in results] == [(s.next_state, s.reward, s.done) for s in episode.steps]
        assert results[-1].info["stop"] == "success"


def test_kept_caches_change_no_answer(overfitted):
    """Stops stale keys and values: with the cache kept across steps the answers are those of a sampler that starts afresh each time."""
    dream, episodes = overfitted
    kept, fresh = replay(dream, episodes, forget=False), replay(dream, episodes, forget=True)
    assert [[(r.state, r.info) for r in rows] for rows in kept] == [[(r.state, r.info) for r in rows] for rows in fresh]


def test_a_batch_is_drawn_from_its_pools_and_verdicts_weigh_more():
    """Stops a first phase that sees other rows than miniatures, a weight that is not applied or changes the reported loss, and prompt tokens that are all predicted."""
    tokenizer = build_tokenizer(["so yes no page one two three"])
    ids = encode_untrusted(tokenizer, "page one so yes")
    rows = {name: [Row(ids + [number], [0, 0, 0, 1, 1])] for number, name in enumerate(("transitions", "judged", "little", "vary"), 300)}
    args, ranks = train_expmodel.Args(rows=40, prompt_loss=0.0, steps=100), run.start(0)
    seen, norms = {}, {}
    for name, pools, little_steps, weight in (("first", rows, 5, 1.0), ("later", rows, 0, 1.0), ("none", {**rows, "little": []}, 5, 1.0), ("weighed", rows, 5, 3.0)):
        model, batches = create_tiny(tokenizer, "tiny", 0), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_expmodel, "row_logps", lambda model, rows, batches=batches, **flags: batches.extend(rows) or row_logps(model, rows, **flags))
            values = train_expmodel.train_step(args, model, make_optimizers(model, 1e-3, True), 0, pools, {token: weight for token in [*ids, 302]}, little_steps, ranks)
        seen[name], norms[name] = Counter(row.ids[-1] for row in batches), values
    assert set(seen["first"]) == {302} and set(seen["later"]) == {300, 301, 302, 303} and 302 not in seen["none"] and sum(seen["none"].values()) == 40
    assert norms["weighed"]["loss"] == pytest.approx(norms["first"]["loss"]) and norms["weighed"]["grad_norm"] == pytest.approx(3 * norms["first"]["grad_norm"], rel=1e-3)
