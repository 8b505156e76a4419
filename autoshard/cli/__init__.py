"""The command line: read input, call the planner, write output."""
