"""How a train state crosses `jax.jit`, and the compiled step."""
