"""The floor: every family in plain NumPy and SciPy, for any machine and any layer."""
