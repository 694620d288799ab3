"""The plans of a search, their order by memory, and a static estimate of the memory of each."""
