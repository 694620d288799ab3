"""Renders a search and its results as text."""
