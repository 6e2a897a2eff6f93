"""The suite `activity`: its measurements, how the activity model is fitted, HotCloud '20's predictor, the card.

May import what all suites use (`suites`, `tables`, `figures`), and no other suite.
"""
