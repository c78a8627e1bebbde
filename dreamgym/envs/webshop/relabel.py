"""Rule traces for WebShop's steps, and counterfactuals: recorded item pages, other instructions."""
from collections.abc import Callable, Iterable

import numpy as np

from dreamgym.envs.webshop import text
from dreamgym.envs.webshop.catalogue import Catalogue, Goal, Product
from dreamgym.envs.webshop.reward import judge
from dreamgym.episode import Episode, Step, Task
from dreamgym.prompts import compared

PLACED = "the order is placed"
NO_PURCHASE = "no purchase"
MAX_LOOKED_UP = 16                               # candidates that a trace compares one by one
MATCHING = 0.45                                  # share of counterfactuals that fulfil their task
# What the others break: one constraint, or what another product's wishes break ("many"), without which a
# small model says "yes" to every word of a title.
BREAKABLE = {"attribute": 0.20, "noun": 0.15, "price": 0.10, "option": 0.15, "many": 0.40}
BUY = "click[buy now]"
Check = tuple[str, str, bool]                    # kind (title, option, price), what is wanted, met


# ---- traces ------------------------------------------------------------------------------------------------

def explain(task: Task, history: list[Step], step: Step) -> tuple[str, str]:
    """As Environment.explain."""
    if text.action_type(step.state, step.action) == "buy":
        placed = step.done and step.next_state == text.PLACED
        return PLACED if placed else "", _explain_reward(task.text, step)
    return _explain_page(step), "" if step.done or step.reward else NO_PURCHASE


def _explain_reward(task_text: str, step: Step) -> str:
    """The check of a purchase, word by word."""
    item, wanted = text.read_item(step.state), text.read_task(task_text)
    rows = text.checks(wanted, item) if item and wanted and step.done else []
    return _verdict(rows, item) if rows and all(met for _, _, met in rows) == (step.reward == 1) else ""


def _explain_page(step: Step) -> str:
    """Why the next state of a step that buys nothing follows."""
    kind, (_, argument) = text.action_type(step.state, step.action), text.split_action(step.action)
    item, after = text.read_item(step.state), text.read_item(step.next_state)
    if step.done or (kind == "refused" and step.next_state != step.state):
        return ""
    if kind == "open":
        return f"{argument} is {' '.join(text.read_results(step.state)[argument])} and opens"
    if item and argument and kind in ("option", "refused"):
        facts = f"look for {argument} : {_compared(item.values, argument)}"
        if kind == "refused":
            return f"{facts}so the same page"
        chosen, why = _choose(item, argument)
        if after is None or after.chosen != chosen:
            return ""                            # upstream marks no value that JSON writes with an escape
        return f"{facts}; {why} so {'the same page' if chosen == item.chosen else ' / '.join(chosen)}"
    # what a button does depends on the heading: "results page 1 of 5"
    heading, there = step.state.split("\n")[0], step.next_state.split(" ")[0]
    here = heading if text.page_kind(step.state) == "results" else heading.split(" ")[0]
    follows = {"search": f"the shop lists matches for {argument}", "prev": f"back to the {there} before",
               "next": "the next page of the same results", "sub": "details of this item",
               "back": "back to the search page"}.get(kind, "not possible here so the same page")
    return f"{here} : {follows}"


def _verdict(rows: list[Check], item: text.Item) -> str:
    """'check slim : urban no vest no missing 40 under 50 : met so failure'."""
    candidates = {"title": item.title.lower().split(), "option": item.chosen, "price": []}
    facts = [f"{what} : {_compared(candidates[kind], what)}{'met' if met else 'missing'}"
             for kind, what, met in rows]
    return f"check {' '.join(facts)} so {'success' if all(met for _, _, met in rows) else 'failure'}"


def _choose(item: text.Item, value: str) -> tuple[list[str], str]:
    """(the options chosen after a click on `value`, why: "color has red ; size takes 7")."""
    chosen, why = [], []
    for name, values in item.options.items():
        had = next((v for v in values if v in item.chosen), None)
        takes = value in values and value != had
        why.append(f"{name} takes {value}" if takes else f"{name} has {had or 'none'}")
        chosen += [value] if takes else [had] * (had is not None)
    return chosen, " ; ".join(why)


def _compared(candidates: list[str], wanted: str) -> str:
    """As prompts.compared, and a blank; "" for no candidates, or too many."""
    return f"{compared(candidates, wanted)} " if 0 < len(candidates) <= MAX_LOOKED_UP else ""


# ---- counterfactuals ---------------------------------------------------------------------------------------

