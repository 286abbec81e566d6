"""The training step: objectives, optimizers, state, metrics."""
