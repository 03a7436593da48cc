"""The order of a run's callbacks: those that measure, those that end a run by its steps, those that end it at a signal."""

from types import SimpleNamespace

import pytest

from batchscope._lightning import callbacks_of
from batchscope.checkpointing.graceful_shutdown import GracefulShutdown
from batchscope.training.run import _Run
from tests.support.command_lines import composed

# In each list, a callback stands before the next.
ORDERS = [
    ["Hooks", "WaitUntilQuiet", "ThroughputMonitor", "StopWhenKnown", "Visits", "GracefulShutdown", "Checkpoints"],
    ["Hooks", "StopOnNonFinite", "DeviceMonitor", "ThroughputMonitor", "ProgressBar", "Visits"],
]


@pytest.mark.parametrize("order", ORDERS, ids=["what measures and what ends a run", "what stands beside the monitor"])
def test_callbacks_stand_in_the_order_that_their_yaml_says(order, tmp_path) -> None:
    config = composed("experiment=throughput", "callbacks=wait_until_quiet", "data=copy_memory", "model=lstm_cell")
    config["trainer"]["enable_checkpointing"] = True
    run = _Run(config, tmp_path, {}, GracefulShutdown(), SimpleNamespace())
    kinds = [type(callback).__name__ for callback in callbacks_of(run.trainer)]
    assert [kind for kind in kinds if kind in order] == order
