"""Functions of torch that several strategies share."""
