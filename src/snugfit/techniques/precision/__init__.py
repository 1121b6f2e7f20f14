"""In which number formats weights live and products are computed."""
