"""Writing reservations, binding pods, and giving reservations back."""
