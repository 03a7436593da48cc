"""From run records to a table, plots and a recommendation. Nothing but records and step files is read; nothing imports torch."""

from .report import Report, write_report

__all__ = ["Report", "write_report"]
