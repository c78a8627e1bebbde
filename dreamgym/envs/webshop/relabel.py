"""The rule-based teacher for WebShop: reasoning traces from the environment's true state, and buy pages relabelled with other instructions.

A trace states the facts first and the verdict last, because a small model can only conclude from what it has already written: an option is looked
up among the options of the page before it is taken, and at buy-time each constraint is checked one by one (facts/tiny-scale, section 7).
Relabelling makes the reward a judgement: the same real page with an instruction it meets, or with one that breaks a single constraint.
"""
from __future__ import annotations

import numpy as np

from dreamgym.envs.webshop import text as text
from dreamgym.envs.webshop.engine import Goal, Product, WebShopEngine
from dreamgym.episode import Episode, Step, Task

# What a relabelled instruction breaks, and how often: one constraint (the near misses), or whatever another product's wishes break. The latter are easy, but they
# hold as many "no" as "yes" per word, without which a small model says "yes" to every word of a title.
BREAKABLE = {"attribute": 0.20, "noun": 0.15, "price": 0.10, "option": 0.15, "many": 0.40}
MAX_LOOKED_UP = 16


def verdict_rows(goal: Goal, details: dict, price: float) -> list[tuple[str, str, bool]]:
    """(kind, what is wanted, met) for each constraint, from the engine's own reward details, in the order of the instruction; kind: title, option, price."""
    rows = [("title", a, a in details["matched_attributes"]) for a in goal.attributes] + [("title", goal.query, details["r_type"] == 1.0)]
    wanted = goal.goal_options.values() if isinstance(goal.goal_options, dict) else goal.goal_options
    rows += [("option", value, met) for value, met in zip(wanted, details["option_met"])]
    if goal.price_upper < 1_000_000:
        rows.append(("price", f"{round(price, 2):g} under {goal.price_upper:g}", details["price_ok"]))
    return rows


def _check(kind: str, what: str, met: bool, item: text.Item) -> str:
    """One constraint: what it is compared with, word by word until it is found, then the verdict."""
    candidates = {"title": item.title.lower().split(), "option": item.chosen, "price": []}[kind]
    facts = _compared(candidates, what) if len(candidates) <= MAX_LOOKED_UP else ""
    return f"{what} : {facts} {'met' if met else 'missing'}".replace("  ", " ")


def explain(state: str, action: str, verdict: list[tuple[str, str, bool]] | None = None, success: bool = False) -> str:
    """One line of reasoning for a transition; `verdict` only where something was bought."""
    kind, (_, argument) = text.action_type(state, action), text.split_action(action)
    item = text.read_item(state)
    if verdict is not None and item:
        return f"check {' '.join(_check(*row, item) for row in verdict)} so {'success' if success else 'failure'}"
    if kind == "search":
        return f"the shop lists matches for {argument}"
    if kind == "open":
        title, price = text.read_results(state)[argument]
        return f"{argument} is {title} {price} and opens"
    if item and kind in ("option", "refused") and argument:
        return _look_up(item.values, argument)
    if kind == "prev":
        return "back to the page before"
    return {"next": "the next page of the same results", "sub": "details of this item", "back": "back to the search page"}.get(kind, "that is not possible here so the same page")


def explain_recorded(task_text: str, step: Step) -> str:
    """The trace of a step that somebody else recorded, read off its page alone; '' where the rules would have expected another outcome."""
    bought = text.rule_success(task_text, step.state, step.action)
    if bought is None:
        expected = not step.done and (text.action_type(step.state, step.action) != "refused" or step.next_state == step.state)
        return explain(step.state, step.action) if expected else ""
    wanted, item = text.read_task(task_text), text.read_item(step.state)
    rows = [("title", word) for word in wanted.words] + [("option", value) for value in wanted.options.values()]
    rows += [("price", f"{item.price_low:g} under {wanted.price:g}")] if wanted.price is not None else []
    verdict = [(*row, met) for row, (_, met) in zip(rows, text.checks(wanted, item))]
    return explain(step.state, step.action, verdict, bought) if step.done and bought == (step.reward == 1) else ""


def _compared(candidates: list[str], wanted: str) -> str:
    """'red no blue yes': the candidates up to the wanted one, each with the outcome of the comparison."""
    looked = candidates[:candidates.index(wanted) + 1] if wanted in candidates else candidates
    return " ".join(f"{value} {_yes(value == wanted)}" for value in looked)


def _look_up(values: list[str], wanted: str) -> str:
    facts = _compared(values, wanted) if len(values) <= MAX_LOOKED_UP else ""
    return f"look for {wanted} : {facts} so {'it is chosen' if wanted in values else 'the same page'}".replace("  ", " ")


def _yes(met: bool) -> str:
    return "yes" if met else "no"


def relabelled_buy(engine: WebShopEngine, product: Product, chosen: dict[str, str], state: str, broken: str | None, rng: np.random.Generator, name: str) -> Episode | None:
    """The purchase of `product` with `chosen` options, under an instruction it meets (`broken` None) or that breaks exactly one constraint.

    The engine's reward decides; None when this page cannot break that constraint, or when the engine disagrees with the intent (upstream's quirks:
    fuzzy matches, colours by substring, prices drawn from a range).
    """
    attributes = [a for a in product.attributes if a in product.title.lower().split()] or list(product.attributes)
    wanted = [attributes[i] for i in sorted(rng.permutation(len(attributes))[:rng.integers(1, len(attributes) + 1)])] if attributes else []
    options = {k: v for k, v in chosen.items() if rng.random() < 0.85}
    price, query, target = engine.price_of(product.asin), product.query, product
    upper = 10 * float(np.floor(price / 10) + rng.integers(1, 5))
    products = engine.products
    if broken == "attribute":
        others = sorted({a for p in engine.same_category(product) for a in p.attributes} - set(product.attributes))
        if not wanted or not others:
            return None
        wanted[rng.integers(len(wanted))] = str(rng.choice(others))
    elif broken == "noun":
        target = products[rng.integers(len(products))]
        query = target.query
        if query == product.query:
            return None
    elif broken == "price":
        upper = 10 * float(np.ceil(price / 10) - rng.integers(1, 4))
        if upper <= 0 or upper >= price:
            return None
    elif broken == "many":
        target = products[rng.integers(len(products))]
        query, wanted, upper = target.query, list(target.attributes), 10.0 * rng.integers(1, 13)
        options = {name: str(rng.choice(engine.option_values(name))) for name in options}
    elif broken == "option":
        if not product.options:
            return None
        option = str(rng.choice(list(product.options)))
        values = engine.option_values(option) or product.options[option]
        others = [v for v in values if v != chosen.get(option)]
        if not others:
            return None
        options[option] = str(rng.choice(others))
    goal = Goal(asin=target.asin, instruction="", attributes=wanted, goal_options={k: options[k] for k in sorted(options)}, price_upper=upper,
                query=query, product_category=target.product_category, name=target.title)
    score, details = engine.judge(goal, product, price, chosen)
    if (score == 1.0) != (broken is None):
        return None
    instruction = text.Wanted([*wanted, query], goal.goal_options, upper).text()
    reasoning = explain(state, "click[buy now]", verdict_rows(goal, details, price), score == 1.0)
    step = Step(state, "click[buy now]", text.PLACED, float(score == 1.0), True, "click[buy now]", reasoning, info={"broken": broken or "none"})
    return Episode(name, Task(name, instruction, "webshop", state), [step], source="relabelled", stop="success" if score == 1.0 else "failure", score=score)
