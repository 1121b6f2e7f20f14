"""Plans as tables and plots."""
