"""What proves postroom, offered to its users: real throw-away servers and pytest fixtures.

Import from the modules: pytest loads this package in every run, so it imports nothing itself.
"""
