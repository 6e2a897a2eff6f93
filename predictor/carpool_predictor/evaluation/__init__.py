"""`carpool evaluate`: every table and figure of the model cards, from the measurements."""
