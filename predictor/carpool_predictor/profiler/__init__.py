"""`carpool profile`: measures training steps on a real GPU, alone and in pairs."""
