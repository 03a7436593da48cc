"""An option is declared in the signature that takes it: read from source text, checked, and asked what it is for."""

import sys
from math import inf, nan
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args

import pytest
from lightning.fabric.plugins.precision import precision

from batchscope.options.check import check_node
from batchscope.options.groups import CONFIGS, load, nodes_of_configs
from batchscope.options.purpose import only_observes, purpose_of, with_speed_of
from batchscope.options.signatures import Signature, class_attribute, live_signature, signature_of
from batchscope.options.trainer import OBSERVERS, TRAINER
from batchscope.options.types import Choice, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Purpose, Seed
from batchscope.options.values import check_value, choices_in
from tests.support.command_lines import composed, refusal
from tests.support.own_package import Write

THING = "mynet.one.Thing"
BASES = """
class Base:
    kind: ClassVar[str] = 'image'
    accepts = ('a', 'b')
    def __init__(self, size: int): pass
class Middle(Base): pass
"""
IMPORTS = {
    "from .base import Base": "Base",
    "from .base import *": "Base",
    "from . import base": "base.Base",
    "import mynet.base": "mynet.base.Base",
    "import mynet.base as b": "b.Middle",
    "from mynet import Base": "Base[int]",
}
INIT = "class Thing:\n    def __init__(self,"
FROM_BASE = "from .base import *\nclass Thing(Base):\n    def __init__(self,"
OF_TYPES = "from batchscope.options.types import PositiveInt"
OTHERS = "import other\nclass Thing(other.Base)"
ABC = {"a": PositiveInt, "b": Literal["x"], "c": float | None, "d": None}
# The source of Thing beside `base`, and its signature; None: it cannot be read to its end, and takes anything.
SIGNATURES: list[tuple[str, Signature | None]] = [
    (f"{OF_TYPES}\n{INIT} a: PositiveInt, /, b: Literal['x'], *, c: float | None, d=1): pass", Signature(ABC)),
    (f"{INIT} a: float = None, *, b: int = None): pass", Signature({"a": float | None, "b": int | None})),
    (f"{INIT} a: (int, int) = None, b: 'list of int' = None): pass", Signature({"a": None, "b": None})),
    (f"{INIT} a): ...\n    def __init__(self, b: int): pass", Signature({"b": int})),
    ("def Thing(size: int, **kwargs): pass", Signature({"size": int}, takes_any=True)),
    ("from .base import Base as Thing", Signature({"size": int})),
    (f"{FROM_BASE} a, **rest): pass", Signature({"a": None, "size": int})),
    (f"{FROM_BASE} size: str, **rest): pass", Signature({"size": str})),
    (f"{FROM_BASE} a: float): pass", Signature({"a": float})),
    ("def Thing(size: __import__('os').mkdir('ran'), a: open('ran', 'w')): pass", Signature({"size": None, "a": None})),
    (f"{OTHERS}: pass", None),
    (f"{OTHERS}:\n    def __init__(self, size: int, **kwargs): pass", None),
    ("class Base:\n    def __init__(self, size): pass\ndef made(): pass\nclass Thing(made(), Base): pass", None),
    (f"@made\n{INIT} size): pass", None),
    ("@made\ndef Thing(size): pass", None),
    ("from .one import Thing", None),
    ("class Thing(Thing):\n    def __init__(self, **kwargs): pass", None),
    (f"{FROM_BASE} **rest):\n        self.rest = rest", None),
    (f"{FROM_BASE} **rest):\n        super().__init__(3)\n        self.save_hyperparameters()", None),
    (
        f"{FROM_BASE} **rest):\n        super().__init__(**rest)\n        self.save_hyperparameters()",
        Signature({"size": int}),
    ),
    ("def broken(:", None),
]


@pytest.mark.parametrize(("text", "expected"), SIGNATURES)
def test_a_signature_is_that_of_the_constructor_or_function(text, expected, package: Write) -> None:
    package(__init__="from .base import *", base=BASES, one=text)
    signature = signature_of(THING)
    assert signature == expected or (expected is None and signature.takes_any)
    assert not Path("ran").exists()


