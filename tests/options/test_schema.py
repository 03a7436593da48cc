"""Options are checked against signatures that are read from source text, without importing what they belong to."""

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from omegaconf import OmegaConf

from batchscope.errors import UserError
from batchscope.options import schema
from batchscope.options.config import CONFIGS
from batchscope.options.types import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Range, Seed


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write a package `toy` of the given modules, allowed as a target anywhere; importing any of it would fail."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(schema, "check_target", lambda target, path: None)
    caches = (schema.signature_of, schema.class_attribute, schema._load)

    def write(**modules: str) -> None:
        (tmp_path / "toy").mkdir(exist_ok=True)
        for name, text in {"__init__": "", **modules}.items():
            source = "raise ImportError('never imported')\n" + textwrap.dedent(text)
            (tmp_path / "toy" / f"{name}.py").write_text(source, encoding="utf-8")
        for cached in caches:
            cached.cache_clear()

    yield write
    for cached in caches:
        cached.cache_clear()


def message_of(call: Callable[..., None], *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)


# --- signatures ------------------------------------------------------------------------------------------------------


def test_signatures_are_read_without_importing_what_they_belong_to() -> None:
    program = """
        import sys
        from batchscope.options.schema import class_attribute, parameters_of
        print(parameters_of("batchscope.models.cnn.SimpleCNN"))
        print(parameters_of("batchscope.data.mnist.MNIST"))
        print("max_epochs" in parameters_of("lightning.Trainer"))
        print("lr" in parameters_of("torch.optim.AdamW"))
        print(class_attribute("batchscope.models.sequence.LSTMCellModel", "accepts"))
        print([name for name in ("torch", "lightning", "torchvision", "numpy") if name in sys.modules])
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        "['spec', 'channels', 'hidden_size']",
        "['batch_size', 'pipeline', 'num_workers', 'seed', 'root', 'num_val', 'offline']",
        "True",
        "True",
        "('image', 'sequence')",
        "[]",
    ]


def test_annotations_become_the_types_that_they_name(write: Callable[..., None]) -> None:
    write(
        one="""
        class Thing:
            def __init__(self, size: PositiveInt, /, mode: Literal["a", "b"], *, rate: float | None = None, free=1):
                pass
        """
    )
    signature = schema.signature_of("toy.one.Thing")
    assert signature == schema.Signature(
        {"size": PositiveInt, "mode": Literal["a", "b"], "rate": float | None, "free": None}, open=False
    )


def test_a_function_is_a_target_too(write: Callable[..., None]) -> None:
    write(one="def build(size: int, **kwargs): pass")
    assert schema.signature_of("toy.one.build") == schema.Signature({"size": int}, open=True)


def test_keywords_passed_on_are_those_of_the_base_class(write: Callable[..., None]) -> None:
    write(
        base="""
        class Base:
            def __init__(self, size: int = 1, name: str = ""): pass
        """,
        middle="""
        from .base import Base as B
        class Middle(B):
            pass
        """,
        one="""
        from toy.middle import Middle
        class Thing(Middle):
            def __init__(self, rate: float, size: str = "", **kwargs): pass
        """,
    )
    assert schema.signature_of("toy.one.Thing") == schema.Signature({"size": str, "name": str, "rate": float})


def test_a_constructor_without_keywords_to_pass_on_hides_the_base_class(write: Callable[..., None]) -> None:
    write(
        one="""
        class Base:
            def __init__(self, size: int): pass
        class Thing(Base):
            def __init__(self, rate: float): pass
        """
    )
    assert schema.parameters_of("toy.one.Thing") == ["rate"]


def test_keywords_passed_on_to_what_cannot_be_read_are_all_taken(write: Callable[..., None]) -> None:
    write(
        one="""
        import other
        class Thing(other.Base):
            def __init__(self, size: int, **kwargs): pass
        """
    )
    signature = schema.signature_of("toy.one.Thing")
    assert signature == schema.Signature({"size": int}, open=True)
    schema.check({"_target_": "toy.one.Thing", "anything": 1}, "thing")


def test_re_exports_are_followed(write: Callable[..., None]) -> None:
    write(
        __init__="from .one import Thing as Renamed",
        one="""
        class Thing:
            def __init__(self, size: int): pass
        """,
    )
    assert schema.parameters_of("toy.Renamed") == ["size"]


@pytest.mark.parametrize("target", ["toy.one.Missing", "toy.missing.Thing", "missing.Thing", "Thing", "toy", ""])
def test_what_cannot_be_found_has_no_signature(target: str, write: Callable[..., None]) -> None:
    write(one="")
    assert schema.signature_of(target) is None
    assert schema.parameters_of(target) == []


def test_an_annotation_cannot_run_code(write: Callable[..., None], tmp_path: Path) -> None:
    broken = tmp_path / "broken-into"
    write(one=f"def build(size: __import__('os').mkdir({str(broken)!r}), other: open({str(broken)!r}, 'w')): pass")
    assert schema.signature_of("toy.one.build") == schema.Signature({"size": None, "other": None})
    assert not broken.exists()


# --- values ----------------------------------------------------------------------------------------------------------

TAKEN = [
    (int, 3),
    (float, 3),
    (float, 0.5),
    (float, float("inf")),
    (bool, False),
    (str, ""),
    (int | None, None),
    (Optional[int], None),  # noqa: UP045 - as other people's code still spells it
    (Union[int, str], "x"),  # noqa: UP007
    (Literal["a", "b"], "b"),
    (Literal["a", 1] | None, 1),
    (list[int], []),
    (list[int], [1, 2]),
    (tuple[float, ...], [1, 0.5]),
    (list[int] | str, "auto"),
    (list[PositiveInt] | tuple[PositiveInt, ...], [1]),
    (dict[str, int], {"a": 1}),
    (PositiveInt, 1),
    (NonNegativeInt, 0),
    (PositiveFloat, 1e-9),
    (Fraction, 0),
    (Fraction, 1.0),
    (Seed, 2**32 - 1),
    (None, object()),
]

REFUSED = [
    (int, 3.0, "got 3.0, takes a whole number."),
    (int, True, "got True, takes a whole number."),
    (int, "3", "got '3', takes a whole number."),
    (int, None, "got null, takes a whole number."),
    (float, "fast", "got 'fast', takes a number."),
    (float, float("nan"), "got nan, takes a number."),
    (float, True, "got True, takes a number."),
    (bool, 1, "got 1, takes true or false."),
    (bool, "yes", "got 'yes', takes true or false."),
    (str, 5, "got 5, takes a text."),
    (int | None, "x", "got 'x', takes a whole number or null."),
    (int, "", "got nothing, takes a whole number."),
    (Literal["memory", "device"], "memry", "got 'memry', takes memory or device. Did you mean 'memory'?"),
    (Literal["memory", "device"], "x", "got 'x', takes memory or device."),
    (Literal[1, 2], True, "got True, takes 1 or 2."),
    (Literal["a"] | None, "b", "got 'b', takes a or null."),
    (PositiveInt, 0, "got 0, takes a whole number of at least 1."),
    (PositiveInt, 2**63, f"got {2**63}, takes a whole number of at least 1, up to {2**63 - 1:,}."),
    (PositiveFloat, 10**400, f"got {10**400}, takes a number above 0, up to {2**63 - 1:,}."),
    (Seed, 2**63, "got 9223372036854775808, takes a whole number from 0 to 4,294,967,295."),
    (NonNegativeInt, -1, "got -1, takes a whole number of at least 0."),
    (PositiveFloat, 0, "got 0, takes a number above 0."),
    (Fraction, 1.5, "got 1.5, takes a number from 0 to 1."),
    (Fraction, float("nan"), "got nan, takes a number from 0 to 1."),
    (Seed, 2**32, "got 4294967296, takes a whole number from 0 to 4,294,967,295."),
    (Annotated[int, Range(2)], 1, "got 1, takes a whole number of at least 2."),
    (list[int], 1, "got 1, takes a list, each item a whole number."),
    (list[int], ["a"], "got ['a'], takes a list, each item a whole number."),
    (
        list[PositiveInt] | tuple[PositiveInt, ...],
        [0],
        "got [0], takes a list, each item a whole number of at least 1.",
    ),
    (dict[str, int], [1], "got [1], takes dict."),
]


@pytest.mark.parametrize(("annotation", "value"), TAKEN)
def test_a_value_of_the_right_kind_is_taken(annotation: Any, value: Any) -> None:
    assert schema.check_value("model.size", value, annotation) is None


@pytest.mark.parametrize(("annotation", "value", "message"), REFUSED)
def test_a_value_of_another_kind_is_refused_with_what_the_option_takes(
    annotation: Any, value: Any, message: str
) -> None:
    assert message_of(schema.check_value, "model.size", value, annotation) == f"model.size: {message}"


@pytest.mark.parametrize(
    "annotation", ["timedelta", "Optional[nn.Module]", "'Quoted'", "Optional['Quoted']", "int + 1"]
)
def test_an_annotation_that_cannot_be_read_is_not_checked(annotation: str, write: Callable[..., None]) -> None:
    write(one=f"class Thing:\n    def __init__(self, size: {annotation}): pass")
    for value in (None, 1, "x", [1], {"a": 1}):
        schema.check({"_target_": "toy.one.Thing", "size": value}, "thing")
    assert "size" in schema.parameters_of("toy.one.Thing")


# --- nodes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def thing(write: Callable[..., None]) -> str:
    write(
        one="""
        class Thing:
            def __init__(self, spec, batch_size: PositiveInt = 1, part=None, parts=()): pass
        """
    )
    return "toy.one.Thing"


def test_a_node_with_known_options_passes(thing: str) -> None:
    node = {"_target_": thing, "batch_size": 4}
    assert schema.check(node, "data") is None


def test_an_unknown_option_is_refused_with_the_nearest_and_those_that_there_are(thing: str) -> None:
    node = {"_target_": thing, "batch_size": 4, "batch_sise": 3}
    assert message_of(schema.check, node, "data") == (
        "data.batch_sise: no such option. Did you mean 'batch_size'? data takes batch_size."
    )


def test_a_wrong_value_is_named_by_its_full_name(thing: str) -> None:
    node = {"_target_": thing, "part": {"_target_": thing, "parts": [{"_target_": thing, "batch_size": 0}]}}
    message = message_of(schema.check, node, "data")
    assert message == "data.part.parts.0.batch_size: got 0, takes a whole number of at least 1."


def test_a_node_without_a_target_may_hold_anything_but_wrong_nodes(thing: str) -> None:
    schema.check({"what": 1, "ever": None}, "callbacks")
    message = message_of(schema.check, {"mine": {"_target_": thing, "x": 1}}, "callbacks")
    assert message.startswith("callbacks.mine.x: no such option.")


@pytest.mark.parametrize("key", ["_args_", "_partial_", "_recursive_", "_convert_", "_mine_"])
@pytest.mark.parametrize("value", [True, "all", [], [{"_target_": "torch.hub.load"}]], ids=str)
def test_of_hydras_keys_only_the_target_is_taken(key: str, value: Any, thing: str) -> None:
    for node in ({"_target_": thing, key: value}, {key: value}, {"_target_": thing, "parts": [[{"a": {key: value}}]]}):
        assert f"{key}: no such option" in message_of(schema.check, node, "model")


HOSTILE = {"_target_": "torch.hub.load", "source": "local"}


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "batchscope.models.mlp.MLP", "hidden_sizes": HOSTILE},
        {"_target_": "batchscope.models.mlp.MLP", "hidden_sizes": [[HOSTILE]]},
        {"_target_": "batchscope.models.mlp.MLP", "hidden_sizes": {"a": {"": [HOSTILE]}}},
        {"a": {5: HOSTILE}},
        {"a": {None: {True: [{"": HOSTILE}]}}},
        [[[HOSTILE]]],
    ],
)
def test_a_hostile_target_is_refused_wherever_it_stands(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "check_value", lambda *_: None)  # which would refuse some of them for their kind
    assert "_target_: got 'torch.hub.load'" in message_of(schema.check, node, "model")


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("model", "batchscope.data.mnist.MNIST"),
        ("model", "batchscope.training.optimizer.AdamW"),
        ("model", "batchscope.records.run_record.RunRecord"),
        ("data", "batchscope.models.mlp.MLP"),
        ("data", "lightning.LightningDataModule"),
        ("optimizer", "torch.optim.AdamW"),
        ("trainer", "lightning.pytorch.cli.LightningCLI"),
        ("trainer.strategy", "lightning.pytorch.profilers.PyTorchProfiler"),
        ("trainer.plugins", "lightning.pytorch.plugins.MixedPrecision"),
        ("trainer.plugins.0", "lightning.pytorch.plugins.MixedPrecision"),
        ("callbacks.mine", "lightning.pytorch.loggers.CSVLogger"),
        ("callbacks.mine", "lightning.pytorch.cli.LightningCLI"),
        ("callbacks.mine.inner", "lightning.pytorch.callbacks.EarlyStopping"),
        ("logger.mine", "lightning.pytorch.callbacks.EarlyStopping"),
        ("logger.mine", "lightning.pytorch.profilers.PyTorchProfiler"),
        ("search", "batchscope.models.mlp.MLP"),
        ("anything", "batchscope.models.mlp.MLP"),
    ],
)
def test_a_section_builds_one_kind_of_thing(path: str, target: str) -> None:
    assert message_of(schema.check, {"_target_": target}, path).startswith(f"{path}._target_: got {target!r}, ")


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.open",
        "builtins.eval",
        "torch.load",
        "numpy.load",
        "shutil.rmtree",
        "subprocess.run",
        "batchscope.train.os.system",
        "batchscope.train.train",
        "lightning.fabric.utilities.cloud_io._load",
        "batchscope.cli.train.subprocess.run",
        "batchscope.data.torchvision_images.shutil.rmtree",
        "batchscope.data.torchvision_images.FileLock",
        "lightning.fabric.utilities.cloud_io.torch.load",
        "torch.optim.adamw.torch.load",
        "torch.optim",
        "batchscope.data.mnist.Missing",
        "batchscope.data.mnist.MNIST.load",
        "batchscope",
        "batchscope.",
        "batchscopes.evil.Thing",
        "",
        5,
        ["batchscope.data.mnist.MNIST"],
    ],
)
def test_a_target_that_could_run_somebody_elses_code_is_refused(target: Any) -> None:
    message = message_of(schema.check, {"_target_": target, "x": 1}, "model")
    assert message == f"model._target_: got {target!r}, takes a Module class of batchscope"


def exported(module: str) -> list[str]:
    return [f"{module}.{name}" for name in importlib.import_module(module).__all__]


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("model", "batchscope.models.cnn.SimpleCNN"),
        ("data", "batchscope.data.sequential_mnist.SequentialMNIST"),
        ("optimizer", "batchscope.training.optimizer.SGD"),
        ("trainer", "lightning.Trainer"),
        ("trainer", "lightning.pytorch.Trainer"),
        ("search", "batchscope.sweep.search.BatchSizeSearch"),
        *(("callbacks.mine", name) for name in exported("lightning.pytorch.callbacks")),
        *(("logger.mine", name) for name in exported("lightning.pytorch.loggers")),
        *(("trainer.strategy", name) for name in exported("lightning.pytorch.strategies") if "Registry" not in name),
        *(("trainer.profiler", name) for name in exported("lightning.pytorch.profilers")),
    ],
)
def test_what_a_section_is_for_is_allowed(path: str, target: str) -> None:
    assert schema.check({"_target_": target}, path) is None


# --- class attributes ------------------------------------------------------------------------------------------------


def test_a_class_attribute_is_read_and_inherited(write: Callable[..., None]) -> None:
    write(
        base="""
        from typing import ClassVar
        class Base:
            kind: ClassVar[str] = "image"
            accepts = ("a", "b")
        """,
        one="""
        from .base import Base
        class Same(Base):
            kind: str
        class Other(Base):
            kind = "sequence"
        """,
    )
    assert schema.class_attribute("toy.one.Same", "kind") == "image"
    assert schema.class_attribute("toy.one.Other", "kind") == "sequence"
    assert schema.class_attribute("toy.one.Other", "accepts") == ("a", "b")


@pytest.mark.parametrize("target", ["toy.one.Thing", "toy.one.build", "toy.one.Missing", "missing.Thing"])
def test_a_class_attribute_that_is_not_there_is_none(target: str, write: Callable[..., None]) -> None:
    write(one="class Thing: other = 1\ndef build(): pass")
    assert schema.class_attribute(target, "kind") is None


def test_every_class_that_our_own_configs_name_can_be_read() -> None:
    nodes = [OmegaConf.to_container(OmegaConf.load(file), resolve=False) for file in CONFIGS.glob("*/*.yaml")]
    nodes += [child for node in nodes for child in node.values() if isinstance(child, dict)]
    targets = {node["_target_"] for node in nodes if "_target_" in node}
    assert len(targets) > 10
    assert {target for target in targets if schema.signature_of(target) is None} == set()
