"""From run records to a table, plots and a recommendation. Nothing but records and step files is read; nothing imports torch."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .report import Report as Report
    from .report import analyse as analyse
    from .write import write_report as write_report
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
