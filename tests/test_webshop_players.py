"""WebShop's players, the traces of the rules, counterfactual purchases, and the audit."""
from collections import Counter

import numpy as np
import pytest

from dreamgym import offline
from dreamgym.envs.base import Player, Session
from dreamgym.envs.webshop import text
from dreamgym.envs.webshop.relabel import BREAKABLE, other_goal
from dreamgym.envs.webshop.scripted import Shopper
from dreamgym.episode import Episode, Step, Task, check_episode
from tests.conftest import probed

PAGE = "item red vest $20\ncolor: red / blue\nchosen: none"


def task_of(instruction: str) -> Task:
    return Task(id="t", text=instruction)


def play(shop, task: Task, player: Player, seed: int) -> Episode:
    return offline.play(shop, task, player, np.random.default_rng(seed), f"{task.id}-{seed}")


def test_players_think_of_what_decides():
    """A thought that passes over a lacking word, a price, or an opened product; an option that is not there."""
    wanted = task_of("find me red vest with color: red, and size: 7, and price lower than 30.00 dollars")
    results = "results page 1 of 2\nred hat $9 [1]\nred vest $40 [2]\nred vest $20 [3]\nbig red vest $10 [4]"
    act = Shopper(Session(wanted, results), np.random.default_rng(0))
    thought = lambda state: act(state).thought
    assert thought("search page") == "" and act("search page") == "search[red vest]"
    assert thought(results) == "look for red vest : 1 vest no 2 $40 no 3 yes"
    assert thought(results) == "look for red vest : 1 vest no 2 $40 no 3 seen no 4 yes"
    assert thought("results page 1 of 1\nnothing") == "look for red vest : none"
    assert thought(PAGE) == "color red : offered ; size 7 : none"
    assert thought(PAGE.replace("chosen: none", "chosen: red")) == "color red : chosen ; size 7 : none"


@pytest.fixture(scope="module")
def played(shop):
    """200 episodes of each player, and of the prober, on the same tasks."""
    tasks = shop.tasks("train")
    chosen = [tasks[i] for i in np.random.default_rng(0).permutation(len(tasks))[:200]]
    found = {kind: [play(shop, task, player, i) for i, task in enumerate(chosen)]
             for kind, player in shop.players().items()}
    before = found["imperfect"]
    return found | {"prober": [probed(shop, e, before, np.random.default_rng(i)) for i, e in enumerate(before)]}


@pytest.fixture(scope="module")
def counterfactuals(shop, played):
    made = shop.counterfactuals(sum(played.values(), []), 1500, np.random.default_rng(1))
    return [offline.explained(shop, episode) for episode in made]


def steps_of(*groups) -> list[tuple[Episode, Step]]:
    return [(episode, step) for episodes in groups for episode in episodes for step in episode.steps]


def is_range(state: str) -> bool:
    return " to $" in state.split("\n")[0]


# ---- players ----

def test_how_well_each_player_does(shop, played):
    """A demonstrator that teaches failure, mistakes that leave imitation nothing to improve on."""
    share = {kind: np.mean([episode.success for episode in episodes]) for kind, episodes in played.items()}
    assert share["demonstrator"] > 0.9
    assert 0.4 < share["imperfect"] < 0.9 and share["random"] < 0.1 and 0.1 < share["prober"]
    assert sum(player.share for player in shop.players().values()) == pytest.approx(1)
    assert [kind for kind, player in shop.players().items() if player.imitate] == ["imperfect"]
    for kind, player in shop.players().items():
        assert play(shop, played[kind][4].task, player, 4) == played[kind][4]


def test_only_the_prober_is_refused(shop, played):
    refused = {kind: [step for _, step in steps_of(episodes)
                      if shop.audit.action_type(step.state, step.action) == "refused"]
               for kind, episodes in played.items()}
    assert [kind for kind, steps in refused.items() if steps] == ["prober"]
    assert len(refused["prober"]) > 200 and not any(step.valid or step.reward for step in refused["prober"])
    assert {text.page_kind(step.state) for step in refused["prober"]} == {"index", "results", "item", "sub"}
    values = set(sum(shop.catalogue.option_values.values(), []))
    assert any(step.action[6:-1] in values for step in refused["prober"])


def test_players_see_states_only(played):
    for episode in played["demonstrator"][:100]:
        act = Shopper(Session(episode.task, text.START), np.random.default_rng(9))
        assert [act(step.state) for step in episode.steps[:6]] == [step.action for step in episode.steps[:6]]


