"""What parent and child tell each other, and what a trial comes to."""
