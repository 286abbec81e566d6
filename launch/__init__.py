"""Processes and I/O: a control plane that never imports jax, and workers."""
