"""One script a paper, and what they share."""
