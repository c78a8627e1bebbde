"""The experience model M_exp as a world: retrieve, reason, write the next state and the reward (DreamGym, arXiv 2511.03773, Eq. 4-5).

`ExperienceModel` has the contract of a real environment (see envs/__init__.py): `start(tasks)`, `act(sessions, actions)`, batched over any running
episodes. `training_row` builds the token row of one transition with the very prompt that `act` uses, so that training and dreaming cannot drift apart.
Left out on purpose: training itself (train_expmodel.py), metrics of its errors (evaluate.py), and any real environment.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from dreamgym.envs import Session, StepResult, make_rules
from dreamgym.episode import Episode, Step, Task
from dreamgym.model import Row, chat_format, encode, encode_untrusted, load_model
from dreamgym.prompts import EXPERIENCE_SYSTEM, Demo, Prediction, experience_answer, experience_prompt, known_pages, parse_experience
from dreamgym.replay import ReplayBuffer, Transition
from dreamgym.sampler import Sampler


@dataclass
class DreamSettings:
    """What the experience model reads and writes; saved beside its weights, because it was trained for exactly this prompt."""
    k: int = 1                    # retrieved demonstrations
    history: int = 1              # pages of the episode before the current one; which ones, the rules' `recall` says (the paper does not say)
    reasoning: bool = True        # a reasoning trace before the next state
    context: int = 1024           # tokens of prompt and answer
    max_new_tok: int = 200        # an answer that has not ended by then is malformed
    attempts: int = 5             # a malformed or impossible answer is drawn again, at temperature 1, before the episode ends by it (ours)
    system: str = ""              # system prompt (chat models)
    by_line: bool = False         # an answer may name single lines of the page before and of the similar page (ours)
    edits: bool = False           # ... and write a page as a known one with a few lines taken out and put in (ours)


def settings_for(env: str, tiny: bool, **overrides) -> DreamSettings:
    return DreamSettings(**({"system": "" if tiny else EXPERIENCE_SYSTEM[env], "by_line": make_rules(env).BY_LINE, "edits": make_rules(env).EDITS} | overrides))


class Encoder:
    """phi(state, action): mean-pooled hidden states of a Hugging Face model, by default the experience model as it was before training (frozen, so
    that stored vectors never go stale; random features of a bag of words when it starts from scratch)."""

    def __init__(self, model, tokenizer, layer: int = 0, batch: int = 64):
        self.model, self.tokenizer, self.layer, self.batch = model.eval(), tokenizer, layer, batch
        self.cache: dict[str, np.ndarray] = {}
        self.dim = model.config.hidden_size

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """texts -> float32 [B, H], in order; equal texts are computed once."""
        missing = sorted({text for text in texts if text not in self.cache}, key=len)
        device = next(self.model.parameters()).device
        for start in range(0, len(missing), self.batch):
            chunk = missing[start:start + self.batch]
            ids = [encode_untrusted(self.tokenizer, text)[:512] or [0] for text in chunk]
            width = max(map(len, ids))
            ids_BT = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=device)
            mask_BT = torch.tensor([[1.0] * len(row) + [0.0] * (width - len(row)) for row in ids], device=device)
            if self.layer == 0:                      # the word embeddings: no layer needs to run
                hidden_BTH = self.model.get_input_embeddings()(ids_BT).float()
            else:
                hidden_BTH = self.model(input_ids=ids_BT, attention_mask=mask_BT.long(), output_hidden_states=True, use_cache=False).hidden_states[self.layer].float()
            mean_BH = (hidden_BTH * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
            self.cache.update(zip(chunk, mean_BH.cpu().numpy()))
        found = np.stack([self.cache[text] for text in texts])
        if len(self.cache) > 200_000:
            self.cache.clear()
        return found


def to_transitions(episodes: list[Episode]) -> list[Transition]:
    """The steps of episodes as replay records; `synthetic` is true for dreamt ones."""
    return [Transition(state=s.state, action=s.grounded or s.action, reasoning=s.reasoning, next_state=s.next_state, reward=s.reward, done=s.done,
                       episode_id=e.id, task_id=e.task.id, synthetic=e.world == "dream", step=i) for e in episodes for i, s in enumerate(e.steps)]


def fill_buffer(buffer: ReplayBuffer, encoder: Encoder, rules: ModuleType, episodes: list[Episode]) -> None:
    transitions = to_transitions(episodes)
    if transitions:
        buffer.add(transitions, encoder([rules.retrieval_text(e.task.text, s.state, s.grounded or s.action) for e in episodes for s in e.steps]))


@dataclass
class Query:
    """One question to the experience model: what follows `grounded` in `state`? The episode `episode_id` (or a set of them) is never retrieved from."""
    task_text: str
    history: list[tuple[str, str]]
    state: str
    grounded: str
    episode_id: str | set[str]


def retrieve(buffer: ReplayBuffer | None, encoder: Encoder | None, rules: ModuleType, settings: DreamSettings, queries: list[Query]) -> list[list[Demo]]:
    """The top-k demonstrations of each query (Eq. 4), the most similar one last. Where the next page follows from the pages in the prompt, or is only
    judged, there is nothing to recall, and a similar page beside the right one is a page to copy by mistake: such queries get none."""
    demos: list[list[Demo]] = [[] for _ in queries]
    asked = [i for i, q in enumerate(queries) if not rules.determined([s for s, _ in q.history] if settings.history else [], q.state, q.grounded)]
    if buffer is None or not settings.k or not asked or not len(buffer):
        return demos
    vectors = encoder([rules.retrieval_text(queries[i].task_text, queries[i].state, queries[i].grounded) for i in asked])
    for i, found in zip(asked, buffer.search(vectors, rules.LOOKED_THROUGH * settings.k, [queries[i].episode_id for i in asked])):
        fitting = [t for t, _ in found if rules.similar(queries[i].grounded, t.action)][:settings.k]
        demos[i] = [Demo(t.action, t.next_state) for t in reversed(fitting)]
    return demos


def prompt_ids(fmt, tokenizer, rules: ModuleType, settings: DreamSettings, task_text: str, history: list[tuple[str, str]], demos: list[Demo],
               state: str, grounded: str) -> tuple[list[int], dict[str, str]]:
    """Token ids of the prompt of Eq. 4, and the pages in it that an answer may name. Where the prompt would pass the context, history is cut from its
    oldest end, and demonstrations go after it."""
    history = [] if not settings.history or rules.judged(state, grounded) else rules.recall(history, state, grounded, settings.history)
    state, history = rules.unnumbered(state), [(rules.unnumbered(s), a) for s, a in history]
    demos = [Demo(d.action, rules.unnumbered(d.next_state)) for d in demos]
    room = settings.context - settings.max_new_tok
    while True:
        text = experience_prompt(task_text, history, demos, state, grounded)
        ids = encode(tokenizer, fmt.open) + encode_untrusted(tokenizer, text) + encode(tokenizer, fmt.ask)
        if len(ids) <= room or not (history or demos):
            return ids, known_pages(state, history, demos)
        history, demos = (history[1:], demos) if history else (history, demos[1:])


def training_row(fmt, tokenizer, rules: ModuleType, settings: DreamSettings, task_text: str, history: list[tuple[str, str]], demos: list[Demo], step: Step) -> Row:
    """One transition as ids and mask. The loss covers reasoning, next state AND reward; Eq. 5 as printed leaves the reward out, which nothing could then teach."""
    prompt, pages = prompt_ids(fmt, tokenizer, rules, settings, task_text, history, demos, step.state, step.grounded)
    state, following = rules.unnumbered(step.state), rules.unnumbered(step.next_state, True)
    text = experience_answer(step.reasoning, state, following, step.reward, step.done, settings.reasoning, pages, settings.by_line, settings.edits)
    answer = encode_untrusted(tokenizer, text) + fmt.end_ids[:1]
    return Row(prompt + answer, [0] * len(prompt) + [1] * len(answer))


class ExperienceModel:
    """The dream. At temperature 0 (the default: the policy supplies the variety) only answers that must be drawn again depend on the seed. `counts` has
    steps, answers drawn again, those still malformed, and those that take away what is not there."""

    def __init__(self, model, tokenizer, rules: ModuleType, settings: DreamSettings, buffer: ReplayBuffer | None, encoder: Encoder | None,
                 slots: int = 128, temperature: float = 0.0, seed: int = 0):
        self.model, self.tokenizer, self.rules, self.settings = model, tokenizer, rules, settings
        self.buffer, self.encoder, self.temperature = buffer, encoder, temperature
        self.fmt = chat_format(tokenizer, settings.system)
        self.sampler = Sampler(model, slots, settings.context, self.fmt.end_ids, seed)
        self.counts = {"steps": 0, "retried": 0, "malformed": 0, "refuted": 0}
        self.started = 0

    def forget(self) -> None:
        """Drops every cache: what follows depends on weights, buffer and random generator only, hence is the same after a resume."""
        self.sampler.reset()
        if self.encoder is not None:
            self.encoder.cache.clear()

    def start(self, tasks: list[Task]) -> list[Session]:
        """A task without a first state cannot be dreamt: ValueError."""
        sessions = []
        for task in tasks:
            if not task.start:
                raise ValueError(f"task {task.id}: no first state (`start`); a dream begins where the environment's mapping begins")
            self.started += 1
            sessions.append(Session(f"dream-{self.started}", task, task.start, inner=[]))
        return sessions

    def predict(self, queries: list[Query], keys: list[str]) -> list[tuple[Prediction | None, str]]:
        """Eq. 4 for a batch: (answer, or None where it is malformed or impossible; the text). `keys` name the conversations whose KV cache may be re-used."""
        demos = retrieve(self.buffer, self.encoder, self.rules, self.settings, queries)
        prompts = [prompt_ids(self.fmt, self.tokenizer, self.rules, self.settings, q.task_text, q.history, d, q.state, q.grounded) for q, d in zip(queries, demos)]
        answers: list[tuple[Prediction | None, str]] = [(None, "")] * len(queries)
        for attempt in range(self.settings.attempts):
            open_ = [i for i, (answer, _) in enumerate(answers) if answer is None]
            self.counts["retried"] += len(open_) * (attempt > 0)
            found = self._answers([queries[i] for i in open_], [prompts[i] for i in open_], [keys[i] for i in open_], self.temperature if attempt == 0 else 1.0)
            for i, answer in zip(open_, found):
                answers[i] = answer
        return answers

    def _answers(self, queries: list[Query], prompts: list[tuple[list[int], dict[str, str]]], keys: list[str], temperature: float) -> list[tuple[Prediction | None, str]]:
        """One draw for each query."""
        if not queries:
            return []
        forced = "" if self.settings.reasoning else "next:\n"      # a model that was trained to reason is kept from it (ablation)
        forced_ids = encode_untrusted(self.tokenizer, forced) if forced else []
        samples = self.sampler.sample([ids + forced_ids for ids, _ in prompts], keys, self.settings.max_new_tok, temperature)
        answers = []
        for query, (_, pages), sample in zip(queries, prompts, samples):
            text = forced + self.tokenizer.decode([i for i in sample.ids if i not in self.fmt.end_ids])
            answer = parse_experience(text, self.rules.unnumbered(query.state), pages, self.settings.by_line) if sample.stop == "end" else None
            answer = answer and replace(answer, next_state=self.rules.numbered(answer.next_state))
            possible = answer and self.rules.possible(query.state, query.grounded, answer.next_state, answer.reward)
            answers.append((answer if possible else None, text))
        return answers

    def act(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        """One imagined step for each session. Text that does not parse ends the episode (reward 0, stop 'malformed'): RL learns nothing from such an episode."""
        grounded = [self.rules.ground(s.state, a) for s, a in zip(sessions, actions)]
        queries = [Query(s.task.text, s.inner, s.state, g, s.id) for s, g in zip(sessions, grounded)]
        return [self._result(s, q, *answer) for s, q, answer in zip(sessions, queries, self.predict(queries, [s.id for s in sessions]))]

    def _result(self, session: Session, query: Query, answer: Prediction | None, output: str) -> StepResult:
        self.counts["steps"] += 1
        info = {"valid": self.rules.valid(query.state, query.grounded, answer.next_state if answer else query.state), "grounded": query.grounded}
        session.inner.append((query.state, query.grounded))
        session.steps += 1
        if answer is None:
            self.counts["malformed"] += 1
            return StepResult(session.state, 0.0, True, info | {"stop": "malformed", "output": output[:500]})
        self.counts["refuted"] += answer.refuted
        session.state = answer.next_state
        stop = ("success" if answer.reward else "failure") if answer.done else ""
        return StepResult(answer.next_state, answer.reward, answer.done, info | {"score": answer.reward, "stop": stop, "reasoning": answer.reasoning})


def load_dream(folder: Path | str, rules: ModuleType, device, slots: int = 128, temperature: float = 0.0, seed: int = 0, replay: Path | None = None) -> ExperienceModel:
    """The experience model that train_expmodel.py wrote into `folder`, with its replay buffer (or another one, `replay`) and phi."""
    folder = Path(folder)
    meta = json.loads((folder / "model" / "meta.json").read_text())
    model, tokenizer = load_model(folder / "model", quantize=meta["settings"]["quantize"], device=str(device))
    encoder = load_encoder(meta["settings"]["encoder"], folder, device, meta["settings"]["quantize"])
    buffer = ReplayBuffer.load(replay or folder / "model" / "replay")
    return ExperienceModel(model.eval(), tokenizer, rules, DreamSettings(**meta["dream"]), buffer, encoder, slots, temperature, seed)


def load_encoder(name: str, folder: Path, device, quantize: str = "none") -> Encoder:
    """phi by name: 'self' (saved beside the experience model) or any Hugging Face encoder (last layer)."""
    if name == "self":
        return Encoder(*load_model(folder / "phi", quantize=quantize, device=str(device)))
    return Encoder(AutoModel.from_pretrained(name).to(device), AutoTokenizer.from_pretrained(name), layer=-1)
