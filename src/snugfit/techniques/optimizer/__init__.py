"""The slot `optimizer`: the computation of updates from gradients, and its states."""
