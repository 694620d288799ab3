"""The child's process: how the script is run in it, and what stays of it afterwards."""
