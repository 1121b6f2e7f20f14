"""A user's Trainer in several processes."""
