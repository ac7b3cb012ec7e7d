"""How each data set lies on disk, and what its manifest says of it."""
