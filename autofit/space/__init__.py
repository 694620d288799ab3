"""The plans there are, which of two is leaner, and what memory each needs by arithmetic."""
