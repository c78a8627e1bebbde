"""Below the ALFWorld engine: translated games and TextWorld's compiled planner library, which holds the state
of a game and knows its rules."""
import ctypes
import gc
import hashlib
import json
import os
import struct
import sys
import tempfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

CACHE_SCHEMA = 2                                 # of the files in a cache folder


class Library:
    """A private copy of the Fast Downward library, whose global variables are one game. Ids of its states are
    0 (the start), 1, ... in the order of meeting; equal states have one id."""

    def __init__(self):
        from fast_downward.interface import DOWNWARD_LIB_PATH
        # the loader would share one file; the copy stays mapped when its name is gone
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "libdownward.so"
            copy.write_bytes(_loadable(Path(DOWNWARD_LIB_PATH)))
            self.lib = ctypes.CDLL(str(copy))
        self.lib.apply_operator.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
        self.lib.check_goal.restype = ctypes.c_bool

    def operators(self) -> Sequence:
        """Those that apply in the current state, in the library's order: `id`, `name` ("pickupobject agent1
        ..."), `nb_effect_atoms`."""
        from fast_downward import Operator
        found = (Operator * self.lib.get_applicable_operators_count())()
        self.lib.get_applicable_operators(found)
        return found

    def apply(self, operator: int, effects: int) -> list[str]:
        """Applies an operator of so many effects; these, such as "NegatedAtom holds(agent1, apple_bar_1)"."""
        from fast_downward import Atom
        atoms = (Atom * effects)()
        self.lib.apply_operator(operator, atoms)
        return [atom.name for atom in atoms]


@lru_cache(maxsize=1)
def _loadable(path: Path) -> bytes:
    """The mapped part of a shared library: 1 MB of 33, the rest is debugging information."""
    content = path.read_bytes()
    if content[:5] != b"\x7fELF\x02":            # macOS
        return content
    start, (size, count) = struct.unpack_from("<Q", content, 32)[0], struct.unpack_from("<HH", content, 54)
    segments = [struct.unpack_from("<I4xQ16xQ", content, start + i * size) for i in range(count)]
    return content[:max(offset + length for kind, offset, length in segments if kind == 1)]


def translation(domain: str, problem: str, version: str, cache: str | Path = "") -> dict:
    """The translated game (0.1-0.6 s of CPU), kept in the folder `cache`, by `version` of the packages,
    too."""
    if not cache:
        return translate(domain, problem)
    key = hashlib.sha256(json.dumps([CACHE_SCHEMA, version, domain, problem]).encode()).hexdigest()[:24]
    file = Path(cache) / f"{key}.zlib"
    try:
        return json.loads(zlib.decompress(file.read_bytes()))
    except (OSError, zlib.error, ValueError):
        pass                                     # none yet, or damaged: made anew
    record = translate(domain, problem)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(zlib.compress(json.dumps(record).encode()))
    part.replace(file)                           # another process may write the same one
    return record


def translate(domain: str, problem: str) -> dict:
    """PDDL to SAS by TextWorld's translator: `sas`, `facts` at the start [[predicate, *names]], `parameters`
    {action: [name]}. Raises ValueError, without a file name, for PDDL that makes no game."""
    import fast_downward
    gc.disable()                                 # a fifth of the time: nothing here is garbage before the end
    argv = sys.argv                              # the translator overwrites them
    try:
        task, sas = fast_downward.pddl2sas(domain, problem)
    except (Exception, SystemExit) as error:     # the translator asserts, raises and exits
        raise ValueError(f"Fast Downward cannot translate the PDDL ({type(error).__name__}: "
                         f"{str(error)[:150]})") from None
    finally:
        gc.enable()
        sys.argv = argv
    if "Atom dummy(val1)" in sas:
        raise ValueError("the goal is out of reach, or reached from the start; expected a solvable game")
    return {
        "sas": sas,
        # costs and distances have no predicate
        "facts": [[atom.predicate, *atom.args]
                  for atom in task.init if getattr(atom, "predicate", "=") != "="],
        "parameters": {action.name: [parameter.name.strip("?") for parameter in action.parameters]
                       for action in task.actions},
    }
