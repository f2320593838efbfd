"""`diloco train` as a user starts it: real processes, signals and folders."""
