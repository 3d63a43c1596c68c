"""Files of adapters: their names, their tensors, what they change."""
