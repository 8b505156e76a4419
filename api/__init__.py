"""The Python interface and its wire types."""
