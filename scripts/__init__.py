"""What the Makefile runs beside the tools of others."""
