"""The machine, measured: what a processor does at most, and what moving data, calling and waiting cost on it."""
