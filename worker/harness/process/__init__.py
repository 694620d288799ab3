"""How the child process runs the script, and what the script may leave behind."""
