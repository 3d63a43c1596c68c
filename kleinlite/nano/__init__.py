"""klein-nano: the bundled weights (in `weights`, in the released layout), and their judge."""
