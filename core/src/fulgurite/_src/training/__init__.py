"""The inside of a training step."""
