"""Rule traces for WebShop's steps, and counterfactuals: recorded item pages bought under other instructions.

A trace states the facts first and the verdict last, because a model can only conclude from what it has
already written: an option is looked up among the options of the page before it is taken, and at a purchase
each constraint is checked one by one. Counterfactuals make the reward a judgement: the same real page with an
instruction that it meets, or with one that breaks a single constraint.
"""
from __future__ import annotations

import numpy as np

from dreamgym.envs.webshop import text
from dreamgym.envs.webshop.engine import Goal, Product, WebShopEngine, make_goal
from dreamgym.episode import Episode, Step, StopReason, Task

PLACED = "the order is placed"
NO_PURCHASE = "no purchase"
MAX_LOOKED_UP = 16                               # candidates that a trace compares one by one
MATCHING = 0.45                                  # share of counterfactuals that fulfil their task
# What the other counterfactuals break: one constraint (the near misses), or whatever another product's wishes
# break. The latter are easy, but they hold as many "no" as "yes" per word, without which a small model says
# "yes" to every word of a title.
BREAKABLE = {"attribute": 0.20, "noun": 0.15, "price": 0.10, "option": 0.15, "many": 0.40}
BUY = "click[buy now]"
Check = tuple[str, str, bool]                    # kind (title, option, price), what is wanted, met
Page = tuple[Product, dict[str, str], str, str]  # product, chosen options, state, id of an episode with it


# ---- traces
# --------------------------------------------------------------------------------------------------


def explain(task_text: str, step: Step) -> tuple[str, str]:
    """(why the next state follows, why the reward follows), from task, page and action alone. Either is ""
    where the rules would have expected something else than what was recorded."""
    if text.is_purchase(step.state, step.action):
        placed = step.done and step.next_state == text.PLACED
        return PLACED if placed else "", _explain_reward(task_text, step)
    return _explain_page(step), "" if step.done or step.reward else NO_PURCHASE


def _explain_reward(task_text: str, step: Step) -> str:
    """The check of a purchase, word by word."""
    item = text.read_item(step.state)
    try:
        rows = text.checks(text.read_task(task_text), item) if item and step.done else []
    except ValueError:
        rows = []
    return _verdict(rows, item) if rows and all(met for _, _, met in rows) == (step.reward == 1) else ""


def _explain_page(step: Step) -> str:
    """Why the next state of a step that buys nothing follows."""
    kind, (_, argument) = text.action_type(step.state, step.action), text.split_action(step.action)
    item, after = text.read_item(step.state), text.read_item(step.next_state)
    if step.done or (kind == "refused" and step.next_state != step.state):
        return ""
    if kind == "option" and (after is None or argument not in after.chosen):
        return ""                                # upstream marks no value that JSON writes with an escape
    if kind == "search":
        return f"the shop lists matches for {argument}"
    if kind == "open":
        title, price = text.read_results(step.state)[argument]
        return f"{argument} is {title} {price} and opens"
    if item and argument and kind in ("option", "refused"):
        facts = _compared(item.values, argument)
        return f"look for {argument} : {facts}so {'it is chosen' if kind == 'option' else 'the same page'}"
    return {"prev": "back to the page before", "next": "the next page of the same results",
            "sub": "details of this item", "back": "back to the search page"
            }.get(kind, "that is not possible here so the same page")


def _verdict(rows: list[Check], item: text.Item) -> str:
    """'check slim : urban no vest no missing 40 under 50 : met so failure'."""
    candidates = {"title": item.title.lower().split(), "option": item.chosen, "price": []}
    facts = [f"{what} : {_compared(candidates[kind], what)}{'met' if met else 'missing'}"
             for kind, what, met in rows]
    return f"check {' '.join(facts)} so {'success' if all(met for _, _, met in rows) else 'failure'}"


def _compared(candidates: list[str], wanted: str) -> str:
    """'red no blue yes ': the candidates up to the wanted one, each with the outcome of the comparison."""
    if len(candidates) > MAX_LOOKED_UP:
        return ""
    looked = candidates[:candidates.index(wanted) + 1] if wanted in candidates else candidates
    return "".join(f"{value} {'yes' if value == wanted else 'no'} " for value in looked)


# ---- counterfactuals
# -----------------------------------------------------------------------------------------


def counterfactuals(engine: WebShopEngine, episodes: list[Episode], count: int,
                    rng: np.random.Generator) -> list[Episode]:
    """About `count` purchases of the item pages in `episodes`, each under an instruction made up for it."""
    pages, made = item_pages(engine, episodes), []
    kinds, shares = list(BREAKABLE), list(BREAKABLE.values())
    for _ in range(20 * count if pages else 0):
        if len(made) == count:
            break
        page = pages[rng.integers(len(pages))]
        broken = "none" if rng.random() < MATCHING else str(rng.choice(kinds, p=shares))
        goal = other_goal(engine, *page[:2], broken, rng)
        episode = goal and purchase(engine, page, goal, broken, f"{page[3]}-counterfactual-{len(made)}")
        made += [episode] if episode else []
    return made


