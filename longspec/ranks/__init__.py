"""Processes that run together: agreement between them, and a watch over each other."""
