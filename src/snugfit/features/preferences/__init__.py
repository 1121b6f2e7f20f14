"""Training on preferences and from a teacher: rewards of answers, policies that prefer chosen answers to
rejected ones, and students of another model.
"""
