"""The doors of training: where planning and training meet, and a user's own objects become a run."""
