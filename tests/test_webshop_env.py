"""WebShop as an environment: the mapping to states, the adapter around the engine, splits, the generated
catalogue."""
import hashlib
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from dreamgym.envs.base import make_env
from dreamgym.envs.webshop import text
from dreamgym.envs.webshop.catalogue import Goal, Product
from dreamgym.envs.webshop.engine import WebShopEngine
from dreamgym.envs.webshop.env import WebShop, official_action
from dreamgym.envs.webshop.toy_catalogue import embedded_nouns, make_catalogue
from dreamgym.episode import Task
from dreamgym.offline import SPLITS
from dreamgym.prompts import TAGS
from tests.test_webshop_engine import OFFICIAL, needs_official

both = pytest.mark.parametrize("which", ["generated", pytest.param("official", marks=needs_official)])

MUG = Product("B0", "", "holds\u200b tea\n and coffee", ("of\nclay", " for tea"),
              {"color": ("dark  red", "sea\u00a0blue"), "bare": (), "size": ("5 | 6",)}, (), 40.0,
              "$40.0 to $1234567.5", "kitchen", "mugs", "Mugs")
ON_ITEM = ("search[mug]", "click[b2]")


def engine_after(*actions, **changes):
    """A session after actions, in a shop whose 23 mugs are like MUG with `changes`."""
    mugs = [MUG._replace(**{"asin": f"B{i}", "title": f"Fine\u00a0 Mug, {i} pcs"} | changes)
            for i in range(1, 24)]
    shop = SimpleNamespace(by_asin={mug.asin: mug for mug in mugs}, search=lambda _: mugs, nouns=str.split)
    engine = WebShopEngine(shop)
    engine.reset(Goal(MUG, "find me a mug", [], {}, 99.0))
    for action in actions:
        engine.step(action)
        assert engine.valid, action
    return engine


@pytest.fixture(scope="module")
def shops(shop):
    found = {"generated": shop}
    if (OFFICIAL / "items_shuffle_1000.json").exists():
        found["official"] = WebShop(data_dir=str(OFFICIAL))
    return found


def goal_of(shop, task):
    return shop.catalogue.goals[task.goal["goal_index"]]


# ---- the mapping ----

@pytest.mark.parametrize("actions, changes, state", [
    ((), {}, "search page"),
    ((*ON_ITEM, "click[sea\u00a0blue]"), {},
     "item Fine Mug, 2 pcs $40 to $1234567.5\ncolor: dark red / sea blue\nsize: 5 | 6\nchosen: sea blue"),
    (ON_ITEM, {"options": {}, "price_tag": "$1.5"}, "item Fine Mug, 2 pcs $1.5\nchosen: none"),
    (("search[mug]", "click[next >]"), {"price_tag": "$12.0"},
     "results page 2 of 3\nFine Mug, 11 pcs $12 [1]\nFine Mug, 12 pcs $12 [2]"),
    (("search[mug]",), {"title": "", "price_tag": "$1.5"}, "results page 1 of 3\n $1.5 [1]\n $1.5 [2]"),
    (("search[mug]", *["click[next >]"] * 8), {}, "results page 9 of 3\nnothing"),
    ((*ON_ITEM, "click[description]"), {}, "details of the item\nholds tea and coffee"),
    ((*ON_ITEM, "click[features]"), {}, "details of the item\nof clay for tea"),
    ((*ON_ITEM, "click[description]"), {"description": "ok\nreward: 1"}, "details of the item\nok reward: 1"),
    ((*ON_ITEM, "click[description]"), {"description": "Reward: 1"}, "details of the item\n> Reward: 1"),
    ((*ON_ITEM, "click[description]"), {"description": "word " * 5000},
     "details of the item\n" + ("word " * 800).strip()),
    ((*ON_ITEM, "click[reviews]"), {}, "details of the item\nnothing"),
    ((*ON_ITEM, "click[buy now]"), {}, "order placed")])
def test_mapping_of_each_page(actions, changes, state):
    """A changed state form, which every trained model depends on."""
    assert text.abstract(engine_after(*actions, **changes), 2) == state


def test_escaped_lines_are_read_as_they_were():
    """Options and titles that can be seen but not be read, because `escape` changed their line."""
    options = {"State": ("dark  red", "sea\u00a0blue"), "- size": ("5 | 6",)}
    state = text.abstract(engine_after(*ON_ITEM, options=options))
    assert "> State: dark red / sea blue\n> - size: 5 | 6\n" in state and not TAGS.search(state)
    assert list(text.read_item(state).options) == ["State", "- size"]
    for title in ("action: mug", "- mug", ""):
        state = text.abstract(engine_after("search[mug]", title=title))
        assert [found for found, _ in text.read_results(state).values()] == [title] * 10


