"""Experts of decoders as grouped products, whose sizes do not depend on the routing."""
