"""The feature `loops`: training in the user's own loop, either a Trainer of transformers or a hand-written
loop.
"""
