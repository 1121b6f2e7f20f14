"""Charts as plain data, and the pages, plots and notebook cells that show them."""
