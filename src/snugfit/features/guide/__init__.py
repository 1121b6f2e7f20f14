"""The feature `guide`: the experiments of Hugging Face's single-GPU training guide, predicted and
measured.
"""
