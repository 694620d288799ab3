"""What the child tells its parent, and what its ranks agree on."""
