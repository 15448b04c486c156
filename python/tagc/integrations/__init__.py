"""tagc in training loops that other libraries own: transformers, accelerate, lightning, torchtitan. One module for each, which
imports that library; none of them is needed otherwise. docs/pytorch.md has a recipe for each."""
