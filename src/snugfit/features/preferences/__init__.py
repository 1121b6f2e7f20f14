"""Training on preferences: rewards of answers, and policies that prefer chosen answers to rejected ones."""
