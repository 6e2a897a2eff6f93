"""The suite `memory`: its measurements, how the memory model is fitted and its bound set, baselines, the card.

May import what all suites use (`suites`, `tables`), and no other suite.
"""
