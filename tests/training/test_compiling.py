"""`compile=`: the network alone is compiled; checkpoints, rates and the record are those of any run."""

import shutil
from pathlib import Path

import pytest
import torch

from batchscope.data.spec import DataSpec
from batchscope.models import mlp
from batchscope.training.task import Task
from tests.checkpointing.support import OUT
from tests.support.runs import EVERY_4, SMALL, last, record
from tests.training.support import completed

can_compile = shutil.which("g++") is not None or shutil.which("clang++") is not None


@pytest.mark.slow
@pytest.mark.skipif(not can_compile, reason="torch.compile needs a C++ compiler")
def test_the_checkpoint_of_a_compiled_run_is_one_of_any_other(tmp_path: Path) -> None:
    # 20 steps in 2 epochs; the last batch of an epoch holds 4 samples in place of 8.
    words = [word for word in SMALL if not word.startswith(("data=", "data.delay", "model"))]
    words += ["data=digits", "model=mlp", "model.hidden_sizes=[8]", EVERY_4, OUT]
    completed(tmp_path / "plain", *words)
    completed(tmp_path, *words, "compile=true")
    out, metrics = tmp_path / "out", record(tmp_path / "out")["metrics"]
    plain, weights = last(tmp_path / "plain" / "out")["state_dict"], last(out)["state_dict"]
    assert list(weights) == list(plain)
    torch.testing.assert_close(weights, plain, rtol=1e-3, atol=1e-4)
    process = completed(tmp_path, "ckpt=out/checkpoints/best.ckpt", module="batchscope.cli.evaluate")
    tested = {line.split()[0]: float(line.split()[1]) for line in process.said.splitlines() if line.startswith("test/")}
    assert tested == {key: pytest.approx(value, rel=1e-5) for key, value in metrics.items() if "test" in key}


@pytest.mark.parametrize("width", [8, 4])
def test_only_whole_batches_of_training_run_the_compiled_network(width: int) -> None:
    calls: list[torch.fx.GraphModule] = []
    spec = DataSpec("image", (1, 3, 1), "class", 2)
    task = Task(mlp.MLP(spec), spec, None, compile_mode="default")  # torch 2.11 compiles no bare Linear
    task._compiled_samples = 8
    task.model.compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward, dynamic=False)
    try:
        task(torch.ones(width, 1, 3, 1))
        task.eval()(torch.ones(8, 1, 3, 1))
    finally:  # other tests ask whether anything was compiled in this process
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    assert len(calls) == (width == 8)
