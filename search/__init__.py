"""Choose a plan by its estimated cost."""
