"""Print pip constraints that pin every dependency in pyproject.toml to its lower bound.

python .ci/lowest.py > lowest.txt && pip install -e '.[test]' -c lowest.txt
"""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
    name, version = re.fullmatch(r"([\w-]+)[>=]=([\w.]+).*", requirement).groups()
    print(f"{name}=={version}")
