"""The WebShop engine against recordings of the upstream environment, and its rules one by one on a small
hand-made shop."""
import gzip
import json
import math
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from dreamgym.envs.webshop.bm25 import BM25Index, analyze, porter_stem, words
from dreamgym.envs.webshop.catalogue import Catalogue, Goal
from dreamgym.envs.webshop.engine import WebShopEngine
from dreamgym.envs.webshop.reward import rule_nouns, score

OFFICIAL = Path(os.environ.get("WEBSHOP_DATA") or Path(__file__).parents[1] / "../shared/data/webshop")
needs_official, needs_recording = (
    pytest.mark.skipif(not (OFFICIAL / name).exists(), reason=f"no {name} in {OFFICIAL} (set WEBSHOP_DATA)")
    for name in ("items_shuffle_1000.json", "upstream_episodes.jsonl.gz"))


def lines(name):
    with gzip.open(OFFICIAL / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def recorded_catalogues():
    table = json.loads((OFFICIAL / "title_nouns.json").read_text(encoding="utf-8"))
    return {human: Catalogue(OFFICIAL, human, nouns=table.__getitem__) for human in (False, True)}


@needs_recording
def test_all_recorded_goals(recorded_catalogues):
    """A draw out of order (all later price limits would shift), another shuffle, another wording."""
    goals, recorded = recorded_catalogues[False].goals, lines("upstream_goals_seed7.jsonl.gz")
    assert len(goals) == len(recorded) == 6910
    for goal, expected in zip(goals, recorded):
        assert list(goal.options) == list(expected["goal_options"])
        assert expected == {"asin": goal.product.asin, "instruction": goal.instruction,
                            "price_upper": goal.price_upper, "goal_options": goal.options,
                            "attributes": goal.attributes}


@needs_recording
def test_all_recorded_episodes(recorded_catalogues):
    modes = Counter()
    for episode in lines("upstream_episodes.jsonl.gz"):
        catalogue = recorded_catalogues[episode["human_goals"]]
        engine, goal = WebShopEngine(catalogue, episode["mode"]), catalogue.goals[episode["goal_index"]]
        modes[episode["mode"], episode["human_goals"]] += 1
        for i, step in enumerate(episode["steps"]):
            page, got, done = engine.step(step["action"]) if i else (engine.reset(goal), 0.0, False)
            assert step == {"action": step["action"], "observation": page, "clickables": engine.clickables,
                            "has_search_bar": engine.page == "index", "reward": got, "done": done}
        assert (goal.instruction, goal.price_upper) == (episode["instruction"], episode["price_upper"])
    assert modes == {("text", False): 30, ("text_rich", False): 30, ("text", True): 8}


# ---- a shop made by hand ----

def item(number, **changes):
    return {
        "asin": f"A{number:09d}", "name": f"Plain Mug {number}", "full_description": "",
        "small_description": ["holds tea"], "pricing": "$12.50", "customization_options": "",
        "category": "kitchen", "query": " Mugs ", "product_category": "Home \u203a Kitchen \u203a Mugs",
    } | changes


def options(**named):
    return {name: [{"value": value} for value in values] for name, values in named.items()}


COAT, SHOE, WATCH, MUG = "A000000000", "A000000001", "A000000003", "A000000010"
ITEMS = [
    item(0, name="Rain Coat <b>&\"é'", full_description="a & b < c", small_description=["", "two\n", " \n "],
         pricing="$9.99 to $21",
         customization_options=options(Size=["S", "Men's/XL", 'Tall "T"'], Color=["Standard", "S"],
                                       Fit=["description", "é"]),
         query="coats", product_category="Clothes \u203a Coats", category="fashion"),
    item(1, name="Red Shoe", pricing="", customization_options=options(Color=["red", "dark red"]),
         query="shoes", product_category="Clothes \u203a Shoes"),
    item(1, name="Twin"),
    item(2, asin="ELEVENCHARS", name="Too Long"),
    item(3, name="Gold Watch", pricing="$1,985.00", small_description="one text", query="watches",
         product_category="Watches"),
    *(item(n) for n in range(10, 22)),
]
EXTRAS = {COAT: {"attributes": ["water proof"], "instruction": "a coat", "instruction_attributes": ["light"]},
          SHOE: {"attributes": ["soft"]}}
SMALL = ("items_shuffle_1000.json", "items_ins_v2_1000.json")
HEAD = "Instruction: [SEP] buy it [SEP] Back to Search [SEP] "


def write(folder, items=ITEMS, extras=EXTRAS, names=SMALL):
    for name, content in zip((*names, "items_human_ins.json"), (items, extras, {})):
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def shop(tmp_path):
    return Catalogue(write(tmp_path))


def start(shop, mode="text", asin=SHOE):
    engine = WebShopEngine(shop, mode)
    engine.reset(Goal(shop.by_asin[asin], "buy it", ["soft"], {}, 1000000))
    return engine


def on_item(shop, asin, mode="text_rich", query=None):
    engine = start(shop, mode, asin)
    engine.step(f"search[{query or shop.by_asin[asin].title}]")
    engine.step(f"click[{asin.lower()}]")
    assert (engine.page, engine.asin) == ("item", asin)
    return engine


def test_products_are_read_as_upstream_reads_them(shop):
    assert [p.asin[-2:] for p in shop.products[:4]] == ["00", "01", "03", "10"] and len(shop.products) == 15
    coat, shoe, watch, _, mug = shop.products[:5]
    assert coat.options == {"size": ("s", "men's | xl", 'tall "t"'), "color": ("standard", "s"),
                            "fit": ("description", "é")}
    assert [p.price_tag for p in (coat, shoe, watch)] == ["$9.99 to $21.0", "$100.0", "$1985.0"]
    assert (watch.bullets, mug.attributes, mug.query) == (("one text",), ("DUMMY_ATTR",), "mugs")
    assert 9.99 < coat.price < 21


def test_results_pages_go_on_past_the_last(shop):
    """A bound on Next >, a lost count, a wrong slice of ten."""
    engine = start(shop)
    first = "Next > [SEP] A000000010 [SEP] Plain Mug 10 [SEP] $12.5 [SEP] A0"
    assert engine.step("search[mug]")[0].startswith(f"{HEAD}Page 1 (Total results: 12) [SEP] {first}")
    assert engine.clickables == ["back to search", "next >", *(f"a{n:09d}" for n in range(10, 20))]
    rows = [f"A0000000{n} [SEP] Plain Mug {n} [SEP] $12.5" for n in (20, 21)]
    assert engine.step("click[NEXT >]")[0].endswith(" [SEP] ".join(["< Prev [SEP] Next >", *rows]))
    for _ in range(4):
        page, _, _ = engine.step("click[next >]")
    assert page == f"{HEAD}Page 6 (Total results: 12) [SEP] < Prev [SEP] Next >"
    engine.step("click[< prev]")
    assert (engine.page_number, engine.page_asins) == (5, [])
    assert engine.step("search[ ]")[0] == f"{HEAD}Page 1 (Total results: 0) [SEP] Next >"


def test_item_and_sub_pages(shop):
    """Escapes in texts, and segments lost or kept where the HTML parser folds white space."""
    engine, head = on_item(shop, COAT, "text"), f"{HEAD}< Prev"
    assert engine.observation == (
        f"{head} [SEP] size [SEP] s [SEP] men's | xl [SEP] tall \"t\" [SEP] color [SEP] standard [SEP] s "
        "[SEP] fit [SEP] description [SEP] é [SEP] Rain Coat <b>&\"é' [SEP] Price: $9.99 to $21.0 "
        "[SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert engine.clickables == [
        "back to search", "< prev", "description", "features", "reviews", "buy now",
        "s", "men's | xl", 'tall "t"', "standard", "é",
    ]
    # An empty text leaves a blank, ' \n ' nothing; the button wins over the option of its name.
    assert engine.step("click[Features]")[0] == f"{head} [SEP]  [SEP] two"
    assert engine.clickables == ["back to search", "< prev"]
    engine.step("click[< prev]")
    assert engine.step("click[description]")[0] == f"{head} [SEP] a & b < c"
    assert on_item(shop, SHOE, "text").step("click[description]")[0] == head
    assert on_item(shop, COAT).step("click[features]")[0].endswith("[button] < Prev [button_]\n \n two\n\n")


def test_options_in_rich_pages(shop):
    """Wrong marks: upstream looks for the quoted value in the address."""
    engine = on_item(shop, COAT)
    page, _, _ = engine.step("click[s]")
    assert engine.options == {"color": "s"}      # of two options with this value the last
    assert page.startswith("You have clicked s.\nYou have clicked s.\nInstruction:\nbuy it\n")
    assert page.count("  [clicked button] s [clicked button_]\n") == 2
    page, _, _ = engine.step("click[men's | xl]")
    assert page.startswith("You have clicked s.\nYou have clicked men's | xl.\nYou have clicked s.\n")
    for hidden in ("é", 'tall "t"'):
        assert f"  [button] {hidden} [button_]\n" in engine.step(f"click[{hidden}]")[0]
    assert engine.options == {"color": "s", "size": 'tall "t"', "fit": "é"}
    assert engine.chosen == ['tall "t"', "s", "é"]   # what states show
    engine = on_item(shop, COAT, query='coat "standard"')
    assert "[clicked button] standard [clicked button_]" in engine.observation


def test_options_are_kept_over_sub_pages_and_forgotten_in_the_results(shop):
    engine = on_item(shop, SHOE)
    for action in ("click[red]", "click[reviews]", "click[< prev]"):
        engine.step(action)
    assert engine.options == {"color": "red"}
    assert f"\n\n[clicked button] {SHOE} [clicked button_]\n" in engine.step("click[< prev]")[0]
    engine.step(f"click[{SHOE.lower()}]")
    assert engine.options == {}
    assert f"[clicked button] {SHOE}" in engine.step("search[shoe]")[0]      # accepted without a search bar
    page, _, _ = engine.step("click[back to search]")
    assert page == "WebShop\nInstruction: \nbuy it\n[button] Search [button_]\n"
    assert f"\n[button] {SHOE} [button_]\n" in engine.step("search[shoe]")[0]


def test_keywords_that_name_a_page_confuse_prev_as_upstream(shop):
    """A page test that is cleverer than upstream's search for a name in the address."""
    engine = on_item(shop, SHOE, query="shoe search_results")
    page, _, _ = engine.step("click[< prev]")
    assert "Page 0 (Total results: 1)\n[button] Next > [button_]\n" in page and engine.page_asins == []
    engine = on_item(shop, SHOE, query="shoe item_page")
    engine.step("click[features]")
    engine.step("click[< prev]")
    assert engine.page == "results"


@pytest.mark.parametrize(
    "action", ["", "noop", "search", "search[]", "Search[mug]", "I will click[search]", "x\nsearch[mug]",
               "click[search]", "click[a000000010]", "click[back to search", "buy now", "<r>", "search[<r>]",
               "search[<a> x]", "search[<c> kitchen]", "search[<Q> mugs]", "search[plain [mug]] please"],
)
def test_invalid_actions_change_nothing(shop, action):
    """A laxer grammar, splitting at the first '[', and upstream's answers to special queries."""
    engine = start(shop)
    before = engine.observation
    assert engine.step(action) == (before, 0.0, False) and not engine.valid and engine.page == "index"


def test_purchase_ends_with_the_reward_and_a_search_goes_on(shop):
    """Wrong JSON on the last page (sorted, with Flask's escapes)."""
    engine = on_item(shop, COAT, "text")
    engine.step("click[men's | xl]")
    engine.step("click[standard]")
    page, score, done = engine.step("click[buy now]")
    assert done and score == pytest.approx(0.5) and engine.clickables == []
    assert '[SEP] {"color": "standard", "size": "men\\u0027s | xl"} [SEP] attrs [SEP] None [SEP]' in page
    assert page.startswith("Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in ")
    assert page.endswith("Your score (min 0.0, max 1.0) [SEP] 0.5 [SEP] Reward Details [SEP] None")
    assert engine.step("click[buy now]") == (page, 0.0, False)
    engine.step("search[mug] 17] please")        # text after the last ']' is ignored
    assert engine.valid and engine.keywords == ["mug]", "17"] and engine.step("click[a000000010]")[2] is False


# ---- reward ----

@pytest.mark.parametrize("chosen, price, expected", [
    ({"color": "red"}, 100.0, 1.0), ({"color": "dark red"}, 100.0, 0.75), ({}, 100.0, 0.75),
    ({"color": "red"}, 110.01, 0.75)])
def test_reward_counts_attributes_options_and_price(shop, chosen, price, expected):
    """A wrong weight of a part. 'red' is no attribute but stands in the title, 'warm' is neither."""
    shoe = shop.by_asin[SHOE]
    goal = Goal(shoe, "", ["soft", "red"], {"color": "red"}, 110.0)
    assert score(goal, shoe._replace(price=price), chosen, rule_nouns) == pytest.approx(expected)
    assert score(goal._replace(attributes=["warm"], options={}), shoe, {}, rule_nouns) == 0.5


@pytest.mark.parametrize("wanted, chosen, met", [
    ({"color": "standard"}, "standard", False), (["standard"], "standard", True),
    (["red wine"], "blood red", True)])
def test_reward_normalises_colours_unevenly(shop, wanted, chosen, met):
    """Repairing upstream: a chosen 'standard' becomes 'tan', the wanted (name, value) does not."""
    coat = shop.by_asin[COAT]
    goal = Goal(coat, "", [], wanted, 99.0)
    assert score(goal, coat, {"color": chosen}, rule_nouns) == (1.0 if met else 0.5)


@pytest.mark.parametrize("title, changes, expected", [
    ("Plain Mug", {}, 1.0), ("mug a1 a2 a3 a4", {}, 0.5),        # exactly 0.2 is not above 0.2
    ("mug a1 a1 a1 a1", {}, 0.5), ("mug a1 a2 a3 a4", {"query": "mugs"}, 1.0),
    ("mug a1 a2 a3 a4", {"product_category": "Home \u203aMugs"}, 1.0),
    ("mug " + "word " * 10, {"query": "mugs"}, 0.1), ("boots", {"query": "mugs"}, 0.0), ("12 34", {}, 0.5)])
def test_type_score(shop, title, changes, expected):
    """Nouns counted once where upstream counts repeats."""
    bought = shop.by_asin[MUG]
    target = bought._replace(**{"title": title, "query": "other", "product_category": "Other"} | changes)
    assert score(Goal(target, "", [], {}, 99.0), bought, {}, rule_nouns) == expected


# ---- search ----

def test_search_against_a_slow_bm25():
    """A wrong idf, length rounding, query-term weight or tie order."""
    rng = random.Random(0)
    vocabulary = [f"{c}{v}{d}{c}" for c in "bdgk" for v in "aou" for d in "mnprt"]
    texts = [" ".join(rng.choices(vocabulary, k=rng.choice([0, 3, 20, 60, 200]))) for _ in range(300)]
    ids = [f"{rng.randrange(10**9):09d}" for _ in texts]
    index, docs = BM25Index(iter(texts), ids), [Counter(text.split()) for text in texts]
    n_docs = sum(1 for d in docs if d)
    mean = sum(d.total() for d in docs) / n_docs
    stored = {20: 20, 60: 24 + 36, 200: 24 + 176, 3: 3}          # 36 and 176 in 4 bits: 9 * 4 and 11 * 16
    queries = [rng.choices(vocabulary, k=k) for k in (1, 2, 3, 8) for _ in range(10)]
    for query in [*queries, ["bamb", "bamb", "dotd"], ["zzz"]]:
        scores = Counter()
        for i, doc in enumerate(docs):
            for term in filter(doc.get, query):
                n = sum(1 for d in docs if d[term])
                norm = 0.9 * (0.6 + 0.4 * stored[doc.total()] / mean)
                scores[i] += math.log(1 + (n_docs - n + 0.5) / (n + 0.5)) * doc[term] / (doc[term] + norm)
        found = list(index.search(" ".join(query), 20))
        best = sorted(scores.values(), reverse=True)[:20]
        assert [scores[i] for i in found] == pytest.approx(best, rel=1e-6)
        assert all(ids[a] < ids[b] for a, b in zip(found, found[1:]) if abs(scores[a] - scores[b]) < 1e-12)


def test_words_and_stems():
    """Stops tokenizer and stemmer from drifting from Lucene's."""
    found = words("o'neil's 3.5mm a_b 2,000 u.s.a. a:b a;b w/o -- ½")
    assert found == ["o'neil's", "3.5mm", "a_b", "2,000", "u.s.a", "a:b", *"abwo"]
    found = words("caf\u00e9\u2122 ★ \U0001f44d\U0001f3fd 食品 ガラス")
    assert found == ["caf\u00e9", "\u2122", "★", "\U0001f44d\U0001f3fd", "食", "品", "ガラス"]
    assert [len(word) for word in words("x" * 600)] == [255, 255, 90]
    assert [len(word) for word in words("a'" * 300)] == [255, 255, 87]       # what is left is cut anew
    assert analyze("the Women's shoes and not rock’n’roll’s") == ["women", "shoe", "rock’n’rol"]
    stems = {
        "possibly": "possibl", "technology": "technolog", "relational": "relat", "hopping": "hop",
        "falling": "fall", "sky": "sky", "is": "is", "happily": "happili", "adoption": "adopt",
        "controlling": "control", "agreed": "agre", "conflated": "conflat", "hopefulness": "hope",
    }
    assert {word: porter_stem(word) for word in stems} == stems


# ---- files ----

PRODUCTS, INSTRUCTIONS = SMALL


@pytest.mark.parametrize("name, change, message", [
    (PRODUCTS, lambda items: items[1].pop("name"),
     f"{PRODUCTS}, product 1: Object missing required field `name`"),
    (PRODUCTS, lambda items: items[0].update(pricing="$cheap"),
     "product 0: found `pricing` '$cheap'; expected"),
    (PRODUCTS, lambda items: items[0].update(customization_options={"Color": [{"image": 1}]}),
     "required field `value`"),
    (INSTRUCTIONS, lambda extras: extras[SHOE].update(attributes="soft"),
     f"{INSTRUCTIONS}, product {SHOE}: Expected `array`, got `str` - at `$.attributes`"),
    (PRODUCTS, None, "no WebShop catalogue there; expected the files items_shuffle_1000"),
    (PRODUCTS, json.dumps(ITEMS)[:-700].encode(), "items_shuffle_1000.json: cannot be read as"),
    (PRODUCTS, b'[{"asin": "\xff"}]', "items_shuffle_1000.json: cannot be read"),
    (INSTRUCTIONS, b"[", "items_ins_v2_1000.json: cannot be read as JSON"),
    ("items_human_ins.json", b'{"A000000001": [{"instruction": 3}]}',
     "items_human_ins.json, product A000000001: Expected `str | null`, got `int`")])
def test_a_malformed_catalogue_is_refused_by_name(tmp_path, name, change, message):
    path = write(tmp_path) / name
    if callable(change):
        content = json.loads(path.read_text(encoding="utf-8"))
        change(content)
        change = json.dumps(content).encode()
    path.write_bytes(change) if change else path.unlink()
    with pytest.raises(ValueError) as caught:
        Catalogue(tmp_path, human_goals=True)
    assert message in str(caught.value) and str(caught.value).startswith(str(tmp_path))


def test_the_full_set_is_read_in_small_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("dreamgym.envs.webshop.catalogue.READ_CHARS", 7)
    write(tmp_path, json.dumps(ITEMS, indent=1), names=("items_shuffle.json", "items_ins_v2.json"))
    assert len(Catalogue(tmp_path).products) == 15
