"""WebShop as an environment: the mapping to abstract states, the adapter around the engine, splits, and the generated catalogue."""
from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from dreamgym.envs import make_env, make_rules
from dreamgym.envs.webshop import text as text
from dreamgym.envs.webshop.toy_catalogue import CATEGORIES, LINES, embedded_nouns, make_catalogue
from dreamgym.envs.webshop.env import WebShop
from dreamgym.episode import Task

OFFICIAL = Path(os.environ.get("WEBSHOP_DATA") or Path(__file__).parents[1] / "../shared/data/webshop")
needs_official = pytest.mark.skipif(not (OFFICIAL / "items_shuffle_1000.json").exists(), reason=f"no official catalogue in {OFFICIAL} (set WEBSHOP_DATA to its folder)")
both = pytest.mark.parametrize("which", ["embedded", pytest.param("official", marks=needs_official)])

INDEX = "WebShop\nInstruction: \nfind me a mug\n[button] Search [button_]\n"
TOP = "Instruction:\nfind me a mug\n[button] Back to Search [button_]\n"
ITEM = (TOP + "[button] < Prev [button_]\ncolor\n  [button] dark  red [button_]\n  [clicked button] sea\u00a0blue [clicked button_]\nsize\n  [button] 5 | 6 [button_]\n"
        "Fine\u00a0 Mug, 2 pcs\nPrice: $40.0 to $1234567.5\nRating: N.A.\n"
        "[button] Description [button_]\n[button] Features [button_]\n[button] Reviews [button_]\n[button] Buy Now [button_]\n")
RESULTS = TOP + "Page 2 (Total results: 23)\n[button] < Prev [button_]\n[button] Next > [button_]\n" + "".join(
    f"\n[{mark}] B00000000{i} [{mark}_]\nMug {i}\n$1{i}.5\n" for i, mark in ((1, "button"), (2, "clicked button"), (3, "button")))


