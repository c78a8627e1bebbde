"""Below the ALFWorld engine: translated games and TextWorld's compiled planner library, which holds the state
of a game and knows its rules.

Translations (PDDL to SAS, 0.1-0.6 s of CPU a game) are kept compressed: the latest ones in memory, all of
them in a folder where the caller names one. Only `translate` runs TextWorld's code; nothing here is imported
from it before a game is opened.
"""
from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import struct
import sys
import tempfile
import zlib
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path

TRANSLATIONS_KEPT = 256                          # in memory; 10-80 KB each
CACHE_SCHEMA = 1                                 # of the files in a cache folder

_translations: OrderedDict[str, bytes] = OrderedDict()


class Library:
    """A private copy of the Fast Downward library, whose global variables are one game: its rules, the states
    met so far, and the current one.

    `state_id` reads and sets the current state: ids are 0 (the start), 1, ... in the order of meeting, and
    equal states have one id.
    """

    # bytes of its struct: int id, char name[1024], int number of effects
    OPERATOR = 1032
    ATOM = 1024                                  # bytes of a fact's name

    def __init__(self):
        from fast_downward.interface import DOWNWARD_LIB_PATH
        # the loader would share one file; the copy stays mapped when its name is gone
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "libdownward.so"
            copy.write_bytes(_loadable(Path(DOWNWARD_LIB_PATH)))
            self._lib = ctypes.CDLL(str(copy))
        self._lib.apply_operator.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
        self._lib.load_sas.argtypes, self._lib.load_sas.restype = [ctypes.c_char_p], None
        self._lib.get_applicable_operators.argtypes, self._lib.get_applicable_operators.restype = (
            [ctypes.c_void_p],
            None,
        )
        self._lib.check_goal.restype = ctypes.c_bool
        self._room(256)

    def _room(self, count: int) -> None:
        self._ints = (ctypes.c_int * (count * self.OPERATOR // 4))()
        self._count = count

    def load(self, sas: str) -> None:
        self._lib.load_sas(sas.encode())

    def clear(self) -> None:
        self._lib.cleanup()

    @property
    def state_id(self) -> int:
        return self._lib.get_state_id()

    @state_id.setter
    def state_id(self, value: int) -> None:
        self._lib.set_state_id(value)

    def won(self) -> bool:
        return self._lib.check_goal()

    def operators(self) -> tuple[int, ...]:
        """Ids of the operators that apply in the current state, in the library's order; `operator(i)` reads
        the i-th."""
        count = self._lib.get_applicable_operators_count()
        if count > self._count:
            self._room(2 * count)
        self._lib.get_applicable_operators(self._ints)
        return tuple(self._ints[0:count * self.OPERATOR // 4:self.OPERATOR // 4])

    def operator(self, i: int) -> tuple[str, int]:
        """Name ("pickupobject agent1 ...") and number of effects of the i-th operator of the last call."""
        name = ctypes.string_at(ctypes.addressof(self._ints) + i * self.OPERATOR + 4).decode("cp1252")
        return name, self._ints[(i + 1) * self.OPERATOR // 4 - 1]

    def apply(self, operator: int) -> None:
        self._lib.apply_operator(operator, None)

    def apply_and_tell(self, operator: int, count: int) -> list[str]:
        """Applies an operator of `count` effects; their names, such as "NegatedAtom holds(agent1,
        apple_bar_1)"."""
        atoms = ctypes.create_string_buffer(self.ATOM * max(count, 1))
        self._lib.apply_operator(operator, atoms)
        return [
            ctypes.string_at(ctypes.addressof(atoms) + i * self.ATOM).decode("cp1252") for i in range(count)
        ]


def _loadable(path: Path) -> bytes:
    """The part of a shared library that is mapped when it is loaded: 1 MB of 33, the rest is debugging
    information."""
    with path.open("rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":           # macOS
            return path.read_bytes()
        start, (size, count) = struct.unpack_from("<Q", head, 32)[0], struct.unpack_from("<HH", head, 54)
        file.seek(start)
        segments = [file.read(size) for _ in range(count)]
        ends = [
            offset + length
            for kind, offset, length in (struct.unpack_from("<I4xQ16xQ", segment) for segment in segments)
            if kind == 1
        ]
        file.seek(0)
        return file.read(max(ends))


def translation(domain: str, problem: str, version: str, cache: str | Path = "") -> dict:
    """The translated game from memory, else from the folder `cache`, else from `translate`. `version` (of the
    packages) is part of the key.

    Raises ValueError, without a file name, for PDDL that makes no game.
    """
    key = hashlib.sha256(json.dumps([CACHE_SCHEMA, version, domain, problem]).encode()).hexdigest()[:24]
    packed, file = _translations.get(key), Path(cache) / f"{key}.zlib" if cache else None
    if packed is None and file and file.is_file():
        packed = file.read_bytes()
    try:
        record = json.loads(zlib.decompress(packed)) if packed else None
    except (zlib.error, ValueError):             # a damaged cache file is made anew
        record = packed = None
    if record is None:
        record = translate(domain, problem)
        packed = zlib.compress(json.dumps(record).encode())
    if file and not file.is_file():
        _write(file, packed)
    _translations[key] = packed
    _translations.move_to_end(key)
    if len(_translations) > TRANSLATIONS_KEPT:
        _translations.popitem(last=False)
    return record


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(content)
    part.replace(file)                           # another process may write the same one


def translate(domain: str, problem: str) -> dict:
    """PDDL to SAS by TextWorld's translator, with what its PddlState reads from the task beside it.

    sas; types {name: type}; hierarchy [(type, supertypes)]; facts [[predicate, *names]] at the start;
    parameters {action: [(name, type)]}; fluents: the predicates that actions change; conditional: those of
    them that some action changes only `when` something holds.
    """
    import fast_downward
    collecting = gc.isenabled()
    # a fifth of the time: nothing of this is garbage before the end
    gc.disable()
    try:
        with own_argv():
            task, sas = fast_downward.pddl2sas(domain, problem)
    except (Exception, SystemExit) as error:  # the translator asserts, raises and exits
        raise ValueError(
            f"Fast Downward cannot translate the PDDL ({type(error).__name__}: {str(error)[:150]})"
        ) from None
    finally:
        if collecting:
            gc.enable()
    if "Atom dummy(val1)" in sas:
        raise ValueError("the goal is out of reach, or reached from the start; expected a solvable game")
    effects = [effect for action in task.actions for effect in action.effects]
    return {
        "sas": sas,
        "types": {thing.name: thing.type_name for thing in task.objects},
        "hierarchy": [(kind.name, kind.supertype_names) for kind in task.types],
        "facts": [fact for fact in map(_initial_fact, task.init) if fact],
        "parameters": {
            action.name: [(p.name.strip("?"), p.type_name) for p in action.parameters]
            for action in task.actions
        },
        "fluents": sorted({effect.literal.predicate for effect in effects}),
        "conditional": sorted(
            {effect.literal.predicate for effect in effects if type(effect.condition).__name__ != "Truth"}
        ),
    }


def _initial_fact(element) -> list[str] | None:
    """[predicate, *names]; None for what TextWorld leaves out: equality, costs and distances."""
    if hasattr(element, "predicate"):
        return None if element.predicate == "=" else [element.predicate, *element.args]
    value = str(element.expression.value)
    return None if element.fluent.symbol == "total-cost" or value.isdigit() else [value, *element.fluent.args]


@contextmanager
def own_argv():
    """TextWorld's translator overwrites sys.argv; the program's own comes back."""
    argv = sys.argv
    try:
        yield
    finally:
        sys.argv = argv
