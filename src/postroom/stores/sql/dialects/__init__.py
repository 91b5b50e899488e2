"""The SQL of each database."""
