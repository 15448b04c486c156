"""tagc in the training loops of other libraries: transformers, accelerate, lightning, torchtitan. Each has a
module, and only that module imports the library. docs/guide/trainers.md has a recipe for each."""
