"""The search through the space of recipes, and the reasons for its result."""
