"""The tables of each database."""
