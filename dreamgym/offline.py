"""How offline episodes are made: a player plays, or logs are read; rules explain; counterfactuals are
added."""
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from dreamgym import hindsight, prompts, run, teacher
from dreamgym.envs.base import (Act, Environment, Player, env_of_data, noted, record_step, reset_all,
                                step_all)
from dreamgym.episode import (Episode, Source, Step, StopReason, Task, as_read, check_episode, read_episodes,
                              to_json)
from dreamgym.names import Names
from dreamgym.reasoning import CompareWords
from dreamgym.words import TOKEN

SPLITS = ("train", "valid", "test")
PROBE_PROBABILITY = 0.6                # chance of a probe before an action whose first two words differ from
                                       # those of a randomly drawn recorded action
REPEAT_SHARE = 0.3                     # of the probes: the last action again, as policies in a loop do
EARLIER_SHARE = 0.4                    # of the others: an action of another time
FORM_SHARE = 0.4                       # of the rest: another action's words around the wanted names
SPLICE_SHARE = 0.2                     # of the rest, which are mutations: two actions joined
ANY_NAME_SHARE = 0.5                   # of the other mutations: with a name that may stand nowhere in sight
NAME = "\0"                            # in forms of actions; no action has it
PREPARED = 64                          # episodes whose tasks the environment hears of beforehand
PLAYER_TURNS = 10                      # before the present one that a language model is sent
TEACHER_CONTEXT_TOK = 16_384           # of a local teacher: an episode with its reasoning
TEACHER_ANSWER_TOK = 4_096             # ... and the reasoning alone


# ---- playing ----

def explained(env: Environment, episode: Episode, reason: CompareWords | None = None) -> Episode:
    """Fills in what is missing: grounded actions, and reasoning by the environment's rules, else by
    `reason`."""
    steps: list[Step] = []
    for i, step in enumerate(episode.steps):
        step = replace(step, grounded=step.grounded or env.ground(step.state, step.action))
        if not (step.reasoning and step.reward_reasoning):
            own = env.explain(episode.task, episode.steps[:i], step)
            if own and not (len(own) == 2 and all(isinstance(text, str) for text in own)):
                raise ValueError(f"{env.name}.explain returned {own!r} for the action {step.action!r}; "
                                 "expected two texts, or None")
            texts = own or (reason(episode.task, steps, step) if reason else ("", ""))
            why, verdict = map(prompts.plain_state, texts)
            step = replace(step, reasoning=step.reasoning or why,
                           reward_reasoning=step.reward_reasoning or verdict)
        steps.append(step)
    return replace(episode, steps=steps)


def play(env: Environment, task: Task, player: Player, rng: np.random.Generator, episode_id: str) -> Episode:
    """A real episode of `player`. Raises ValueError like play_at_once."""
    episode, = play_at_once(env, [(Episode(id=episode_id, task=task), player, rng)], workers=1)
    return episode


def play_at_once(env: Environment, roles: list[tuple[Episode, Player, np.random.Generator]],
                 workers: int) -> Iterator[Episode]:
    """Fills the empty episodes of `roles` with real steps and yields each when it ends. They run in
    lock-step, and `workers` players are asked at the same time. Raises ValueError where the answers of the
    environment make no valid episode, or a state that no experience model could answer with."""
    def act(one: tuple) -> str:
        session, episode, _, player_act = one
        with noted(f"player {episode.source!r}, task {session.task.text!r}, state {session.state!r}"):
            action = player_act(session.state)
        if not isinstance(action, str):
            raise ValueError(f"player {episode.source!r} acts with {action!r} in the state "
                             f"{session.state!r}; expected a text")
        return action

    def ready(session, episode: Episode, player: Player, rng: np.random.Generator) -> tuple:
        with noted(f"`make(session, rng)` of player {episode.source!r}"):
            return session, episode, player, player.make(session, rng)

    sessions = reset_all(env, [episode.task for episode, *_ in roles])
    try:
        running = [ready(session, *role) for session, role in zip(sessions, roles)]
        while running:
            states = [session.state for session, *_ in running]
            if workers == 1:
                actions = list(map(act, running))
            else:
                with ThreadPoolExecutor(workers) as pool:
                    actions = list(pool.map(act, running))
            results = step_all(env, [session for session, *_ in running], actions)
            for one, state, action, result in zip(running, states, actions, results):
                session, episode, player, _ = one
                said = action if isinstance(action, Act) else Act(action)
                record_step(episode, state, str(said), result, env.max_steps)
                step = episode.steps[-1]
                step.thought, step.imitate = said.thought, said.imitate and player.imitate
                if episode.stop:
                    yield checked(env, episode)
                elif session.state != result.state:
                    raise ValueError(f"{env.name}.step returned the state {result.state!r}, but left "
                                     f"session.state at {session.state!r}; expected the same")
            running = [one for one in running if not one[1].stop]
    finally:
        env.end(sessions)


