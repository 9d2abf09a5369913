"""Commands for authors of Fulgurite plugins."""

__tracebackhide__ = True
