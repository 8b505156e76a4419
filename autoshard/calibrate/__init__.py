"""Measure this machine or cluster, fit the cost model's constants to it, write a cluster file.

    calibrated = calibrate(processes=4)     # or under torchrun, on many hosts
    calibrated.cluster.device.measured      # what was fitted
    calibrated.rows                         # measured beside fitted
    calibrated.save("cluster.toml")         # plan(cluster="cluster.toml") takes it

The way through the files: ``catalogue`` (which operators), ``clock`` (how seconds are taken),
``operators``, ``steps`` and ``messages`` (measuring), ``readings`` (what was measured), ``fit`` and
``fit_messages`` (constants), ``run`` (all of it, on every process), ``document`` (TOML).
"""

from autoshard.calibrate.run import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
