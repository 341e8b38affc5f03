"""One script per paper, and the code that the scripts share."""
