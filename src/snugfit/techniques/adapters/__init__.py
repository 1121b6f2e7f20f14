"""The slot `adapters`: the trained weights, all of the model's or small ones added to a frozen model."""
