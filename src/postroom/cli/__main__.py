"""Runs the command line as ``python -m postroom.cli``."""

from __future__ import annotations

from . import main

main()
