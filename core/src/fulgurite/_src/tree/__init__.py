"""Functions on pytrees: paths, selections, shapes, annotations."""
