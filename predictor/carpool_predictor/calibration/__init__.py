"""What is learned in a cluster from jobs that ran: a document, how it grows, and what it says of the next job.

May import `cost_models` and `features`.
"""