def checked(env: Environment, episode: Episode) -> Episode:
    """The episode, explained, as its file gives it back. Raises ValueError for what no model can learn."""
    where = f"{env.name}, {episode.id}"
    check_episode(episode, where)
    for state in [episode.steps[0].state, *(step.next_state for step in episode.steps)]:
        check_plain(state, where)
    return as_read(explained(env, episode), where)


def check_plain(state: str, where: str) -> None:
    """Raises ValueError for a state that no experience model could answer with."""
    if state != (plain := prompts.plain_state(state)):
        pairs = zip_longest(state.split("\n"), plain.split("\n"))
        found, expected = next((a, b) for a, b in pairs if a != b)
        raise ValueError(f"{where}: a line of a state is {found!r}, expected {expected!r} as a model can "
                         "answer it; see dreamgym.prompts.plain_state")


def form_of(action: str, names: Names) -> tuple[str, list[str]]:
    """The action with NAME for each name and number, and these. "heat mug 1 with microwave 1" gives
    "heat NAME NAME with NAME NAME" and ["mug", "1", "microwave", "1"]."""
    found = [word for word in re.findall(r"[^\W_]+", action) if word.isdigit() or word.lower() in names.words]
    return re.sub(r"[^\W_]+", lambda word: NAME if word[0] in found else word[0], action), found


def in_other_forms(action: str, forms: list[str], names: Names) -> tuple[list[str], list[str]]:
    """The names and numbers of `action` in those of the `forms` that have as many: first the likely
    mistakes, which share a word with it ("cool mug 1 with microwave 1" for "heat mug 1 with microwave 1"),
    then the others ("move mug 1 to microwave 1"). Players that succeed hardly ever show that these fail."""
    form, found = form_of(action, names)
    like, unlike = [], []
    for other in forms:
        if other != form and other.count(NAME) == len(found) > 0:
            shared = {*form.split()} & {*other.split()} - {NAME}
            for name in found:
                other = other.replace(NAME, name, 1)
            (like if shared else unlike).append(other)
    return like, unlike


def mutated(action: str, other: str, text: str, names: Names, rng: np.random.Generator) -> str:
    """A damaged copy of `action`: its start joined to the end of `other`, or a word replaced. A name is
    replaced by another of its kind, from `text` or any task; a number by another of `text`; where there is
    neither, any word by any of `text`."""
    words, others = (re.findall(r"\s*(?:[^\W_]+|\S)", part) for part in (action, other))
    if rng.random() < SPLICE_SHARE:
        head, tail = rng.integers(len(words) + 1), rng.integers(len(others) + 1)
        words[head:] = others[tail:]
    else:
        found = sorted(set(TOKEN.findall(text)))
        known = found + names.words if rng.random() < ANY_NAME_SHARE else found
        plain = {i: word.strip() for i, word in enumerate(words) if word.strip().isalnum()}
        alike = {i: [new for new in known if names.kind(new) == names.kind(word) is not None
                     and new.lower() != word.lower()]
                 for i, word in plain.items()}
        places = [i for i in plain if alike[i]] or list(plain)
        if places and found:
            i = int(rng.choice(places))
            words[i] = words[i].replace(plain[i], str(rng.choice(alike[i] or found)))
    return "".join(words).strip() or action


