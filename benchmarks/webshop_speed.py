"""Speed and memory of the WebShop engine: steps a second in one process, load time, and what a catalogue of
full size would take.

    python -m benchmarks.webshop_speed                            # the generated catalogue, or $WEBSHOP_DATA
    python -m benchmarks.webshop_speed --data DIR --copies 100    # and a larger one, extrapolated

CPU seconds. Upstream's own environment made 25-36 steps a second on a comparable core (three HTML parses a
step): that is the number to compare with. The copies shuffle the words of every text and change every option
value and bullet, so that no text is shared between copies. Their vocabulary is that of the original and grows
by a word a product, so a real full set's index has more terms than the extrapolation.
"""

import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from dreamgym.envs.webshop.engine import Catalogue, WebShopEngine
from dreamgym.envs.webshop.toy_catalogue import make_catalogue

FULL_SET = 1_181_436


@dataclass
class Args:
    data: str = ""  # folder with the catalogue's JSON files; empty: $WEBSHOP_DATA, or the generated catalogue
    steps: int = 10_000  # steps per policy
    searches: float = 0.2  # share of actions that are searches; the others are random clicks
    sessions: int = 256  # sessions alive at once, stepped in turn
    copies: int = 0  # if above 0: measure a catalogue this many times as large


def steps_per_cpu_s(catalogue: Catalogue, args: Args, mode: str, queries: list[str]) -> float:
    rng, first = random.Random(0), WebShopEngine.from_catalogue(catalogue, mode)
    sessions = [first.fork() for _ in range(args.sessions)]
    for session in sessions:
        session.reset(rng.randrange(len(catalogue.goals)))
    start = time.process_time()
    for i in range(args.steps):
        session = sessions[i % len(sessions)]
        clickables = session.clickables
        if session.has_search_bar or rng.random() < args.searches:
            action = f"search[{rng.choice(queries)}]"
        else:
            action = f"click[{rng.choice(clickables)}]"
        if session.step(action)[2]:
            session.reset(rng.randrange(len(catalogue.goals)))
    return args.steps / (time.process_time() - start)


def enlarge(source: Path, folder: Path, copies: int) -> None:
    """Writes a full-set catalogue of `copies` variants of each product of the small set in `source`."""
    items = json.loads((source / "items_shuffle_1000.json").read_text(encoding="utf-8"))
    extras = json.loads((source / "items_ins_v2_1000.json").read_text(encoding="utf-8"))
    rng, more = random.Random(0), {}

    def vary(text: str) -> str:
        return " ".join(rng.sample(text.split(), len(text.split())))

    with open(folder / "items_shuffle.json", "w", encoding="utf-8") as file:
        for copy in range(copies):
            for number, item in enumerate(items):
                asin, bullets = f"X{copy:04d}{number:05d}", item["small_description"]
                bullets = [vary(b) for b in bullets] if isinstance(bullets, list) else vary(bullets)
                options = (item["customization_options"] or {}).items()
                options = {name: [{"value": f"{v['value']} {copy}"} for v in values]
                           for name, values in options if values}
                description = f"{vary(item['full_description'])} w{copy}x{number}"
                varied = {"asin": asin, "name": vary(item["name"]), "full_description": description}
                varied |= {"small_description": bullets, "customization_options": options}
                file.write(("," if more else "[") + json.dumps(item | varied) + "\n")
                more[asin] = extras.get(item["asin"], {})
        file.write("]")
    (folder / "items_ins_v2.json").write_text(json.dumps(more), encoding="utf-8")


def memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def load_and_index(folder: Path, size: str) -> Catalogue:
    """Loads, prints CPU seconds and memory of products and goals and of the index, and what the full set
    would take in proportion."""
    before, start = memory_mb(), time.process_time()
    catalogue = Catalogue(folder, size=size)
    load_s, load_mb = time.process_time() - start, memory_mb() - before
    before, start = memory_mb(), time.process_time()
    catalogue.index.search("a", 1)
    index_s, index_mb = time.process_time() - start, memory_mb() - before
    n, scale = len(catalogue.products), FULL_SET / len(catalogue.products)
    print(f"{n:,} products, {len(catalogue.goals):,} goals: loaded in {load_s:.2f} s, {load_mb:.0f} MB; "
          f"index in {index_s:.2f} s, {index_mb:.0f} MB")
    if n >= 10_000:
        print(f"  in proportion for {FULL_SET:,}: {(load_s + index_s) * scale:.0f} s, "
              f"{(load_mb + index_mb) * scale / 1e3:.1f} GB")
    return catalogue


def main(args: Args) -> None:
    folder = args.data or os.environ.get("WEBSHOP_DATA", "")
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(folder) if folder else make_catalogue(Path(temporary) / "generated")
        print(f"catalogue: {source}")
        catalogue = load_and_index(source, "auto")
        rng = random.Random(1)
        goals = catalogue.goals
        queries = list({goals[rng.randrange(len(goals))].instruction.lower() for _ in range(2000)})
        start = time.process_time()
        for query in queries[:500]:
            catalogue.index.search(query, 50)
        search_ms = (time.process_time() - start) / min(len(queries), 500) * 1e3
        print(f"search with a whole instruction, not cached: {search_ms:.2f} ms")
        print("| observation | queries | steps / CPU s |\n|---|---|---|")
        for mode in ("text", "text_rich"):
            pools = {f"{len(queries)} distinct, cold cache": queries, "50 distinct": queries[:50]}
            for name, pool in pools.items():
                catalogue.search.cache_clear()
                print(f"| {mode} | {name} | {steps_per_cpu_s(catalogue, args, mode, pool):,.0f} |")
        if args.copies:
            big = Path(temporary) / "big"
            big.mkdir()
            enlarge(source, big, args.copies)
            catalogue = load_and_index(big, "full")
            start = time.process_time()
            for query in queries[:50]:
                catalogue.index.search(query, 50)
            print(f"  search with a whole instruction: {(time.process_time() - start) / 50 * 1e3:.1f} ms")


if __name__ == "__main__":
    main(tyro.cli(Args))
