"""Attention over the packed line on a GPU. schedule.py: what to visit (NumPy). attention.py: the kernels (Triton, imported only by who runs them)."""
