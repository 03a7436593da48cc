"""`batchscope new`: a project of your own: a model, a dataset and a callback in a package, with their YAML files.

    batchscope new mynet                                # writes the folder mynet
    cd mynet
    batchscope train --config-dir=conf experiment=mynet

Every file says what it is for. Nothing of batchscope has to be edited.
"""

import importlib.util
import keyword
import os
import re
from pathlib import Path

from ..errors import UserError
from ..files import as_write_error, write_folder
from ..options.groups import CONFIGS
from ..options.overrides import as_override
from . import command_parser

_HERE = Path(__file__).resolve().parents[1]
# In a checkout the template is an example, in an installed wheel a part of the package.
TEMPLATE = next(p for p in (_HERE / "own_project", _HERE.parent / "examples" / "own-project") if p.is_dir())
NAME = "mynet"  # the template's name, which the project's name replaces
_PATTERNS = ("*.toml", "*.md", "conf/*/*.yaml", "mynet/*.py", "tests/*.py")


def main() -> None:
    """The program: parse, check the name, write."""
    parser = command_parser("new", __doc__)
    parser.add_argument("name", help="name of the project, its package and its model")
    name = parser.parse_args().name
    _check_name(name)
    with as_write_error("new", Path(name)):
        folder = write_folder(Path(name), files_of(name))
    print(f"{folder} is ready; its README.md says what each file is for. To train it:\n")
    print(f"    cd {folder}\n    batchscope train --config-dir=conf experiment={name}")


def files_of(name: str) -> dict[str, bytes]:
    """Return the files of a project with this name, by their paths in its folder."""
    paths = [path for pattern in _PATTERNS for path in sorted(TEMPLATE.glob(pattern))]
    texts = {path.relative_to(TEMPLATE).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {path.replace(NAME, name): text.replace(NAME, name).encode() for path, text in texts.items()}


def _check_name(name: str) -> None:
    """Raise UserError for a name that a package cannot have, or that something else has."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name):
        takes = "a name for a Python package: small letters, digits and _, beginning with a letter"
        raise UserError(f"new: got {name!r}, takes {takes}")
    if as_override("experiment", name) != f"experiment={name}":
        raise UserError(f"new: got {name!r}, which is no text in an option; choose another name")
    if importlib.util.find_spec(name) is not None or name in ("conf", "tests", "waves"):
        raise UserError(f"new: got {name!r}, which is the name of another module; choose another name")
    if any((CONFIGS / path.removeprefix("conf/")).is_file() for path in files_of(name)):
        raise UserError(f"new: got {name!r}, which is the name of a choice of batchscope's own; choose another name")
    if os.path.lexists(name):
        raise UserError(f"new: {name} is there already; choose another name, or another folder to work in")
