"""From many run records to one table, one plot set, one recommendation.

Only run records are read: nothing here imports torch, and anything can be reported again later.
"""

from .report import Report, write_report

__all__ = ["Report", "write_report"]