def test_absent_option_sends_the_demonstrator_back():
    """Buying the first fitting product although its options lack the wanted value."""
    instruction = "find me slim jacket with color: red, and price lower than 50.00 dollars"
    act = Shopper(Session(task_of(instruction), text.START), np.random.default_rng(0))
    results = ("results page 1 of 1\nclassic slim jacket $40 [1]\nroyal slim jacket $60 [2]\n"
               "urban slim jacket $30 [3]")
    item = "item urban slim jacket $30\ncolor: {} / black\nchosen: {}"
    states = ["search page", results, item.format("blue", "none"), results, item.format("red", "none"),
              item.format("red", "red")]
    assert list(map(act, states)) == [           # neither the first again, nor the one that is too dear
        "search[slim jacket]", "click[1]", "click[< prev]", "click[3]", "click[red]", "click[buy now]"]


@pytest.mark.parametrize("instruction", ["find me tea", "a tea: with nothing: to read:", "find me the"])
def test_odd_pages_and_tasks_do_not_crash_a_player(shop, instruction):
    session = Session(task_of(instruction), "search page")
    for player in [player for player in shop.players().values() if player.share]:    # the oracle asks the engine
        act = player.make(session, np.random.default_rng(0))
        for state in ("search page", "item without a price", "results page 1 of 0\nnothing",
                      "details of the item\nnothing", "", "order placed"):
            assert isinstance(act(state), str)


def test_every_step_has_two_true_traces_on_one_line(played):
    """Rows without reasoning, and a purchase's trace that contradicts its own facts."""
    verdicts = Counter()
    for episode, step in steps_of(*played.values()):
        assert step.reasoning and step.reasoning.isprintable() and step.reasoning == step.reasoning.strip()
        if step.done:
            assert step.reasoning == "the order is placed"
            assert step.reward_reasoning or is_range(step.state)
            facts, _, verdict = step.reward_reasoning.rpartition(" so ")
            assert not facts or verdict == episode.stop.value == ("success", "failure")["missing" in facts.split()]
            verdicts[verdict] += 1
        else:
            assert step.reward_reasoning == "no purchase"
    assert min(verdicts["success"], verdicts["failure"]) > 100 and verdicts[""] < 10


SIZED = PAGE.replace("\nchosen", "\nsize: s / m\nchosen")
BLUE_VEST = "find me vest with color: blue"
SLIM = "find me slim vest with color: blue, and price lower than 50.00 dollars"
MET = "slim yes met vest : slim no vest yes met blue : blue yes met"
MISSING = "check vest : red no vest yes met blue : missing so failure"
LISTED = "results page 1 of 2\nclassic slim jacket $40 [1]\nroyal vest $20 [2]"
HERE = "results page 1 of 2 : "
REFUSED = HERE + "not possible here so the same page"


@pytest.mark.parametrize("instruction, state, action, next_state, reward, done, traces", [
    (BLUE_VEST, PAGE, "click[buy now]", text.PLACED, 0, True, ("the order is placed", MISSING)),
    (BLUE_VEST, PAGE, "click[buy now]", text.PLACED, 1, True, ("the order is placed", "")),
    *((SLIM, PAGE.replace("red vest $20\n", f"{item}\n").replace("none", "blue"), "click[buy now]", text.PLACED, paid,
       True, ("the order is placed", f"check slim : {why}")) for item, paid, why in (
        ("red vest $20", 0, "red no vest no missing vest : red no vest yes met blue : blue yes met "
         "20 under 50 : met so failure"),
        ("slim vest $60", 0, f"{MET} 60 under 50 : missing so failure"),
        ("slim vest $20", 1, f"{MET} 20 under 50 : met so success"))),
    (BLUE_VEST, PAGE, "click[buy now]", "search page", 0, True, ("", MISSING)),
    ("find me vest", PAGE, "click[buy now]", PAGE, 0, False, ("", "")),
    ("no wish at all:", PAGE, "click[buy now]", text.PLACED, 1, True, ("the order is placed", "")),
    ("find me vest", PAGE, "click[green]", PAGE, 0, False,
     ("look for green : red no blue no so the same page", "no purchase")),
    ("find me vest", PAGE, "click[green]", PAGE.replace("none", "green"), 0, False, ("", "no purchase")),
    ("find me vest", PAGE, "click[blue]", PAGE, 0, False, ("", "no purchase")),
    ("find me vest", PAGE, "click[blue]", PAGE.replace("none", "blue"), 0, False,
     ("look for blue : red no blue yes ; color takes blue so blue", "no purchase")),
    ("find me vest", SIZED, "click[red]", SIZED.replace("none", "red"), 0, False,
     ("look for red : red yes ; color takes red ; size has none so red", "no purchase")),
    ("find me vest", SIZED.replace("none", "red / m"), "click[m]", SIZED.replace("none", "red / m"), 0, False,
     ("look for m : red no blue no s no m yes ; color has red ; size has m so the same page", "no purchase")),
    ("find me vest", PAGE, "click[< prev]", "search page", 1, True, ("", "")),
    *(("find me vest", LISTED, action, LISTED, 0, False, (trace, "no purchase")) for action, trace in (
        ("click[2]", "2 is royal vest $20 and opens"), ("click[3]", REFUSED), ("buy it", REFUSED),
        ("search[slim vest]", HERE + "the shop lists matches for slim vest"),
        ("click[back to search]", HERE + "back to the search page"), ("click[< prev]", REFUSED),
        ("click[next >]", HERE + "the next page of the same results"))),
    ("find me vest", PAGE, "click[< prev]", LISTED, 0, False, ("item : back to the results before", "no purchase")),
])
def test_traces_match_the_record(shop, instruction, state, action, next_state, reward, done, traces):
    step = Step(state=state, action=action, next_state=next_state, reward=float(reward), done=done)
    assert shop.explain(task_of(instruction), [], step) == traces


