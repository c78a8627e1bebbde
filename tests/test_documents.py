"""The commands that the documents and the scripts' own texts show."""
import importlib
import re
import shlex

import pytest

from dreamgym import run
from dreamgym.flags import ROOT

FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.py"))]
SHOWN = re.compile(r"(?:python|torchrun) [^`\n]*?\b([a-z_]+)\.py\b([^`#|;(&\n]*)")


def shown() -> dict[str, tuple[str, list[str]]]:
    found = {}
    for path in FILES:
        for script, flags in SHOWN.findall(path.read_text().replace("\\\n", " ")):
            flags = re.sub(r"   .*|\.$", "", flags).strip()     # a remark behind it, the end of a sentence
            if (ROOT / f"{script}.py").is_file():
                found[f"{script} {flags}".strip()] = script, shlex.split(flags)
    return found


@pytest.mark.parametrize("script, flags", shown().values(), ids=list(shown()))
def test_commands_of_the_documents_are_accepted(script: str, flags: list[str]):
    """A flag that was renamed; numbers that the command's own preset contradicts."""
    module = importlib.import_module(script)
    args = run.parse(module.Args, flags)
    if hasattr(module, "check"):
        module.check(args)


def test_commands_are_found():
    assert len(shown()) > 50 and {script for script, _ in shown().values()} == {
        path.stem for path in ROOT.glob("*.py")}
