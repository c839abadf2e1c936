"""Runs over many items that can be interrupted: their results on disk, and the ranks that share the work."""
