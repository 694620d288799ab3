"""Compares a plan with the plain model on copies of a call, before it is trusted."""
