"""An environment, real or imagined, behind OpenEnv's wire protocol: one WebSocket is one session.

OpenEnv's own server does protocol, sessions and their limits; here are the episodes, the batches, and who may
connect. Each session waits in a thread of its own; one thread owns the world and answers all.
"""
import functools
import hmac
import itertools
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from uuid import uuid4

import msgspec
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment as OpenEnvEnvironment
from openenv.core.env_server.types import Action, ConcurrencyConfig, EnvironmentMetadata, Observation, State
from starlette.responses import PlainTextResponse

from dreamgym.envs.base import Environment, out_folder, record_step
from dreamgym.episode import Episode, Task, check_task
from dreamgym.prompts import MAX_STATE_CHARS, escape, parse_answer, policy_system, policy_turn, tried_actions
from dreamgym.run import rng

GATHER_S = 0.02                        # a request waits at most so long for those of the other episodes


class TextAction(Action):
    action: str                        # an action alone, or a policy's whole answer


class TextObservation(Observation):
    state: str                         # the page
    task: str
    system: str                        # system prompt and turn of our policies; `prompt` shows task and state
    prompt: str
    stop: str = ""                     # why the episode ended; "malformed": the dream failed, not the agent
    raw_score: float = 0.0             # the benchmark's own score


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    """What `reset` may say: which task, or the seed to draw one with. Seed and index count up from 0."""
    seed: int | None = None
    episode_id: str | None = None
    task_id: str = ""
    task: str = ""                     # its text; the dream also plays new ones
    start: str = ""                    # the first state of a new task
    split: str = ""
    index: int | None = None


class Batcher:
    """Calls a world's `reset`, `step` and `end` from one thread, with the requests of all who wait."""

    def __init__(self, world):
        self.world, self.running, self.waiting = world, 0, []
        self.arrived, self.thread = threading.Condition(), ThreadPoolExecutor(1)

    def ask(self, method: str, *arguments):
        """What `method` returns for this row of the world's lists."""
        future: Future = Future()
        with self.arrived:
            self.thread.submit(self._work)       # RuntimeError once the server is closing
            self.waiting.append((method, arguments, future))
            self.arrived.notify()
        return future.result()

    def close(self) -> None:
        """Ends the thread after what was asked so far."""
        self.thread.shutdown()

    def _work(self) -> None:
        with self.arrived:
            if self.waiting:                     # else answered with an earlier request
                self.arrived.wait_for(lambda: len(self.waiting) >= self.running, GATHER_S)
            waiting, self.waiting = self.waiting, []
        for method in ("end", "reset", "step"):  # those that end make room
            if part := [request for request in waiting if request[0] == method]:
                self._answer(method, part)

    def _answer(self, method: str, part: list) -> None:
        futures = [future for _, _, future in part]
        try:
            rows = zip(*(arguments for _, arguments, _ in part))     # reset(tasks), step(sessions, actions)
            answers = getattr(self.world, method)(*map(list, rows)) or [None] * len(part)
        except Exception as error:      # the world's: those who asked hear it, the server lives
            logging.getLogger(__name__).exception("%s of %d sessions", method, len(part))
            for future in futures:
                future.set_exception(error)
        else:
            self.running += len(part) * {"reset": 1, "end": -1}.get(method, 0)
            for future, answer in zip(futures, answers, strict=True):
                future.set_result(answer)


@dataclass
class Service:
    """What all sessions share."""
    world: object                      # an Environment, or the ExperienceModel
    env: Environment                   # lends the dream its prompts and step limit
    tasks: list[Task]
    split: str
    max_action_chars: int
    seed: int = 0

    def __post_init__(self):
        self.batcher, self.draws = Batcher(self.world), itertools.count()
        self.by_id = {task.id: task for task in self.tasks}
        self.by_text = {task.text: task for task in reversed(self.tasks)}    # the first of equal texts
        self.system = policy_system(self.env.prompts, "tags")

    def choose(self, choice: Choice) -> Task:
        if choice.split not in ("", self.split):
            raise ValueError(f"split {choice.split[:80]!r}: this server plays {self.split} tasks")
        if choice.task_id:
            if choice.task_id not in self.by_id:
                raise ValueError(f"task_id {choice.task_id[:80]!r}: no {self.split} task has this id")
            return self.by_id[choice.task_id]
        if choice.task:
            return self.by_text.get(choice.task) or self._new_task(choice)
        if choice.index is not None:
            if not 0 <= choice.index < len(self.tasks):
                raise ValueError(f"index {choice.index}: there are {len(self.tasks)} {self.split} tasks")
            return self.tasks[choice.index]
        names = ("seed", choice.seed) if choice.seed is not None else ("draw", next(self.draws))
        return self.tasks[rng(self.seed, "serve", *names).integers(len(self.tasks))]

    def _new_task(self, choice: Choice) -> Task:
        if self.world is self.env:
            raise ValueError(f"task {choice.task[:80]!r}: no {self.split} task has this text, and only the "
                             "dream plays others")
        if not choice.start or len(choice.task) + len(choice.start) > MAX_STATE_CHARS:
            raise ValueError("a new task: expected its first state as `start`, and at most "
                             f"{MAX_STATE_CHARS:,} characters in all")
        task = Task(id="new", text=choice.task, env=self.env.name, start=escape(choice.start), generated=True)
        return check_task(task, "reset")


