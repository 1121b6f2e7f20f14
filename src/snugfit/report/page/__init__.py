"""Pictures as plain SVG, and the pages that hold them."""
