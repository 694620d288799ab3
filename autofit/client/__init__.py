"""Searches through a service (``autofit serve``), shown as a local search."""
