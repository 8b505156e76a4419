"""Run a plan on real ranks."""
