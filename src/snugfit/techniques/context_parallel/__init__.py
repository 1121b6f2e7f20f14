"""The division of sequences: whole on each GPU, or shared by several."""
