"""Training adapters on a folder of pictures: what `kleinlite train-lora` does."""