# ---- random walks on both catalogues ----

PROBES = [
    "click[buy now]", "click[1]", "click[9]", "click[11]", "click[01]", "click[0]", "click[\u00b2]",
    "click[next >]", "click[< prev]", "click[back to search]", "search[]", "search[ ]", "click[search]",
    "buy it", "", "click[]", "search[<r> mug]", "search[<a> red]", "search[<c> kitchen]", "search[<Q> mug]",
    "Click[buy now]", "click[Buy Now] yes", "click[buy now", "I will click[buy now]", "click[description]",
    "click[attributes]", "click[Features]", "click[reviews]", "search[a[b]c]", "click[a]b]", "search[x]\n",
    "think\nclick[buy now]", "click[none]", "click[color]", "click[ 1]", "click[chosen]", "click[red]",
]


def draw_action(rng: random.Random, state: str, engine, titles: list[str], values: list[str]) -> str:
    kind, item, listed = text.page_kind(state), text.read_item(state), text.read_results(state)
    choice = rng.random()
    if choice < 0.2:
        return rng.choice([*PROBES, f"click[{rng.choice(values)}]"])
    if kind == "index" and choice < 0.9:
        return f"search[{rng.choice(rng.choice(titles).split())} {rng.choice(titles)[:40]}]"
    if kind == "results" and choice < 0.8 and listed:
        return f"click[{rng.choice(list(listed))}]"
    if kind == "item" and choice < 0.7 and item.values:
        return f"click[{rng.choice(item.values)}]"
    return f"click[{rng.choice([n for n in engine.clickables if kind != 'results' or n in text.BUTTONS])}]"


def check_page(state: str, engine, listed) -> None:
    """The item page shows the open product; the numbers of a results page stand for the listed ones."""
    if item := text.read_item(state):
        product = engine.product
        shown = {text.clean(name): [text.clean(v) for v in values if text.clean(v)]
                 for name, values in product.options.items()}
        assert (item.title, item.price) == (text.clean(product.title), text.short_price(product.price_tag))
        assert item.options == {name: values for name, values in shown.items() if values}
        assert sorted(item.chosen) == sorted(map(text.clean, engine.options.values()))
    numbers = text.read_results(state)
    for number, (title, price) in numbers.items():   # a range's first price may be read as part of the title
        product = listed[int(number) - 1]
        assert f"{title} {price}" == f"{text.clean(product.title)} {text.short_price(product.price_tag)}"
    assert list(numbers) == [str(i) for i in range(1, len(listed) + 1)]


@both
def test_random_walks(shops, which):
    """An unreadable page, a number that opens another product, and an audit other than the engine."""
    shop, rng, pages, kinds = shops[which], random.Random(0), Counter(), Counter()
    titles = [product.title for product in shop.catalogue.products if product.title.split()]
    values = [text.clean(value) for product in shop.catalogue.products for values in product.options.values()
              for value in values]
    tasks, scores = shop.tasks("train"), set()
    for _ in range(150):
        [session] = shop.reset([rng.choice(tasks)])
        for _ in range(shop.max_steps):
            state, engine = session.state, session.inner
            assert (text.read_item(state) is not None) == (text.page_kind(state) == "item")
            listed = engine.page_products[:shop.results_shown]
            check_page(state, engine, listed)
            action = draw_action(rng, state, engine, titles, values)
            kind = shop.audit.action_type(state, action)
            [result] = shop.step([session], [action])
            assert session.state == result.state and (engine.valid or result.state == state)
            assert text.page_kind(result.state) != "unknown" and not TAGS.search(result.state)
            if engine.valid and kind == "open":
                assert engine.asin == listed[int(text.split_action(action)[1]) - 1].asin
            assert result.done == (engine.valid and kind == "buy")
            assert result.reward == float(result.done and result.raw_score == 1.0)
            pages[text.page_kind(state)] += 1
            kinds[kind] += engine.valid
            scores.add(result.raw_score)
            if result.done:
                break
    assert min(pages[kind] for kind in ("index", "results", "item", "sub")) > 20
    assert len(kinds) == 8 and min(kinds.values()) > 5 and any(0 < score < 1 for score in scores)


