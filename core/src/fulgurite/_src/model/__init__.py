"""What a user writes: modules, and what their steps receive."""
