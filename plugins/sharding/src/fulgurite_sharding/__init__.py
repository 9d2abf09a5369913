"""Meshes for Fulgurite: data, parameters and optimizer state over devices and processes."""
