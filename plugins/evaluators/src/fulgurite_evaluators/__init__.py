"""Named evaluations for Fulgurite, along training or in a process of their own, and exact metrics."""
