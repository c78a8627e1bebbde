"""Speed and memory of the WebShop engine: steps a second in one process, load time, and what a catalogue of
full size would take.

    python -m benchmarks.webshop_speed                            # the generated catalogue, or $WEBSHOP_DATA
    python -m benchmarks.webshop_speed --data DIR --copies 100    # and a larger one, extrapolated

Upstream's own environment made 25-36 steps a second on a comparable core: that is the number to compare with.
The copies share no text, but their vocabulary is that of the original and grows by a word a product: a real
full set's index has more terms than the extrapolation.
"""
import json
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.timing import cpu_s, memory_mb
from dreamgym.envs.webshop.catalogue import Catalogue
from dreamgym.envs.webshop.engine import WebShopEngine
from dreamgym.envs.webshop.toy_catalogue import make_catalogue

FULL_SET = 1_181_436
STEPS, SESSIONS = 10_000, 256          # of a policy; alive at once, stepped in turn
SEARCHES = 0.2                         # share of actions that are searches; the others are random clicks


@dataclass
class Args:
    data: str = ""  # folder with the catalogue's JSON files; empty: $WEBSHOP_DATA, or the generated catalogue
    copies: int = 0  # if above 0: measure a catalogue this many times as large


def play(sessions: list[WebShopEngine], queries: list[str]) -> None:
    rng = random.Random(0)
    for session in sessions:
        session.reset(rng.choice(session.catalogue.goals))
    for i in range(STEPS):
        session = sessions[i % len(sessions)]
        if session.page == "index" or rng.random() < SEARCHES:
            action = f"search[{rng.choice(queries)}]"
        else:
            action = f"click[{rng.choice(session.clickables)}]"
        if session.step(action)[2]:
            session.reset(rng.choice(session.catalogue.goals))


def enlarge(source: Path, folder: Path, copies: int) -> None:
    """Writes a full-set catalogue of `copies` variants of each product of the small set in `source`: the
    words of every text shuffled, every option value and bullet changed."""
    items = json.loads((source / "items_shuffle_1000.json").read_text(encoding="utf-8"))
    extras = json.loads((source / "items_ins_v2_1000.json").read_text(encoding="utf-8"))
    rng, more = random.Random(0), {}

    vary = lambda text: " ".join(rng.sample(text.split(), len(text.split())))
    with open(folder / "items_shuffle.json", "w", encoding="utf-8") as file:
        for copy in range(copies):
            for number, item in enumerate(items):
                asin, bullets = f"X{copy:04d}{number:05d}", item["small_description"]
                bullets = [vary(b) for b in bullets] if isinstance(bullets, list) else vary(bullets)
                options = {name: [{"value": f"{v['value']} {copy}"} for v in values]
                           for name, values in (item["customization_options"] or {}).items() if values}
                description = f"{vary(item['full_description'])} w{copy}x{number}"
                varied = {"asin": asin, "name": vary(item["name"]), "full_description": description,
                          "small_description": bullets, "customization_options": options}
                file.write(("," if more else "[") + json.dumps(item | varied) + "\n")
                more[asin] = extras.get(item["asin"], {})
        file.write("]")
    (folder / "items_ins_v2.json").write_text(json.dumps(more), encoding="utf-8")


def measure(folder: Path, queries: list[str]) -> Catalogue:
    """Loads, prints seconds and memory of products and goals, of the index and of a search, and what the full
    set would take in proportion."""
    before = memory_mb()
    load_s, catalogue = cpu_s(Catalogue, folder)
    loaded = memory_mb()
    index_s, _ = cpu_s(lambda: catalogue.index)
    n, scale, indexed = len(catalogue.products), FULL_SET / len(catalogue.products), memory_mb()
    rng, goals = random.Random(1), catalogue.goals
    queries += [goals[rng.randrange(len(goals))].instruction.lower() for _ in range(2000 - len(queries))]
    search_s, _ = cpu_s(lambda: [catalogue.index.search(query, 50) for query in queries[:200]])
    print(f"{n:,} products, {len(goals):,} goals: loaded in {load_s:.2f} s, {loaded - before:.0f} MB; "
          f"index in {index_s:.2f} s, {indexed - loaded:.0f} MB; "
          f"a search of a whole instruction {5 * search_s:.2f} ms")
    if n >= 10_000:
        print(f"  in proportion for {FULL_SET:,}: {(load_s + index_s) * scale:.0f} s, "
              f"{(indexed - before) * scale / 1e3:.1f} GB")
    return catalogue


def main(args: Args) -> None:
    folder, queries = args.data or os.environ.get("WEBSHOP_DATA", ""), []
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(folder) if folder else make_catalogue(Path(temporary) / "generated")
        catalogue = measure(source, queries)
        print("| observation | queries | steps / CPU s |\n|---|---|---|")
        for mode in ("text", "text_rich"):
            for name, pool in {"2,000, cold cache": queries, "50": queries[:50]}.items():
                catalogue.search.cache_clear()
                sessions = [WebShopEngine(catalogue, mode) for _ in range(SESSIONS)]
                print(f"| {mode} | {name} | {STEPS / cpu_s(play, sessions, pool)[0]:,.0f} |")
        if args.copies:
            enlarge(source, Path(temporary), args.copies)
            measure(Path(temporary), queries)


if __name__ == "__main__":
    main(tyro.cli(Args))
