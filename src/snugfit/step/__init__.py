"""Job and recipe become one runnable step: the hinge between predicting and measuring."""
