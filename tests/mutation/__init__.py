"""Mutation testing: are the tests good enough to notice a small error in the library? See `python -m tests.mutation --help`."""
