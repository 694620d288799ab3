"""Decides whether two traces of losses, gradients and updates show the same training."""
