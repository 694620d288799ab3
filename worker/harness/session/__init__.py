"""One script under one plan: its roots, its steps, and what is known of it."""
