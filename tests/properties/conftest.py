"""Hypothesis without deadlines, because the first example compiles; the same examples each time where `CI` is set."""

import os

from hypothesis import settings

settings.register_profile("properties", deadline=None, max_examples=60, derandomize="CI" in os.environ)
settings.load_profile("properties")
