"""The instruments: which tokens a mask drops, whether it was right, and what a run came to."""
