"""One file for each change of our tables."""
