"""Whether each GPU works on whole sequences, or several share each of them."""
