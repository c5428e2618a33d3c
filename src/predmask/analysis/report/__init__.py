"""The report: a run on one self-contained HTML page."""

from predmask.analysis.report.page import report, write_report

__all__ = ["report", "write_report"]