def item_pages(engine: WebShopEngine, episodes: list[Episode]) -> list[Page]:
    """The item pages in the episodes, bought or not, each state once."""
    by_title: dict[str, list[Product]] = {}
    for product in engine.products:
        by_title.setdefault(text.clean(product.title), []).append(product)
    pages = {}
    shown = {step.state: episode.id for episode in reversed(episodes) for step in reversed(episode.steps)}
    for state, episode_id in shown.items():
        item = text.read_item(state)
        for product in by_title.get(item.title, []) if item else []:
            options = {name: list(values) for name, values in product.options.items()}
            if options == item.options and text.short_price(product.price_tag) == item.price:
                chosen = {name: value for name, values in options.items() for value in values
                          if value in item.chosen}
                pages[state] = (product, chosen, state, episode_id)
    return list(pages.values())


def other_goal(engine: WebShopEngine, product: Product, chosen: dict[str, str], broken: str,
               rng: np.random.Generator) -> Goal | None:
    """A goal that buying `product` with `chosen` options fulfils (`broken` "none"), or whose constraint
    `broken` it does not meet. None where this page cannot break that constraint."""
    in_title = [a for a in product.attributes if a in product.title.lower().split()]
    attributes = in_title or list(product.attributes)
    wanted: list[str] = []
    if attributes:
        picked = rng.permutation(len(attributes))[:rng.integers(1, len(attributes) + 1)]
        wanted = [attributes[i] for i in sorted(picked)]
    options = {name: value for name, value in chosen.items() if rng.random() < 0.85}
    price, target = engine.price_of(product.asin), product
    upper = 10 * float(np.floor(price / 10) + rng.integers(1, 5))
    if broken in ("noun", "many"):
        target = engine.products[rng.integers(len(engine.products))]
    if broken == "attribute":
        known = {a for p in engine.same_category(product) for a in p.attributes}
        others = sorted(known - set(product.attributes))
        if not wanted or not others:
            return None
        wanted[rng.integers(len(wanted))] = str(rng.choice(others))
    elif broken == "noun" and target.query == product.query:
        return None
    elif broken == "price":
        upper = 10 * float(np.ceil(price / 10) - rng.integers(1, 4))
        if not 0 < upper < price:
            return None
    elif broken == "many":
        wanted, upper = list(target.attributes), 10.0 * rng.integers(1, 13)
        options = {name: str(rng.choice(engine.option_values(name))) for name in options}
    elif broken == "option":
        name = str(rng.choice(list(product.options))) if product.options else ""
        values = engine.option_values(name) or product.options.get(name, ())
        others = [value for value in values if value != chosen.get(name)]
        if not others:
            return None
        options[name] = str(rng.choice(others))
    options = {name: options[name] for name in sorted(options)}
    instruction = text.Wanted([*wanted, target.query], options, upper).text()
    return make_goal(target, instruction, wanted, options, upper)


def purchase(engine: WebShopEngine, page: Page, goal: Goal, broken: str, name: str) -> Episode | None:
    """The purchase of a page under `goal`. The engine's reward decides; None where it disagrees with `broken`
    (upstream's quirks: fuzzy matches, colours by substring, prices drawn from a range)."""
    product, chosen, state, _ = page
    score, details = engine.judge(goal, product, engine.price_of(product.asin), chosen)
    success = score == 1.0
    if success != (broken == "none"):
        return None
    step = Step(state=state, action=BUY, next_state=text.PLACED, reward=float(success), done=True,
                grounded=BUY, reasoning=PLACED)
    rows = _engine_checks(engine, goal, product, details)
    step.reward_reasoning = _explain_reward(goal.instruction, step) or _verdict(rows, text.read_item(state))
    task = Task(id=name, text=goal.instruction, env="webshop", start=state)
    return Episode(id=name, task=task, steps=[step], source="counterfactual", raw_score=score, label=broken,
                   stop=StopReason.SUCCESS if success else StopReason.FAILURE)


def _engine_checks(engine: WebShopEngine, goal: Goal, product: Product, details: dict) -> list[Check]:
    """Each constraint with the engine's own verdict, for pages where the rules disagree with it."""
    price = engine.price_of(product.asin)
    rows = [("title", a, a in details["matched_attributes"]) for a in goal.attributes]
    rows.append(("title", goal.query, details["r_type"] == 1.0))
    rows += [("option", value, met) for value, met in zip(goal.goal_options.values(), details["option_met"])]
    return [*rows, ("price", f"{round(price, 2):g} under {goal.price_upper:g}", details["price_ok"])]
