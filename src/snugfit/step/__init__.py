"""Job and recipe become one runnable step: the hinge between what is foreseen and what is seen."""
