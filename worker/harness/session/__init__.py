"""A session: the roots of one script, their plans, and what is known of the script."""
