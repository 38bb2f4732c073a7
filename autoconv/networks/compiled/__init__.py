"""A network that is ready to run: chosen, run, listed, saved and loaded again."""
