"""What one side of postroom does under one condition, for ratios of postroom against itself or against plain SQL."""
