"""Strategies that train on other data: smaller batches, shorter sequences."""
