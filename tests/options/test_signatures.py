"""Signatures and class attributes are read from source text, without importing what they belong to."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal, get_args

import pytest
from lightning.fabric.plugins.precision import precision

from batchscope.options.groups import known_nodes
from batchscope.options.signatures import Signature, class_attribute, signature_of
from batchscope.options.trainer import OBSERVERS, TRAINER
from batchscope.options.types import PositiveInt
from batchscope.options.values import choices_in
from tests.support.own_package import Write

THING = "mynet.one.Thing"


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


PARTS = "a: PositiveInt, /, b: Literal['x'], *, c: float | None, d=1"
PARTS_READ = Signature({"a": PositiveInt, "b": Literal["x"], "c": float | None, "d": None})
BASE = "class Base:\n    def __init__(self, size: int): pass\n"
# A module `one` with a Thing, its signature, and the module `base` beside it.
SIGNATURES = {
    "of each kind of parameter": (f"class Thing:\n    def __init__(self, {PARTS}): pass", PARTS_READ, ""),
    "of a function": ("def Thing(size: int, **kwargs): pass", Signature({"size": int}, open=True), ""),
    "of a name from elsewhere": ("from .base import Base as Thing", Signature({"size": int}), BASE),
    "with the keywords of the base class": (
        "from mynet.base import Middle\nclass Thing(Middle):\n    def __init__(self, name: str, **rest): pass",
        Signature({"name": str, "size": int}),
        f"{BASE}class Middle(Base): pass",
    ),
    "without those that it does not pass on": (
        f"{BASE}class Thing(Base):\n    def __init__(self, rate: float): pass",
        Signature({"rate": float}),
        "",
    ),
    "below its overloads": (
        "class Thing:\n    def __init__(self, a): ...\n    def __init__(self, b: int): pass",
        Signature({"b": int}),
        "",
    ),
    "with an annotation that would run": (
        "def Thing(size: __import__('os').mkdir('ran'), other: open('ran', 'w')): pass",
        Signature({"size": None, "other": None}),
        "",
    ),
}


@pytest.mark.parametrize(("text", "expected", "base"), SIGNATURES.values(), ids=SIGNATURES)
def test_a_signature_is_that_of_the_constructor_or_function(text, expected, base, package: Write) -> None:
    package(one=text, base=base)
    assert signature_of(THING) == expected
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("imports", "base"),
    [
        ("from .base import Base", "Base"),
        ("from .base import *", "Base"),
        ("from . import base", "base.Base"),
        ("import mynet.base", "mynet.base.Base"),
        ("import mynet.base as b", "b.Base"),
        ("from mynet import Base", "Base[int]"),
    ],
)
def test_a_base_class_is_found_by_every_kind_of_import(imports: str, base: str, package: Write) -> None:
    package(
        __init__="from .base import *",
        base="class Base:\n    kind: ClassVar[str] = 'image'\n    accepts = ('a', 'b')\n    def __init__(self, size: int): pass",
        one=f"{imports}\nclass Thing({base}):\n    kind: str\n    def __init__(self, rate: float, **kwargs): pass\n"
        "class Other(Thing): kind = 'sequence'",
    )
    assert signature_of(THING) == Signature({"size": int, "rate": float})
    assert (class_attribute(THING, "kind"), class_attribute("mynet.one.Other", "kind")) == ("image", "sequence")
    assert class_attribute("mynet.one.Other", "accepts") == ("a", "b")


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
def test_what_cannot_be_read_to_its_end_takes_anything(text: str, package: Write) -> None:
    package(one=text)
    signature = signature_of(THING)
    assert signature is None or signature.open


def test_what_cannot_be_found_has_no_signature_and_no_attributes(package: Write) -> None:
    package(one="class Thing: other = 1\ndef build(): pass")
    Path("alone.py").write_text("def build(size: int): pass")
    assert signature_of("alone.build") == Signature({"size": int})
    for target in ("mynet.one.Missing", "mynet.missing.Thing", "missing.Thing", "Thing", "mynet", ""):
        assert signature_of(target) is class_attribute(target, "kind") is None
    assert class_attribute(THING, "kind") is class_attribute("mynet.one.build", "kind") is None
    assert signature_of(f"batchscope.{Path.cwd()}/alone.build") is None  # a module is no path


# --- what is installed -----------------------------------------------------------------------------------------------


def test_every_class_that_the_installed_configs_name_can_be_read() -> None:
    targets = {node["_target_"] for nodes in known_nodes().values() for node in nodes if "_target_" in node}
    assert len(targets) > 10
    assert {target for target in (*targets, *OBSERVERS) if signature_of(target) is None} == set()


def test_what_is_declared_of_the_trainer_is_what_the_lightning_of_today_takes() -> None:
    assert set(TRAINER) <= set(signature_of("lightning.Trainer").parameters)
    theirs = (precision._PRECISION_INPUT_INT, precision._PRECISION_INPUT_STR, precision._PRECISION_INPUT_STR_ALIAS)
    assert set(choices_in(TRAINER["precision"])) == {value for literal in theirs for value in get_args(literal)}
