"""Small worlds to test in: a problem to train on, and workers in turn, in threads, or in processes."""