def probing(player: Player, before: Episode, others: list[Episode], names: Names, forms: list[str]) -> Player:
    """A player that acts like `player`, but often tries something else first: the wanted names in other
    `forms`, its last action, a damaged copy of the wanted one, or an action of the episode `before`, which
    had the same task, or of one of the `others`. If the state stays the same, the wanted action follows; if
    it changes, `player` is asked again."""
    def make(session, rng):
        act, wanted, asked_in, last = player.make(session, rng), "", None, ""
        like, unlike = [], []
        beginning = lambda action: TOKEN.findall(action)[:2]

        def earlier() -> str:
            episode = before if rng.random() < 0.5 else others[rng.integers(len(others))]
            return episode.steps[rng.integers(len(episode.steps))].action

        def other(state: str) -> str:
            if like:
                return like.pop(rng.integers(len(like)))
            if last and rng.random() < REPEAT_SHARE:
                return last
            if rng.random() < EARLIER_SHARE:
                return earlier()
            if unlike and rng.random() < FORM_SHARE:
                return unlike[rng.integers(len(unlike))]
            return mutated(wanted, earlier(), f"{before.task.text}\n{state}", names, rng)

        def probe(state: str) -> str:
            nonlocal wanted, asked_in, last, like, unlike
            if state != asked_in:
                wanted, asked_in = act(state), state
                like, unlike = in_other_forms(wanted, forms, names)
            if rng.random() < PROBE_PROBABILITY and beginning(earlier()) != beginning(wanted):
                action = other(state)
                if action != wanted:
                    return Act(action, imitate=False)
            asked_in, last = None, wanted
            return wanted
        return probe
    return Player(make, imitate=player.imitate)


def play_many(env: Environment, players: dict[str, Player], tasks: list[Task], transitions: int, args,
              label: str, done_path: Path) -> list[Episode]:
    """Real episodes of the players by their shares, until there are `transitions` steps. An
    `args.probe_share` of them plays the task of an earlier one again, with probes. Where a language model
    plays, REQUESTS episodes run at once. Resumable: each episode is appended to `done_path` at once."""
    run.cut_jsonl(done_path)
    episodes: list[Episode] = []
    plain: list[Episode] = []                    # without probes
    forms: dict[str, None] = {}                  # an ordered set: draws do not depend on hashes
    shares = np.array([player.share for player in players.values()])
    names = Names(task.text for task in tasks)
    workers = min(teacher.REQUESTS, env.slots) if Source.LANGUAGE_MODEL in players else 1

    def add(episode: Episode) -> None:
        episodes.append(episode)
        if episode.source != Source.PROBER:
            plain.append(episode)
            if args.probe_forms:
                forms.update(dict.fromkeys(form_of(step.action, names)[0] for step in episode.steps))

    def drawn(index: int) -> tuple[np.random.Generator, Task, str]:
        rng = run.rng(args.seed, "collect", label, index)
        task = tasks[rng.integers(len(tasks))]
        return rng, task, str(rng.choice(list(players), p=shares / shares.sum()))

    def role(index: int) -> tuple[Episode, Player, np.random.Generator]:
        rng, task, source = drawn(index)
        player = players[source]
        if plain and rng.random() < args.probe_share:
            before = plain[rng.integers(len(plain))]
            player = probing(player, before, plain, names, [*forms])
            task, source = before.task, Source.PROBER
        return Episode(id=f"{label}-{index}", task=task, source=source), player, rng

    for episode in read_episodes(done_path) if done_path.exists() else ():
        add(episode)
    played, prepared = sum(len(episode.steps) for episode in episodes), len(episodes)
    with run.progress(transitions, f"{label} episodes", played) as bar:
        while played < transitions:
            first = len(episodes)
            if first >= prepared:
                prepared = first + PREPARED
                env.prepare([task for rng, task, _ in map(drawn, reversed(range(first, prepared)))
                             if rng.random() >= args.probe_share])
            for episode in play_at_once(env, [role(first + i) for i in range(workers)], workers):
                episode.id = f"{label}-{len(episodes)}"      # a killed collection goes on from the count
                run.write_jsonl(done_path, [to_json(episode)], append=True)
                add(episode)
                played += len(episode.steps)
                bar.update(len(episode.steps))
    return episodes


def language_model_player(env: Environment, ask: teacher.Ask, share: float) -> Player:
    """A language model as a player. Of its conversation it is sent the first turn and the last ones."""
    def make(session, rng):
        messages = [{"role": "system", "content": prompts.policy_system(env.prompts, "tags")}]

        def act(state: str) -> str:
            text = prompts.policy_turn(session.task.text, state, show=env.show)
            messages.append({"role": "user", "content": text})
            sent = messages[:3] + messages[3:][-2 * PLAYER_TURNS - 1:]
            messages.append({"role": "assistant", "content": ask(sent)})
            thought, action = prompts.parse_answer(messages[-1]["content"])
            return Act(action, thought)
        return act
    return Player(make, share, imitate=True)


