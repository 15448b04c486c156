"""Collectives: for loops and optimizers that call them by themselves, without a wrapper around the model."""
