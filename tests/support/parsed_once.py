"""A YAML file of one text is parsed once by a process: Hydra parses thirty of them for every composition."""

import pickle
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_load = OmegaConf.load
_known: dict[str, bytes] = {}  # by the text: a test may write another one into a file


def _load_once(file: Any) -> Any:
    text = Path(file).read_text(encoding="utf-8") if isinstance(file, str | Path) else file.read()
    if text not in _known:
        if not isinstance(file, str | Path):
            file.seek(0)
        _known[text] = pickle.dumps(_load(file))
    return pickle.loads(_known[text])


def install() -> None:
    """For this process and those that it forks."""
    OmegaConf.load = staticmethod(_load_once)
