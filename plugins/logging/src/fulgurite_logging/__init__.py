"""Records of Fulgurite as JSON lines, CSV and console lines, each exactly once."""
