"""One file per stage or study: library parts composed, no new logic."""
