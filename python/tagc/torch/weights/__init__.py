"""Weights that a trainer sends to others after every step, exactly: sync.py has WeightSync."""
