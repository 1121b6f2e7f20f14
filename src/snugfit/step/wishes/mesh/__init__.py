"""What stands behind the wish for several processes, beside its handler: axes of their mesh."""
