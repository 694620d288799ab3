"""Lets a script run as if on a GPU, on a machine without one: nothing is computed or allocated."""
