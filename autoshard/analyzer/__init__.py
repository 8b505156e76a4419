"""Turn a model into a graph of ops and shapes."""
