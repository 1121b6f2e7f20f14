"""Accuracy of drawn jobs as tables, plots and pages."""
