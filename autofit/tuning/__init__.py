"""The search: asks for plans, launches trials, and confirms the winner."""
