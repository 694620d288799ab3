"""What a model consists of: blocks, heads, token embeddings, convolutions."""
