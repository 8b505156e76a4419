"""One file for each version: 0001, 0002, ..."""
