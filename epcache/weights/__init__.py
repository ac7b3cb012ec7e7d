"""Weights from a file or a hub into a backbone: read, fit, repair, report."""
