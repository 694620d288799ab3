"""A package that is run by `python -m packaged`."""
