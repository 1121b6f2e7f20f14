"""What users have, read into a job and a recipe, checked; and recipes written for other libraries to run."""
