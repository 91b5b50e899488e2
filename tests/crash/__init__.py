"""What crashes leave behind."""
