"""Kernels for what lies between convolutions in a network; each `Unit` is for arrays of one shape.

The first argument of a kernel is its output, then come its inputs. Arrays are contiguous and of float32, unless it says
otherwise.
"""
