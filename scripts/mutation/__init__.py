"""Mutation testing: changes one line of the package at a time, and runs the tests that should notice."""
