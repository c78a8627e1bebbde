"""Offline episodes of WebShop: who plays, each step explained by the teacher, and real purchases relabelled. What collect.py calls for --env webshop."""
from __future__ import annotations

import numpy as np

from dreamgym.envs import record, webshop_teacher
from dreamgym.envs.webshop.scripted import make_player
from dreamgym.envs.webshop.relabel import BREAKABLE, explain, relabelled_buy, verdict_rows
from dreamgym.episode import Episode, Step, Task

MIX = {"demonstrator": 0.30, "imperfect": 0.35, "random": 0.20, "prober": 0.15}   # shares of episodes; ours, the paper mixes demonstrations, oracle and random


def play(env, task: Task, kind: str, rng: np.random.Generator, name: str) -> Episode:
    """One real episode of a rule-based player, each step explained by the teacher, who sees the engine."""
    session = env.start([task])[0]
    act = make_player(kind, task.text, rng, env.option_values)
    episode = Episode(name, task, source=kind)
    while not episode.stop:
        state, action, engine = session.state, act(session.state), session.inner
        purchase = (engine.product(engine.asin), dict(engine.options)) if env.text.judged(state, action) else None
        result = env.act([session], [action])[0]
        verdict = None
        if purchase and result.done:
            product, chosen = purchase
            price = engine.price_of(product.asin)
            verdict = verdict_rows(engine.goal, engine.judge(engine.goal, product, price, chosen)[1], price)
        reasoning = explain(state, action, verdict, result.reward == 1)
        record(episode, state, action, result, reasoning, env.max_steps)
    return episode


def relabel(env, pages: list, count: int, rng: np.random.Generator, prefix: str, forbidden: set[str]) -> list[Episode]:
    """`count` relabelled purchases of the given (product, chosen, state) pages: 45 % matching, the near misses by BREAKABLE."""
    episodes: list[Episode] = []
    attempts = 0
    while len(episodes) < count and attempts < 20 * count:
        attempts += 1
        product, chosen, state = pages[rng.integers(len(pages))]
        broken = None if rng.random() < 0.45 else str(rng.choice(list(BREAKABLE), p=list(BREAKABLE.values())))
        episode = relabelled_buy(env.engine, product, chosen, state, broken, rng, f"{prefix}-{len(episodes)}")
        episodes += [episode] if episode and episode.task.text not in forbidden else []
    return episodes


def buy_pages(env, episodes: list[Episode]) -> list:
    """(product, chosen options, state) of item pages in the episodes, bought or not, once each, with options as they were chosen."""
    by_title = {}
    for product in env.engine.products:
        by_title.setdefault(env.text.clean(product.title), []).append(product)
    pages = {}
    for episode in episodes:
        for step in episode.steps:
            item = env.text.read_item(step.state)
            for product in by_title.get(item.title, []) if item else []:
                if {k: list(v) for k, v in product.options.items()} == item.options and env.text.short_price(product.price_tag) == item.price:
                    chosen = {name: value for name, values in product.options.items() for value in values if value in item.chosen}
                    pages[step.state] = (product, chosen, step.state)
    return list(pages.values())


def relabelled(env, episodes: list[Episode], count: int, rng: np.random.Generator, prefix: str, forbidden: set[str], seen: set[str]) -> list[Episode]:
    """Purchases of the item pages in `episodes` that are not in `seen`, under instructions that are not in `forbidden`; adds those pages to `seen`."""
    pages = [page for page in buy_pages(env, episodes) if page[2] not in seen]
    seen |= {state for _, _, state in pages}
    return relabel(env, pages, count, rng, prefix, forbidden) if pages and count else []


def explain_recorded(task_text: str, history: list[str], step: Step) -> str:
    """The trace of a step that somebody else recorded ('' when the rules would have expected another outcome); its page alone tells."""
    return webshop_teacher.explain_recorded(task_text, step)
