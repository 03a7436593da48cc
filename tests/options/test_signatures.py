"""Signatures and class attributes are read from source text, without importing what they belong to."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from batchscope.options.groups import known_nodes
from batchscope.options.signatures import Signature, class_attribute, signature_of
from batchscope.options.types import PositiveInt


def test_signatures_are_read_without_importing_what_they_belong_to() -> None:
    program = """
        import sys
        from batchscope.options.signatures import class_attribute, signature_of
        print([*signature_of("batchscope.models.cnn.SimpleCNN").parameters])
        print([*signature_of("batchscope.data.mnist.MNIST").parameters])
        print("max_epochs" in signature_of("lightning.Trainer").parameters)
        print("lr" in signature_of("torch.optim.AdamW").parameters)
        print(class_attribute("batchscope.models.sequence.LSTMCellModel", "accepts"))
        print([name for name in ("torch", "lightning", "torchvision", "numpy") if name in sys.modules])
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        "['spec', 'channels', 'hidden_size']",
        "['batch_size', 'num_workers', 'seed', 'augment', 'pipeline', 'root', 'num_val', 'num_train', 'num_test', 'offline']",
        "True",
        "True",
        "('image', 'sequence')",
        "[]",
    ]


# what is written, as modules of the package `toy` → the signature of `toy.one.Thing`
SIGNATURES: list[tuple[dict[str, str], Signature]] = [
    (
        {
            "one": "class Thing:\n    def __init__(self, a: PositiveInt, /, b: Literal['x'], *, c: float | None, d=1): pass"
        },
        Signature({"a": PositiveInt, "b": Literal["x"], "c": float | None, "d": None}),
    ),
    ({"one": "def Thing(size: int, **kwargs): pass"}, Signature({"size": int}, open=True)),
    (  # keywords that are passed on are those of the base class
        {
            "base": "class Base:\n    def __init__(self, size: int = 1, name: str = ''): pass",
            "middle": "from .base import Base as B\nclass Middle(B): pass",
            "one": "from toy.middle import Middle\nclass Thing(Middle):\n    def __init__(self, size: str, **rest): pass",
        },
        Signature({"size": str, "name": str}),
    ),
    (  # without keywords to pass on, a constructor hides that of the base class
        {
            "one": "class Base:\n    def __init__(self, size: int): pass\n"
            "class Thing(Base):\n    def __init__(self, rate: float): pass"
        },
        Signature({"rate": float}),
    ),
    ({"one": "from .two import Other as Thing", "two": "def Other(size: int): pass"}, Signature({"size": int})),
    (  # the last one is the definition, those above it are overloads
        {"one": "class Thing:\n    def __init__(self, a): ...\n    def __init__(self, b: int): pass"},
        Signature({"b": int}),
    ),
]


@pytest.mark.parametrize(("modules", "expected"), SIGNATURES)
def test_a_signature_is_that_of_the_constructor_or_function(modules, expected, write):
    write(**modules)
    assert signature_of("toy.one.Thing") == expected


@pytest.mark.parametrize(
    ("imports", "base"),
    [
        ("from .base import Base", "Base"),
        ("from .base import *", "Base"),
        ("from . import base", "base.Base"),
        ("import toy.base", "toy.base.Base"),
        ("import toy.base as b", "b.Base"),
        ("from toy import Base", "Base[int]"),
    ],
)
def test_a_base_class_is_found_by_every_kind_of_import(imports: str, base: str, write: Callable[..., None]) -> None:
    write(
        __init__="from .base import *",
        base="class Base:\n    kind = 'image'\n    def __init__(self, size: int): pass",
        one=f"{imports}\nclass Thing({base}):\n    def __init__(self, rate: float, **kwargs): pass",
    )
    assert signature_of("toy.one.Thing") == Signature({"size": int, "rate": float})
    assert class_attribute("toy.one.Thing", "kind") == "image"


@pytest.mark.parametrize(
    "text",
    [
        "import other\nclass Thing(other.Base): pass",
        "import other\nclass Thing(other.Base):\n    def __init__(self, size: int, **kwargs): pass",
        "class Base:\n    def __init__(self, size): pass\ndef made(): pass\nclass Thing(made(), Base): pass",
        "@made\nclass Thing:\n    def __init__(self, size): pass",
        "@made\ndef Thing(size): pass",
        "from .one import Thing",
        "class Thing(Thing):\n    def __init__(self, **kwargs): pass",
        "Thing = object",
        "def broken(:",
    ],
)
def test_what_cannot_be_read_to_its_end_takes_anything(text: str, write: Callable[..., None]) -> None:
    write(one=text)
    signature = signature_of("toy.one.Thing")
    assert signature is None or signature.open


def test_a_module_of_one_file_is_read_too(write: Callable[..., None], tmp_path: Path) -> None:
    write()
    (tmp_path / "alone.py").write_text("def build(size: int): pass")
    assert signature_of("alone.build") == Signature({"size": int})


@pytest.mark.parametrize("target", ["toy.one.Missing", "toy.missing.Thing", "missing.Thing", "Thing", "toy", ""])
def test_what_cannot_be_found_has_no_signature(target: str, write: Callable[..., None]) -> None:
    write(one="")
    assert signature_of(target) is None


def test_an_annotation_cannot_run_code(write: Callable[..., None], tmp_path: Path) -> None:
    broken = tmp_path / "broken-into"
    write(one=f"def build(size: __import__('os').mkdir({str(broken)!r}), other: open({str(broken)!r}, 'w')): pass")
    assert signature_of("toy.one.build") == Signature({"size": None, "other": None})
    assert not broken.exists()


def test_a_class_attribute_is_read_and_inherited(write: Callable[..., None]) -> None:
    base = "from typing import ClassVar\nclass Base:\n    kind: ClassVar[str] = 'image'\n    accepts = ('a', 'b')"
    write(base=base, one="from .base import Base\nclass Same(Base): kind: str\nclass Other(Base): kind = 'sequence'")
    assert class_attribute("toy.one.Same", "kind") == "image"
    assert class_attribute("toy.one.Other", "kind") == "sequence"
    assert class_attribute("toy.one.Other", "accepts") == ("a", "b")


@pytest.mark.parametrize("target", ["toy.one.Thing", "toy.one.build", "toy.one.Missing", "missing.Thing"])
def test_a_class_attribute_that_is_not_there_is_none(target: str, write: Callable[..., None]) -> None:
    write(one="class Thing: other = 1\ndef build(): pass")
    assert class_attribute(target, "kind") is None


def test_every_class_that_the_installed_configs_name_can_be_read() -> None:
    targets = {node["_target_"] for nodes in known_nodes().values() for node in nodes if "_target_" in node}
    assert len(targets) > 10
    assert {target for target in targets if signature_of(target) is None} == set()


def test_a_module_is_found_by_names_and_not_by_a_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Thing:\n    def __init__(self, size): pass")
    assert signature_of(f"batchscope.{tmp_path}/mine.Thing") is None
