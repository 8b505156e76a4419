"""Reports of plans and sweeps: one self-contained HTML page each, and their figures as files.

A page needs nothing from anywhere and no script to be read; it is light or dark as its reader's
system is, and prints. Its one stylesheet and its one script never change, so that a strict
Content-Security-Policy can name them by their hashes.
"""

from autoshard.report.figure import Figure, write_figures
from autoshard.report.page import SCRIPT_SHA256, STYLE_SHA256
from autoshard.report.plan_page import plan_figures, plan_page
from autoshard.report.sweep_figures import sweep_figures
from autoshard.report.sweep_page import sweep_page

__all__ = [
    "SCRIPT_SHA256",
    "STYLE_SHA256",
    "Figure",
    "plan_figures",
    "plan_page",
    "sweep_figures",
    "sweep_page",
    "write_figures",
]
