"""From a model's name to its loaded parts: the registry, the download, the configs, the files, and writing a model."""
