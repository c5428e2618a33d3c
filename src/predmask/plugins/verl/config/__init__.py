"""Configuration of the plug-in, which verl and Hydra find by their own search."""