@pytest.mark.parametrize(("imports", "base"), IMPORTS.items())
def test_a_class_attribute_is_read_and_inherited_and_so_is_a_signature(imports: str, base: str, package: Write) -> None:
    classes = f"class Thing({base}): kind: str\nclass Other(Thing): kind = 'sequence'"
    package(__init__="from .base import *", base=BASES, one=f"{imports}\n{classes}")
    assert (class_attribute(THING, "kind"), class_attribute("mynet.one.Other", "kind")) == ("image", "sequence")
    assert class_attribute("mynet.one.Other", "accepts") == ("a", "b")
    assert signature_of("mynet.one.Other") == Signature({"size": int})


def test_a_name_of_ours_that_a_module_has_from_elsewhere_says_nothing(package: Write) -> None:
    package(one=f"from typing import Text\n{INIT} a: Text = 'x', b: int = 3): pass")
    signature = signature_of(THING)
    assert signature is not None
    assert (signature.parameters, signature.defaults) == ({"a": None, "b": int}, {"a": "x", "b": 3})


def test_a_default_in_whose_place_a_subclass_gives_a_value_holds_no_more(package: Write) -> None:
    base = "class Base:\n    def __init__(self, size: int = 1, how: str = 'a'): pass"
    package(base=base, one=f"{FROM_BASE} a=3, **rest):\n        super().__init__(how='b', **rest)")
    signature = signature_of(THING)
    assert signature is not None
    assert (signature.parameters, signature.defaults) == ({"a": None, "size": int, "how": str}, {"a": 3, "size": 1})


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
    targets = {node["_target_"] for nodes in nodes_of_configs().values() for node in nodes if "_target_" in node}
    assert len(targets) > 10
    assert {target for target in (*targets, *OBSERVERS) if signature_of(target) is None} == set()
    assert [*signature_of("batchscope.models.cnn.SimpleCNN").parameters][:3] == ["spec", "channels", "hidden_size"]
    of_mnist = "batch_size num_workers seed augment pipeline root num_val num_train num_test offline"
    # DDPStrategy keeps find_unused_parameters for torch.
    assert signature_of("lightning.pytorch.strategies.DDPStrategy").takes_any
    assert [*signature_of("batchscope.data.mnist.MNIST").parameters] == of_mnist.split()
    assert "lr" in signature_of("torch.optim.AdamW").parameters
    assert class_attribute("batchscope.models.sequence.LSTMCellModel", "accepts") == ("image", "sequence")


def test_what_is_declared_of_the_trainer_is_what_the_lightning_of_today_takes() -> None:
    check_node({"_target_": "lightning.Trainer", "strategy": "foo", "plugins": "foo"}, "trainer")  # are left to it
    assert set(TRAINER) <= set(signature_of("lightning.Trainer").parameters)
    literals = (precision._PRECISION_INPUT_INT, precision._PRECISION_INPUT_STR, precision._PRECISION_INPUT_STR_ALIAS)
    assert set(choices_in(TRAINER["precision"])) == {value for literal in literals for value in get_args(literal)}


# --- a value is what its annotation takes, and a node has the options of its target ----------------------------------

SIZES = "a list, each item a whole number"
SPEED = Annotated[PositiveInt | None, Purpose.SPEED]
HUGE = 2**63
# An annotation, accepted values, refused values, and its description.
ANNOTATIONS = [
    (int, [3], [3.0, True, "3", None, ""], "a whole number"),
    (float, [3, 0.5], ["fast", nan, inf, -inf, True], "a number"),
    (bool, [False], [1, "yes"], "true or false"),
    (str, [""], [5], "a text"),
    (int | None, [None, 3], ["x"], "a whole number or null"),
    (Optional[int], [None], ["x"], "a whole number or null"),  # noqa: UP045 - as other people's code still spells it
    (Union[int, str], ["x", 3], [None], "a whole number or a text"),  # noqa: UP007
    (Literal["memory", "device"], ["device"], ["x"], "memory or device"),
    (Literal["memory", "device"], [], ["memry"], "memory or device. Did you mean 'memory'?"),
    (Literal["a", 1] | None, [1, "a", None], ["b", True], "a or 1 or null"),
    (PositiveInt, [1], [0], "a whole number of at least 1"),
    (PositiveInt, [HUGE - 1], [HUGE], "a whole number of at least 1"),
    (NonNegativeInt, [0], [-1], "a whole number of at least 0"),
    (PositiveFloat, [1e-9], [0], "a number above 0"),
    (PositiveFloat, [], [10**400], "a number above 0"),
    (Fraction, [0, 1.0], [1.5, nan], "a number from 0 to 1"),
    (Seed, [2**32 - 1], [2**32, HUGE], "a whole number from 0 to 4,294,967,295"),
    (list[int], [[], [1, 2]], [1, ["a"]], SIZES),
    (list[int] | str, ["auto", [1]], [], ""),
    (list[PositiveInt] | tuple[PositiveInt, ...], [[1]], [[0]], f"{SIZES} of at least 1"),
    (tuple[float, ...], [[1, 0.5]], [], ""),
    (tuple, [[8, 16]], [8], "a list"),
    (tuple[int, float], [[1, 0.5]], [[0.5, 1], [1]], "a list of 2 items: a whole number, a number"),
    *((kind, [{"_target_": "torch.nn.ReLU"}], [], "") for kind in (int, list[float])),  # that Hydra builds
    (list[float], [[{"_target_": "math.sqrt"}]], [], ""),
    (dict[str, int], [{"a": 1}], [[1]], "dict"),
    (SPEED, [None, 1], [0], "a whole number of at least 1 or null"),
    (Choice | dict, ["x"], [], ""),
    (None, [object()], [], ""),
]


