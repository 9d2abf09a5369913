"""Commands for authors of Fulgurite plugins."""
