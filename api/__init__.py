"""The planning service will stand here; this version has none. It knows only the planner."""
