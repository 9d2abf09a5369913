"""The core. What others import is in `fulgurite`, `fulgurite.plugins`, `fulgurite.metrics` and
`fulgurite.errors`; everything in here may change."""
