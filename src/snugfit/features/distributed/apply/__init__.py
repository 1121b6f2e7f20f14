"""Code for several processes besides the wish's handler: axes of their mesh."""
