"""Every prompt, and every parser of model text: pure functions of strings.

The experience model answers two questions (DreamGym, arXiv 2511.03773, Eq. 4, asked in two parts): the next
state, and the reward. A parser never trusts text: what does not fit the form exactly is None, and the caller
counts it as malformed. Environments have their words in envs/<name>/prompts.py.
"""
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from dreamgym.episode import Episode, Step, line_number, rename_step
from dreamgym.page_diff import MARK, decode, encode

MAX_STATE_CHARS = 20_000
TRIED_CHARS = 200                      # of an action that a prompt lists as tried
NEXT = "next:\n"
TAGS = re.compile(r"^(think|next|reward|task|state|action|tried|(similar|earlier|before) \d+|vary)[^\S\n]*:",
                  re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Prompts:
    """What an environment says about itself to language models; the forms of the answers are added here."""
    # what the agent is, its actions
    policy: str = ("You act in an environment. Each turn shows its state. "
                   "Reach the goal of the task in as few actions as possible.")
    # what the simulated world is, when a task is fulfilled
    experience: str = ("You simulate an environment. You know how its states change by actions, "
                       "and when a task is fulfilled.")
    variation: str = "You write tasks for an environment."             # which tasks exist
    teacher: str = "You explain recorded steps of an environment."     # what an explanation should look at


def clean(text: str) -> str:
    """One line without control characters or runs of blanks."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def escape(state: str) -> str:
    """Puts "> " before lines that could be taken for a tag of a prompt or for a mark of page_diff."""
    return "\n".join(f"> {line}" if TAGS.match(line) or line.startswith(("- ", "+ ", "= ", "~ ")) else line
                     for line in state.split("\n"))


def plain_state(text: str) -> str:
    """A state as an answer of the experience model can hold it: printable, no blanks around it or at the end
    of a line, escaped."""
    lines = "".join(c if c.isprintable() or c == "\n" else " " for c in text).split("\n")
    return escape("\n".join(line.rstrip() for line in lines).strip())


def plain_episode(episode: Episode) -> Episode:
    """Somebody's recorded episode with plain states and reasoning, and a task of one clean line. A state of
    unprintable characters alone becomes "(end)"."""
    plain = lambda state: plain_state(state) or "(end)"
    task = replace(episode.task, text=clean(episode.task.text), start=plain_state(episode.task.start))
    steps = [replace(step, state=plain(step.state), next_state=plain(step.next_state),
                     reasoning=plain_state(step.reasoning),
                     reward_reasoning=plain_state(step.reward_reasoning)) for step in episode.steps]
    return replace(episode, task=task, steps=steps)


# ---- policy ----

POLICY_FORMS = {
    "action": "Answer with exactly one line: action: ACTION",
    "element": "First write the words of the element that your action is about, then exactly one line: "
               "action: ACTION",
    "thought": "First think in one line, then write exactly one line: action: ACTION",
    "tags": "First think inside <think> </think>, then give exactly one action inside <action> </action>.",
}


def policy_system(prompts: Prompts, policy_format: str) -> str:
    return f"{prompts.policy}\n{POLICY_FORMS[policy_format]}"


def policy_turn(task_text: str, state: str, turns: Sequence[tuple[str, str]] = (),
                show: Callable[[str], str] = str, tried: Sequence[str] = (), task_last: bool = False) -> str:
    """What a policy reads in each turn. The task is repeated, as in verl-agent: a small model follows one
    that stands beside the state, before it or behind it (docs/lab-notes.md). `turns`: at the head of a new
    context window, the last (state, action) turns of the window before. `show`: the form of a state.
    `tried`: see `tried_actions`."""
    seen = "".join(f"state:\n{show(s)}\naction: {a}\n" for s, a in turns)
    before = "".join(f"tried: {action}\n" for action in tried)
    asked, shown = f"task: {task_text}\n", f"state:\n{show(state)}\n{before}"
    return seen + (shown + asked if task_last else asked + shown)


def tried_actions(steps: Sequence[Step], state: str, most: int = 8) -> list[str]:
    """The different actions of an episode that were taken in `state`, at most the last `most` of them, and of
    each at most its first TRIED_CHARS (ours)."""
    taken = dict.fromkeys(step.action[:TRIED_CHARS] for step in steps if step.state == state and step.action)
    return list(taken)[-most:] if most else []


def policy_answer(step: Step, policy_format: str, numbered: bool = False) -> str:
    """What a policy is taught to write for a recorded step: the agent's thought, or else the element that the
    action names, as it stands in a `numbered` state, and the action. Without tags an answer looks like
    actions in the questions to the experience model, from which a small policy starts
    (docs/lab-notes.md)."""
    number = line_number(step) if numbered else ""
    element = f"{step.element} {number}".strip()
    first = element if policy_format == "element" else clean(step.thought) or element
    if policy_format == "tags":
        return f"<think>{first}</think><action>{step.action}</action>"
    line = f"{first}\n" if first and policy_format != "action" else ""
    return f"{line}action: {step.action}"


def parse_answer(text: str, ended: bool = True) -> tuple[str, str]:
    """(thought, action) in a policy's answer, "" for none. The action is the last `<action>…</action>`, or
    else the last line, without "action:"; what stands before it is the thought. An answer that was cut
    (`ended` False), or that never ends its <think>, has only the former: a part of a plan is not acted on."""
    before, opened, said = text[:max(0, text.rfind("</action>"))].rpartition("<action>")
    cut = not opened and (not ended or text.rfind("<think>") > text.rfind("</think>"))
    said = said if opened else "" if cut else text
    lines = [line.strip() for line in said.split("\n") if line.strip()]
    named = [i for i, line in enumerate(lines) if line.lower().startswith("action:")]
    last = named[-1] if named else len(lines) - 1
    action = re.sub("^action:", "", lines[last], flags=re.IGNORECASE) if lines else ""
    thought = before if opened else text if cut else " ".join(lines[:max(0, last)])
    return clean(re.sub("</?think>", " ", thought)), clean(action)


# ---- experience model: the next state ----

ANSWER_FORMS = """\
Think about what the action does in this state, then answer in this form and no other:
think: REASONING
next:
NEXT STATE
When asked for the reward, compare the task with what was done, then answer in this form and no other:
think: REASONING
reward: 0 or 1 done: yes or no
The reward is 1 only where the action fulfils the whole task."""
EDITS_FORM = ("then '- LINE' for each line to take out and '+ LINE' for each line to put in there. "
              "'~ KEY: VALUE' replaces the line that begins with 'KEY: '")
DIFF_FORM = ("\nA state that is close to one in the prompt may be written short: its name ('= state', "
             f"'= before 1', '= similar 1', '= earlier 1'), {EDITS_FORM}.")
TITLES_FORM = ("\nA state that is close to one in the prompt may be written short: '= state', or '= ' and "
               "the first line of another one (where two begin alike its name: '= before 1', '= similar 1', "
               f"'= earlier 1'), {EDITS_FORM}; each such line is said, changed or not.")
FORMS = {"full": "", "diff": DIFF_FORM, "titles": TITLES_FORM}


def experience_system(prompts: Prompts, page_format: str) -> str:
    return f"{prompts.experience}\n{ANSWER_FORMS}{FORMS[page_format]}"


@dataclass
class Question:
    """All that the next state may depend on (Eq. 4). `recent`: the last (state, grounded action) pairs,
    oldest first. `earlier`: other steps of the same episode, `demos`: those retrieved from the buffer (d_j of
    Eq. 4); of both the most similar last."""
    task: str
    state: str
    action: str                               # grounded
    recent: list[tuple[str, str]]
    earlier: list[Step]
    demos: list[Step]


def rename_question(question: Question, change: Callable[[str], str]) -> Question:
    """The question with `change` made in every text of it."""
    q, steps = question, lambda part: [rename_step(step, change) for step in part]
    return Question(change(q.task), change(q.state), change(q.action),
                    [(change(s), change(a)) for s, a in q.recent], steps(q.earlier), steps(q.demos))


def title(page: str) -> str:
    return page.split("\n")[0]


def known_pages(question: Question, page_format: str) -> dict[str, str]:
    """The pages of a prompt that a compact answer may name, by the tag that stands above a page there. Of a
    transition ("similar 1", "earlier 1") it is the next state. In the form "titles" the first line is the
    name, but where a page before has the same first line."""
    pages = {"state": question.state}
    pages |= {f"before {i}": state for i, (state, _) in enumerate(reversed(question.recent), 1)}
    for tag, demos in (("similar", question.demos), ("earlier", question.earlier)):
        pages |= {f"{tag} {i}": demo.next_state for i, demo in enumerate(reversed(demos), 1)}
    if page_format != "titles":
        return pages
    here = title(question.state)
    named, taken = {}, {here, *pages}
    for tag in sorted(pages, key=lambda tag: tag.startswith("similar")):       # the episode's own come first
        name = title(pages[tag])
        named[tag if name in taken else name] = pages[tag]
        taken.add(name)
    named.setdefault(here, question.state)       # "state" comes first, and is taught
    return named


def _written(page: str, known: dict[str, str], page_format: str) -> str:
    return page if page_format == "full" else encode(page, known, keys=page_format == "titles")


def _marked(action: str, question: Question, page_format: str) -> str:
    """An action of the prompt. The compact form says where it is the asked one: a small model compares
    badly."""
    return f"{MARK}action" if page_format != "full" and action == question.action else action


def _shown(demos: list[Step], tag: str, question: Question, pages: dict[str, str], page_format: str) -> str:
    """Whole transitions, numbered down to 1, the most similar. In a compact form their states are differences
    to the `pages` of the prompt, their next states to their own states too."""
    text = ""
    for i, demo in zip(range(len(demos), 0, -1), demos):
        action = _marked(demo.shown_action, question, page_format)
        before = _written(demo.state, pages, page_format)
        after = _written(demo.next_state, {"there": demo.state} | pages, page_format)
        text += f"{tag} {i}:\n{before}\naction: {action}\nnext:\n{after}\n"
        text += f"reward: {int(demo.reward)}\n" if demo.reward else ""
    return text


def next_prompt(question: Question, page_format: str) -> str:
    """The first question: what is the next state?"""
    q, recent = question, ""
    pages = {"state": q.state}
    for i, (state, action) in zip(range(len(q.recent), 0, -1), q.recent):
        pages[f"before {i}"] = state
        recent += f"before {i}:\n{state}\naction: {_marked(action, q, page_format)}\n"
    earlier = _shown(q.earlier, "earlier", q, pages, page_format)
    similar = _shown(q.demos, "similar", q, pages, page_format)
    return f"{recent}{earlier}{similar}task: {q.task}\nstate:\n{q.state}\naction: {q.action}\n"


def next_answer(reasoning: str, next_state: str, question: Question, page_format: str) -> str:
    """What the experience model is taught to write. `reasoning` "" leaves the line out (ablation)."""
    page = _written(next_state, known_pages(question, page_format), page_format)
    thought = f"think: {reasoning}\n" if reasoning else ""
    return f"{thought}{NEXT}{page}"


def is_new(answer: tuple[str, str] | None, question: Question) -> bool:
    """Whether the page of an answer begins as none of the episode's pages in the prompt does."""
    shown = [question.state, *(state for state, _ in question.recent)]
    shown += [page for step in question.earlier for page in (step.state, step.next_state)]
    return answer is not None and title(answer[1]) not in map(title, shown)


def until_tag(text: str, ended: bool) -> tuple[str, bool]:
    """(answer, whether it ended) up to the first tag in its page, which ends it as a stop sequence does: a
    model that learnt to predict prompts goes on as they do. No page has such a line (`escape`). A tag in
    capitals is no prompt's: the answer stays malformed."""
    page = text.find(NEXT)
    tag = re.compile(TAGS.pattern, re.MULTILINE).search(text, page + len(NEXT)) if page >= 0 else None
    return (text[:tag.start()], True) if tag else (text, ended)


_NEXT = re.compile(r"(?:think: (?P<think>.*?)\n)?next:\n(?P<page>.+)", re.DOTALL)


def parse_next(text: str, question: Question, page_format: str) -> tuple[str, str] | None:
    """(reasoning, next state) of an answer, or None where it is malformed: another form, too long, control
    characters, a tag inside the page, or a difference that `decode` refuses."""
    match = _NEXT.fullmatch(text.strip())
    if not match or len(text) > 2 * MAX_STATE_CHARS or any(not c.isprintable() and c != "\n" for c in text):
        return None
    page = match["page"].strip()
    try:
        page = decode(page, known_pages(question, page_format)) if page_format != "full" else page
    except ValueError:
        return None
    if not page or len(page) > MAX_STATE_CHARS or TAGS.search(page):
        return None
    return (match["think"] or "").strip(), page


# ---- experience model: the reward ----

def reward_prompt(task: str, state: str, action: str, next_state: str, page_format: str) -> str:
    """The second question: does this step fulfil the task, and does it end the episode? Neither history nor
    demonstrations stand in for a judgement."""
    after = _written(next_state, {"state": state}, page_format)
    return f"task: {task}\nstate:\n{state}\naction: {action}\nnext:\n{after}\nreward?\n"


def reward_answer(reasoning: str, reward: float, done: bool) -> str:
    thought = f"think: {reasoning}\n" if reasoning else ""
    return f"{thought}reward: {int(reward)} done: {'yes' if done else 'no'}"


_REWARD = re.compile(r"(?:think: (?P<think>.*?)\n)?reward: (?P<reward>[01]) done: (?P<done>yes|no)",
                     re.DOTALL)


def parse_reward(text: str) -> tuple[str, float, bool] | None:
    """(reasoning, reward, done) of an answer, or None where it is malformed, gives a reward without an end,
    or two verdicts."""
    match = _REWARD.fullmatch(text.strip())
    thought = match["think"] or "" if match else ""
    if (not match or (match["reward"] == "1" and match["done"] == "no")
            or re.search(r"^reward: [01] done:", thought, re.MULTILINE)):
        return None
    return thought.strip(), float(match["reward"]), match["done"] == "yes"


# ---- task variation (Eq. 6) ----

def variation_system(prompts: Prompts) -> str:
    return (f"{prompts.variation}\n"
            "Given a task, write a different and harder one in the same form, on one line.")


def variation_prompt(seed_task: str) -> str:
    return f"vary: {seed_task}\n"


def parse_task(text: str) -> str | None:
    """One line of task text; None where it is empty, has several lines, control characters, or tags."""
    text = text.strip()
    return text if text and len(text) <= 1000 and text.isprintable() and not TAGS.search(text) else None
