"""Timing candidates against each other, and when to."""
