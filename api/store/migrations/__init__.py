"""Versions of the tables, oldest first; each is one file in ``versions``, and none is changed."""
