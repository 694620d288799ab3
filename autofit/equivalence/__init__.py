"""Tells from two traces of losses and updates whether they show the same training."""
