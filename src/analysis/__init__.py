"""From run records to a table, plots and a recommendation. Nothing but records and step files is read; nothing imports torch."""

from .report import Report, analyse, write_report

__all__ = ["Report", "analyse", "write_report"]
