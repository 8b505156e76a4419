"""Cluster presets, as data files that each name their source."""
