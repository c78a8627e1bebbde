"""Speed of the WebArena back ends on the own sites, and a walk through both at once that compares every state.

    python -m benchmarks.webarena_speed                            # steps/s and resets/s: direct, chromium, and BrowserGym where it is installed
    python -m benchmarks.webarena_speed --parity 500               # instead: random walks, the same actions in both, until 500 states were compared

Wall seconds of one process, so a busy machine shows. BrowserGym-core drives the same served sites through its own `click` and observation, with its waiting
set to 0; it needs an environment of its own (it pins another Playwright): `pip install browsergym-core==0.14.3`, then this file with that Python.
"""

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import tyro

from dreamgym.envs.webarena_actions import Action
from dreamgym.envs.webarena_direct import Direct
from dreamgym.envs.webarena_page import Addresses, Screen
from dreamgym.envs.webarena_sites import SITES, World


@dataclass
class Args:
    steps: int = 4000  # of direct; chromium makes a fiftieth of them
    resets: int = 500  # of direct; chromium makes a fiftieth of them
    parity: int = 0  # if above 0: compare this many states of random walks instead of timing
    walk: int = 50  # steps of one walk
    seed: int = 1  # of the walks


def random_action(rng: random.Random, screen: Screen, sites: list[str]) -> Action:
    """Mostly clicks and typing on what is shown, sometimes history, tabs, addresses, and what cannot be done."""
    shown = {i: node for i, node in screen.refs.items() if node.role not in ("text", "heading")} or screen.refs
    words = re.findall(r"\w+", screen.text)
    kind = rng.choices(("click", "type", "move", "tab", "scroll", "goto", "press", "hover", "odd"), (55, 20, 9, 4, 3, 3, 3, 1, 2))[0]
    number = rng.choice(list(shown)) if shown else 1
    if kind == "type":
        fields = [i for i, node in screen.refs.items() if node.value or node.options or "box" in node.role or node.role == "spinbutton"] or [number]
        number = rng.choice(fields)
        node = screen.refs.get(number)
        text = rng.choice(node.options) if node and node.options else rng.choice(["", "5", " ".join(rng.sample(words, min(3, len(words))))])
        return Action("type", number, text, rng.random() < 0.4)
    return {"click": Action("click", number), "hover": Action("hover", number), "scroll": Action("scroll", text=rng.choice(("up", "down"))),
            "move": Action(rng.choice(("go_back", "go_back", "go_forward"))), "goto": Action("goto", text=rng.choice(sites)),
            "tab": rng.choice((Action("new_tab"), Action("close_tab"), Action("tab_focus", rng.randrange(3)))),
            "press": Action("press", text=rng.choice(("Enter", "Enter", "Escape"))),
            "odd": rng.choice((Action("click", 999), Action("goto", text="http://example.com/"), Action("click", rng.choice(list(screen.refs) or [1]))))}[kind]


def walk(browser, world: World, rng: random.Random, sites: list[str], bases: dict) -> Iterator[tuple[str, Screen]]:
    """One episode without end: (action, screen after it), from a site at random with all logins, or without any."""
    world.reset()
    cookies = {site: world.login(site) for site in sites} if rng.random() < 0.8 else {}
    screen = browser.open([bases[site] for site in rng.sample(sites, rng.choice((1, 1, 2)))], cookies)
    action = "open"
    while True:
        yield action, screen
        action = random_action(rng, screen, sites)
        screen = browser.act(action)


def parity(states: int, length: int, seed: int, browser, sites: tuple[str, ...] = SITES) -> tuple[int, list[str]]:
    """(states compared, differences): the same walks in both back ends, a walk ending at its first difference. `browser` is a running one."""
    from dreamgym.envs.webarena_chromium import Chromium

    direct_world, served_world = World(), World()
    compared, differences = 0, []
    with served_world.serve() as served:
        direct, chromium = Direct(direct_world), Chromium(Addresses(served.bases), browser)
        while compared < states:
            ours, theirs = (walk(b, w, random.Random(seed), list(sites), w.bases) for b, w in ((direct, direct_world), (chromium, served_world)))
            done = []
            for _ in range(min(length, states - compared)):
                (action, here), (_, there) = next(ours), next(theirs)
                done.append(str(action))
                compared += 1
                if here.text != there.text:
                    differences.append(f"seed {seed}, after {done}:\n--- direct\n{here.text}\n--- chromium\n{there.text}")
                    break
            seed += 1
        chromium.close()
    return compared, differences


def speeds(browser, world: World, steps: int, resets: int) -> dict[str, float]:
    """Steps and resets a second of walks that stay within the sites and begin anew every 30 steps; a reset is database, context, cookies and first page."""
    rng, sites, spent = random.Random(0), list(SITES), {"steps": 0.0, "resets": 0.0}
    start = time.perf_counter()
    for _ in range(resets):
        next(walk(browser, world, rng, sites, world.bases))
    spent["resets"] = time.perf_counter() - start
    for _ in range(-(-steps // 30)):
        episode = walk(browser, world, rng, sites, world.bases)
        next(episode)
        start = time.perf_counter()
        for _ in range(30):
            next(episode)
        spent["steps"] += time.perf_counter() - start
    return {"steps/s": -(-steps // 30) * 30 / spent["steps"], "resets/s": resets / spent["resets"]}


def time_direct(args: Args) -> dict[str, float]:
    world = World()
    return speeds(Direct(world), world, args.steps, args.resets)


def time_chromium(args: Args) -> dict[str, float]:
    from dreamgym.envs.webarena_chromium import Browser, Chromium
    world = World()
    with world.serve() as served, Browser() as browser:
        return speeds(Chromium(Addresses(served.bases), browser), world, args.steps // 50, args.resets // 50)


def main() -> None:
    args = tyro.cli(Args)
    if args.parity:
        from dreamgym.envs.webarena_chromium import Browser
        with Browser() as browser:
            compared, differences = parity(args.parity, args.walk, args.seed, browser)
        print(*differences, f"{compared} states compared, {len(differences)} differ", sep="\n")
        raise SystemExit(bool(differences))
    for name, measure in (("direct", time_direct), ("chromium", time_chromium), ("browsergym", time_browsergym)):
        try:
            print(f"{name:12}" + "".join(f"{value:10.1f} {what}" for what, value in measure(args).items()), flush=True)
        except (ImportError, ValueError) as error:
            print(f"{name:12} not measured: {error}", flush=True)


if __name__ == "__main__":
    main()