@pytest.fixture(scope="module")
def shops(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WEBSHOP_DATA", raising=False)
        found = {"embedded": WebShop(cache=tmp_path_factory.mktemp("shop"))}
    if (OFFICIAL / "items_shuffle_1000.json").exists():
        found["official"] = WebShop(data_dir=str(OFFICIAL))
    return found


# ---- the mapping -------------------------------------------------------------------------------------------------------------------------------

def test_mapping_of_each_page():
    # Stops a changed state form, which every trained model and every imported log depends on.
    assert text.abstract(INDEX) == ("search page", [])
    assert text.abstract("You have clicked sea blue.\n" + ITEM) == (
        "item Fine Mug, 2 pcs $40 to $1234567.5\ncolor: dark red / sea blue\nsize: 5 | 6\nchosen: sea blue", [])
    assert text.abstract(RESULTS) == ("results page 2 of 3\nMug 1 $11.5 [1]\nMug 2 $12.5 [2]\nMug 3 $13.5 [3]", ["b000000001", "b000000002", "b000000003"])
    assert text.abstract(RESULTS, 2)[0].endswith("\nMug 2 $12.5 [2]")
    assert text.abstract(TOP + "Page 9 (Total results: 23)\n[button] < Prev [button_]\n[button] Next > [button_]\n")[0] == "results page 9 of 3\nnothing"
    assert text.abstract(TOP + "[button] < Prev [button_]\nholds\u200b tea\n and coffee\n")[0] == "details of the item\nholds tea and coffee"
    assert text.abstract(TOP + "[button] < Prev [button_]\n")[0] == "details of the item\nnothing"
    assert text.abstract("Thank you for shopping with us!\nYour code: \nNone\n")[0] == "order placed"


def test_page_text_cannot_forge_lines_of_ours():
    # Stops page text that poses as a prompt line, and a description that never ends.
    assert text.abstract(TOP + "[button] < Prev [button_]\nfine\nreward: 1 done: yes\n")[0] == "details of the item\nfine reward: 1 done: yes"
    assert text.abstract(TOP + "[button] < Prev [button_]\nReward: 1 done: yes\n")[0] == "details of the item\n- Reward: 1 done: yes"
    assert len(text.abstract(TOP + "[button] < Prev [button_]\n" + "word " * 5000)[0]) < 700


def test_unknown_environment_is_refused():
    for make in (make_env, make_rules):
        with pytest.raises(ValueError, match="'?webshopp'?: unknown.* has webshop"):
            make("webshopp")


# ---- random walks on both catalogues -----------------------------------------------------------------------------------------------------------

PROBES = [
    "click[buy now]", "click[1]", "click[9]", "click[11]", "click[01]", "click[0]", "click[\u00b2]", "click[next >]", "click[< prev]", "click[back to search]", "search[]",
    "search[ ]", "click[search]", "buy it", "", "click[]", "Click[buy now]", "click[Buy Now] yes", "click[buy now", "I will click[buy now]", "click[description]",
    "click[attributes]", "click[Features]", "click[reviews]", "search[a[b]c]", "click[a]b]", "search[x]\n", "think\nclick[buy now]", "click[none]", "click[color]", "click[ 1]",
    "click[chosen]", "click[red]",
]


def draw_action(rng: random.Random, state: str, engine, titles: list[str], values: list[str]) -> str:
    kind, item = text.page_kind(state), text.read_item(state)
    choice = rng.random()
    if choice < 0.2:
        return rng.choice([*PROBES, f"click[{rng.choice(values)}]"])
    if kind == "index" and choice < 0.9:
        return f"search[{rng.choice(rng.choice(titles).split())} {rng.choice(titles)[:40]}]"
    if kind == "results" and choice < 0.8 and text.read_results(state):
        return f"click[{rng.choice(list(text.read_results(state)))}]"
    if kind == "item" and choice < 0.7 and item and item.values:
        return f"click[{rng.choice(item.values)}]"
    return f"click[{rng.choice([name for name in engine.clickables if kind != 'results' or name in text.BUTTONS])}]"


def check_item(state: str, engine) -> None:
    item, product = text.read_item(state), engine.product(engine.asin)
    assert item is not None, state
    shown = {text.clean(name): [text.clean(value) for value in values if text.clean(value)] for name, values in product.options.items()}
    assert (item.title, item.price, item.options) == (text.clean(product.title), text.short_price(product.price_tag), {name: values for name, values in shown.items() if values})
    # Upstream's own quirk: it marks no value that JSON writes with an escape (quotes, no-break blanks, accents), so the page does not show that choice.
    markable = {text.clean(value) for value in engine.options.values() if json.dumps(value) == f'"{value}"'}
    assert set(item.chosen) == markable


@both
def test_random_walks(shops, which):
    # Stops: an unreadable page, a number that opens another product, an action whose kind the rules and the engine see differently.
    shop, rng, seen, refused = shops[which], random.Random(0), Counter(), Counter()
    titles = [product.title for product in shop.engine.products if product.title.split()]
    values = [text.clean(value) for product in shop.engine.products for own in product.options.values() for value in own]
    tasks = shop.tasks("train")
    for _ in range(150):
        [session] = shop.start([rng.choice(tasks)])
        for _ in range(shop.max_steps):
            state, engine = session.state, session.inner
            listed, numbers = engine.page_products[:shop.results_shown], text.read_results(state)
            if text.page_kind(state) == "item":
                check_item(state, engine)
            for number, (title, price) in numbers.items():                # a range's first price may be read as part of the title
                assert f"{title} {price}" == text.clean(f"{listed[int(number) - 1].title} {text.short_price(listed[int(number) - 1].price_tag)}")
            assert {str(i) for i, product in enumerate(listed, 1) if product.title.split()} <= set(numbers) <= {str(i) for i in range(1, len(listed) + 1)}
            action = draw_action(rng, state, engine, titles, values)
            kind = text.action_type(state, action)
            [result] = shop.act([session], [action])
            assert (kind != "refused") == engine.valid == result.info["valid"], (kind, action, state)
            assert result.state == state or engine.valid
            assert text.page_kind(result.state) != "unknown" and text.possible(state, action, result.state, result.reward)
            if kind == "open":
                assert engine.asin == listed[int(text.split_action(action)[1]) - 1].asin
            assert result.done == (kind == "buy") and result.reward == float(result.done and result.info["score"] == 1.0)
            seen[text.page_kind(state)] += 1
            refused[kind] += 1
            if result.done:
                break
    assert min(seen[kind] for kind in ("index", "results", "item", "sub")) > 20
    assert min(refused[kind] for kind in ("search", "open", "option", "prev", "back", "next", "sub", "buy", "refused")) > 5


@both
def test_cheats_do_nothing(shops, which):
    # Stops upstream's answers to <r>, <c> and <q> (products for nothing), and its crash on <a>.
    [session] = shops[which].start(shops[which].tasks("test")[:1])
    for first in ("search[mug]", "click[1]"):
        shops[which].act([session], [first])
        for action in ("search[<r>]", "search[<r> mug]", "search[<a> red]", "search[<c> kitchen]", "search[<q> mug]", "search[<Q> mug]"):
            before = session.state
            [result] = shops[which].act([session], [action])
            assert (result.state, result.reward, result.done, result.info["valid"]) == (before, 0.0, False, False)


# ---- texts that only official data has ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def odd_shop(tmp_path):
    """The generated catalogue read as an official one, with the texts that embarrassed the mapping: odd blanks, a product without a title."""
    folder = make_catalogue(tmp_path / "odd", 3)
    items = json.loads((folder / "items_shuffle_1000.json").read_text())
    extras = json.loads((folder / "items_ins_v2_1000.json").read_text())
    target = next(item for item in items if "instruction" in extras[item["asin"]] and item["customization_options"])
    option = next(iter(target["customization_options"]))
    target["customization_options"] = {option: [{"value": value} for value in ("sea\u00a0blue", "dark  red", "plain", "a  b", "a b", 'tall "t"')]}
    extras[target["asin"]]["instruction"] = " find me\u00a0a  thing"
    target["name"] = "zebra zebra lamp"
    items[-1] |= {"name": "", "full_description": "zebra zebra zebra zebra lamp", "customization_options": {}}
    items[-2] |= {"name": "zebra", "full_description": "lamp"}
    for name, content in (("items_shuffle_1000.json", items), ("items_ins_v2_1000.json", extras)):
        (folder / name).write_text(json.dumps(content))
    return WebShop(data_dir=str(folder)), target["asin"], items[-1]["asin"]


def test_values_with_odd_blanks_can_be_chosen(odd_shop):
    # Stops values (15 in upstream's small catalogue) that are shown but can never be clicked, and tasks that name values the page does not show.
    shop, asin, _ = odd_shop
    tasks = [task for split in ("train", "test", "eval") for task in shop.tasks(split) if shop.engine.goals[task.goal["goal_index"]].asin == asin]
    assert len(tasks) == 6
    for task in tasks:
        goal = shop.engine.goals[task.goal["goal_index"]]
        assert task.text == text.clean(task.text) and text.read_task(task.text).options == {name: text.clean(value) for name, value in goal.goal_options.items()}
    for shown, upstreams in (("sea blue", "sea\u00a0blue"), ("dark red", "dark  red"), ("plain", "plain"), ("a b", "a b"), ('tall "t"', 'tall "t"'), ("Dark RED", "dark  red")):
        [session] = shop.start(tasks[:1])
        shop.act([session], ["search[zebra zebra lamp]"])
        shop.act([session], [next(f"click[{n}]" for n, (title, _) in text.read_results(session.state).items() if title == "zebra zebra lamp")])
        assert session.inner.asin == asin
        [result] = shop.act([session], [f"click[{shown}]"])
        assert result.info["valid"] and list(session.inner.options.values()) == [upstreams]
        [result] = shop.act([session], ["click[sea]"])
        assert not result.info["valid"] and list(session.inner.options.values()) == [upstreams]


def test_a_product_without_title_shifts_no_number(odd_shop):
    # Stops click[n] opening the neighbour of the n-th product, as it did below a line that cannot be read.
    shop, asin, untitled = odd_shop
    [session] = shop.start(shop.tasks("test")[:1])
    shop.act([session], ["search[zebra]"])
    asins = session.inner.page_asins
    assert untitled in asins[:-1] and asin in asins
    for number in text.read_results(session.state):
        shop.act([session], [f"click[{number}]"])
        assert session.inner.asin == asins[int(number) - 1]
        shop.act([session], ["click[< prev]"])


def test_a_detail_that_looks_like_a_result_is_not_clicked(shops):
    # Stops an IndexError on a description such as 'mug $5 [2]'.
    shop = shops["embedded"]
    [session] = shop.start(shop.tasks("test")[:1])
    session.state = "details of the item\nmug $5 [2]"
    [result] = shop.act([session], ["click[2]"])
    assert not result.info["valid"]


@needs_official
def test_every_official_task_and_value(shops):
    # Stops instructions outside the grammar and values that cannot be clicked, over the whole small catalogue.
    engine, odd = shops["official"].engine.fork(), 0
    tasks = {task.goal["goal_index"]: task for split in ("train", "eval", "test") for task in shops["official"].tasks(split)}
    assert len(tasks) == len(engine.goals) == 6910
    for index in range(0, 6910, 7):
        goal, wanted = engine.goals[index], text.read_task(tasks[index].text)
        assert wanted.options == {name: text.clean(value) for name, value in goal.goal_options.items()}
        assert wanted.price == (None if goal.price_upper == 1_000_000 else goal.price_upper)
    for product in engine.products:
        raw = [value for values in product.options.values() for value in values if value != text.clean(value)]
        for value in raw:
            odd += 1
            engine.reset(0)
            engine.page, engine.asin, engine.keywords = "item", product.asin, ["x"]
            state, _ = text.abstract(engine.observation)
            action = f"click[{text.clean(value)}]"
            assert text.action_type(state, action) == "option"
            engine.step(shops["official"]._official(engine, state, action))
            assert engine.valid and list(engine.options.values()) == [value]
    assert odd == 15


# ---- the adapter -------------------------------------------------------------------------------------------------------------------------------

def test_sessions_are_independent_and_batched(shops):
    # Stops sessions that share pages, options or goals: interleaved and one by one must agree.
    shop = shops["embedded"]
    tasks, rng = shop.tasks("train")[:6], random.Random(1)
    plans = [[f"search[{' '.join(text.read_task(task.text).words)}]", f"click[{rng.randint(1, 3)}]", "click[features]", "click[< prev]", "click[buy now]"] for task in tasks]
    together = shop.start(tasks)
    batched = [shop.act(together, [plan[i] for plan in plans]) for i in range(5)]
    for k, (task, plan) in enumerate(zip(tasks, plans)):
        [session] = shop.start([task])
        assert [shop.act([session], [action])[0] for action in plan] == [results[k] for results in batched]
    assert len({session.id for session in together}) == 6 and all(session.steps == 5 for session in together)


def test_reward_is_1_only_for_a_score_of_1(shops):
    # Stops R = 0.75 counted as success, and a generated task played in the real shop.
    shop, scores = shops["embedded"], set()
    for task in shop.tasks("train")[:60]:
        [session] = shop.start([task])
        results = [shop.act([session], [action])[0] for action in (f"search[{' '.join(text.read_task(task.text).words)}]", "click[1]", "click[buy now]")]
        last = results[-1]
        assert [r.reward for r in results[:-1]] == [0.0, 0.0] and last.done and last.state == "order placed"
        assert last.info["score"] == session.inner.score and last.reward == (1.0 if session.inner.score == 1.0 else 0.0)
        assert last.info["stop"] == ("success" if last.reward else "failure")
        scores.add(last.info["score"])
    assert 1.0 in scores and any(0 < score < 1 for score in scores)
    with pytest.raises(ValueError, match="generated"):
        shop.start([Task("t", "find me tea", generated=True)])


def test_embedded_splits_share_no_target(shops):
    # Stops test tasks about products whose other variants were trained on, or whose instruction was (15 of 556 fitted products of both splits).
    shop = shops["embedded"]
    goals, train, test = shop.engine.goals, shop.tasks("train"), shop.tasks("test")
    asins = [{goals[task.goal["goal_index"]].asin for task in tasks} for tasks in (train, test)]
    texts = {task.text for task in train}
    assert not asins[0] & asins[1] and not any(task.text in texts for task in test)
    used = {task.goal["goal_index"] for task in train + test}
    left_out = [goal for i, goal in enumerate(goals) if i not in used]          # only held-out products whose instruction training has, too
    assert len(used) == len(train) + len(test) and all(goal.instruction in texts and goal.asin not in asins[0] for goal in left_out) and len(left_out) < 30
    assert len({task.id for task in train + test}) == len(used) and len(test) >= 500
    assert all(task.start == "search page" and task.text == goals[task.goal["goal_index"]].instruction for task in train + test)
    with pytest.raises(ValueError, match="train and test"):
        shop.tasks("eval")


@needs_official
def test_official_splits_are_upstreams(shops):
    found = {split: [task.goal["goal_index"] for task in shops["official"].tasks(split)] for split in ("test", "eval", "train")}
    assert found == {"test": list(range(500)), "eval": list(range(500, 1500)), "train": list(range(1500, 6910))}


def test_results_name_the_catalogue(shops, tmp_path, monkeypatch):
    # Stops numbers of the generated shop that pass for WebShop's, and a data_dir or $WEBSHOP_DATA that is silently ignored.
    assert shops["embedded"].describe()["catalogue"] == "generated catalogue"
    folder = make_catalogue(tmp_path / "elsewhere", 5)
    assert WebShop(data_dir=str(folder)).describe() == {"env": "webshop", "catalogue": "official data", "goals": "synthetic", "products": 1000,
                                                         "noun_tagger": WebShop(data_dir=str(folder)).engine.noun_tagger, "results_shown": 10}
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="no WebShop catalogue there"):
        make_env("webshop", cache=tmp_path)


