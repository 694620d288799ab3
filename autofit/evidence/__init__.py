"""What was verified, of which script and plan; makes it where there is none."""
