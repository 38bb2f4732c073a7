"""Verbs about whole networks."""
