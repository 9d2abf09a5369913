"""Several optimizers in one step for Fulgurite: GANs, frozen parts, accumulation, constraints."""
