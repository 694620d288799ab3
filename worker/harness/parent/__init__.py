"""What the child process tells its parent, and what the ranks of a launch agree on."""
