"""Results in, text, plots and pages out."""