class Served(OpenEnvEnvironment):
    """One client's session: at most one running episode."""
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, service: Service):
        super().__init__()
        self.service, self.session, self.episode, self.is_open = service, None, None, True

    def reset(self, **choice) -> TextObservation:
        if not self.is_open:
            raise ValueError("this session has ended, because it was idle: connect again")
        choice = msgspec.convert(choice, Choice)
        task = self.service.choose(choice)
        self._end()
        self.session = self.service.batcher.ask("reset", task)
        self.episode = Episode(id=choice.episode_id or uuid4().hex, task=task)
        return self._observation(None)

    def step(self, action: TextAction) -> TextObservation:
        service = self.service
        if len(action.action) > service.max_action_chars:
            raise ValueError(f"action: {len(action.action):,} characters; expected at most "
                             f"{service.max_action_chars:,}")
        if not self.session:
            raise ValueError("no episode is running: it has not begun, has ended, or was idle for too long; "
                             "reset first")
        state, (_, text) = self.session.state, parse_answer(action.action)
        try:
            result = service.batcher.ask("step", self.session, text)
        except Exception:
            self._end()                # nobody knows what state it is in
            raise
        record_step(self.episode, state, text, result, service.env.max_steps)
        observation = self._observation(result)
        if self.episode.stop:
            self._end()
        return observation

    @property
    def state(self) -> State:
        episode = self.episode or Episode(id="", task=Task(id="", text=""))
        return State(episode_id=episode.id, step_count=len(episode.steps), task_id=episode.task.id,
                     stop=episode.stop.value)

    def close(self) -> None:
        self.is_open = False
        self._end()

    def _end(self) -> None:
        session, self.session = self.session, None
        if session:
            self.service.batcher.ask("end", session)

    def _observation(self, result) -> TextObservation:
        env, task, state = self.service.env, self.episode.task.text, self.session.state
        tried = tried_actions(self.episode.steps, state)
        return TextObservation(state=state, task=task, system=self.service.system,
                               prompt=policy_turn(task, state, show=env.show, tried=tried),
                               reward=result and float(result.reward), done=self.episode.stop != "",
                               stop=self.episode.stop.value, raw_score=self.episode.raw_score)

    # what OpenEnv serves over HTTP: GET /metadata, POST /NAME/num_tasks, POST /NAME/task

    def get_metadata(self) -> EnvironmentMetadata:
        env = self.service.env
        kind = "Real" if self.service.world is env else "A dream"
        return EnvironmentMetadata(name=env.name, description=f"{kind}. {env.prompts.policy}")

    def list_splits(self) -> list[str]:
        return [self.service.split]

    def num_tasks(self, split: str) -> int:
        return len(self.service.tasks) if split == self.service.split else 0

    def get_task(self, split: str, index: int) -> dict:
        if split != self.service.split or index < 0:
            raise IndexError(index)
        task = self.service.tasks[index]
        return {"id": task.id, "text": task.text, "start": task.start}


def make_app(service: Service, max_sessions: int, idle_s: float, token: str):
    """The ASGI application. Where `token` is not empty, a client sends "Authorization: Bearer TOKEN"."""
    limits = ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=idle_s)
    return guarded(create_fastapi_app(functools.partial(Served, service), TextAction, TextObservation,
                                      concurrency_config=limits, env_name=out_folder(service.env.name).name,
                                      mode="production"), token)


def guarded(app, token: str):
    """Refuses who lacks the token, and every web page (`Origin`): a browser would let any site talk to a
    server on loopback."""
    expected = b"Bearer " + token.encode()

    async def checked(scope, receive, send):
        headers, answer = dict(scope.get("headers", ())), app
        if scope["type"] != "lifespan":          # the server's own start and end
            if token and not hmac.compare_digest(headers.get(b"authorization", b""), expected):
                answer = PlainTextResponse("expected the header Authorization: Bearer DREAMGYM_TOKEN", 401)
            elif b"origin" in headers:
                answer = PlainTextResponse("no web page may use this server", 403)
        await answer(scope, receive, send)
    return checked
