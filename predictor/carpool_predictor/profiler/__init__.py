"""`carpool profile`: measures training steps on a real GPU, alone and in pairs, for models to learn from.

May import `catalog`, to build what it measures.
"""
