"""klein-nano: the bundled weights (this folder, in the released layout), the recipe that made them, and their judge."""
