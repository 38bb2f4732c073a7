"""Searching a grid of candidates too wide to be timed whole."""
