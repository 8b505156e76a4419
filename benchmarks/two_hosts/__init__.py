"""Two hosts on one machine, for :mod:`benchmarks.network`."""
