"""The command line: parse, call one pipeline, render."""
