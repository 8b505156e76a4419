"""The resources, a file each."""
