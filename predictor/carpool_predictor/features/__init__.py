"""What is known of a training step, whoever found it out, and what is said where nothing is known.

Records of traced steps, the step at any batch size, when features must not be believed, the errors that all others
raise. Imports no other folder of the predictor.
"""
