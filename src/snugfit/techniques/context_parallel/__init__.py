"""The slot `context_parallel`: sequences are whole on each GPU, or split over several."""
