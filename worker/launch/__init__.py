"""Starts one process or a group of ranks, keeps it in its bounds, and ends it."""
