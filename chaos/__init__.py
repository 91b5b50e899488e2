"""Chaos: real processes, faults by a seed, and a checker of every promise."""
