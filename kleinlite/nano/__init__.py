"""klein-nano: the bundled weights (this folder, in the released layout), and their judge."""
