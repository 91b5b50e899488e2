"""The store in an SQL database."""
