"""A package `mynet` with a model, and a folder `conf` for `--config-dir`, as a user has them in the current folder."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from batchscope.options import compose, groups, signatures

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, spec, flavour: str = "plain", size: int = 3):
        super().__init__()
        self.flavour, self.size = flavour, size
"""
Write = Callable[..., None]  # of YAML files by their places in `conf`, and of the package's modules by their names
# Cached functions, and whether they are asked for what is installed: to parse torch again for each test takes long.
SHARED: list[tuple[ModuleType, str, Callable[..., bool]]] = [
    (signatures, "_load", lambda name: name.startswith(("batchscope", "lightning", "torch"))),
    (compose, "composed", lambda choices, folder: folder is None),
    (groups, "nodes_in", lambda folders: len(folders) == 1),
]


def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules and YAML files; without any, the model `mynet.net.Net` and the choice `model=mynet`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    caches: list[Any] = [signatures.signature_of, signatures.class_attribute, signatures.inherits]
    for module, name, is_installed in SHARED:
        shared = getattr(module, name)
        caches.append(own := functools.cache(shared.__wrapped__))
        monkeypatch.setattr(
            module, name, lambda *asked, s=shared, o=own, i=is_installed: (s if i(*asked) else o)(*asked)
        )

    def write(yaml: dict[str, str] | None = None, **modules: str) -> None:
        files = {f"mynet/{name}.py": text for name, text in {"__init__": "", "net": NET, **modules}.items()}
        own = {"model/mynet": "_target_: mynet.net.Net\nflavour: salty\n", **(yaml or {})}
        files |= {f"conf/{name}.yaml": text for name, text in own.items()}
        for name, text in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        for cache in caches:
            cache.cache_clear()

    write()
    Path("out").mkdir()
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "mynet"]:
        del sys.modules[name]
    for cache in caches:
        cache.cache_clear()
