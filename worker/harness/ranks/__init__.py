"""Trains a single-process script in several processes, the ranks, as if it were one."""
