"""The WebShop engine against recordings of the upstream environment, and its rules one by one on a small
hand-made shop."""

import gzip
import json
import math
import os
import random
from collections import Counter
from itertools import product as combinations
from pathlib import Path

import numpy as np
import pytest

from dreamgym.envs.webshop.bm25 import BM25Index, _one_byte_lengths, analyze, porter_stem, words
from dreamgym.envs.webshop.engine import Catalogue, Goal, WebShopEngine, make_goal, reward
from dreamgym.envs.webshop.reward import rule_nouns

RECORDED = Path(os.environ.get("WEBSHOP_DATA") or Path(__file__).parents[1] / "../shared/data/webshop")
needs_recording = pytest.mark.skipif(
    not (RECORDED / "upstream_episodes.jsonl.gz").exists(),
    reason=f"no recording of upstream's WebShop in {RECORDED} (set WEBSHOP_DATA)",
)


def lines(name):
    with gzip.open(RECORDED / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def recorded_catalogues():
    table = json.loads((RECORDED / "title_nouns.json").read_text(encoding="utf-8"))
    return {human: Catalogue(RECORDED, human, seed=7, nouns=table.__getitem__, size="small")
            for human in (False, True)}


@needs_recording
def test_all_recorded_goals(recorded_catalogues):
    """Stops a draw out of order (all later price limits would shift), another shuffle, another wording."""
    goals, recorded = recorded_catalogues[False].goals, lines("upstream_goals_seed7.jsonl.gz")
    assert len(goals) == len(recorded) == 6910
    for goal, expected in zip(goals, recorded):
        assert {name: getattr(goal, name) for name in expected} == expected
        assert list(goal.goal_options) == list(expected["goal_options"])


@needs_recording
def test_all_recorded_episodes(recorded_catalogues):
    """Stops any difference from upstream in pages, clickables, search results, rewards."""
    modes = Counter()
    for episode in lines("upstream_episodes.jsonl.gz"):
        engine = WebShopEngine.from_catalogue(recorded_catalogues[episode["human_goals"]], episode["mode"])
        modes[episode["mode"], episode["human_goals"]] += 1
        for i, step in enumerate(episode["steps"]):
            index, action = episode["goal_index"], step["action"]
            page, got, done = engine.step(action) if i else (engine.reset(index), 0.0, False)
            found = page, engine.clickables, engine.has_search_bar, got, done
            names = ("observation", "clickables", "has_search_bar", "reward", "done")
            assert found == tuple(step[name] for name in names), (index, action)
        assert engine.goal.instruction == episode["instruction"]
        assert engine.goal.price_upper == episode["price_upper"]
    assert modes == {("text", False): 30, ("text_rich", False): 30, ("text", True): 8}


# A shop made by hand


def item(number, **changes):
    base = {
        "asin": f"A{number:09d}", "name": f"Plain Mug {number}", "full_description": "",
        "small_description": ["holds tea"], "pricing": "$12.50", "customization_options": "",
        "category": "kitchen", "query": " Mugs ", "product_category": "Home \u203a Kitchen \u203a Mugs",
    }
    return base | changes


def options(**named):
    return {name.replace("_", " "): [{"value": value} for value in values] for name, values in named.items()}


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
EXTRAS = {
    "A000000000": {"attributes": ["water proof"], "instruction": "find a coat",
                   "instruction_attributes": ["water proof", "light"]},
    "A000000001": {"attributes": ["soft"], "instruction": "find shoes", "instruction_attributes": ["soft"]},
    "A000000003": {"attributes": ["shiny"], "instruction": "find a watch",
                   "instruction_attributes": ["shiny"]},
    "A000000010": {"attributes": []},
}
HUMAN = {
    "A000000001": [
        {"instruction": "red shoes please.", "instruction_attributes": ["soft"],
         "instruction_options": ["red"]},
        {"instruction": "nothing asked", "instruction_attributes": [], "instruction_options": []},
    ],
    "A000000003": [{"instruction": "a watch...", "instruction_attributes": ["shiny"],
                    "instruction_options": []}],
}


SMALL = ("items_shuffle_1000.json", "items_ins_v2_1000.json")


def write(folder, items=ITEMS, extras=EXTRAS, human=HUMAN, names=SMALL):
    for name, content in zip((*names, "items_human_ins.json"), (items, extras, human)):
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def shop(tmp_path):
    return WebShopEngine(write(tmp_path), seed=3, nouns=rule_nouns)


def on_item(shop, asin, mode="text_rich", query=None):
    engine = WebShopEngine.from_catalogue(shop.catalogue, mode)
    engine.reset(make_goal(shop.product(asin), "buy it", ["soft"]))
    engine.step(f"search[{query or shop.product(asin).title}]")
    engine.step(f"click[{asin.lower()}]")
    assert (engine.page, engine.asin) == ("item", asin)
    return engine


def test_goals_and_prices_follow_the_order_of_draws(shop):
    """Stops a wrong consumption of random numbers and wrong weights; the slow version makes all goals in a
    list, as upstream does."""
    rng = random.Random(3)
    low_high = {"A000000000": (9.99, 21.0)}
    prices = {p.asin: rng.uniform(*low_high[p.asin]) if p.asin in low_high else p.prices[0]
              for p in shop.products}
    assert [shop.price_of(asin) for asin in prices] == list(prices.values())
    goals, counts = [], Counter()
    for asin, extra in EXTRAS.items():
        if "instruction" not in extra:
            continue
        steps = [10.0 * i for i in range(1, 100) if 10.0 * i > prices[asin]][:4]
        upper = sorted(rng.sample(steps, 2))[1] if len(steps) > 1 else 1000000
        own = shop.product(asin).options
        for values in combinations(*(own[name] for name in sorted(own))):
            chosen = dict(zip(sorted(own), values))
            wanted = ", and ".join(f"{k}: {v}" for k, v in chosen.items())
            text = extra["instruction"] + (" with " if chosen else "") + wanted
            text += f", and price lower than {upper:.2f} dollars" if upper < 1000000 else ""
            goals.append((asin, text, chosen, upper))
            counts.update(extra["instruction_attributes"])
    random.Random(233).shuffle(goals)
    assert [(g.asin, g.instruction, g.goal_options, g.price_upper) for g in shop.goals] == goals
    assert len(goals) == 3 * 2 * 2 + 2 + 1
    for goal in shop.goals:
        weights = [1 / counts[a] for a in goal.attributes]
        assert goal.weight == pytest.approx(sum(weights) / len(weights))
    watch = next(g for g in shop.goals if g.asin == "A000000003")
    assert (watch.instruction, watch.price_upper) == ("find a watch", 1000000)
    assert shop.goals[-1] == shop.goals[len(goals) - 1] == shop.goals[-2:][1]


def test_human_goals_keep_lists_of_options(shop, tmp_path):
    """Stops counting instructions without attributes, and stripping a final full stop wrongly."""
    goals = Catalogue(tmp_path, human_goals=True, seed=3, nouns=rule_nouns).goals
    shoes, watch = sorted(goals, key=lambda g: g.asin)
    assert (len(goals), shoes.goal_options, shoes.weight, watch.instruction) == (2, ["red"], 1, "a watch")
    assert shoes.instruction == f"red shoes please, and price lower than {shoes.price_upper:.2f} dollars"


def test_products_are_read_as_upstream_reads_them(shop):
    """Stops lost '/' rewriting, repeated or over-long asins let in, wrong price tags, a missing
    DUMMY_ATTR."""
    assert [p.asin[-2:] for p in shop.products[:4]] == ["00", "01", "03", "10"] and len(shop.products) == 15
    coat, shoe, watch, _, mug = shop.products[:5]
    assert coat.options == {"size": ("s", "men's | xl", 'tall "t"'), "color": ("standard", "s"),
                            "fit": ("description", "é")}
    assert [p.price_tag for p in (coat, shoe, watch)] == ["$9.99 to $21.0", "$100.0", "$1985.0"]
    assert (watch.bullets, mug.attributes, mug.query) == (("one text",), ("DUMMY_ATTR",), "mugs")
    assert shop.option_values("color") == ["standard", "s", "red", "dark red"]
    assert shop.same_category(coat) == [coat]


def test_results_pages_go_on_past_the_last(shop):
    """Stops a bound on Next >, a lost count, a wrong slice of ten."""
    shop.reset(0)
    shop.step("search[mug]")
    head = f"Instruction: [SEP] {shop.goal.instruction} [SEP] Back to Search [SEP] "
    first = "Next > [SEP] A000000010 [SEP] Plain Mug 10 [SEP] $12.5 [SEP] A0"
    assert shop.observation.startswith(f"{head}Page 1 (Total results: 12) [SEP] {first}")
    assert shop.clickables == ["back to search", "next >", *(f"a{n:09d}" for n in range(10, 20))]
    page, _, _ = shop.step("click[NEXT >]")
    rows = [f"A0000000{n} [SEP] Plain Mug {n} [SEP] $12.5" for n in (20, 21)]
    assert page.endswith(" [SEP] ".join(["< Prev [SEP] Next >", *rows]))
    for _ in range(4):
        page, _, _ = shop.step("click[next >]")
    assert page == f"{head}Page 6 (Total results: 12) [SEP] < Prev [SEP] Next >" and shop.page_number == 6
    shop.step("click[< prev]")
    assert (shop.page_number, shop.page_asins, shop.total_results) == (5, [], 12)
    page, _, _ = shop.step("search[ ]")
    assert page == f"{head}Page 1 (Total results: 0) [SEP] Next >"
    assert shop.clickables == ["back to search", "next >"]


def test_item_and_sub_pages(shop):
    """Stops escapes in texts, segments lost or kept where the HTML parser folds white space, a wrong order of
    buttons."""
    engine = on_item(shop, "A000000000", "text")
    head = "Instruction: [SEP] buy it [SEP] Back to Search [SEP] < Prev"
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
    assert engine.clickables == ["back to search", "< prev"] and engine.sub_page == "Features"
    engine.step("click[< prev]")
    assert engine.step("click[description]")[0] == f"{head} [SEP] a & b < c"
    assert on_item(shop, "A000000001", "text").step("click[description]")[0] == head
    rich = on_item(shop, "A000000000")
    assert rich.step("click[features]")[0].endswith("[button] < Prev [button_]\n \n two\n\n")


def test_options_in_rich_pages(shop):
    """Stops wrong marks: upstream looks for the quoted value in the address, where JSON escapes hide some and
    quoted keywords show others."""
    engine = on_item(shop, "A000000000")
    page, _, _ = engine.step("click[s]")
    assert engine.options == {"color": "s"}  # of two options with this value the last
    assert page.startswith("You have clicked s.\nYou have clicked s.\nInstruction:\nbuy it\n")
    assert page.count("  [clicked button] s [clicked button_]\n") == 2
    page, _, _ = engine.step("click[men's | xl]")
    assert page.startswith("You have clicked s.\nYou have clicked men's | xl.\nYou have clicked s.\n")
    for hidden in ("é", 'tall "t"'):
        page, _, _ = engine.step(f"click[{hidden}]")
        assert f"  [button] {hidden} [button_]\n" in page
    assert engine.options == {"color": "s", "size": 'tall "t"', "fit": "é"}
    engine = on_item(shop, "A000000000", query='coat "standard"')
    assert "[clicked button] standard [clicked button_]" in engine.observation


def test_options_are_kept_over_sub_pages_and_forgotten_in_the_results(shop):
    """Stops options leaking into the next visit, and the visited mark being lost or surviving 'back to
    search'."""
    engine = on_item(shop, "A000000001")
    engine.step("click[red]")
    engine.step("click[reviews]")
    engine.step("click[< prev]")
    assert engine.options == {"color": "red"}
    page, _, _ = engine.step("click[< prev]")
    assert "\n\n[clicked button] A000000001 [clicked button_]\n" in page and engine.asin is None
    engine.step("click[a000000001]")
    assert engine.options == {}
    page, _, _ = engine.step("search[shoe]")  # accepted without a search bar
    assert "[clicked button] A000000001" in page and not engine.has_search_bar
    page, _, _ = engine.step("click[back to search]")
    assert page == "WebShop\nInstruction: \nbuy it\n[button] Search [button_]\n"
    assert engine.has_search_bar and engine.keywords is None
    assert "\n[button] A000000001 [button_]\n" in engine.step("search[shoe]")[0]


def test_keywords_that_name_a_page_confuse_prev_as_upstream(shop):
    """Stops a page test that is cleverer than upstream's search for a name in the address."""
    engine = on_item(shop, "A000000001", query="shoe search_results")
    page, _, _ = engine.step("click[< prev]")
    assert "Page 0 (Total results: 1)\n[button] Next > [button_]\n" in page and engine.page_asins == []
    engine = on_item(shop, "A000000001", query="shoe item_page")
    engine.step("click[features]")
    engine.step("click[< prev]")
    assert engine.page == "results"


@pytest.mark.parametrize(
    "action", ["", "noop", "search", "search[]", "Search[mug]", "I will click[search]", "x\nsearch[mug]",
               "click[search]", "click[a000000010]", "click[back to search", "buy now", "<r>", "search[<r>]",
               "search[<a> x]", "search[<c> kitchen]", "search[<Q> mugs]"],
)
def test_invalid_actions_change_nothing(shop, action):
    """Stops a laxer grammar, and the query cheats when they are off."""
    before = shop.reset(1)
    assert shop.step(action) == (before, 0.0, False) and not shop.valid and shop.page == "index"


def test_action_grammar(shop):
    """Stops splitting at the first '[' or ']', and refusing text after the last ']'."""
    shop.reset(1)
    shop.step("search[plain [mug]] please")
    assert not shop.valid  # the name is then 'search[plain '
    shop.step("search[mug] 17] please")
    assert shop.valid and shop.keywords == ["mug]", "17"]
    shop.step("click[A000000017]")
    assert shop.asin == "A000000017"


def test_cheats_when_allowed(shop):
    """Stops the optional special queries from differing from upstream's, or from crashing where upstream
    does."""
    engine = WebShopEngine.from_catalogue(shop.catalogue, cheats=True)
    engine.reset(0)
    assert engine.step("search[<c> kitchen]")[0].count("[SEP] A0000") == 10 and engine.total_results == 14
    engine.step("search[<q> shoes]")
    assert engine.page_asins == ["A000000001"]
    engine.step("search[<r>]")
    assert engine.total_results == 15
    for crash in ("search[<a> soft]", "search[<c>]"):
        engine.step(crash)
        assert not engine.valid


def test_purchase_ends_with_the_reward_and_a_search_goes_on(shop):
    """Stops wrong JSON on the last page (sorted, with Flask's escapes), and a session that cannot go on as
    upstream's can."""
    engine = on_item(shop, "A000000000", "text")
    engine.step("click[men's | xl]")
    engine.step("click[standard]")
    page, score, done = engine.step("click[buy now]")
    assert done and score == engine.score == pytest.approx(0.5) and engine.page == "done"
    assert engine.clickables == []
    assert '[SEP] {"color": "standard", "size": "men\\u0027s | xl"} [SEP] attrs [SEP] None [SEP]' in page
    assert page.startswith("Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in ")
    assert page.endswith("Your score (min 0.0, max 1.0) [SEP] 0.5 [SEP] Reward Details [SEP] None")
    assert engine.step("click[buy now]") == (page, 0.0, False)
    engine.step("search[mug]")
    assert engine.page == "results" and engine.step("click[a000000010]")[2] is False


def test_sessions_share_the_catalogue_and_nothing_else(shop):
    """Stops one session's choices from showing in another, and a second load for a fork."""
    first, second = on_item(shop, "A000000001"), shop.fork()
    first.step("click[red]")
    second.reset(0)
    assert second.catalogue is first.catalogue and second.visited == set()
    assert second.options == {} and first.options == {"color": "red"}


# Reward


def goal_for(shop, asin, attributes=("soft",), chosen=None, upper=1000000):
    return make_goal(shop.product(asin), "", list(attributes), chosen or {}, upper)


def test_reward_counts_attributes_options_and_price(shop):
    """Stops a wrong weight of a part; each row breaks one."""
    shoe = shop.product("A000000001")
    # 'red' is no attribute but stands in the title
    goal = goal_for(shop, shoe.asin, ["soft", "red"], {"color": "red"}, 110.0)
    rows = [({"color": "red"}, 100.0, 1.0), ({"color": "dark red"}, 100.0, 0.75), ({}, 100.0, 0.75),
            ({"color": "red"}, 110.01, 0.75)]
    for chosen, price, expected in rows:
        score, details = reward(goal, shoe, price, chosen, rule_nouns)
        assert score == pytest.approx(expected), (chosen, price)
        assert details["price_ok"] == (price <= 110) and details["matched_attributes"] == ["soft", "red"]
        assert details["option_met"] == [chosen.get("color") == "red"] and details["r_type"] == 1.0
    assert reward(goal_for(shop, shoe.asin, ["warm"]), shoe, 1, {}, rule_nouns)[0] == pytest.approx(0.5)


def test_reward_normalises_colours_unevenly(shop):
    """Stops repairing upstream: a chosen 'standard' becomes 'tan', the wanted pair (name, value) does not;
    list options are normalised on both sides."""
    coat = shop.product("A000000000")

    def met(product, wanted, chosen):
        goal = goal_for(shop, product.asin, chosen=wanted)
        return reward(goal, product, 1, {"color": chosen}, rule_nouns)[1]["option_met"]

    assert met(coat, {"color": "standard"}, "standard") == [False]
    assert met(coat, ["standard"], "standard") == [True]
    shoe = shop.product("A000000001")
    assert met(shoe, ["red wine"], "blood red") == [True]


def test_type_reward(shop):
    """Stops: nouns counted once where upstream counts repeats, the query or category overriding a disjoint
    title, the 0.2 for a title without nouns."""
    bought, base = shop.product("A000000010"), goal_for(shop, "A000000010")

    def r_type(**changes):
        goal = Goal(**{**base.__dict__, "query": "other", "product_category": "Other", **changes})
        return reward(goal, bought, 1, {}, rule_nouns)[1]["r_type"]

    assert r_type(name="Plain Mug") == 1.0
    assert r_type(name="mug a1 a2 a3 a4") == 0.5  # exactly 0.2 is not above 0.2
    assert r_type(name="mug a1 a1 a1 a1") == 0.5
    assert r_type(name="mug a1 a2 a3 a4", query="mugs") == 1.0
    assert r_type(name="mug a1 a2 a3 a4", product_category="Home \u203aMugs") == 1.0
    assert r_type(name="mug " + "word " * 10, query="mugs") == 0.1
    assert r_type(name="boots", query="mugs") == 0.0
    assert r_type(name="12 34") == 0.5


# Search


def test_search_against_a_slow_bm25():
    """Stops a wrong idf, length rounding, query-term weight or tie order; the slow version walks all
    documents and words."""
    rng = random.Random(0)
    vocabulary = [f"{c}{v}{d}{c}" for c in "bdgk" for v in "aou" for d in "mnprt"]
    texts = [" ".join(rng.choices(vocabulary, k=rng.choice([0, 3, 20, 60, 200]))) for _ in range(300)]
    ids = [f"{rng.randrange(10**9):09d}" for _ in texts]
    index = BM25Index(iter(texts), ids)
    docs = [Counter(text.split()) for text in texts]
    n_docs = sum(1 for d in docs if d)
    mean = sum(d.total() for d in docs) / n_docs
    stored = {20: 20, 60: 24 + 36, 200: 24 + 176, 3: 3, 0: 0}  # 36 and 176 in 4 bits: 9 * 4 and 11 * 16
    queries = [rng.choices(vocabulary, k=k) for k in (1, 2, 3, 8) for _ in range(10)]
    for query in [*queries, ["bamb", "bamb", "dotd"], ["zzz"]]:
        scores = {}
        for i, doc in enumerate(docs):
            for term in query:
                if doc[term]:
                    n = sum(1 for d in docs if d[term])
                    norm = 0.9 * (0.6 + 0.4 * stored[doc.total()] / mean)
                    idf = math.log(1 + (n_docs - n + 0.5) / (n + 0.5))
                    scores[i] = scores.get(i, 0) + idf * doc[term] / (doc[term] + norm)
        found = list(index.search(" ".join(query), 20))
        best = sorted(scores.values(), reverse=True)[:20]
        assert [scores[i] for i in found] == pytest.approx(best, rel=1e-6)
        assert all(ids[a] < ids[b] for a, b in zip(found, found[1:]) if abs(scores[a] - scores[b]) < 1e-12)


def test_lucene_lengths():
    """Stops an off-by-one in the one-byte code: exact to 40, then ever coarser steps."""
    lengths = np.array([0, 1, 23, 24, 39, 40, 41, 42, 56, 59, 60, 1000])
    assert list(_one_byte_lengths(lengths)) == [0, 1, 23, 24, 39, 40, 40, 42, 56, 56, 60, 984]


def test_words_and_stems():
    """Stops tokenizer and stemmer from drifting from Lucene's; all answers were checked against Lucene
    9.5."""
    found = words("o'neil's 3.5mm a_b 2,000 u.s.a. a:b a;b w/o -- ½")
    assert found == ["o'neil's", "3.5mm", "a_b", "2,000", "u.s.a", "a:b", *"abwo"]
    found = words("caf\u00e9\u2122 ★ \U0001f44d\U0001f3fd 食品 ガラス")
    assert found == ["caf\u00e9", "\u2122", "★", "\U0001f44d\U0001f3fd", "食", "品", "ガラス"]
    assert [len(word) for word in words("x" * 600)] == [255, 255, 90]
    assert [len(word) for word in words("a'" * 300)] == [255, 255, 87]  # what is left is cut anew
    assert analyze("the Women's shoes and not rock’n’roll’s") == ["women", "shoe", "rock’n’rol"]
    stems = {
        "possibly": "possibl", "technology": "technolog", "relational": "relat", "hopping": "hop",
        "falling": "fall", "sky": "sky", "is": "is", "happily": "happili", "adoption": "adopt",
        "controlling": "control", "agreed": "agre", "conflated": "conflat", "hopefulness": "hope",
    }
    assert {word: porter_stem(word) for word in stems} == stems


# Files


BROKEN = [
    (lambda i, e: i[1].pop("name"), "product 1 (asin A000000001), field 'name': missing"),
    (lambda i, e: i[4].update(full_description=5),
     "asin A000000003), field 'full_description': found 5; expected text"),
    (lambda i, e: i[0].update(pricing="$cheap"), "field 'pricing': found '$cheap'; expected text such as"),
    (lambda i, e: i[0].update(pricing="12"), "field 'pricing': found '12'"),
    (lambda i, e: i[0].update(small_description=["a", None]),
     "field 'small_description', entry 1: found None; expected text"),
    (lambda i, e: i[0].update(customization_options={"Color": [{"image": 1}]}),
     "option 'Color', field 'value': missing; expected text"),
    (lambda i, e: i.insert(0, "a"), "product 0: found 'a'; expected an object"),
    (lambda i, e: e["A000000001"].update(attributes="soft"),
     "product A000000001, field 'attributes': found 'soft'; expected a list of texts"),
    (lambda i, e: e["A000000001"].update(instruction_attributes=[]),
     "product A000000001, field 'instruction_attributes': found none"),
    (lambda i, e: e.update(A000000001=[]), "product A000000001: found []; expected an object"),
]


@pytest.mark.parametrize("breaks, message", BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_a_malformed_catalogue_is_refused_by_name(tmp_path, breaks, message):
    """Stops a crash far from its cause: the message names file, product, field, what was found and what was
    expected."""
    items, extras = json.loads(json.dumps([ITEMS, EXTRAS]))
    breaks(items, extras)
    with pytest.raises(ValueError) as caught:
        Catalogue(write(tmp_path, items, extras), nouns=rule_nouns)
    assert all(part in str(caught.value) for part in (message, str(tmp_path), ".json"))


def test_unreadable_files_are_refused_by_name(tmp_path):
    """Stops a bare JSON or OS error."""
    def refused(message, **options):
        with pytest.raises(ValueError, match=message):
            Catalogue(tmp_path, nouns=rule_nouns, **options)

    refused("no WebShop catalogue there; expected the files items_shuffle_1000.json and items_ins")
    write(tmp_path, json.dumps(ITEMS)[:-700])
    refused(r"items_shuffle_1000.json, product \d+: found .*; expected JSON")
    write(tmp_path, '{"a": 1}')
    refused("begins with .*; expected a JSON array of products")
    (tmp_path / "items_shuffle_1000.json").write_bytes(b'[{"asin": "\xff"}]')
    refused("cannot be read")
    write(tmp_path, extras="[")
    refused("items_ins_v2_1000.json: cannot be read as JSON")
    write(tmp_path, human={"A000000001": [{"instruction": 3, "instruction_attributes": ["a"]}]})
    refused("items_human_ins.json, product A000000001, field 'instruction': found 3", human_goals=True)
    refused("expected the files items_shuffle.json and items_ins_v2.json", size="full")
    refused("size 'huge'", size="huge")


def test_a_file_is_read_in_small_pieces(tmp_path, monkeypatch):
    """Stops a reader that only works when the whole file fits its buffer."""
    monkeypatch.setattr("dreamgym.envs.webshop.catalogue.READ_CHARS", 7)
    write(tmp_path, json.dumps(ITEMS, indent=1), names=("items_shuffle.json", "items_ins_v2.json"))
    assert len(Catalogue(tmp_path, nouns=rule_nouns).products) == 15


def test_wrong_use_is_refused(shop):
    """Stops a silent start on a negative index, a step without a goal, a misspelt mode."""
    for call, message in [
        (lambda: shop.reset(-1), "goal -1: expected an index from 0 to 14"),
        (lambda: shop.fork().step("search[mug]"), "step before reset"),
        (lambda: WebShopEngine.from_catalogue(shop.catalogue, "html"), "observation_mode 'html'"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
