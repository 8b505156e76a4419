"""Pictures of a trace: who talks to whom over which axis, and a timeline."""
