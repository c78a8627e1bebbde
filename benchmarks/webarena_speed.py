"""Speed of the WebArena back ends on the own sites, and a walk through both at once that compares every
state.

    python -m benchmarks.webarena_speed                 # steps/s and resets/s of each back end
    python -m benchmarks.webarena_speed --parity 500    # instead: the same walks in both, 500 states compared

The in-process browser in CPU seconds of its process, Chromium in wall seconds, so that a busy machine shows
there.
"""
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import tyro

from dreamgym.envs.webarena.actions import Action
from dreamgym.envs.webarena.direct import InProcessBrowser
from dreamgym.envs.webarena.page import Addresses, Page
from dreamgym.envs.webarena.sites import SITES, SiteDatabase


STEPS, RESETS = 6000, 600  # of direct; chromium makes a fiftieth of them


@dataclass
class Args:
    parity: int = 0  # if above 0: compare this many states of random walks instead of timing


def random_action(rng: random.Random, screen: Page) -> Action:
    """Mostly clicks and typing on what is shown, sometimes history, tabs, addresses, and what cannot be
    done."""
    everywhere, words = list(screen.lines) or [1], re.findall(r"\w+", screen.text)
    number = rng.choice([i for i, node in screen.lines.items() if node.role not in ("text", "heading")]
                        or everywhere)
    fields = [i for i, node in screen.lines.items()
              if node.value or node.options or "box" in node.role or node.role == "spinbutton"]
    field = rng.choice(fields or [number])
    options = screen.lines[field].options if fields else ()
    typed = options or ["", "5", " ".join(rng.sample(words, min(3, len(words))))]
    choices = {
        Action("click", number): 55,
        Action("type", field, rng.choice(typed), rng.random() < 0.4): 20,
        Action(rng.choice(("go_back", "go_back", "go_forward"))): 9,
        rng.choice((Action("new_tab"), Action("close_tab"), Action("tab_focus", rng.randrange(3)))): 4,
        Action("scroll", text=rng.choice(("up", "down"))): 3,
        Action("goto", text=rng.choice(SITES)): 3,
        Action("press", text=rng.choice(("Enter", "Enter", "Escape"))): 3,
        Action("hover", number): 1,
        rng.choice((Action("click", 999), Action("goto", text="http://example.com/"),
                    Action("click", rng.choice(everywhere)))): 2,
    }
    return rng.choices(list(choices), choices.values())[0]


def walk(browser, world: SiteDatabase, rng: random.Random) -> Iterator[tuple[str, Page]]:
    """One episode without end: (action, screen after it), from a site at random with all logins, or
    without any."""
    world.reset()
    cookies = {site: world.login(site) for site in SITES} if rng.random() < 0.8 else {}
    chosen = rng.sample(SITES, rng.choice((1, 1, 2)))
    screen = browser.open([world.bases[site] for site in chosen], cookies)
    action = "open"
    while True:
        yield action, screen
        action = random_action(rng, screen)
        screen = browser.act(action)


def parity(states: int, length: int, seed: int, browser) -> tuple[int, list[str]]:
    """(states compared, differences): the same walks in both back ends, a walk ending at its first
    difference. `browser` is a running one."""
    from dreamgym.envs.webarena.chromium import Chromium

    direct_world, served_world = SiteDatabase(), SiteDatabase()
    compared, differences = 0, []
    with served_world.serve() as served:
        direct, chromium = InProcessBrowser(direct_world), Chromium(Addresses(served.bases), browser)
        while compared < states:
            ours, theirs = (walk(b, w, random.Random(seed))
                            for b, w in ((direct, direct_world), (chromium, served_world)))
            done = []
            for _ in range(min(length, states - compared)):
                (action, here), (_, there) = next(ours), next(theirs)
                done.append(str(action))
                compared += 1
                if here.text != there.text:
                    differences.append(f"seed {seed}, after {done}:\n--- direct\n{here.text}\n"
                                       f"--- chromium\n{there.text}")
                    break
            seed += 1
        chromium.close()
    return compared, differences


def speeds(browser, world: SiteDatabase, steps: int, resets: int, clock: Callable[[], float]) -> str:
    """Steps and resets a second of random walks of 30 steps; a reset is database, context, cookies and the
    first page."""
    rng, begun, stepping = random.Random(0), clock(), 0.0
    for _ in range(resets):
        next(walk(browser, world, rng))
    resetting, walks = clock() - begun, -(-steps // 30)
    for _ in range(walks):
        episode = walk(browser, world, rng)
        next(episode)
        begun = clock()
        for _ in range(30):
            next(episode)
        stepping += clock() - begun
    return f"{30 * walks / stepping:10.1f} steps/s {resets / resetting:10.1f} resets/s"


def main(args: Args) -> None:
    if args.parity:
        from dreamgym.envs.webarena.chromium import Browser
        with closing(Browser()) as browser:
            compared, differences = parity(args.parity, 50, 1, browser)
        print(*differences, f"{compared} states compared, {len(differences)} differ", sep="\n")
        raise SystemExit(bool(differences))
    world = SiteDatabase()
    print("direct", speeds(InProcessBrowser(world), world, STEPS, RESETS, time.process_time))
    try:
        from dreamgym.envs.webarena.chromium import Browser, Chromium
        with world.serve() as served, closing(Browser()) as browser:
            chromium = Chromium(Addresses(served.bases), browser)
            print("chromium", speeds(chromium, world, STEPS // 50, RESETS // 50, time.perf_counter))
    except (ImportError, ValueError) as error:
        print(f"chromium not measured: {error}")


if __name__ == "__main__":
    main(tyro.cli(Args))
