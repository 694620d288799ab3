"""Trials: measured windows of steps, traces of losses, and the search for the largest size."""
