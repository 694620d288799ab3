"""A batch in chunks: how it is cut, run, and joined again."""
