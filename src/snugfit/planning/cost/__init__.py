"""What recipes cost: lower bounds, traces of parts of a step, seconds on the queue, worker processes."""
