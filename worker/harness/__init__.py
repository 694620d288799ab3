"""Child side of a trial or a real run: becomes the user's script, unmodified, under a plan."""
