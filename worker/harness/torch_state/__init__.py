"""What a model, its tensors and torch itself hold, and how it is put back. Knows no plan."""
