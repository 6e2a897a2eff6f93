"""What is tried out on a real GPU: the agent's own code, real training processes, and what came of it as a file."""
