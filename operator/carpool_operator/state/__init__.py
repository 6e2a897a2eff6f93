"""What is known of a job and of what stands around it: attempts, conditions, the GPUs there are, what was learned.

Values and pure functions of them; `snapshot` holds all that a decision looks at. It imports `workers`.
"""
