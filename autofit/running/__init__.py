"""``autofit run``: the real training in the foreground, started again when memory runs out."""
