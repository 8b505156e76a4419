"""Benchmarks whose figures the documentation gives."""
