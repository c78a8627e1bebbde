"""M_task: the experience model's own weights write harder and different tasks (DreamGym, arXiv 2511.03773, Eq. 6).

The paper shares parameters between M_task and M_exp; so `variation_rows` adds task-variation rows to the experience model's training, and
`write_tasks` samples from the same weights with another prompt. What it writes is checked by rule (grammar, known words and options, no copy)
before any policy sees it. A generated task has no goal in the real shop: only the dream can play it.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import ModuleType

import numpy as np

from dreamgym.episode import Task
from dreamgym.experience_model import ExperienceModel
from dreamgym.model import Row, chat_format, encode, encode_untrusted
from dreamgym.prompts import VARY_SYSTEM, parse_task, vary_prompt


def variation_rows(tokenizer, rules: ModuleType, tasks: list[Task], count: int, rng: np.random.Generator, system: str) -> list[Row]:
    """`count` rows 'vary: seed task -> another real task that shares a word with it, the hardest of three'."""
    readable = [task.text for task in tasks if rules.readable(task.text)]
    words = {text: set(rules.topics(text)) for text in dict.fromkeys(readable)}
    texts, hardness = list(words), {text: rules.difficulty(text) for text in words}
    by_word: dict[str, list[str]] = {}
    for text in texts:
        for word in words[text]:
            by_word.setdefault(word, []).append(text)
    fmt = chat_format(tokenizer, system)
    rows = []
    for _ in range(count if texts else 0):
        seed = texts[rng.integers(len(texts))]
        group = by_word[sorted(words[seed])[rng.integers(len(words[seed]))]]
        target = max((group[i] for i in rng.integers(len(group), size=3)), key=lambda t: (t != seed, hardness[t]))
        prompt = encode(tokenizer, fmt.open) + encode_untrusted(tokenizer, vary_prompt(seed)) + encode(tokenizer, fmt.ask)
        answer = encode_untrusted(tokenizer, target) + fmt.end_ids[:1]
        rows.append(Row(prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    return rows


class TaskCheck:
    """What a written task must be: within the grammar, made of what the world is known to have, doable from where it starts, and new."""

    def __init__(self, rules: ModuleType, tasks: list[Task], states: list[str]):
        self.rules, self.known = rules, {task.text for task in tasks}
        self.offered = set().union(*(rules.needs(task.text) for task in tasks if rules.readable(task.text)), *map(rules.offers, set(states)))

    def problem(self, text: str | None, start: str = "") -> str:
        """Why a text is no new task ('' when it is one): malformed, grammar, unknown (to the world), start, copy."""
        if text is None:
            return "malformed"
        if not self.rules.readable(text):
            return "grammar"
        if not self.rules.needs(text) <= self.offered:
            return "unknown"
        if start and not self.rules.starts(text, start):
            return "start"
        return "copy" if text in self.known else ""


def write_tasks(dream: ExperienceModel, env: str, seeds: list[Task], per_seed: int, check: TaskCheck, name: str, temperature: float = 0.8) -> tuple[list[Task], dict]:
    """For each seed task, `per_seed` candidates are sampled and the hardest acceptable one is kept (the paper's second step, selection, by rule).

    Returns the new tasks (ids `name-index`) and counts of what was refused and why. Accepted texts are added to `check.known`.
    """
    system = VARY_SYSTEM[env] if dream.settings.system else ""
    fmt = chat_format(dream.tokenizer, system)
    prompts = [encode(dream.tokenizer, fmt.open) + encode_untrusted(dream.tokenizer, vary_prompt(seed.text)) + encode(dream.tokenizer, fmt.ask)
               for seed in seeds for _ in range(per_seed)]
    keys = [f"{name}-candidate-{i}" for i in range(len(prompts))]
    samples = dream.sampler.sample(prompts, keys, 80, temperature)
    counts, made = Counter(), []
    for i, seed in enumerate(seeds):
        candidates = []
        for sample in samples[i * per_seed:(i + 1) * per_seed]:
            text = parse_task(dream.tokenizer.decode([t for t in sample.ids if t not in fmt.end_ids])) if sample.stop == "end" else None
            problem = check.problem(text, seed.start)
            counts[problem or "accepted"] += 1
            candidates += [] if problem else [text]
        if candidates:
            best = max(candidates, key=check.rules.difficulty)
            check.known.add(best)
            made.append(replace(seed, id=f"{name}-{len(made)}", text=best, goal={}, generated=True, parent=seed.id))
    return made, dict(counts)