# ---- the audit ----

def test_audit_agrees_with_the_engine(shop, played, counterfactuals):
    seen = Counter()
    for episode, step in steps_of(*played.values(), counterfactuals):
        verdict = shop.audit.success(episode.task, step.state, step.action, step.next_state)
        assert (verdict is None) == (shop.audit.action_type(step.state, step.action) != "buy")
        if is_range(step.state) and verdict not in (None, bool(step.reward)):
            wanted, item = text.read_task(episode.task.text), text.read_item(step.state)
            assert verdict and item.price_low <= wanted.price < float(item.price.split("$")[-1])
            seen["range"] += 1
        elif verdict is not None:
            assert verdict == bool(step.reward), (episode.task.text, step.state)
            seen[verdict] += 1
    assert seen[True] > 800 and seen[False] > 800 and seen["range"] < 40
    for instruction, page in (("no wish at all:", PAGE), ("find me vest", "item vest")):     # cannot be read
        assert shop.audit.success(task_of(instruction), page, "click[buy now]", text.PLACED) is None


def test_audit_finds_pages_that_change(shop, played):
    """A count that a real shop does not pass, or that calls a chosen option a contradiction."""
    counts = [shop.audit.inconsistencies(episode.steps) for episode in sum(played.values(), [])]
    assert sum(again for again, _ in counts) > 200 and not any(differ for _, differ in counts)
    other = [PAGE, PAGE.replace("none", "red"), PAGE.replace("blue", "green"), PAGE.replace("$20", "$30")]
    steps = [Step(state="search page", action="click[1]", next_state=page) for page in other]
    assert shop.audit.inconsistencies(steps) == (2, 1)


# ---- counterfactuals ----

def test_counterfactuals_break_what_their_label_says(counterfactuals):
    """Near misses that break two things or none: each constraint must be learnt by itself."""
    labels = Counter(episode.label for episode in counterfactuals)
    assert set(labels) == {"none", *BREAKABLE} and min(labels.values()) > 40 and 500 < labels["none"] < 900
    assert len(counterfactuals) == 1500
    for episode in map(check_episode, counterfactuals):
        [step], broken = episode.steps, episode.label
        assert (step.action, step.next_state, step.done) == ("click[buy now]", "order placed", True)
        assert bool(step.reward) == (broken == "none") == (episode.raw_score == 1.0)
        missing = step.reward_reasoning.split().count("missing")
        assert missing >= 1 if broken == "many" else missing == (broken != "none")
        wanted = text.read_task(episode.task.text)
        kinds = [*["attribute"] * (len(wanted.words) - 1), "noun", *["option"] * len(wanted.options), "price"]
        checks = text.checks(wanted, text.read_item(step.state))
        if not is_range(step.state) and broken != "many":
            unmet = [kind for kind, (_, _, met) in zip(kinds, checks, strict=True) if not met]
            assert unmet == ([] if broken == "none" else [broken]), episode.task.text


def test_counterfactuals_depend_on_the_seed_alone(shop, played):
    one, two = (shop.counterfactuals(played["imperfect"], 20, np.random.default_rng(3)) for _ in range(2))
    assert one == two and len(one) == 20
    assert shop.counterfactuals([], 20, np.random.default_rng(3)) == []


def test_what_cannot_be_broken_is_left_alone(shop):
    product = next(p for p in shop.catalogue.products if not p.options)
    single = product._replace(options={"finish": ("matte",)})
    for bought, chosen in ((product, {}), (single, {"finish": "matte"})):
        assert other_goal(shop.catalogue, bought, chosen, "option", np.random.default_rng(0)) is None
