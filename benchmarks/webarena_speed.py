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
from dataclasses import dataclass

import tyro

from dreamgym.envs.webarena.actions import Action
from dreamgym.envs.webarena.direct import InProcessBrowser
from dreamgym.envs.webarena.page import Addresses, Page
from dreamgym.envs.webarena.sites import SITES, SiteDatabase


@dataclass
class Args:
    steps: int = 6000  # of direct; chromium makes a fiftieth of them
    resets: int = 600  # likewise
    parity: int = 0  # if above 0: compare this many states of random walks instead of timing
    walk: int = 50  # steps of one walk
    seed: int = 1  # of the walks


def random_action(rng: random.Random, screen: Page, sites: list[str]) -> Action:
    """Mostly clicks and typing on what is shown, sometimes history, tabs, addresses, and what cannot be
    done."""
    shown = {i: node for i, node in screen.lines.items() if node.role not in ("text", "heading")}
    shown = shown or screen.lines
    words = re.findall(r"\w+", screen.text)
    shares = {"click": 55, "type": 20, "move": 9, "tab": 4, "scroll": 3, "goto": 3, "press": 3, "hover": 1,
              "odd": 2}
    kind = rng.choices(list(shares), list(shares.values()))[0]
    number = rng.choice(list(shown)) if shown else 1
    if kind == "type":
        fields = [i for i, node in screen.lines.items()
                  if node.value or node.options or "box" in node.role or node.role == "spinbutton"]
        number = rng.choice(fields or [number])
        node = screen.lines.get(number)
        typed = ["", "5", " ".join(rng.sample(words, min(3, len(words))))]
        text = rng.choice(node.options if node and node.options else typed)
        return Action("type", number, text, rng.random() < 0.4)
    anywhere = Action("click", rng.choice(list(screen.lines) or [1]))
    return {
        "click": Action("click", number),
        "hover": Action("hover", number),
        "scroll": Action("scroll", text=rng.choice(("up", "down"))),
        "move": Action(rng.choice(("go_back", "go_back", "go_forward"))),
        "goto": Action("goto", text=rng.choice(sites)),
        "tab": rng.choice((Action("new_tab"), Action("close_tab"), Action("tab_focus", rng.randrange(3)))),
        "press": Action("press", text=rng.choice(("Enter", "Enter", "Escape"))),
        "odd": rng.choice((Action("click", 999), Action("goto", text="http://example.com/"), anywhere)),
    }[kind]


def walk(browser, world: SiteDatabase, rng: random.Random, sites: list[str],
         bases: dict) -> Iterator[tuple[str, Page]]:
    """One episode without end: (action, screen after it), from a site at random with all logins, or
    without any."""
    world.reset()
    cookies = {site: world.login(site) for site in sites} if rng.random() < 0.8 else {}
    chosen = rng.sample(sites, min(len(sites), rng.choice((1, 1, 2))))
    screen = browser.open([bases[site] for site in chosen], cookies)
    action = "open"
    while True:
        yield action, screen
        action = random_action(rng, screen, sites)
        screen = browser.act(action)


def parity(states: int, length: int, seed: int, browser,
           sites: tuple[str, ...] = SITES) -> tuple[int, list[str]]:
    """(states compared, differences): the same walks in both back ends, a walk ending at its first
    difference. `browser` is a running one."""
    from dreamgym.envs.webarena.chromium import Chromium

    direct_world, served_world = SiteDatabase(), SiteDatabase()
    compared, differences = 0, []
    with served_world.serve() as served:
        direct, chromium = InProcessBrowser(direct_world), Chromium(Addresses(served.bases), browser)
        while compared < states:
            ours, theirs = (walk(b, w, random.Random(seed), list(sites), w.bases)
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


def speeds(browser, world: SiteDatabase, steps: int, resets: int,
           clock: Callable[[], float]) -> dict[str, float]:
    """Steps and resets a second of random walks of 30 steps; a reset is database, context, cookies and the
    first page."""
    rng, sites, begun, stepping = random.Random(0), list(SITES), clock(), 0.0
    for _ in range(resets):
        next(walk(browser, world, rng, sites, world.bases))
    resetting, walks = clock() - begun, -(-steps // 30)
    for _ in range(walks):
        episode = walk(browser, world, rng, sites, world.bases)
        next(episode)
        begun = clock()
        for _ in range(30):
            next(episode)
        stepping += clock() - begun
    return {"steps/s": 30 * walks / stepping, "resets/s": resets / resetting}


def time_direct(args: Args) -> dict[str, float]:
    world = SiteDatabase()
    return speeds(InProcessBrowser(world), world, args.steps, args.resets, time.process_time)


def time_chromium(args: Args) -> dict[str, float]:
    from dreamgym.envs.webarena.chromium import Browser, Chromium
    world = SiteDatabase()
    with world.serve() as served, Browser() as browser:
        chromium = Chromium(Addresses(served.bases), browser)
        return speeds(chromium, world, args.steps // 50, args.resets // 50, time.perf_counter)


def main() -> None:
    args = tyro.cli(Args)
    if args.parity:
        from dreamgym.envs.webarena.chromium import Browser
        with Browser() as browser:
            compared, differences = parity(args.parity, args.walk, args.seed, browser)
        print(*differences, f"{compared} states compared, {len(differences)} differ", sep="\n")
        raise SystemExit(bool(differences))
    for name, measure in {"direct": time_direct, "chromium": time_chromium}.items():
        try:
            print(name, *(f"{value:10.1f} {what}" for what, value in measure(args).items()), flush=True)
        except (ImportError, ValueError) as error:
            print(f"{name} not measured: {error}", flush=True)


if __name__ == "__main__":
    main()
