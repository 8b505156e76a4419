"""Published training runs, priced as a plan is."""
