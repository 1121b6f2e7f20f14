"""Support for a user's Trainer in several processes."""
