"""The suite `slowdown`: its measurements, how the slowdown model is fitted, baselines, the card.

May import what all suites use (`suites`, `tables`, `figures`), and no other suite.
"""
