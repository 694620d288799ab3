"""One file for each change of autofit's tables."""
