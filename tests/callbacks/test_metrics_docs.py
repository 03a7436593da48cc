"""docs/measuring.md lists the metrics as they are declared, and the callbacks log no other."""

from pathlib import Path

from batchscope.callbacks.device import LOGGED
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.records.metrics import METRICS
from tests.callbacks.test_throughput import fit

DOCS = Path(__file__).parents[2] / "docs" / "measuring.md"


def test_the_table_of_metrics_has_the_declared_keys_and_units() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("## Metrics")[2].partition("##")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines() if line.startswith("| `")]
    assert [(key.strip("`"), unit) for key, unit, _ in rows] == [(m.key, m.unit) for m in METRICS.values()]
    assert all(meaning for *_, meaning in rows)


def test_every_logged_metric_is_declared() -> None:
    memory = fit(ThroughputMonitor(calibrate=False, verbose=False))
    logged = {key for _, row in memory.rows for key in row} - {"epoch"}
    assert logged | set(LOGGED) <= set(METRICS)
