"""The whole verl trainer on a machine without a GPU, for tests: two logical devices, gloo, and a small model."""
