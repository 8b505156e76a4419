"""Sweeps over HTTP: every point is an ordinary job.

``wire`` has the JSON's shape, ``asking`` makes requests of a body, ``answering`` makes rows and a
report of what the store has.
"""
