"""The experiments of Hugging Face's single-GPU guide."""
