"""An experience model behind an OpenAI-compatible server: exported (train_expmodel.py --export), or any
capable model, untrained: a world by prompt, history and retrieval alone.

The server applies its own chat template. It reads special tokens that stand in a page as such, where the
sampler of this package spells them out.
"""
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dreamgym.envs.base import Environment
from dreamgym.episode import read_episodes, recorded
from dreamgym.experience_model import (ExperienceModel, ExperienceSettings, load_experience_model,
                                       load_settings_and_retrieval, new_retrieval)
from dreamgym.replay import ReplayBuffer
from dreamgym.teacher import Endpoint, EndpointError, RequestRefused, is_url

REQUESTS = 64            # at once
RETRIES = 80             # of a request that may pass, in a run of days: ten minutes
CHARS_PER_TOK = 3        # a careful guess: the server's tokenizer is not known here


def check_server(args) -> None:
    """Raises ValueError where one of --expmodel URL and --expmodel-name is missing."""
    if is_url(args.expmodel) != bool(args.expmodel_name):
        raise ValueError("--expmodel URL and --expmodel-name NAME: expected both or none")


def trained_folder(args) -> Path | None:
    """Of the experience model that `args` names, or that the server's was exported from."""
    name = args.expmodel_folder if is_url(args.expmodel) else args.expmodel
    return Path(name) if name else None


def reach_server(args) -> Endpoint:
    """The server that `args` names. Raises ValueError where it does not answer a question."""
    where = args.expmodel, args.expmodel_name, args.expmodel_key_env
    try:
        Endpoint(*where).answer([{"role": "user", "content": "Answer with one word."}], max_tokens=1,
                                temperature=0.0)
    except EndpointError as error:
        raise ValueError(f"--expmodel {error}") from None
    return Endpoint(*where, retries=RETRIES)


class ServedExperienceModel(ExperienceModel):
    """The experience model without weights in this process. Raises ValueError where the server stays away."""
    def __init__(self, endpoint: Endpoint, env: Environment, settings: ExperienceSettings, retrieval: tuple):
        super().__init__(None, None, env, settings, retrieval, slots=REQUESTS)
        self.endpoint = endpoint
        # requests that were lost and sent again; that were refused, as by a server of a shorter context
        self.counts |= {"repeated": 0, "refused": 0}

    def _prompt(self, text: str, varies: bool = False) -> list[dict]:
        system = [{"role": "system", "content": self.systems[varies]}] if self.systems[varies] else []
        return [*system, {"role": "user", "content": text}]

    def _size(self, prompt: list[dict]) -> int:
        return sum(len(message["content"]) for message in prompt) // CHARS_PER_TOK

    def _write(self, prompts: list[list[dict]], start: str, limit: int,
               temperature: float) -> list[tuple[str, bool]]:
        """`start` cannot be forced through chat completions. A think block before the answer is left out. The
        answer to a refused question is malformed."""
        def ask(prompt: list[dict]) -> tuple[str, bool, int]:
            try:
                return self.endpoint.answer(prompt, max_tokens=limit, temperature=temperature)
            except RequestRefused:
                self.counts["refused"] += 1
                return "", False, 0

        try:
            with ThreadPoolExecutor(REQUESTS) as pool:
                answers = list(pool.map(ask, prompts))
        except EndpointError as error:
            raise ValueError(f"--expmodel {error}; run the same command when the server answers") from None
        self.counts["repeated"] += sum(repeated for _, _, repeated in answers)
        return [(text.rpartition("</think>")[2], ended) for text, ended, _ in answers]


def open_experience_model(args, folder: Path | None, env: Environment, offline: Path, device="cpu",
                          resume: Path | None = None, **options) -> ExperienceModel:
    """What `args` names: the weights in `folder`, or a server, whose settings and replay buffer are in
    `folder`. Without a folder the server's model is untrained: it gets room to think, and the episodes of the
    file `offline`. A checkpoint `resume` has a buffer of its own. `options`: of load_experience_model."""
    replay = resume / "replay" if resume else None
    if not is_url(args.expmodel):
        return load_experience_model(folder, env, device, replay, **options)
    endpoint = reach_server(args)
    if folder:
        settings, retrieval = load_settings_and_retrieval(folder, replay, device)
    else:
        settings = ExperienceSettings(context=16_384, max_next_tok=4_096, max_reward_tok=2_048)
        buffer, phi = new_retrieval("words", recorded(read_episodes(offline)))
        retrieval = (ReplayBuffer.load(replay) if replay else buffer), phi
    return ServedExperienceModel(endpoint, env, settings, retrieval)
