"""WebShop's players, and the audit of what they did and of counterfactual purchases."""
from collections import Counter

import numpy as np
import pytest

from dreamgym import hindsight, offline
from dreamgym.envs.base import Player, Session
from dreamgym.envs.webshop import text
from dreamgym.envs.webshop.scripted import Shopper
from dreamgym.episode import Episode, Step, Task
from tests.conftest import a_task, probed

PAGE = "item red vest $20\ncolor: red / blue\nchosen: none"


def play(shop, task: Task, player: Player, seed: int) -> Episode:
    return offline.play(shop, task, player, np.random.default_rng(seed), f"{task.id}-{seed}")


def shopper(instruction: str, state: str = text.START) -> Shopper:
    return Shopper(Session(a_task(instruction), state), np.random.default_rng(0))


def test_players_think_of_what_decides():
    """A thought that passes over a lacking word, a price, or an opened product; an option that is not
    there."""
    results = "results page 1 of 2\nred hat $9 [1]\nred vest $40 [2]\nred vest $20 [3]\nbig red vest $10 [4]"
    act = shopper("find me red vest with color: red, and size: 7, and price lower than 30.00 dollars", results)
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
    episodes = sum(played.values(), [])
    return hindsight.counterfactual_rewards(episodes, 1500, np.random.default_rng(1), hindsight.one_sided(episodes))


def steps_of(*groups) -> list[tuple[Episode, Step]]:
    return [(episode, step) for episodes in groups for episode in episodes for step in episode.steps]


def is_range(state: str) -> bool:
    return " to $" in state.split("\n")[0]


# ---- players ----

def test_how_well_each_player_does(played):
    """A demonstrator that teaches failure, mistakes that leave imitation nothing to improve on."""
    share = {kind: np.mean([episode.success for episode in episodes]) for kind, episodes in played.items()}
    assert share["demonstrator"] > 0.9
    assert 0.4 < share["imperfect"] < 0.9 and share["random"] < 0.1 and 0.1 < share["prober"]


def test_only_the_prober_is_refused(shop, played):
    refused = {kind: [step for _, step in steps_of(episodes) if not step.valid]
               for kind, episodes in played.items()}
    share = {kind: len(steps) / len(steps_of(played[kind])) for kind, steps in refused.items()}
    assert share.pop("prober") > 0.2 and max(share.values()) < 0.05
    assert len(refused["prober"]) > 200 and not any(step.reward for step in refused["prober"])
    assert {text.page_kind(step.state) for step in refused["prober"]} == {"index", "results", "item", "sub"}
    values = {value for product in shop.catalogue.products for values in product.options.values() for value in values}
    assert any(step.action[6:-1] in values for step in refused["prober"])


def test_players_see_states_only(played):
    for episode in played["demonstrator"][:100]:
        act = Shopper(Session(episode.task, text.START), np.random.default_rng(9))
        assert [act(step.state) for step in episode.steps[:6]] == [step.action for step in episode.steps[:6]]


def test_absent_option_sends_the_demonstrator_back():
    """Buying the first fitting product although its options lack the wanted value."""
    act = shopper("find me slim jacket with color: red, and price lower than 50.00 dollars")
    results = ("results page 1 of 1\nclassic slim jacket $40 [1]\nroyal slim jacket $60 [2]\n"
               "urban slim jacket $30 [3]")
    item = "item urban slim jacket $30\ncolor: {} / black\nchosen: {}"
    states = ["search page", results, item.format("blue", "none"), results, item.format("red", "none"),
              item.format("red", "red")]
    assert list(map(act, states)) == [           # neither the first again, nor the one that is too dear
        "search[slim jacket]", "click[1]", "click[< prev]", "click[3]", "click[red]", "click[buy now]"]


@pytest.mark.parametrize("instruction", ["find me tea", "a tea: with nothing: to read:", "find me the"])
def test_odd_pages_and_tasks_do_not_crash_a_player(shop, instruction):
    session = Session(a_task(instruction), "search page")
    for player in [player for player in shop.players().values() if player.share]:    # the oracle asks the engine
        act = player.make(session, np.random.default_rng(0))
        for state in ("search page", "item without a price", "results page 1 of 0\nnothing",
                      "details of the item\nnothing", "", "order placed"):
            assert isinstance(act(state), str)


# ---- the audit ----

def test_audit_agrees_with_the_engine(shop, played, counterfactuals):
    seen = Counter()
    for episode, step in steps_of(*played.values(), counterfactuals):
        verdict = shop.audit.success(episode.task, step.state, step.action, step.next_state)
        assert (verdict is None) == (not step.done)
        if is_range(step.state) and verdict not in (None, bool(step.reward)):
            wanted, item = text.read_task(episode.task.text), text.read_item(step.state)
            assert verdict and item.price_low <= wanted.price < float(item.price.split("$")[-1])
            seen["range"] += 1
        elif verdict is not None:
            assert verdict == bool(step.reward), (episode.task.text, step.state)
            seen[verdict] += 1
    assert seen[True] > 800 and seen[False] > 800 and seen["range"] < 40
    for instruction, page in (("no wish at all:", PAGE), ("find me vest", "item vest")):     # cannot be read
        assert shop.audit.success(a_task(instruction), page, "click[buy now]", text.PLACED) is None


def test_audit_finds_pages_that_change(shop, played):
    """A count that a real shop does not pass, or that calls a chosen option a contradiction."""
    counts = [shop.audit.inconsistencies(episode.steps) for episode in sum(played.values(), [])]
    assert sum(again for again, _ in counts) > 200 and not any(differ for _, differ in counts)
    other = [PAGE, PAGE.replace("none", "red"), PAGE.replace("blue", "green"), PAGE.replace("$20", "$30")]
    steps = [Step(state="search page", action="click[1]", next_state=page) for page in other]
    assert shop.audit.inconsistencies(steps) == (2, 1)


def test_counterfactuals_break_what_their_label_says(counterfactuals):
    """Rewards made without rules that the shop's own rules contradict: they teach a wrong judge."""
    labels = Counter(episode.label for episode in counterfactuals)
    assert set(labels) == {"none", "another task", "another number", "unpaid step"} and min(labels.values()) > 60
    for episode in counterfactuals:
        [step] = episode.steps
        wanted, item = text.read_task(episode.task.text), text.read_item(step.state)
        missed = {kind for kind, met in text.checks(wanted, item) if not met}
        assert is_range(step.state) or bool(missed) != (episode.label == "none") == bool(step.reward)
        assert episode.label != "another number" or missed == {"price"}
