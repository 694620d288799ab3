"""What is put on torch while a script runs, and taken off again."""
