"""The computation of updates from gradients, and the states that it needs."""