@pytest.mark.parametrize(("annotation", "right", "wrong", "takes"), ANNOTATIONS)
def test_a_value_is_what_its_option_takes_or_is_refused_with_that(annotation, right, wrong, takes) -> None:
    for value in right:
        check_value("model.size", value, annotation)
    for value in wrong:
        shown = "null" if value is None else "nothing" if value == "" else repr(value)
        message = f"model.size: got {shown}, takes {takes}"
        assert refusal(check_value, "model.size", value, annotation).removesuffix(".") == message


def test_the_choices_of_an_annotation_are_those_that_it_lists() -> None:
    assert choices_in(Literal["a", 1] | None) == ["a", 1]
    assert choices_in(Annotated[bool | Literal["a"], Purpose.SPEED]) == ["a"]
    for kind in (None, str | None, Choice, dict, list[str], object, "Quoted", PositiveInt):
        assert choices_in(kind) == []


TOO_SMALL = "batch_size: got 0, takes a whole number of at least 1."
NO_NAME = "takes the full name of a class or function"
MISSPELT = "batch_sise: no such option. Did you mean 'batch_size'? data takes spec, batch_size, part."
NODES: list[tuple[dict[str, Any], str]] = [
    *(({"batch_size": 4, **more}, "") for more in ({}, {"_args_": [1]}, {"_partial_": True})),
    ({"_convert_": "none", "_recursive_": False}, ""),
    ({"batch_size": 4, "batch_sise": 3}, MISSPELT),
    ({"part": {"a": [{"_target_": THING, "batch_size": 0}]}}, f"part.a.0.{TOO_SMALL}"),
    ({"_args_": {"a": [{"_target_": THING, "batch_size": 0}]}}, f"_args_.a.0.{TOO_SMALL}"),
    *(({"_target_": target}, f"_target_: got {target!r}, {NO_NAME}") for target in (5, None, "", ".", [THING])),
    ({"_arg_": []}, "_arg_: no such option; "),
    *(({"_target_": target, "any": 1}, "") for target in ("torch.nn.Missing", "missing.Thing", f"{THING}.made")),
    # with an annotation that cannot be read
    *(({"_target_": "mynet.one.odd", **dict.fromkeys("abcde", value)}, "") for value in (None, 1, "x", [1], {"a": 1})),
]
ONE = """
from batchscope.options.types import PositiveInt
class Thing:
    def __init__(self, spec, batch_size: PositiveInt = 1, part=None): pass
def odd(a: timedelta, b: Optional[nn.Module], c: 'Quoted', d: Optional['Quoted'], e: int + 1): pass
"""


@pytest.mark.parametrize(("node", "reason"), NODES)
def test_a_node_has_the_options_that_its_target_takes(node: dict[str, Any], reason: str, package: Write) -> None:
    package(one=ONE)
    if reason:
        assert refusal(check_node, {"_target_": THING, **node}, "data").startswith(f"data.{reason}")
    else:
        check_node({"_target_": THING, **node}, "data")


