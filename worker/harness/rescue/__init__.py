"""A plan in reserve: what a step goes on under when memory runs out in it."""
