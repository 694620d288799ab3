"""Tells running out of memory from every other way to fail."""
