"""Layers that follow each other in one kernel: what lies between them never leaves the caches of the thread."""
