"""The suite `step-time`: its measurements, how the step-time model is fitted, the card.

May import what all suites use (`suites`, `tables`, `figures`), and no other suite.
"""
