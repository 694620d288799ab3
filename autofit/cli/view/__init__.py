"""How a search and its results look on a terminal."""
