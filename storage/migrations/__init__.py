"""Alembic's folder: how our tables came to be what they are."""
