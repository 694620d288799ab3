"""Finds parts of a model: blocks, heads, token embeddings, convolutions."""
