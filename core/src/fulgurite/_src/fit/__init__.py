"""One fit: the loop, its actions and its records."""
