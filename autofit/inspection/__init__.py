"""What holds a script's memory, what each technique would free, and what grew since a check."""