@pytest.mark.skipif(sys.version_info < (3, 14), reason="this Python evaluates annotations where they stand")
def test_a_parameter_is_known_whose_annotation_only_a_type_checker_imports() -> None:
    names: dict[str, Any] = {}
    exec("class Net:\n    def __init__(self, spec: DataSpec, width: int = 32): ...", names)  # noqa: S102 - other versions of Python cannot import it from a file
    assert [*live_signature(names["Net"]).parameters] == ["spec", "width"]


# --- what an option is for -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    callback = "+callbacks.mine={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss}"
    return composed("+trainer.max_time={hours: 1}", callback)


PURPOSES = {
    Purpose.RESULT: "seed channels_last model.hidden_size data.batch_size data.num_val optimizer.lr"
    " trainer.devices trainer.precision trainer.limit_val_batches model._target_ callbacks.checkpoint.monitor"
    " callbacks.checkpoint.mode callbacks.checkpoint._target_ callbacks.mine.patience callbacks.mine._target_"
    " nothing nothing.at.all .",
    Purpose.LENGTH: "trainer.limit_test_batches trainer.max_epochs trainer.max_steps trainer.max_time.hours"
    " trainer.min_steps",
    Purpose.SPEED: "trainer.accelerator trainer.profiler trainer.profiler.dirpath data.pipeline data.num_workers"
    " compile",
    Purpose.READ_FROM: "data.root data.offline resume",
    Purpose.WRITTEN_TO: "callbacks.mine.dirpath logger.csv.save_dir trainer.default_root_dir",
    Purpose.SEARCH: "search search.start search.minutes",
    Purpose.OBSERVATION: "test optimized_metric logger logger.csv logger.tensorboard.name"
    " logger.csv._target_ trainer.enable_progress_bar callbacks.checkpoint.every_minutes"
    " callbacks.checkpoint.every_n_steps callbacks.curves._target_ callbacks.curves.any callbacks.progress.any",
}


@pytest.mark.parametrize("purpose", PURPOSES)
def test_an_option_is_for_what_its_declaration_says(purpose: Purpose, config: dict[str, Any]) -> None:
    options = PURPOSES[purpose].split()
    assert {option: purpose_of(option, config) for option in options} == dict.fromkeys(options, purpose)


def test_an_option_of_a_nested_node_is_for_what_the_class_of_that_node_says(package: Write) -> None:
    package(
        inner="from batchscope.options.types import *\nclass Source:\n"
        "    def __init__(self, root: Annotated[str, Purpose.READ_FROM], size: int): pass\n"
    )
    data = {"_target_": "mynet.net.Net", "source": {"_target_": "mynet.inner.Source", "root": "x", "size": 3}}
    purposes = [purpose_of(f"data.source.{name}", {"data": data}) for name in ("root", "size")]
    assert purposes == [Purpose.READ_FROM, Purpose.RESULT]


def test_a_configuration_takes_the_options_of_another_one_that_change_the_speed_alone() -> None:
    data = {"_target_": "batchscope.data.copy_memory.CopyMemory", "num_workers": 4, "batch_size": 8}
    config = {"data": data, "compile": True, "tags": ["again"]}
    faster = {"data": {**data, "num_workers": 0, "batch_size": 9}, "compile": False, "tags": []}
    assert with_speed_of(config, faster) == {"data": {**data, "num_workers": 0}, "compile": False, "tags": ["again"]}


def test_what_is_only_observed_is_declared_by_every_installed_callback_but_the_checkpoints() -> None:
    nodes = load(CONFIGS / "callbacks" / "default.yaml")
    named = {name: node["_target_"] for name, node in nodes.items() if node}
    assert {name for name, target in named.items() if not only_observes(target)} == {"checkpoint"}


OF_A_CALLBACK = [{"_target_": target} for target in (["x"], "os.system", "", ".", "batchscope.", "mine.Callback")]


@pytest.mark.parametrize("callbacks", [None, 5, {"a": []}, *({"a": node} for node in OF_A_CALLBACK)], ids=str)
def test_whatever_a_record_holds_an_unknown_option_changes_the_result(callbacks: Any) -> None:
    for option in ("callbacks", "callbacks.a", "callbacks.a.b", "callbacks.a._target_", "callbacks.a.b.c", ""):
        assert purpose_of(option, {"callbacks": callbacks}) is purpose_of(option, {}) is Purpose.RESULT
