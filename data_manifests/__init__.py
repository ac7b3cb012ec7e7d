"""One TOML per data set: splits, counts, classes, layout, source, licence."""
