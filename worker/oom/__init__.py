"""Decides whether a failure was caused by a lack of memory."""
