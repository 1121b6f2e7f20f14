"""Pictures as plain SVG, and the pages around them."""
