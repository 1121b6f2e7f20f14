"""Text, plots and pages of results."""
