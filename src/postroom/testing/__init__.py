"""What tests of applications and of stores need: contracts, pytest fixtures, an idempotency check, real servers.

Import from the modules; this package imports none of them, so that a test pays only for what it uses.
"""