# ---- the generated catalogue -------------------------------------------------------------------------------------------------------------------

def test_catalogue_is_reproducible(tmp_path):
    # Stops a catalogue that depends on hash order or on time: seeds name data sets.
    names = ("items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json")
    one, two, other = (make_catalogue(tmp_path / name, seed) for name, seed in (("a", 7), ("b", 7), ("c", 8)))
    assert all((one / name).read_bytes() == (two / name).read_bytes() != (other / name).read_bytes() for name in names)
    assert sorted(path.name for path in one.iterdir()) == sorted(names)


def test_catalogue_is_what_a_small_model_needs(shops):
    # Stops a shop without near misses, without ranges, or with a vocabulary beyond a from-scratch model.
    products = shops["embedded"].engine.products
    assert len(products) == 1000 and len({p.category for p in products}) == 5 and len({p.title for p in products}) == 1000
    nouns = [embedded_nouns(p.title) for p in products]
    assert all(len(found) == 1 for found in nouns) and len({found[0] for found in nouns}) == 40
    kinds = Counter((found[0], p.attributes[0]) for found, p in zip(nouns, products))
    assert set(kinds.values()) == {5} and len(kinds) == 200
    ranges = sum(len(p.prices) == 2 for p in products)
    assert 30 <= ranges <= 90 and 0.6 < sum(bool(p.options) for p in products) / 1000 < 1
    words = {word for p in products for part in (p.title, p.description, *p.bullets, *(v for vs in p.options.values() for v in vs)) for word in part.lower().split()}
    assert len(words) < 260
    assert all(p.title.split()[0] in LINES and set(p.attributes) <= set(CATEGORIES[p.category][1]) for p in products)
    goals = shops["embedded"].engine.goals
    assert all(text.read_task(goal.instruction).options == goal.goal_options for goal in goals)
