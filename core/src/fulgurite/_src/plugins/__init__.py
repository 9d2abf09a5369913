"""Selecting, ordering and calling plugins."""
