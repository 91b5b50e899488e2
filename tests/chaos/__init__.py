"""What chaos leaves intact."""
