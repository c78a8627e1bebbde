"""The experience model: retrieve, reason, predict the next state, then judge it (DreamGym, arXiv 2511.03773,
Eq. 4).

It has the environment's own methods `reset`, `step` and `end`. One step asks the same weights two questions:
    1. task, history, retrieved transitions, state, action  -> reasoning, next state
    2. task, state, action, next state                      -> reasoning, reward, done
Hand-written code refuses text that is not well-formed, and a reward without an end; nothing else.
"""
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from dreamgym import run
from dreamgym.chat import chat_format
from dreamgym.encoder import WordEncoder, load_encoder
from dreamgym.envs.base import Environment, Session, StepResult
from dreamgym.episode import Episode, Step, StopReason, Task
from dreamgym.logprobs import TrainSample
from dreamgym.model import adapter, load_frozen
from dreamgym.prompts import (NEXT, Question, experience_system, is_new, next_answer, next_prompt, parse_next,
                              parse_reward, parse_task, reward_answer, reward_prompt, title,
                              until_tag, variation_prompt, variation_system)
from dreamgym.replay import ReplayBuffer, Transition
from dreamgym.sampler import Sampler

RESAMPLE_TEMPERATURE = 1.0
LOOKUP_SIMILARITY = 0.95     # a recorded transition below this cosine says nothing about a step (ours)
KEPT_ANSWERS = 50_000        # most greedy answers remembered, some 100 MB; above it all are forgotten


@dataclass
class ExperienceSettings:
    """Flags of train_expmodel.py that prediction needs, too. They are saved beside the weights, which were
    trained for exactly these prompts."""
    k: int = 1
    history: int = 2
    min_similarity: float = 0.3   # of earlier steps, too
    reasoning: bool = True
    show_first: bool = False
    page_format: str = "full"
    next_temperature: float = 0.0
    context: int = 4096
    max_next_tok: int = 1024
    max_reward_tok: int = 256     # of a task variation, too
    max_resamples: int = 2
    confirmations: int = 0
    system_prompts: bool = True


def fill_buffer(buffer: ReplayBuffer, encoder, episodes: Sequence[Episode]) -> None:
    """Adds the steps of episodes to the replay buffer."""
    transitions = [Transition(state=s.state, action=s.shown_action, next_state=s.next_state, reward=s.reward,
                              done=s.done, task=e.task.text, synthetic=e.world == "dream")
                   for e in episodes for s in e.readable]
    if transitions:
        buffer.add(transitions, encoder([t.state for t in transitions], [t.action for t in transitions]))


def split_history(steps: Sequence[Step], count: int) -> tuple[list[Step], list[Step]]:
    """The last `count` steps that changed something, oldest first, and all others. A step that changed
    nothing only repeats the present state where the previous page should stand."""
    changing = [i for i, step in enumerate(steps) if step.valid][-count:] if count else []
    return [steps[i] for i in changing], [step for i, step in enumerate(steps) if i not in changing]


