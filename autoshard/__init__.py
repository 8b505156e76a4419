"""Find how to shard a PyTorch model over a device mesh, and run the result."""
