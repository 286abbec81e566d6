"""The control plane: keeps a worker training, and never imports jax."""