class ExperienceModel:
    """The imagined environment. Answers are greedy, pages that are new drawn at `next_temperature`. The seed
    decides what is drawn.

    `env` lends its prompts and `ground`, nothing else. `retrieval`: the replay buffer and phi, the encoder of
    a state and an action.
    """

    def __init__(self, model, tokenizer, env: Environment, settings: ExperienceSettings, retrieval: tuple, *,
                 slots: int = 128, seed: int = 0):
        self.model, self.tokenizer, self.sampler = model, tokenizer, None
        self.env, self.settings, self.slots = env, settings, slots
        self.buffer, self.encoder = retrieval
        systems = experience_system(env.prompts, settings.page_format), variation_system(env.prompts)
        self.systems = systems if settings.system_prompts else ("", "")
        # resampled answers; malformed steps; questions that lost history or demonstrations for lack of room
        self.counts = {"steps": 0, "resampled": 0, "malformed": 0, "shortened": 0}
        self.answers: dict[bytes, tuple[str, bool]] = {}     # greedy ones, by the digest of the prompt
        if model is not None:                                # else a server has it
            self.chat, self.variation_chat = (chat_format(tokenizer, system) for system in self.systems)
            self.sampler = Sampler(model, slots, settings.context, self.chat.end_ids, seed)

    def clear_caches(self) -> None:
        """What follows then depends on weights, buffer and random generator alone, as after a resume."""
        if self.sampler:
            self.sampler.clear_caches()
        self.encoder.clear_caches()
        self.answers.clear()

    # ---- text in and out: ServedExperienceModel overrides these three ----

    def _prompt(self, text: str, varies: bool = False) -> list[int]:
        return (self.variation_chat if varies else self.chat).prompt_ids(text)

    def _size(self, prompt: list[int]) -> int:
        return len(prompt)           # tokens

    def _write(self, prompts: list[list[int]], start: str, limit: int,
               temperature: float) -> list[tuple[str, bool]]:
        """(the answer, whether it ended) of each prompt; `start` is what answers are made to begin with."""
        forced = self.chat.answer_ids(start)[:-1] if start else []
        with adapter(self.model, "experience"):
            samples = self.sampler.sample([prompt + forced for prompt in prompts], None, limit, temperature)
        # decoded together: the blank after "reward:" belongs to a token
        return [(self.chat.answer_text(forced + sample.ids), sample.stop == "end") for sample in samples]

    # ---- the questions ----

    def questions(self, steps: Sequence[tuple[str, Sequence[Step], str, str]],
                  dreaming: bool = False) -> list[Question]:
        """The first question of each step, given as (task, steps before, state, grounded action), with its
        history and its retrieved demonstrations. Training and reports retrieve nothing of the task that is
        predicted, which would give the answer away. A dream retrieves what was recorded of its task, too, but
        not what was dreamt of it: errors would confirm themselves."""
        tasks, _, states, actions = map(list, zip(*steps))
        vectors_BD, found = self.encoder(states, actions), [[]] * len(steps)
        if self.settings.k:
            found = self.buffer.search(vectors_BD, self.settings.k, tasks, self.settings.min_similarity,
                                       exclude_recorded=not dreaming)
        questions = []
        for (task, past, state, action), vector, demos in zip(steps, vectors_BD, found):
            recent, others = split_history(past, self.settings.history)
            earlier = self._earlier_steps(past, others, vector, action)
            if self.settings.show_first and self.settings.history and others[:1] == past[:1]:
                read = lambda s: (s.state, s.shown_action, s.next_state)
                earlier = [s for s in past[:1] if read(s) not in map(read, earlier)] + earlier
            questions.append(Question(task, state, action, [(s.state, s.shown_action) for s in recent],
                                      earlier, [t for t, _ in reversed(demos)]))
        return questions

    def _earlier_steps(self, past: Sequence[Step], others: Sequence[Step], vector: np.ndarray,
                       action: str) -> list[Step]:
        """Of the steps `others` of an episode, first those most similar to the question as transitions. Then
        those that led to the pages whose first line is most like the action ("go to shelf 1": "at shelf 1:"),
        of pages that begin alike only the latest of `past`. Half each, the most similar last."""
        count = self.settings.history
        if not others or not count:
            return []

        def best(similarity: np.ndarray, among: list[int], most: int) -> list[int]:
            order = sorted(among, key=lambda i: (round(float(similarity[i]), 5), i))
            return [i for i in order[max(0, len(order) - most):]
                    if similarity[i] >= self.settings.min_similarity]

        titles = [title(step.next_state) for step in others]
        latest = {title(step.next_state): step for step in past}
        led_to = self.encoder(titles, titles) @ self.encoder([action], [action])[0]
        pages = best(led_to, [i for i, s in enumerate(others) if latest[titles[i]] is s], count // 2)
        alike = self.encoder([s.state for s in others], [s.shown_action for s in others]) @ vector
        steps = best(alike, [i for i in range(len(others)) if i not in pages], count - count // 2)
        return [others[i] for i in steps + pages]

    def lookup(self, states: Sequence[str], actions: Sequence[str]) -> list[Transition | None]:
        """The baseline without a model: the nearest recorded transition of each (state, grounded action), if
        one is near."""
        if not states:               # a rank without recorded steps
            return []
        found = self.buffer.search(self.encoder(states, actions), 1, [""] * len(states), LOOKUP_SIMILARITY)
        return [near[0][0] if near else None for near in found]

    def next_prompt_ids(self, question: Question) -> tuple[list[int], Question]:
        """(the prompt's ids, the question as shown). While the prompt leaves no room for an answer, the
        longest of three lists loses an entry: `recent` the oldest, the others the least similar."""
        room, whole = self.settings.context - self.settings.max_next_tok, question
        while True:
            ids = self._prompt(next_prompt(question, self.settings.page_format))
            if self._size(ids) <= room or not (question.recent or question.earlier or question.demos):
                self.counts["shortened"] += question is not whole
                return ids, question
            longest = max(("recent", "earlier", "demos"), key=lambda name: len(getattr(question, name)))
            question = replace(question, **{longest: getattr(question, longest)[1:]})

    def reward_prompt_ids(self, task: str, state: str, action: str, next_state: str) -> list[int]:
        return self._prompt(reward_prompt(task, state, action, next_state, self.settings.page_format))

    # ---- training samples ----

    def _sample(self, prompt: list[int], answer: str, limit: int) -> TrainSample | None:
        """None where the answer is longer than what may be generated."""
        ids = self.chat.answer_ids(answer)
        if len(ids) > limit or len(prompt) + len(ids) > self.settings.context:
            return None
        return TrainSample(prompt + ids, [0] * len(prompt) + [1] * len(ids))

    def next_sample(self, question: Question, step: Step) -> TrainSample | None:
        """Eq. 5 for the first question."""
        prompt, question = self.next_prompt_ids(question)
        reasoning = step.reasoning if self.settings.reasoning else ""
        return self._sample(prompt, next_answer(reasoning, step.next_state, question,
                                                self.settings.page_format), self.settings.max_next_tok)

    def reward_sample(self, task: str, step: Step) -> TrainSample | None:
        """The second question. Eq. 5 as printed has no reward term; nothing could then teach the reward."""
        prompt = self.reward_prompt_ids(task, step.state, step.shown_action, step.next_state)
        reasoning = step.reward_reasoning if self.settings.reasoning else ""
        return self._sample(prompt, reward_answer(reasoning, step.reward, step.done),
                            self.settings.max_reward_tok)

    # ---- prediction ----

    def _answers(self, asked: list[tuple], start: str, limit: int, temperature: float = 0.0) -> list[tuple]:
        """(what its parser makes of it, or None; its text) of one answer to each (prompt, parser). `start`:
        as in `_write`. Greedy answers are remembered: the rollouts of a group ask many questions alike."""
        if not asked:
            return []
        if temperature:
            written = self._write([prompt for prompt, _ in asked], start, limit, temperature)
        else:
            keys = [blake2b(str(prompt).encode()).digest() for prompt, _ in asked]
            new = {key: prompt for key, (prompt, _) in zip(keys, asked) if key not in self.answers}
            if new:
                self.answers.update(zip(new, self._write(list(new.values()), start, limit, 0.0)))
            written = [self.answers[key] for key in keys]
            if len(self.answers) > KEPT_ANSWERS:
                self.answers.clear()
        cut = [until_tag(text, ended) for text, ended in written]
        return [(parse(text) if ended else None, text) for (_, parse), (text, ended) in zip(asked, cut)]

    def _ask(self, asked: list[tuple], start: str, limit: int) -> list[tuple]:
        """The greedy `_answers`. Malformed ones are drawn again, at most `max_resamples` times: once, then
        all other times together, for an endless answer alone takes as long as a batch."""
        answers, draws = self._answers(asked, start, limit), self.settings.max_resamples
        for copies in (min(1, draws), max(0, draws - 1)):
            unread = [i for i, (answer, _) in enumerate(answers) if answer is None for _ in range(copies)]
            self.counts["resampled"] += len(unread)
            drawn = self._answers([asked[i] for i in unread], start, limit, RESAMPLE_TEMPERATURE)
            for i, answer in zip(unread, drawn):
                answers[i] = answer if answers[i][0] is None else answers[i]
        return answers

    def predict(self, questions: list[Question], dreaming: bool = False) -> list[StepResult]:
        """Both answers for a batch of steps: the likeliest, but a dream draws pages that are new at
        `next_temperature`."""
        s, shown = self.settings, [self.next_prompt_ids(q) for q in questions]
        temperature = s.next_temperature if dreaming else 0.0
        asked = [(ids, lambda text, q=q: parse_next(text, q, s.page_format)) for ids, q in shown]
        start = "" if s.reasoning else NEXT
        answers = self._ask(asked, start, s.max_next_tok)
        # The likeliest page of an unseen place is too often an empty one. Known pages stay: a page that is
        # copied by sampling often has an error (docs/lab-notes.md).
        new = [i for i, (_, question) in enumerate(shown) if temperature and is_new(answers[i][0], question)]
        drawn = self._answers([asked[i] for i in new], start, s.max_next_tok, temperature)
        for i, answer in zip(new, drawn):
            answers[i] = answer if is_new(answer[0], shown[i][1]) else answers[i]
        predictions = [StepResult(answer[1], reasoning=answer[0]) if answer
                       else StepResult("", stop=StopReason.MALFORMED, output=text)
                       for answer, text in answers]
        readable = [(q, p) for q, p in zip(questions, predictions) if not p.malformed]
        judged = self.judge([(q.task, q.state, q.action, p.state) for q, p in readable])
        for (_, p), (answer, text) in zip(readable, judged):
            if answer is None:
                p.stop, p.output = StopReason.MALFORMED, text
            else:
                p.reward_reasoning, p.reward, p.done = answer
        return predictions

    def judge(self, steps: list[tuple[str, str, str, str]]) -> list[tuple]:
        """The second question for (task, state, grounded action, next state): ((reasoning, reward, done) or
        None, text) of each. A policy that tries often finds the judge's rare wrong payments: a verdict that
        pays is drawn `confirmations` times more, and the first one that does not pay replaces it."""
        asked = [(self.reward_prompt_ids(*step), parse_reward) for step in steps]
        start, limit = "" if self.settings.reasoning else "reward:", self.settings.max_reward_tok
        answers = self._ask(asked, start, limit)
        for _ in range(self.settings.confirmations):
            paid = [i for i, (answer, _) in enumerate(answers) if answer and answer[1]]
            drawn = self._answers([asked[i] for i in paid], start, limit, RESAMPLE_TEMPERATURE)
            for i, (answer, text) in zip(paid, drawn):
                if answer and not answer[1]:
                    answers[i] = answer, text
        return answers

    # ---- the environment's methods ----

    def reset(self, tasks: list[Task]) -> list[Session]:
        """Raises ValueError for a task without a first state: it cannot be dreamt."""
        for task in tasks:
            if not task.start:
                raise ValueError(f"task {task.id}: field `start` is empty; a dream begins with the task's "
                                 "first state")
        return [Session(task, task.start, inner=[]) for task in tasks]

    def step(self, sessions: list[Session], actions: list[str]) -> list[StepResult]:
        grounded = [self.env.ground(s.state, a) for s, a in zip(sessions, actions)]
        questions = self.questions([(s.task.text, s.inner, s.state, action)
                                    for s, action in zip(sessions, grounded)], dreaming=True)
        predictions, results = self.predict(questions, dreaming=True), []
        for session, action, words, p in zip(sessions, actions, grounded, predictions):
            self.counts["steps"] += 1
            if p.malformed:
                self.counts["malformed"] += 1
                results.append(StepResult(session.state, done=True, stop=p.stop, output=p.output[:500]))
                continue
            session.inner.append(Step(state=session.state, action=action, grounded=words,
                                      next_state=p.state))
            session.state, p.raw_score = p.state, p.reward
            if p.done:
                p.stop = StopReason.SUCCESS if p.reward else StopReason.FAILURE
            results.append(p)
        return results

    def end(self, sessions: list[Session]) -> None:
        """An imagined episode holds nothing that must be given back."""

    # ---- task variation (Eq. 6) ----

    def variation_sample(self, seed_task: str, target: str) -> TrainSample | None:
        """M_task shares the experience model's weights (the paper's section on tasks)."""
        prompt = self._prompt(variation_prompt(seed_task), varies=True)
        return self._sample(prompt, target, self.settings.max_reward_tok)

    def write_variations(self, texts: list[str], count: int, temperature: float) -> list[list[str | None]]:
        """`count` variations of each task text; None where an answer is no single line of text."""
        prompts = [self._prompt(variation_prompt(text), varies=True) for text in texts for _ in range(count)]
        answers = self._write(prompts, "", self.settings.max_reward_tok, temperature)
        parsed = [parse_task(text) if ended else None for text, ended in answers]
        return [parsed[i * count:(i + 1) * count] for i in range(len(texts))]

    # ---- state ----

    def get_state(self) -> dict:
        """What a resumed run needs besides weights and buffer; JSON values."""
        return {"sampler": self.sampler and self.sampler.get_state(), "counts": dict(self.counts)}

    def set_state(self, state: dict) -> None:
        self.counts = dict(state["counts"])
        if self.sampler:
            self.sampler.set_state(state["sampler"])


def save_settings(folder: Path, settings: ExperienceSettings, encoder_name: str, encoder) -> None:
    """What `load_experience_model` reads beside weights, tokenizer and replay buffer."""
    run.write_json(folder / "experience.json", {"settings": asdict(settings), "encoder": encoder_name,
                                                "idf": getattr(encoder, "idf", None)})


def new_retrieval(encoder_name: str, episodes: Sequence[Episode], seed: int = 0, device="cpu") -> tuple:
    """(replay buffer with all steps of offline episodes, phi)."""
    encoder = load_encoder(encoder_name, device=str(device))
    if isinstance(encoder, WordEncoder):
        encoder.fit(text for e in episodes for s in e.steps for text in (s.state, s.shown_action))
    buffer = ReplayBuffer(encoder.dim, seed=seed)
    fill_buffer(buffer, encoder, episodes)
    return buffer, encoder


def load_settings_and_retrieval(folder: Path | str, replay: Path | None = None, device="cpu") -> tuple:
    """(settings, (replay buffer, phi)) of the experience model that train_expmodel.py wrote into `folder`;
    the buffer may be another one, `replay`. Raises ValueError where the folder holds none."""
    folder = Path(folder) / "model"
    if not (folder / "experience.json").is_file():
        raise ValueError(f"--expmodel {folder.parent}: found no experience model there; expected a folder "
                         "that train_expmodel.py wrote")
    saved = run.read_json(folder / "experience.json")
    encoder = load_encoder(saved["encoder"], saved["idf"], str(device))
    return ExperienceSettings(**saved["settings"]), (ReplayBuffer.load(replay or folder / "replay"), encoder)


def load_experience_model(folder: Path | str, env: Environment, device="cpu", replay: Path | None = None,
                          beside=None, dtype: str = "auto", **options) -> ExperienceModel:
    """The experience model in `folder`; `options` are those of ExperienceModel. `beside`: a policy that it
    shares its base with, if it can (model.load_frozen). Raises as `load_settings_and_retrieval` does."""
    settings, retrieval = load_settings_and_retrieval(folder, replay, device)
    path = Path(folder) / "model"
    quantize = run.load_meta(path).get("settings", {}).get("quantize", "none")
    model, tokenizer = load_frozen(str(path), "experience", beside, dtype, quantize, str(device))
    return ExperienceModel(model, tokenizer, env, settings, retrieval, **options)