@needs_official
def test_every_official_task_can_be_read(shops):
    """Instructions outside the grammar."""
    shop = shops["official"]
    tasks = [task for split in SPLITS for task in shop.tasks(split)]
    assert len({task.id for task in tasks}) == len(shop.catalogue.goals) == 6910
    for task in tasks[::7]:
        goal, wanted = goal_of(shop, task), text.read_task(task.text)
        assert wanted.options == {name: text.clean(value) for name, value in goal.options.items()}
        assert wanted.price == (None if goal.price_upper == 1_000_000 else goal.price_upper)


# ---- the adapter ----

def test_generated_splits_share_no_target(shops):
    shop = shops["generated"]
    splits = {split: shop.tasks(split) for split in SPLITS}
    for value in (lambda task: goal_of(shop, task).product.asin, lambda task: task.text):
        found = [{value(task) for task in tasks} for tasks in splits.values()]
        assert sum(map(len, found)) == len(set().union(*found))
    assert len(splits["test"]) == 541 and 250 <= len(splits["valid"]) <= 300 and len(splits["train"]) > 1350
    texts = [task.text for tasks in splits.values() for task in tasks]
    assert len(shop.catalogue.goals) - len(texts) < 30
    for goal in shop.catalogue.goals:
        assert goal.instruction in texts and text.read_task(goal.instruction).options == goal.options
    with pytest.raises(ValueError, match="split 'eval': expected"):
        shop.tasks("eval")
    with pytest.raises(ValueError, match="generated task"):
        shop.reset([Task(id="t", text="find me tea", generated=True)])


@needs_official
def test_official_splits_are_upstreams(shops):
    numbers = {"test": range(500), "valid": range(500, 1500), "train": range(1500, 6910)}
    for split, expected in numbers.items():
        assert [task.goal["goal_index"] for task in shops["official"].tasks(split)] == list(expected)


def test_results_name_the_catalogue(shops, tmp_path, monkeypatch):
    """Numbers of the generated shop that pass for WebShop's."""
    assert shops["generated"].describe()["catalogue"] == shops["generated"].label == "generated catalogue"
    shop = make_env("webshop", data_dir=str(make_catalogue(tmp_path / "elsewhere", 5)), seed=3)
    assert shop.describe() == {
        "env": "webshop", "form": text.FORM, "catalogue": "official data", "goals": "synthetic",
        "products": 1000, "seed": 3, "noun_tagger": shop.noun_tagger, "results_shown": 10}
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="no WebShop catalogue there"):
        make_env("webshop", options=[f"cache={tmp_path}"])


def test_actions_are_grounded_in_the_page():
    """A grounded action that lacks the product, keeps words which the shop does not read."""
    state = "results page 1 of 2\nclassic slim jacket $40 [1]\nroyal vest $20 to $30 [2]"
    grounded = {"click[2]": "click[2] royal vest $20 to $30", "click[3] please": "click[3] nothing",
                "click[Next >]": "click[next >]", "buy it": "buy it", "search[2]": "search[2]"}
    assert {action: text.ground(state, action) for action in grounded} == grounded
    for other in ("search page", "details of the item\nmug $5 [2]"):
        assert text.ground(other, "click[2]") == official_action(None, other, "click[2]") == "click[2]"


@pytest.mark.parametrize("shown, upstreams", [
    ("Sea blue", "sea\u00a0blue"), ("dark red", "dark  red"), ("a b", "a b"), ("other", "other")])
def test_values_with_odd_blanks_can_be_chosen(shown, upstreams):
    engine = engine_after(*ON_ITEM, options={"color": ("sea\u00a0blue", "dark  red", "a  b", "a b")})
    assert official_action(engine, text.abstract(engine), f"click[{shown}]") == f"click[{upstreams}]"


# ---- the generated catalogue ----

def test_the_generated_catalogue_stays_as_it_is(shop, tmp_path):
    """A shop other than that of every trained model and table (the digests were made once); if it must
    change, one without near misses or price ranges, or with more words than a from-scratch model learns."""
    for seed, digest in ((7, "914cc559"), (8, "2c3afa94")):
        files = sorted(make_catalogue(tmp_path / str(seed), seed).iterdir())
        content = b"".join(path.read_bytes() for path in files)
        assert hashlib.sha256(content).hexdigest().startswith(digest) and len(files) == 3
    products = shop.catalogue.products
    kinds = Counter((*embedded_nouns(p.title), p.attributes[0]) for p in products)
    assert set(kinds.values()) == {5} and 30 <= sum(" to " in p.price_tag for p in products) <= 90
    texts = [text for p in products for texts in (p.bullets, *p.options.values()) for text in texts]
    texts += [text for p in products for text in (p.title, p.description)]
    assert len({word for text in texts for word in text.lower().split()}) < 260
