"""What stands around the Euler loop of chapter 6: the arguments of a call, the model's parts, strips, picture files."""