def local_teacher(name: str) -> teacher.Ask:
    """A local model as teacher: greedy, one episode at a time."""
    import torch

    from dreamgym.chat import chat_format
    from dreamgym.model import load_model
    from dreamgym.sampler import Sampler
    model, tokenizer = load_model(name, device="cuda" if torch.cuda.is_available() else "cpu", frozen=True)
    chat = chat_format(tokenizer)
    context = min(TEACHER_CONTEXT_TOK, getattr(model.config, "max_position_embeddings", TEACHER_CONTEXT_TOK))
    sampler = Sampler(model, 1, context, chat.end_ids, 0)

    def ask(messages: list[dict]) -> str:
        ids = chat.prompt_ids("\n\n".join(message["content"] for message in messages))
        sample, = sampler.sample([ids], ["teacher"], TEACHER_ANSWER_TOK, 0.0)
        return chat.answer_text(sample.ids)
    return ask


# ---- what collect.py wrote ----

def environment_of(name: str, data: Path, dist, **more) -> tuple[Environment, dict]:
    """(environment, meta.json) of a folder of data. Raises ValueError where `describe` is no longer that of
    the data."""
    meta = run.load_meta(data)
    make = lambda: env_of_data(name, meta["settings"], **more)
    env = make() if dist.is_main else None       # rank 0 first: it may make files
    dist.barrier()
    env = env or make()
    run.check_meta(meta["environment"], env.describe(), data / "meta.json",
                   "collect again, or use the environment of the data")
    return env, meta


# ---- tasks and recorded episodes ----

def tasks_with_start(env: Environment, split: str) -> list[Task]:
    """Tasks with the first state, from which a dream starts. Raises ValueError where there are none, or an id
    occurs twice."""
    given, tasks = list(env.tasks(split)), []
    with run.progress(len(given), f"first states of {split} tasks") as bar:
        for task in given:
            if not task.start:
                session, = reset_all(env, [task])
                task = replace(task, start=session.state)
                env.end([session])
            where = f"--env {env.name}, task {task.id!r}"
            tasks.append(as_read(replace(task, env=task.env or env.name), where))
            check_plain(tasks[-1].start, where)
            bar.update(1)
    if not tasks:
        raise ValueError(f"--env {env.name} has no {split} tasks; expected some in {', '.join(SPLITS)}")
    (common, times), = Counter(task.id for task in tasks).most_common(1)
    if times > 1:
        raise ValueError(f"--env {env.name}: {times} of {len(tasks)} {split} tasks have the id {common!r}; "
                         "expected no id twice")
    return tasks


def warn_of_shared_texts(tasks: dict[str, list[Task]]) -> None:
    """Success on a held-out task is no evidence where a task of an earlier split has its text."""
    texts: set[str] = set()
    for split in SPLITS:
        if shared := sum(task.text in texts for task in tasks[split]):
            print(f"warning: {shared} of {len(tasks[split])} {split} tasks have the text of a task of an "
                  "earlier split; expected none")
        texts |= {task.text for task in tasks[split]}


def warn_of_episodes(episodes: list[Episode], from_log: bool, tasks: Sequence[Task]) -> None:
    """Says what training episodes cannot teach; `tasks`: the environment's own for training."""
    steps, flat = [step for e in episodes for step in e.steps], lambda text: " ".join(text.lower().split())
    unsaid = [s.action for s in steps if prompts.parse_answer(f"action: {s.action}")[1] != s.action]
    told = sum(flat(e.task.text) in flat(step.state) for e in episodes for step in e.steps)
    starts = defaultdict(set)
    for task in tasks:
        starts[task.text].add(task.start)
    moved = sum(e.steps[0].state not in starts.get(e.task.text, [e.steps[0].state]) for e in episodes)
    long = sum(len(step.next_state) > prompts.MAX_STATE_CHARS for step in steps)
    for is_so, problem in (
            (not any(e.success for e in episodes),
             f"none of {len(episodes)} training episodes succeeded; expected some: a reward of 1 shows "
             "what is paid and what to imitate"),
            (not any(step.imitate for step in steps),
             "no step is to imitate (`imitate` of players and logs), so a policy finds no demonstration"),
            (from_log and not any(step.done and not step.reward for step in steps),
             "no recorded failure ended an episode, so in the dream a wrong last action ends none, either"),
            (empty := sum(not s.action.strip() for s in steps),
             f"{empty} of {len(steps)} actions are empty; expected something that a policy can say"),
            (long, f"{long} of {len(steps)} states have more than {prompts.MAX_STATE_CHARS:,} characters, "
                   "which no experience model can answer with"),
            (unsaid, f"a policy cannot say {len(unsaid)} actions, such as {unsaid[:1]}: its answer has one "
                     "blank between words"),
            (2 * told > len(steps),
             f"{told} of {len(steps)} states say the task. Leave it out of them: a judge would compare the "
             "two instead of what was done, and generated tasks begin in states that say another one"),
            (moved, f"{moved} of {len(episodes)} training episodes do not begin in the first state of their "
                    "task, where dreams begin")):
        if is_so:
            print(f"warning: {problem}")


