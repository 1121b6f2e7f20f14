"""The guide and accuracy draws, as tables, plots and pages."""
