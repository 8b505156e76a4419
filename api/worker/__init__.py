"""Processes that claim jobs and plan them."""