def read_logs(env: Environment, path: str, form: str) -> list[Episode]:
    """The recorded episodes in a file of our own `form` (""), or of one that the environment reads."""
    episodes = list(map(prompts.plain_episode, env.read_traces(path, form) if form else read_episodes(path)))
    if not episodes:
        raise ValueError(f"--import-file {path}: holds no episode; expected JSONL, one episode a line")
    for episode in episodes:
        if episode.world != "real" or (env.is_real and episode.task.env not in ("", env.name)):
            found = f"{episode.world!r} and {episode.task.env!r}"
            raise ValueError(f"{path}: episode {episode.id!r}: fields `world` and `task.env` are {found}, "
                             f"expected 'real' and {env.name!r}")
    return episodes


def by_split(env: Environment, episodes: list[Episode],
             tasks: dict[str, list[Task]]) -> dict[str, list[Episode]]:
    """Recorded episodes by the split of their task; unknown tasks are for training."""
    home = {prompts.clean(task.text): split for split in reversed(SPLITS) for task in tasks[split]}
    if unknown := [episode.task.text for episode in episodes if episode.task.text not in home]:
        print(f"note: {env.name} has no task with the text of {len(unknown)} of {len(episodes)} recorded "
              f"episodes, such as {unknown[0]!r}; they are for training")
    ours = (*env.players(), Source.LANGUAGE_MODEL, Source.PROBER, Source.COUNTERFACTUAL, Source.INFERRED)
    parts: dict[str, list[Episode]] = {split: [] for split in SPLITS}
    for episode in episodes:
        task = replace(episode.task, env=episode.task.env or env.name,
                       start=episode.task.start or episode.steps[0].state)
        episode = replace(episode, id=f"imported-{episode.id}", task=task,
                          source=episode.source if episode.source in ours else Source.IMPORTED)
        parts[home.get(task.text, "train")].append(explained(env, episode))
    if not parts["train"]:
        raise ValueError(f"all {len(episodes)} recorded episodes are of validation and test tasks; expected "
                         "some of training tasks, or of tasks that the environment does not have")
    return parts


# ---- counterfactuals ----

def counterfactuals(env: Environment, parts: dict[str, list[Episode]], tasks: dict[str, list[Task]],
                    split: str, count: int, rng: np.random.Generator) -> list[Episode]:
    """The environment's counterfactuals of one split, or those of hindsight.py: none under a task of another
    split, and none whose state and action are judged in training ("train" comes first)."""
    own = {task.text for task in tasks[split]}
    others = {task.text for name in SPLITS for task in tasks[name]} - own
    trained = {(e.steps[0].state, e.steps[0].action) for e in parts["train"]
               if e.source == Source.COUNTERFACTUAL and split != "train"}
    made: list[Episode] = []
    found = env.counterfactuals(parts[split], count, rng) if count else []
    if found is None:
        sides = hindsight.one_sided(parts["train"])      # the other splits hold too few successes
        found = hindsight.counterfactual_rewards(parts[split], count, rng, sides)
    for episode in found:
        step, task, name = episode.steps[0], episode.task, f"counterfactual-{split}-{len(made)}"
        if task.text not in others and (step.state, step.action) not in trained:
            task = replace(task, id=task.id or name, env=env.name, start=task.start or step.state)
            stop = (StopReason.SUCCESS if step.reward else
                    StopReason.FAILURE if step.done else StopReason.STEP_LIMIT)
            episode = replace(episode, id=name, source=Source.COUNTERFACTUAL, task=task, stop=stop,
                              raw_score=float(episode.raw_score or step.reward))
            made.append(checked(env, episode))
    return made
