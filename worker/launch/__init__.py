"""Starts one process or a group of ranks, limits its time and memory, and ends it."""
