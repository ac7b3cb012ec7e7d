"""The token store: its specification, its writer and its reader."""
