"""Meshes, specs, rules, reshards and collectives, as values."""