def counterfactuals(catalogue: Catalogue, episodes: list[Episode], count: int,
                    rng: np.random.Generator) -> list[Episode]:
    """About `count` purchases of the item pages in `episodes`, each under an instruction made up for it."""
    states = dict.fromkeys(step.state for episode in reversed(episodes) for step in reversed(episode.steps))
    pages, made = item_pages(catalogue, states), []
    for _ in range(20 * count if pages else 0):
        if len(made) == count:
            break
        state, product, chosen = pages[rng.integers(len(pages))]
        broken = "none"
        if rng.random() >= MATCHING:
            broken = str(rng.choice(list(BREAKABLE), p=list(BREAKABLE.values())))
        goal = other_goal(catalogue, product, chosen, broken, rng)
        episode = goal and purchase(state, goal, product, chosen, catalogue.nouns)
        if episode and episode.success == (broken == "none"):        # else upstream's quirks disagree
            episode.label = broken
            made.append(episode)
    return made


def item_pages(catalogue: Catalogue, states: Iterable[str]) -> list[tuple[str, Product, dict[str, str]]]:
    """(state, product, chosen options) of the item pages among the states."""
    def shown(title: str, price: str, options: dict) -> str:
        return str((title, price, {name: list(values) for name, values in options.items()}))

    products = {shown(text.clean(p.title), text.short_price(p.price_tag), p.options): p
                for p in catalogue.products}
    pages = []
    for state in states:
        item = text.read_item(state)
        product = item and products.get(shown(item.title, item.price, item.options))
        if product:
            pages.append((state, product, {name: value for name, values in product.options.items()
                                           for value in values if value in item.chosen}))
    return pages


def other_goal(catalogue: Catalogue, product: Product, chosen: dict[str, str], broken: str,
               rng: np.random.Generator) -> Goal | None:
    """A goal that buying `product` with `chosen` options fulfils but for its constraint `broken` ("none":
    all). None where this page cannot break that one."""
    attributes = [a for a in product.attributes if a in product.title.lower().split()] or product.attributes
    wanted: list[str] = []
    if attributes:
        picked = rng.permutation(len(attributes))[:rng.integers(1, len(attributes) + 1)]
        wanted = [attributes[i] for i in sorted(picked)]
    options = {name: value for name, value in chosen.items() if rng.random() < 0.85}
    target = product
    upper = 10 * float(np.floor(product.price / 10) + rng.integers(1, 5))
    if broken in ("noun", "many"):
        target = catalogue.products[rng.integers(len(catalogue.products))]
    if broken == "attribute":
        others = sorted(catalogue.category_attributes[product.category] - set(product.attributes))
        if not wanted or not others:
            return None
        wanted[rng.integers(len(wanted))] = str(rng.choice(others))
    elif broken == "noun" and target.query == product.query:
        return None
    elif broken == "price":
        upper = 10 * float(np.ceil(product.price / 10) - rng.integers(1, 4))
        if not 0 < upper < product.price:
            return None
    elif broken == "many":
        wanted, upper = list(target.attributes), 10.0 * rng.integers(1, 13)
        options = {name: str(rng.choice(catalogue.option_values[name])) for name in options}
    elif broken == "option":
        name = str(rng.choice(list(product.options))) if product.options else ""
        others = [value for value in catalogue.option_values.get(name, ()) if value != chosen.get(name)]
        if not others:
            return None
        options[name] = str(rng.choice(others))
    options = dict(sorted(options.items()))
    return Goal(target, text.Wanted([*wanted, target.query], options, upper).text(), wanted, options, upper)


def purchase(state: str, goal: Goal, product: Product, chosen: dict[str, str], nouns: Callable) -> Episode:
    """The purchase of a page under `goal`, judged by the real reward."""
    judged = judge(goal, product, chosen, nouns)
    step = Step(state=state, action=BUY, next_state=text.PLACED, reward=float(judged.score == 1), done=True)
    # Each constraint with the real verdict, for pages where the rules disagree with it.
    rows = [("title", wanted, met) for wanted, met in zip(goal.attributes, judged.attributes)]
    rows += [("title", goal.product.query, judged.type_score == 1.0)]
    rows += [("option", value, met) for value, met in zip(goal.options.values(), judged.options)]
    rows += [("price", f"{round(product.price, 2):g} under {goal.price_upper:g}", judged.price)]
    step.reward_reasoning = _explain_reward(goal.instruction, step) or _verdict(rows, text.read_item(state))
    return Episode(id="", task=Task(id="", text=goal.instruction), steps=[step], raw_score=judged.score)
